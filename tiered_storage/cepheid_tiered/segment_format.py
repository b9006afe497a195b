"""The layout of a segment's Parquet file: names, order and types of its columns, and its own metadata.

    entry_id  raw_entry                    value_follows  value  batch_index  key   properties  …  _error  typed columns …
    40        │header│metadata│size│m0│    true           v0     0            k0    {}
    40        │size│m1│                    true           v1     1            k1    {}
    41        │header│metadata│payload│    false          v2     null         k2    {}            ◄ compressed by its publisher
    42        │header│…│                   false          null   null         null  null   null   ◄ raw only: a marker, a chunk, …

Rule 1: rows are in the order of the topic, and every entry has at least one. The bytes of an entry are, row by row, `raw_entry` and
then, where `value_follows`, `value`. So a value that an entry holds as it is, is stored once. Entries that were compressed,
encrypted or chunked have all their bytes in their first row, and null in the others.
Rule 2: rows of messages have a `sequence_id`; rows that only carry an entry have none, and nothing but `entry_id`, `raw_entry`, the
constant columns (topic, partition, ledger_id) and `_error`, which says why there is no message where there should be one.
Rule 3: the four columns that entries are made of come first, whatever their names. A field of the schema keeps its name; a column
above that has the same name (in any case) is then called `__name`, as in typed rows of the scan.
Rule 4: `key_bytes` is null where `key` shows the same bytes.
Rule 5: a row group holds whole entries. Entries of one row group, and row groups, are without gaps.
Rule 6: a guard with the footer's checksum stands before the footer, where readers of Parquet do not look:

    │PAR1│row group 0│row group 1│ … │cepheid│crc32c│footer│length│PAR1│

It is checked before the footer is parsed, because libraries of Parquet may end the process over a footer that was changed.

Format 1, which is still read, had whole entries in the first row of each, and no `value_follows`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from cepheid_decode import SchemaVersion
from cepheid_decode.columns import MESSAGE_COLUMNS
from cepheid_ports import CepheidError
from cepheid_rpc import Buffer
from cepheid_tiered.object_store import NewerSegmentError
from cepheid_tiered.segment import DamagedSegmentError

FORMAT_VERSION = 2
SHARED_VALUES_SINCE = 2
"""The first format whose entries continue in `value`."""
ROW_GROUP_ENTRY_BYTES = 4 << 20
ROW_GROUP_UNPACKED_BYTES = 32 << 20
ERROR = "_error"
_PREFIX = "__"
_GUARD_MAGIC = b"cepheid\0"
_GUARD = struct.Struct(">8sI")
GUARD_BYTES = _GUARD.size
_TIME = pa.timestamp("ms", tz="UTC")

COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "entry_id": pa.int64(),
        "raw_entry": pa.binary(),
        "value_follows": pa.bool_(),
        **{
            name: _TIME if name.endswith("_time") else MESSAGE_COLUMNS[name]
            for name in (
                "value",
                "batch_index",
                "key",
                "properties",
                "publish_time",
                "event_time",
                "producer_name",
                "sequence_id",
                "ordering_key",
                "key_bytes",
                "schema_version",
                "replicated_from",
                "topic",
                "partition",
                "ledger_id",
            )
        },
        ERROR: pa.string(),
    }
)
CONSTANT = ("topic", "partition", "ledger_id")
FROM_DECODER = tuple(name for name in COLUMNS if name not in ("entry_id", "raw_entry", "value_follows", ERROR, *CONSTANT))
RAW_COLUMNS = 4
"""Number of columns that entries consist of. They come first."""

_WITHOUT_STATISTICS = ("raw_entry", "value", "properties", "ordering_key", "key_bytes", ERROR)
_IN_DELTAS = ("entry_id", "batch_index", "sequence_id")
_PLAIN = ("raw_entry", "value_follows", "value")
_SAMPLE_ROWS = 1 << 16
_ZSTD_LEVEL = 3
_FAST_ZSTD_LEVEL = 1
_WORTH_TIME = 0.97
"""Largest size over that of the fast level for which a large column is compressed by the slower one, which takes twice the time."""
_TRIED_BYTES = 1 << 20
_DICTIONARY = ""
_ALL_ENCODINGS = ("PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")
_ENCODINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "INT32": ("PLAIN", "DELTA_BINARY_PACKED"),
        "INT64": ("PLAIN", "DELTA_BINARY_PACKED"),
        "FLOAT": ("PLAIN", "BYTE_STREAM_SPLIT"),
        "DOUBLE": ("PLAIN", "BYTE_STREAM_SPLIT"),
    }
)
"""Encodings to try besides a dictionary, by the physical type of a typed column."""


def guard_of(footer: Buffer) -> bytes:
    """Return the guard before a footer; `footer` includes its length and the magic at its end."""
    return _GUARD.pack(_GUARD_MAGIC, crc32c(footer))


def file_names(typed: Sequence[pa.Field]) -> dict[str, str]:
    """Return the name in the file of each of COLUMNS, given the typed columns (rule 3)."""
    taken = {field.name.lower() for field in typed}
    names: dict[str, str] = {}
    for name in COLUMNS:
        shown = name
        while shown.lower() in taken:
            shown = _PREFIX + shown
        names[name] = shown
    return names


def file_schema(typed: Sequence[pa.Field]) -> pa.Schema:
    names = file_names(typed)
    own = [pa.field(names[name], kind) for name, kind in COLUMNS.items()]
    return pa.schema([*own, *(field.remove_metadata() for field in typed)])


def writer_options(schema: pa.Schema, typed: Sequence[pa.Field], sample: pa.Table | None = None) -> dict[str, Any]:
    """Return options for pyarrow's ParquetWriter. Raises pa.ArrowException if Parquet has no type for a typed column.

    `sample`: rows of the file, from which the smallest encoding of each typed column of numbers or times is found, and how values
    are compressed. What is best depends on the values: ids that grow take the fewest bytes as deltas, few values that repeat as a
    dictionary, and values that are random or already compressed gain nothing from a slower level.
    """
    names = file_names(typed)
    kinds = _leaves(schema)
    own = {names[name]: name for name in COLUMNS}
    name_of = {path: own.get(path.split(".", 1)[0]) for path in kinds}  # None: a typed column
    levels = dict.fromkeys(kinds, _ZSTD_LEVEL)
    if sample is not None and len(sample):
        levels |= {names[name]: _zstd_level(sample.column(names[name]).chunk(0)) for name in ("raw_entry", "value")}
    encodings = {path: "DELTA_BINARY_PACKED" for path in kinds if name_of[path] in _IN_DELTAS}
    numbers = {path: kind for path, kind in kinds.items() if name_of[path] is None and kind in _ENCODINGS}
    if sample is not None and len(sample) and numbers:
        encodings |= _smallest_encodings(sample.slice(0, _SAMPLE_ROWS), numbers)
    return {
        "compression": "zstd",
        "compression_level": levels,
        "use_dictionary": [path for path in kinds if name_of[path] not in _PLAIN and path not in encodings],
        "column_encoding": encodings,
        "write_statistics": [path for path in kinds if name_of[path] not in _WITHOUT_STATISTICS],
        "write_page_checksum": True,
        "version": "2.6",
    }


def _zstd_level(column: pa.BinaryArray) -> int:
    """Return the level that compresses values like these."""
    _, offsets, values = column.buffers()
    if values is None:  # all are null
        return _ZSTD_LEVEL
    start, end = np.frombuffer(offsets, np.int32)[[column.offset, column.offset + len(column)]].tolist()
    tried = values.slice(start, min(end - start, _TRIED_BYTES))
    if not tried.size:
        return _ZSTD_LEVEL
    fast, slow = (pa.Codec("zstd", compression_level=level).compress(tried).size for level in (_FAST_ZSTD_LEVEL, _ZSTD_LEVEL))
    return _ZSTD_LEVEL if slow < _WORTH_TIME * fast else _FAST_ZSTD_LEVEL


def _leaves(schema: pa.Schema) -> dict[str, str]:
    """Return the physical type of each column of the file, by its path."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return {leaves.column(index).path: leaves.column(index).physical_type for index in range(len(leaves.names))}


