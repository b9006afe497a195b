"""The managed ledgers of one broker: each is opened once, and one timer maintains them all.

Rules
1. A topic has at most one open `ManagedLedger` per process; another opening would fence the first.
2. Trimming, deletions and offloading of a topic wait while topics are being opened, and until none was opened for a moment:
   clients wait for openings, as after another broker failed, and ask for the next ones when they have their answers. The next
   round of housekeeping runs in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from cepheid_ledger import BookieStates, LedgerClient
from cepheid_managed_ledger.catch_up_budget import CatchUpBudget
from cepheid_managed_ledger.chain_deletion import delete_chain
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.count_budget import CountBudget
from cepheid_managed_ledger.cursor_flusher import CursorFlusher
from cepheid_managed_ledger.errors import ManagedLedgerClosedError, ManagedLedgerFailedError
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.managed_ledger import ManagedLedger
from cepheid_managed_ledger.offload_pool import OffloadPool
from cepheid_managed_ledger.orphans import OrphanScan
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_managed_ledger.surroundings import Surroundings
from cepheid_managed_ledger.tail_cache import TailCache
from cepheid_managed_ledger.under_replicated import UnderReplicated, UnderReplicatedFigures
from cepheid_metadata import MetadataStore, PageLimits, SessionState
from cepheid_metadata.chain_pages import LIMITS
from cepheid_ports import Ports, SingleFlight, TaskOwner
from cepheid_tiered import SegmentStore
from cepheid_wire import TopicName

_TICK_S = 1.0
_TICKED_AT_ONCE = 500
_CLOSED_AT_ONCE = 256
_QUIET_S = 0.1
"""How long no topic was opened before opened topics are maintained (rule 2). A client's next request comes sooner."""


