"""What the bookie's tests share: groups, a bookie on a simulated disk that can lose power at any operation, answers as futures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cepheid_bookie import Bookie, BookieIdentity, StorageSettings
from cepheid_bookie.ledger_table import LISTED_AT_START
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_ports import OnDone, Ports, Worker
from cepheid_rpc import AddAnswer, AddRequest, EntryGroup, ReadRequest, Status, encode_group
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_disk import SimDisk
from tests.support import wait_until

T = TypeVar("T")
KEY = b"k" * 16
KiB = 1 << 10


def group_of(ledger_id: int, first: int, count: int = 1, *, size: int = 10, lac: int | None = None) -> EntryGroup:
    """Entries whose payload follows from their ids, so that any two groups with the same ids have the same bytes (given `lac`)."""
    payloads = [payload_of(ledger_id, entry_id, size) for entry_id in range(first, first + count)]
    return encode_group(ledger_id, first, -1 if lac is None else lac, first * size, payloads)


def payload_of(ledger_id: int, entry_id: int, size: int = 10) -> bytes:
    return f"{ledger_id}:{entry_id}.".encode().ljust(size, b"~")[:size]


IDENTITY = BookieIdentity("bookie-1", "test")


def small_settings(**changes: Any) -> StorageSettings:
    """Bounds so small that a few entries roll segments and logs, and no disk minimum."""
    values: dict[str, Any] = {
        "journal_segment_bytes": 64 * KiB,
        "write_cache_bytes": 16 * KiB,
        "block_bytes": 4 * KiB,
        "log_bytes": 64 * KiB,
        "checkpoint_interval_s": 3600.0,
        "min_free_journal_bytes": 0,
        "min_free_data_bytes": 0,
        "warn_free_journal_bytes": 0,
        "warn_free_data_bytes": 0,
        "retry_s": 0.01,
        "disk_check_interval_s": 0.01,
        "waiting_s": 5.0,
    }
    return StorageSettings(**(values | changes))


class InlineWorker(Worker):
    """Runs work in the loop, one turn after it was submitted. A crash inside the work is told to `on_crash`, never reported."""

    def __init__(self, on_crash: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_crash = on_crash
        self._pending = 0
        self._held: list[tuple[Callable[[], Any], OnDone]] | None = None
        self.takes_s = 0.0  # in virtual time
        self.crash_before_report = False  # the work is done, nobody hears of it

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        self._pending += 1
        if self._held is not None:
            self._held.append((work, on_done))
        elif self.takes_s:
            self._loop.call_later(self.takes_s, self._do, work, on_done)
        else:
            self._loop.call_soon(self._do, work, on_done)

    async def aclose(self) -> None:
        self.release()
        await wait_until(lambda: not self._pending, what="the end of all work")

    def hold(self) -> None:
        """From now on work waits, as on a disk that hangs."""
        self._held = self._held or []

    def release(self) -> None:
        held, self._held = self._held, None
        for work, on_done in held or ():
            self._loop.call_soon(self._do, work, on_done)

    def _do(self, work: Callable[[], Any], on_done: OnDone) -> None:
        try:
            result, error = work(), None
        except NodeCrashed:
            self._pending -= 1
            self._on_crash()
            return
        except BaseException as caught:
            result, error = None, caught
        self._pending -= 1
        if self.crash_before_report:
            self._on_crash()
            return
        on_done(result, error)


class Machine:
    """A disk and an index that outlive the bookies opened on them. `crashed` is set when an operation took the power."""

    def __init__(self, seed: int | str = 0, settings: StorageSettings | None = None, disk: SimDisk | None = None) -> None:
        self.random = random.Random(seed)
        self.settings = settings or small_settings()
        self.disk = disk or SimDisk(self.random)
        self.index = MemoryBlockIndex()
        self.crashed = asyncio.Event()
        self.workers: dict[str, InlineWorker] = {}
        self.now_ms = 1_700_000_000_000
        self.listed_at_start = LISTED_AT_START

    def ports(self) -> Ports:
        return Ports(wall_ms=lambda: self.now_ms, random=self.random, new_worker=self._new_worker)

    def _new_worker(self, name: str, threads: int) -> InlineWorker:
        worker = self.workers[name.rpartition("-")[2]] = InlineWorker(self.crashed.set)
        return worker

    async def open(self, identity: BookieIdentity = IDENTITY, **changes: Any) -> Bookie:
        settings = self.settings.model_copy(update=changes)
        return await Bookie.open(identity, settings, self.disk, self.index, self.ports(), listed_at_start=self.listed_at_start)

    @asynccontextmanager
    async def bookie(self, **changes: Any) -> AsyncIterator[Bookie]:
        bookie = await self.open(**changes)
        try:
            yield bookie
        finally:
            await bookie.aclose()

    def crash_at(self, operation: int) -> None:
        """Power goes at this operation of disk or index, counted from 0."""
        count = -1

        def on_operation(*_: str) -> None:
            nonlocal count
            count += 1
            if count >= operation:
                raise NodeCrashed

        self.disk.on_operation = on_operation
        self.index.before_sync = on_operation

    async def run_until_crash(self, work: Callable[[Bookie], Any]) -> bool:
        """Opens a bookie and runs `work` on it; True when the power went on the way. The bookie is abandoned as it is."""

        async def whole() -> None:
            bookie = await self.open()
            await work(bookie)

        task = asyncio.ensure_future(whole())
        crash = asyncio.ensure_future(self.crashed.wait())
        await asyncio.wait([task, crash], return_when=asyncio.FIRST_COMPLETED)
        crash.cancel()
        await asyncio.gather(crash, return_exceptions=True)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return True
        if self.crashed.is_set():
            task.exception()
            return True
        task.result()
        return False

    def restart(self, *, power_loss: bool = True) -> None:
        """The next process finds what survived."""
        self.disk = self.disk.power_loss() if power_loss else self.disk.process_crash()
        self.index.before_sync = lambda: None
        self.index.crash()
        self.crashed = asyncio.Event()


async def settle() -> None:
    """Lets everything run that can: what is held, or waits for time, stays."""
    for _ in range(50):
        await asyncio.sleep(0)


async def add(bookie: Bookie, *groups: EntryGroup, recovery: bool = False, key: bytes = KEY) -> list[AddAnswer]:
    """Adds groups in one message; returns when all of them are answered."""
    return await add_requests(bookie, [AddRequest(group, key, recovery) for group in groups])


async def add_requests(
    bookie: Bookie, requests: Sequence[AddRequest], on_answer: Callable[[AddAnswer], None] = lambda _: None
) -> list[AddAnswer]:
    """As `add`; `on_answer` sees each answer in the moment it comes."""
    collected: list[AddAnswer] = []
    waiting = sum(len(request.group) for request in requests)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_answers(answers: Sequence[AddAnswer]) -> None:
        nonlocal waiting
        collected.extend(answers)
        for answer in answers:
            on_answer(answer)
        waiting -= sum(answer.last_entry_id - answer.first_entry_id + 1 for answer in answers)
        if waiting <= 0 and not done.done():
            done.set_result(None)

    bookie.add(requests, on_answers)
    await done
    return collected


async def added(bookie: Bookie, *groups: EntryGroup, recovery: bool = False) -> None:
    """Adds groups and insists on OK for each."""
    for answer in await add(bookie, *groups, recovery=recovery):
        assert answer.status is Status.OK, answer


async def read_all(
    bookie: Bookie, ledger_id: int, first: int, last: int, *, fence: bool = False, max_bytes: int = 1 << 30
) -> tuple[dict[int, bytes], dict[int, Status]]:
    """(entry id → bytes, entry id → why not) for every id of the range."""
    request = ReadRequest(ledger_id, first, last, max_bytes=max_bytes, fence=fence, master_key=KEY if fence else b"")
    entries: dict[int, bytes] = {}
    missing: dict[int, Status] = {}
    expected = first
    async for chunk in bookie.read(request):
        for group in chunk.groups:
            group.verify()
            for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                assert entry_id not in entries
                entries[entry_id] = bytes(group.entry(entry_id))
        for run in chunk.missing:
            missing.update(dict.fromkeys(range(run.first_entry_id, run.last_entry_id + 1), run.status))
        told = [entry_id for entry_id in [*entries, *missing] if expected <= entry_id]
        assert sorted(told) == list(range(expected, chunk.next_entry_id)), f"a chunk says nothing of some ids: {chunk}"
        expected = chunk.next_entry_id
    return entries, missing


def entries_of(groups: Iterable[EntryGroup]) -> dict[int, bytes]:
    return {
        entry_id: bytes(group.entry(entry_id))
        for group in groups
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1)
    }
