"""Requests made from the OpenAPI description: what it asks for, nearly what it asks for, and nothing of the kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

# Sizes between are left out: ten thousand partitions are a fair request, and a slow one.
NUMBERS = (-(2**63), -2, -1, 0, 1, 2, 3, 10_001, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30)

EXISTING: Mapping[str, tuple[str, ...]] = {
    "domain": ("persistent", "non-persistent"),
    "tenant": ("public",),
    "namespace": ("fuzzed", "default"),
    "topic": ("plain", "parts", "parts-partition-0", "parts-partition-7", "gone", "empty"),
    "sub": ("s", "none"),
    "cluster": ("standalone", "other"),
    "bundle": ("0x00000000_0x40000000", "0xc0000000_0xffffffff"),
    "messagePosition": ("1",),
    "role": ("admin",),
}

HOSTILE_SEGMENTS = (
    *("%00", "%0A", "%0D%0AX-Evil:1", "%FF", "%C3%28", "%", "%2", "%zz", "%25", "%2525", "%2F", "%252F", "a%2Fpartitions", "%5C"),
    *("..", "%2E%2E", ".", "...", "+", "%20", "~", "-", "_", "*", "@", ":", ";a=b", "null", "true", "NaN", "-1", "1e400", "'--"),
    *(
        "x-partition-0",
        "x-partition--1",
        "x-partition-99999999999999999999",
        "__change_events",
        "-partition-",
        "parts-partition-00",
    ),
    *("%F0%9F%92%A9", "%E2%80%AE", "%ED%A0%80", "%7B%7B7*7%7D%7D", "%3Cscript%3E", "$%7Bjndi:ldap%7D"),
    *("x" * 255, "x" * 256, "x" * 3000, quote("é" * 200)),
)

HOSTILE_TEXT = ("", " ", "\x00", "a\nb", "..", "é" * 300, "\ud800", "💩", "null", "true", "-1", "x" * 5000, "%", "%FF", "{}")

HOSTILE_BODIES = (
    *(b"", b" ", b"{", b"}", b"[", b"nul", b"\xff\xfe", b"\xef\xbb\xbf{}", b'"\xff"', b'"\\ud800"', b"<xml/>", b"a=b&c=d", b"\x00"),
    *(b"1e400", b"-1e400", b"NaN", b"Infinity", b"1" * 5000, b"0x10", b"01", b"1.5", b"true", b"null", b'"text"', b"[]", b"{}"),
    *(b"[" * 100_000, b'{"a":' * 20_000, b"[[]," * 1000, b'{"a":1,"a":2}', b'{"__proto__":{}}', b'{"":""}'),
)

CONTENT_TYPES = ("", "application/json", "text/plain", "application/vnd.partitioned-topic-metadata+json", "\xe9/x;y=z")


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    body: bytes | None = None
    content_type: str = ""

    def encode(self) -> bytes:
        """As it is on the wire: a library would mend it."""
        lines = [f"{self.method} {self.target} HTTP/1.1", "Host: x", "Connection: close"]
        if self.content_type:
            lines.append(f"Content-Type: {self.content_type}")
        if self.body is not None:
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (self.body or b"")


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    content: bytes


async def send(host: str, port: int, request: Request) -> Answer:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        content = await reader.read()
        while more := await reader.read():
            content += more
    finally:
        writer.close()
        await writer.wait_closed()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    return Answer(int(head[0].split()[1]), headers.get("content-type", ""), content)


def requests_for(
    method: str, path: str, operation: Mapping[str, Any], description: Mapping[str, Any]
) -> st.SearchStrategy[Request]:
    parameters = operation.get("parameters", [])
    segments = {each["name"]: _segment(each["name"]) for each in parameters if each["in"] == "path"}
    query = {each["name"]: _query_value(each["schema"]) for each in parameters if each["in"] == "query"}
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    junk = st.dictionaries(st.sampled_from(("authoritative", "unknown", "a[]", "%00")), st.sampled_from(HOSTILE_TEXT), max_size=2)
    return st.builds(
        lambda names, values, more, body, kind: Request(method.upper(), _target(path, names, {**values, **more}), body, kind),
        st.fixed_dictionaries(segments),
        st.fixed_dictionaries({}, optional=query),
        st.just({}) | junk,
        _body(schema, description),
        st.sampled_from(CONTENT_TYPES),
    )


def _target(path: str, names: Mapping[str, str], query: Mapping[str, str]) -> str:
    for name, segment in names.items():
        path = path.replace("{" + name + "}", segment)
    return path + ("?" + urlencode(query, errors="replace") if query else "")


def _segment(name: str) -> Strategy:
    known = EXISTING.get(name, ())
    good = st.sampled_from(known) if known else st.sampled_from(("0", "1", "x", "s"))
    bad = st.sampled_from(HOSTILE_SEGMENTS) | st.sampled_from(NUMBERS).map(str) | st.text(max_size=20).map(_quoted)
    # A whole path of nonsense is refused at its first segment: mostly one of them is wrong.
    return st.integers(0, 5).flatmap(lambda dice: bad if dice == 0 else good)


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="replace") or "%20"


def _query_value(schema: Mapping[str, Any]) -> Strategy:
    good = st.sampled_from(("true", "false", "0", "1", "earliest", "latest"))
    return good | st.sampled_from(HOSTILE_TEXT) | st.sampled_from(NUMBERS).map(str)


def _body(schema: Mapping[str, Any] | None, description: Mapping[str, Any]) -> st.SearchStrategy[bytes | None]:
    hostile = st.none() | st.sampled_from(HOSTILE_BODIES)
    if schema is None:
        return hostile
    return st.integers(0, 3).flatmap(lambda dice: hostile if dice == 0 else _value(schema, description, 4).map(_encoded))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode(errors="replace")


_ANYTHING: Strategy = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.floats(allow_nan=False) | st.sampled_from(HOSTILE_TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(HOSTILE_TEXT), inner, max_size=3),
    max_leaves=6,
)


def _value(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int) -> Strategy:
    """Mostly as the schema says: what is wrong everywhere is refused at the first look."""
    if depth == 0:
        return _ANYTHING
    right = _right_value(schema, description, depth)
    return st.integers(0, 9).flatmap(lambda dice: _ANYTHING if dice == 0 else right)


def _right_value(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int) -> Strategy:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _value(description["components"]["schemas"][name], description, depth)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of([_value(each, description, depth - 1) for each in schema[choice]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema.get("type"):
        case "object":
            return _object(schema, description, depth)
        case "array":
            return st.lists(_value(schema.get("items", {}), description, depth - 1), max_size=3)
        case "integer":
            return st.sampled_from(NUMBERS)
        case "number":
            return st.sampled_from(NUMBERS) | st.floats(allow_nan=False)
        case "boolean":
            return st.booleans()
        case "string":
            return st.sampled_from(("a", "standalone", "partitioned", "FULL", *HOSTILE_TEXT)) | st.text(max_size=10)
        case "null":
            return st.none()
    return _ANYTHING


def _object(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int) -> Strategy:
    members = {name: _value(each, description, depth - 1) for name, each in schema.get("properties", {}).items()}
    required = {name: value for name, value in members.items() if name in schema.get("required", ())}
    optional = {name: value for name, value in members.items() if name not in required}
    more = st.just({}) | st.dictionaries(st.sampled_from(HOSTILE_TEXT), _ANYTHING, max_size=2)
    if isinstance(inner := schema.get("additionalProperties"), Mapping):
        more = st.dictionaries(st.sampled_from(("a", "b", *HOSTILE_TEXT)), _value(inner, description, depth - 1), max_size=3)
    return st.builds(lambda named, rest: {**rest, **named}, st.fixed_dictionaries(required, optional=optional), more)
