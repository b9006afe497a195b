"""Whatever a client sends as a schema is taken or refused by name; nothing else ever comes out."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas import Schema, SchemaType, key_value_data, key_value_json
from cepheid_broker.schemas.definition import Definition, content_hash, mismatch_of, parse_definition
from tests.schemas.schema_examples import F, proto_field, protobuf

WORDS = st.sampled_from(
    ["record", "enum", "fixed", "array", "map", "error", "object", "null", "int", "string", "A", "a.b", "", "$", "\ud800", "type"]
)
KEYS = st.sampled_from(["type", "name", "fields", "items", "values", "symbols", "size", "default", "namespace", "aliases", "doc"])
LEAVES = st.one_of(WORDS, st.none(), st.booleans(), st.integers(), st.floats())
DOCUMENTS = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)), max_leaves=20
)
AVRO_LIKE = st.one_of(st.binary(max_size=40), DOCUMENTS.map(lambda document: json.dumps(document).encode()))
NATIVE_LIKE = st.builds(
    lambda files, root: json.dumps({"fileDescriptorSet": base64.b64encode(files).decode(), "rootMessageTypeName": root}).encode(),
    st.binary(max_size=60),
    WORDS,
)
PAIR_LIKE = st.one_of(
    st.binary(max_size=30),
    st.builds(lambda k, v, n: struct.pack(">i", n) + k + struct.pack(">i", len(v)) + v, AVRO_LIKE, AVRO_LIKE, st.integers(-2, 9)),
)
PROPERTIES = st.dictionaries(
    st.sampled_from(["key.schema.type", "value.schema.type", "kv.encoding.type", "key.schema.properties"]),
    st.sampled_from(["AVRO", "STRING", "KEY_VALUE", "EXTERNAL", "INLINE", "SEPARATED", "{", "[]", '{"a": 1}', ""]),
)
SCHEMAS = st.one_of(
    st.builds(Schema, st.sampled_from([SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF]), AVRO_LIKE),
    st.builds(Schema, st.just(SchemaType.PROTOBUF_NATIVE), NATIVE_LIKE),
    st.builds(Schema, st.just(SchemaType.KEY_VALUE), PAIR_LIKE, PROPERTIES),
    st.builds(Schema, st.sampled_from(SchemaType), AVRO_LIKE, PROPERTIES),
)


def taken(schema: Schema) -> Definition | None:
    try:
        definition = parse_definition(schema)
    except InvalidSchemaError as error:
        refusal = str(error)
    else:
        assert len(content_hash(definition)) == 64
        return definition
    assert len(refusal) < 2000
    refusal.encode()
    return None


@pytest.mark.slow
@settings(deadline=None, max_examples=250)
@given(SCHEMAS, SCHEMAS)
def test_a_schema_is_taken_or_refused(one: Schema, other: Schema) -> None:
    definitions = [found for found in (taken(one), taken(other)) if found is not None]
    for reader in definitions:
        assert mismatch_of(reader, reader) is None, "a schema reads what it wrote"
        for writer in definitions:
            found = mismatch_of(reader, writer)
            assert found is None or found.text("one", "the other")


@settings(deadline=None)
@given(st.builds(Schema, st.just(SchemaType.KEY_VALUE), PAIR_LIKE, PROPERTIES))
def test_a_pair_that_is_taken_can_be_shown(schema: Schema) -> None:
    if taken(schema) is not None:
        shown: Any = json.loads(key_value_json(schema))
        assert shown.keys() == {"key", "value"}
        key_value_data(key_value_json(schema).encode())


@settings(deadline=None, max_examples=250)
@given(st.data())
def test_damaged_descriptors_are_taken_or_refused(data: st.DataObject) -> None:
    """One byte of a good one replaced: lengths, tags, and names that are no text."""
    good = json.loads(protobuf(proto_field(1, "aé", F.TYPE_MESSAGE, type_name=".t.User"), proto_field(2, "b", F.TYPE_STRING)).data)
    files = bytearray(base64.b64decode(good["fileDescriptorSet"]))
    FileDescriptorSet.FromString(bytes(files))
    files[data.draw(st.integers(0, len(files) - 1))] = data.draw(st.integers(0, 255))
    damaged = {**good, "fileDescriptorSet": base64.b64encode(files).decode()}
    definition = taken(Schema(SchemaType.PROTOBUF_NATIVE, json.dumps(damaged).encode()))
    whole = parse_definition(Schema(SchemaType.PROTOBUF_NATIVE, json.dumps(good).encode()))
    if definition is not None:
        for found in (mismatch_of(whole, definition), mismatch_of(definition, whole)):
            assert found is None or found.text("one", "the other")
