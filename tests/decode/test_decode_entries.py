from __future__ import annotations

from typing import Any

from cepheid_decode import OnBadRecord, ReadMode, RowFilter, ScanCounters, ScanSpec
from cepheid_decode.columns import DEFAULT_ENTRY_COLUMNS
from cepheid_decode.entries_decoder import EntriesDecoder
from cepheid_rpc import encode_group
from tests.decode.decode_reference import LEDGER_ID, TOPIC, batched, message, piece, single, timestamp


def entries(tails: list[bytes], columns: tuple[str, ...] = DEFAULT_ENTRY_COLUMNS, **filters: Any) -> list[dict[str, Any]]:
    spec = ScanSpec(ReadMode.ENTRIES, columns, RowFilter(**filters), OnBadRecord.FAIL)
    decoder = EntriesDecoder(spec, ScanCounters(), lambda asked, count: iter(()))
    groups = [encode_group(LEDGER_ID, at, -1, 0, [tail]) for at, tail in enumerate(tails)]
    batches = [*decoder.decode(piece(len(tails)), groups), *decoder.finish(piece(len(tails)))]
    return [row for batch in batches for row in batch.to_pylist()]


def test_an_entry_is_a_row_with_its_bytes_as_they_are() -> None:
    tails = [single(b"a"), batched([message(), message()], sequence_id=9), single(b"marker", marker_type=10)]
    rows = entries(tails)
    assert [row["entry"] for row in rows] == tails
    assert [row["num_messages"] for row in rows] == [1, 2, 1]
    assert rows[1] == {
        "topic": TOPIC,
        "partition": 3,
        "ledger_id": LEDGER_ID,
        "entry_id": 1,
        "publish_time": timestamp(1_700_000_000_123),
        "producer_name": "p",
        "sequence_id": 9,
        "num_messages": 2,
        "entry": tails[1],
    }


def test_an_entry_that_cannot_be_read_is_a_row_too() -> None:
    (row,) = entries([b"\0\0\0\x09abc"])
    assert row["entry"] == b"\0\0\0\x09abc"
    assert [row[name] for name in ("publish_time", "producer_name", "sequence_id", "num_messages")] == [None] * 4


def test_entries_outside_the_publish_times_are_left_out() -> None:
    tails = [single(publish_time=time) for time in (1, 2, 3)]
    assert entries(tails, ("entry_id",), publish_from_ms=2, publish_until_ms=3) == [{"entry_id": 1}]
