"""Ledgers in object storage give the rows that bookies would give: from columns where these say all, by decoding where not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cepheid_decode import (
    OnBadRecord,
    Piece,
    ReadMode,
    ReadSettings,
    RowFilter,
    ScanCounters,
    ScanError,
    ScanSpec,
    ScanTask,
    SchemaVersion,
    StorageAccess,
)
from cepheid_decode.columns import DEFAULT_MESSAGE_COLUMNS, MESSAGE_COLUMNS
from cepheid_decode.typed import typed_fields
from cepheid_rpc import EntryGroup
from cepheid_scan import object_segments
from cepheid_scan import scan_task as module
from cepheid_scan.object_rows import plan_steps
from cepheid_scan.object_segments import _footers, open_segment
from cepheid_scan.scan_task import scan_task
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import LEDGER_ID, batched, groups_of, message, metadata, piece, single
from tests.decode.test_decryption import KEYS, sealed
from tests.scan.segment_objects import write_object

BASE_MS = 1_700_000_000_000


class FromMemory:
    """A source of entries in place of bookies."""

    def __init__(self, tails: Sequence[bytes]) -> None:
        self._groups = groups_of(tails)

    def reads_object(self, piece: Piece) -> bool:
        return False

    def read(self, asked: Piece) -> Iterator[EntryGroup]:
        for group in self._groups:
            first, last = max(asked.first_entry_id, group.first_entry_id), min(asked.last_entry_id, group.last_entry_id)
            if first <= last:
                yield group.slice(first, last)


def rows_by_decoding(tails: Sequence[bytes], of_piece: Piece, spec: ScanSpec, counters: ScanCounters) -> list[dict[str, Any]]:
    source: Any = FromMemory(tails)
    decoder = module._decoder(spec, counters, module.LookBack(source))
    return rows_of(module.PieceReader(of_piece, source, decoder, spec, counters).rows())


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows


def outcome(read: Callable[[], list[dict[str, Any]]]) -> Any:
    """Rows, or the error that came in place of some: of which kind, and at which message."""
    try:
        return read()
    except ScanError as error:
        return type(error), error.facts.get("position")


def encrypted(number: int) -> bytes:
    described = metadata(publish_time=BASE_MS + number)
    described.encryption_keys.add(key="team", value=b"\xff")
    return encode_tail(described, b"secret")


def marker(number: int) -> bytes:
    return encode_tail(metadata(publish_time=BASE_MS + number, marker_type=10), b"")


def chunk(number: int, chunk_id: int) -> bytes:
    fields = {"uuid": "u", "chunk_id": chunk_id, "num_chunks_from_msg": 2, "total_chunk_msg_size": 6}
    return single(b"abc", publish_time=BASE_MS + number, **fields)


@st.composite
def ledgers(draw: st.DrawFn) -> list[bytes]:
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    odd = draw(st.sampled_from((0.0, 0.0, 0.1)))
    tails: list[bytes] = []
    for number in range(draw(st.integers(1, 40))):
        publish = {"publish_time": BASE_MS + number * 10, "sequence_id": number, "producer_name": chance.choice("pq")}
        if chance.random() < 0.3:
            publish["schema_version"] = chance.choice((bytes(8), bytes(7) + b"\1"))
        if chance.random() < odd:
            tails.append(chance.choice((encrypted, marker, lambda n: b"broken"))(number))
        elif chance.random() < 0.3:
            fields = _of_message(chance)
            tails.append(single(chance.randbytes(chance.randrange(9)), **publish, **fields))
        else:
            messages = [
                message(chance.randbytes(chance.randrange(9)), **_of_message(chance)) for _ in range(chance.randrange(1, 6))
            ]
            tails.append(batched(messages, **publish, compression=chance.choice((pb.NONE, pb.ZSTD, pb.LZ4))))
    if odd:
        at = chance.randrange(len(tails) + 1)
        tails[at:at] = [chunk(at, 0), chunk(at, 1)]
    return tails


def _of_message(chance: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if chance.random() < 0.7:
        fields["partition_key"] = chance.choice(("a", "b", "key-é", ""))
    if chance.random() < 0.4:
        fields["event_time"] = BASE_MS + chance.randrange(100)
    if chance.random() < 0.3:
        fields["properties"] = {"p": chance.choice(("", "✈"))}
    if chance.random() < 0.2:
        fields["ordering_key"] = b"\xff"
    if chance.random() < 0.1:
        fields["null_value"] = True
    return fields


@st.composite
def reads(draw: st.DrawFn, entries: int) -> tuple[Piece, ScanSpec]:
    first = draw(st.integers(0, entries - 1))
    last = draw(st.integers(first, entries - 1))
    times = st.none() | st.integers(BASE_MS - 5, BASE_MS + 400)
    wanted = RowFilter(
        publish_from_ms=draw(times),
        publish_until_ms=draw(times),
        event_from_ms=draw(st.none() | st.integers(BASE_MS, BASE_MS + 100)),
        keys=draw(st.none() | st.frozensets(st.sampled_from(("a", "key-é", "", "z")), min_size=1)),
    )
    columns = draw(st.just(DEFAULT_MESSAGE_COLUMNS) | st.lists(st.sampled_from(list(MESSAGE_COLUMNS)), min_size=1, unique=True))
    asked = piece(
        entries,
        first_entry_id=first,
        last_entry_id=last,
        first_batch_index=draw(st.sampled_from((0, 0, 2))),
        end_batch_index=draw(st.sampled_from((-1, -1, 3))),
    )
    return asked, ScanSpec(ReadMode.MESSAGES, tuple(columns), wanted, draw(st.sampled_from(OnBadRecord)))


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_object_gives_the_rows_that_its_entries_give(data: st.DataObject, tmp_path: Path) -> None:
    tails = data.draw(ledgers())
    asked, spec = data.draw(reads(len(tails)))
    url = write_object(tmp_path / f"{os.urandom(8).hex()}.parquet", piece(len(tails)), groups_of(tails))
    decoded, read = ScanCounters(), ScanCounters()
    expected = outcome(lambda: rows_by_decoding(tails, asked, spec, decoded))
    task = ScanTask((replace(asked, object_url=url),), ())
    assert outcome(lambda: rows_of(scan_task(task, spec, read))) == expected
    if isinstance(expected, list):
        assert (read.messages, read.markers, read.bad_records) == (decoded.messages, decoded.markers, decoded.bad_records)


def test_chunks_far_apart_in_one_object_are_one_message(tmp_path: Path) -> None:
    """Between them lie row groups that are read as columns, with more entries than are looked back at."""
    between = [single(b"x", publish_time=BASE_MS) for _ in range(1_100)]
    tails = [chunk(0, 0), *between, chunk(1, 1), marker(2)]  # the marker has the last row group decoded
    spec = ScanSpec(ReadMode.MESSAGES, ("value", "entry_id"))
    asked = piece(len(tails))
    url = write_object(tmp_path / "x.parquet", asked, groups_of(tails))
    rows = rows_of(scan_task(ScanTask((replace(asked, object_url=url),), ()), spec))
    assert rows == rows_by_decoding(tails, asked, spec, ScanCounters())
    assert rows[-1] == {"value": b"abcabc", "entry_id": 1_101}


def test_encrypted_messages_in_an_object_are_decrypted(tmp_path: Path) -> None:
    tails = [single(b"plain", publish_time=BASE_MS), sealed(b"secret", publish_time=BASE_MS + 1)]
    asked = piece(len(tails))
    url = write_object(tmp_path / "x.parquet", asked, groups_of(tails))
    spec = ScanSpec(ReadMode.MESSAGES, ("value",), decryption_keys=KEYS.private_key)
    rows = rows_of(scan_task(ScanTask((replace(asked, object_url=url),), ()), spec))
    assert rows == [{"value": b"plain"}, {"value": b"secret"}]


RECORD = b'{"type":"record","name":"R","fields":[%s]}'
AVRO = (
    SchemaVersion(bytes(8), "AVRO", RECORD % b'{"name":"key","type":"int"}'),
    SchemaVersion(bytes(7) + b"\1", "AVRO", RECORD % b'{"name":"key","type":"int"},{"name":"w","type":"string","default":"d"}'),
)
JSON = tuple(SchemaVersion(each.version, "JSON", each.definition) for each in AVRO)
PRIMITIVE = (SchemaVersion(bytes(8), "INT32", b""),)
VALUES: dict[str, Any] = {  # by kind: values of each version, and some that are none
    "AVRO": ((b"\x02", b"\x04"), (b"\x06\x02a", b"\x08\x00"), (b"", b"\x80")),
    "JSON": ((b'{"key":1}', b'{"key":2}'), (b'{"key":3,"w":"a"}', b'{"key":4}'), (b"{", b"[]")),
    "INT32": ((bytes(4), b"\0\0\0\7"), (b"\0\0\0\1",), (b"", b"\0")),
}


@pytest.mark.parametrize("written", [1, 2], ids=["an older version", "the newest version"])
@pytest.mark.parametrize("schemas", [AVRO, JSON, PRIMITIVE], ids=["avro", "json", "int32"])
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_typed_rows_of_an_object_are_those_of_its_entries(
    data: st.DataObject, schemas: tuple[SchemaVersion, ...], written: int, tmp_path: Path
) -> None:
    """`written`: how many versions there were when the object was written. A field is called `key`, as a column of messages is."""
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    odd = data.draw(st.sampled_from((0.0, 0.1)))
    tails = [_typed_batch(chance, schemas, odd) for _ in range(30)]
    shown = data.draw(st.sampled_from((None, *(each.version for each in schemas))))
    fields = [field.name for field in typed_fields(schemas, shown)]
    columns = data.draw(
        st.lists(st.sampled_from([*fields, "__key", "__entry_id", "__publish_time", "_error"]), min_size=1, unique=True)
    )
    asked, template = data.draw(reads(len(tails)))
    spec = replace(template, mode=ReadMode.TYPED, columns=tuple(columns), schemas=schemas, reader_version=shown)
    path = tmp_path / f"{os.urandom(8).hex()}.parquet"
    url = write_object(path, piece(len(tails)), groups_of(tails), schemas=schemas[:written])
    decoded, read = ScanCounters(), ScanCounters()
    expected = outcome(lambda: rows_by_decoding(tails, asked, spec, decoded))
    assert outcome(lambda: rows_of(scan_task(ScanTask((replace(asked, object_url=url),), ()), spec, read))) == expected
    if isinstance(expected, list):
        assert (read.messages, read.bad_records) == (decoded.messages, decoded.bad_records)


def _typed_batch(chance: random.Random, schemas: tuple[SchemaVersion, ...], odd: float) -> bytes:
    number = chance.randrange(len(schemas))
    values = VALUES[schemas[0].kind][2 if chance.random() < odd else number]
    messages = [message(chance.choice(values), **_of_message(chance)) for _ in range(chance.randrange(1, 4))]
    return batched(messages, publish_time=BASE_MS + chance.randrange(400), schema_version=schemas[number].version)


def test_nothing_is_decoded_and_only_the_columns_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = [batched([message(b"\x02" * 500, partition_key="k")] * 20, schema_version=bytes(8)) for _ in range(50)]
    url = write_object(tmp_path / "o.parquet", piece(50), groups_of(tails), row_group_bytes=50_000)
    monkeypatch.setattr(module.PieceReader, "_decoded", None)
    counters = ScanCounters()
    spec = ScanSpec(ReadMode.MESSAGES, ("key", "message_id"))
    rows = rows_of(scan_task(ScanTask((replace(piece(50), object_url=url),), ()), spec, counters))
    assert (len(rows), rows[0]["key"], rows[-1]["message_id"]) == (1000, "k", "12:49:3:19")
    assert counters.entries == 50
    _footers.clear()
    seen = object_segments.Segment.columns
    names: set[str] = set()

    def noted(segment: Any, group: Any, wanted: Sequence[str]) -> Any:
        names.update(wanted)
        return seen(segment, group, wanted)

    monkeypatch.setattr(object_segments.Segment, "columns", noted)
    rows_of(scan_task(ScanTask((replace(piece(50), object_url=url),), ()), spec))
    assert names == {"entry_id", "batch_index", "key"}


@pytest.mark.parametrize(
    "wanted",
    [
        RowFilter(publish_from_ms=BASE_MS + 500),
        RowFilter(publish_until_ms=BASE_MS),
        RowFilter(event_from_ms=BASE_MS + 500),
        RowFilter(keys=frozenset({"nobody"})),
    ],
)
def test_row_groups_that_have_nothing_for_the_filter_are_not_read(tmp_path: Path, wanted: RowFilter) -> None:
    tails = [single(b"v", publish_time=BASE_MS + n, event_time=BASE_MS + n, partition_key=f"k{n:03}") for n in range(100)]
    url = write_object(tmp_path / "o.parquet", piece(100), groups_of(tails))
    segment = open_segment(url, LEDGER_ID, StorageAccess(), ReadSettings(), ScanCounters())
    assert len(segment.groups) > 5
    assert plan_steps(piece(100), segment, wanted) == []
    some = plan_steps(piece(100), segment, RowFilter(keys=frozenset({"k042"})))
    assert len(some) == 1
