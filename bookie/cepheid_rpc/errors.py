"""Errors of the connection to a bookie."""

from __future__ import annotations

from cepheid_ports import CepheidError


class BookieUnavailableError(CepheidError):
    """There was no answer: a timeout, or a refused or broken connection. The bookie may or may not have acted."""

    retriable = True
    hint = "check that the bookie runs and that its advertised address can be reached"
