"""What may follow what, per strategy and type, and whether the refusal names the field."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto

from cepheid_broker.errors import IncompatibleSchemaError, InvalidSchemaError
from cepheid_broker.policies.topic_policies import SchemaCompatibility as S
from cepheid_broker.schemas import Schema, SchemaType
from cepheid_broker.schemas.compatibility import check_reader, check_successor
from cepheid_broker.schemas.definition import MAX_SCHEMA_BYTES, content_hash, mismatch_of, parse_definition
from tests.schemas.schema_examples import REPEATED, REQUIRED, F, avro, field, key_value, proto_field, protobuf, record, user

ID = field("id", "long")
NAME = field("name", "string")
NAME_DEFAULT = field("name", "string", default="")
NULLABLE = field("name", ["null", "string"], default=None)
STRING, INT32, BYTES = Schema(SchemaType.STRING), Schema(SchemaType.INT32), Schema(SchemaType.BYTES)

# old, new, does new read old, does old read new
EVOLUTIONS = {
    "the same": (user(ID), user(ID), True, True),
    "field added with a default": (user(ID), user(ID, NAME_DEFAULT), True, True),
    "field added without a default": (user(ID), user(ID, NAME), False, True),
    "field with a default removed": (user(ID, NAME_DEFAULT), user(ID), True, True),
    "field without a default removed": (user(ID, NAME), user(ID), True, False),
    "int became long": (user(field("id", "int")), user(ID), True, False),
    "long became int": (user(ID), user(field("id", "int")), False, True),
    "string became bytes": (user(NAME), user(field("name", "bytes")), True, True),
    "long became string": (user(ID), user(field("id", "string")), False, False),
    "made nullable": (user(NAME), user(NULLABLE), True, False),
    "made required": (user(NULLABLE), user(NAME), False, True),
    "renamed with an alias": (user(NAME), user(field("title", "string", aliases=["name"])), True, False),
    "record renamed": (avro(record(ID)), avro(record(ID, name="Person")), True, True),
    "enum symbol added": (
        user(field("c", {"type": "enum", "name": "C", "symbols": ["A"]})),
        user(field("c", {"type": "enum", "name": "C", "symbols": ["A", "B"]})),
        True,
        False,
    ),
    "enum symbol added, with a default": (
        user(field("c", {"type": "enum", "name": "C", "symbols": ["A"], "default": "A"})),
        user(field("c", {"type": "enum", "name": "C", "symbols": ["A", "B"], "default": "A"})),
        True,
        True,
    ),
    "enum renamed": (
        user(field("c", {"type": "enum", "name": "C", "symbols": ["A"]})),
        user(field("c", {"type": "enum", "name": "D", "symbols": ["A"]})),
        False,
        False,
    ),
    "fixed of another size": (
        user(field("f", {"type": "fixed", "name": "F", "size": 4})),
        user(field("f", {"type": "fixed", "name": "F", "size": 5})),
        False,
        False,
    ),
    "items of an array": (
        user(field("l", {"type": "array", "items": "int"})),
        user(field("l", {"type": "array", "items": "double"})),
        True,
        False,
    ),
    "array became map": (
        user(field("l", {"type": "array", "items": "int"})),
        user(field("l", {"type": "map", "values": "int"})),
        False,
        False,
    ),
    "union grew": (user(field("u", ["null", "int"])), user(field("u", ["null", "int", "string"])), True, False),
    "inside a nullable record": (
        user(field("a", ["null", record(ID, name="A")])),
        user(field("a", ["null", record(ID, NAME, name="A")])),
        False,
        True,
    ),
    "a record that contains itself": (
        user(ID, field("next", ["null", "User"])),
        user(ID, NAME_DEFAULT, field("next", ["null", "User"])),
        True,
        True,
    ),
    "JSON record, field added without a default": (
        user(ID, kind=SchemaType.JSON),
        user(ID, NAME, kind=SchemaType.JSON),
        False,
        True,
    ),
    "JSON schema draft of old, then Avro": (
        avro({"type": "object", "id": "urn:jsonschema:User", "properties": {}}, SchemaType.JSON),
        user(ID, kind=SchemaType.JSON),
        True,
        True,
    ),
    "Protobuf in Avro's words": (user(ID, kind=SchemaType.PROTOBUF), user(ID, NAME, kind=SchemaType.PROTOBUF), False, True),
    "another type": (STRING, INT32, False, False),
    "Avro became JSON": (user(ID), user(ID, kind=SchemaType.JSON), False, False),
    "primitive, told with null": (STRING, Schema(SchemaType.STRING, b"null"), True, True),
    "message: optional field added": (
        protobuf(proto_field(1, "id", F.TYPE_INT64)),
        protobuf(proto_field(1, "id", F.TYPE_INT64), proto_field(2, "name", F.TYPE_STRING)),
        True,
        True,
    ),
    "message: required field added": (
        protobuf(proto_field(1, "id", F.TYPE_INT64)),
        protobuf(proto_field(1, "id", F.TYPE_INT64), proto_field(2, "name", F.TYPE_STRING, REQUIRED)),
        False,
        True,
    ),
    "message: optional became required": (
        protobuf(proto_field(1, "id", F.TYPE_INT64)),
        protobuf(proto_field(1, "id", F.TYPE_INT64, REQUIRED)),
        False,
        True,
    ),
    "message: type within its group": (
        protobuf(proto_field(1, "id", F.TYPE_INT32)),
        protobuf(proto_field(1, "id", F.TYPE_INT64)),
        True,
        True,
    ),
    "message: type of another group": (
        protobuf(proto_field(1, "id", F.TYPE_INT32)),
        protobuf(proto_field(1, "id", F.TYPE_SINT32)),
        False,
        False,
    ),
    "message: became repeated": (
        protobuf(proto_field(1, "id", F.TYPE_INT32)),
        protobuf(proto_field(1, "id", F.TYPE_INT32, REPEATED)),
        False,
        False,
    ),
    "message: another number for the name": (
        protobuf(proto_field(1, "id", F.TYPE_INT32)),
        protobuf(proto_field(2, "id", F.TYPE_INT32)),
        False,
        False,
    ),
    "message: field renamed": (
        protobuf(proto_field(1, "id", F.TYPE_INT32)),
        protobuf(proto_field(1, "key", F.TYPE_INT32)),
        True,
        True,
    ),
    "message: another root": (protobuf(), protobuf(root="Person"), False, False),
    "message: inside a message": (
        protobuf(
            proto_field(1, "a", F.TYPE_MESSAGE, type_name=".t.A"),
            inner=(DescriptorProto(name="A", field=[proto_field(1, "n", F.TYPE_INT32)]),),
        ),
        protobuf(
            proto_field(1, "a", F.TYPE_MESSAGE, type_name=".t.A"),
            inner=(DescriptorProto(name="A", field=[proto_field(1, "n", F.TYPE_STRING)]),),
        ),
        False,
        False,
    ),
    "key/value: value grew": (key_value(STRING, user(ID)), key_value(STRING, user(ID, NAME)), False, True),
    "key/value: another key": (key_value(STRING, user(ID)), key_value(INT32, user(ID)), False, False),
    "key/value: another encoding": (key_value(STRING, BYTES), key_value(STRING, BYTES, "SEPARATED"), False, False),
    "external, the same": (Schema(SchemaType.EXTERNAL, b"\xff"), Schema(SchemaType.EXTERNAL, b"\xff"), True, True),
    "external, another": (Schema(SchemaType.EXTERNAL, b"\xff"), Schema(SchemaType.EXTERNAL, b"\xfe"), False, False),
}


@pytest.mark.parametrize(("old", "new", "new_reads_old", "old_reads_new"), EVOLUTIONS.values(), ids=EVOLUTIONS.keys())
def test_evolutions(old: Schema, new: Schema, new_reads_old: bool, old_reads_new: bool) -> None:
    before, after = parse_definition(old), parse_definition(new)
    assert (mismatch_of(after, before) is None) is new_reads_old
    assert (mismatch_of(before, after) is None) is old_reads_new
    allowed = {
        S.ALWAYS_COMPATIBLE: True,
        S.ALWAYS_INCOMPATIBLE: False,
        S.BACKWARD: new_reads_old,
        S.BACKWARD_TRANSITIVE: new_reads_old,
        S.FORWARD: old_reads_new,
        S.FORWARD_TRANSITIVE: old_reads_new,
        S.FULL: new_reads_old and old_reads_new,
        S.FULL_TRANSITIVE: new_reads_old and old_reads_new,
    }
    for strategy, expected in allowed.items():
        if expected:
            check_successor(strategy, after, before, 3)
        else:
            with pytest.raises(IncompatibleSchemaError, match="version 3"):
                check_successor(strategy, after, before, 3)


def refusal(old: Schema, new: Schema, strategy: S = S.FULL) -> str:
    with pytest.raises(IncompatibleSchemaError) as caught:
        check_successor(strategy, parse_definition(new), parse_definition(old), 7)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (user(ID), user(field("id", "string")), "field 'id': the new schema has string, version 7 has long"),
        (user(ID), user(ID, NAME), "field 'name': the new schema has string without a default, version 7 has no such field"),
        (user(ID, NAME), user(ID), "field 'name': version 7 has string without a default, the new schema has no such field"),
        (
            user(field("a", ["null", record(ID, name="A")])),
            user(field("a", ["null", record(field("id", "boolean"), name="A")])),
            "field 'a.id': the new schema has boolean, version 7 has long",
        ),
        (
            user(field("l", {"type": "array", "items": record(ID, name="A")})),
            user(field("l", {"type": "array", "items": record(field("id", "string"), name="A")})),
            "field 'l[].id': the new schema has string, version 7 has long",
        ),
        (user(NULLABLE), user(NAME), "field 'name': the new schema has string, version 7 has [null, string]"),
        (
            user(field("c", {"type": "enum", "name": "C", "symbols": ["A", "B"]})),
            user(field("c", {"type": "enum", "name": "C", "symbols": ["A"]})),
            "field 'c': the new schema has an enum without 'B' and without a default, version 7 has an enum with it",
        ),
        (STRING, INT32, "the type: the new schema has INT32, version 7 has STRING"),
        (
            protobuf(proto_field(1, "id", F.TYPE_INT32)),
            protobuf(proto_field(1, "id", F.TYPE_STRING)),
            "field 'id': the new schema has string as number 1, version 7 has int32 as number 1",
        ),
        (key_value(STRING, user(ID)), key_value(STRING, user(ID, NAME)), "field 'value.name': the new schema has string without"),
    ],
)
def test_a_refusal_names_the_field_both_types_and_the_version(old: Schema, new: Schema, says: str) -> None:
    assert says in refusal(old, new)


def test_a_consumer_must_read_what_is_there_whatever_the_direction_of_the_strategy() -> None:
    old, new = parse_definition(user(ID)), parse_definition(user(ID, NAME))
    for strategy in (S.BACKWARD, S.FORWARD, S.FULL, S.FORWARD_TRANSITIVE, S.ALWAYS_INCOMPATIBLE):
        check_reader(strategy, old, new, 1)
        with pytest.raises(IncompatibleSchemaError, match=r"field 'name': the consumer's schema has string without a default"):
            check_reader(strategy, new, old, 1)
    check_reader(S.ALWAYS_COMPATIBLE, new, old, 1)


DEEP: object = "int"
for _ in range(150):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (Schema(SchemaType.AVRO, b"{"), "is not JSON"),
        (Schema(SchemaType.AVRO, b"\xff\xfe"), "is not JSON"),
        (Schema(SchemaType.AVRO, b""), "is not JSON"),
        (Schema(SchemaType.AVRO, b"[" * 100_000), "nested too deeply"),
        (Schema(SchemaType.AVRO, b'{"type":"string","x":' + b"[" * 900 + b"]" * 900 + b"}"), "nested too deeply"),
        (avro(DEEP), "nested deeper than 100"),
        (avro(7), "7' is not a type"),
        (avro({"type": "record", "name": "U"}), "record 'U' has no list of fields"),
        (avro({"type": "record", "fields": []}), "is not a type name"),
        (avro({"type": "record", "name": "a b", "fields": []}), "'a b' is not a type name"),
        (user(field("x", "strng")), "record 'User', field 'x': unknown type 'strng'"),
        (user(ID, ID), "record 'User', field 'id': it is defined twice"),
        (user({"name": "x"}), "field 'x': it has no type"),
        (user(field("1x", "int")), "'1x' is not a field name"),
        (user(field("u", ["int", "int"])), "field 'u': 'int' is in the union twice"),
        (user(field("u", ["int", ["null"]])), "a union directly inside a union"),
        (user(field("e", {"type": "enum", "name": "E", "symbols": ["A", "A"]})), "enum 'E' has a symbol twice"),
        (user(field("e", {"type": "enum", "name": "E", "symbols": ["A"], "default": "B"})), "its default 'B' is not one of"),
        (user(field("f", {"type": "fixed", "name": "F", "size": -1})), "fixed 'F': its size is '-1'"),
        (user(field("l", {"type": "array"})), 'the array has no "items"'),
        (user(field("l", {"type": "record", "name": "User", "fields": []})), "'User' is defined twice"),
        (avro({"type": "object"}), "unknown type 'object'"),
        (Schema(SchemaType.JSON, b"null"), "is not a type"),
        (Schema(SchemaType.STRING, b"text"), "type STRING has no definition, but 4 bytes were sent"),
        (Schema(SchemaType.EXTERNAL, b"x" * (MAX_SCHEMA_BYTES + 1)), f"{MAX_SCHEMA_BYTES} are possible"),
        (Schema(SchemaType.PROTOBUF_NATIVE, b"[]"), "not a JSON object with fileDescriptorSet"),
        (Schema(SchemaType.PROTOBUF_NATIVE, b'{"fileDescriptorSet": "??", "rootMessageTypeName": "a"}'), "is not the base64"),
        (Schema(SchemaType.PROTOBUF_NATIVE, b'{"fileDescriptorSet": "", "rootMessageTypeName": "a"}'), "has no fileDescriptorSet"),
        (
            protobuf(proto_field(1, "a", F.TYPE_MESSAGE, type_name=".t.A")),
            "message 't.User', field 'a': 't.A' is in none of the files",
        ),
        (Schema(SchemaType.KEY_VALUE, b"\0\0"), "ends before the length of the key"),
        (Schema(SchemaType.KEY_VALUE, b"\0\0\0\x09ab"), "the key's definition should have 9 bytes, 2 are there"),
        (key_value(STRING, user(field("x", "strng"))), "value: record 'User', field 'x': unknown type 'strng'"),
        (Schema(SchemaType.KEY_VALUE, bytes(8), {"key.schema.type": "FOO"}), "key.schema.type 'FOO' is not a type of a key"),
        (Schema(SchemaType.KEY_VALUE, bytes(8), {"kv.encoding.type": "FOO"}), "kv.encoding.type is 'FOO'"),
        (Schema(SchemaType.KEY_VALUE, bytes(9)), "1 bytes follow"),
    ],
)
def test_a_malformed_definition_is_refused_with_what_is_wrong(schema: Schema, says: str) -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        parse_definition(schema)
    assert says in str(caught.value)


def test_names_of_a_peer_are_shown_bounded() -> None:
    text = refusal(user(field("x" * 10_000, "int")), user(field("x" * 10_000, "string")))
    assert len(text) < 1000


def test_what_means_the_same_has_one_hash() -> None:
    plain = parse_definition(user(ID, NAME))
    laid_out = Schema(
        SchemaType.AVRO,
        b"""{ "fields": [{"type": "long", "name": "id", "doc": "who"}, {"name": "name", "type": "string"}],
              "name": "User", "doc": "a user", "type": "record" }""",
    )
    assert content_hash(parse_definition(laid_out)) == content_hash(plain)
    assert content_hash(parse_definition(user(NAME, ID))) != content_hash(plain)  # Avro's encoding has the fields in order
    assert content_hash(parse_definition(user(ID, NAME, kind=SchemaType.JSON))) != content_hash(plain)
    documented = [parse_definition(user(field("m", {"type": "map", "values": "string"}, default={"doc": d}))) for d in "ab"]
    assert content_hash(documented[0]) != content_hash(documented[1])  # a default is data, whatever it is called


@pytest.mark.slow
def test_a_comparison_is_bounded() -> None:
    """Of the reader's records the last fits every one of the writer's, and none by name: that square is not worked off."""
    unions = [[record(field(f"{side}{index}", "int"), name=f"{side}{index}") for index in range(400)] for side in "ab"]
    old, new = (parse_definition(avro([*union, record(name="Any")])) for union in unions)
    with pytest.raises(InvalidSchemaError, match="too large to be compared"):
        mismatch_of(new, old)


def test_a_long_chain_of_references_is_refused_not_a_crash() -> None:
    def chain(leaf: str) -> Schema:
        fields = [field("r0", record(field("x", leaf), name="R0"), default={})]
        fields += [field(f"r{n}", record(field("x", f"R{n - 1}"), name=f"R{n}"), default={}) for n in range(1, 500)]
        return user(*fields)

    def only_the_last(leaf: str) -> Schema:
        """The same records, but the fields that lead to them one by one have other names: the deepest is met first."""
        fields = [field("q0", record(field("x", leaf), name="R0"), default={})]
        fields += [field(f"q{n}", record(field("x", f"R{n - 1}"), name=f"R{n}"), default={}) for n in range(1, 499)]
        return user(*fields, field("r499", record(field("x", "R498"), name="R499")))

    with pytest.raises(InvalidSchemaError, match="too large to be compared"):
        mismatch_of(parse_definition(only_the_last("string")), parse_definition(chain("int")))
