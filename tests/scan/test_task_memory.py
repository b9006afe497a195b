"""What a task holds of what it has read, while rows are made and given out; and the heap that its threads share."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from cepheid_decode import Fragment, Piece, ReadMode, ReadSettings, ScanCounters, ScanSpec, ScanTask, message_decoder
from cepheid_rpc import EntryGroup, encode_group
from cepheid_scan import scan_task
from tests.decode.decode_reference import batched, message

ENTRIES, PER_BATCH, PER_GROUP = 40, 50, 4


class Held(bytearray):
    """Bytes that can be watched: a view of them holds them."""


class WatchedSource:
    """In place of EntrySource; `alive`: of the groups that were read, how many somebody holds."""

    def __init__(self, _bookies: object, _ticket: object, settings: ReadSettings, counters: ScanCounters, **_: object) -> None:
        self.settings, self.counters, self.stop = settings, counters, None
        self.read_groups: list[weakref.ref[Held]] = []
        sources.append(self)

    def read(self, piece: Piece) -> Iterator[EntryGroup]:
        for first in range(piece.first_entry_id, piece.last_entry_id + 1, PER_GROUP):
            yield self._group(piece.ledger_id, first)

    def _group(self, ledger_id: int, first: int) -> EntryGroup:
        tail = batched([message(b"value %06d" % number * 20) for number in range(PER_BATCH)])
        group = encode_group(ledger_id, first, -1, 0, [tail] * PER_GROUP)
        held = Held(group.data)
        self.read_groups.append(weakref.ref(held))
        return EntryGroup(ledger_id, first, group.ends, memoryview(held))

    @property
    def alive(self) -> int:
        return sum(group() is not None for group in self.read_groups)


sources: list[WatchedSource] = []


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WatchedSource]]:
    monkeypatch.setattr(scan_task, "EntrySource", WatchedSource)
    yield sources
    sources.clear()


def batches_of(mode: ReadMode, *columns: str) -> Iterator[pa.RecordBatch]:
    piece = Piece("persistent://public/default/t", -1, 7, 0, ENTRIES - 1, 1, 1, (Fragment(0, ("a",)),))
    spec = ScanSpec(mode, columns, settings=ReadSettings(decode_bytes=200_000))
    return scan_task.scan_task(ScanTask((piece,), ()), spec)


@pytest.mark.parametrize(("mode", "column"), [(ReadMode.MESSAGES, "value"), (ReadMode.ENTRIES, "entry")])
def test_stored_entries_go_as_soon_as_they_are_copied(source: list[WatchedSource], mode: ReadMode, column: str) -> None:
    seen = [(len(source[0].read_groups), source[0].alive) for _ in batches_of(mode, column)]
    assert seen[0] == (5, 1), "five are collected; the last one is still in the hands of whoever read it, the others are gone"
    assert {alive for _, alive in seen} == {1}
    assert seen[-1][0] == ENTRIES // PER_GROUP


def test_rows_go_before_the_next_are_made(source: list[WatchedSource], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_decoder, "BATCH_MESSAGES", 2 * PER_BATCH)
    make = message_decoder.MessageDecoder._decode_slice
    held: list[int] = []

    def watched(self: Any, *arguments: Any) -> Any:
        held.append(pa.total_allocated_bytes() - before)
        return make(self, *arguments)

    monkeypatch.setattr(message_decoder.MessageDecoder, "_decode_slice", watched)
    before = pa.total_allocated_bytes()
    rows = 0
    for batch in batches_of(ReadMode.MESSAGES, "value", "publish_time"):
        rows += batch.num_rows
        assert pa.total_allocated_bytes() - before > 2 * PER_BATCH * 200
        del batch
    assert rows == ENTRIES * PER_BATCH
    assert held == [0] * (ENTRIES // 2)


ARENAS = """
import ctypes, sys, threading
if "share" in sys.argv:
    from cepheid_ports import share_one_arena
    assert share_one_arena() and share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(6)
def take():
    together.wait()
    assert libc.malloc(ctypes.c_size_t(100_000))
    together.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.malloc_stats()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize("share", [True, False])
def test_threads_of_a_worker_share_one_heap(share: bool) -> None:
    command = [sys.executable, "-c", ARENAS, *(["share"] if share else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    arenas = done.stderr.count("Arena ")
    assert (arenas == 1) is share, done.stderr
