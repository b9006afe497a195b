"""Names of columns in Spark, and the columns of a scan from which they are built.

plain          names of the scan: value, key, publish_time, …; in typed mode __key, __publish_time, … beside the schema's
pulsar-spark   value (or the schema's columns), __key, __topic, __messageId, __publishTime, __eventTime, __messageProperties,
               with that connector's types, for jobs written for it

`__messageId` is the only column without a counterpart in a scan: it is packed from four columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepheid_decode import BadOptionError, ReadMode

if TYPE_CHECKING:
    import pyarrow as pa

PLAIN = "plain"
MESSAGE_ID = "__messageId"
_ID_PARTS = ("ledger_id", "entry_id", "partition", "batch_index")
_ID_FIELDS = ("ledgerId", "entryId", "partition", "batch_index")  # of MessageIdData, in the order of their field numbers
_PULSAR_SPARK = {  # its metadata columns in its order (streamnative/pulsar-spark README, "Schema of Pulsar source")
    "__key": "key_bytes",
    "__topic": "topic",
    MESSAGE_ID: None,
    "__publishTime": "publish_time",
    "__eventTime": "event_time",
    "__messageProperties": "properties",
}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of the rows.

    `names`: Spark's columns in order. `sources`: the scan's column for each, None: the message id, of `id_parts`.
    """

    names: tuple[str, ...]
    sources: tuple[str | None, ...]
    id_parts: tuple[str, ...]

    @property
    def scan_columns(self) -> tuple[str, ...]:
        """Columns that the scan must return, without duplicates."""
        parts = self.id_parts if None in self.sources else ()
        return tuple(dict.fromkeys([*(source for source in self.sources if source is not None), *parts]))

    def arrange(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Return the scan's batch in Spark's layout: `schema` is Arrow's form of the rows' schema."""
        if batch.schema.equals(schema):
            return batch
        import pyarrow as pa

        columns = [self._message_ids(batch) if source is None else batch.column(source) for source in self.sources]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _message_ids(self, batch: pa.RecordBatch) -> pa.Array:
        return encode_message_ids(*(batch.column(part) for part in self.id_parts))


def layout_of(names: Sequence[str], mode: ReadMode, style: str) -> RowLayout:
    """Return the layout. `names` are known ones of the mode and style."""
    prefix = "__" if mode is ReadMode.TYPED else ""
    parts = tuple(prefix + part for part in _ID_PARTS)
    if style == PLAIN:
        return RowLayout(tuple(names), tuple(names), parts)
    named = {name: None if source is None else prefix + source for name, source in _PULSAR_SPARK.items()}
    return RowLayout(tuple(names), tuple(named.get(name, name) for name in names), parts)


def styled_types(scan_types: Mapping[str, pa.DataType], mode: ReadMode, style: str) -> dict[str, pa.DataType]:
    """Return every column of the mode in this style, with its type."""
    if style == PLAIN:
        return dict(scan_types)
    if mode is ReadMode.ENTRIES:
        raise BadOptionError("columnStyle=pulsar-spark has no entries: leave it out, or read with readMode=messages")
    import pyarrow as pa

    from cepheid_decode.columns import metadata_columns

    prefix = "__" if mode is ReadMode.TYPED else ""
    values = [name for name in scan_types if name not in metadata_columns()] if mode is ReadMode.TYPED else ["value"]
    if hidden := _PULSAR_SPARK.keys() & set(values):
        name = min(hidden)
        raise BadOptionError(
            f"the schema has a field {name}, and columnStyle=pulsar-spark a column of that name: leave columnStyle out", column=name
        )
    types = {name: scan_types[name] for name in values}
    for name, source in _PULSAR_SPARK.items():
        types[name] = pa.binary() if source is None else scan_types[prefix + source]
    return types


def encode_message_ids(ledger_ids: pa.Array, entry_ids: pa.Array, partitions: pa.Array, batch_indices: pa.Array) -> pa.Array:
    """Return message ids as clients serialize them (MessageIdData of PulsarApi.proto), for whole columns at once.

    A serialized message is the concatenation of its serialized fields. Each distinct value of a column is serialized once. A
    partition of -1 and a batch index that is null are omitted.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from cepheid_wire import pulsar_api_pb2 as pb

    fields = []
    for name, column in zip(_ID_FIELDS, (ledger_ids, entry_ids, partitions, batch_indices), strict=True):
        codes = column.cast(pa.int64()).fill_null(-1).dictionary_encode()
        messages = (pb.MessageIdData(**({} if number < 0 else {name: number})) for number in codes.dictionary.to_pylist())
        fields.append(pa.array([each.SerializePartialToString() for each in messages], pa.binary()).take(codes.indices))
    return pc.binary_join_element_wise(*fields, b"")
