"""Ledgers in object storage give the rows that bookies would give: from columns where these say all, by decoding where not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cepheid_decode.columns import DEFAULT_MESSAGE_COLUMNS, MESSAGE_COLUMNS
from cepheid_rpc import EntryGroup
from cepheid_scan import OnBadRecord, Piece, ReadMode, RowFilter, ScanCounters, ScanError, ScanSpec, ScanTask
from cepheid_scan import scan_task as module
from cepheid_scan.scan_task import scan_task
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import batched, groups_of, message, metadata, piece, single
from tests.scan.segment_objects import write_object

BASE_MS = 1_700_000_000_000


class FromMemory:
    """A source of entries in place of bookies."""

    def __init__(self, tails: Sequence[bytes]) -> None:
        self._groups = groups_of(tails)

    def read(self, asked: Piece) -> Iterator[EntryGroup]:
        for group in self._groups:
            first, last = max(asked.first_entry_id, group.first_entry_id), min(asked.last_entry_id, group.last_entry_id)
            if first <= last:
                yield group.slice(first, last)


def rows_by_decoding(tails: Sequence[bytes], of_piece: Piece, spec: ScanSpec, counters: ScanCounters) -> list[dict[str, Any]]:
    source: Any = FromMemory(tails)
    decoder = module._decoder(spec, counters, module.LookBack(source))
    return rows_of(module._decode_piece(of_piece, source, decoder, spec, counters))


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows


def outcome(read: Any) -> Any:
    """Rows, or the error that came in place of some."""
    try:
        return read()
    except ScanError as error:
        return type(error), str(error)


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
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_object_gives_the_rows_that_its_entries_give(data: st.DataObject, tmp_path: Path) -> None:
    tails = data.draw(ledgers())
    asked, spec = data.draw(reads(len(tails)))
    url = write_object(
        tmp_path / f"{random.getrandbits(64):x}.parquet", piece(len(tails)), groups_of(tails), entries_per_row_group=7
    )
    decoded, read = ScanCounters(), ScanCounters()
    expected = outcome(lambda: rows_by_decoding(tails, asked, spec, decoded))
    task = ScanTask((replace(asked, object_url=url),), ())
    assert outcome(lambda: rows_of(scan_task(task, spec, read))) == expected
    assert (read.messages, read.markers, read.bad_records) == (decoded.messages, decoded.markers, decoded.bad_records)
