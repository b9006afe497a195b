"""A connection to another broker's protocol port, held open to know that the broker is alive.

    CONNECT ──► CONNECTED ──► PING every 0.5 s ──► PONG …

It authenticates like any client, with this broker's token or certificate if there is one (protocol.md §2, §4).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping

from cepheid_wire import (
    PING_FRAME,
    PONG_FRAME,
    CommandType,
    FrameSplitter,
    encode_body,
    parse_command,
    pulsar_api_pb2,
)

PING_S = 0.5
CONNECT_LIMIT_S = 1.0
_READ_BYTES = 1 << 12
_MAX_FRAME_BYTES = 1 << 20
_PROTOCOL_VERSION = 21


class LinkRefusedError(Exception):
    """The other broker is alive and refuses this one's credentials."""


class PeerLinks:
    """Connections to other brokers. `tls` returns the context of the next one; None: plain ports are used. `token` returns this
    broker's token, or ""."""

    def __init__(
        self,
        *,
        release: str = "",
        tls: Callable[[], ssl.SSLContext] | None = None,
        has_certificate: bool = False,
        token: Callable[[], str] = lambda: "",
    ) -> None:
        self._release = release
        self._tls = tls
        self._has_certificate = has_certificate
        self._token = token

    def __repr__(self) -> str:
        return f"<PeerLinks {'with' if self._tls else 'without'} TLS>"

    async def hold(self, addresses: Mapping[str, str], on_heard: Callable[[], None]) -> None:
        """Hold a connection, as described at `broker_liveness.Link`. Raises LinkRefusedError, OSError, TimeoutError, EOFError,
        WireError."""
        over_tls = self._tls is not None and "pulsar+ssl" in addresses
        address = addresses["pulsar+ssl"] if over_tls else addresses.get("pulsar", "")
        host, _, port = address.rpartition(":")
        if not host:
            raise OSError("the other broker takes connections over TLS alone, and this one has no TLS")
        context = self._tls() if over_tls and self._tls is not None else None
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        pings: asyncio.Task[None] | None = None
        try:
            writer.write(self._connect_frame(over_tls=over_tls))
            pings = asyncio.ensure_future(_send_pings(writer))
            frames = FrameSplitter(_MAX_FRAME_BYTES)
            while data := await reader.read(_READ_BYTES):
                for frame in frames.feed(data):
                    if frame.type == CommandType.PING:
                        writer.write(PONG_FRAME)
                    elif frame.type == CommandType.ERROR:
                        raise LinkRefusedError(parse_command(frame.command).error.message)
                on_heard()  # not reached if the broker refuses us: such a link proves nothing and is tried less and less often
            raise EOFError("the other broker closed the connection")
        finally:
            if pings is not None:
                pings.cancel()
            writer.close()

    def _connect_frame(self, *, over_tls: bool) -> bytes:
        connect = pulsar_api_pb2.CommandConnect(
            client_version=f"cepheid-broker {self._release}", protocol_version=_PROTOCOL_VERSION
        )
        if token := self._token():
            connect.auth_method_name, connect.auth_data = "token", token.encode()
        elif over_tls and self._has_certificate:
            connect.auth_method_name = "tls"
        return encode_body(connect)


async def _send_pings(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(PING_S)
        writer.write(PING_FRAME)
