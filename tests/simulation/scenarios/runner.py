"""Runs one scenario, line by line, on a stage that is calm but for what the lines do. All invariants are checked all the time.

run("01")                                 it must hold
run("01", mutant="fence not by reads")    the known mistake is put in: it must fail, by one of the rules its head names
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.checks.history import InvariantViolation
from tests.simulation.mutants.catalogue import MUTANTS, SCENARIO_MUTANTS
from tests.simulation.scenarios.language import KINDS, Line, Scenario, ScenarioError, Step, match, scenario_named
from tests.simulation.scenarios.scene import REFUSALS, CourseFailed, Scene
from tests.simulation.world.virtual_loop import SimulationError

VERBS = (
    "stage",
    "ledgers",
    "records",
    "balance",
    "bookies",
    "topics",
    "losses",
    "repair",
    "producers",
    "clients",
    "permissions",
    "offload",
)
"""Modules that register kinds and steps."""

_LONGEST_LINE_S = 300.0
"""Simulated. What waits for ever would not end otherwise: bookies always have something to do."""

for _module in VERBS:
    importlib.import_module(f"tests.simulation.scenarios.steps.{_module}")


@dataclass(frozen=True, slots=True)
class Outcome:
    scenario: str
    mutant: str | None
    failure: BaseException | None
    line: Line | None  # where it failed
    trace: Sequence[str]
    checked: Mapping[str, int]  # by rule: how often the simulator did
    only: str | None = None  # the one rule whose checks were heard

    @property
    def rule(self) -> str:
        """The invariant that failed: its check names it, or the line that did not come true; "" for none.

        Of anything else, which any mistake might have broken, the class: the head of a scenario names it where it is meant.
        """
        match self.failure:
            case None:
                return ""
            case InvariantViolation():
                return self.failure.rule
            case CourseFailed():
                return self.line.rule if self.line is not None else ""
            case _:
                return type(self.failure.__cause__ or self.failure).__name__

    def describe(self) -> str:
        """One line when it held, else the failure and how to see it again."""
        who = f"scenario {self.scenario}" + (f" with the mutant {self.mutant!r}" if self.mutant else "")
        if self.failure is None:
            return f"{who}: all held"
        lines = [f"{who} FAILED: {self.failure or repr(self.failure)}", f"  in {self.line}"]
        cause = self.failure.__cause__
        if cause is not None:
            lines += [text.rstrip() for text in traceback.format_exception(cause)[-6:]]
        flags = [f"--mutant {self.mutant!r}" if self.mutant else "", f"--only {self.only}" if self.only else "", "--trace"]
        replay = ["python -m tests.simulation --scenario", self.scenario, *filter(None, flags)]
        return "\n".join([*lines, f"replay: {' '.join(replay)}"])


def run(name: str, mutant: str | None = None, trace: bool = False, only: str | None = None) -> Outcome:
    """Runs the scenario of that number or name. Raises ScenarioError for a text that cannot be understood."""
    return play(scenario_named(name), mutant, trace, only)


def play(scenario: Scenario, mutant: str | None = None, trace: bool = False, only: str | None = None) -> Outcome:
    """`only`: all other rules are muted, but not what its lines say."""
    course = [(line, *match(line)) for line in scenario.lines]
    mistakes = {**MUTANTS, **SCENARIO_MUTANTS}
    if mutant is not None and mutant not in mistakes:
        raise ScenarioError(f"there is no mutant {mutant!r}")
    scene = Scene(scenario.stem, trace=trace)
    scene.history.only = only
    failure: BaseException | None = None
    with mistakes[mutant]() if mutant is not None else contextlib.nullcontext():
        try:
            scene.play(_perform(scene, course))
        except AssertionError as error:
            failure = error
    line, history = scene.line if failure else None, scene.history
    return Outcome(scenario.stem, mutant, failure, line, history.trace or (), history.checked, only)


async def _perform(scene: Scene, course: Sequence[tuple[Line, Step, tuple[str, ...]]]) -> None:
    for line, step, texts in course:
        scene.line = line
        scene.history.note(lambda line=line: f"-- {line}")
        try:
            arguments: list[Any] = [KINDS[kind].find(scene, text) for kind, text in zip(step.kinds, texts, strict=True)]
            done = step.act(scene, *arguments)
            if inspect.isawaitable(done):
                async with asyncio.timeout(_LONGEST_LINE_S):
                    await done
        except ScenarioError as error:
            raise ScenarioError(f"{line}\n  {error}") from error
        except AssertionError:
            raise
        except REFUSALS as error:  # the line did not come true
            raise CourseFailed(f"{error!r}") from error
        except Exception as error:
            raise SimulationError(f"{error!r}") from error
