"""What can be wrong with bytes or names that a peer sends. Every parser of this package raises these and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_wire.frames import Frame


class WireError(CepheidError):
    """A peer sent something that the protocol does not allow."""


class BadFrameError(WireError):
    """The stream lost its framing: nothing behind this point can be read, so the connection must close.

    `frames_before` are the complete frames of the same chunk that came before it. They were sent in good order and deserve
    their treatment; without them the outcome would depend on how the network cut the stream.
    """

    hint: ClassVar[str] = "check that the peer speaks the Pulsar binary protocol on this port, and TLS only on the TLS port"

    def __init__(self, message: str, frames_before: list[Frame], **facts: Any) -> None:
        super().__init__(message, **facts)
        self.frames_before = frames_before


class FrameTooLargeError(BadFrameError):
    """A frame says that it is larger than the connection accepts. Nothing of it was kept."""

    hint: ClassVar[str] = "a client must keep to the max_message_size of CONNECTED; a larger limit is a broker setting"


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
