"""Ledgers that are in object storage, on bookies, in both, or on their way: no gap, nothing twice, whatever fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cepheid_decode import (
    BadOptionError,
    DataLossError,
    EntriesUnreadableError,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    Piece,
    PlanSource,
    ReadMode,
    ReadSettings,
    ScanCounters,
    ScanSpec,
    ScanTask,
    StorageAccess,
    TopicHistory,
)
from cepheid_decode.scan_request import Edge
from cepheid_rpc import EntryGroup, encode_group
from cepheid_scan import entry_source as source_module
from cepheid_scan import object_files, object_segments, open_planner
from cepheid_scan import scan_task as module
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.edges import end_of, first_of, resolve_edge
from cepheid_scan.entry_probe import BookieProbe
from cepheid_scan.object_files import OBJECT_STORE
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import scan_task
from cepheid_scan.splits import TopicRange, cut_ranges
from tests.decode.decode_reference import batched, message
from tests.scan.scan_bookies import LEDGER, TOPIC, ScanBookies, piece_of
from tests.scan.segment_objects import write_object

ENTRIES = 60
BASE_MS = 1_700_000_000_000
QUICK = ReadSettings(unreachable_s=0.2, read_attempts=2, decode_bytes=2_000)
VALUES = ScanSpec(ReadMode.MESSAGES, ("ledger_id", "value"), settings=QUICK, plan_source=PlanSource(admin_url="http://nobody"))
RAW = replace(VALUES, mode=ReadMode.ENTRIES, columns=("ledger_id", "entry_id", "entry"))


@pytest.fixture
def bookies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScanBookies]:
    monkeypatch.setattr(source_module, "_suspects", Suspects())
    with ScanBookies(tmp_path / "bookies", "a") as bookies:
        yield bookies
    close_channels()


def groups(ledger_id: int) -> list[EntryGroup]:
    def tail(entry_id: int) -> bytes:
        values = [message(b"%d:%d:%d" % (ledger_id, entry_id, index)) for index in range(3)]
        return batched(values, publish_time=BASE_MS + ledger_id * 1000 + entry_id)

    return [encode_group(ledger_id, at, -1, 0, [tail(each) for each in range(at, at + 10)]) for at in range(0, ENTRIES, 10)]


def values(*ledger_ids: int) -> list[bytes]:
    return [b"%d:%d:%d" % (ledger_id, entry, index) for ledger_id in ledger_ids for entry in range(ENTRIES) for index in range(3)]


def store(bookies: ScanBookies, ledger_id: int = LEDGER) -> None:
    for group in groups(ledger_id):
        bookies.add(group)


def object_of(tmp_path: Path, ledger_id: int = LEDGER) -> str:
    whole = piece_of(0, ENTRIES - 1, (0, "a"), ledger_id=ledger_id)
    return write_object(tmp_path / "objects" / f"{ledger_id}-{os.urandom(4).hex()}.parquet", whole, groups(ledger_id))


def piece(url: str, *, on_bookies: bool) -> Piece:
    whole = piece_of(0, ENTRIES - 1, (0, "a"))
    return replace(whole, object_url=url, fragments=whole.fragments if on_bookies else ())


def ledger(ledger_id: int, url: str, *, on_bookies: bool) -> LedgerHistory:
    fragments = (Fragment(0, ("a",)),) if on_bookies else ()
    return LedgerHistory(ledger_id, ENTRIES - 1, False, 10_000, BASE_MS, 1, 1, fragments, b"", url, 1)


def read(bookies: ScanBookies, *pieces: Piece, spec: ScanSpec = VALUES, counters: ScanCounters | None = None) -> list[Any]:
    task = ScanTask(pieces, tuple(bookies.addresses.items()))
    return [row for batch in scan_task(task, spec, counters) for row in batch.column(len(spec.columns) - 1).to_pylist()]


def looks_up(monkeypatch: pytest.MonkeyPatch, found: Callable[[], LedgerHistory | None]) -> None:
    monkeypatch.setattr(open_planner, "find_ledger", lambda source, topic, ledger_id: (found(), {}))


def cut_off(url: str) -> None:
    path = Path(url.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-100])


def changed_in_the_middle(url: str) -> None:
    """In a page of the second half; the footer stays as it is, and may be known already."""
    path = Path(url.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 300):
        data[at] ^= 0xFF
    path.write_bytes(data)


def changed_in_the_footer(url: str) -> None:
    path = Path(url.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[-200] ^= 0xFF
    path.write_bytes(data)


def missing(url: str) -> None:
    Path(url.removeprefix("file://")).unlink()


@pytest.mark.parametrize("spec", [VALUES, RAW], ids=["columns", "entries"])
@pytest.mark.parametrize("prefers", [False, True])
def test_of_two_copies_the_object_is_read_unless_bookies_are_preferred(
    bookies: ScanBookies, tmp_path: Path, prefers: bool, spec: ScanSpec
) -> None:
    store(bookies)
    counters = ScanCounters()
    chosen = replace(spec, settings=replace(QUICK, prefer_bookies=prefers))
    rows = read(bookies, piece(object_of(tmp_path), on_bookies=True), spec=chosen, counters=counters)
    assert len(rows) == (ENTRIES if spec is RAW else 3 * ENTRIES)
    assert set(counters.by_bookie) == {"a" if prefers else OBJECT_STORE}
    assert counters.entries == ENTRIES


@pytest.mark.parametrize("spec", [VALUES, RAW], ids=["columns", "entries"])
@pytest.mark.parametrize("damage", [missing, cut_off, changed_in_the_middle, changed_in_the_footer])
def test_an_object_that_cannot_be_read_is_read_from_bookies(
    bookies: ScanBookies, tmp_path: Path, damage: Callable[[str], None], spec: ScanSpec, caplog: pytest.LogCaptureFixture
) -> None:
    store(bookies)
    expected = read(bookies, piece("", on_bookies=True), spec=spec)
    url = object_of(tmp_path)
    damage(url)
    object_segments._footers.clear()
    with caplog.at_level(logging.WARNING):
        assert read(bookies, piece(url, on_bookies=True), spec=spec) == expected
    assert "scan.object_unusable" in caplog.text
    assert url in caplog.text


@pytest.mark.parametrize("spec", [VALUES, RAW], ids=["columns", "entries"])
@pytest.mark.parametrize("damage", [missing, cut_off, changed_in_the_middle, changed_in_the_footer])
def test_the_only_copy_that_cannot_be_read_is_an_error_that_names_it(
    bookies: ScanBookies, tmp_path: Path, damage: Callable[[str], None], spec: ScanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = object_of(tmp_path)
    damage(url)
    object_segments._footers.clear()
    looks_up(monkeypatch, lambda: ledger(LEDGER, url, on_bookies=False))
    with pytest.raises(EntriesUnreadableError, match="only in object storage") as caught:
        read(bookies, piece(url, on_bookies=False), spec=replace(spec, on_bad_record=module.OnBadRecord.SKIP))
    assert url in str(caught.value)


@pytest.mark.parametrize("spec", [VALUES, RAW], ids=["columns", "entries"])
def test_a_ledger_that_left_the_bookies_after_planning_is_read_from_its_object(
    bookies: ScanBookies, tmp_path: Path, spec: ScanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(bookies)
    expected = read(bookies, piece("", on_bookies=True), spec=spec)
    bookies.delete(LEDGER, "a")
    url = object_of(tmp_path)
    looks_up(monkeypatch, lambda: ledger(LEDGER, url, on_bookies=False))
    assert read(bookies, piece("", on_bookies=True), spec=spec) == expected


def test_an_object_that_moved_is_looked_up_again(bookies: ScanBookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a topic was restored, or offloaded again."""
    old, new = object_of(tmp_path), object_of(tmp_path)
    missing(old)
    looks_up(monkeypatch, lambda: ledger(LEDGER, new, on_bookies=False))
    assert read(bookies, piece(old, on_bookies=False)) == values(LEDGER)


