"""The checks of a topic's records, given commits that no owner may make."""

from __future__ import annotations

from collections.abc import Callable

from cepheid_metadata import Chain, ChainLedger, Position
from tests.simulation.checks_topic import TopicRecordChecks
from tests.simulation.history import History, InvariantViolation
from tests.simulation.topic_model import TopicModel
from tests.simulation.virtual_loop import VirtualLoop

KEY = "/chains/orders"


def violated(script: Callable[[History, TopicRecordChecks], None]) -> str:
    """The message of the first violation; "": all held."""
    loop = VirtualLoop()
    history = History(loop)
    history.topics[KEY] = TopicModel("orders")

    async def run() -> None:
        script(history, TopicRecordChecks(history))

    try:
        loop.run(run())
    except InvariantViolation as error:
        return str(error)
    return ""


def chain(*ledgers: ChainLedger, epoch: int = 1, terminated_at: Position | None = None) -> Chain:
    return Chain(incarnation="i", epoch=epoch, ledgers=ledgers, terminated_at=terminated_at)


OPEN = ChainLedger(ledger_id=1)


def test_a_topic_is_not_terminated_below_what_was_acknowledged() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        history.topics[KEY].stored[Position(1, 5)] = b"x"
        checks.on_chain(KEY, chain(OPEN), "east#1")
        checks.on_chain(KEY, chain(OPEN, terminated_at=Position(1, 0)), "east#1")

    assert violated(script).startswith("M10: orders is terminated at")


def test_a_terminated_topic_stays_so() -> None:
    def script(history: History, checks: TopicRecordChecks) -> None:
        checks.on_chain(KEY, chain(OPEN, terminated_at=Position(1, -1)), "east#1")
        checks.on_chain(KEY, chain(OPEN, epoch=2), "west#1")

    assert violated(script).startswith("M10: /chains/orders was terminated with")
