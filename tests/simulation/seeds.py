"""Which seeds are run, and what became of one."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.cuts import NO_CUTS, Cuts
from tests.simulation.world.world import World

FIRST_FRESH = 1 << 32
"""Seeds below are fixed ones; fresh ones lie above, so that a failing one can be told from the fixed set."""
FEWEST_OPERATIONS, FEWEST_FAULTS = 300, 3
"""A seed that does less means too little: the tests ask so much of each."""

_KEPT = Path(__file__).with_name("kept_seeds.txt")
_CODE = ("bookie", "broker_service", "metadata", "core", "sdk", "tests/simulation", "tests/history")


def fresh_seeds(count: int) -> list[int]:
    return _drawn(random.SystemRandom(), count)


def seeds_of_the_code(count: int) -> list[int]:
    """Fresh for each state of the code, and the same for everybody who has it: whoever changes a line has other seeds looked at,
    and a failure is there again when its test is repeated."""
    root, code = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        code.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return _drawn(random.Random(code.digest()), count)


def _drawn(source: random.Random, count: int) -> list[int]:
    return [FIRST_FRESH + source.getrandbits(31) for _ in range(count)]


def kept_seeds() -> dict[int, str]:
    """Seeds that found a bug once, and which."""
    lines = [line for line in _KEPT.read_text().splitlines() if line and not line.startswith("#")]
    return {int(seed, 16): found for seed, found in (line.split(maxsplit=1) for line in lines)}


@dataclass(slots=True)
class Outcome:
    """What became of a seed; plain values only, so that it travels between processes."""

    seed: int
    failure: str | None  # what was violated, and where that was
    rule: str = ""  # the number of the invariant that failed, or the class of the exception that nobody expected
    cuts: Cuts = NO_CUTS
    mutant: str | None = None
    only: str | None = None  # the one rule that could fail
    operations: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    trace: Sequence[str] = ()
    faults_dealt: int = 0  # those that were left out too: how far their numbers go
    actions_taken: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    def size(self) -> str:
        return f"{sum(self.operations.values())} operations, {sum(self.faults.values())} faults, {self.virtual_s:.1f} simulated s"

    def describe(self) -> str:
        """One line when it held, else the failure and how to see it again."""
        if self.failure is None:
            return f"seed {self.seed:#x}: {self.size()}, all held"
        return f"seed {self.seed:#x} FAILED after {self.size()}: {self.failure}\nreplay: {self.replay()} --trace"

    def replay(self) -> str:
        """The command that runs it again."""
        mutant = f'--mutant "{self.mutant}"' if self.mutant else ""
        only = f"--only {self.only}" if self.only else ""
        return " ".join(filter(None, (f"python -m tests.simulation --seed {self.seed:#x}", self.cuts.flags(), mutant, only)))

    def digest(self) -> str:
        """Of everything that happened; needs the trace. Equal on two machines: they saw the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def run_seed(
    seed: int,
    *,
    trace: bool = False,
    cuts: Cuts = NO_CUTS,
    mutant: str | None = None,
    only: str | None = None,
    new_world: Callable[..., World] = World,
) -> Outcome:
    """`only`: all other rules are muted."""
    began_s = time.process_time()
    world = new_world(seed, trace=trace, cuts=cuts)
    world.history.only = only
    failure, rule = None, ""
    with _mutation(mutant):
        try:
            world.run()
        except Exception as error:  # a mistake of the simulator's own too: one seed must not end a campaign
            failure, rule = _tell(error), getattr(error, "rule", type(error).__name__)
    history, plan = world.history, world.plan
    outcome = Outcome(
        seed,
        failure,
        rule,
        cuts,
        mutant,
        only,
        operations=history.operations,
        faults=plan.counts,
        checks=history.checked,
        trace=history.trace or (),
        faults_dealt=plan.dealt,
        actions_taken=world.actions,
        virtual_s=history.now_s,
    )
    del world, history, plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what a crashed process was about to begin, and never awaited
        gc.collect()  # between runs, never inside: see virtual_loop
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def collect_worlds_only() -> None:
    """Before many runs: garbage is collected after each of them, and what was loaded before is not gone through every time."""
    gc.collect()
    gc.freeze()


def _mutation(name: str | None) -> contextlib.AbstractContextManager[None]:
    if name is None:
        return contextlib.nullcontext()
    from tests.simulation.mutants.catalogue import (  # most runs have none, and the module reaches into all of the product
        MUTANTS,
        SCENARIO_MUTANTS,
    )

    return {**MUTANTS, **SCENARIO_MUTANTS}[name]()


def _tell(error: Exception) -> str:
    shown = error if not isinstance(error, AssertionError) else error.__cause__
    trace = [] if shown is None else [line.rstrip() for line in traceback.format_exception(shown)[-6:]]
    return "\n".join([str(error), *trace])
