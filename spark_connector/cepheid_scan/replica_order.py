"""Chooses the bookies of an ensemble for a range, in order of preference. No I/O; the clock is passed in.

    order:    not suspected in the last 30 s  ►  in our rack, then in our region  ►  by hash of ledger and first entry, so that
              tasks spread
    striped:  entry e is on positions e, e+1 … e+Qw-1 (mod E): the fewest positions that hold all of the range, and the entries of
    each

Rule 1: only an entry's own write set is asked for it: other bookies never had it, and their no means nothing.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Mapping, Sequence

from cepheid_ports import rack_distance

SUSPECT_S = 30.0


class Suspects:
    """Bookies that failed recently in this process."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()  # several scans may run in one process

    def add(self, bookie: str, now: float) -> None:
        with self._lock:
            self._until[bookie] = now + SUSPECT_S

    def among(self, bookies: Sequence[str], now: float) -> frozenset[str]:
        with self._lock:
            return frozenset(bookie for bookie in bookies if self._until.get(bookie, now) > now)


def positions_by_liking(
    ensemble: Sequence[str],
    ledger_id: int,
    first_entry_id: int,
    *,
    rack: str | None,
    racks: Mapping[str, str],
    suspects: Collection[str],
) -> list[int]:
    """Return the positions of the ensemble, the best one first. A bookie without a known rack is elsewhere."""
    turn = zlib.crc32(b"%d:%d" % (ledger_id, first_entry_id)) % len(ensemble)

    def liking(position: int) -> tuple[bool, int, int]:
        bookie = ensemble[position]
        return (bookie in suspects, rack_distance(rack, racks.get(bookie)), (position - turn) % len(ensemble))

    return sorted(range(len(ensemble)), key=liking)


def write_set(entry_id: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the positions in the ensemble that hold this entry (docs/reference/ledger-protocol.md)."""
    return tuple((entry_id + i) % ensemble_size for i in range(write_quorum))


def last_reachable(first: int, last: int, ensemble_size: int, write_quorum: int, usable: Collection[int]) -> int:
    """Return the last entry such that all from `first` up to it are held by `usable`; `first` - 1 if `first` is not."""
    for entry_id in range(first, min(last, first + ensemble_size - 1) + 1):
        if not any(position in usable for position in write_set(entry_id, ensemble_size, write_quorum)):
            return entry_id - 1
    return last


def plan_cover(first: int, last: int, ensemble_size: int, write_quorum: int, usable: Sequence[int]) -> dict[int, int] | None:
    """Return the position to read from for each residue (entry id mod E) of `first..last`; None: some have none.

    `usable` are the positions that may be asked, best first. As few as possible are used: each is a separate stream.
    """
    wanted = {entry_id % ensemble_size for entry_id in range(first, min(last, first + ensemble_size - 1) + 1)}
    cover: dict[int, int] = {}
    while len(cover) < len(wanted):
        held = {p: [r for r in sorted(wanted) if r not in cover and (p - r) % ensemble_size < write_quorum] for p in usable}
        chosen = max(usable, key=lambda position: len(held[position]), default=-1)  # of equals the first, which is preferred
        if chosen < 0 or not held[chosen]:
            return None
        cover.update(dict.fromkeys(held[chosen], chosen))
    return cover
