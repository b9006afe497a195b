"""An entry that is damaged on every bookie that has it: an error that says so, or left out and counted, or a row of nulls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cepheid_decode import (
    DamagedEntryError,
    EntriesUnreadableError,
    Fragment,
    LedgerHistory,
    OnBadRecord,
    PlanSource,
    PlanUnavailableError,
    ReadMode,
    ReadSettings,
    ScanCounters,
    ScanSpec,
    ScanTask,
    SchemaVersion,
)
from cepheid_rpc import encode_group
from cepheid_scan import entry_source as source_module
from cepheid_scan import open_planner
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import scan_task
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies, damaged, piece_of

SETTINGS = ReadSettings(unreachable_s=0.2)
VALUES = ScanSpec(ReadMode.MESSAGES, ("entry_id", "value"), settings=SETTINGS)
INT32 = SchemaVersion(b"\0" * 8, "INT32", b"")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScanBookies]:
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    with ScanBookies(tmp_path, "ab") as bookies:
        yield bookies
    close_channels()


def stored(number: int, **fields: Any) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=number, publish_time=1_700_000_000_000 + number, **fields)
    return bytes(encode_tail(metadata, number.to_bytes(4, "big")))


def store(bookies: ScanBookies, bad: dict[int, str], count: int = 60, **fields: Any) -> None:
    """`bad`: of which entries the copies of which bookies are damaged."""
    for first in range(0, count, 10):
        entries = [stored(number, **fields) for number in range(first, first + 10)]
        for bookie in bookies.addresses:
            group = encode_group(LEDGER, first, -1, 0, entries)
            for entry_id, where in bad.items():
                if bookie in where and first <= entry_id < first + 10:
                    group = damaged(group, entry_id)
            bookies.add(group, bookie)


def task_of(bookies: ScanBookies, first: int = 0, last: int = 59) -> ScanTask:
    return ScanTask((piece_of(first, last, (0, "ab")),), tuple(bookies.addresses.items()))


def read(bookies: ScanBookies, spec: ScanSpec, counters: ScanCounters | None = None, first: int = 0) -> list[dict[str, Any]]:
    return [row for batch in scan_task(task_of(bookies, first), spec, counters) for row in batch.to_pylist()]


def test_it_is_named_with_its_bookies_and_what_to_do(two: ScanBookies) -> None:
    store(two, {42: "ab"})
    with pytest.raises(DamagedEntryError) as caught:
        read(two, VALUES)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith(f"entry {LEDGER}:42 of {TOPIC} is damaged on all of its bookies")
    assert all(part in first_line for part in ("a: BAD_DIGEST", "b: BAD_DIGEST", "onBadRecord=skip"))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [[42], [0], [59], [10, 11, 12, 30, 31, 40], list(range(20, 50))])
def test_it_is_left_out_and_counted(two: ScanBookies, bad: list[int], caplog: pytest.LogCaptureFixture) -> None:
    store(two, dict.fromkeys(bad, "ab"))
    counters = ScanCounters()
    rows = read(two, replace(VALUES, on_bad_record=OnBadRecord.SKIP), counters)
    assert [row["entry_id"] for row in rows] == [number for number in range(60) if number not in bad]
    assert all(row["value"] == row["entry_id"].to_bytes(4, "big") for row in rows)
    assert (counters.bad_records, counters.messages, counters.entries) == (len(bad), 60 - len(bad), 60)
    warned = [record.entry_id for record in caplog.records if "entries_damaged" in record.msg]  # type: ignore[attr-defined]
    assert warned == bad
    assert f"scan.entries_damaged: entry {LEDGER}:{bad[0]} of {TOPIC} is damaged on all of its bookies" in caplog.text
    assert f": {len(bad)} that cannot be decoded left out (onBadRecord=skip)" in caplog.messages[-1]


def test_it_is_a_row_of_nulls(two: ScanBookies) -> None:
    store(two, {42: "ab"})
    counters = ScanCounters()
    spec = replace(VALUES, columns=("ledger_id", "entry_id", "value", "publish_time"), on_bad_record=OnBadRecord.NULL)
    rows = read(two, spec, counters)
    assert [row["entry_id"] for row in rows] == list(range(60))
    assert rows[42] == {"ledger_id": LEDGER, "entry_id": 42, "value": None, "publish_time": None}
    assert counters.bad_records == 1


def test_typed_rows_say_why(two: ScanBookies) -> None:
    store(two, {42: "ab"}, schema_version=INT32.version)
    spec = ScanSpec(ReadMode.TYPED, ("value", "_error"), on_bad_record=OnBadRecord.NULL, schemas=(INT32,), settings=SETTINGS)
    rows = read(two, spec)
    assert rows[41] == {"value": 41, "_error": None}
    assert rows[42]["value"] is None
    assert "no bytes that are undamaged" in rows[42]["_error"]


@pytest.mark.parametrize(("policy", "count"), [(OnBadRecord.SKIP, 59), (OnBadRecord.NULL, 60)])
def test_of_stored_entries_too(two: ScanBookies, policy: OnBadRecord, count: int) -> None:
    store(two, {42: "ab"})
    counters = ScanCounters()
    rows = read(two, ScanSpec(ReadMode.ENTRIES, ("entry_id", "entry"), on_bad_record=policy, settings=SETTINGS), counters)
    assert len(rows) == count
    assert [row["entry_id"] for row in rows if row["entry"] is None] == ([42] if policy is OnBadRecord.NULL else [])
    assert (counters.messages, counters.bad_records) == (count, 1)


def test_one_good_copy_is_enough_whatever_the_option_says(two: ScanBookies) -> None:
    store(two, {12: "a", 13: "b", 14: "a", 42: "b"})
    for first in range(6):  # so that each of them is asked first at some time
        counters = ScanCounters()
        rows = read(two, replace(VALUES, on_bad_record=OnBadRecord.SKIP), counters, first)
        assert [row["entry_id"] for row in rows] == list(range(first, 60))
        assert counters.bad_records == 0


def test_a_copy_that_is_only_away_is_not_left_out(two: ScanBookies) -> None:
    """The other one may be good: nobody may take the message for lost."""
    store(two, {42: "a"})
    two.stop("b")
    with pytest.raises(EntriesUnreadableError, match=r"42 .*could be read from none of its bookies.*b: UNAVAILABLE") as caught:
        read(two, replace(VALUES, on_bad_record=OnBadRecord.SKIP))
    assert not isinstance(caught.value, DamagedEntryError)


@pytest.mark.slow
def test_the_metadata_is_asked_before_it_is_left_out(two: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    """By now somebody else may have a good copy. One question is enough for a damaged block."""
    store(two, dict.fromkeys(range(40, 50), "ab"))
    asked: list[int] = []
    ledger = LedgerHistory(LEDGER, 59, False, 0, None, 2, 2, (Fragment(0, ("a", "b")),), b"")

    def find(_: PlanSource, topic: str, ledger_id: int) -> tuple[LedgerHistory | None, dict[str, str]]:
        asked.append(ledger_id)
        return ledger, {}

    monkeypatch.setattr(open_planner, "find_ledger", find)
    spec = replace(VALUES, on_bad_record=OnBadRecord.SKIP, plan_source=PlanSource(admin_url="http://nobody"))
    assert len(read(two, spec)) == 50
    assert asked == [LEDGER]

    def nobody(*_: Any) -> Any:
        raise PlanUnavailableError("nobody answers")

    monkeypatch.setattr(open_planner, "find_ledger", nobody)
    assert len(read(two, spec)) == 50


@pytest.mark.slow
def test_of_a_damaged_block_only_that_is_left_out_whose_other_copy_is_damaged_too(two: ScanBookies, tmp_path: Path) -> None:
    """On the one the whole block, on the other an entry of it: which is all that is lost."""
    store(two, {234: "b"}, count=400)
    two.checkpoint()
    flip(tmp_path / "a", stored(234)[-20:])
    counters = ScanCounters()
    spec = replace(VALUES, on_bad_record=OnBadRecord.SKIP)
    rows = [row for batch in scan_task(task_of(two, last=399), spec, counters) for row in batch.to_pylist()]
    assert [row["entry_id"] for row in rows] == [number for number in range(400) if number != 234]


@pytest.mark.slow
def test_of_a_damaged_block_on_disk_only_what_is_damaged_is_left_out(two: ScanBookies, tmp_path: Path) -> None:
    """A bit is another in the files of both: the block's checksum fails there, its other entries' digests do not."""
    store(two, {}, count=400)
    two.checkpoint()
    flip(tmp_path, stored(234)[-20:])
    counters = ScanCounters()
    spec = replace(VALUES, on_bad_record=OnBadRecord.SKIP)
    rows = [row for batch in scan_task(task_of(two, last=399), spec, counters) for row in batch.to_pylist()]
    assert [row["entry_id"] for row in rows] == [*range(234), *range(235, 400)]
    assert counters.bad_records == 1
    assert counters.retries <= 2 * SETTINGS.read_attempts, "all of it at once"


def flip(directory: Path, what: bytes) -> None:
    """A bit of it is another, wherever it is in files."""
    for path in directory.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = data.find(what)
        while at >= 0:
            data[at] ^= 1
            at = data.find(what, at)
            path.write_bytes(data)
