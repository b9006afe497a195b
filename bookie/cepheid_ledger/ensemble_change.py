"""Replaces bookies of an open ledger that failed or are to be left: the driver of an ensemble change, one per writer.

    on_change ──► wait for a slot ──► begin (LAC + 1), choose ──► compare-and-set ──► in force: send to the newcomers
        ▲                                  │ no spare                 ├── certainly refused: continue without, retry later
        └────── ChangeSlots: retry ◄───────┴──────────────────────────┤
                                                                      ├── unknown: insist with the same bookies
                                                                      └── in recovery or closed by another process: fenced

Rules:
1. An unknown outcome is looked up until it is known. Giving up would leave a change behind that takes effect later.
2. Neither a missing spare nor an outage of metadata stops a ledger that has Qa bookies. One that has fewer waits for metadata
   for `ensemble_change_timeout_s`, and fails at once if there is no spare: a new ledger finds bookies that this one may not
   use again.
3. A bookie in quarantine is used only if the ledger cannot continue otherwise, or lacked copies for
   `quarantined_spare_after_s`. Each gets one chance: a bookie that left never returns, so that this ends.
4. A bookie that is only to be left (it is gone from metadata, or draining) is left only for a healthy spare. Without one, or if
   metadata certainly did not change, it stays in the ensemble, gets entries and counts; the caller repeats the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.change_slots import ChangeSlots
from cepheid_ledger.errors import LedgerError, LedgerFencedError, LedgerWriteError
from cepheid_ledger.metadata_edits import ensemble_changed
from cepheid_ledger.placement import Placement
from cepheid_ledger.rack_spread import Vacancy
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.writer_record import WriterRecord
from cepheid_ledger.writer_state import BegunChange, ChangeEnsemble
from cepheid_metadata import LedgerMetadata, LedgerState, MetadataError, StoreClosedError
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)


class EnsembleChanger:
    """The ensemble changes of one ledger.

    `proposed` is the change that metadata may have while that is unknown: the fragment's start, and which bookie replaces which.
    """

    def __init__(
        self,
        pipeline: AddPipeline,
        record: WriterRecord,
        placement: Placement,
        slots: ChangeSlots,
        tasks: TaskOwner,
        settings: LedgerSettings,
    ) -> None:
        self.proposed: tuple[int, Mapping[str, str]] | None = None
        self._last_error: Exception | None = None
        self._short_since: float | None = None  # loop time since which bookies were missing
        self._in_doubt = False  # an attempt for `proposed` may have come into force, or may still do so
        self._pipeline = pipeline
        self._record = record
        self._placement = placement
        self._slots = slots
        self._tasks = tasks
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def start(self, change: ChangeEnsemble) -> None:
        """Start a change. Called by the pipeline, which waits for the outcome."""
        dropped = self._pipeline.state.dropped
        for bookie in change.failed:
            if bookie not in dropped:  # otherwise it failed long ago, and may be healthy for other ledgers
                self._placement.quarantine(bookie)
        self._slots.begin_soon(self._start)

    def _start(self) -> None:
        if not self._pipeline.state.failed_for_good:  # otherwise the writer was closed, or failed, in between
            self._task = self._tasks.start(self._run(), name="change-ensemble")

    async def abandon(self) -> None:
        """Stop a running change before another process changes the record. `proposed` may be in force then."""
        self._slots.forget(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def retry(self) -> bool:
        """Try again to replace bookies that had no replacement. False: there is still no spare."""
        pipeline = self._pipeline
        if pipeline.state.failed_for_good or pipeline.state.is_changing or not pipeline.state.dropped:
            return True
        if all(self._spare_for(bookie, {}) is None for bookie in pipeline.state.dropped):
            return False
        pipeline.retry_change()
        return True

    async def _run(self) -> None:
        loop, pipeline = asyncio.get_running_loop(), self._pipeline
        deadline = 0.0
        try:
            while not pipeline.state.failed_for_good:
                if pipeline.state.has_quorum or not deadline:
                    deadline = loop.time() + self._settings.ensemble_change_timeout_s
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._slots.take()
                except TimeoutError:
                    pass  # too many others wait for metadata as well
                else:
                    try:
                        if await self._attempt():
                            return
                    finally:
                        self._slots.give_back()
                if loop.time() >= deadline and not pipeline.state.has_quorum:
                    raise self._too_late()
                await asyncio.sleep(self._settings.metadata_retry_s)
        except LedgerError as error:  # fenced, deleted, or too late
            pipeline.fail(error)

    async def _attempt(self) -> bool:
        """Try once; return whether the change is decided. After a failure of the writer there is nothing to decide."""
        pipeline = self._pipeline
        if pipeline.state.failed_for_good:
            return True
        if self.proposed is None and not self._begin():
            self._refuse("no spare bookie")
            return True
        assert self.proposed is not None
        first_entry_id, replaced = self.proposed
        try:
            await self._record.change(lambda ledger: _plan_change(ledger, first_entry_id, replaced))
        except (MetadataError, TimeoutError) as error:
            # If the store is closed during a write, the outcome stays unknown.
            is_unknown = isinstance(error, TimeoutError | StoreClosedError) or getattr(error, "outcome_unknown", False)
            return self._take_failure(error, is_unknown)
        self.proposed = None
        self._slots.on_metadata(is_away=False)
        if not pipeline.state.failed_for_good:
            fields = {"ledger_id": self._record.ledger.ledger_id, "entry_id": first_entry_id, "bookie": dict(replaced)}
            log.info("ledger.ensemble_changed", extra=fields)
            pipeline.change_ensemble(replaced)
        self._note_shortage()
        if pipeline.state.dropped and not pipeline.state.failed_for_good:  # too few spares, or too much to send to them
            self._slots.retry_later(self)
        return True

    def _begin(self) -> bool:
        """Take the start and the bookies in one step. False: there is no spare."""
        begun = self._pipeline.begin_change()
        replaced = self._choose(begun)
        self._pipeline.state.keep_unreplaced(replaced)
        if replaced:
            self.proposed, self._in_doubt = (begun.from_entry_id, replaced), False
        return bool(replaced)

    def _choose(self, begun: BegunChange) -> dict[str, str]:
        replaced: dict[str, str] = {}
        for old in begun.failed:
            new = self._spare_for(old, replaced)
            if new is not None:
                replaced[old] = new
        return replaced

    def _spare_for(self, bookie: str, replaced: Mapping[str, str]) -> str | None:
        state = self._pipeline.state
        vacancy = Vacancy.of(bookie, state.ensemble, replaced, state.write_quorum)
        doubtful = bookie not in state.receivers and self._takes_doubtful()
        return self._placement.replacement(state.unusable, replaced.values(), doubtful=doubtful, vacancy=vacancy)

    def _note_shortage(self) -> None:
        if not self._pipeline.state.dropped:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = asyncio.get_running_loop().time()

    def _takes_doubtful(self) -> bool:
        """Whether a bookie in quarantine may be used (rule 3)."""
        if not self._pipeline.state.has_quorum:
            return True
        if self._short_since is None:
            return False
        return asyncio.get_running_loop().time() - self._short_since >= self._settings.quarantined_spare_after_s

    def _take_failure(self, error: Exception, is_unknown: bool) -> bool:
        self._last_error = error
        self._slots.on_metadata(is_away=True)
        self._in_doubt = self._in_doubt or is_unknown
        if self._in_doubt:
            return False
        self.proposed = None
        if not self._pipeline.state.has_quorum:
            return False
        self._refuse(str(error))
        return True

    def _too_late(self) -> LedgerWriteError:
        ledger_id, waited_s = self._record.ledger.ledger_id, self._settings.ensemble_change_timeout_s
        waited = f"metadata could not be changed for {waited_s:g} s ({self._last_error or 'too many ledgers wait'})"
        message = f"ledger {ledger_id} has too few bookies left that accept entries, and {waited}"
        return LedgerWriteError(message, ledger_id=ledger_id, bookies=self._pipeline.state.dropped)

    def _refuse(self, reason: str) -> None:
        pipeline = self._pipeline
        before = pipeline.state.dropped
        pipeline.refuse_change()
        self._note_shortage()
        if pipeline.state.failed_for_good or not pipeline.state.dropped:
            return
        if pipeline.state.dropped != before:  # a retry that did not help is not logged
            fields = {"ledger_id": self._record.ledger.ledger_id, "bookie": pipeline.state.dropped, "error": reason}
            log.warning("ledger.under_replicated", extra=fields)
        self._slots.retry_later(self)


def _plan_change(ledger: LedgerMetadata, first_entry_id: int, replaced: Mapping[str, str]) -> LedgerMetadata | None:
    if ledger.state is not LedgerState.OPEN:
        message = f"another process set ledger {ledger.ledger_id} to {ledger.state}: this writer may not change its ensemble"
        raise LedgerFencedError(message, ledger_id=ledger.ledger_id)
    return ensemble_changed(ledger, first_entry_id, replaced)
