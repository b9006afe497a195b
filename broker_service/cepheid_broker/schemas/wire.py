"""Schemas in commands of the binary protocol."""

from __future__ import annotations

from typing import Any, cast

from cepheid_broker.schemas.schema import UNREGISTERED, Schema, SchemaType
from cepheid_wire import pulsar_api_pb2 as pb

# Numbers of Schema.Type (PulsarApi.proto).
_NUMBERS: dict[SchemaType, int] = {
    SchemaType.NONE: 0,
    SchemaType.STRING: 1,
    SchemaType.JSON: 2,
    SchemaType.PROTOBUF: 3,
    SchemaType.AVRO: 4,
    SchemaType.BOOLEAN: 5,
    SchemaType.INT8: 6,
    SchemaType.INT16: 7,
    SchemaType.INT32: 8,
    SchemaType.INT64: 9,
    SchemaType.FLOAT: 10,
    SchemaType.DOUBLE: 11,
    SchemaType.DATE: 12,
    SchemaType.TIME: 13,
    SchemaType.TIMESTAMP: 14,
    SchemaType.KEY_VALUE: 15,
    SchemaType.INSTANT: 16,
    SchemaType.LOCAL_DATE: 17,
    SchemaType.LOCAL_TIME: 18,
    SchemaType.LOCAL_DATE_TIME: 19,
    SchemaType.PROTOBUF_NATIVE: 20,
    SchemaType.AUTO_CONSUME: 21,
    SchemaType.EXTERNAL: 22,
}
_TYPES = {number: kind for kind, number in _NUMBERS.items()}


def asked_schema(ask: pb.CommandProducer | pb.CommandSubscribe | pb.CommandGetOrCreateSchema) -> Schema | None:
    """Return the schema of a request; None if it has none, or accepts the topic's."""
    if not ask.HasField("schema"):
        return None
    kind = _TYPES[ask.schema.type]  # the parser drops numbers that the protocol does not have
    if kind in UNREGISTERED:
        return None
    properties = {pair.key: pair.value for pair in cast(Any, ask.schema.properties)}
    return Schema(kind, ask.schema.schema_data, properties)


def wire_schema(name: str, schema: Schema) -> pb.Schema:
    properties = [pb.KeyValue(key=key, value=value) for key, value in schema.properties.items()]
    return pb.Schema(name=name, schema_data=schema.data, type=cast(Any, _NUMBERS[schema.type]), properties=properties)
