"""An object that was changed is named as damaged, and never gives wrong entries."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cepheid_tiered import DamagedSegmentError
from cepheid_tiered import segment_format as layout
from cepheid_tiered.memory_objects import MemoryObjects
from cepheid_tiered.object_store import NewerSegmentError
from cepheid_tiered.segments import Segments
from tests.decode.decode_reference import single
from tests.tiered.segment_samples import LEDGER_ID, groups_of, segments_over, stored, write

ENTRIES = 200
GROUPS = groups_of([single(b"%d" % index * 20) for index in range(ENTRIES)])


async def read_all(segments: Segments, url: str) -> bytes:
    reader = await segments.open(url, LEDGER_ID, ENTRIES)
    at, found = 0, b""
    while at < ENTRIES:
        groups = await reader.read(at, ENTRIES - 1, max_bytes=1000)
        found += stored(groups)
        at = groups[-1].last_entry_id + 1
    return found


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def with_metadata(data: bytes, rows: Callable[[pa.Table], pa.Table] = lambda table: table, **changes: str) -> bytes:
    """The same file with other rows, or that says other things of itself."""
    source = pq.ParquetFile(pa.BufferReader(data))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, source.schema_arrow, write_statistics=True) as writer:
        for index in range(source.num_row_groups):
            writer.write_table(rows(source.read_row_group(index)))
        pairs = {key.decode(): value.decode() for key, value in source.metadata.metadata.items() if key.startswith(b"cepheid.")}
        writer.add_key_value_metadata({**pairs, **{f"cepheid.{name}": value for name, value in changes.items()}})
    return guarded(bytes(sink.getvalue()))


def guarded(data: bytes) -> bytes:
    """A Parquet file with the guard that segments have."""
    start = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    return data[:start] + layout.guard_of(data[start:]) + data[start:]


def other_entries(data: bytes) -> bytes:
    """A whole file whose entries do not have the ids that it says."""

    def exchanged(table: pa.Table) -> pa.Table:
        raw = table.column("raw_entry").to_pylist()
        return table.set_column(1, "raw_entry", pa.array([raw[1], raw[0], *raw[2:]], pa.binary()))

    return with_metadata(data, exchanged)


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "has 0 bytes"),
    "cut off": (lambda data: data[:-100], "does not end as a Parquet file"),
    "cut in front": (lambda data: data[100:], "outside of|cannot be read|not in order"),
    "no Parquet": (lambda data: bytes(5000), "does not end as a Parquet file"),
    "a byte of the first row group": (lambda data: flipped(data, 200), "row group 0"),
    "a byte of the footer": (lambda data: flipped(data, len(data) - 300), "footer of .* was changed"),
    "footer larger than the object": (lambda data: data[:-8] + b"\xff\xff\xff\x00PAR1", "says that its footer has"),
    "another Parquet file": (lambda data: _plain_parquet(), "not a segment"),
    "rewritten by another program": (lambda data: _plain_parquet_of(data), "not a segment"),
    "entries exchanged": (other_entries, "damaged"),
    "another count": (lambda data: with_metadata(data, entries="199"), "199 entries of ledger"),
    "another ledger": (lambda data: with_metadata(data, ledger_id="13"), "holds ledger 13"),
}


def _plain_parquet_of(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(pa.BufferReader(data)), sink)
    return bytes(sink.getvalue())


def _plain_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    return guarded(bytes(sink.getvalue()))


@pytest.mark.parametrize("name", CHANGES)
async def test_a_changed_object_is_damaged_and_named(name: str) -> None:
    change, text = CHANGES[name]
    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        url, _ = await write(segments, GROUPS)
        objects.objects[url] = change(objects.objects[url])
        with pytest.raises(DamagedSegmentError, match=text) as caught:
            await read_all(segments, url)
        assert url in str(caught.value)


async def test_a_file_of_a_later_format_is_refused_as_that() -> None:
    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        url, _ = await write(segments, GROUPS)
        objects.objects[url] = with_metadata(objects.objects[url], format="3")
        with pytest.raises(NewerSegmentError, match="has format 3; this release reads up to 2"):
            await segments.open(url, LEDGER_ID, ENTRIES)


async def test_any_flipped_byte_is_noticed_by_verify_and_never_gives_wrong_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 4000)
    objects = MemoryObjects()
    chance = random.Random(5)
    noticed = 0
    async with segments_over(objects) as segments:
        url, _ = await write(segments, GROUPS)
        whole = objects.objects[url]
        for _ in range(150):
            await segments.delete(url)
            objects.objects[url] = flipped(whole, chance.randrange(4, len(whole)))
            try:
                assert await read_all(segments, url) == stored(GROUPS)
            except DamagedSegmentError:
                noticed += 1
            with pytest.raises(DamagedSegmentError):
                await segments.verify(url, LEDGER_ID)
    assert noticed > 30
