"""Sends groups to an ensemble and answers them in order: the driver of `WriterState`, for a writer and for recovery alike.

    push ──► WriterState ──SendAdd──► lanes ──► bookies
               ▲  │ └─Confirm──► Unconfirmed ──► on_done of each group, in order
               │  └─ChangeEnsemble──► on_change ──► begin_change, then change_ensemble; or refuse_change
               └── on_added / on_add_failed

It only executes, and works per group. What an ensemble change *means* (metadata, or only the memory of a recovery) is decided by
its owner in `on_change`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.errors import LedgerError, LedgerFencedError, LedgerWriteError, UnauthorizedLedgerError
from cepheid_ledger.lane import Lane
from cepheid_ledger.unconfirmed import GroupDone, KeptBytes, Unconfirmed
from cepheid_ledger.writer_state import BegunChange, ChangeEnsemble, Confirm, Effect, FailLedger, SendAdd, WriterState
from cepheid_rpc import AddRequest, EntryGroup, Status

log = logging.getLogger(__name__)


class AddPipeline:
    """The adds of one ledger. Implements `LaneListener`.

    `on_change` must lead to `begin_change` and `change_ensemble`, or to `refuse_change`, now or later. `on_failed` is called
    once, before the groups that are left get the same error. `on_missed` is called for a bookie that failed after `leave`, and so
    does not get what was still queued for it.
    """

    def __init__(
        self,
        ledger_id: int,
        state: WriterState,
        channel_of: Callable[[str], BookieChannel],
        master_key: bytes,
        *,
        recovery: bool,
        kept_bytes: KeptBytes,
        on_change: Callable[[ChangeEnsemble], None],
        on_failed: Callable[[LedgerError], None],
        on_missed: Callable[[str], None],
    ) -> None:
        self.state = state
        self.unconfirmed = Unconfirmed(kept_bytes)
        self._ledger_id = ledger_id
        self._master_key = master_key
        self._recovery = recovery
        self._is_striped = state.is_striped
        self._channel_of = channel_of
        self._on_change = on_change
        self._on_failed = on_failed
        self._on_missed = on_missed
        self._reasons: dict[str, str] = {}  # of bookies that failed
        self._lanes: dict[str, tuple[BookieChannel, Lane]] = {}
        self._open_lanes(state.ensemble)

    def __repr__(self) -> str:
        return f"<AddPipeline of ledger {self._ledger_id}: {self.state!r}, {self.unconfirmed!r}>"

    def push(self, group: EntryGroup, on_done: GroupDone) -> None:
        """Send a group whose first entry is the next of the ledger."""
        bookies, first, last = self.state.append(len(group.ends))
        assert first == group.first_entry_id
        self.unconfirmed.push(last, group, on_done)
        if self._is_striped:
            for bookie in bookies:
                self._send(bookie, [group])
            return
        request = AddRequest(group, self._master_key, self._recovery)
        lanes = self._lanes
        for bookie in bookies:
            channel, lane = lanes[bookie]
            channel.send(lane, request)

    def fail(self, error: LedgerError) -> None:
        """End at once: nothing is confirmed any more, and what is left fails with `error`."""
        if not self.state.failed_for_good:
            self.state.fail()
            self.unconfirmed.let_go()
            self._finish(error)

    def leave(self, error: LedgerError) -> None:
        """End like `fail`, but still send what is queued to bookies that lag behind the quorum.

        What is kept for newcomers stays until the owner lets it go: see `supply_left`.
        """
        if not self.state.failed_for_good:
            self.state.fail()
            for channel, lane in self._lanes.values():
                channel.leave_lane(lane, self._on_missed)
            self._lanes.clear()
            self._finish(error)

    # Ensemble change; the owner calls these in response to `on_change`

    def begin_change(self) -> BegunChange:
        """Keep everything from the new fragment's start on for the newcomers: metadata is changed next."""
        begun = self.state.begin_change()
        self.unconfirmed.keep()
        return begun

    def change_ensemble(self, replaced: Mapping[str, str]) -> None:
        """Apply a change that is in force."""
        for old in replaced:
            self._close_lane(old)
        self._open_lanes(replaced.values())
        effects = self.state.on_ensemble_changed(replaced, supplied=self.unconfirmed.is_keeping)
        self._perform(effect for effect in effects if isinstance(effect, SendAdd))
        self.unconfirmed.let_go()
        self._perform(effect for effect in effects if not isinstance(effect, SendAdd))

    def refuse_change(self) -> None:
        """Continue without a change: there are no other bookies, or metadata certainly did not change."""
        self.unconfirmed.let_go()
        self._perform(self.state.on_change_impossible())

    def leave_bookie(self, bookie_id: str, reason: str) -> None:
        """Ask for a replacement of a bookie that may be healthy. Its lane stays open until the replacement is in force."""
        effects = self.state.on_leave(bookie_id)
        if effects:
            log.info("ledger.bookie_leaving", extra={"ledger_id": self._ledger_id, "bookie": bookie_id, "reason": reason})
        self._perform(effects)

    def retry_change(self) -> None:
        """Try again to replace bookies that were dropped: there may be a spare by now."""
        self._perform(self.state.retry_change())

    def supply_left(self, newcomers: Sequence[str], ensemble: Sequence[str], first: int, last: int) -> None:
        """After `leave`, send `first..last`, if still in memory, to bookies of a change that came into force meanwhile."""
        if self.unconfirmed.is_keeping:
            self._open_lanes(newcomers)
            for bookie in newcomers:
                self._send(bookie, self.unconfirmed.view(first, last), ensemble.index(bookie))
                channel, lane = self._lanes.pop(bookie)
                channel.leave_lane(lane, self._on_missed)

    # Checking that the ledger is still ours

    def hold_back(self) -> None:
        """Confirm nothing until `release`."""
        self.state.hold_back()

    def release(self) -> None:
        if (confirm := self.state.release()) is not None:
            self.unconfirmed.complete_through(confirm.last)

    # Reports of the lanes

    def on_added(self, bookie_id: str, last_entry_id: int) -> None:
        try:
            confirm = self.state.on_added(bookie_id, last_entry_id)
        except AssertionError as error:  # stops this ledger, and no other that uses the bookie
            log.exception("ledger.invariant_broken", extra={"ledger_id": self._ledger_id, "error": repr(error)})
            self.fail(LedgerWriteError(f"an invariant of ledger {self._ledger_id} is broken: {self.state!r}"))
            return
        if confirm is not None:
            self.unconfirmed.complete_through(confirm.last)

    def on_add_failed(self, bookie_id: str, reason: str) -> None:
        self._reasons[bookie_id] = reason
        fields = {"ledger_id": self._ledger_id, "bookie": bookie_id, "error": reason}
        log.warning("ledger.bookie_failed", extra=fields)
        self._perform(self.state.on_add_failed(bookie_id))

    def on_refused_for_good(self, bookie_id: str, status: Status) -> None:
        name = f"ledger {self._ledger_id}"
        facts = {"ledger_id": self._ledger_id, "bookie": bookie_id, "last_add_confirmed": self.state.last_add_confirmed}
        if status is Status.FENCED:
            self.fail(LedgerFencedError(f"{name} is fenced on bookie {bookie_id}", **facts))
        else:
            self.fail(UnauthorizedLedgerError(f"bookie {bookie_id} knows {name} under another key", **facts))

    def can_do_without(self, bookie_id: str) -> bool:
        return self.state.can_do_without(bookie_id)

    # Effects

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAdd(bookies, first, last):
                    groups = self.unconfirmed.view(first, last)
                    for bookie in bookies:
                        self._send(bookie, groups)
                case Confirm(last):
                    self.unconfirmed.complete_through(last)
                case ChangeEnsemble():
                    self._on_change(effect)
                case FailLedger(dropped):
                    self.unconfirmed.let_go()
                    why = ", ".join(f"{bookie}: {self._reasons.get(bookie, 'failed')}" for bookie in dropped)
                    message = f"ledger {self._ledger_id} has too few bookies left that accept entries ({why})"
                    self._finish(LedgerWriteError(message, ledger_id=self._ledger_id, bookies=dropped))

    def _send(self, bookie: str, groups: Iterable[EntryGroup], position: int | None = None) -> None:
        lane = self._lanes.get(bookie)
        if lane is None:
            return  # it failed during a send to it or to another one
        for group in groups:
            runs = [group] if not self._is_striped else self._share_of(bookie, group, position)
            for run in runs:
                lane[0].send(lane[1], AddRequest(run, self._master_key, self._recovery))

    def _share_of(self, bookie: str, group: EntryGroup, position: int | None) -> list[EntryGroup]:
        first, last = group.first_entry_id, group.last_entry_id
        runs = self.state.share(bookie, first, last) if position is None else self.state.share_at(position, first, last)
        return [group.slice(run_first, run_last) for run_first, run_last in runs]

    def _finish(self, error: LedgerError) -> None:
        for bookie in list(self._lanes):
            self._close_lane(bookie)
        self._on_failed(error)
        self.unconfirmed.fail(error)

    def _open_lanes(self, bookies: Iterable[str]) -> None:
        for bookie in bookies:
            channel = self._channel_of(bookie)
            self._lanes[bookie] = channel, channel.open_lane(self._ledger_id, self)

    def _close_lane(self, bookie: str) -> None:
        channel, lane = self._lanes.pop(bookie)
        channel.close_lane(lane)
