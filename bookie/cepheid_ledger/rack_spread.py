"""The spread of ledgers over racks: how to choose an ensemble or a replacement, and what could be better. No I/O.

    E = 4, Qw = 2      position    0    1    2    3         write sets: 0 1, 1 2, 2 3, 3 0
                       rack        r1   r2   r1   r2        two racks in each: the best possible
                       instead of  r1   r1   r2   r2        one rack in two of them: its loss may take both copies of an entry

Rule 1: the write set counts, not the ensemble: copies of one entry should be in different racks. Regions decide between choices
    that are equal by racks.
Rule 2: bookies without a known rack together count as one rack, since nothing shows that they are separate.
Rule 3: racks get copies in proportion to their bookies. Then a ledger has two copies of an entry in one rack only if that cannot
    be avoided: positions that share no write set are at least Qw apart, so that a rack can be used E // Qw times.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cepheid_ledger.striping import write_windows
from cepheid_ports import region_of

NO_RACK = ""
_LARGEST_REORDERED = 16
"""Largest ensemble whose positions are exchanged for better regions: the time for that grows with the cube."""

_MOST_OF_MEDIAN = 3
"""Largest weight of a bookie, in medians: a new empty bookie must not get nearly all new ledgers."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bookie that may be chosen. Its probability is proportional to `weight`."""

    bookie: str
    rack: str
    weight: float


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A position of an ensemble that needs another bookie."""

    ensemble: Sequence[str]
    position: int
    write_quorum: int

    @classmethod
    def of(cls, bookie: str, ensemble: Sequence[str], replaced: Mapping[str, str], write_quorum: int) -> Vacancy:
        """Return the vacancy that `bookie` leaves if others of the ensemble were `replaced` already."""
        return cls([replaced.get(one, one) for one in ensemble], ensemble.index(bookie), write_quorum)


@dataclass(frozen=True, slots=True)
class PlacementMove:
    """A position of an ensemble that should move to another rack. Each of the candidates (sorted) is equally good."""

    position: int
    bookie: str
    candidates: tuple[str, ...]


def weights_by_free_space(bookies: Iterable[str], free_bytes: Mapping[str, int]) -> dict[str, float]:
    """Return a weight for each bookie: its free bytes, at most three times the median; the smallest known one if unknown."""
    names = list(bookies)
    known = sorted(free_bytes[name] for name in names if name in free_bytes)
    if not known:
        return dict.fromkeys(names, 1.0)
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    most = max(1.0, _MOST_OF_MEDIAN * median)
    return {name: min(most, max(1.0, float(free_bytes.get(name, known[0])))) for name in names}  # a full disk remains a last choice


def choose_candidates(
    chosen: Sequence[Candidate], candidates: Sequence[Candidate], size: int, rng: random.Random, *, most_of_rack: int | None = None
) -> list[Candidate]:
    """Return `chosen` with as many of the candidates as make it `size`, spread evenly over racks, then over regions.

    It returns fewer when there are no more, or none whose rack has fewer than `most_of_rack`.
    """
    picked, left = list(chosen), list(candidates)
    racks = Counter(candidate.rack for candidate in picked)
    regions = Counter(region_of(candidate.rack) for candidate in picked)
    while len(picked) < size:
        if most_of_rack is not None:
            left = [candidate for candidate in left if racks[candidate.rack] < most_of_rack]
        if not left:
            break
        best = min((racks[candidate.rack], regions[region_of(candidate.rack)]) for candidate in left)
        one = pick([candidate for candidate in left if (racks[candidate.rack], regions[region_of(candidate.rack)]) == best], rng)
        left.remove(one)
        picked.append(one)
        racks[one.rack] += 1
        regions[region_of(one.rack)] += 1
    return picked


def arrange(candidates: Sequence[Candidate], write_quorum: int, rng: random.Random) -> tuple[str, ...]:
    """Return the bookies in an order in which write sets share as few racks as possible, and then as few regions."""
    size = len(candidates)
    shuffled = rng.sample(list(candidates), size)
    if write_quorum < size:
        shuffled = _in_frames(shuffled, size // write_quorum)
        shuffled = _exchanged(shuffled, write_quorum)
        start = rng.randrange(size)  # otherwise the rack with the most bookies would always be first
        shuffled = shuffled[start:] + shuffled[:start]
    return tuple(candidate.bookie for candidate in shuffled)


def repeated_racks(racks: Sequence[str], write_quorum: int) -> int:
    """Return how many copies are in the rack of another copy, summed over all write sets: 0 is best."""
    windows = write_windows(len(racks), write_quorum)
    return sum(len(window) - len({racks[position] for position in window}) for window in windows)


def most_of_each_rack(size: int, write_quorum: int) -> int:
    """Return how many bookies of one rack an ensemble can have without two copies of an entry in it (rule 3)."""
    return size // write_quorum


def can_separate(racks: Iterable[str], size: int, write_quorum: int) -> bool:
    """Return whether bookies in these racks can form an ensemble that never has two copies of an entry in one rack."""
    most = most_of_each_rack(size, write_quorum)
    return sum(min(count, most) for count in Counter(racks).values()) >= size


def best_for_vacancy(
    candidates: Sequence[Candidate], vacancy: Vacancy, racks: Mapping[str, str], *, strict: bool = False
) -> list[Candidate]:
    """Return the candidates that repeat the fewest racks, and then regions, of the other copies in their write sets.

    `strict`: only those that repeat no rack. A member of the ensemble whose rack is unknown prevents no choice.
    """
    if strict:
        candidates = [one for one in candidates if not _repeated_at(vacancy, one.rack, racks)[0]]
    costs = {rack: _repeated_at(vacancy, rack, racks) for rack in dict.fromkeys(one.rack for one in candidates)}
    best = min(costs.values(), default=None)
    return [one for one in candidates if costs[one.rack] == best]


def placement_shortfall(
    ensemble: Sequence[str], write_quorum: int, racks: Mapping[str, str | None], available: Collection[str]
) -> tuple[PlacementMove, ...]:
    """Return the moves that would spread an existing ensemble over more racks; none if it is as good as possible.

    Each move has an effect of its own, and assumes that those before it are done with their first candidate. `available` are
    the bookies that accept copies. A bookie with an unknown rack is never a reason to move, and never a destination: it
    counts as separate from all others, because a useless move costs as much as a useful one.
    """
    places = [racks.get(bookie) or f"unknown/{position}/{bookie}" for position, bookie in enumerate(ensemble)]
    spare = {bookie: rack for bookie in sorted(available) if bookie not in ensemble and (rack := racks.get(bookie))}
    moves: list[PlacementMove] = []
    repeated = repeated_racks(places, write_quorum)
    while repeated > _fewest_repeated([*places, *spare.values()], len(places), write_quorum):
        found = _best_move(places, write_quorum, dict.fromkeys(spare.values()))
        if found is None or found[0] >= repeated:
            break
        repeated, position, better = found
        candidates = tuple(bookie for bookie, rack in spare.items() if rack in better)
        moves.append(PlacementMove(position, ensemble[position], candidates))
        places[position] = spare.pop(candidates[0])
    return tuple(moves)


def pick(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Return one of the candidates, by weight."""
    if all(candidate.weight == candidates[0].weight for candidate in candidates):
        return rng.choice(candidates)
    return rng.choices(candidates, [candidate.weight for candidate in candidates])[0]


