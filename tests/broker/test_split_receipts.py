"""Receipts of a group that a ledger's end cut in two: each entry's own position, repetitions in their places among them."""

from __future__ import annotations

import pytest

from cepheid_broker.publishing.deduplication import Mark, ProducerSequence
from cepheid_broker.publishing.publish_group import NO_POSITION, PublishGroup
from cepheid_managed_ledger import SplitPosition
from cepheid_metadata import Position
from cepheid_wire import SendCommand

RUNS = [(Position(3, 7), 2), (Position(5, 0), 1), (Position(9, 0), 2)]
PLACES = [(3, 7), (3, 8), (5, 0), (9, 0), (9, 1)]


def group_of(sends: str) -> PublishGroup:
    """`s`: is stored, `r`: repeats what is."""
    group, sequence = PublishGroup(), ProducerSequence("p", Mark(99, 99), 0.0)
    for sequence_id, kind in enumerate(sends):
        if kind == "s":
            group.payloads.append(b"x")
            group.sequence_ids.append((sequence_id, None))
        else:
            group.repeat(
                SendCommand(4, sequence_id, None, None, False, None, None, False), sequence, Mark(sequence_id, sequence_id)
            )
    return group


@pytest.mark.parametrize("sends", ["sssss", "rsssss", "ssrsss", "sssrrss", "sssssr", "rsrsrsrsrsr"])
def test_each_send_is_told_where_its_entry_is(sends: str) -> None:
    receipts = group_of(sends).receipts(4, SplitPosition(RUNS), step=1)
    places = iter(PLACES)
    expected = [NO_POSITION if kind == "r" else next(places) for kind in sends]
    assert [(ledger_id, entry_id) for _, _, ledger_id, entry_id, _ in receipts] == expected
    assert [sequence_id for _, sequence_id, *_ in receipts] == list(range(len(sends)))
    assert {producer_id for producer_id, *_ in receipts} == {4}


def test_a_split_position_is_that_of_its_first_entry() -> None:
    assert SplitPosition(RUNS) == Position(3, 7)
    assert SplitPosition(RUNS).runs == tuple(RUNS)
