"""The object store of a world, and what each broker has for it: the real `Segments` over objects in memory.

    SegmentsProbe (T4) ──► Segments ──► SimObjects: slow, refuses, loses answers, keeps half of an object      one for all brokers

Rules:
1. An upload has its effect in one step, when its last part is there; a broker that crashes before leaves nothing.
2. What arrives after its URL was deleted is *late*: a broker that was deposed, and did not know it, had not stopped yet. No record
   names such an object; a sweep finds it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cepheid_broker.settings import TieredSettings
from cepheid_managed_ledger import OffloadConfig
from cepheid_ports import Ports
from cepheid_rpc import EntryGroup
from cepheid_tiered.memory_objects import MemoryObjects
from cepheid_tiered.object_store import StoreUnavailableError
from cepheid_tiered.segments import Segments
from cepheid_wire import TopicName
from tests.simulation.checks.history import History
from tests.simulation.checks.offload import check_deleted_object, check_read, check_stored_object
from tests.simulation.faults.plan import FaultPlan

STORE_URL = "memory://bucket/simulated"


class SimObjects(MemoryObjects):
    def __init__(self, plan: FaultPlan, history: History) -> None:
        super().__init__(self._before, self._after)
        self._plan = plan
        self._history = history
        self._tokens = plan.stream("names of objects")
        self.cuts_next = False
        """Of the next object that is written only half is kept, and nobody is told."""
        self.on_step: Callable[[str], bool] = lambda step: False
        """Called at each step of a request, in the process that makes it. True: that process has crashed."""
        self.gone: dict[str, None] = {}  # URLs that were deleted
        self.late: dict[str, None] = {}
        history.objects = self.objects
        history.late_objects = self.late

    def new_token(self) -> str:
        return f"{self._tokens.getrandbits(64):016x}"

    async def delete(self, url: str) -> None:
        await self._begin("delete", url)
        check_deleted_object(self._history, url)
        self.gone[url] = None
        self.objects.pop(url, None)
        self.modified_ms.pop(url, None)
        self._history.did("delete an object")
        await self._done("delete", url)

    def _store(self, url: str, data: bytes) -> None:
        if self.cuts_next or self._plan.strikes("half an object kept", self._plan.faults.object_cut):
            self.cuts_next = False
            data = data[: len(data) // 2]
        if url in self.gone:
            self.late[url] = None
        else:
            check_stored_object(self._history, url)
        self._history.did("store an object")
        super()._store(url, data)

    async def _before(self, operation: str, url: str) -> None:
        plan, faults = self._plan, self._plan.faults
        await self._step(f"before {operation}")
        slow = plan.strikes("slow object store", faults.object_slow)
        await asyncio.sleep(plan.lasting(faults.object_slow_s) if slow else plan.between(faults.object_delay_s))
        if plan.strikes("object store refused", faults.object_refused):
            raise StoreUnavailableError(f"{operation} of {url} was refused", url=url)

    async def _after(self, operation: str, url: str) -> None:
        plan = self._plan
        await self._step(f"after {operation}")
        await asyncio.sleep(plan.between(plan.faults.object_delay_s))
        if plan.strikes("answer of the object store lost", plan.faults.object_answer_lost):
            raise StoreUnavailableError(f"the answer to {operation} of {url} was lost", url=url)

    async def _step(self, step: str) -> None:
        if self.on_step(step):
            await asyncio.sleep(0)  # it never takes another step


class SegmentsProbe:
    """What the brokers' managed ledgers have: everything that is read from an object is compared with what was sent."""

    def __init__(self, segments: Segments, history: History) -> None:
        self._segments = segments
        self._history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._segments, name)

    async def write(self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]) -> Any:
        return await self._segments.write(url, topic, ledger_id, groups)

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentProbe:
        return SegmentProbe(await self._segments.open(url, ledger_id, entries, fresh=fresh), ledger_id, self._history)


class SegmentProbe:
    def __init__(self, reader: Any, ledger_id: int, history: History) -> None:
        self._reader = reader
        self._ledger_id = ledger_id
        self._history = history

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        groups: list[EntryGroup] = await self._reader.read(first, last, max_bytes=max_bytes)
        self._history.did("read an object")
        check_read(self._history, self._ledger_id, first, last, groups)
        return groups


def segments_of(objects: SimObjects, ports: Ports, history: History) -> SegmentsProbe:
    """The segments of one process."""

    async def no_schemas(topic: TopicName) -> Sequence[Any]:
        return ()

    worker = ports.new_worker("segments", 1)
    return SegmentsProbe(Segments(objects, worker, no_schemas, new_token=objects.new_token), history)


def tiered_settings(offload: OffloadConfig) -> TieredSettings:
    """The settings of a broker by which all its topics are offloaded so. Not validated: no product has a store in memory."""
    return TieredSettings.model_construct(
        url=offload.url,
        after_bytes=offload.after_bytes,
        after_s=max(-1, offload.after_ms // 1_000),
        keep_s=offload.keep_ms // 1_000,
        read_from="objects" if offload.reads_objects else "bookies",
    )


def some_offload(rng: random.Random) -> dict[str, Any]:
    """Fields of an `OffloadConfig`, for a world."""
    return {
        "url": STORE_URL,
        "after_bytes": rng.choice((0, 0, 500)),
        "after_ms": rng.choice((-1, 4_000)),
        "keep_ms": rng.choice((0, 500, 3_000)),
        "reads_objects": rng.random() < 0.5,
    }
