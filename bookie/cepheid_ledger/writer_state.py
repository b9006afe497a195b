"""What one open ledger decides about its entries, without I/O (rules 1-5 of the README). E = Qw: every bookie gets every entry.

    append ──► SendAdd ──► on_added ──► Confirm                strictly in order, once Qa bookies hold it
                  └──► on_add_failed ──► ChangeEnsemble ──► on_ensemble_changed ──► SendAdd(new bookies, LAC+1 .. last pushed)
                                               └──► on_change_impossible ──► goes on without them, or FailLedger

A bookie that left never returns to this ledger: late answers of its first stay would count for its second.
Recovery writes back through the same core: there an ensemble change stays in memory until the ledger is closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cepheid_rpc import NO_ENTRY_ID


class SendAdd(NamedTuple):  # a tuple, and one for all bookies: made once per append
    """Entries `first..last` (inclusive) go to each of these bookies."""

    bookies: tuple[str, ...]
    first: int
    last: int


class Confirm(NamedTuple):
    """Entries up to `last` are acknowledged to the caller."""

    last: int


@dataclass(frozen=True, slots=True)
class ChangeEnsemble:
    """Find others for the failed bookies; the new fragment starts at `from_entry_id`. Nothing is confirmed meanwhile."""

    failed: tuple[str, ...]
    from_entry_id: int


@dataclass(frozen=True, slots=True)
class FailLedger:
    """Fewer than Qa bookies are left that take entries: nothing can be confirmed any more."""

    dropped: tuple[str, ...]


Effect: TypeAlias = SendAdd | Confirm | ChangeEnsemble | FailLedger


class WriterState:
    """`last_entry_id` is -1 for a new ledger; recovery starts behind what is confirmed already."""

    __slots__ = (
        "_ack_quorum",
        "_acked_through",
        "_change_pending",
        "_departed",
        "_dropped",
        "_failed",
        "_receivers",
        "failed_for_good",
        "last_add_confirmed",
        "last_add_pushed",
    )

    def __init__(self, ensemble: Sequence[str], ack_quorum: int, last_entry_id: int = NO_ENTRY_ID) -> None:
        assert 1 <= ack_quorum <= len(ensemble) == len(dict.fromkeys(ensemble))
        self._ack_quorum = ack_quorum
        # How far each bookie of the ensemble holds everything; its answers come in order, BookieChannel sees to it.
        self._acked_through = dict.fromkeys(ensemble, last_entry_id)
        self._failed: dict[str, None] = {}  # to be replaced; dicts, not sets: effects must not depend on hashing
        self._dropped: dict[str, None] = {}  # failed without a replacement: named by metadata, but gets nothing more
        self._departed: dict[str, None] = {}  # replaced
        self._change_pending = False
        self._receivers = tuple(ensemble)
        self.failed_for_good = False
        self.last_add_pushed = self.last_add_confirmed = last_entry_id

    def __repr__(self) -> str:
        held = " ".join(
            f"{bookie}:{acked}{'!' * (bookie in self._failed)}{'x' * (bookie in self._dropped)}"
            for bookie, acked in self._acked_through.items()
        )
        return f"<WriterState pushed {self.last_add_pushed}, confirmed {self.last_add_confirmed}, {held}>"

    @property
    def ensemble(self) -> tuple[str, ...]:
        return tuple(self._acked_through)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Bookies of the ensemble that lack entries: the fragment is under-replicated."""
        return tuple(self._dropped)

    @property
    def unusable(self) -> tuple[str, ...]:
        """Bookies that must not be chosen as replacements: they are in the ensemble, or were in it before."""
        return (*self._acked_through, *self._departed)

    def acked_through(self, bookie: str) -> int:
        return self._acked_through[bookie]

    def append(self, count: int) -> SendAdd:
        assert count > 0
        assert not self.failed_for_good
        first, self.last_add_pushed = self.last_add_pushed + 1, self.last_add_pushed + count
        return SendAdd(self._receivers, first, self.last_add_pushed)

    def on_added(self, bookie: str, last: int) -> Confirm | None:
        """The bookie holds everything up to `last`."""
        acked = self._acked_through
        if bookie not in acked or bookie in self._failed or bookie in self._dropped or self.failed_for_good:
            return None  # late news from a bookie that is out: its copy no longer counts
        assert acked[bookie] <= last <= self.last_add_pushed  # checked by BookieChannel, where peers are not trusted
        acked[bookie] = last
        return self._confirm() if not self._failed else None

    def on_add_failed(self, bookie: str) -> list[Effect]:
        if bookie in self._acked_through and bookie not in self._dropped and not self.failed_for_good:
            self._failed[bookie] = None
            self._receivers = tuple(b for b in self._receivers if b != bookie)
        return self._change_or_confirm()

    def on_ensemble_changed(self, replaced: Mapping[str, str]) -> list[Effect]:
        """The change is in force (in metadata, or in the memory of a recovery)."""
        assert self._change_pending
        assert replaced.keys() <= self._failed.keys()
        assert not any(new in self.unusable for new in replaced.values()), f"{replaced} brings back one of {self.unusable}"
        self._change_pending = False
        first, last = self.last_add_confirmed + 1, self.last_add_pushed
        self._acked_through = {
            replaced.get(bookie, bookie): first - 1 if bookie in replaced else acked
            for bookie, acked in self._acked_through.items()  # a place in the ensemble keeps its position
        }
        for old in replaced:
            del self._failed[old]
            self._departed[old] = None
        newcomers = tuple(replaced.values())
        self._receivers = (*self._receivers, *newcomers)
        resend = [SendAdd(newcomers, first, last)] if newcomers and first <= last else []
        return [*resend, *self._change_or_confirm()]

    def on_change_impossible(self) -> list[Effect]:
        """There is no spare bookie: what failed gets nothing more, the others go on while they can reach Qa."""
        assert self._change_pending
        self._change_pending = False
        self._dropped.update(self._failed)
        self._failed.clear()
        if len(self._receivers) < self._ack_quorum:
            self.failed_for_good = True
            return [FailLedger(self.dropped)]
        return self._change_or_confirm()

    def fail(self) -> None:
        """Fenced, refused or given up: nothing is confirmed from now on, whatever still arrives."""
        self.failed_for_good = True

    def can_do_without(self, bookie: str) -> bool:
        """The others reach Qa, and hold what this one still has to answer: giving it up costs a copy, not progress."""
        others = len(self._receivers) - (bookie in self._receivers)
        return others >= self._ack_quorum and self._acked_through.get(bookie, self.last_add_pushed) < self.last_add_confirmed

    def _change_or_confirm(self) -> list[Effect]:
        if self.failed_for_good or self._change_pending:
            return []
        if self._failed:  # confirm nothing meanwhile: the new fragment starts at LAC+1, and that must stay true
            self._change_pending = True
            return [ChangeEnsemble(tuple(self._failed), from_entry_id=self.last_add_confirmed + 1)]
        confirm = self._confirm()
        return [] if confirm is None else [confirm]

    def _confirm(self) -> Confirm | None:
        # What a dropped bookie acknowledged while it was well still counts: metadata names it, and it holds the bytes.
        reached = sorted(self._acked_through.values(), reverse=True)[self._ack_quorum - 1]
        if reached <= self.last_add_confirmed:
            return None
        self.last_add_confirmed = reached
        return Confirm(reached)
