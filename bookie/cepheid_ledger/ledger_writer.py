"""The only writer of a ledger.

    OPEN ──close──► CLOSING ──metadata says CLOSED──► CLOSED
      └──fenced, refused, too few bookies──► FAILED        recovery decides the ledger's end

An append assigns ids to its group, freezes its bytes and returns; `on_done` is called once per group, in order, once LAC passed
it. A failed append says nothing about its entries: they may be stored.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.change_slots import ChangeSlots
from cepheid_ledger.ensemble_change import EnsembleChanger
from cepheid_ledger.ensemble_names import bookies_of
from cepheid_ledger.errors import LedgerClosedError, LedgerError, LedgerFencedError, LedgerWriteError, NoSuchLedgerError
from cepheid_ledger.idle_writers import IdleWriters
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_edits import closed
from cepheid_ledger.metadata_loop import FoundLedger, LedgerRecords, to_check
from cepheid_ledger.placement import Placement
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.unconfirmed import GroupDone
from cepheid_ledger.writer_record import WriterRecord
from cepheid_ledger.writer_state import ChangeEnsemble, WriterState
from cepheid_metadata import LedgerMetadata, LedgerState, MetadataError
from cepheid_ports import CepheidError, TaskOwner
from cepheid_rpc import NO_ENTRY_ID, Buffer, EntryGroup, ExplicitLac, encode_group

log = logging.getLogger(__name__)


class ClosedLedger(NamedTuple):
    """The end of a ledger. `last_entry_id` is -1 if it is empty; `length` counts payload bytes."""

    last_entry_id: int
    length: int


OnShort = Callable[[int, Sequence[str]], None]
"""Takes the id of a closed ledger and the bookies that may lack entries of it. Raises only defects."""


class WriterPhase(enum.Enum):
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class LedgerWriter:
    """Appends entries to one ledger. Created by `LedgerClient.create`."""

    def __init__(
        self,
        found: FoundLedger,
        records: LedgerRecords,
        channel_of: Callable[[str], BookieChannel],
        placement: Placement,
        slots: ChangeSlots,
        idle_writers: IdleWriters,
        settings: LedgerSettings,
        on_short: OnShort,
    ) -> None:
        """`on_short` is called after the ledger was closed, if bookies in its record may lack entries."""
        ledger = found.record
        self._on_short = on_short
        self.ledger_id = ledger.ledger_id
        self.state = WriterPhase.OPEN
        self.failure: LedgerError | None = None
        self._length_pushed = 0
        self._end: ClosedLedger | None = None  # set when closing starts
        self._closing: asyncio.Task[ClosedLedger | CepheidError | TimeoutError] | None = None
        self._record = WriterRecord(found, records, settings)
        self._store = records.store
        self._bookies: tuple[LedgerMetadata, tuple[str, ...]] | None = None  # computed from the record on demand
        self._placement = placement
        self._slots = slots
        self._settings = settings
        self._idle_writers = idle_writers
        self._is_awake = False
        self._rested_at = asyncio.get_running_loop().time()
        self._lac_told = NO_ENTRY_ID
        self._changer: EnsembleChanger | None = None  # created when a bookie fails: most writers never need it
        self._pipeline = AddPipeline(
            self.ledger_id,
            WriterState(ledger.last_fragment.ensemble, ledger.ack_quorum, write_quorum=ledger.write_quorum),
            channel_of,
            master_key_of(ledger),
            recovery=False,
            kept_bytes=slots.kept_bytes,
            on_change=self._on_change,
            on_failed=self._on_failed,
            on_missed=self._on_missed,
        )
        self._missed: dict[str, None] = {}  # bookies that failed after closing began, before they had everything
        self._core = self._pipeline.state
        self._tasks = TaskOwner(f"ledger {self.ledger_id}", self._on_defect)

    def __repr__(self) -> str:
        return f"<LedgerWriter {self.ledger_id} {self.state.value}: {self._pipeline!r}>"

    @property
    def last_add_confirmed(self) -> int:
        return self._core.last_add_confirmed

    @property
    def bookies(self) -> tuple[str, ...]:
        """The bookies in metadata that hold any of its entries, sorted."""
        if self._bookies is None or self._bookies[0] is not self._record.ledger:
            self._bookies = self._record.ledger, bookies_of(self._record.ledger)
        return self._bookies[1]

    @property
    def last_add_pushed(self) -> int:
        return self._core.last_add_pushed

    @property
    def length(self) -> int:
        """Payload bytes of everything pushed."""
        return self._length_pushed

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of groups that were appended and not answered. The caller limits them."""
        return self._pipeline.unconfirmed.size_bytes

    @property
    def metadata(self) -> LedgerMetadata:
        return self._record.ledger

    @property
    def under_replicated(self) -> tuple[str, ...]:
        """Bookies of the ensemble that lack entries: roll over once there are enough bookies again."""
        return self._core.dropped

    @property
    def receivers(self) -> tuple[str, ...]:
        """Bookies that get new entries."""
        return self._core.receivers

    def leave_bookie(self, bookie_id: str, reason: str) -> bool:
        """Start to replace this bookie, if it gets new entries and there is a healthy spare. Return False if there is no spare.

        It also works for a ledger that is idle or has no entries. Entries that the bookie acknowledged stay acknowledged: they are
        in earlier fragments, which name it.
        """
        if self.state is not WriterPhase.OPEN or bookie_id not in self.receivers:
            return True
        if self._placement.replacement(self._core.unusable, (), doubtful=False) is None:
            return False
        self._pipeline.leave_bookie(bookie_id, reason)
        return True

    def append(self, payloads: Sequence[Buffer], on_done: GroupDone) -> EntryGroup | None:
        """Send the payloads as the next entries, as one group. Operating errors are passed to `on_done`, never raised.

        Return the group as it is sent, for a caller that needs its payloads if the ledger fails; None: the writer accepts nothing
        more.
        """
        if self.state is not WriterPhase.OPEN:
            # Later in this turn, so that groups which are being failed right now are answered before this one.
            error = self.failure or LedgerClosedError(f"ledger {self.ledger_id} is {self.state.value}", ledger_id=self.ledger_id)
            asyncio.get_running_loop().call_soon(on_done, error)
            return None
        if not self._is_awake:
            self._wake()
        state = self._core
        group = encode_group(self.ledger_id, state.last_add_pushed + 1, state.last_add_confirmed, self._length_pushed, payloads)
        self._length_pushed += sum(map(len, payloads))
        self._pipeline.push(group, on_done)
        return group

    async def close(self) -> ClosedLedger:
        """Close the ledger at LAC. What is unconfirmed fails; wait for it first. Concurrent calls share one outcome.

        Raises LedgerFencedError if another process recovers or closed it, the error that failed the writer before, or the error of
        the metadata store: the ledger may not be closed then, and another call tries again. To give up instead, call `aclose`.
        """
        if self._closing is None:
            self._begin_close()
            self._closing = self._tasks.start(self._close(), name="close")
        try:
            outcome = await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            if self._closing is not None and self._closing.cancelled():  # by `aclose`: this call was not cancelled
                name = f"the writer of ledger {self.ledger_id}"
                raise LedgerClosedError(f"{name} was given up while it was being closed", ledger_id=self.ledger_id) from None
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def aclose(self) -> None:
        """Give the writer up without closing the ledger; recovery closes it. What is unconfirmed fails."""
        if self.state is WriterPhase.OPEN:
            self.state = WriterPhase.FAILED
            self.failure = LedgerClosedError(f"the writer of ledger {self.ledger_id} was given up", ledger_id=self.ledger_id)
            self._pipeline.fail(self.failure)
        if self._changer is not None:
            await self._changer.abandon()
        await self._tasks.aclose()
        self._pipeline.unconfirmed.let_go()

    def _begin_close(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._end is None:
            self.state = WriterPhase.CLOSING
            self._end = ClosedLedger(self.last_add_confirmed, self._confirmed_length())
            error = LedgerClosedError(f"ledger {self.ledger_id} was closed at {self._end.last_entry_id}", ledger_id=self.ledger_id)
            self._pipeline.leave(error)

    def _confirmed_length(self) -> int:
        """Return the length up to LAC, which may be inside the first unconfirmed group."""
        first = self._pipeline.unconfirmed.first
        if first is None:
            return self._length_pushed
        header = first.header(first.first_entry_id)
        length_before = header.length - len(first.payload(first.first_entry_id))
        last = self.last_add_confirmed
        return first.header(last).length if last >= first.first_entry_id else length_before

    async def _close(self) -> ClosedLedger | CepheidError | TimeoutError:
        """Return errors instead of raising them: they belong to the callers of `close`."""
        assert self._end is not None
        if self._changer is not None:
            await self._changer.abandon()
        try:
            # Missing copies are marked once the ledger is closed: this process may end before that.
            await self._record.change(self._plan_close, to_check(self._store, self._record.ledger) if self._short() else ())
        except LedgerError as error:
            self.state, self.failure = WriterPhase.FAILED, error
            self._pipeline.unconfirmed.let_go()
            return error
        except (CepheidError, TimeoutError) as error:
            self._closing = None
            return error
        self.state = WriterPhase.CLOSED
        self._supply_newcomers(self._end.last_entry_id)
        self._pipeline.unconfirmed.let_go()
        self._mark_short(self._short())
        return self._end

    def _short(self) -> set[str]:
        return {*self._core.short, *self._missed}

    def _mark_short(self, bookies: set[str]) -> None:
        if short := bookies.intersection(self.bookies):
            self._on_short(self.ledger_id, sorted(short))

    def _on_missed(self, bookie_id: str) -> None:
        """Mark the copies of a bookie that was only slow when the ledger was closed, and has failed since."""
        if self.state is WriterPhase.CLOSED:
            self._mark_short({bookie_id})
        else:
            self._missed[bookie_id] = None

    def _supply_newcomers(self, last_entry_id: int) -> None:
        """Send entries to bookies of a change that closing abandoned but metadata has: otherwise they would get nothing."""
        if self._changer is None or self._changer.proposed is None:
            return
        first, replaced = self._changer.proposed
        named = self._record.ledger.last_fragment.ensemble
        self._pipeline.supply_left([bookie for bookie in replaced.values() if bookie in named], named, first, last_entry_id)

    def _plan_close(self, ledger: LedgerMetadata) -> LedgerMetadata | None:
        assert self._end is not None
        last, length = self._end
        if ledger.is_closed and (ledger.last_entry_id, ledger.length_bytes) == (last, length):
            return None  # our own close, whose answer was lost
        if ledger.state != "OPEN":  # only recovery closes a ledger in recovery
            message = f"another process set ledger {self.ledger_id} to {ledger.state} (last {ledger.last_entry_id}, ours {last})"
            raise LedgerFencedError(message, ledger_id=self.ledger_id, last_add_confirmed=last)
        return closed(ledger, last, length)

    # Idleness

    @property
    def may_rest(self) -> bool:
        return self.state is not WriterPhase.OPEN or self.last_add_confirmed == self.last_add_pushed

    def lac_to_tell(self) -> tuple[tuple[str, ...], ExplicitLac] | None:
        last = self.last_add_confirmed
        if self.state is not WriterPhase.OPEN or last <= self._lac_told:
            return None
        return self._core.receivers, ExplicitLac(self.ledger_id, last, master_key_of(self._record.ledger))

    def on_lac_told(self, last_add_confirmed: int) -> None:
        self._lac_told = max(self._lac_told, last_add_confirmed)

    def on_rest(self, now: float) -> None:
        self._is_awake, self._rested_at = False, now

    def _wake(self) -> None:
        self._is_awake = True
        self._idle_writers.wake(self)
        limit_s = self._settings.idle_check_s
        if limit_s and asyncio.get_running_loop().time() - self._rested_at > limit_s:
            self._pipeline.hold_back()
            self._tasks.start(self._look_up_state(), name="look-up-state")

    async def _look_up_state(self) -> None:
        """Look up the ledger after a long silence: the bookies that knew of a fence may be gone, but metadata has it."""
        try:
            async with asyncio.timeout(self._settings.idle_check_timeout_s):
                ledger = await self._record.reread()
        except NoSuchLedgerError as error:
            self._pipeline.fail(error)
        except (MetadataError, TimeoutError) as error:
            log.warning("ledger.idle_check_failed", extra={"ledger_id": self.ledger_id, "error": repr(error)})
            self._pipeline.release()
        else:
            if ledger.state is LedgerState.OPEN:
                self._pipeline.release()
            else:
                message = f"another process set ledger {self.ledger_id} to {ledger.state} while its writer was idle"
                self._pipeline.fail(LedgerFencedError(message, ledger_id=self.ledger_id))

    # What the pipeline reports

    def _on_change(self, change: ChangeEnsemble) -> None:
        if self._changer is None:
            self._changer = EnsembleChanger(self._pipeline, self._record, self._placement, self._slots, self._tasks, self._settings)
        self._changer.start(change)

    def _on_defect(self, error: BaseException) -> None:
        """Fail this ledger, and no other, after a defect in one of its tasks."""
        self._pipeline.fail(LedgerWriteError(f"a task of ledger {self.ledger_id} failed: {error!r}", ledger_id=self.ledger_id))

    def _on_failed(self, error: LedgerError) -> None:
        if self.state is WriterPhase.OPEN:
            self.state, self.failure = WriterPhase.FAILED, error
            fields = {"ledger_id": self.ledger_id, "lac": self.last_add_confirmed, "error": str(error)}
            log.warning("ledger.writer_failed", extra=fields)
