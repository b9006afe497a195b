"""Segments are tables for every reader of Parquet: pyarrow, DuckDB and Polars see the messages in columns."""

from __future__ import annotations

import datetime
import io
import json
import random
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cepheid_tiered.segment_format import COLUMNS, SegmentMetadata, writer_options
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import batched, message, reference_rows, single
from tests.tiered.segment_samples import ODD_ENTRIES, avro, chunks, groups_of, parquet_of

EVENT_MS = 1_600_000_000_456
TAILS = [
    batched(
        [message(b"a", partition_key="k1", event_time=EVENT_MS, properties={"x": "1"}), message(b"b", sequence_id=9)],
        compression=pb.LZ4,
    ),
    single(b"marker", marker_type=10),
    single(b"c", partition_key="k2", schema_version=bytes(8), ordering_key=b"o"),
    single(b"", null_value=True, partition_key="AP8=", partition_key_b64_encoded=True),
]


def table_of(data: bytes) -> pa.Table:
    return pq.read_table(pa.BufferReader(data))


async def test_columns_are_those_of_the_scan_and_rows_hold_the_bytes_of_their_entries() -> None:
    table = table_of(await parquet_of(TAILS))
    assert table.schema.names == list(COLUMNS)
    assert [field.type for field in table.schema] == list(COLUMNS.values())
    rows = table.to_pylist()
    assert [(row["entry_id"], row["batch_index"], row["value"]) for row in rows] == [
        (0, 0, b"a"), (0, 1, b"b"), (1, None, None), (2, None, b"c"), (3, None, None)
    ]  # fmt: skip
    (group,) = groups_of(TAILS)
    entries = [bytes(group.entry(entry_id)) for entry_id in range(4)]
    assert [row["value_follows"] for row in rows] == [False, False, False, True, True]
    held = [(row["raw_entry"] or b"") + ((row["value"] or b"") if row["value_follows"] else b"") for row in rows]
    assert [held[0] + held[1], *held[2:]] == entries
    messages = [row for row in rows if row["sequence_id"] is not None]
    expected = [row for row in reference_rows(TAILS) if row["entry_id"] != 1]
    for shown, wanted in zip(messages, expected, strict=True):
        shown = {**shown, "properties": dict(shown["properties"])}
        key = None if shown["key"] is None else shown["key"].encode()
        shown["key_bytes"] = shown["key_bytes"] if shown["key_bytes"] is not None else key
        assert {name: shown[name] for name in wanted if name in shown} == {name: wanted[name] for name in wanted if name in shown}


@pytest.mark.parametrize("name", ODD_ENTRIES)
async def test_an_entry_without_a_readable_message_is_one_row_with_its_bytes(name: str) -> None:
    tails = [single(b"before"), ODD_ENTRIES[name], single(b"after")]
    rows = table_of(await parquet_of(tails)).to_pylist()
    assert [row["value"] for row in rows] == [b"before", None, b"after"]
    odd = rows[1]
    (group,) = groups_of(tails)
    assert odd.pop("raw_entry") == bytes(group.entry(1))
    is_message_missing = name not in ("marker", "first chunk", "compacted out")
    assert (odd.pop("_error") is not None) == is_message_missing
    constants = {
        "entry_id": 1,
        "value_follows": False,
        "topic": "persistent://public/default/t-partition-3",
        "partition": 3,
        "ledger_id": 12,
    }
    assert {column: value for column, value in odd.items() if value is not None} == constants


COMPRESSED = batched([message(b"a" * 50), message(b"b" * 50)], compression=pb.ZSTD)
HIDDEN = single(b"bytes of a tombstone", null_value=True)
PLAIN = batched([message(b"a"), message(b"", null_value=True), message(b"")])


@pytest.mark.parametrize(
    ("tail", "shared"),
    [(PLAIN, True), (single(b"a"), True), (COMPRESSED, False), (HIDDEN, False)],
    ids=["batch", "alone", "compressed", "tombstone with bytes"],
)
async def test_a_value_that_an_entry_holds_as_it_is_is_stored_once(tail: bytes, shared: bool) -> None:
    rows = table_of(await parquet_of([single(b"x"), tail])).to_pylist()[1:]
    assert {row["value_follows"] for row in rows} == {shared}
    (group,) = groups_of([single(b"x"), tail])
    assert (rows[0]["raw_entry"] == bytes(group.entry(1))) != shared
    assert all(row["raw_entry"] is None for row in rows[1:]) or shared


async def test_numbers_of_the_schema_are_encoded_as_takes_the_fewest_bytes() -> None:
    schema = avro(("grows", "long"), ("repeats", "long"))

    def value(number: int) -> bytes:
        out = io.BytesIO()
        record = {"grows": number, "repeats": (7 << 40, 1 << 50)[random.Random(number).randrange(2)]}
        fastavro.schemaless_writer(out, json.loads(schema.definition), record)
        return out.getvalue()

    tails = [single(value(number), schema_version=schema.version) for number in range(3000)]
    metadata = pq.read_metadata(pa.BufferReader(await parquet_of(tails, [schema]))).row_group(0)
    columns = {metadata.column(index).path_in_schema: metadata.column(index) for index in range(metadata.num_columns)}
    assert "DELTA_BINARY_PACKED" in columns["grows"].encodings
    assert "RLE_DICTIONARY" in columns["repeats"].encodings


VALUES = {
    "random text": [random.Random(index).randbytes(500).hex().encode() for index in range(100)],
    "records that repeat": [random.Random(random.Random(index).randrange(2000)).randbytes(40) for index in range(5000)],
    "nothing": [b""],
}


