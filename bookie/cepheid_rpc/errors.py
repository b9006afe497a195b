"""Errors of connections to a bookie."""

from __future__ import annotations

from cepheid_ports import CepheidError


class BookieUnavailableError(CepheidError):
    """No answer came: timeout, refused or broken connection. What the bookie did is unknown."""

    retriable = True
    hint = "check that the bookie runs and that its advertised address can be reached"