def _smallest_encodings(sample: pa.Table, kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the encodings of those of these columns for which one takes fewer bytes than a dictionary."""
    sample = sample.select([name for name in sample.column_names if name in {path.split(".", 1)[0] for path in kinds}])
    least: dict[str, tuple[int, str]] = {}
    for encoding in (_DICTIONARY, *_ALL_ENCODINGS):
        tried = {path: encoding for path, kind in kinds.items() if encoding in _ENCODINGS[kind]}
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(
            sink,
            sample.schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=[path for path in kinds if path not in tried],
            column_encoding=tried,
        ) as writer:
            writer.write_table(sample)
        row_group = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0)
        columns = [row_group.column(index) for index in range(row_group.num_columns)]
        for column in columns:
            path = column.path_in_schema
            if path in tried or (encoding == _DICTIONARY and path in kinds):
                least[path] = min(least.get(path, (1 << 62, "")), (column.total_compressed_size, encoding))
    return {path: encoding for path, (_, encoding) in least.items() if encoding != _DICTIONARY}


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """The segment's description in the file's key/value metadata."""

    topic: str
    ledger_id: int
    entries: int
    messages: int
    entry_bytes: int
    crc32c: int
    cluster: str = ""
    schema_versions: tuple[str, ...] = ()
    """Schema versions of the topic, in hexadecimal of the 8 bytes in entries. The typed columns are those of the last one."""
    typed_columns: tuple[str, ...] = ()
    raw_only: int = 0
    """Number of entries without a message row."""
    errors: int = 0
    """Number of rows with `_error`, whose columns do not have the whole message."""
    row_group_crc32c: tuple[int, ...] = ()
    """CRC of the bytes of each row group in the file."""
    version: int = FORMAT_VERSION

    def to_pairs(self) -> dict[str, str]:
        return {
            "cepheid.format": str(self.version),
            "cepheid.cluster": self.cluster,
            "cepheid.topic": self.topic,
            "cepheid.ledger_id": str(self.ledger_id),
            "cepheid.entries": str(self.entries),
            "cepheid.messages": str(self.messages),
            "cepheid.entry_bytes": str(self.entry_bytes),
            "cepheid.crc32c": f"{self.crc32c:08x}",
            "cepheid.schema_versions": json.dumps(list(self.schema_versions)),
            "cepheid.typed_columns": json.dumps(list(self.typed_columns)),
            "cepheid.raw_only": str(self.raw_only),
            "cepheid.errors": str(self.errors),
            "cepheid.row_group_crc32c": json.dumps(list(self.row_group_crc32c)),
        }

    @classmethod
    def from_pairs(cls, url: str, pairs: Mapping[bytes, bytes] | None) -> SegmentMetadata:
        """Parse the metadata. Raises DamagedSegmentError if the file is not a segment, NewerSegmentError for a later format."""
        pairs = pairs or {}
        try:
            version = int(pairs[b"cepheid.format"])
            if version > FORMAT_VERSION:
                raise NewerSegmentError(f"{url} has format {version}; this release reads up to {FORMAT_VERSION}", url=url)
            return cls(
                topic=pairs[b"cepheid.topic"].decode(),
                ledger_id=int(pairs[b"cepheid.ledger_id"]),
                entries=int(pairs[b"cepheid.entries"]),
                messages=int(pairs[b"cepheid.messages"]),
                entry_bytes=int(pairs[b"cepheid.entry_bytes"]),
                crc32c=int(pairs[b"cepheid.crc32c"], 16),
                cluster=pairs[b"cepheid.cluster"].decode(),
                schema_versions=tuple(json.loads(pairs[b"cepheid.schema_versions"])),
                typed_columns=tuple(json.loads(pairs[b"cepheid.typed_columns"])),
                raw_only=int(pairs[b"cepheid.raw_only"]),
                errors=int(pairs[b"cepheid.errors"]),
                row_group_crc32c=tuple(json.loads(pairs[b"cepheid.row_group_crc32c"])),
                version=version,
            )
        except (KeyError, ValueError) as error:
            raise DamagedSegmentError(f"{url} is a Parquet file, but not a segment ({error!r} in its metadata)", url=url) from error


def typed_fields_of(schemas: Sequence[SchemaVersion]) -> list[pa.Field]:
    """Return the columns of the newest schema; none if it has no columns or Parquet cannot store them."""
    if not schemas:
        return []
    from cepheid_decode.typed import typed_fields

    try:
        fields = typed_fields(schemas, None)
        writer_options(file_schema(fields), fields)
    except (CepheidError, pa.ArrowException):
        return []
    if [(field.name, field.type) for field in fields] == [("value", pa.binary())]:
        return []  # bytes: the column is there already
    names = [field.name.lower() for field in fields]
    hidden = set(names) & {_PREFIX + name for name in COLUMNS} or ERROR in names or len(set(names)) < len(names)
    return [] if hidden else fields
