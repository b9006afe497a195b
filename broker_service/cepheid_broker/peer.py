"""What producers, consumers and command families see of a connection: enough to answer, and nothing of its socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from cepheid_broker.publish_window import PublishWindow
from cepheid_security import Principal
from cepheid_wire import ServerError

Buffer = bytes | bytearray | memoryview


class Peer(Protocol):
    """One client connection. Writing to one that is closed does nothing."""

    @property
    def address(self) -> str: ...

    @property
    def client_version(self) -> str: ...

    @property
    def protocol_version(self) -> int:
        """What the client speaks: some commands are for newer ones only (protocol.md §2)."""

    @property
    def principal(self) -> Principal | None:
        """Who the client is; None where clients are not asked."""

    @property
    def connected_at_ms(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def ending(self) -> bool:
        """It is closed, or broke and will be in a moment: nothing reaches the client any more."""

    @property
    def writable(self) -> bool:
        """False: more than enough waits in its socket."""

    @property
    def window(self) -> PublishWindow: ...

    @property
    def over_tls(self) -> bool: ...

    @property
    def reached_host(self) -> str:
        """The local address that the client connected to."""

    def send(self, body: Message) -> None:
        """One command."""

    def send_error(self, request_id: int, error: ServerError, message: str) -> None:
        """The general error reply; lookups, schemas and transactions have their own (protocol.md §5)."""

    def write(self, frames: bytes) -> None:
        """Complete frames."""

    def write_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Complete frames, cut anywhere."""

    def close(self, reason: str) -> None:
        """Ends the connection after what was written; everything it has is freed."""

    async def is_alive(self) -> bool:
        """Asks with a PING. A peer that does not answer is closed."""
