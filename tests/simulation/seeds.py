"""Which seeds are run, and what became of one."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.world import World

FIRST_FRESH = 1 << 32
"""Seeds below are fixed ones; fresh ones lie above, so that a failing one can be told from the fixed set."""


def fresh_seeds(count: int) -> list[int]:
    system = random.SystemRandom()
    return [FIRST_FRESH + system.getrandbits(31) for _ in range(count)]


@dataclass(slots=True)
class Outcome:
    seed: int
    failure: BaseException | None
    operations: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    trace: Sequence[str] = ()
    virtual_s: float = 0.0

    @property
    def rule(self) -> str:
        """The number of the invariant that failed; "" for none."""
        return getattr(self.failure, "rule", type(self.failure).__name__ if self.failure else "")

    def describe(self) -> str:
        """One line when it held, else the failure and how to see it again."""
        done = f"{sum(self.operations.values())} operations, {sum(self.faults.values())} faults, {self.virtual_s:.1f} simulated s"
        if self.failure is None:
            return f"seed {self.seed:#x}: {done}, all held"
        cause = self.failure.__cause__
        lines = [f"seed {self.seed:#x} FAILED after {done}: {self.failure}"]
        if cause is not None:
            lines += [line.rstrip() for line in traceback.format_exception(cause)[-6:]]
        lines.append(f"replay: python -m tests.simulation --seed {self.seed:#x} --trace")
        return "\n".join(lines)


def run_seed(seed: int, *, trace: bool = False, new_world: Callable[..., World] = World) -> Outcome:
    world = new_world(seed, trace=trace)
    failure: BaseException | None = None
    try:
        world.run()
    except AssertionError as error:
        failure = error
    history = world.history
    outcome = Outcome(seed, failure, history.operations, world.plan.counts, history.checked, history.trace or (), history.now_s)
    del world, history
    gc.collect()  # between runs, never inside: see virtual_loop
    return outcome
