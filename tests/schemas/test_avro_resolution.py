"""The verdict on two Avro schemas, compared with what a decoder then does (fastavro, which clients use, as the judge)."""

from __future__ import annotations

import io
import json
from collections import Counter
from itertools import zip_longest
from typing import Any

import fastavro
import pytest
from fastavro.read import SchemaResolutionError
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_broker.schemas.avro_compatibility import avro_mismatch
from cepheid_broker.schemas.avro_schema import parse_avro

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
VALUES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True],
    "int": [7],
    "long": [1 << 40],
    "float": [0.5],
    "double": [0.25],
    "bytes": [b"b"],
    "string": ["s"],
}
FIELD_NAMES = ("a", "b", "c")
MISSING = object()


class Names:
    """Names of types are unique within a schema; what a reader shares with its writer keeps its name. All records have one name
    in different namespaces: to our eyes and Pulsar's a record may be renamed, to fastavro's it may not."""

    def __init__(self) -> None:
        self.given = 0

    def new(self, kind: str) -> str:
        self.given += 1
        return f"{kind}{self.given}"


@st.composite
def types(draw: st.DrawFn, names: Names, depth: int = 2) -> Any:
    kinds = ["primitive", "enum", "fixed"] + (["array", "map", "record", "union"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "primitive":
        return draw(st.sampled_from(PRIMITIVES))
    if kind == "enum":
        return {"type": "enum", "name": names.new("x.E"), "symbols": draw(symbols())}
    if kind == "fixed":
        return {"type": "fixed", "name": names.new("x.F"), "size": draw(st.integers(1, 3))}
    if kind == "array":
        return {"type": "array", "items": draw(types(names, depth - 1))}
    if kind == "map":
        return {"type": "map", "values": draw(types(names, depth - 1))}
    if kind == "union":
        branches = draw(st.lists(types(names, depth - 1), min_size=1, max_size=3))
        return unlike([branch for branch in branches if not isinstance(branch, list)] or ["null"])
    return draw(records(names, depth - 1))


def symbols() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(["R", "G", "B"]), min_size=1, unique=True)


def unlike(branches: list[Any]) -> list[Any]:
    kinds: dict[str, Any] = {}
    for branch in branches:
        kinds.setdefault(_branch_name(branch).rpartition(".")[2], branch)
    return list(kinds.values())


@st.composite
def records(draw: st.DrawFn, names: Names, depth: int = 2) -> Any:
    name = names.new("n") + ".R"
    chosen = draw(st.lists(st.sampled_from(FIELD_NAMES), unique=True))
    return {"type": "record", "name": name, "fields": [{"name": n, "type": draw(types(names, depth))} for n in chosen]}


@st.composite
def evolved(draw: st.DrawFn, schema: Any, names: Names) -> Any:
    """A reader's schema: much the same, somewhere else."""
    if draw(st.integers(0, 7)) == 0:
        return draw(types(names, 1))
    if isinstance(schema, str):
        return draw(st.sampled_from([schema, schema, "long", "double", "string", ["null", schema] if schema != "null" else "null"]))
    if isinstance(schema, list):
        branches = [draw(evolved(branch, names)) for branch in draw(st.permutations(schema))]
        return unlike([branch for branch in branches if not isinstance(branch, list)] or schema)
    kind = schema["type"]
    if kind == "enum":
        changed = {**schema, "symbols": draw(symbols())}
        return {**changed, "default": changed["symbols"][0]} if draw(st.booleans()) else changed
    if kind == "array":
        return {**schema, "items": draw(evolved(schema["items"], names))}
    if kind == "map":
        return {**schema, "values": draw(evolved(schema["values"], names))}
    if kind == "record":
        return {**schema, "fields": draw(evolved_fields(schema["fields"], names))}
    return schema


@st.composite
def evolved_fields(draw: st.DrawFn, fields: list[Any], names: Names) -> list[Any]:
    kept = []
    for field in fields:
        what = draw(st.sampled_from(["keep", "keep", "evolve", "drop", "rename"]))
        if what == "evolve":
            kept.append({**field, "type": draw(evolved(field["type"], names))})
        elif what == "rename":
            kept.append({**field, "name": field["name"] + "2", "aliases": [field["name"]]})
        elif what == "keep":
            kept.append(field)
    if draw(st.booleans()):
        added: dict[str, Any] = {"name": "added", "type": "string"}
        kept.append({**added, "default": ""} if draw(st.booleans()) else added)
    return kept


def witnesses(schema: Any) -> list[Any]:
    """Values that together reach every part of the schema."""
    if isinstance(schema, str):
        return VALUES[schema]
    if isinstance(schema, list):
        return [(_branch_name(branch), value) for branch in schema for value in witnesses(branch)]
    match schema["type"]:
        case "enum":
            return list(schema["symbols"])
        case "fixed":
            return [b"x" * schema["size"]]
        case "array":
            return [[value] for value in witnesses(schema["items"])]
        case "map":
            return [{"k": value} for value in witnesses(schema["values"])]
    columns = [witnesses(field["type"]) for field in schema["fields"]]
    rows = zip_longest(*columns, fillvalue=MISSING) if columns else [()]
    return [
        {
            field["name"]: column[0] if value is MISSING else value
            for field, column, value in zip(schema["fields"], columns, row, strict=True)
        }
        for row in rows
    ]


def _branch_name(branch: Any) -> str:
    return branch if isinstance(branch, str) else branch.get("name", branch["type"])


def decodes(writer: Any, reader: Any) -> bool:
    for value in witnesses(writer):
        encoded = io.BytesIO()
        fastavro.schemaless_writer(encoded, fastavro.parse_schema(writer), value)
        try:
            fastavro.schemaless_reader(io.BytesIO(encoded.getvalue()), fastavro.parse_schema(writer), fastavro.parse_schema(reader))
        except SchemaResolutionError:
            return False
    return True


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    names = Names()
    writer = draw(records(names))
    return writer, {**writer, "fields": draw(evolved_fields(writer["fields"], names))}


VERDICTS: Counter[bool] = Counter()


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(pairs())
def test_the_verdict_is_what_a_decoder_does(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    found = avro_mismatch(*(parse_avro(json.dumps(schema).encode())[0] for schema in (reader, writer)))
    VERDICTS[found is None] += 1
    assert (found is None) is decodes(writer, reader), f"{found}\nwriter {json.dumps(writer)}\nreader {json.dumps(reader)}"


def test_the_property_saw_both_verdicts() -> None:
    assert not VERDICTS or min(VERDICTS[True], VERDICTS[False]) > 30
