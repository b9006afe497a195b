"""What leaves the topics of clients: only what may, and noted with what it was."""

from __future__ import annotations

import random

import pytest

from cepheid_metadata import Chain, ChainLedger, Position, keys
from cepheid_wire import TopicName
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.checks.client_trims import ClientTrims
from tests.simulation.checks.history import History, InvariantViolation
from tests.simulation.checks.topic import TopicRecordChecks
from tests.simulation.world.virtual_loop import VirtualLoop

TOPIC = TopicName.parse("persistent://public/default/orders")
KEY = keys.chain_key(TOPIC)


def commit(checks: TopicRecordChecks, epoch: int, *ledger_ids: int, incarnation: str = "i") -> None:
    ledgers = tuple(ChainLedger(ledger_id=ledger_id) for ledger_id in ledger_ids)
    checks.on_chain(KEY, Chain(incarnation=incarnation, epoch=epoch, ledgers=ledgers), "east#1")


def emptied(*, asked: bool) -> tuple[ClientNotes, ClientTrims]:
    """A topic with ledger 1, of which its writer was told OK for two of three entries; then made anew, and emptied once more."""
    loop = VirtualLoop()
    history = History(loop)
    notes = ClientNotes(history)
    trims = ClientTrims(history, notes, [TOPIC], random.Random(0))
    history.sent[1], history.acked[1] = [b"a", b"b", b"c"], 2
    if asked:
        trims.deleting.append(TOPIC)

    async def run() -> None:
        checks = TopicRecordChecks(history)
        commit(checks, 1, 1)
        commit(checks, 2)
        commit(checks, 1, 5, incarnation="ii")
        commit(checks, 2, incarnation="ii")

    loop.run(run())
    return notes, trims


def test_a_topic_that_is_deleted_is_noted_with_an_epoch_that_rises_and_its_entries_are_kept() -> None:
    notes, trims = emptied(asked=True)
    told = [(event.kind, event.position, event.details) for event in notes.events[str(TOPIC)]]
    assert told == [("deleted", (2, 0, -1), {"epoch": 2}), ("deleted", (6, 0, -1), {"epoch": 5})]
    assert trims.entries(TOPIC) == [(Position(1, 0), b"a"), (Position(1, 1), b"b")]
    assert trims.edge(TOPIC) == (6, 0)


def test_a_topic_that_is_deleted_before_it_had_a_ledger_is_noted_once() -> None:
    """Seed 0x45: else its subscriptions would be owed what is published to the topic that is made again."""
    loop = VirtualLoop()
    history = History(loop)
    notes = ClientNotes(history)
    ClientTrims(history, notes, [TOPIC], random.Random(0)).deleting.append(TOPIC)

    async def run() -> None:
        checks = TopicRecordChecks(history)
        commit(checks, 1)
        checks.on_chain_deleted(KEY)
        commit(checks, 1, 5, incarnation="ii")
        commit(checks, 2, incarnation="ii")
        checks.on_chain_deleted(KEY)

    loop.run(run())
    assert [event.position for event in notes.events[str(TOPIC)]] == [(0, 0, -1), (6, 0, -1)]


def test_a_topic_that_nobody_asked_to_delete_is_missed() -> None:
    with pytest.raises(InvariantViolation, match="nobody asked for its deletion"):
        emptied(asked=False)
