"""What can be wrong with bytes or names that a peer sends. Parsers raise these, and the two of frames.py, and nothing else."""

from __future__ import annotations

from typing import ClassVar

from cepheid_ports import CepheidError


class WireError(CepheidError):
    """A peer sent something that the protocol does not allow."""


class BadCommandError(WireError):
    """A command cannot be read: broken protobuf, a required field missing, or text that is not UTF-8."""

    hint: ClassVar[str] = "the client sent bytes that are no valid command; its version is in the CONNECT log line"


class BadTailError(WireError):
    """What follows a SEND or MESSAGE command (checksum, metadata, payload) is malformed."""

    hint: ClassVar[str] = "the bytes were malformed before they were checksummed; look at the producing client"


class ChecksumMismatchError(WireError):
    """The CRC32C in front of metadata and payload does not match them: they were damaged on the way."""

    hint: ClassVar[str] = "the client may send the message again; if it repeats, look for a faulty host or proxy in between"


class InvalidTopicNameError(WireError):
    """Not the name of a topic or namespace."""

    hint: ClassVar[str] = "use [persistent|non-persistent]://tenant/namespace/topic, tenant/namespace/topic, or topic"
