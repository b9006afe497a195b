"""What is left out of a run: a failing one is shrunk until every fault and action that stays is needed (`shrink.py`).

Faults and actions are numbered in the order in which they happen. One that is left out is drawn all the same and keeps its
number, so that cuts of the same seed mean the same until the course of events parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cuts:
    faults: frozenset[int] = frozenset()
    actions: frozenset[int] = frozenset()
    operations: int | None = None  # how many operations are wanted; None: as the world has them

    def flags(self) -> str:
        """For the command line that replays the run."""
        parts = []
        if self.faults:
            parts.append(f"--without {format_numbers(self.faults)}")
        if self.actions:
            parts.append(f"--skip {format_numbers(self.actions)}")
        if self.operations is not None:
            parts.append(f"--operations {self.operations}")
        return " ".join(parts)


NO_CUTS = Cuts()


def format_numbers(numbers: Iterable[int]) -> str:
    """`3-9,14` for {3, .., 9, 14}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_numbers(text: str) -> frozenset[int]:
    """The other way round. Raises ValueError for what is no list of numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
        if int(last or first) < int(first):
            raise ValueError(f"{part} goes backwards")
    return frozenset(numbers)