@pytest.mark.parametrize(("values", "level"), [("random text", 1), ("records that repeat", 3), ("nothing", 3)])
async def test_values_are_compressed_by_the_slower_level_where_it_takes_fewer_bytes(values: str, level: int) -> None:
    table = table_of(await parquet_of([single(value) for value in VALUES[values]]))
    levels = writer_options(table.schema, [], table)["compression_level"]
    assert (levels["value"], levels["publish_time"]) == (level, 3)


async def test_a_chunked_message_is_shown_at_its_last_chunk() -> None:
    rows = table_of(await parquet_of(chunks(b"0123456789", 3))).to_pylist()
    assert [(row["entry_id"], row["value"], row["raw_entry"] is None) for row in rows] == [
        (0, None, False), (1, None, False), (2, b"0123456789", False)
    ]  # fmt: skip


async def test_text_that_is_not_utf_8_is_null_with_its_reason() -> None:
    tail = single(b"v", partition_key="k!").replace(b"k!", b"\xff\xfe")
    (row,) = table_of(await parquet_of([tail])).to_pylist()
    assert (row["key"], row["key_bytes"], row["value"], row["_error"]) == (None, b"\xff\xfe", b"v", "its key is not UTF-8")


async def test_metadata_of_the_file_says_what_it_is() -> None:
    data = await parquet_of(TAILS)
    said = SegmentMetadata.from_pairs("x", pq.read_metadata(pa.BufferReader(data)).metadata)
    assert (said.topic, said.ledger_id, said.entries, said.messages, said.raw_only, said.errors) == (
        "persistent://public/default/t-partition-3", 12, 4, 4, 1, 0
    )  # fmt: skip


async def test_statistics_prune_by_entry_and_time_and_are_not_kept_of_values() -> None:
    metadata = pq.read_metadata(pa.BufferReader(await parquet_of(TAILS)))
    columns = {metadata.schema.column(index).path: metadata.row_group(0).column(index) for index in range(metadata.num_columns)}
    assert (columns["entry_id"].statistics.min, columns["entry_id"].statistics.max) == (0, 3)
    assert columns["publish_time"].statistics.min.timestamp() == 1_700_000_000.123
    assert columns["event_time"].statistics.null_count == 4
    assert (columns["key"].statistics.min, columns["key"].statistics.max) == ("AP8=", "k2")
    assert columns["value"].statistics is None
    assert columns["raw_entry"].statistics is None
    assert list(columns)[:4] == ["entry_id", "raw_entry", "value_follows", "value"], "one range of the object has whole entries"


async def test_duckdb_and_polars_read_the_file(tmp_path: Path) -> None:
    import duckdb  # here: they take a second, in each process of a run
    import polars as pl

    path = tmp_path / "a.parquet"
    path.write_bytes(await parquet_of(TAILS))
    event_time = datetime.datetime.fromtimestamp(EVENT_MS / 1000, datetime.UTC)
    query = (
        "select key, value, properties['x'], epoch_ms(event_time) from read_parquet(?) where sequence_id is not null "
        "order by entry_id, batch_index"
    )
    assert duckdb.execute(query, [str(path)]).fetchall() == [
        ("k1", b"a", "1", EVENT_MS), (None, b"b", None, None), ("k2", b"c", None, None), ("AP8=", None, None, None)
    ]  # fmt: skip
    frame = pl.read_parquet(path).filter(pl.col("sequence_id").is_not_null())
    assert frame["key"].to_list() == ["k1", None, "k2", "AP8="]
    assert frame["event_time"][0] == event_time


def record(schema: Any, **fields: Any) -> bytes:
    import json

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema.definition)), fields)
    return out.getvalue()


OLD = avro(("id", "long"))
NEW = avro(("id", "long"), ("key", ["null", "int"]), version=1)


async def test_files_of_several_schema_versions_open_by_name_also_with_a_field_called_key(tmp_path: Path) -> None:
    import duckdb

    first = [single(record(OLD, id=1), schema_version=OLD.version, partition_key="a")]
    both = [
        single(record(OLD, id=2), schema_version=OLD.version, partition_key="b"),
        single(record(NEW, id=3, key=7), schema_version=NEW.version, partition_key="c"),
        single(b"\xff", schema_version=NEW.version),
        single(b"m", marker_type=10),
    ]
    (tmp_path / "1.parquet").write_bytes(await parquet_of(first, [OLD]))
    (tmp_path / "2.parquet").write_bytes(await parquet_of(both, [OLD, NEW]))
    query = "select id, value is not null, _error is not null from read_parquet(?, union_by_name=true) order by filename, entry_id"
    assert duckdb.execute(query, [str(tmp_path / "*.parquet")]).fetchall() == [
        (1, True, False), (2, True, False), (3, True, False), (None, True, True), (None, False, False)
    ]  # fmt: skip
    rows = table_of((tmp_path / "2.parquet").read_bytes()).to_pylist()
    assert [(row["id"], row["key"], row["__key"]) for row in rows] == [
        (2, None, "b"), (3, 7, "c"), (None, None, None), (None, None, None)
    ]  # fmt: skip


async def test_a_topic_of_plain_text_has_its_text_as_value_and_the_bytes_beside_it() -> None:
    from cepheid_decode import SchemaVersion

    table = table_of(await parquet_of([single(b"hello")], [SchemaVersion(bytes(8), "STRING", b"")]))
    assert table.column("value").to_pylist() == ["hello"]
    assert table.column("__value").to_pylist() == [b"hello"]


async def test_a_schema_without_columns_leaves_the_file_without_typed_ones() -> None:
    from cepheid_decode import SchemaVersion

    empty_record = avro()
    for schema in (empty_record, SchemaVersion(bytes(8), "NONE", b""), SchemaVersion(bytes(8), "AVRO", b"no json")):
        assert table_of(await parquet_of([single(b"x")], [schema])).schema.names == list(COLUMNS)
