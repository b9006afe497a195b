"""How many TLS handshakes a second does one broker do, and what does an idle TLS connection cost in memory?

Clients on this machine connect, shake hands in full (no session is resumed), say CONNECT, and leave, some at a time. A client's
half of a handshake takes as much processor time as the broker's. Then many connections are opened and kept.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmarks import load
from benchmarks.raw_client import RefusedError
from benchmarks.report import print_line
from benchmarks.secured_server import TlsServer
from benchmarks.server import add_arguments
from cepheid_security import client_context
from cepheid_wire import PONG_FRAME, encode_body
from cepheid_wire import pulsar_api_pb2 as pb

_CONNECT = encode_body(pb.CommandConnect(client_version="cepheid-bench", protocol_version=20))
_SETTLE_S = 1.0


class Idle(asyncio.Protocol):
    """A connection that says CONNECT, and afterwards answers whatever comes as if it were a PING."""

    def __init__(self) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport
        self._write(_CONNECT)

    def data_received(self, data: bytes) -> None:
        if self.connected.done():
            self._write(PONG_FRAME)
        else:
            self.connected.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.connected.done():
            self.connected.set_exception(RefusedError(f"the server closed the connection: {error or 'no error'}"))

    def _write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]  # uvloop's is one by shape only


async def open_idle(url: str, tls: ssl.SSLContext) -> Idle:
    parts = urlsplit(url)
    _, protocol = await asyncio.get_running_loop().create_connection(
        Idle, parts.hostname, parts.port, ssl=tls, ssl_handshake_timeout=60
    )
    await protocol.connected
    return protocol


def shake_hands(url: str, ca_file: str, at_once: int, seconds: float) -> int:
    """Return how many connections this process opened and closed, `at_once` at a time."""

    async def work() -> int:
        tls, until, count = client_context(ca_file=ca_file), time.monotonic() + seconds, 0

        async def one_after_the_other() -> None:
            nonlocal count
            while time.monotonic() < until:
                protocol = await open_idle(url, tls)
                protocol.transport.abort()  # type: ignore[attr-defined]
                count += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return count

    return load.run(work())


def handshakes_per_s(url: str, ca_file: str, arguments: argparse.Namespace) -> float:
    given = (url, ca_file, arguments.at_once, arguments.seconds)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.starmap(shake_hands, [(*given[:3], 0.2)] * arguments.processes)  # imports
        began = time.monotonic()
        counts: Sequence[int] = pool.starmap(shake_hands, [given] * arguments.processes)
        return sum(counts) / (time.monotonic() - began)


async def kb_of_idle(server: TlsServer, ca_file: str, connections: int, at_once: int) -> float:
    """Return the memory of the broker for each of so many idle connections, in KB of 1,000 bytes."""
    tls = client_context(ca_file=ca_file)
    before_mb = server.rss_mb()
    opened: list[Idle] = []
    while len(opened) < connections:
        more = min(at_once, connections - len(opened))
        opened += await asyncio.gather(*(open_idle(server.tls_url, tls) for _ in range(more)))
    await asyncio.sleep(_SETTLE_S)
    grown_mb = server.rss_mb() - before_mb
    for protocol in opened:
        protocol.transport.abort()  # type: ignore[attr-defined]
    return 1000 * grown_mb / connections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0, help="of handshakes")
    parser.add_argument("--processes", type=int, default=2, help="that shake hands")
    parser.add_argument("--at-once", type=int, default=16, help="handshakes of each process")
    parser.add_argument("--connections", type=int, default=5000, help="that are kept")
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("it needs a server of its own: without --url")
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files != resource.RLIM_INFINITY and most_files < arguments.connections + 200:
        parser.error(f"a process may open {most_files} files here (ulimit -Hn): fewer --connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # of the server as well, which inherits it
    with TlsServer(arguments) as server:
        ca_file = str(server.root / "ca.pem")
        idle_kb = load.run(kb_of_idle(server, ca_file, arguments.connections, arguments.at_once))
        per_s = handshakes_per_s(server.tls_url, ca_file, arguments)
        print_line(
            "tls_connections",
            figures={"handshakes_per_s": round(per_s, 1), "idle_kb": round(idle_kb, 1)},
            load={
                "connections": arguments.connections,
                "processes": arguments.processes,
                "at_once": arguments.at_once,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
