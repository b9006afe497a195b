"""Messages in chunks between which one ledger ended, or several: read from real bookies, planned as any scan is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from cepheid_decode import (
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    OnBadRecord,
    PlanSource,
    ReadMode,
    ReadSettings,
    ScanCounters,
    ScanSpec,
    TopicHistory,
)
from cepheid_rpc import encode_group
from cepheid_scan import entry_source as source_module
from cepheid_scan import open_planner
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import scan_task
from cepheid_scan.splits import TopicRange, cut_ranges
from tests.decode.test_chunked import chunks
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies, piece_of
from tests.scan.segment_objects import write_object

PAYLOAD = bytes(range(256)) * 12
NEXT = LEDGER + 1


@pytest.fixture
def bookies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScanBookies]:
    """Three chunks: one ends the first ledger, two begin the next."""
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    first, second, third = chunks(PAYLOAD, 3, partition_key="k")
    with ScanBookies(tmp_path, "a") as bookies:
        bookies.add(encode_group(LEDGER, 0, -1, 0, [first]))
        bookies.add(encode_group(NEXT, 0, -1, 0, [second, third]))
        yield bookies
    close_channels()


def ledger(ledger_id: int, last_entry_id: int) -> LedgerHistory:
    return LedgerHistory(ledger_id, last_entry_id, False, 1000 * (last_entry_id + 1), None, 1, 1, (Fragment(0, ("a",)),), b"")


def read(bookies: ScanBookies, tasks: int, lookback: int = 1000) -> tuple[list[tuple[int, int, bytes]], ScanCounters]:
    history = TopicHistory(TOPIC, -1, "i", (ledger(LEDGER, 0), ledger(NEXT, 1)))
    whole = TopicRange(history, MessagePosition(LEDGER, 0), MessagePosition(NEXT, 2))
    cut = cut_ranges([whole], HistoryPlan((history,), bookies.addresses), target_bytes=1 << 20, min_tasks=tasks)
    assert len(cut) == tasks
    settings = ReadSettings(chunk_lookback=lookback)
    spec = ScanSpec(ReadMode.MESSAGES, ("ledger_id", "entry_id", "value"), settings=settings, on_bad_record=OnBadRecord.SKIP)
    counters = ScanCounters()
    rows = [row for task in cut for batch in scan_task(task, spec, counters) for row in batch.to_pylist()]
    return [(row["ledger_id"], row["entry_id"], row["value"]) for row in rows], counters


@pytest.mark.parametrize("tasks", [1, 3])
def test_it_is_one_row_wherever_tasks_are_cut(bookies: ScanBookies, tasks: int) -> None:
    rows, counters = read(bookies, tasks)
    assert rows == [(NEXT, 1, PAYLOAD)]
    assert counters.bad_records == 0


def test_beyond_the_look_back_it_is_a_bad_record(bookies: ScanBookies) -> None:
    rows, counters = read(bookies, 3, lookback=1)
    assert rows == []
    assert counters.bad_records == 1


PARTS = [f"part {number} ".encode() for number in range(5)]


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScanBookies]:
    """Two messages that lie among each other, a chunk a ledger: `a` over ledgers 10, 11, 13, 15, 16, `b` over 11, 13, 16."""
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    a, b = chunks(b"".join(PARTS), 5, uuid="a"), chunks(PAYLOAD, 3, uuid="b")
    with ScanBookies(tmp_path, "a") as bookies:
        for ledger_id, entries in STORED.items():
            bookies.add(encode_group(ledger_id, 0, -1, 0, [{"a": a, "b": b}[name][number] for name, number in entries]))
        yield bookies
    close_channels()


STORED = {10: [("a", 0)], 11: [("a", 1), ("b", 0)], 13: [("a", 2), ("b", 1)], 15: [("a", 3)], 16: [("a", 4), ("b", 2)]}
EMPTY = (12, 14)
WHOLE = [(16, 0, b"".join(PARTS)), (16, 1, PAYLOAD)]


def read_many(
    bookies: ScanBookies, tasks: int, urls: Mapping[int, str] = MappingProxyType({}), **settings: int
) -> tuple[list[tuple[int, int, bytes]], int]:
    """Rows and bad records. `urls`: of ledgers that are only objects."""
    found = [ledger(number, len(STORED.get(number, ())) - 1) for number in range(10, 17)]
    moved = [replace(each, object_url=urls[each.ledger_id], fragments=()) if each.ledger_id in urls else each for each in found]
    history = TopicHistory(TOPIC, -1, "i", tuple(moved))
    whole = TopicRange(history, MessagePosition(10, 0), MessagePosition(16, 2))
    cut = cut_ranges([whole], HistoryPlan((history,), bookies.addresses), target_bytes=1 << 20, min_tasks=tasks)
    assert len(cut) == tasks
    spec = ScanSpec(
        ReadMode.MESSAGES,
        ("ledger_id", "entry_id", "value"),
        settings=ReadSettings(**settings),
        on_bad_record=OnBadRecord.SKIP,
        plan_source=PlanSource(admin_url="http://nobody"),
    )
    counters = ScanCounters()
    rows = [row for task in cut for batch in scan_task(task, spec, counters) for row in batch.to_pylist()]
    return [(row["ledger_id"], row["entry_id"], row["value"]) for row in rows], counters.bad_records


@pytest.mark.parametrize("tasks", [1, 4, 8])
def test_chunks_over_many_ledgers_and_empty_ones_between(many: ScanBookies, tasks: int) -> None:
    assert {number for number in range(10, 17) if number not in STORED} == set(EMPTY)
    assert read_many(many, tasks) == (WHOLE, 0)


@pytest.mark.parametrize("moved", [(10, 11, 13, 15, 16), (10, 13, 16), (11, 15)])
def test_chunks_in_objects_and_on_bookies_are_one_message(many: ScanBookies, tmp_path: Path, moved: tuple[int, ...]) -> None:
    a, b = chunks(b"".join(PARTS), 5, uuid="a"), chunks(PAYLOAD, 3, uuid="b")
    urls = {}
    for ledger_id in moved:
        entries = STORED[ledger_id]
        stored = encode_group(ledger_id, 0, -1, 0, [{"a": a, "b": b}[name][number] for name, number in entries])
        of_ledger = piece_of(0, len(entries) - 1, (0, "a"), ledger_id=ledger_id)
        urls[ledger_id] = write_object(tmp_path / "objects" / f"{ledger_id}.parquet", of_ledger, [stored])
    for tasks in (1, 4, 8):
        assert read_many(many, tasks, urls) == (WHOLE, 0)


def test_over_many_ledgers_the_look_back_counts_entries(many: ScanBookies) -> None:
    assert read_many(many, 8, chunk_lookback=6) == (WHOLE, 0)
    assert read_many(many, 8, chunk_lookback=5) == (WHOLE[1:], 1), "the first chunk of one message is six entries before its last"


def test_a_ledger_between_that_was_trimmed_costs_what_lies_in_it_alone(many: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ledger is read when 10 is gone, and 15 as well."""
    history = TopicHistory(TOPIC, -1, "i", tuple(ledger(number, len(STORED[number]) - 1) for number in STORED))
    last = TopicRange(history, MessagePosition(16, 0), MessagePosition(16, 2))
    (task,) = cut_ranges([last], HistoryPlan((history,), many.addresses), target_bytes=1 << 20)
    gone = tuple(
        replace(tail, ledger_id=90 + tail.ledger_id) if tail.ledger_id in (10, 15) else tail for tail in task.pieces[0].before
    )
    task = replace(task, pieces=(replace(task.pieces[0], before=gone),))
    monkeypatch.setattr(open_planner, "find_ledger", lambda *_: (None, {}))
    spec = ScanSpec(
        ReadMode.MESSAGES, ("value",), on_bad_record=OnBadRecord.SKIP, plan_source=PlanSource(admin_url="http://nobody")
    )
    counters = ScanCounters()
    assert [row for batch in scan_task(task, spec, counters) for row in batch["value"].to_pylist()] == [PAYLOAD]
    assert counters.bad_records == 1
