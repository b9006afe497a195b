"""The metadata store as a process sees it across a network: requests take time, are refused, lose their answer, or read the past.

    request ──delay, FIFO──► one session of the shared SimTree ──delay──► answer
                  └ refused, outage: StoreUnavailableError          └ lost: StoreUnavailableError(outcome_unknown=True)

Rules (those of ZooKeeper's servers and clients):
1. Requests of a session are served in the order they were made.
2. A read or listing may show the past (a follower's view), but nothing older than what the session has seen: its own writes,
   refused ones included, its earlier reads, the watches that fired, and `sync`.
3. During an outage everything is refused and what was under way has an unknown outcome; the session lives, and is SUSPENDED.
   While a leader is elected nothing is answered; then some connections are broken, others go on as if nothing had been.
4. A process hears of its session and its watches in steps of its own: one that is paused hears of them when it resumes.
5. What a watch tells may come late, many changes in one; or not at all, because the connection broke: then with the next one.
6. A write that waits for a leader takes effect later even if who asked gave up, or has crashed, as long as its session lives.

`SimTree` shows every committed write to whoever keeps the history, with the process that made it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from cepheid_metadata import (
    Create,
    Delete,
    MemoryStore,
    MemoryTree,
    NoSuchKeyError,
    Op,
    OpResult,
    Put,
    SessionState,
    StoreUnavailableError,
    Versioned,
    Watch,
    keys,
)
from cepheid_metadata.session import SessionEvents
from cepheid_metadata.tree import Node, TreeBatch
from tests.simulation.checks.store import StoreChecks
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import current_node
from tests.simulation.world.tree_past import TreePast
from tests.simulation.world.virtual_loop import running_loop

T = TypeVar("T")
_SPACING_S = 1e-9
_REGISTRATIONS = (f"{keys.AVAILABLE_BOOKIES_KEY}/", f"{keys.READONLY_BOOKIES_KEY}/")


class SimTree(MemoryTree):
    def __init__(self) -> None:
        super().__init__()
        self.on_commit: Callable[[Sequence[Op], str], None] | None = None
        self.on_registration: Callable[[str, bool], None] = lambda bookie_id, is_registered: None
        self.checks: StoreChecks | None = None
        self.writer = "world"  # the process whose request is being served
        self.out = False  # nobody reaches it
        self.slow = 1.0  # how many times longer everything takes
        self._elected: asyncio.Event | None = None  # set when there is a leader again
        self.past = TreePast()
        self.stores: list[SimStore] = []
        self._written: dict[str, None] = {}

    def apply(self, ops: Sequence[Op], session_id: int) -> list[OpResult]:
        results = super().apply(ops, session_id)
        written, self._written = self._written, {}
        self.past.note(written, self.nodes.get, asyncio.get_running_loop().time())
        if self.on_commit is not None:
            self.on_commit(ops, self.writer)
        return results

    def _store(self, key: str, node: Node | None) -> None:
        self._written[key] = None
        super()._store(key, node)
        if key.startswith(_REGISTRATIONS):
            name = key.rpartition("/")[2]
            self.on_registration(name, any(f"{place}{name}" in self.nodes for place in _REGISTRATIONS))

    def begin_outage(self) -> None:
        self.out = True
        for store in self.stores:
            store.suspend()

    def end_outage(self) -> None:
        self.out = False
        for store in self.stores:
            store.resume()

    def recover(self) -> None:
        self.slow = 1.0

    @property
    def electing(self) -> bool:
        return self._elected is not None

    def begin_election(self) -> None:
        """No leader: whoever asks waits."""
        if self._elected is None:
            self._elected = asyncio.Event()

    def end_election(self, plan: FaultPlan) -> None:
        if self._elected is None:
            return
        elected, self._elected = self._elected, None
        elected.set()
        for store in self.stores:
            if plan.random.random() < 0.5:
                store.reconnect()

    async def wait_leader(self) -> None:
        while self._elected is not None:
            await self._elected.wait()


class _Session(MemoryStore):
    """Its watches are heard in steps of the process that armed them, after a while, and never by one that has crashed."""

    def __init__(self, tree: SimTree, store: SimStore, on_watch: Callable[[], None]) -> None:
        super().__init__(tree)
        self._store = store
        self._on_watch = on_watch

    def fire(self, batch: TreeBatch) -> None:
        watches, child_watches = self._watches, self._child_watches
        if any(key in watches for key in batch.watch_keys) or any(key in child_watches for key in batch.watch_children_keys):
            self._store.on_change(batch)

    def hear(self, batch: TreeBatch) -> None:
        armed = len(self._watches) + len(self._child_watches)
        super().fire(batch)
        if len(self._watches) + len(self._child_watches) != armed:
            self._on_watch()

    def _fail_watches(self, error: Exception) -> None:
        self._store.deliver(lambda: super(_Session, self)._fail_watches(error))


class SimStore:
    """The store of one process. Implements `MetadataStore`."""

    def __init__(self, tree: SimTree, plan: FaultPlan, process: str) -> None:
        self._outside = contextvars.Context()  # of no process
        self._late: list[TreeBatch] = []  # changes that wait for a late watch …
        self._missed: list[TreeBatch] | None = None  # … or for the next connection
        self.memory = _Session(tree, self, self._see_all)
        self._tree = tree
        self._plan = plan
        self._process = process
        self._node = current_node()
        self._loop = running_loop()
        self._events = SessionEvents(SessionState.CONNECTED)
        self._past_sessions: list[int] = []
        self._seen = 0  # of the tree's commits
        self._cut = False
        self._closed = False
        self.loses_answer: Callable[[Sequence[Op]], bool] = lambda _: False  # for scripts: of which applied writes
        self.lag_s: float | None = None  # how far in the past reads are
        self.slow = 1.0  # how many times longer its own requests take
        self.held_writes: asyncio.Event | None = None  # for scripts: writes are on their way until it is set …
        self.held_answers: asyncio.Event | None = None  # … or applied, and nobody hears of it yet
        self._last_arrival_s = 0.0
        self.memory.subscribe(lambda _: self._tell())
        tree.stores.append(self)

    def __repr__(self) -> str:
        return f"<SimStore of {self._process}: {self._events.state.value}{', cut' if self._cut else ''}>"

    async def get(self, key: str) -> Versioned | None:
        found = await self._ask(lambda: self._get(key))
        if found is not None and self._tree.checks is not None:
            self._tree.checks.learned(self._process, key, found.version)
        return found

    async def exists(self, key: str) -> bool:
        return await self._ask(lambda: self._get(key)) is not None

    async def children(self, key: str) -> list[str]:
        return await self._ask(lambda: self._children(key))

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        ops = [Create(key, value, ephemeral, sequential)]
        return await self._write(ops, lambda: self.memory.create(key, value, ephemeral=ephemeral, sequential=sequential))

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        return await self._write([Put(key, value, expected_version)], lambda: self.memory.put(key, value, expected_version))

    async def delete(self, key: str, expected_version: int | None) -> None:
        await self._write([Delete(key, expected_version)], lambda: self.memory.delete(key, expected_version))

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        return await self._write(ops, lambda: self.memory.multi(ops))

    async def _write(self, ops: Sequence[Op], act: Callable[[], Awaitable[T]]) -> T:
        checks = self._tree.checks
        if checks is not None:
            checks.asks(self._process, ops)

        async def write() -> tuple[T, bool]:
            result = await act()
            if checks is not None:
                checks.wrote(self._process, ops, self._past_sessions)
            return result, self.loses_answer(ops)

        result, is_lost = await self._ask(write, write=True)
        if is_lost:
            raise StoreUnavailableError("the connection to the metadata store was lost", outcome_unknown=True)
        if checks is not None:
            checks.answered(self._process, ops, result if isinstance(result, list) else [result])
        return result

    async def sync(self, key: str) -> None:
        await self._ask(lambda: self._fresh(self.memory.sync(key)))

    async def watch(self, key: str) -> Watch:
        return await self._ask(lambda: self._fresh(self.memory.watch(key)))

    async def watch_children(self, key: str) -> Watch:
        return await self._ask(lambda: self._fresh(self.memory.watch_children(key)))

    @property
    def session_state(self) -> SessionState:
        return self._events.state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._events.subscribe(on_session)

    async def aclose(self) -> None:
        self._closed = True
        await self.memory.aclose()

    # -- what happens to the session ------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The process is gone; the store notices at once (a session that lingers is a fault of its own). After `aclose` there is
        nothing to notice."""
        if self._closed:
            return
        self._closed = True
        if self.memory.session_state is not SessionState.LOST:
            self.memory.expire_session()

    def expire(self) -> None:
        """The server gives the session up, whether or not the process is there to hear of it."""
        if not self._closed and self.memory.session_state is not SessionState.LOST:
            self.memory.expire_session()

    def renew(self) -> None:
        """The process reaches the server again, if it has lost its session."""
        if not self._closed and self.memory.session_state is SessionState.LOST:
            self._see_all()
            self._past_sessions.append(self.memory._session_id)
            self.memory.renew_session()

    def catch_up(self) -> None:
        """The follower that it reads from has."""
        self.lag_s, self.slow = None, 1.0

    def suspend(self) -> None:
        self._cut = True
        self._tell()

    def resume(self) -> None:
        self._cut = False
        self._tell()

    def reconnect(self) -> None:
        """The connection breaks, and there is a new one a moment later."""
        self._plan.saw("metadata connection broken")
        self.suspend()
        self._loop.call_later(0.05, lambda: self._tree.out or self.resume(), context=self._outside)

    def on_change(self, batch: TreeBatch) -> None:
        """Something changed that a watch waits for (rule 5)."""
        plan, faults = self._plan, self._plan.faults
        loop = self._loop
        if self._missed is not None:
            self._missed.append(batch)
        elif self._late:
            self._late.append(batch)
            if len(self._late) == 2:
                plan.saw("watches merged")
        elif plan.strikes("watch missed once", faults.missed_watch):
            self._missed = [batch]
            loop.call_later(plan.lasting(faults.missed_watch_s), self._find_missed, context=self._outside)
        elif plan.strikes("watch late", faults.late_watch):
            self._late = [batch]
            loop.call_later(plan.lasting(faults.late_watch_s), self._hear_late, context=self._outside)
        else:
            self.deliver(lambda: self.memory.hear(batch))

    def _find_missed(self) -> None:
        """The client makes a new connection, and asks it about every watch."""
        missed, self._missed = self._missed or [], None
        self.reconnect()
        self._hear(missed)

    def _hear_late(self) -> None:
        late, self._late = self._late, []
        self._hear(late)

    def _hear(self, batches: Sequence[TreeBatch]) -> None:
        def step() -> None:
            for batch in batches:
                self.memory.hear(batch)

        self.deliver(step)

    def _tell(self) -> None:
        """Rule 4."""
        if self._closed:
            return
        state = self.memory.session_state
        if self._cut and state is SessionState.CONNECTED:
            state = SessionState.SUSPENDED
        if self._node is None:
            self._events.become(state)
        else:
            self._node.call_soon(self._events.become, state)

    # -- requests -------------------------------------------------------------------------------------------------------

    async def _get(self, key: str) -> Versioned | None:
        found = await self.memory.get(key)
        if (commit := self._past_commit()) is None:
            return found
        node = self._tree.past.node_at(key, commit)
        return None if node is None else Versioned(node.value, node.version)

    async def _children(self, key: str) -> list[str]:
        if (commit := self._past_commit()) is None:
            return await self.memory.children(key)
        self.memory._check_session()
        names = self._tree.past.names_at(key, commit)
        if names is None:
            raise NoSuchKeyError(f"{key} does not exist", key=key)
        return names

    def _past_commit(self) -> int | None:
        """What the follower is at that serves this read (rule 2); None: at the present."""
        plan, faults, past = self._plan, self._plan.faults, self._tree.past
        lag_s = self.lag_s
        if lag_s is None and plan.strikes("metadata read of the past", faults.stale_read):
            lag_s = plan.between(faults.stale_read_s)
        if lag_s is None:
            self._see_all()
            return None
        self._seen = max(self._seen, past.commits_before(self._loop.time() - lag_s))
        return self._seen

    async def _fresh(self, request: Awaitable[T]) -> T:
        result = await request
        self._see_all()
        return result

    def _see_all(self) -> None:
        self._seen = self._tree.past.commits

    def deliver(self, step: Callable[[], None]) -> None:
        """What the server tells of its own accord (rule 4)."""
        delay_s = self._plan.between(self._plan.faults.metadata_delay_s) * self._tree.slow
        self._loop.call_later(delay_s, step, context=self._outside if self._node is None else self._node.context)

    async def _ask(self, act: Callable[[], Awaitable[T]], *, write: bool = False) -> T:
        plan, faults = self._plan, self._plan.faults
        loop = self._loop
        delay_s = plan.between(faults.metadata_delay_s) * self._slowness()
        self._last_arrival_s = max(loop.time() + delay_s, self._last_arrival_s + _SPACING_S)
        await loop.moment(self._last_arrival_s)
        if write and (self._tree.electing or (self.held_writes is not None and not self.held_writes.is_set())):
            served = loop.create_task(self._serve(act, write), name=f"write of {self._process}", context=self._outside)
            served.add_done_callback(_hear_it, context=self._outside)
            result = await asyncio.shield(served)  # rule 6
        else:
            result = await self._serve(act, write)
        await loop.moment(loop.time() + plan.between(faults.metadata_delay_s) * self._slowness())
        if self._tree.electing:
            await self._tree.wait_leader()
        if write and self.held_answers is not None:
            await self.held_answers.wait()
        if write and (self._cut or plan.strikes("metadata answer lost", faults.lost_answer)):
            raise StoreUnavailableError("the connection to the metadata store was lost", outcome_unknown=True)
        return result

    def _slowness(self) -> float:
        """Not the product of both: a request of half a minute would outlast all that the world waits for."""
        one, other = self._tree.slow, self.slow
        return one if one > other else other

    async def _serve(self, act: Callable[[], Awaitable[T]], write: bool) -> T:
        if write and self.held_writes is not None:
            await self.held_writes.wait()
        if self._tree.electing:
            await self._tree.wait_leader()
        if self._cut or self._plan.strikes("metadata refused", self._plan.faults.refused):
            raise StoreUnavailableError("the metadata store cannot be reached")
        self._tree.writer = self._process
        try:
            return await act()  # the memory store never waits: nobody else writes meanwhile
        finally:
            self._tree.writer = "world"
            if write:
                self._see_all()


def _hear_it(served: asyncio.Task[Any]) -> None:
    """What became of a write for which nobody waits any more."""
    if not served.cancelled():
        served.exception()
