"""Chooses the bookies of a ledger.

Rule 1: an ensemble has distinct bookies that are registered as writable. Its copies are spread over racks as well as possible
    (`rack_spread`); among bookies that are equal in that, the choice is random, weighted by free space where it is known.
Rule 2: a bookie that failed is in quarantine for a while, and twice as long if it fails again before it was healthy for
    `quarantine_max_s`, the longest quarantine. All writers of the process share that knowledge, and hundreds of them losing
    one bookie at once is one failure.
Rule 3: a quarantined bookie is chosen only if there are not enough others. That takes precedence over racks: a bookie that fails
    stops the ledger now. Strict placement is the exception: a quarantined bookie is better than a second copy in one rack.
Rule 4: a bookie that came back is no longer in quarantine. Its failures still count for rule 2.
Rule 5: strict placement never puts two copies of an entry into one rack, and does not use bookies with an unknown rack.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cepheid_ledger.errors import BookiesUnusableError, NotEnoughBookiesError, NotEnoughRacksError
from cepheid_ledger.rack_spread import (
    NO_RACK,
    Candidate,
    Vacancy,
    arrange,
    best_for_vacancy,
    can_separate,
    choose_candidates,
    most_of_each_rack,
    pick,
    weights_by_free_space,
)

_NAMED = 5  # bookies in the text of an error


class Placement(Protocol):
    def new_ensemble(self, size: int, write_quorum: int) -> tuple[str, ...]:
        """Return the bookies of a new ledger, by position. Raises NotEnoughBookiesError."""

    def has_healthy(self, size: int, write_quorum: int) -> bool:
        """Return whether a new ledger would get only bookies that are not in quarantine."""

    def replacement(
        self, ensemble: Sequence[str], excluded: Iterable[str], *, doubtful: bool = True, vacancy: Vacancy | None = None
    ) -> str | None:
        """Return a bookie outside of both, the best one for the vacancy; None if there is none.

        Not `doubtful`: bookies in quarantine are not used.
        """

    def quarantine(self, bookie_id: str) -> None:
        """Note that this bookie just failed."""

    def forgive(self, bookie_id: str) -> None:
        """Note that this bookie came back."""


@dataclass(frozen=True, slots=True)
class _Quarantine:
    until: float
    duration_s: float


class RackAwarePlacement:
    """Chooses among writable bookies by rack and free space; without either all bookies are equal.

    `available`, `racks` and `free_bytes` are called at each choice; the last two need not know every bookie. `problems` describes
    for operators what is wrong with the others. The same generator and the same answers lead to the same choices.
    """

    def __init__(
        self,
        available: Callable[[], Sequence[str]],
        rng: random.Random,
        quarantine_s: float = 10.0,
        quarantine_max_s: float = 60.0,
        problems: Callable[[], Sequence[str]] = tuple,
        *,
        racks: Callable[[], Mapping[str, str]] = dict,
        free_bytes: Callable[[], Mapping[str, int]] = dict,
        strict: bool = False,
    ) -> None:
        self._available = available
        self._problems = problems
        self._racks = racks
        self._free_bytes = free_bytes
        self._strict = strict
        self._rng = rng
        self._quarantine_s = quarantine_s
        self._quarantine_max_s = max(quarantine_s, quarantine_max_s)
        self._quarantines: dict[str, _Quarantine] = {}  # over or not; dropped after a time without failures

    def __repr__(self) -> str:
        return f"<RackAwarePlacement over {len(self._available())} bookies, quarantined: {self.quarantined()}>"

    def quarantined(self) -> list[str]:
        if not self._quarantines:
            return []
        now = asyncio.get_running_loop().time()
        self._quarantines = {b: q for b, q in self._quarantines.items() if q.until + self._quarantine_max_s > now}
        return [bookie for bookie, quarantine in self._quarantines.items() if quarantine.until > now]

    def new_ensemble(self, size: int, write_quorum: int) -> tuple[str, ...]:
        healthy, doubtful = self._candidates(())
        if len(healthy) + len(doubtful) < size:
            raise self._too_few(size, len(healthy) + len(doubtful))
        if self._strict:
            most = most_of_each_rack(size, write_quorum)
            chosen = choose_candidates([], _with_rack(healthy), size, self._rng, most_of_rack=most)
            chosen = choose_candidates(chosen, _with_rack(doubtful), size, self._rng, most_of_rack=most)
            if len(chosen) < size:
                raise self._too_few_racks(size, write_quorum, healthy + doubtful)
        elif len({(candidate.rack, candidate.weight) for candidate in healthy + doubtful}) == 1:
            return self._any(size, healthy, doubtful)
        else:
            chosen = choose_candidates([], healthy, size, self._rng)
            chosen = choose_candidates(chosen, doubtful, size, self._rng)
        return arrange(chosen, write_quorum, self._rng)

    def has_healthy(self, size: int, write_quorum: int) -> bool:
        healthy, _ = self._candidates(())
        if self._strict:
            return can_separate([candidate.rack for candidate in _with_rack(healthy)], size, write_quorum)
        return len(healthy) >= size

    def replacement(
        self, ensemble: Sequence[str], excluded: Iterable[str], *, doubtful: bool = True, vacancy: Vacancy | None = None
    ) -> str | None:
        healthy, quarantined = self._candidates([*ensemble, *excluded])
        for candidates in (healthy, quarantined) if doubtful else (healthy,):
            if self._strict:
                candidates = _with_rack(candidates)
            if vacancy is not None:
                candidates = best_for_vacancy(candidates, vacancy, self._racks(), strict=self._strict)
            if candidates:
                return pick(candidates, self._rng).bookie
        return None

    def quarantine(self, bookie_id: str) -> None:
        now = asyncio.get_running_loop().time()
        before = self._quarantines.get(bookie_id)
        if before is not None and before.until > now:
            return  # the same failure, reported by the next writer
        duration_s = self._quarantine_s
        if before is not None and before.until + self._quarantine_max_s > now:
            duration_s = min(2 * before.duration_s, self._quarantine_max_s)
        self._quarantines[bookie_id] = _Quarantine(now + duration_s, duration_s)

    def forgive(self, bookie_id: str) -> None:
        now = asyncio.get_running_loop().time()
        before = self._quarantines.get(bookie_id)
        if before is not None and before.until > now:
            self._quarantines[bookie_id] = replace(before, until=now)

    def _any(self, size: int, healthy: Sequence[Candidate], doubtful: Sequence[Candidate]) -> tuple[str, ...]:
        """Return a random choice, as all bookies are equal."""
        names = [candidate.bookie for candidate in healthy]
        if len(names) >= size:
            return tuple(self._rng.sample(names, size))
        names += self._rng.sample([candidate.bookie for candidate in doubtful], size - len(names))
        self._rng.shuffle(names)
        return tuple(names)

    def _candidates(self, excluded: Sequence[str]) -> tuple[list[Candidate], list[Candidate]]:
        """Return healthy and quarantined ones, sorted: the choice must depend only on the generator."""
        available = sorted(bookie for bookie in self._available() if bookie not in excluded)
        racks, weights = self._racks(), weights_by_free_space(available, self._free_bytes())
        candidates = [Candidate(bookie, racks.get(bookie, NO_RACK), weights[bookie]) for bookie in available]
        quarantined = self.quarantined()
        if not quarantined:
            return candidates, []
        healthy = [candidate for candidate in candidates if candidate.bookie not in quarantined]
        return healthy, [candidate for candidate in candidates if candidate.bookie in quarantined]

    def _too_few(self, size: int, found: int) -> NotEnoughBookiesError:
        message = f"a ledger needs {size} bookies, {found} are available"
        if problems := self._problems_text():
            return BookiesUnusableError(f"{message}: {problems}", wanted=size, available=found)
        return NotEnoughBookiesError(message, wanted=size, available=found)

    def _too_few_racks(self, size: int, write_quorum: int, candidates: Sequence[Candidate]) -> NotEnoughRacksError:
        racks = Counter(candidate.rack for candidate in candidates)
        without = racks.pop(NO_RACK, 0)
        found = ", ".join(f"{rack} ({count})" for rack, count in sorted(racks.items())[:_NAMED])
        found += f" and {len(racks) - _NAMED} more" * (len(racks) > _NAMED)
        message = (
            f"a ledger of {size} bookies needs the {write_quorum} copies of each entry in different racks, "
            f"but bookies are only available in: {found or 'no rack'}"
        )
        if without:
            message += f"; {without} available bookies have no rack"
        if problems := self._problems_text():
            message += f"; {problems}"
        return NotEnoughRacksError(message, wanted=size, write_quorum=write_quorum, racks=len(racks))

    def _problems_text(self) -> str:
        problems = self._problems()
        more = f"; and {len(problems) - _NAMED} more" * (len(problems) > _NAMED)
        return f"{'; '.join(problems[:_NAMED])}{more}"


def _with_rack(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.rack != NO_RACK]
