"""A calm cluster on which a test follows one course of events, step by step."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cepheid_ledger.master_key import master_key_of
from cepheid_metadata import LedgerState
from cepheid_rpc import EntryGroup, ReadRequest
from tests.simulation.cluster import SimBookie
from tests.simulation.faults import CALM, Faults
from tests.simulation.sim_broker import SimBroker
from tests.simulation.sim_connection import SimConnections
from tests.simulation.stage import Stage
from tests.simulation.workload_ledgers import EXPECTED
from tests.support import wait_until

T = TypeVar("T")
QUIET = replace(CALM, silence_s=1_000.0)  # a connection that hangs stays open


class Script(Stage):
    """A stage whose bookies and brokers are up; `play` it with a coroutine function that gets it."""

    def __init__(self, bookies: int, brokers: Sequence[str] = ("east", "west"), faults: Faults = QUIET) -> None:
        super().__init__("script", faults, trace=True)
        self._count = bookies
        self._names = brokers

    @property
    def noted(self) -> list[str]:
        """The trace so far, log lines included."""
        assert self.history.trace is not None
        return self.history.trace

    def run(self, script: Callable[[Script], Coroutine[Any, Any, None]]) -> None:
        self.play(self._run(script))

    async def _run(self, script: Callable[[Script], Coroutine[Any, Any, None]]) -> None:
        self.build(self._count, self._names)
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            broker.start()
        await script(self)

    def __getattr__(self, name: str) -> Any:
        """`script.b1`, `script.east`."""
        machines: dict[str, Any] = {**self.__dict__.get("bookies", {}), **self.__dict__.get("brokers", {})}
        try:
            return machines[name]
        except KeyError:
            raise AttributeError(name) from None

    async def at(self, broker: SimBroker, work: Coroutine[Any, Any, T]) -> T:
        """Runs something in a broker's process, and waits for it."""
        return await broker.node.start(work, name="script")

    async def fails(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that must come to nothing, with an error that says so."""
        try:
            outcome = await work
        except EXPECTED as error:
            self.history.note(f"as expected: {error!r}")
        else:
            raise AssertionError(f"it should have failed, and gave {outcome!r}")

    async def new_ledger(self, broker: SimBroker, qw: int, qa: int) -> Any:
        return await self.at(broker, broker.ledgers.create(ensemble_size=qw, write_quorum=qw, ack_quorum=qa, custom={}))

    def append(self, broker: SimBroker, writer: Any, *payloads: bytes) -> list[Any]:
        """A list that gets the outcome."""
        told: list[Any] = []
        broker.node.context.run(writer.append, payloads, told.append)
        return told

    async def told(self, outcomes: list[Any]) -> bool:
        """Whether an append is told OK."""
        await wait_until(lambda: bool(outcomes))
        return isinstance(outcomes[0], EntryGroup)

    async def holds(self, bookie: SimBookie, ledger_id: int, *entry_ids: int) -> None:
        await wait_until(lambda: all(e in self.history.bookie(bookie.id).ok.get(ledger_id, {}) for e in entry_ids))

    def state_of(self, ledger_id: int) -> LedgerState:
        return self.history.ledgers[ledger_id].state

    def ensemble_of(self, ledger_id: int) -> tuple[str, ...]:
        """Of its last fragment."""
        return tuple(self.history.ledgers[ledger_id].last_fragment.ensemble)

    def spares_of(self, ledger_id: int) -> list[str]:
        return [name for name in self.bookies if name not in self.ensemble_of(ledger_id)]


async def restart(bookie: SimBookie) -> None:
    bookie.crash(power=True)
    await bookie.start()


async def fencing_read(script: Script, broker: SimBroker, bookie_id: str, ledger_id: int) -> list[Any]:
    """What a recoverer's read of entry 0 answers."""
    key = master_key_of(script.history.ledgers[ledger_id])
    connection = SimConnections(script.network, broker.node).get(bookie_id)

    async def read() -> list[Any]:
        return [chunk async for chunk in connection.read(ReadRequest(ledger_id, 0, 0, fence=True, master_key=key))]

    return await script.at(broker, read())
