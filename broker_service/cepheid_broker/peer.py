"""The view that producers, consumers and command families have of a connection: enough to answer, without its socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from cepheid_broker.publish_window import PublishWindow
from cepheid_security import Principal
from cepheid_wire import ServerError

Buffer = bytes | bytearray | memoryview


class Peer(Protocol):
    """One client connection. Writing to a closed one does nothing."""

    @property
    def address(self) -> str: ...

    @property
    def client_version(self) -> str: ...

    @property
    def protocol_version(self) -> int:
        """Protocol version of the client: some commands are for newer ones only (protocol.md §2)."""

    @property
    def principal(self) -> Principal | None:
        """The client's identity; None where clients are not authenticated."""

    @property
    def connected_at_ms(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def ending(self) -> bool:
        """Whether it is closed, or broken and about to be: nothing reaches the client any more."""

    @property
    def writable(self) -> bool:
        """False while too much waits in its socket."""

    @property
    def window(self) -> PublishWindow: ...

    @property
    def over_tls(self) -> bool: ...

    @property
    def reached_host(self) -> str:
        """Local address that the client connected to."""

    def send(self, body: Message) -> None:
        """Send one command."""

    def send_error(self, request_id: int, error: ServerError, message: str) -> None:
        """Send the general error reply; lookups, schemas and transactions have their own (protocol.md §5)."""

    def write(self, frames: bytes) -> None:
        """Write complete frames."""

    def write_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Write complete frames, split anywhere."""

    def close(self, reason: str) -> None:
        """End the connection after what was written; everything it has is freed."""

    async def is_alive(self) -> bool:
        """Check the peer with a PING; one that does not answer is closed."""
