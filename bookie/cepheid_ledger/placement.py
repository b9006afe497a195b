"""Which bookies a ledger gets.

Rule 1: an ensemble has distinct bookies, chosen at random, so that ledgers spread evenly.
Rule 2: a bookie in quarantine (it failed a moment ago) is chosen only when there are not enough others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cepheid_ledger.errors import NotEnoughBookiesError


class Placement(Protocol):
    def new_ensemble(self, size: int) -> tuple[str, ...]:
        """Raises NotEnoughBookiesError."""

    def replacement(self, ensemble: Sequence[str], excluded: Iterable[str]) -> str | None:
        """A bookie outside of both, None when there is none."""

    def quarantine(self, bookie_id: str) -> None:
        """Tells that this bookie just failed."""


class RandomPlacement:
    """Every available bookie is as good as another. `available` is asked at each choice; it returns writable bookies."""

    def __init__(self, available: Callable[[], Sequence[str]], rng: random.Random, quarantine_s: float = 10.0) -> None:
        self._available = available
        self._rng = rng
        self._quarantine_s = quarantine_s
        self._quarantined_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RandomPlacement over {len(self._available())} bookies, quarantined: {list(self._quarantined_until)}>"

    def new_ensemble(self, size: int) -> tuple[str, ...]:
        healthy, doubtful = self._candidates(())
        if len(healthy) >= size:
            return tuple(self._rng.sample(healthy, size))
        if len(healthy) + len(doubtful) < size:
            found = len(healthy) + len(doubtful)
            message = f"a ledger needs {size} bookies, {found} are available"
            raise NotEnoughBookiesError(message, wanted=size, available=found)
        chosen = healthy + self._rng.sample(doubtful, size - len(healthy))
        self._rng.shuffle(chosen)
        return tuple(chosen)

    def replacement(self, ensemble: Sequence[str], excluded: Iterable[str]) -> str | None:
        for candidates in self._candidates([*ensemble, *excluded]):
            if candidates:
                return self._rng.choice(candidates)
        return None

    def quarantine(self, bookie_id: str) -> None:
        self._quarantined_until[bookie_id] = asyncio.get_running_loop().time() + self._quarantine_s

    def _candidates(self, excluded: Sequence[str]) -> tuple[list[str], list[str]]:
        """Healthy ones and quarantined ones, sorted: the choice must depend on the generator alone."""
        available = sorted(bookie for bookie in self._available() if bookie not in excluded)
        if not self._quarantined_until:
            return available, []
        now = asyncio.get_running_loop().time()
        self._quarantined_until = {bookie: until for bookie, until in self._quarantined_until.items() if until > now}
        healthy = [bookie for bookie in available if bookie not in self._quarantined_until]
        return healthy, [bookie for bookie in available if bookie in self._quarantined_until]
