"""Which bookies a ledger gets.

Rule 1: an ensemble has distinct bookies, chosen at random among those that are registered as writable, so that ledgers
    spread evenly.
Rule 2: a bookie that failed is in quarantine for a while, and twice as long when it fails again before it was well for
    `quarantine_max_s`, the longest quarantine. All writers of the process share that knowledge, and hundreds of them losing
    one bookie at once is one failure.
Rule 3: a quarantined bookie is chosen only when there are not enough others.
Rule 4: a bookie that came back is no longer in quarantine. Its failures are not forgotten for that: rule 2 counts them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cepheid_ledger.errors import BookiesUnusableError, NotEnoughBookiesError

_NAMED = 5  # bookies in the text of an error


class Placement(Protocol):
    def new_ensemble(self, size: int) -> tuple[str, ...]:
        """Raises NotEnoughBookiesError."""

    def replacement(self, ensemble: Sequence[str], excluded: Iterable[str], *, doubtful: bool = True) -> str | None:
        """A bookie outside of both, None when there is none. Not `doubtful`: rather none than one in quarantine."""

    def quarantine(self, bookie_id: str) -> None:
        """Tells that this bookie just failed."""

    def forgive(self, bookie_id: str) -> None:
        """Tells that it came back."""


@dataclass(frozen=True, slots=True)
class _Quarantine:
    until: float
    duration_s: float


class RandomPlacement:
    """Every available bookie is as good as another. `available` is asked at each choice; it returns writable bookies.

    `problems` says for people what is wrong with the others.
    """

    def __init__(
        self,
        available: Callable[[], Sequence[str]],
        rng: random.Random,
        quarantine_s: float = 10.0,
        quarantine_max_s: float = 60.0,
        problems: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._available = available
        self._problems = problems
        self._rng = rng
        self._quarantine_s = quarantine_s
        self._quarantine_max_s = max(quarantine_s, quarantine_max_s)
        self._quarantines: dict[str, _Quarantine] = {}  # over or not: forgotten after good conduct

    def __repr__(self) -> str:
        return f"<RandomPlacement over {len(self._available())} bookies, quarantined: {self.quarantined()}>"

    def quarantined(self) -> list[str]:
        if not self._quarantines:
            return []
        now = asyncio.get_running_loop().time()
        self._quarantines = {b: q for b, q in self._quarantines.items() if q.until + self._quarantine_max_s > now}
        return [bookie for bookie, quarantine in self._quarantines.items() if quarantine.until > now]

    def new_ensemble(self, size: int) -> tuple[str, ...]:
        healthy, doubtful = self._candidates(())
        if len(healthy) >= size:
            return tuple(self._rng.sample(healthy, size))
        if len(healthy) + len(doubtful) < size:
            found = len(healthy) + len(doubtful)
            message = f"a ledger needs {size} bookies, {found} are available"
            problems = self._problems()
            if problems:
                message += f": {'; '.join(problems[:_NAMED])}{f'; and {len(problems) - _NAMED} more' * (len(problems) > _NAMED)}"
                raise BookiesUnusableError(message, wanted=size, available=found)
            raise NotEnoughBookiesError(message, wanted=size, available=found)
        chosen = healthy + self._rng.sample(doubtful, size - len(healthy))
        self._rng.shuffle(chosen)
        return tuple(chosen)

    def replacement(self, ensemble: Sequence[str], excluded: Iterable[str], *, doubtful: bool = True) -> str | None:
        healthy, quarantined = self._candidates([*ensemble, *excluded])
        for candidates in (healthy, quarantined) if doubtful else (healthy,):
            if candidates:
                return self._rng.choice(candidates)
        return None

    def quarantine(self, bookie_id: str) -> None:
        now = asyncio.get_running_loop().time()
        before = self._quarantines.get(bookie_id)
        if before is not None and before.until > now:
            return  # the same failure, told by the next writer
        duration_s = self._quarantine_s
        if before is not None and before.until + self._quarantine_max_s > now:
            duration_s = min(2 * before.duration_s, self._quarantine_max_s)
        self._quarantines[bookie_id] = _Quarantine(now + duration_s, duration_s)

    def forgive(self, bookie_id: str) -> None:
        now = asyncio.get_running_loop().time()
        before = self._quarantines.get(bookie_id)
        if before is not None and before.until > now:
            self._quarantines[bookie_id] = replace(before, until=now)

    def _candidates(self, excluded: Sequence[str]) -> tuple[list[str], list[str]]:
        """Healthy ones and quarantined ones, sorted: the choice must depend on the generator alone."""
        available = sorted(bookie for bookie in self._available() if bookie not in excluded)
        quarantined = self.quarantined()
        if not quarantined:
            return available, []
        healthy = [bookie for bookie in available if bookie not in quarantined]
        return healthy, [bookie for bookie in available if bookie in quarantined]
