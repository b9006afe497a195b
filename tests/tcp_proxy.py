"""A TCP proxy that loses connectivity on command: between a client and ZooKeeper, a bookie or a broker.

    client ──► proxy.address ──► target              everything passes
        cut()             breaks every connection now; new ones pass
        refuse()          breaks every connection (cut=False: only those to come) and takes no new ones
        refuse_who_says(words)   breaks the connections whose client begins with that, now and later; all others pass
        stall()           connections stay, and take new ones, but nothing passes: bytes wait, as towards a stopped machine
        delay(seconds)    every byte is late by this much, in both directions
        drop_answers()    requests pass, what the target says is lost
        heal()            everything passes again; what waited is delivered, connections that lost bytes are broken

Its loop runs in a thread of its own, so that blocking tests can use it; every command has taken effect when it returns.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

TIMEOUT_S = 10.0
RESET = struct.pack("ii", 1, 0)  # close without lingering: a reset, not an end


class TcpProxy:
    """`with TcpProxy("127.0.0.1:2181") as proxy:` or `start` and `stop`. `port` 0: any free one."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._target_host, _, target_port = target.rpartition(":")
        self._target_port = int(target_port)
        self.port = port
        self.connections = 0  # taken so far
        self.lost_bytes = 0
        self.stalled = self.dropping_answers = self._refusing = False
        self.refused_words = b""
        self.delay_s = 0.0
        self._links: dict[_Link, None] = {}
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)

    def __repr__(self) -> str:
        return f"<TcpProxy {self.address} to {self._target_host}:{self._target_port}, {len(self._links)} connections>"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def held_bytes(self) -> int:
        return sum(side.held_bytes for link in list(self._links) for side in list(link.sides.values()))

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def start(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(TIMEOUT_S)
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def cut(self) -> None:
        self._do(self._cut_all)

    def refuse(self, *, cut: bool = True) -> None:
        asyncio.run_coroutine_threadsafe(self._refuse(cut), self._loop).result(TIMEOUT_S)

    def refuse_who_says(self, words: bytes) -> None:
        """`words` are among the first bytes that such a client sends."""

        def refuse() -> None:
            self.refused_words = words
            for link in list(self._links):
                if words in link.first_bytes:
                    link.cut()

        self._do(refuse)

    def stall(self) -> None:
        def stall() -> None:
            self.stalled = True

        self._do(stall)

    def delay(self, seconds: float) -> None:
        def delay() -> None:
            self.delay_s = seconds

        self._do(delay)

    def drop_answers(self) -> None:
        def drop() -> None:
            self.dropping_answers = True

        self._do(drop)

    def heal(self) -> None:
        asyncio.run_coroutine_threadsafe(self._heal(), self._loop).result(TIMEOUT_S)

    # In the proxy's loop.

    def _do(self, act: Callable[[], None]) -> None:
        async def call() -> None:
            act()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(TIMEOUT_S)

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Side(_Link(self), is_client=True), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self, cut: bool = True) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if cut:
            self._cut_all()

    async def _heal(self) -> None:
        self.stalled = self.dropping_answers = False
        self.refused_words = b""
        self.delay_s = 0.0
        for link in list(self._links):
            if link.lost_bytes:
                link.cut()
            else:
                link.go_on()
        if self._server is None:
            await self._listen()

    async def _end(self) -> None:
        await self._refuse()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)  # transports close in the next turn
        await asyncio.sleep(0)

    def _cut_all(self) -> None:
        for link in list(self._links):
            link.cut()

    def add(self, link: _Link) -> None:
        self.connections += 1
        self._links[link] = None

    def forget(self, link: _Link) -> None:
        self._links.pop(link, None)

    async def connect_to_target(self, link: _Link) -> None:
        try:
            await self._loop.create_connection(lambda: _Side(link, is_client=False), self._target_host, self._target_port)
        except OSError:
            link.cut()  # as the client would see it


class _Link:
    """One connection through the proxy: two sides, and what is between them."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.proxy = proxy
        self.sides: dict[bool, _Side] = {}  # by is_client
        self.lost_bytes = 0
        self.first_bytes = b""  # of the client
        self._connecting: asyncio.Task[None] | None = None

    def on_side(self, side: _Side) -> None:
        self.sides[side.is_client] = side
        if side.is_client:
            self.proxy.add(self)
            self._connecting = asyncio.get_running_loop().create_task(self.proxy.connect_to_target(self))
        elif self not in self.proxy._links:
            side.transport.abort()  # cut while it connected
        else:
            self.go_on()

    def go_on(self) -> None:
        for side in self.sides.values():
            side.flush()

    def cut(self) -> None:
        self.proxy.forget(self)
        for side in self.sides.values():
            if not side.transport.is_closing():
                side.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            side.transport.abort()

    def on_closed(self) -> None:
        """One side closed: what it said before is delivered first, unless nothing passes."""
        self.proxy.forget(self)
        for side in self.sides.values():
            side.transport.close()


class _Side(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, link: _Link, *, is_client: bool) -> None:
        self.link = link
        self.is_client = is_client
        self._held: deque[bytes] = deque()
        self._last_due = 0.0

    @property
    def _other(self) -> _Side | None:
        return self.link.sides.get(not self.is_client)

    @property
    def held_bytes(self) -> int:
        return sum(map(len, list(self._held)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.link.on_side(self)

    def data_received(self, data: bytes) -> None:
        proxy = self.link.proxy
        if self.is_client and not self.link.first_bytes:
            self.link.first_bytes = data
            if proxy.refused_words and proxy.refused_words in data:
                self.link.cut()
                return
        if proxy.dropping_answers and not self.is_client:
            self.link.lost_bytes += len(data)
            proxy.lost_bytes += len(data)
        elif proxy.stalled or self._other is None:
            self._held.append(data)
            self.transport.pause_reading()
        else:
            self._pass_on(data)

    def flush(self) -> None:
        if self.link.proxy.stalled or self._other is None:
            return
        while self._held:
            self._pass_on(self._held.popleft())
        self.transport.resume_reading()

    def _pass_on(self, data: bytes) -> None:
        loop, other = asyncio.get_running_loop(), self._other
        assert other is not None
        due = max(loop.time() + self.link.proxy.delay_s, self._last_due)
        if due > loop.time():
            self._last_due = due
            loop.call_at(due, other.transport.write, data)
        else:
            other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.link.on_closed()
