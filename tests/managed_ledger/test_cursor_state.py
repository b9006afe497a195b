"""Bytes of a cursor's state: damage is noticed, newer formats are refused."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from cepheid_managed_ledger import CursorStateDamagedError, CursorStateNewerError
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor_state import decode_state, encode_state
from cepheid_managed_ledger.delivery_counts import DeliveryCounts
from cepheid_metadata import Position
from tests.managed_ledger.test_ledger_list import at, ledger_list


def some_state() -> bytes:
    acks = AckSet(ledger_list((3, 100), (4, 100)), at("3:5"))
    acks.acknowledge([at("3:9"), at("4:1")])
    acks.acknowledge_messages(at("4:7"), 5, 70)
    counts = DeliveryCounts()
    counts.add(4, 8, 3)
    return encode_state(acks, counts, {"producer": 9})


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


def test_every_flipped_byte_is_noticed() -> None:
    state = some_state()
    for index in range(len(state)):
        damaged = bytearray(state)
        damaged[index] ^= 0x40
        with pytest.raises(CursorStateDamagedError):
            decode_state(bytes(damaged))


def test_every_cut_is_noticed() -> None:
    state = some_state()
    for size in range(len(state)):
        with pytest.raises(CursorStateDamagedError):
            decode_state(state[:size])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (struct.pack("<BqqI", 1, 3, 5, 1) + struct.pack("<qI", 3, 4) + b"junk" + bytes(4), "not cursor state"),
        (struct.pack("<BqqII", 1, 3, 5, 0, 1) + struct.pack("<qqI", 3, 4, 1 << 30), "batch of"),
        (struct.pack("<BqqII", 1, 3, 5, 0, 0) + b"more", "4 bytes follow"),
    ],
)
def test_what_is_no_state_is_refused_with_a_reason(body: bytes, says: str) -> None:
    with pytest.raises(CursorStateDamagedError, match=says):
        decode_state(sealed(body))


def test_state_of_a_newer_format_is_no_damage() -> None:
    """What is damaged is given up; what a newer release wrote must not be."""
    with pytest.raises(CursorStateNewerError, match="format 3"):
        decode_state(sealed(b"\x03" + bytes(24)))


def test_fifty_thousand_holes_are_small() -> None:
    chain = ledger_list((3, 100_002))
    acks = AckSet(chain, at("3:-1"))
    acks.acknowledge(Position(3, entry) for entry in range(1, 100_002, 2))
    state = encode_state(acks)
    assert len(state) < 20_000
    assert decode_state(state).ack_set(chain).acked_entries == 50_001
