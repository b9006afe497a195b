"""The decisions of the writer of an open ledger about its entries, without I/O (rules 1-5 of the README).

    append ──► SendAdd ──► on_added ──► Confirm                strictly in order, once Qa bookies hold it
                  └──► on_add_failed ──► ChangeEnsemble            the driver looks for other bookies; on_leave asks for the same
                                             ├─ begin_change ──► metadata ──► on_ensemble_changed ──► SendAdd(newcomers)
                                             └─ on_change_impossible ──► continues without them, or FailLedger

A change from ensemble X to Y starts a fragment at LAC + 1, taken in `begin_change`. Until its outcome is known, metadata may
say X or Y, so only bookies that are in both count: what Qa of them hold is held by Qa under either version, and confirming
continues. Newcomers get everything from the fragment's start on, and count once the change is in force.

A bookie to be left (`on_leave`) may be healthy. It gets entries until its replacement is in force. Its acknowledgements do not
count from `begin_change` on, and count again if there is no replacement or metadata certainly did not change.

A bookie that left never returns to this ledger: late answers from its first stay would count for its second.
Recovery writes back through the same core: there an ensemble change stays in memory until the ledger is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cepheid_ledger.striping import runs_at, write_windows
from cepheid_rpc import NO_ENTRY_ID


class SendAdd(NamedTuple):  # a tuple, and one for all bookies: made once per append
    """Send entries `first..last` (inclusive) to each of these bookies; in a striped ledger each gets its `share` of them."""

    bookies: tuple[str, ...]
    first: int
    last: int


class Confirm(NamedTuple):
    """Acknowledge entries up to `last` to the caller."""

    last: int


@dataclass(frozen=True, slots=True)
class ChangeEnsemble:
    """Find other bookies for those that failed or are to be left, then call `begin_change`; or report that it is impossible.

    `failed` does not contain those that are only to be left.
    """

    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailLedger:
    """Fail the ledger: too few bookies accept entries, so nothing can be confirmed any more."""

    dropped: tuple[str, ...]


Effect: TypeAlias = SendAdd | Confirm | ChangeEnsemble | FailLedger


@dataclass(frozen=True, slots=True)
class BegunChange:
    """A change that replaces (some of) these bookies, the most urgent first; the new fragment starts at `from_entry_id`."""

    failed: tuple[str, ...]
    from_entry_id: int


class WriterState:
    """The state of an open ledger. `last_entry_id` is -1 for a new ledger; recovery starts after what is confirmed already."""

    __slots__ = (
        "_ack_quorum",
        "_acked_through",
        "_begun",
        "_change_wanted",
        "_departed",
        "_dropped",
        "_failed",
        "_held_back",
        "_leaving",
        "_receivers",
        "_short",
        "_windows",
        "_write_quorum",
        "failed_for_good",
        "last_add_confirmed",
        "last_add_pushed",
    )

    def __init__(
        self, ensemble: Sequence[str], ack_quorum: int, last_entry_id: int = NO_ENTRY_ID, *, write_quorum: int | None = None
    ) -> None:
        size = len(ensemble)
        self._write_quorum = size if write_quorum is None else write_quorum
        assert 1 <= ack_quorum <= self._write_quorum <= size == len(dict.fromkeys(ensemble))
        self._ack_quorum = ack_quorum
        self._windows = write_windows(size, self._write_quorum) if self._write_quorum < size else None
        # How far each bookie of the ensemble holds its share of everything. Its answers come in order: BookieChannel ensures that.
        self._acked_through = dict.fromkeys(ensemble, last_entry_id)
        self._failed: dict[str, None] = {}  # to be replaced, and not counted; dicts, not sets: effects must not depend on hashing
        self._dropped: dict[str, None] = {}  # failed without a replacement so far: named by metadata, but gets no more entries
        self._leaving: dict[str, None] = {}  # to be replaced if there is a spare; they get entries until then
        self._departed: dict[str, None] = {}  # replaced
        self._short: dict[str, None] = {}  # replaced before they had acknowledged everything in their fragments
        self._change_wanted = False  # the driver owes a result
        self._begun: BegunChange | None = None
        self._held_back = False
        self._receivers = tuple(ensemble)
        self.failed_for_good = False
        self.last_add_pushed = self.last_add_confirmed = last_entry_id

    def __repr__(self) -> str:
        held = " ".join(
            f"{bookie}:{acked}{'!' * (bookie in self._failed)}{'x' * (bookie in self._dropped)}{'?' * (bookie in self._leaving)}"
            for bookie, acked in self._acked_through.items()
        )
        change = f", changing from {self._begun.from_entry_id}" if self._begun is not None else ""
        return f"<WriterState pushed {self.last_add_pushed}, confirmed {self.last_add_confirmed}, {held}{change}>"

    @property
    def ensemble(self) -> tuple[str, ...]:
        return tuple(self._acked_through)

    @property
    def write_quorum(self) -> int:
        return self._write_quorum

    @property
    def receivers(self) -> tuple[str, ...]:
        """Bookies of the ensemble that get new entries."""
        return self._receivers

    @property
    def dropped(self) -> tuple[str, ...]:
        """Bookies of the ensemble that lack entries: the fragment is under-replicated."""
        return tuple(self._dropped)

    @property
    def short(self) -> tuple[str, ...]:
        """The bookies that may lack confirmed entries: for repair, once the ledger is closed.

        A bookie that is only slow is left out: it has its share once it has processed its queue.
        """
        failed = (bookie for bookie in self._failed if self._acked_through[bookie] < self.last_add_confirmed)
        return tuple(dict.fromkeys((*self._short, *self._dropped, *failed)))

    @property
    def unusable(self) -> tuple[str, ...]:
        """Bookies that must not be chosen as replacements: they are in the ensemble, or were in it before."""
        return (*self._acked_through, *self._departed)

    @property
    def is_striped(self) -> bool:
        return self._windows is not None

    @property
    def is_changing(self) -> bool:
        return self._change_wanted

    @property
    def has_quorum(self) -> bool:
        """Whether the bookies that still accept entries reach Qa in every write set."""
        return self._reach_quorum(self._receivers)

    def acked_through(self, bookie: str) -> int:
        return self._acked_through[bookie]

    def share(self, bookie: str, first: int, last: int) -> list[tuple[int, int]]:
        """Return the runs of `first..last` that this bookie holds by its position."""
        return self.share_at(list(self._acked_through).index(bookie), first, last)

    def share_at(self, position: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the same for a bookie that only metadata has at this position."""
        return runs_at(position, first, last, len(self._acked_through), self._write_quorum)

    def append(self, count: int) -> SendAdd:
        assert count > 0
        assert not self.failed_for_good
        first, self.last_add_pushed = self.last_add_pushed + 1, self.last_add_pushed + count
        return SendAdd(self._receivers, first, self.last_add_pushed)

    def on_added(self, bookie: str, last: int) -> Confirm | None:
        """Note that the bookie holds its share of everything up to `last`."""
        acked = self._acked_through
        if bookie not in acked or bookie in self._failed or bookie in self._dropped or self.failed_for_good:
            return None  # a late answer of a bookie that is out: its copy no longer counts
        assert acked[bookie] <= last <= self.last_add_pushed  # checked by BookieChannel, where peers are not trusted
        acked[bookie] = last
        return self._confirm()

    def on_add_failed(self, bookie: str) -> list[Effect]:
        if bookie in self._acked_through and bookie not in self._dropped and not self.failed_for_good:
            self._failed[bookie] = None
            self._leaving.pop(bookie, None)
            self._receivers = tuple(b for b in self._receivers if b != bookie)
        return self._go_on()

    def on_leave(self, bookie: str) -> list[Effect]:
        """Ask for a replacement of a bookie that has not failed here. Without one it stays a full member."""
        if bookie not in self._receivers or bookie in self._leaving or self.failed_for_good:
            return []
        self._leaving[bookie] = None
        return self._go_on()

    # Ensemble change

    def retry_change(self) -> list[Effect]:
        """Try again to replace bookies that were dropped: there may be a spare by now."""
        if self.failed_for_good or self._change_wanted or not self._dropped:
            return []
        return [self._want_change()]

    def begin_change(self) -> BegunChange:
        """Take the new fragment's start before metadata is changed. Call it again only if the last attempt certainly left no
        trace."""
        assert self._change_wanted
        assert not self.failed_for_good
        self._failed.update(self._dropped)  # what they acknowledged stops counting: the change may replace them
        self._begun = BegunChange((*self._failed, *self._left_now()), self.last_add_confirmed + 1)
        return self._begun

    def keep_unreplaced(self, replaced: Mapping[str, str]) -> None:
        """Count bookies again that were only to be left, and for which the change that just started has no replacement.

        Call it between `begin_change` and `on_ensemble_changed` if bookies are left; recovery leaves none.
        """
        assert self._begun is not None
        failed, first = self._begun.failed, self._begun.from_entry_id
        self._begun = BegunChange(tuple(bookie for bookie in failed if bookie in self._failed or bookie in replaced), first)
        for bookie in failed:
            if bookie not in self._begun.failed:
                del self._leaving[bookie]

    def _left_now(self) -> list[str]:
        """Return the bookies to leave with the next change: those that the quorum can do without until it is in force.

        The others wait for a change of their own. If Qa is Qw, that change delays confirming like that of a failed bookie.
        """
        left: list[str] = []
        for bookie in self._leaving:
            others = [other for other in self._receivers if other != bookie and other not in left]
            if self._reach_quorum(others) or not (self._failed or left):
                left.append(bookie)
        return left

    def on_ensemble_changed(self, replaced: Mapping[str, str], *, supplied: bool = True) -> list[Effect]:
        """Take a change that is in force (in metadata, or in the memory of a recovery).

        Not `supplied`: the entries that the newcomers need are not in memory any more; the newcomers are dropped at once.
        """
        begun, self._begun, self._change_wanted = self._begun, None, False
        assert begun is not None
        assert replaced
        assert all(old in begun.failed for old in replaced)
        assert not any(new in self.unusable for new in replaced.values()), f"{replaced} brings back one of {self.unusable}"
        first, last = begun.from_entry_id, self.last_add_pushed
        # Entries that were confirmed without this bookie before the change began are not sent to it again.
        self._short.update((old, None) for old in replaced if self._acked_through[old] < first - 1)
        self._acked_through = {
            replaced.get(bookie, bookie): first - 1 if bookie in replaced else acked
            for bookie, acked in self._acked_through.items()  # a place in the ensemble keeps its position
        }
        for old in begun.failed:
            if old in replaced:
                self._dropped.pop(old, None)
                self._departed[old] = None
            else:
                assert old in self._failed, f"{old} has not failed: `keep_unreplaced` removes it from the change"
                self._dropped[old] = None
            self._failed.pop(old, None)
            self._leaving.pop(old, None)
        newcomers = tuple(replaced.values())
        self._receivers = tuple(bookie for bookie in self._receivers if bookie not in replaced)
        if not supplied:
            self._dropped.update(dict.fromkeys(newcomers))
            return self._go_on()
        self._receivers = (*self._receivers, *newcomers)
        resend = [SendAdd(newcomers, first, last)] if first <= last else []
        return [*resend, *self._go_on()]

    def on_change_impossible(self) -> list[Effect]:
        """Continue without a change (no spare bookie, or metadata certainly unchanged), while the others can reach Qa."""
        assert self._change_wanted
        in_change = (*self._failed, *self._leaving) if self._begun is None else self._begun.failed
        self._change_wanted, self._begun = False, None
        for bookie in in_change:
            if bookie in self._failed:
                del self._failed[bookie]
                self._dropped[bookie] = None
            else:  # it is healthy, and stays
                del self._leaving[bookie]
        # Those that were to wait for a change of their own stay, too. Dropped bookies come first in each change, so the next one
        # would be this same change again, at once and without end.
        self._leaving.clear()
        return self._go_on()

    # Confirming

    def hold_back(self) -> None:
        """Confirm nothing until `release`, while a lookup shows whether the ledger is still ours."""
        self._held_back = True

    def release(self) -> Confirm | None:
        self._held_back = False
        return None if self.failed_for_good else self._confirm()

    def fail(self) -> None:
        """Confirm nothing from now on, whatever still arrives: fenced, refused or given up."""
        self.failed_for_good = True

    def can_do_without(self, bookie: str) -> bool:
        """Whether the others reach Qa, and hold what this bookie still has to acknowledge: without it only a copy is missing."""
        if self._acked_through.get(bookie, self.last_add_pushed) >= self.last_add_confirmed:
            return False
        return self._reach_quorum([other for other in self._receivers if other != bookie and other not in self._leaving])

    def _go_on(self) -> list[Effect]:
        if self.failed_for_good:
            return []
        confirm = self._confirm()
        effects: list[Effect] = [] if confirm is None else [confirm]
        if self._change_wanted:
            return effects
        if self._failed:
            effects.append(self._want_change())
        elif not self.has_quorum:
            self.failed_for_good = True
            effects.append(FailLedger(self.dropped))
        elif self._leaving:
            effects.append(self._want_change())
        return effects

    def _want_change(self) -> ChangeEnsemble:
        self._change_wanted = True
        return ChangeEnsemble((*self._failed, *(bookie for bookie in self._dropped if bookie not in self._failed)))

    def _reach_quorum(self, bookies: Sequence[str]) -> bool:
        if self._windows is None:
            return len(bookies) >= self._ack_quorum
        there = [bookie in bookies for bookie in self._acked_through]
        return all(sum(there[position] for position in window) >= self._ack_quorum for window in self._windows)

    def _confirm(self) -> Confirm | None:
        if self._held_back:
            return None
        # What a dropped bookie acknowledged while it was healthy still counts: metadata names it, and it holds the bytes.
        # One that failed or is left may be replaced by the change in progress: it is not in both ensembles.
        counted: Iterable[int] = self._acked_through.values()
        if self._failed or self._begun is not None:
            out = self._failed if self._begun is None else {*self._failed, *self._begun.failed}
            counted = [NO_ENTRY_ID if bookie in out else held for bookie, held in self._acked_through.items()]
        if self._windows is None:
            reached = sorted(counted, reverse=True)[self._ack_quorum - 1]
        else:
            reached = self._reached_striped(list(counted), self._windows)
        if reached <= self.last_add_confirmed:
            return None
        self.last_add_confirmed = reached
        return Confirm(reached)

    def _reached_striped(self, counted: Sequence[int], windows: Sequence[Sequence[int]]) -> int:
        """Return the last entry before the first that lacks its quorum. Entries e with e mod E = c share a write set, window c."""
        size, nearest = len(windows), self.last_add_pushed + 1
        for remainder, window in enumerate(windows):
            reached = sorted((counted[position] for position in window), reverse=True)[self._ack_quorum - 1]
            behind = max(reached, self.last_add_confirmed) + 1  # the next entry of this window that lacks its quorum
            nearest = min(nearest, behind + (remainder - behind) % size)
        return nearest - 1
