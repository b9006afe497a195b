"""A message in chunks whose ledger ended between them: read from real bookies, planned as any scan is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cepheid_rpc import encode_group
from cepheid_scan import (
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    OnBadRecord,
    ReadMode,
    ReadSettings,
    ScanCounters,
    ScanSpec,
    TopicHistory,
)
from cepheid_scan import entry_source as source_module
from cepheid_scan.bookie_reads import close_channels
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import scan_task
from cepheid_scan.splits import TopicRange, cut_ranges
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies
from tests.scan.test_chunked import chunks

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
