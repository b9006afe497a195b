"""Snapshots in parts: only a whole one counts, the newest of the right generation wins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor_ledger import Snapshot, SnapshotReader, parts_of
from cepheid_managed_ledger.cursor_state import encode_state
from cepheid_metadata import Position
from tests.managed_ledger.test_ledger_list import at, ledger_list


def snapshot(name: str, generation: int, acked: int) -> Snapshot:
    acks = AckSet(ledger_list((3, 1_000)), at("3:-1"))
    acks.acknowledge(Position(3, entry) for entry in range(1, 2 * acked + 1, 2))
    return Snapshot(name, generation, encode_state(acks))


def acked_of(reader: SnapshotReader) -> dict[str, int]:
    return {name: sum(map(len, state.acked.values())) for name, state in reader.states.items()}


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_parts_may_come_in_any_order(rng, part_bytes: int) -> None:  # type: ignore[no-untyped-def]
    payloads = [
        payload
        for number, one in enumerate(
            [snapshot("a", 0, 1), snapshot("b", 2, 2), snapshot("a", 0, 3), snapshot("b", 1, 9), snapshot("c", 0, 4)], 1
        )
        for payload in parts_of(one, number, part_bytes)
    ]
    rng.shuffle(payloads)
    reader = SnapshotReader({"a": 0, "b": 2, "d": 0})
    for payload in payloads:
        reader.feed(payload)
    assert acked_of(reader) == {"a": 3, "b": 2}
    assert not reader.is_complete
    assert reader.damaged == 0


def test_a_missing_part_leaves_the_snapshot_before() -> None:
    old, new = parts_of(snapshot("a", 0, 1), 1, 20), parts_of(snapshot("a", 0, 2), 2, 20)
    assert len(new) > 2
    for missing in range(len(new)):
        reader = SnapshotReader({"a": 0})
        for payload in reversed(old + new[:missing] + new[missing + 1 :]):
            reader.feed(payload)
        assert acked_of(reader) == {"a": 1}


def test_damaged_parts_are_counted_and_skipped() -> None:
    good = parts_of(snapshot("a", 0, 5), 1, 1_000)
    bad = bytearray(parts_of(snapshot("a", 0, 6), 2, 1_000)[0])
    bad[-1] ^= 1
    zeros = b"\x00" + good[0][1:]
    reader = SnapshotReader({"a": 0})
    for payload in (bytes(bad), zeros, b"", *good):
        reader.feed(payload)
    assert acked_of(reader) == {"a": 5}
    assert reader.damaged == 3
