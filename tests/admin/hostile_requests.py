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
SMALL_NUMBERS = (1, 2, 0, 3, -1)

EXISTING: Mapping[str, tuple[str, ...]] = {
    "domain": ("persistent", "non-persistent"),
    "tenant": ("public",),
    "namespace": ("fuzzed",),
    "topic": ("plain", "parts", "parts-partition-0", "empty"),
    "sub": ("s",),
    "cluster": ("standalone",),
    "bundle": ("0x00000000_0x40000000", "0x40000000_0x80000000", "0x80000000_0xc0000000", "0xc0000000_0xffffffff"),
    "messagePosition": ("1", "2"),
    "numMessages": ("1",),
    "timestamp": ("0", "9999999999999"),
    "expireTimeInSeconds": ("0", "1"),
    "ledgerId": ("1", "2", "3", "4"),
    "entryId": ("0", "1"),
    "version": ("0", "1"),
    "role": ("admin",),
}
NEW_NAMES = ("fresh1", "fresh2", "0")
"""What may be created, and is deleted again by chance."""

MISSING = ("none", "gone", "parts-partition-7", "default", "other")

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
    host: str = "127.0.0.1"
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """As it is on the wire: a library would mend it."""
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        if self.content_type:
            lines.append(f"Content-Type: {self.content_type}")
        lines += [f"{name}: {value}" for name, value in self.headers]
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
    """One part of each is wrong, or none, or all: several wrong ones would always be refused for the first."""
    parameters = operation.get("parameters", [])
    names = [each["name"] for each in parameters if each["in"] == "path"]
    query = {each["name"]: each["schema"] for each in parameters if each["in"] == "query"}
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")

    def with_wrong(part: str) -> st.SearchStrategy[Request]:
        is_wrong = {name: part in (name, "all") for name in (*names, "query", "body")}
        return st.builds(
            lambda names, values, body, kind: Request(method.upper(), _target(path, names, values), body, kind),
            st.fixed_dictionaries({name: _wrong_segment() if is_wrong[name] else _right_segment(name) for name in names}),
            _query(query, wrong=is_wrong["query"]),
            _body(schema, description, wrong=is_wrong["body"]),
            st.sampled_from(CONTENT_TYPES),
        )

    return st.sampled_from(("none", "none", "body", "query", *names, "all")).flatmap(with_wrong)


def _target(path: str, names: Mapping[str, str], query: Mapping[str, str]) -> str:
    for name, segment in names.items():
        path = path.replace("{" + name + "}", segment)
    return path + ("?" + urlencode(query, errors="replace") if query else "")


def _right_segment(name: str) -> Strategy:
    known = EXISTING.get(name, ())
    return st.sampled_from((*known * (24 // (len(known) or 1)), *NEW_NAMES))


def _wrong_segment() -> Strategy:
    return st.sampled_from(HOSTILE_SEGMENTS) | st.sampled_from(MISSING) | st.sampled_from(NUMBERS).map(str) | _ANY_SEGMENT


_ANY_SEGMENT = st.text(max_size=20).map(lambda text: quote(text, safe="", errors="replace") or "%20")


def _query(parameters: Mapping[str, Any], *, wrong: bool) -> Strategy:
    if not wrong:
        return st.fixed_dictionaries({}, optional={name: st.sampled_from(_right_words(each)) for name, each in parameters.items()})
    value = st.sampled_from(HOSTILE_TEXT) | st.sampled_from(NUMBERS).map(str)
    known = st.fixed_dictionaries({}, optional=dict.fromkeys(parameters, value))
    unknown = st.dictionaries(st.sampled_from(("authoritative", "unknown", "a[]", "\x00")), value, max_size=2)
    return st.builds(lambda given, more: {**more, **given}, known, unknown)


def _right_words(schema: Mapping[str, Any]) -> tuple[str, ...]:
    words = {"boolean": ("true", "false"), "integer": ("1", "2", "0")}
    return words.get(schema.get("type", ""), ("earliest", "persistent://public/fuzzed/plain"))


def _body(schema: Mapping[str, Any] | None, description: Mapping[str, Any], *, wrong: bool) -> st.SearchStrategy[bytes | None]:
    if schema is None:
        return st.none() | st.sampled_from(HOSTILE_BODIES) if wrong else st.none()
    if not wrong:
        return _value(schema, description, 4, wrong=False).map(_encoded)
    return st.none() | st.sampled_from(HOSTILE_BODIES) | _value(schema, description, 4, wrong=True).map(_encoded)


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode(errors="replace")


_ANYTHING: Strategy = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.floats(allow_nan=False) | st.sampled_from(HOSTILE_TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(HOSTILE_TEXT), inner, max_size=3),
    max_leaves=6,
)


def _value(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int, *, wrong: bool) -> Strategy:
    """As the schema says; with `wrong`, numbers out of all bounds, and here and there something else altogether."""
    if depth == 0:
        return _ANYTHING if wrong else st.none()
    right = _right_value(schema, description, depth, wrong=wrong)
    return right | right | right | _ANYTHING if wrong else right


def _right_value(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int, *, wrong: bool) -> Strategy:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _value(description["components"]["schemas"][name], description, depth, wrong=wrong)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of([_value(each, description, depth - 1, wrong=wrong) for each in schema[choice]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    words = ("standalone", "a", "AVRO", "STRING", "FULL", "Shared", "producer_exception", "partitioned", "http://x:8080")
    match schema.get("type"):
        case "object":
            return _object(schema, description, depth, wrong=wrong)
        case "array":
            return st.lists(_value(schema.get("items", {}), description, depth - 1, wrong=wrong), max_size=3)
        case "integer":
            return st.sampled_from(NUMBERS if wrong else SMALL_NUMBERS)
        case "number":
            return st.sampled_from(NUMBERS) | st.floats(allow_nan=False) if wrong else st.sampled_from(SMALL_NUMBERS)
        case "boolean":
            return st.booleans()
        case "string":
            return (
                st.sampled_from(words) | st.sampled_from(HOSTILE_TEXT) | st.text(max_size=10) if wrong else st.sampled_from(words)
            )
        case "null":
            return st.none()
    return _ANYTHING if wrong else st.just({})


def _object(schema: Mapping[str, Any], description: Mapping[str, Any], depth: int, *, wrong: bool) -> Strategy:
    members = {name: _value(each, description, depth - 1, wrong=wrong) for name, each in schema.get("properties", {}).items()}
    required = {name: value for name, value in members.items() if name in schema.get("required", ())}
    optional = {name: value for name, value in members.items() if name not in required}
    more = st.dictionaries(st.sampled_from(HOSTILE_TEXT), _ANYTHING, max_size=2) if wrong else st.just({})
    if isinstance(inner := schema.get("additionalProperties"), Mapping):
        names = st.sampled_from(("a", "b", *HOSTILE_TEXT) if wrong else ("a", "b"))
        more = st.dictionaries(names, _value(inner, description, depth - 1, wrong=wrong), max_size=3)
    return st.builds(lambda named, rest: {**rest, **named}, st.fixed_dictionaries(required, optional=optional), more)