def test_an_object_that_was_trimmed_is_lost_data(bookies: ScanBookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = object_of(tmp_path)
    missing(url)
    looks_up(monkeypatch, lambda: None)
    with pytest.raises(DataLossError, match="are gone"):
        read(bookies, piece(url, on_bookies=False))
    counters = ScanCounters()
    assert read(bookies, piece(url, on_bookies=False), spec=replace(VALUES, fail_on_data_loss=False), counters=counters) == []
    assert counters.lost_entries == ENTRIES


def test_without_the_library_the_extra_is_named(bookies: ScanBookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = object_of(tmp_path)
    store(bookies)
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(BadOptionError, match=r"pip install 'cepheid\[tiered\]'"):
        read(bookies, piece(url, on_bookies=False))
    assert read(bookies, piece(url, on_bookies=True)) == values(LEDGER), "bookies have it, too"


@pytest.mark.parametrize("entries_per_task", [None, 7, 25])
def test_a_topic_in_several_places_is_read_once_and_whole(
    bookies: ScanBookies, tmp_path: Path, entries_per_task: int | None
) -> None:
    """Cut in the midst of row groups, too; the cut of a stream is the same wherever its ledgers lie."""
    for ledger_id in (2, 3, 4):
        store(bookies, ledger_id)
    ledgers = (
        ledger(1, object_of(tmp_path, 1), on_bookies=False),
        ledger(2, "", on_bookies=True),
        ledger(3, object_of(tmp_path, 3), on_bookies=True),
        ledger(4, "", on_bookies=True),
    )
    cuts = []
    for these in (ledgers, tuple(ledger(each, "", on_bookies=True) for each in (1, 2, 3, 4))):
        history = TopicHistory(TOPIC, -1, "i", these)
        plan = HistoryPlan((history,), bookies.addresses)
        per_task = None if entries_per_task is None else {TOPIC: entries_per_task}
        ranges = [TopicRange(history, first_of(history), end_of(history))]
        cuts.append(cut_ranges(ranges, plan, target_bytes=9_000, entries_per_task=per_task))
    found = [row for task in cuts[0] for batch in scan_task(task, VALUES) for row in batch.column(1).to_pylist()]
    assert found == values(1, 2, 3, 4)
    if entries_per_task is not None:
        places = [[[(p.ledger_id, p.first_entry_id, p.last_entry_id) for p in task.pieces] for task in tasks] for tasks in cuts]
        assert places[0] == places[1]


@pytest.mark.parametrize("skew_ms", [0, 3])
def test_times_are_found_in_objects_as_on_bookies(bookies: ScanBookies, tmp_path: Path, skew_ms: int) -> None:
    for ledger_id in (1, 2):
        store(bookies, ledger_id)
    for time_ms in (BASE_MS, BASE_MS + 1000, BASE_MS + 1017, BASE_MS + 1030, BASE_MS + 2059, BASE_MS + 9000):
        found = []
        for copies in (True, False):
            some = [replace(ledger(each, "" if copies else object_of(tmp_path, each), on_bookies=copies)) for each in (1, 2)]
            history = TopicHistory(TOPIC, -1, "i", tuple(replace(each, closed_at_ms=BASE_MS + 10_000) for each in some))
            plan = HistoryPlan((history,), bookies.addresses if copies else {})
            probe = BookieProbe(plan, QUICK)
            edge = Edge(publish_time_ms=time_ms)
            found.append([resolve_edge(edge, plan, probe, is_end=end, skew_ms=skew_ms)[TOPIC] for end in (False, True)])
        assert found[0] == found[1]
        assert isinstance(found[0][0], MessagePosition)


def test_credentials_are_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    access = StorageAccess("hush-key", "hush-secret", "hush-token", endpoint="http://127.0.0.1:1")
    assert "hush" not in repr(access)
    with pytest.raises(object_files.SegmentUnusableError) as caught:
        object_files.open_object("s3://bucket/7.parquet", access, QUICK, ScanCounters())
    assert "hush" not in f"{caught.value!r} {caught.value.__context__!r} {caught.value.__cause__!r}"
