"""A task from its pieces to rows: what is decoded together, what is lost, what is looked back at, what its log line says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cepheid_decode import (
    BadRecordError,
    DataLossError,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    OnBadRecord,
    Piece,
    PlanSource,
    ReadMode,
    ReadSettings,
    ScanCounters,
    ScanSpec,
    ScanTask,
    SchemaVersion,
    TopicHistory,
)
from cepheid_rpc import EntryGroup, encode_group
from cepheid_scan import entry_source as source_module
from cepheid_scan import open_planner
from cepheid_scan import scan_task as module
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import LookBack, collected, scan_task
from cepheid_scan.splits import TopicRange, cut_ranges
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies, piece_of

ENTRIES = ScanSpec(ReadMode.ENTRIES, ("entry_id", "entry"), settings=ReadSettings(decode_bytes=20_000, unreachable_s=0.2))


@pytest.fixture
def bookies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScanBookies]:
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    with ScanBookies(tmp_path, "a") as bookies:
        yield bookies
    close_channels()


def entry(value: bytes, **fields: Any) -> bytes:
    """A message that is no batch, as a broker stores it."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1_700_000_000_000, **fields)
    return bytes(encode_tail(metadata, value))


def store(bookies: ScanBookies, values: Sequence[bytes], *, ledger_id: int = LEDGER, **fields: Any) -> None:
    for first in range(0, len(values), 10):
        group = encode_group(ledger_id, first, -1, 0, [entry(value, **fields) for value in values[first : first + 10]])
        bookies.add(group)


def task_of(bookies: ScanBookies, *pieces: Piece) -> ScanTask:
    return ScanTask(pieces, tuple(bookies.addresses.items()))


def test_rows_come_in_the_order_of_pieces_and_entries(bookies: ScanBookies) -> None:
    store(bookies, [b"%d" % number for number in range(100)])
    store(bookies, [b"other %d" % number for number in range(20)], ledger_id=8)
    pieces = [piece_of(90, 99, (0, "a")), piece_of(0, 19, (0, "a"), ledger_id=8), piece_of(3, 7, (0, "a"))]
    spec = ScanSpec(ReadMode.MESSAGES, ("value", "ledger_id", "entry_id"))
    counters = ScanCounters()
    rows = [row for batch in scan_task(task_of(bookies, *pieces), spec, counters) for row in batch.to_pylist()]
    places = [(row["ledger_id"], row["entry_id"]) for row in rows]
    assert places == [*((7, i) for i in range(90, 100)), *((8, i) for i in range(20)), *((7, i) for i in range(3, 8))]
    assert [row["value"] for row in rows[-5:]] == [b"3", b"4", b"5", b"6", b"7"]
    assert (counters.entries, counters.messages) == (35, 35)
    assert counters.decode_s > 0


