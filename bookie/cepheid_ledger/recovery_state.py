"""The decision where a ledger ends, without I/O (rules 7 and 8 of the README).

    fencing LAC reads ──► FenceCoverage ──covered──► recovery reads ──► RecoveryReads ──► present, present, …, absent

Three answers are kept apart everywhere: a valid copy, a *certain* no, and unknown. One copy makes an entry present;
Qw - Qa + 1 certain noes of its write set make it absent, since then fewer than Qa bookies can ever hold it: the noes come
from fencing reads, and a fenced bookie takes it no more. Unknown counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_rpc import EntryGroup


def write_set_positions(entry_id: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the positions in the ensemble that hold this entry."""
    return tuple((entry_id + i) % ensemble_size for i in range(write_quorum))


def holds_any(position: int, first: int, last: int, ensemble_size: int, write_quorum: int) -> bool:
    """Whether an entry of `first..last` (inclusive) belongs to this position."""
    skipped = (position - write_quorum + 1 - first) % ensemble_size  # to the start of its next run of Qw entries
    return skipped <= last - first or skipped > ensemble_size - write_quorum


class FenceCoverage:
    """Whether a fence is complete: every Qw neighbours in the ensemble contain fewer than Qa that may not be fenced."""

    def __init__(self, ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
        assert ensemble_size >= write_quorum >= ack_quorum >= 1
        self._needed = write_quorum - ack_quorum + 1
        self._windows = [write_set_positions(first, ensemble_size, write_quorum) for first in range(ensemble_size)]
        self._fenced = [False] * ensemble_size
        self._unknown = [False] * ensemble_size

    def on_fenced(self, position: int) -> None:
        """Note an answer, even if only a certain no: the fence is durable there."""
        self._fenced[position] = True

    def on_unknown(self, position: int) -> None:
        self._unknown[position] = True

    @property
    def is_covered(self) -> bool:
        return all(self._fenced) or all(sum(self._fenced[p] for p in window) >= self._needed for window in self._windows)

    @property
    def is_impossible(self) -> bool:
        """Whether the fence is not complete, and no pending answer can change that."""
        if not any(self._unknown):
            return False
        return any(sum(not self._unknown[p] for p in window) < self._needed for window in self._windows)


class RecoveryReads:
    """Entries from `first_entry_id` on, decided strictly in the order of their ids.

    Copies of entries above the first absent one are ignored: a hole is legal, as such entries were written in part.
    """

    def __init__(self, ensemble_size: int, write_quorum: int, ack_quorum: int, first_entry_id: int) -> None:
        assert ensemble_size >= write_quorum >= ack_quorum >= 1
        self._ensemble_size = ensemble_size
        self._write_quorum = write_quorum
        self._noes_needed = write_quorum - ack_quorum + 1
        self._noes: list[list[tuple[int, int]]] = [[] for _ in range(ensemble_size)]  # ranges of ids, by position
        self._unknowns: list[list[tuple[int, int]]] = [[] for _ in range(ensemble_size)]
        self._copies: dict[int, EntryGroup] = {}  # of undecided entries, each in a group that holds it
        self._present: list[EntryGroup] = []
        self.next_entry_id = first_entry_id  # the first undecided one
        self.last_entry_id: int | None = None  # of the ledger, once decided

    def __repr__(self) -> str:
        end = "undecided" if self.last_entry_id is None else f"ends at {self.last_entry_id}"
        return f"<RecoveryReads next {self.next_entry_id}, {end}, noes {self._noes}, unknown {self._unknowns}>"

    @property
    def decided(self) -> bool:
        return self.last_entry_id is not None

    def on_copies(self, group: EntryGroup) -> None:
        """Take verified entries from any bookie of the ensemble."""
        if self.decided or group.last_entry_id < self.next_entry_id:
            return
        if group.first_entry_id <= self.next_entry_id:
            self._take(group.slice(self.next_entry_id, group.last_entry_id))
            self._decide()
        else:
            for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                self._copies.setdefault(entry_id, group)

    def on_no(self, position: int, first: int, last: int) -> None:
        """Note that a fenced bookie certainly never acknowledged `first..last` (inclusive)."""
        if not holds_any(position, first, last, self._ensemble_size, self._write_quorum):
            return  # gaps of its stripe, which are never asked for: thousands in a long answer
        self._noes[position].append((first, last))
        self._decide()

    def on_unknown(self, position: int, first: int, last: int) -> None:
        """Note that nothing is known of these entries there: timeout, error or bad digest."""
        self._unknowns[position].append((first, last))

    def is_heard(self, position: int) -> bool:
        """Whether this bookie has answered for the next undecided entry, or does not hold it by rule."""
        entry_id = self.next_entry_id
        if position not in write_set_positions(entry_id, self._ensemble_size, self._write_quorum):
            return True
        return _covers(self._noes[position], entry_id) or _covers(self._unknowns[position], entry_id)

    def has_said_no(self, position: int) -> bool:
        """Whether this bookie certainly never acknowledged the next undecided entry."""
        return _covers(self._noes[position], self.next_entry_id)

    def take_present(self) -> list[EntryGroup]:
        """Return the entries decided to be present since the last call, in order."""
        present, self._present = self._present, []
        return present

    def _take(self, group: EntryGroup) -> None:
        self._present.append(group)
        self.next_entry_id = group.last_entry_id + 1

    def _decide(self) -> None:
        while not self.decided:
            entry_id = self.next_entry_id
            if (group := self._copies.pop(entry_id, None)) is not None:
                self._take(group.slice(entry_id, entry_id))
                continue
            write_set = write_set_positions(entry_id, self._ensemble_size, self._write_quorum)
            if sum(_covers(self._noes[position], entry_id) for position in write_set) < self._noes_needed:
                return
            self.last_entry_id = entry_id - 1
            self._copies.clear()


def _covers(ranges: Sequence[tuple[int, int]], entry_id: int) -> bool:
    return any(first <= entry_id <= last for first, last in ranges)
