"""Replaces a ledger that broke by the next one, in place: producers notice only latency.

    broken ──► break off ──► recover it ──► settle ──► create the next ──► its end and the next, in one write ──► resume
    (appends queue meanwhile)  (its end is known)  (what is in it is answered)                  (the rest is sent, in order)

Rules:
1. The end is what recovery says, never what the writer believed: an entry whose confirmation was lost is in the ledger, and
   would be stored twice if it were sent again (apache/pulsar#7490).
2. What recovery found is answered before the chain records the end: the ledger is closed there for good, and every opening, also
   by another broker, finds the same end.
3. A ledger that the chain does not name yet (a rollover was under way) is given up: its entries follow the part that broke.
   It enters the deletion queue in the same write that records its replacement.
4. A conflict at that write means another owner: fenced for good, as with every other write.
5. Bounded: `ledger_failover_timeout_s` from the moment it broke, with growing pauses; a ledger that breaks before it has stored
   anything continues the time of the one before. Then everything that waits fails, and the topic is opened again. Only one step may
   take longer: a write of the chain whose outcome is in doubt is waited for as long as the session may live (`ChainKeeper`, rule
   4), since after giving it up it would be unknown which ledger the chain names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cepheid_ledger import ClosedLedger, LedgerClient, LedgerWriter
from cepheid_managed_ledger.appender import Appender, BrokenOff
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ChainDamagedError, ManagedLedgerError, ManagedLedgerFailedError
from cepheid_managed_ledger.ledger_end import is_worth_another_attempt, with_end
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.opening import create_ledger, delete_unlinked
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Chain, ChainLedger
from cepheid_ports import CepheidError, SteadyClock
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 2.0

T = TypeVar("T")


class Failover:
    """The failovers of a topic, one at a time and never during a rollover."""

    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        client: LedgerClient,
        ledgers: LedgerList,
        appender: Appender,
        settings: ManagedLedgerSettings,
        clock: SteadyClock,
        on_end_known: Callable[[int], None],
        on_failed: Callable[[ManagedLedgerError], None],
    ) -> None:
        """`on_end_known(ledger id)`: what readers know about its end is void."""
        self._topic = topic
        self._keeper = keeper
        self._client = client
        self._ledgers = ledgers
        self._appender = appender
        self._settings = settings
        self._clock = clock
        self._on_end_known = on_end_known
        self._on_failed = on_failed
        self._deadline = 0.0
        self._resumed: LedgerWriter | None = None  # the one that received the queued appends
        self._in_vain = 0  # ledgers in a row that stored nothing
        self.count = 0

    @property
    def is_due(self) -> bool:
        return self._appender.is_broken

    async def run(self, config: Callable[[], ManagedLedgerConfig]) -> None:
        """Do one failover. A failure is reported to `on_failed`."""
        loop = asyncio.get_running_loop()
        started_at, broken_by = loop.time(), self._appender.broken_by
        left = self._appender.break_off()
        self._note_broken(left.linked)
        try:
            await left.linked.aclose()
            if left.unlinked is not None:
                await left.unlinked.aclose()
            end = await self._insist("recover", lambda: self._client.recover(left.linked.ledger_id))
            self._settle(left.linked, end)
            writer = await self._insist("create", lambda: create_ledger(self._topic, self._keeper.chain, self._client, config()))
            await self._record(left, end, writer)
        except (CepheidError, TimeoutError) as error:
            self._on_failed(self._failure(left.linked, error))
            if left.unlinked is not None:
                await self._delete(left.unlinked)
            return
        self.count += 1
        fields = {"topic": str(self._topic), "ledger_id": writer.ledger_id, "ledger_before": left.linked.ledger_id}
        ended = {"entries_before": end.last_entry_id + 1, "duration_ms": round((loop.time() - started_at) * 1000)}
        log.warning("ledger.replaced", extra={**fields, **ended, "error": str(broken_by)})
        self._resumed = writer if self._appender.is_waited_for else None
        self._appender.resume(writer)

    def _note_broken(self, broken: LedgerWriter) -> None:
        """Set the deadline (rule 5). A rollover's new ledger does not continue the time of the one before, however empty it is."""
        now, timeout_s = asyncio.get_running_loop().time(), self._settings.ledger_failover_timeout_s
        if self._ledgers.entries_of(broken.ledger_id) or broken is not self._resumed:
            self._deadline, self._in_vain = now + timeout_s, 0
        else:
            self._in_vain += 1

    def _settle(self, broken: LedgerWriter, end: ClosedLedger) -> None:
        ledger_id, last = broken.ledger_id, end.last_entry_id
        confirmed = (self._ledgers.entries_of(ledger_id) or 0) - 1
        if not confirmed <= last <= broken.last_add_pushed:
            message = (
                f"{self._topic}: ledger {ledger_id} ends at {last}; {confirmed} is answered, {broken.last_add_pushed} was sent"
            )
            log.error("ledger.end_impossible", extra={"topic": str(self._topic), "ledger_id": ledger_id, "error": message})
            raise ChainDamagedError(message, topic=str(self._topic), ledger_id=ledger_id)
        self._on_end_known(ledger_id)
        self._appender.settle(confirmed, last)

    async def _record(self, left: BrokenOff, end: ClosedLedger, writer: LedgerWriter) -> None:
        gone = () if left.unlinked is None else (left.unlinked.ledger_id,)

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            ledgers = with_end(chain.ledgers, left.linked.ledger_id, end, self._clock.stamp_ms())
            ledgers = (*ledgers, ChainLedger(ledger_id=writer.ledger_id))
            return chain.replace(ledgers=ledgers, deletions=(*chain.deletions, *gone)), ()

        try:
            await self._insist("record", lambda: self._keeper.commit(plan), cut=False)
        except (CepheidError, TimeoutError):
            await self._delete(writer)
            raise

    async def _delete(self, writer: LedgerWriter) -> None:
        if isinstance(self._keeper.lost, ManagedLedgerFailedError):  # the chain may name it
            await writer.aclose()
        else:
            await delete_unlinked(self._client, writer)

    async def _insist(self, step: str, attempt: Callable[[], Awaitable[T]], *, cut: bool = True) -> T:
        """Retry until the deadline. `cut`: the attempt may be cancelled there."""
        pause_s = FIRST_PAUSE_S
        if step == "create" and self._in_vain:
            await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._in_vain, 10)))
        while True:
            self._check_wanted()
            try:
                async with asyncio.timeout_at(self._deadline if cut else None):
                    return await attempt()
            except (CepheidError, TimeoutError) as error:
                if asyncio.get_running_loop().time() + pause_s >= self._deadline or not is_worth_another_attempt(error):
                    raise
                fields = {"topic": str(self._topic), "step": step, "error": str(error)}
                log.info("ledger.replacement_delayed", extra=fields)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, pause_s * 2)

    def _check_wanted(self) -> None:
        """Raise the error if appends have failed meanwhile: closed, fenced, the session lost."""
        if self._appender.failure is not None:
            raise self._appender.failure

    def _failure(self, broken: LedgerWriter, error: Exception) -> ManagedLedgerError:
        if isinstance(error, ManagedLedgerError):
            return error
        message = f"{self._topic}: ledger {broken.ledger_id} broke and could not be replaced: {error}"
        failure = ManagedLedgerFailedError(message, topic=str(self._topic), ledger_id=broken.ledger_id)
        failure.__cause__ = error
        return failure
