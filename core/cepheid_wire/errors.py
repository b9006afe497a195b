"""Errors about bytes or names that a peer sends. Parsers raise only these and the two of frames.py."""

from __future__ import annotations

from typing import ClassVar

from cepheid_ports import CepheidError


class WireError(CepheidError):
    """A peer sent something that the protocol does not allow."""


class BadCommandError(WireError):
    """A command cannot be read: invalid protobuf, a missing required field, or text that is not UTF-8."""

    hint: ClassVar[str] = "the client sent an invalid command; its version is in the CONNECT log line"


class BadTailError(WireError):
    """What follows a SEND or MESSAGE command (checksum, metadata, payload) is invalid."""

    hint: ClassVar[str] = "the bytes were malformed before they were checksummed; look at the producing client"


class ChecksumMismatchError(WireError):
    """The CRC32C before metadata and payload does not match them: they were damaged in transit."""

    hint: ClassVar[str] = "the client may send the message again; if it repeats, look for a faulty host or proxy in between"


class InvalidTopicNameError(WireError):
    """Not the name of a topic or namespace."""

    hint: ClassVar[str] = "use [persistent|non-persistent]://tenant/namespace/topic, tenant/namespace/topic, or topic"