class ManagedLedgers:
    """The open topics of a broker. Created inside the running loop."""

    def __init__(
        self,
        client: LedgerClient,
        store: MetadataStore,
        tail_cache: TailCache,
        settings: ManagedLedgerSettings,
        ports: Ports,
        *,
        bookies: BookieStates | None = None,
        segments: SegmentStore | None = None,
        page_limits: PageLimits = LIMITS,
    ) -> None:
        """`segments`: object stores to offload ledgers to, and to read them from; None: their libraries are not installed."""
        self._tasks = TaskOwner("managed-ledgers")
        self._settings = settings
        self._shared = Surroundings(
            client=client,
            store=store,
            tail_cache=tail_cache,
            catch_up=CatchUpBudget(settings.catch_up_bytes, settings.object_ahead_bytes),
            counts=CountBudget(settings.counts_bytes),
            flusher=CursorFlusher(settings.cursor_flush_s),
            tasks=self._tasks,
            settings=settings,
            ports=ports,
            offload_pool=OffloadPool(settings.offload_uploads, settings.offload_bytes_per_s),
            segments=segments,
            page_limits=page_limits,
        )
        self._open: dict[TopicName, ManagedLedger] = {}
        self.orphans = OrphanScan(store, self._open)
        self._untended: list[ManagedLedger] = []
        """Topics that were opened and not maintained yet (rule 2)."""
        self._under_replicated = None if bookies is None else UnderReplicated(client, self._open, bookies)
        self._flights: SingleFlight[TopicName, ManagedLedger] = SingleFlight("openings", _closed_error)
        self._unsubscribe = store.subscribe(self.on_session)
        self._ticking: asyncio.Task[None] | None = None
        self._tending: asyncio.TimerHandle | None = None
        self._last_opening_s = 0.0  # loop time
        self._closed = False

    def __repr__(self) -> str:
        return f"<ManagedLedgers {len(self._open)} open, {len(self._flights)} opening>"

    @property
    def opened(self) -> Mapping[TopicName, ManagedLedger]:
        return self._open

    @property
    def has_object_stores(self) -> bool:
        """Whether ledgers can be offloaded and read back, that is, whether the libraries are installed."""
        return self._shared.segments is not None

    @property
    def client(self) -> LedgerClient:
        """The client for single ledgers, for operators."""
        return self._shared.client

    @property
    def catch_up(self) -> CatchUpBudget:
        return self._shared.catch_up

    @property
    def offload_pool(self) -> OffloadPool:
        return self._shared.offload_pool

    @property
    def counts(self) -> CountBudget:
        return self._shared.counts

    def under_replicated(self) -> UnderReplicatedFigures:
        """Return the ledgers of open topics that lack a copy, as far as `bookies` knows which bookies run."""
        return UnderReplicatedFigures(0, 0) if self._under_replicated is None else self._under_replicated.statistics()

    async def open(self, topic: TopicName, config: ManagedLedgerConfig | None = None) -> ManagedLedger:
        """Return the topic's managed ledger, recovered, with the previous owner fenced. Concurrent callers share one opening.

        Raises ChainDamagedError, ManagedLedgerFencedError (another opening was faster), LedgerError, MetadataError.
        """
        if self._closed:
            raise _closed_error()
        config = config or ManagedLedgerConfig()
        known = self._open.get(topic)
        if known is not None and known.is_usable:
            known.config = config
            return known
        return await self._flights.run(topic, partial(self._open_anew, config))

    async def delete(self, topic: TopicName, check: Callable[[], None] = lambda: None) -> None:
        """Delete the topic's chain, cursors and ledgers, if there are any. If it fails, repeat it.

        `check` raises if another broker has taken the topic over: what that broker has created stays.
        """
        known = self._open.get(topic)
        if known is not None:
            await known.delete()
            return
        shared = self._shared
        keeper = ChainKeeper(shared.store, topic, self._tasks, self._settings, lambda _: None, shared.page_limits)
        keeper.check = check
        if await keeper.load() is not None:
            work = delete_chain(topic, keeper, shared.store, shared.client, shared.segments)
            await finish(self._tasks, work, name="delete-topic")

    async def aclose(self) -> None:
        """Close all topics: save their cursors and close their ledgers."""
        self._closed = True
        if self._tending is not None:
            self._tending.cancel()
        await self._flights.aclose()
        opened = list(self._open.values())
        for start in range(0, len(opened), _CLOSED_AT_ONCE):
            await asyncio.gather(*(managed_ledger.aclose() for managed_ledger in opened[start : start + _CLOSED_AT_ONCE]))
        self._unsubscribe()  # not earlier: the session may end while pending appends are waited for
        await self._shared.flusher.aclose()
        await self._tasks.aclose()

    async def _open_anew(self, config: ManagedLedgerConfig, topic: TopicName) -> ManagedLedger:
        try:
            return await self._open_one(config, topic)
        finally:
            self._last_opening_s = asyncio.get_running_loop().time()
            if self._tending is None and not self._closed:
                self._tend_later(_QUIET_S)

    def _tend_later(self, delay_s: float) -> None:
        self._tending = asyncio.get_running_loop().call_later(delay_s, self._tend_opened)

    def _tend_opened(self) -> None:
        """Maintain newly opened topics once no topic was opened for a moment (rule 2)."""
        self._tending = None
        if not self._untended or self._closed:
            return
        quiet_s = asyncio.get_running_loop().time() - self._last_opening_s
        if self._flights or quiet_s < _QUIET_S:
            self._tend_later(_QUIET_S)
            return
        some, self._untended = self._untended[:_TICKED_AT_ONCE], self._untended[_TICKED_AT_ONCE:]
        for managed_ledger in some:
            managed_ledger.tick()
        if self._untended:
            self._tend_later(0)

    async def _open_one(self, config: ManagedLedgerConfig, topic: TopicName) -> ManagedLedger:
        known = self._open.get(topic)
        if known is not None:
            await known.aclose()
        if self._ticking is None:
            self._ticking = self._tasks.start(self._tick(), name="tick")
            self._tasks.start(self._scan(), name="orphans")
            if self._under_replicated is not None:
                self._tasks.start(self._under_replicated.run(), name="under-replicated")
        managed_ledger = ManagedLedger(topic, config, self._shared, self._forget)
        await managed_ledger.open()
        self._open[topic] = managed_ledger
        self._untended.append(managed_ledger)
        return managed_ledger

    def on_session(self, state: SessionState) -> None:
        """Fail all open topics when the session is LOST; do nothing when it is SUSPENDED.

        After LOST another broker may have taken the topics over. Every handle is dropped at once: nothing more is acknowledged,
        appends fail with retriable errors, and topics are opened again from the records. The store calls this; a repeated call does
        no harm.
        """
        if state is SessionState.LOST:
            for managed_ledger in list(self._open.values()):
                topic = str(managed_ledger.topic)
                message = f"{topic}: the session with the metadata store ended"
                managed_ledger.fail(ManagedLedgerFailedError(message, topic=topic))

    def _forget(self, managed_ledger: ManagedLedger) -> None:
        if self._open.get(managed_ledger.topic) is managed_ledger:
            del self._open[managed_ledger.topic]

    async def _tick(self) -> None:
        ticks_apart = max(1, round(self._settings.housekeeping_s / _TICK_S))
        tick = 0
        while True:
            await asyncio.sleep(_TICK_S)
            self._shared.tail_cache.evict_old()
            tick += 1
            if tick % ticks_apart == 0:
                self._untended.clear()
                for count, managed_ledger in enumerate(list(self._open.values()), 1):
                    managed_ledger.tick()
                    if count % _TICKED_AT_ONCE == 0:
                        await asyncio.sleep(0)

    async def _scan(self) -> None:
        """Scan for orphans, at a random time so that the brokers of a cluster do not all scan at once."""
        await asyncio.sleep(self._shared.ports.random.uniform(0.1, 1.0) * self._settings.orphan_scan_s)
        while True:
            await self.orphans.run()
            await asyncio.sleep(self._settings.orphan_scan_s)


def _closed_error() -> ManagedLedgerClosedError:
    return ManagedLedgerClosedError("the managed ledgers of this broker are closed")
