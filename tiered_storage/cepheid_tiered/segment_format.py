"""What a segment's Parquet file looks like: names, order and types of its columns, and its own metadata.

    entry_id  raw_entry     batch_index  key   value  properties  …  _error  typed columns of the schema …
    40        │header│…│    0            k1    v1     {}
    40        null          1            k2    v2     {}
    41        │header│…│    null         null  null   null           null             ◄ raw only: a marker, a chunk, encrypted, …

Rule 1: rows are in the order of the topic. Every entry has at least one row, and its first row alone has `raw_entry`.
Rule 2: rows of messages have a `sequence_id`; rows that only carry an entry have none, and nothing but `entry_id`, `raw_entry`, the
constant columns (topic, partition, ledger_id) and `_error`, which says why there is no message where there should be one.
Rule 3: `entry_id` and `raw_entry` are the first two columns, whatever their names. A field of the schema keeps its name; a column
above that has the same name (in any case) is then called `__name`, as in typed rows of the scan.
Rule 4: `key_bytes` is null where `key` shows the same bytes.
Rule 5: a row group holds whole entries. Entries of one row group, and row groups, are without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cepheid_decode import SchemaVersion
from cepheid_decode.columns import MESSAGE_COLUMNS
from cepheid_ports import CepheidError
from cepheid_tiered.object_store import NewerSegmentError
from cepheid_tiered.segment import DamagedSegmentError

FORMAT_VERSION = 1
ROW_GROUP_ENTRY_BYTES = 8 << 20
ROW_GROUP_UNPACKED_BYTES = 32 << 20
ERROR = "_error"
_PREFIX = "__"
_TIME = pa.timestamp("ms", tz="UTC")

COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "entry_id": pa.int64(),
        "raw_entry": pa.binary(),
        **{
            name: _TIME if name.endswith("_time") else MESSAGE_COLUMNS[name]
            for name in (
                "batch_index",
                "key",
                "value",
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
FROM_DECODER = tuple(name for name in COLUMNS if name not in ("entry_id", "raw_entry", ERROR, *CONSTANT))

_WITHOUT_STATISTICS = ("raw_entry", "value", "properties", "ordering_key", "key_bytes", ERROR)
_IN_DELTAS = ("entry_id", "batch_index", "sequence_id")
_PLAIN = ("raw_entry", "value")


def file_names(typed: Sequence[pa.Field]) -> dict[str, str]:
    """The name in the file of each of COLUMNS, beside typed columns (rule 3)."""
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


def writer_options(schema: pa.Schema, typed: Sequence[pa.Field]) -> dict[str, Any]:
    """Options of pyarrow's ParquetWriter. Raises pa.ArrowException where Parquet has no type for a typed column."""
    names = file_names(typed)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    paths = [leaves.column(index).path for index in range(len(leaves.names))]
    own = {names[name]: name for name in COLUMNS}
    name_of = {path: own.get(path.split(".", 1)[0]) for path in paths}  # None: a typed column
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [path for path in paths if name_of[path] not in (*_IN_DELTAS, *_PLAIN)],
        "column_encoding": {path: "DELTA_BINARY_PACKED" for path in paths if name_of[path] in _IN_DELTAS},
        "write_statistics": [path for path in paths if name_of[path] not in _WITHOUT_STATISTICS],
        "write_page_checksum": True,
        "version": "2.6",
    }


@dataclass(frozen=True, slots=True)
class SegmentMetadata:
    """The file's own account of itself, in its key/value metadata."""

    topic: str
    ledger_id: int
    entries: int
    messages: int
    entry_bytes: int
    crc32c: int
    cluster: str = ""
    schema_versions: tuple[str, ...] = ()
    """The versions that the topic had, as hexadecimal of the 8 bytes that entries name; the typed columns are those of the last."""
    typed_columns: tuple[str, ...] = ()
    raw_only: int = 0
    """Entries without a message row."""
    errors: int = 0
    """Rows with `_error`: what they hold is not all in their columns."""
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
        }

    @classmethod
    def from_pairs(cls, url: str, pairs: Mapping[bytes, bytes] | None) -> SegmentMetadata:
        """Raises DamagedSegmentError for a file that is not a segment, NewerSegmentError for one of a later format."""
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
                version=version,
            )
        except (KeyError, ValueError) as error:
            raise DamagedSegmentError(f"{url} is a Parquet file, but not a segment ({error!r} in its metadata)", url=url) from error


def typed_fields_of(schemas: Sequence[SchemaVersion]) -> list[pa.Field]:
    """Columns of the newest schema, or none where it has no columns or Parquet cannot hold them."""
    if not schemas:
        return []
    from cepheid_decode.typed import typed_fields

    try:
        fields = typed_fields(schemas, None)
        writer_options(file_schema(fields), fields)
    except (CepheidError, pa.ArrowException):
        return []
    names = [field.name.lower() for field in fields]
    hidden = set(names) & {_PREFIX + name for name in COLUMNS} or ERROR in names or len(set(names)) < len(names)
    return [] if hidden else fields
