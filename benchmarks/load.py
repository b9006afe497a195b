"""How load is applied: as fast as a window of unanswered entries allows, or evenly paced whatever the server does."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from benchmarks.raw_client import Connection, Publisher, RefusedError, open_connection, open_publisher

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop where there is one."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class HasProcessorTime(Protocol):
    """A server, or a cluster."""

    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """What happened between the end of the warm-up and the end of the load."""

    entries: int
    seconds: float
    server_cores: float
    generator_cores: float

    @property
    def rate_per_s(self) -> float:
        return self.entries / self.seconds

    def cores(self) -> dict[str, float]:
        """How many cores each side kept busy: near 1 for the server, its loop is the bound; near 1 for the generator, it is."""
        return {"server_cores": round(self.server_cores, 2), "generator_cores": round(self.generator_cores, 2)}


async def measure(
    server: HasProcessorTime, count: Callable[[], int], *, warmup_s: float, seconds: float, failed: asyncio.Future[Any]
) -> Measured:
    """Watches `count` while a load runs. Raises what `failed` raises: a load that was refused has no figure."""
    await run_unless_failed(failed, warmup_s)
    entries, started, server_cpu, own_cpu = count(), time.perf_counter(), server.cpu_s(), time.process_time()
    await run_unless_failed(failed, seconds)
    elapsed = time.perf_counter() - started
    return Measured(count() - entries, elapsed, (server.cpu_s() - server_cpu) / elapsed, (time.process_time() - own_cpu) / elapsed)


async def run_unless_failed(failed: asyncio.Future[Any], seconds: float) -> None:
    try:
        await asyncio.wait_for(asyncio.shield(failed), seconds)
    except TimeoutError:
        return


def keep_window(connection: Connection, publisher: Publisher, window: int) -> None:
    """`window` entries are always on their way: each answered one is replaced by the next."""
    connection.on_receipts = publisher.send
    publisher.send(window)


async def publish_all(connection: Connection, publisher: Publisher, entries: int, window: int) -> float:
    """Publishes so many entries and returns how long it took, in seconds."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    first, target = publisher.sent, connection.receipts + entries

    def on_receipts(count: int) -> None:
        if more := min(count, first + entries - publisher.sent):
            publisher.send(more)
        if connection.receipts >= target and not done.done():
            done.set_result(None)

    started = time.perf_counter()
    connection.on_receipts = on_receipts
    publisher.send(min(window, entries))
    await wait_unless_failed(done, connection)
    connection.on_receipts = None
    return time.perf_counter() - started


async def wait_unless_failed(done: asyncio.Future[None], connection: Connection) -> None:
    await asyncio.wait([done, connection.failed], return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        connection.failed.result()


class PacedSender:
    """Sends one entry every 1/rate seconds from a thread of its own: the loop's timers know only milliseconds.

    An entry's time is when it was due, not when it could be sent: a server (or generator) that stalls does not hide it.
    """

    def __init__(self, connection: Connection, publisher: Publisher, rate_per_s: float, seconds: float) -> None:
        self._fd = connection.fileno()
        self._publisher = publisher
        self._interval_s = 1 / rate_per_s
        self.entries = int(rate_per_s * seconds)
        self.started = 0.0
        self._thread = threading.Thread(target=self._send_all, name="paced-sender", daemon=True)
        self.error: OSError | None = None
        self._stopped = False

    def start(self) -> None:
        sys.setswitchinterval(0.0002)  # neither thread may wait 5 ms, the default, for the interpreter
        self.started = time.perf_counter() + 0.01
        self._thread.start()

    def due_at(self, index: int) -> float:
        return self.started + index * self._interval_s

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        """Sends nothing more."""
        self._stopped = True
        self._thread.join()

    def _send_all(self) -> None:
        try:
            for index in range(self.entries):
                if self._stopped:
                    return
                ahead_s = self.due_at(index) - time.perf_counter()
                if ahead_s > 0:
                    time.sleep(ahead_s)
                self._write(self._publisher.next_frame())
        except OSError as error:
            self.error = error

    def _write(self, frame: bytes) -> None:
        while frame:
            try:
                frame = frame[os.write(self._fd, frame) :]
            except BlockingIOError:
                select.select([], [self._fd], [])


class Due(Protocol):
    """Knows when the n-th arrival was due."""

    def due_at(self, index: int) -> float: ...


class Arrivals:
    """When the n-th answer (or message) came: pieces of (how many so far, time)."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, float]] = []
        self.count = 0

    def on_arrived(self, count: int) -> None:
        self.count += count
        self._pieces.append((self.count, time.perf_counter()))

    def latencies_s(self, sender: Due, skip: int) -> list[float]:
        """Of every entry but the first `skip`, which warm things up."""
        latencies = []
        index = 0
        for arrived, at in self._pieces:
            while index < arrived:
                if index >= skip:
                    latencies.append(at - sender.due_at(index))
                index += 1
        return latencies


async def run_paced(sender: PacedSender, arrivals: Arrivals, failed: asyncio.Future[Any], limit_s: float) -> None:
    """Until everything that was sent has arrived."""
    sender.start()
    deadline = time.perf_counter() + limit_s
    while arrivals.count < sender.entries:
        await run_unless_failed(failed, 0.05)
        if sender.error is not None:
            raise sender.error
        if time.perf_counter() > deadline:
            raise RefusedError(f"{arrivals.count} of {sender.entries} entries arrived within {limit_s} s")


class SteadyLoad:
    """One producer that publishes at a steady rate while something else is done; then the latencies of any span of that time.

    Times are those of `time.perf_counter`.
    """

    def __init__(self, connection: Connection, publisher: Publisher, rate_per_s: float) -> None:
        self._connection = connection
        self._rate_per_s = rate_per_s
        self._sender = PacedSender(connection, publisher, rate_per_s, 24 * 3600)  # until it is stopped
        self._arrivals = Arrivals()
        self._latencies_s: list[float] = []
        connection.on_receipts = self._arrivals.on_arrived

    @classmethod
    async def start(cls, url: str, topic: str, *, rate_per_s: float, entry_bytes: int) -> SteadyLoad:
        connection = await open_connection(url, topic)
        load = cls(connection, await open_publisher(connection, topic, bytes(entry_bytes)), rate_per_s)
        load._sender.start()
        return load

    async def go_on(self, seconds: float) -> None:
        """Raise RefusedError when the server ends the connection."""
        await run_unless_failed(self._connection.failed, seconds)

    async def finish(self, linger_s: float = 1.0) -> None:
        """Stop after `linger_s`, and wait as long for the last answers. Raises RefusedError."""
        await self.go_on(linger_s)
        self._sender.stop()
        await self.go_on(linger_s)
        self._connection.close()
        if self._sender.error is not None:
            raise RefusedError(f"the load ended: {self._sender.error}")
        self._latencies_s = self._arrivals.latencies_s(self._sender, skip=0)

    def latencies_s(self, since: float, until: float) -> list[float]:
        """Return those of the entries that were due between these times. Call `finish` first."""
        first, last = (max(0, int((at - self._sender.started) * self._rate_per_s)) for at in (since, until))
        return self._latencies_s[first:last]
