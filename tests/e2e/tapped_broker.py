"""A broker in a thread of the test, and between it and the official client a tap that sees every frame.

    client ──► tap ──► broker        lookups tell the tap's port, so that nothing goes past it
           ◄──     ◄──

With it a test knows what the client really sent and got, and has a broker with settings of its own in a few milliseconds: the real
parts of tests/broker/broker_world.py in one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from cepheid_wire import BODY_FIELDS, CommandType, FrameSplitter, encode_body, parse_command
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until

T = TypeVar("T")

CHUNK_BYTES = 1 << 16


class Seen(NamedTuple):
    """One frame that went through."""

    connection: int
    from_broker: bool
    kind: CommandType
    body: Any
    tail: bytes


class TappedBroker:
    """`with TappedBroker(max_message_bytes=…) as broker`: the keywords are fields of BrokerSettings."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="tapped-broker")
        self._started: Future[None] = Future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen: list[Seen] = []
        self.connections = 0
        self._refusal: Message | None = None
        self._lost_at: CommandType | None = None
        self._holding = False
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []

    @property
    def service_url(self) -> str:
        return f"pulsar://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        assert not self._thread.is_alive(), "the broker did not stop"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def call_when(self, condition: Callable[[], bool], work: Callable[[], None]) -> None:
        """In the broker's loop."""

        async def call() -> None:
            await wait_until(condition)
            work()

        self._loop.call_soon_threadsafe(lambda: self._tasks.add(self._loop.create_task(call())))

    def frames(self, *kinds: CommandType, since: int = 0) -> list[Seen]:
        return [seen for seen in self.seen[since:] if seen.kind in kinds]

    @contextlib.contextmanager
    def requests_held(self) -> Iterator[None]:
        """What clients send meanwhile is seen, waits, and then reaches the broker together."""
        self._loop.call_soon_threadsafe(setattr, self, "_holding", True)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._let_go)

    @contextlib.contextmanager
    def connects_refused(self, answer: Message) -> Iterator[None]:
        """The tap gives `answer` to every CONNECT in the place of the broker, and the connection ends."""
        self._refusal = answer
        try:
            yield
        finally:
            self._refusal = None

    def lose_connection_at(self, kind: CommandType) -> None:
        """The next frame of this kind from the broker does not arrive, and its connection ends."""
        self._lost_at = kind

    # In the thread

    def _let_go(self) -> None:
        self._holding = False
        for writer, data in self._held:
            writer.write(data)
        self._held.clear()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._on_client, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        async with BrokerWorld(advertised_port=self._port, **self._settings) as self.world:
            self._started.set_result(None)
            await self._stop.wait()
            server.close()
            while tasks := [task for task in self._tasks if not task.done()]:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whatever becomes of the task, even if it never starts, the connection ends with it."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            writer.close()
            self._tasks.discard(task)

        task.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        with contextlib.suppress(ConnectionError):  # the client is gone
            if self._refusal is not None:
                await reader.read(CHUNK_BYTES)
                writer.write(encode_body(self._refusal))
                return
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self.world.port)
            pumps = [
                asyncio.create_task(self._pump(reader, broker_writer, number, from_broker=False)),
                asyncio.create_task(self._pump(broker_reader, writer, number, from_broker=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                broker_writer.close()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, *, from_broker: bool) -> None:
        splitter = FrameSplitter(1 << 28)
        while data := await reader.read(CHUNK_BYTES):
            for frame in splitter.feed(data):
                body = getattr(parse_command(frame.command), BODY_FIELDS[frame.type])
                self.seen.append(Seen(number, from_broker, CommandType(frame.type), body, bytes(frame.tail)))
                if from_broker and frame.type == self._lost_at:
                    self._lost_at = None
                    return
            if self._holding and not from_broker:
                self._held.append((writer, data))
                continue
            writer.write(data)
            await writer.drain()
