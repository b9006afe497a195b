"""The stage of one scenario: what its lines have named and set going."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cepheid_ports import CepheidError
from tests.simulation.faults.plan import CALM
from tests.simulation.scenarios.language import Line, ScenarioError
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.stage import Stage
from tests.support import wait_until

T = TypeVar("T")
P = TypeVar("P")

QUIET = replace(CALM, silence_s=1_000.0)  # a connection that hangs stays open
PATIENCE_S = 60.0
"""Of simulated time: a line that waits for something fails after it."""

REFUSALS = (CepheidError, TimeoutError)


class CourseFailed(AssertionError):
    """Something that a line says did not come about."""


class Scene(Stage):
    def __init__(self, name: str, *, trace: bool = False) -> None:
        super().__init__(f"scenario/{name}", QUIET, trace=trace)
        self.line: Line | None = None  # the one that is played
        self._things: dict[tuple[str, str], Any] = {}
        self._parts: dict[type[Any], Any] = {}

    # -- names ----------------------------------------------------------------------------------------------------------

    def bind(self, kind: str, name: str, thing: Any) -> None:
        """From now on `name` means this. Raises ScenarioError when it means something already."""
        if (kind, name) in self._things:
            raise ScenarioError(f"there is a {kind} {name} already")
        self._things[kind, name] = thing

    def find(self, kind: str, name: str) -> Any:
        if (kind, name) not in self._things:
            known = [known for of_kind, known in self._things if of_kind == kind]
            raise ScenarioError(f"there is no {kind} {name}; so far there are {', '.join(known) or 'none'}")
        return self._things[kind, name]

    def all(self, kind: str) -> list[Any]:
        """Everything of a kind that has a name by now."""
        return [thing for (of_kind, _), thing in self._things.items() if of_kind == kind]

    def part(self, maker: Callable[[Scene], P] | type[P]) -> P:
        """What some module of steps keeps of its own, made when it is asked for first."""
        if maker not in self._parts:
            self._parts[maker] = maker(self)  # type: ignore[index,call-arg]
        return self._parts[maker]  # type: ignore[index,no-any-return]

    # -- doing and expecting --------------------------------------------------------------------------------------------

    async def raise_curtain(self, bookies: int, brokers: Sequence[str], **options: Any) -> None:
        """Builds bookies and brokers, and starts them."""
        if self.bookies:
            raise ScenarioError("the bookies are there already")
        self.build(bookies, brokers, **options)
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            broker.start()

    async def at(self, broker: SimBroker, work: Coroutine[Any, Any, T]) -> T:
        """Runs something in a broker's process, and waits for it."""
        return await broker.node.start(work, name="scenario")

    def require(self, condition: bool, message: str | Callable[[], str]) -> None:
        if not condition:
            raise CourseFailed(message if isinstance(message, str) else message())

    async def wait_until(self, condition: Callable[[], bool], what: str | Callable[[], str], limit_s: float = PATIENCE_S) -> None:
        """Fails with `what`, which says what should have come about."""
        try:
            await wait_until(condition, timeout_s=limit_s)
        except AssertionError:
            told = what if isinstance(what, str) else what()
            raise CourseFailed(f"{told}; waited for {limit_s:g} s") from None
