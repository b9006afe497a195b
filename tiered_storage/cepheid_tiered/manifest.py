"""The manifest of a topic: what a restore from the bucket alone needs, in one object beside the topic's segments.

    {"format":1, "cluster_id":…, "topic":…, …            identity, records of tenant, namespace and topic, schemas
     "ledgers":[
      [ledger id, entries, bytes, messages or null, ended at ms, object or null],      one line each, in the chain's order
     ],
     "cursors":[…], "cursors_at_ms":…, "crc32c":"0a1b2c3d"}                            over all bytes before this field

An object is `[name, bytes, completed at ms, crc32c or null]`; its name is relative to the manifest, or a whole URL when it is in
another store. A ledger without an object was not offloaded when the manifest was written; a restore reports it.

Records of metadata are embedded as metadata stores them, each with its own format number, so that this module needs to know
nothing of policies or schemas, and a restore reads them with the rules of `cepheid_metadata.record`.

Rules:
1. A manifest of a newer format is refused by name, never read in part. Within a format the fields are fixed.
2. What is not a whole, unchanged manifest is damaged: the checksum covers every byte before it.
3. A manifest is written whole, by one put. It is a copy: the chain's record stays the truth while its cluster lives.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit, urlunsplit

import crc32c

from cepheid_ports import CepheidError

MANIFEST_NAME = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""Largest manifest that is read, in bytes. 20,000 ledgers take about 3 MB."""

_ROWS_IN_A_PIECE = 200
_CRC_FIELD = b',"crc32c":"'
_RECORDS = ("tenant_record", "namespace_record", "topic_record", "base_record", "schema_history")
_FIELDS = (
    "format",
    "cluster_id",
    "cluster",
    "topic",
    "incarnation",
    "epoch",
    "written_at_ms",
    "properties",
    "terminated_at",
    *_RECORDS,
    "schema_definitions",
    "ledgers",
    "cursors",
    "cursors_at_ms",
    "crc32c",
)


class ManifestError(CepheidError):
    """A manifest cannot be used. The message names it and says why."""

    hint: ClassVar[str] = "the segments beside it are not touched; `cepheid tiered verify --url` reads what is in the bucket"


class DamagedManifestError(ManifestError):
    """The object is truncated, changed, or not a manifest."""


class NewerManifestError(ManifestError):
    """The manifest was written by a newer release."""

    hint: ClassVar[str] = "use that release, or a newer one, to restore"


@dataclass(frozen=True, slots=True)
class ManifestObject:
    """The segment of one ledger."""

    name: str
    size_bytes: int
    completed_at_ms: int
    crc32c: int | None = None
    """Value of `SegmentSummary.crc32c`; None if the writer of the manifest did not know it."""


@dataclass(frozen=True, slots=True)
class ManifestLedger:
    ledger_id: int
    entries: int
    size_bytes: int
    messages: int | None
    ended_at_ms: int
    """Time of its end; 0: it was open, and `entries` and `size_bytes` are what was confirmed by then."""
    object: ManifestObject | None
    """Object of the ledger; None: it was not offloaded."""


