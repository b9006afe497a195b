"""Moves a topic from one ledger to the next.

    full ──► create the next ledger ──► switch appends to it ──► drained ──► end it ──► record its end and the successor ──► link
             (appends go on meanwhile)                            (what the successor confirms waits for link)

By size at any age: a huge ledger would free disk space late. By entries once it is old enough: each ledger costs a metadata record,
and a busy topic would create one every few seconds. By age if it has entries: otherwise an idle topic could never be trimmed.
Not while the chain has as many ledgers as it may have: then appends continue in a full ledger, and the topic reports it.
Because bookies lack copies of it: once there are enough healthy ones, not all topics at the same moment, not again for a while.
Being full is a soft limit: while no next ledger can be created (no metadata store, too few bookies), the present one continues. If
the store becomes unavailable after the switch, the rollover waits as long as the session lasts: opening the topic again would need
the store as well. A ledger that breaks before it is drained is left to `Failover`. One whose appends fail, or that cannot be
closed, is given up here: the appender and its owner know the next one by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cepheid_ledger import ClosedLedger, LedgerClient, LedgerError, LedgerWriter
from cepheid_managed_ledger.appender import Appender
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ManagedLedgerError, ManagedLedgerFailedError
from cepheid_managed_ledger.ledger_end import MAX_PAUSE_S, end_writer, with_end
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.opening import create_ledger, delete_unlinked
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Chain, ChainLedger, MetadataError, StoreUnavailableError
from cepheid_ports import Ports, SteadyClock
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Pause after a next ledger could not be created, in seconds."""

REPLICAS_SPREAD_S = 30.0
"""Topics whose ledgers lack copies move to their next ones within this time, each at a random moment: after a bookie failed there
are many of them."""

REPLICAS_PAUSE_S = 300.0
"""Pause before a ledger is replaced for that reason again, in seconds."""

ENTRY_LIMIT = (1 << 32) - (1 << 20)
"""Acknowledgements are kept in bitmaps of 32-bit entry ids; the difference is room for appends during the rollover."""


def is_full(entries: int, size_bytes: int, age_s: float, settings: ManagedLedgerSettings) -> bool:
    if entries == 0:
        return False
    return (
        size_bytes >= settings.ledger_max_bytes
        or (entries >= settings.ledger_max_entries and age_s >= settings.ledger_min_age_s)
        or age_s >= settings.ledger_max_age_s
        or entries >= ENTRY_LIMIT
    )


class Rollover:
    """The rollovers of a topic, one at a time, run by its owner."""

    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        client: LedgerClient,
        ledgers: LedgerList,
        appender: Appender,
        settings: ManagedLedgerSettings,
        ports: Ports,
        clock: SteadyClock,
        on_failed: Callable[[ManagedLedgerError], None],
    ) -> None:
        self._topic = topic
        self._keeper = keeper
        self._client = client
        self._ledgers = ledgers
        self._appender = appender
        self._settings = settings
        self._ports = ports
        self._clock = clock
        self._on_failed = on_failed
        self._not_before = 0.0
        self._replicas_at = 0.0  # no rollover for lack of copies before this loop time
        self._lacking: LedgerWriter | None = None  # the writer that was found to lack copies
        self.count = 0

    def is_due(self, config: ManagedLedgerConfig) -> bool:
        now = asyncio.get_running_loop().time()
        appender = self._appender
        if now < self._not_before or not appender.may_switch:
            return False
        writer = appender.writer
        entries = writer.last_add_pushed + 1
        if self._keeper.has_most_ledgers:
            return entries >= ENTRY_LIMIT
        if is_full(entries, writer.length, now - appender.started_at, self._settings):
            return True
        return bool(writer.under_replicated) and self._may_replicate(writer, config, now)

    def _may_replicate(self, writer: LedgerWriter, config: ManagedLedgerConfig, now: float) -> bool:
        if self._lacking is not writer:
            self._lacking = writer
            self._replicas_at = max(self._replicas_at, now) + self._ports.random.uniform(0.0, REPLICAS_SPREAD_S)
        return now >= self._replicas_at and self._client.has_healthy_bookies(config.ensemble_size, config.write_quorum)

    @property
    def has_entries(self) -> bool:
        """Whether the ledger being written is not empty."""
        return self._appender.writer.last_add_pushed >= 0

    async def run(self, config: ManagedLedgerConfig) -> None:
        """Do one rollover. A failure after the switch is reported to `on_failed`; one before it only costs time."""
        try:
            writer = await create_ledger(self._topic, self._keeper.chain, self._client, config)
        except (LedgerError, MetadataError, TimeoutError) as error:
            self._not_before = asyncio.get_running_loop().time() + RETRY_S
            log.warning("rollover.postponed", extra={"topic": str(self._topic), "error": str(error)})
            return
        if not self._appender.may_switch:
            await delete_unlinked(self._client, writer)
            return
        if self._appender.writer.under_replicated:
            self._replicas_at = asyncio.get_running_loop().time() + REPLICAS_PAUSE_S
        before = self._appender.switch_to(writer)
        try:
            await self._appender.wait_drained()
        except LedgerError:
            return
        except ManagedLedgerError:  # all appends have failed: the next ledger is not needed
            await before.aclose()
            await delete_unlinked(self._client, writer)
            return
        try:
            end = await end_writer(before, self._client, self._settings, self._is_wanted)
            await self._record(before, end, writer)
        except (ManagedLedgerError, LedgerError, MetadataError, TimeoutError) as error:
            self._on_failed(_failure(self._topic, before, error))
            await before.aclose()
            if not isinstance(self._keeper.lost, ManagedLedgerFailedError):  # otherwise the chain may name it
                await delete_unlinked(self._client, writer)
            return
        self.count += 1
        fields = {"topic": str(self._topic), "ledger_id": writer.ledger_id, "entries_before": end.last_entry_id + 1}
        log.info("rollover.done", extra=fields)
        self._appender.link()

    def _is_wanted(self) -> bool:
        return self._appender.failure is None

    async def _record(self, before: LedgerWriter, end: ClosedLedger, writer: LedgerWriter) -> None:
        pause_s = self._settings.metadata_retry_s
        while True:
            try:
                return await self._keeper.commit(lambda chain: (self._with_successor(chain, before, end, writer), ()))
            except StoreUnavailableError:
                if not self._is_wanted():
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, pause_s * 2)

    def _with_successor(self, chain: Chain, before: LedgerWriter, end: ClosedLedger, writer: LedgerWriter) -> Chain:
        confirmed = self._ledgers.entries_of(before.ledger_id)
        assert confirmed == end.last_entry_id + 1, f"{before!r} ended at {end}, {confirmed} entries were answered"
        ledgers = with_end(chain.ledgers, before.ledger_id, end, self._clock.stamp_ms())
        return chain.replace(ledgers=(*ledgers, ChainLedger(ledger_id=writer.ledger_id)))


def _failure(topic: TopicName, before: LedgerWriter, error: Exception) -> ManagedLedgerError:
    if isinstance(error, ManagedLedgerError):
        return error
    message = f"{topic}: ledger {before.ledger_id} could not be closed and replaced by the next one: {error}"
    failure = ManagedLedgerFailedError(message, topic=str(topic), ledger_id=before.ledger_id)
    failure.__cause__ = error
    return failure
