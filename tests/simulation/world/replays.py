"""When copies of bookies' disks are replayed: a few times in a world, one in each part of its course.

    course of a world   0 ───────┊─────────┊─────────┊──────── 1     operations done, of those that are wanted
    a replay is due        ╵          ╵      ╵             ╵         somewhere in each part, and takes place at the next occasion
    its occasion         mark      any moment  fence      mark       of the kind drawn for it; at any, when the next part has begun

A journal that forgets (mark) and a promise that is about to be given (fence) are the moments at which a loss of power tells most;
they come early and often, so that a mere chance at each would use all replays up within the first seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

Occasion = Literal["fence", "mark", "any moment"]

PARTS = 4
_OCCASIONS: tuple[Occasion, ...] = ("fence", "mark", "any moment")


class Replays:
    def __init__(self, rng: random.Random, progress: Callable[[], float]) -> None:
        self._progress = progress
        self._due = [((part + rng.random()) / PARTS, rng.choice(_OCCASIONS)) for part in range(PARTS)]
        self.taken: list[float] = []  # the progress at which each took place

    def __repr__(self) -> str:
        return f"<Replays taken at {self.taken}>"

    def take(self, occasion: Occasion) -> bool:
        """Whether a replay takes place now; it is counted then."""
        if len(self.taken) == PARTS:
            return False
        (due, wanted), progress = self._due[len(self.taken)], self._progress()
        is_late = progress >= (len(self.taken) + 1) / PARTS
        if progress < due or not (is_late or occasion == wanted):
            return False
        self.taken.append(progress)
        return True