def _in_frames(candidates: Sequence[Candidate], frames: int) -> list[Candidate]:
    """Deal the racks out to consecutive frames, the largest one first, so that bookies of a rack are a frame apart.

    With at most one bookie of a rack per frame this separates all of them: racks with a bookie in every frame come first, in
    the same order in each, and the others leave a frame out.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.rack, []).append(candidate)
    dealt: list[list[Candidate]] = [[] for _ in range(frames)]
    in_order = [candidate for group in sorted(groups.values(), key=len, reverse=True) for candidate in group]
    for index, candidate in enumerate(in_order):
        dealt[index % frames].append(candidate)
    return [candidate for frame in dealt for candidate in frame]


def _exchanged(candidates: list[Candidate], write_quorum: int) -> list[Candidate]:
    """Exchange two positions while that separates racks, or regions without bringing racks together."""

    def cost() -> tuple[int, int]:
        racks = [candidate.rack for candidate in candidates]
        return repeated_racks(racks, write_quorum), repeated_racks([region_of(rack) for rack in racks], write_quorum)

    racks = [candidate.rack for candidate in candidates]
    size, now = len(candidates), cost()
    least = tuple(_fewest_repeated(names, size, write_quorum) for names in (racks, [region_of(rack) for rack in racks]))
    improved = size <= _LARGEST_REORDERED
    while improved and now > least:
        improved = False
        for one in range(size - 1):
            for other in range(one + 1, size):
                candidates[one], candidates[other] = candidates[other], candidates[one]
                if (after := cost()) < now:
                    now, improved = after, True
                else:
                    candidates[one], candidates[other] = candidates[other], candidates[one]
    return candidates


def _fewest_repeated(racks: Iterable[str], size: int, write_quorum: int) -> int:
    """Return a lower bound of `repeated_racks`, from the number of racks."""
    return size * max(0, write_quorum - len(set(racks)))


@lru_cache(maxsize=256)
def _neighbours(position: int, size: int, write_quorum: int) -> tuple[tuple[int, ...], ...]:
    """Return the other positions of each write set that contains this one."""
    windows = (window for window in write_windows(size, write_quorum) if position in window)
    return tuple(tuple(other for other in window if other != position) for window in windows)


def _repeated_at(vacancy: Vacancy, rack: str, racks: Mapping[str, str]) -> tuple[int, int]:
    """Return in how many write sets this rack, and its region, would be repeated."""
    windows = _neighbours(vacancy.position, len(vacancy.ensemble), vacancy.write_quorum)
    places = [[racks.get(vacancy.ensemble[other], NO_RACK) for other in window] for window in windows]
    region = region_of(rack)
    return sum(rack in window for window in places), sum(region in map(region_of, window) for window in places)


def _best_move(places: list[str], write_quorum: int, racks: Collection[str]) -> tuple[int, int, list[str]] | None:
    """Return how many copies share a rack after the best move, its position, and the racks that are equally good there."""
    best: tuple[int, int, list[str]] | None = None
    for position, before in enumerate(places):
        for rack in racks:
            places[position] = rack
            repeated = repeated_racks(places, write_quorum)
            if best is None or repeated < best[0]:
                best = repeated, position, [rack]
            elif (repeated, position) == best[:2]:
                best[2].append(rack)
        places[position] = before
    return best