@dataclass(frozen=True, slots=True)
class ManifestCursor:
    """A durable subscription."""

    name: str
    mark_delete: tuple[int, int]
    state: bytes | None
    """Acknowledgements above the mark-delete position, in the cursor's own format; None: too large for a manifest."""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    cluster_id: str
    cluster: str
    topic: str
    incarnation: str
    epoch: int
    written_at_ms: int
    tenant_record: Mapping[str, Any] | None
    namespace_record: Mapping[str, Any] | None
    topic_record: Mapping[str, Any] | None
    base_record: Mapping[str, Any] | None
    """For a partition, the record of its partitioned topic."""
    schema_history: Mapping[str, Any] | None
    schema_definitions: Mapping[str, Mapping[str, Any]]
    """Schemas by version. The version is text, since JSON has no other keys."""
    ledgers: Sequence[ManifestLedger]
    cursors: Sequence[ManifestCursor]
    cursors_at_ms: int
    terminated_at: tuple[int, int] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    """Of the chain."""

    @property
    def offloaded(self) -> list[ManifestLedger]:
        return [ledger for ledger in self.ledgers if ledger.object is not None]

    @property
    def not_offloaded(self) -> list[ManifestLedger]:
        return [ledger for ledger in self.ledgers if ledger.object is None and ledger.entries]

    def encode(self) -> bytes:
        return b"".join(self.encode_pieces())

    def encode_pieces(self) -> Iterator[bytes]:
        """Yield the encoding in pieces of about 2 ms (20,000 ledgers: 170 ms in all), so that a broker's loop runs between them."""
        head = {
            "format": FORMAT,
            "cluster_id": self.cluster_id,
            "cluster": self.cluster,
            "topic": self.topic,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "written_at_ms": self.written_at_ms,
            "properties": dict(self.properties),
            "terminated_at": self.terminated_at,
            "tenant_record": self.tenant_record,
            "namespace_record": self.namespace_record,
            "topic_record": self.topic_record,
            "base_record": self.base_record,
            "schema_history": self.schema_history,
            "schema_definitions": dict(self.schema_definitions),
        }
        crc = 0
        for piece in self._pieces(head):
            crc = crc32c.crc32c(piece, crc)
            yield piece
        yield _CRC_FIELD + f'{crc:08x}"}}\n'.encode()

    def _pieces(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        yield _dump(head)[:-1] + b',\n"ledgers":['
        yield from _lines([_ledger_row(ledger) for ledger in group] for group in _grouped(self.ledgers))
        yield b'\n],\n"cursors":['
        yield from _lines([_cursor_row(cursor) for cursor in group] for group in _grouped(self.cursors))
        yield b'\n],"cursors_at_ms":' + str(self.cursors_at_ms).encode()

    @classmethod
    def decode(cls, data: bytes, url: str) -> Manifest:
        """Decode a manifest. Raises NewerManifestError, DamagedManifestError; both name `url`."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise DamagedManifestError(f"{url} is not a manifest: {error} ({len(data)} bytes)", url=url) from None
        if not isinstance(fields, dict) or type(found := fields.get("format")) is not int:
            raise DamagedManifestError(f"{url} is not a manifest: it has no format number", url=url)
        if found > FORMAT:
            message = f"{url} is a manifest of format {found}; this release knows formats up to {FORMAT}"
            raise NewerManifestError(message, url=url, format=found, known_format=FORMAT)
        at = data.rfind(_CRC_FIELD)
        crc = f"{crc32c.crc32c(data[:at]):08x}" if at >= 0 else ""
        if fields.get("crc32c") != crc:
            message = f"{url} was changed or is damaged: its checksum is {crc or 'missing'}, expected {fields.get('crc32c')}"
            raise DamagedManifestError(message, url=url)
        try:
            return cls._of_fields(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedManifestError(f"{url} is not a manifest of format {FORMAT}: {error}", url=url) from None

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Manifest:
        if unlike := set(fields).symmetric_difference(_FIELDS):
            raise ValueError(f"field {min(unlike)} is {'unknown' if min(unlike) in fields else 'missing'}")
        definitions = _mapping(fields["schema_definitions"], "schema_definitions")
        texts = {name: _text(fields[name], name) for name in ("cluster_id", "cluster", "topic", "incarnation")}
        numbers = {name: _number(fields[name], name) for name in ("epoch", "written_at_ms", "cursors_at_ms")}
        records = {name: _mapping_or_none(fields[name], name) for name in _RECORDS}
        others: dict[str, Any] = {**texts, **numbers, **records}
        return cls(
            **others,
            schema_definitions={name: _mapping(one, "schema_definitions") for name, one in definitions.items()},
            ledgers=[_ledger(row) for row in _list(fields["ledgers"], "ledgers")],
            cursors=[_cursor(row) for row in _list(fields["cursors"], "cursors")],
            terminated_at=None if fields["terminated_at"] is None else _position(fields["terminated_at"], "terminated_at"),
            properties=_texts(fields["properties"], "properties"),
        )


def manifest_url(segment_url: str) -> str:
    """Return the URL of the manifest beside a segment."""
    return _beside(segment_url, MANIFEST_NAME)


def name_from(manifest: str, segment_url: str) -> str:
    """Return the name of a segment in a manifest: its file name if it is beside the manifest, else its whole URL."""
    name = urlsplit(segment_url).path.rpartition("/")[2]
    return name if _beside(manifest, name) == segment_url else segment_url


def url_from(manifest: str, name: str) -> str:
    """Return the URL of the segment `name` in a manifest. Raises DamagedManifestError for a name outside the directory."""
    if "://" in name:
        return name
    if not name or "/" in name or name.startswith("."):
        raise DamagedManifestError(f"{manifest} names a segment {name!r}, which is not a name of an object beside it", url=manifest)
    return _beside(manifest, name)


def _beside(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _grouped(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(rows), _ROWS_IN_A_PIECE):
        yield rows[start : start + _ROWS_IN_A_PIECE]


def _lines(groups: Iterator[list[Any]] | Any) -> Iterator[bytes]:
    for number, group in enumerate(groups):
        yield (b",\n" if number else b"\n") + b",\n".join(map(_dump, group))


def _ledger_row(ledger: ManifestLedger) -> list[Any]:
    found = ledger.object
    row = None if found is None else [found.name, found.size_bytes, found.completed_at_ms, found.crc32c]
    return [ledger.ledger_id, ledger.entries, ledger.size_bytes, ledger.messages, ledger.ended_at_ms, row]


def _cursor_row(cursor: ManifestCursor) -> list[Any]:
    state = None if cursor.state is None else base64.b64encode(cursor.state).decode()
    return [cursor.name, list(cursor.mark_delete), state, dict(cursor.properties)]


def _ledger(row: Any) -> ManifestLedger:
    ledger_id, entries, size_bytes, messages, ended_at_ms, found = _list(row, "ledgers")
    stored = None
    if found is not None:
        name, object_bytes, completed_at_ms, crc = _list(found, "ledgers")
        stored = ManifestObject(
            _text(name, "object"),
            _number(object_bytes, "object bytes"),
            _number(completed_at_ms, "completed at"),
            None if crc is None else _number(crc, "crc32c"),
        )
    return ManifestLedger(
        _number(ledger_id, "ledger id"),
        _number(entries, "entries"),
        _number(size_bytes, "bytes"),
        None if messages is None else _number(messages, "messages"),
        _number(ended_at_ms, "ended at"),
        stored,
    )


def _cursor(row: Any) -> ManifestCursor:
    name, mark_delete, state, properties = _list(row, "cursors")
    try:
        encoded = None if state is None else base64.b64decode(_text(state, "state"), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the state of cursor {name!r} is not base64: {error}") from None
    return ManifestCursor(_text(name, "cursor"), _position(mark_delete, "mark-delete"), encoded, _texts(properties, "properties"))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text")
    return value


def _number(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{what} is not a number from {least} on")
    return value


def _position(value: Any, what: str) -> tuple[int, int]:
    ledger_id, entry_id = _list(value, what)
    return _number(ledger_id, what, -1), _number(entry_id, what, -1)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _mapping_or_none(value: Any, what: str) -> dict[str, Any] | None:
    return None if value is None else _mapping(value, what)


def _texts(value: Any, what: str) -> dict[str, str]:
    found = _mapping(value, what)
    for one in found.values():
        _text(one, what)
    return cast(dict[str, str], found)
