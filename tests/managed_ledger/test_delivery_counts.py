"""Redelivery counts: the model of a plain dictionary, the bound, and what the cursor's saved state makes of them."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from cepheid_managed_ledger import delivery_counts
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_state import decode_state, encode_state
from cepheid_managed_ledger.delivery_counts import MAX_COUNT, DeliveryCounts
from cepheid_metadata import Position
from tests.managed_ledger.test_ledger_list import at, ledger_list

entries = st.builds(Position, st.sampled_from((5, 6, 8)), st.integers(0, 9))
gaps = st.builds(Position, st.sampled_from((5, 6, 8)), st.integers(-1, 9))


def cursor() -> Cursor:
    chain = ledger_list((5, 3), (6, 0), (8, 10))
    return Cursor("billing", AckSet(chain, at("5:-1")), chain, None, {})


def counted(*names: str) -> Cursor:
    made = cursor()
    for name in names:
        made.count_redelivery(*at(name))
    return made


def counts_of(made: Cursor) -> dict[str, int]:
    return {f"{ledger}:{entry}": n for ledger in (5, 6, 8) for entry, n in made.redelivery_counts_in(ledger).items()}


@given(st.lists(st.one_of(entries, st.tuples(gaps, gaps), st.tuples(entries))))
def test_counts_are_what_a_dictionary_would_hold(steps: list[object]) -> None:
    counts, model = DeliveryCounts(), {}
    for step in steps:
        match step:
            case Position():
                counts.add(*step)
                model[step] = model.get(step, 0) + 1
            case (Position() as after, Position() as last):
                counts.forget_between(after, last)
                model = {position: n for position, n in model.items() if not after < position <= last}
            case (Position() as gone,):
                counts.forget((gone,))
                model.pop(gone, None)
        assert len(counts) == len(model)
        assert {Position(ledger, entry): n for ledger in (5, 6, 8) for entry, n in counts.in_ledger(ledger).items()} == model
        assert {Position(ledger, entry): n for ledger, n, same in counts.groups() for entry in same} == model
        assert all(same for _, _, same in counts.groups())


def test_at_the_bound_the_oldest_positions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_counts, "MAX_COUNTS", 128)
    counts = DeliveryCounts()
    for entry in range(1, 129):
        counts.add(8, entry)
    counts.add(5, 3)
    assert len(counts) == 127
    assert not counts.in_ledger(5)
    assert 1 not in counts.in_ledger(8)
    assert 2 in counts.in_ledger(8)


def test_a_count_stops_where_clients_would_read_it_as_negative() -> None:
    counts = DeliveryCounts()
    counts.add(5, 0, MAX_COUNT)
    counts.add(5, 0)
    assert counts.in_ledger(5)[0] == MAX_COUNT


def test_the_counts_of_a_ledger_are_a_live_view() -> None:
    made = counted("8:1")
    before = made.redelivery_counts_in(8)
    made.count_redelivery(8, 1)
    assert before[1] == 2
    assert made.redelivery_counts_in(8) is before
    assert made.redelivery_counts_in(6) == {}


def test_what_is_acknowledged_is_not_counted() -> None:
    made = cursor()
    made.acknowledge([at("5:0"), at("8:2")])
    made.count_redelivery(5, 0)
    made.count_redelivery(8, 2)
    assert counts_of(made) == {}


def test_counts_vanish_with_every_kind_of_acknowledgement() -> None:
    made = counted("5:0", "5:1", "8:0", "8:1", "8:2", "8:3", "8:4")
    made.acknowledge(iter([at("8:1"), at("9:9")]))
    assert counts_of(made) == dict.fromkeys(("5:0", "5:1", "8:0", "8:2", "8:3", "8:4"), 1)
    made.acknowledge_indexes(at("8:3"), [0b01], 2)
    assert "8:3" in counts_of(made), "a part of it is still to be delivered"
    made.acknowledge_indexes(at("8:3"), [0b10], 2)
    assert "8:3" not in counts_of(made)
    made.acknowledge_cumulative(at("8:0"))
    assert counts_of(made) == {"8:2": 1, "8:4": 1}
    made.acknowledge_cumulative(at("8:4"), [0b10], 2)
    assert counts_of(made) == {"8:4": 1}
    made.acknowledge_cumulative(at("8:4"), [0b00], 2)
    assert counts_of(made) == {}


def test_counts_vanish_with_trimmed_ledgers() -> None:
    made = counted("5:2", "8:0")
    made.leave_trimmed(at("8:-1"))
    assert counts_of(made) == {"8:0": 1}


@pytest.mark.virtual_time
async def test_state_carries_counts_and_sequence_ids() -> None:
    made = counted("5:1", "8:0", "8:0", "8:7")
    made.set_sequence_ids({"first": 0, "zweiter ü": (1 << 64) - 1, "": 7})
    _, _, encoded = await made.encoded()
    state = decode_state(encoded)
    restored = cursor()
    restored.restore(state)
    assert counts_of(restored) == {"5:1": 1, "8:0": 2, "8:7": 1}
    assert restored.sequence_ids == {"first": 0, "zweiter ü": (1 << 64) - 1, "": 7}
    assert state.counts(AckSet(ledger_list((5, 3), (8, 10)), at("8:0"))).in_ledger(8) == {7: 1}
    shorter = state.counts(AckSet(ledger_list((8, 3)), at("8:-1")))
    assert [*shorter.groups()] == [(8, 2, BitMap([0]))]
    restored.count_redelivery(8, 7)
    assert counts_of(restored) == {"5:1": 1, "8:0": 2, "8:7": 2}


def test_sequence_ids_are_numbers_of_the_wire() -> None:
    made = cursor()
    for wrong in (-1, 1 << 64):
        with pytest.raises(ValueError, match="64-bit"):
            made.set_sequence_ids({"a": wrong})


def test_bytes_of_format_2() -> None:
    acks = AckSet(ledger_list((8, 10)), at("8:3"))
    counts = DeliveryCounts()
    counts.add(8, 5, 2)
    state = encode_state(acks, counts, {"ab": 9})
    bitmap = bytes.fromhex("3a300000 01000000 0000 0000 10000000 0500")  # cookie, containers, key, cardinality - 1, offset, 5
    body = struct.pack("<BqqII", 2, 8, 3, 0, 0) + struct.pack("<I", 1) + struct.pack("<qII", 8, 2, len(bitmap)) + bitmap
    body += struct.pack("<I", 1) + struct.pack("<H", 2) + b"ab" + struct.pack("<Q", 9)
    assert state == body + struct.pack("<I", crc32c(body))


def test_bytes_of_format_1_are_still_read_and_written_when_they_suffice() -> None:
    body = struct.pack("<BqqII", 1, 8, 3, 0, 0)
    old = body + struct.pack("<I", crc32c(body))
    assert encode_state(AckSet(ledger_list((8, 10)), at("8:3"))) == old
    state = decode_state(old)
    assert (state.mark_delete, state.redelivered, state.sequence_ids) == (at("8:3"), [], {})