def test_as_much_is_decoded_at_once_as_the_settings_say(bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    store(bookies, [b"x" * 1_000] * 100)
    sizes: list[int] = []

    class Decoder:
        def __init__(self, *_: object) -> None: ...

        def decode(self, piece: Piece, groups: Sequence[EntryGroup]) -> Iterator[pa.RecordBatch]:
            sizes.append(sum(group.size_bytes for group in groups))
            return iter(())

        def finish(self, piece: Piece) -> Iterator[pa.RecordBatch]:
            sizes.append(-1)
            return iter(())

    monkeypatch.setattr(module, "_decoder", Decoder)
    assert list(scan_task(task_of(bookies, piece_of(0, 99, (0, "a"))), ENTRIES)) == []
    assert sizes.pop() == -1
    assert all(20_000 <= size < 20_000 + 12_000 for size in sizes[:-1]), sizes
    assert sum(sizes) > 100_000


def test_what_came_before_a_loss_is_collected_and_before_another_failure_is_not() -> None:
    group = encode_group(7, 0, -1, 0, [b"a"])

    def failing(error: Exception) -> Iterator[EntryGroup]:
        yield group
        raise error

    collecting = collected(failing(DataLossError("gone")), 1_000)
    assert next(collecting) == [group]
    with pytest.raises(DataLossError):
        next(collecting)
    with pytest.raises(RuntimeError):
        next(collected(failing(RuntimeError("bug")), 1_000))


@pytest.mark.parametrize("fail", [True, False])
def test_a_ledger_trimmed_under_the_reader(
    bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail: bool
) -> None:
    asked: list[int] = []

    def find(_: PlanSource, topic: str, ledger_id: int) -> tuple[LedgerHistory | None, dict[str, str]]:
        assert topic == TOPIC
        asked.append(ledger_id)
        return None, {}

    monkeypatch.setattr(open_planner, "find_ledger", find)
    store(bookies, [b"kept"] * 30, ledger_id=8)
    spec = replace(ENTRIES, fail_on_data_loss=fail, plan_source=PlanSource(admin_url="http://nobody"))
    task = task_of(bookies, piece_of(5, 44, (0, "a")), piece_of(0, 29, (0, "a"), ledger_id=8))
    counters = ScanCounters()
    caplog.set_level(logging.INFO, "cepheid_scan")
    if fail:
        with pytest.raises(DataLossError, match=rf"{TOPIC}: entries 5\.\.44 of ledger 7"):
            list(scan_task(task, spec, counters))
    else:
        assert sum(batch.num_rows for batch in scan_task(task, spec, counters)) == 30
        assert counters.lost_entries == 40
        (warning,) = [record for record in caplog.records if "scan.data_lost" in record.msg]
        assert (warning.lost_entries, warning.entry_id) == (40, 5)  # type: ignore[attr-defined]
        assert warning.message.startswith(f"scan.data_lost: 40 entries: {TOPIC}: entries 5..44 of ledger 7 are gone")
        assert "accept the loss" not in warning.message
        places = f"{TOPIC} 7:5..44, {TOPIC} 8:0..29"
        assert caplog.messages[-1] == f"scan.incomplete: of {places}: 40 entries lost (failOnDataLoss=false)"
    assert asked == [7]
    (line,) = [record for record in caplog.records if record.msg == "scan.task_done"]
    assert line.lost_entries == (0 if fail else 40)  # type: ignore[attr-defined]
    assert ("gone" in line.outcome) is fail  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_bookie_that_came_up_at_another_address_is_found(bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    store(bookies, [b"x"] * 10)
    piece = piece_of(0, 9, (0, "a"))
    ledger = LedgerHistory(LEDGER, 9, False, 0, None, 1, 1, piece.fragments, b"")
    monkeypatch.setattr(open_planner, "find_ledger", lambda *_: (ledger, bookies.addresses))
    spec = replace(ENTRIES, plan_source=PlanSource(admin_url="http://nobody"))
    for known in ((), (("a", "127.0.0.1:1"),)):
        batches = list(scan_task(ScanTask((piece,), known), spec))
        assert sum(batch.num_rows for batch in batches) == 10


def test_looking_back_ends_with_the_ledgers_before() -> None:
    earliest, before = piece_of(2, 3, (0, "a"), ledger_id=6), piece_of(20, 49, (0, "a"))
    piece = replace(piece_of(5, 9, (0, "a"), ledger_id=8), before=(earliest, before))

    class Source:
        def read(self, piece: Piece) -> Iterator[EntryGroup]:
            yield (piece.ledger_id, piece.first_entry_id, piece.last_entry_id)  # type: ignore[misc]

    look_back: Any = LookBack(Source())  # type: ignore[arg-type]
    assert list(look_back(piece, 3)) == [(8, 2, 4)]
    assert list(look_back(piece, 5)) == [(8, 0, 4)]
    assert list(look_back(piece, 12)) == [(7, 43, 49), (8, 0, 4)]
    assert list(look_back(piece, 35)) == [(7, 20, 49), (8, 0, 4)]
    assert list(look_back(piece, 36)) == [(6, 3, 3), (7, 20, 49), (8, 0, 4)]
    assert list(look_back(piece, 1_000)) == [(6, 2, 3), (7, 20, 49), (8, 0, 4)]
    assert list(look_back(replace(piece, before=()), 1_000)) == [(8, 0, 4)]
    assert list(look_back(replace(piece, first_entry_id=0), 4)) == [(7, 46, 49)]
    assert list(look_back(piece_of(0, 9, (0, "a")), 4)) == []


def test_a_ledger_before_that_is_gone_costs_the_message_in_chunks_alone(
    bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_planner, "find_ledger", lambda *_: (None, {}))
    last_chunk = entry(b"end", uuid="u", num_chunks_from_msg=2, chunk_id=1, total_chunk_msg_size=6)
    bookies.add(encode_group(8, 0, -1, 0, [entry(b"a"), last_chunk, entry(b"b")]))
    bookies.add(encode_group(8, 3, -1, 0, [entry(b"c")]))
    piece = replace(piece_of(0, 3, (0, "a"), ledger_id=8), before=(piece_of(0, 9, (0, "a")),))
    settings = replace(ENTRIES.settings, decode_bytes=1)
    spec = ScanSpec(ReadMode.MESSAGES, ("value",), settings=settings, plan_source=PlanSource(admin_url="http://nobody"))
    counters = ScanCounters()
    skipping = replace(spec, on_bad_record=OnBadRecord.SKIP)
    rows = [row for batch in scan_task(task_of(bookies, piece), skipping, counters) for row in batch["value"].to_pylist()]
    assert rows == [b"a", b"b", b"c"]
    assert (counters.bad_records, counters.lost_entries) == (1, 0)
    for fail in (True, False):
        with pytest.raises(BadRecordError, match=r"8:1 .* the chunks before the last of 2 were not found"):
            list(scan_task(task_of(bookies, piece), replace(spec, fail_on_data_loss=fail)))


SCHEMA = SchemaVersion(b"\0" * 8, "INT32", b"")


def typed(on_bad: OnBadRecord, *columns: str) -> ScanSpec:
    return ScanSpec(ReadMode.TYPED, columns, on_bad_record=on_bad, schemas=(SCHEMA,))


def test_typed_rows_beside_what_the_broker_knows(bookies: ScanBookies) -> None:
    store(bookies, [number.to_bytes(4, "big") for number in range(30)], schema_version=SCHEMA.version)
    spec = typed(OnBadRecord.FAIL, "__entry_id", "value", "__producer_name", "_error")
    (batch,) = scan_task(task_of(bookies, piece_of(4, 29, (0, "a"))), spec)
    assert batch.schema.names == list(spec.columns)
    assert batch.to_pylist()[0] == {"__entry_id": 4, "value": 4, "__producer_name": "p", "_error": None}
    assert batch.column("value").to_pylist() == list(range(4, 30))


def test_a_bad_record_is_named_shown_or_left_out(bookies: ScanBookies, caplog: pytest.LogCaptureFixture) -> None:
    values = [number.to_bytes(4, "big") for number in range(30)]
    values[17] = b"three"
    store(bookies, values, schema_version=SCHEMA.version)
    task = task_of(bookies, piece_of(2, 29, (0, "a")))
    with pytest.raises(BadRecordError, match=rf"{TOPIC} at {LEDGER}:17: ") as caught:
        list(scan_task(task, typed(OnBadRecord.FAIL, "value")))
    assert str(caught.value).count("onBadRecord=skip") == 1, "one hint"
    counters = ScanCounters()
    (shown,) = scan_task(task, typed(OnBadRecord.NULL, "value", "_error"), counters)
    assert shown.to_pylist()[15]["value"] is None
    assert shown.to_pylist()[15]["_error"]
    assert (shown.num_rows, counters.messages, counters.bad_records) == (28, 28, 1)
    counters = ScanCounters()
    (left,) = scan_task(task, typed(OnBadRecord.SKIP, "value"), counters)
    assert left.column("value").to_pylist() == [number for number in range(2, 30) if number != 17]
    assert (left.num_rows, counters.messages, counters.bad_records) == (27, 27, 1)
    assert caplog.messages == [
        f"scan.incomplete: of {TOPIC} {LEDGER}:2..29: 1 that cannot be decoded {what}"
        for what in ("shown as null (onBadRecord=null)", "left out (onBadRecord=skip)")
    ], "one each, none where it is an error"


def test_the_rack_of_the_settings_chooses_among_the_racks_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    with ScanBookies(tmp_path, "ab") as bookies:
        store(bookies, [b"x"] * 20)
        fragments = (Fragment(0, ("a", "b")),)
        ledger = LedgerHistory(LEDGER, 19, False, 2_000, None, 2, 2, fragments, b"")
        history = TopicHistory(TOPIC, -1, "i", (ledger,))
        plan = HistoryPlan((history,), bookies.addresses, racks={"a": "east", "b": "west", "c": "west"})
        whole = TopicRange(history, MessagePosition(LEDGER, 0), MessagePosition(LEDGER, 20))
        tasks = cut_ranges([whole], plan, target_bytes=1, min_tasks=8)
        assert len(tasks) > 4
        for rack, bookie in (("east", "a"), ("west", "b")):
            spec = replace(ENTRIES, settings=ReadSettings(rack=rack))
            for task in tasks:
                assert task.racks == (("a", "east"), ("b", "west"))
                counters = ScanCounters()
                list(scan_task(task, spec, counters))
                assert list(counters.by_bookie) == [bookie]
    close_channels()
