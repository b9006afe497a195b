"""The encoding of a backup of metadata: lines of JSON, checked as a whole. Without I/O.

    {"cepheid_metadata_backup": 1, "cluster": …, "cluster_id": …, "created_at_ms": …}
    {"key": "/chains/…", "version": 3, "value": "…"}          one line per record; "base64" instead of "value" if it is not text
    {"end": true, "keys": 812, "topics": 40, "ledgers": 310, "missing_ledgers": [], "sha256": "…"}

`sha256` is the checksum of all bytes before the last line. The counts are in the last line too, since they are not known when the
first line is written.

Rules:
1. A file that is not complete and unchanged to its last byte is refused, and none of it is used.
2. A record with others below it (`/schemas/…/topic`) comes before them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from cepheid_metadata import keys
from cepheid_metadata.errors import MetadataError, NewerFormatError
from cepheid_metadata.store import Versioned

BACKUP_FORMAT = 1
_HEAD = "cepheid_metadata_backup"


class BackupDamagedError(MetadataError):
    """A backup is incomplete or was changed."""

    hint: ClassVar[str] = "nothing was restored; take another copy of this backup, or an older backup"


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """The data in a backup about itself. `missing_ledgers`: named by a chain or a cursor, but without a record at that time."""

    cluster: str
    cluster_id: str
    created_at_ms: int
    keys: int
    topics: int
    ledgers: int
    missing_ledgers: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class BackupEntry:
    key: str
    version: int
    value: bytes


class BackupEncoder:
    """Encodes the lines of one backup, in order: `head`, any number of `entry`, `end`."""

    def __init__(self) -> None:
        self._sha = sha256()
        self._keys = self._topics = self._ledgers = 0
        self.missing_ledgers: list[int] = []

    def head(self, cluster: str, cluster_id: str, created_at_ms: int) -> bytes:
        return self._line({_HEAD: BACKUP_FORMAT, "cluster": cluster, "cluster_id": cluster_id, "created_at_ms": created_at_ms})

    def entry(self, key: str, found: Versioned) -> bytes:
        self._keys += 1
        self._topics += keys.is_chain_key(key)
        self._ledgers += keys.ledger_id_of(key) is not None
        fields: dict[str, Any] = {"key": key, "version": found.version}
        try:
            fields["value"] = found.value.decode()
        except UnicodeDecodeError:
            fields["base64"] = base64.b64encode(found.value).decode()
        return self._line(fields)

    def end(self) -> bytes:
        counts = {"keys": self._keys, "topics": self._topics, "ledgers": self._ledgers, "missing_ledgers": self.missing_ledgers}
        return self._line({"end": True, **counts, "sha256": self._sha.hexdigest()})

    def _line(self, fields: dict[str, Any]) -> bytes:
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        self._sha.update(line)
        return line


def check_backup(lines: Iterable[bytes]) -> BackupSummary:
    """Read a backup to its end and return its summary. Raises BackupDamagedError, NewerFormatError."""
    head: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    sha, number, entries, digest = sha256(), 0, 0, ""
    for number, line in enumerate(lines, 1):
        if end is not None:
            raise BackupDamagedError(f"line {number} of the backup comes after its last line", line=number)
        fields = _fields(line, number)
        if head is None:
            head = _head(fields)
        elif "end" in fields:
            end, digest = fields, sha.hexdigest()
        else:
            _entry(fields, number)
            entries += 1
        sha.update(line)
    if head is None:
        raise BackupDamagedError("the backup is empty")
    if end is None:
        raise BackupDamagedError(f"the backup ends after line {number}", line=number)
    if digest != end.get("sha256") or entries != end.get("keys"):
        raise BackupDamagedError(f"the backup was changed: its checksum is {digest}, its last line says {end.get('sha256')}")
    try:
        counts = end["keys"], end["topics"], end["ledgers"], tuple(end["missing_ledgers"])
        return BackupSummary(head["cluster"], head["cluster_id"], head["created_at_ms"], *counts, digest)
    except (KeyError, TypeError) as error:
        raise BackupDamagedError(f"the first or the last line of the backup has no field {error}") from None


def backup_entries(lines: Iterable[bytes]) -> Iterator[BackupEntry]:
    """Yield the records of a backup that `check_backup` has found complete."""
    for number, line in enumerate(lines, 1):
        fields = _fields(line, number)
        if _HEAD not in fields and "end" not in fields:
            yield _entry(fields, number)


def _fields(line: bytes, number: int) -> dict[str, Any]:
    try:
        if not line.endswith(b"\n"):
            raise ValueError("it is incomplete")
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise TypeError("it is not an object")
    except (ValueError, TypeError) as error:
        raise BackupDamagedError(f"line {number} of the backup cannot be read: {error}", line=number) from None
    return fields


def _head(fields: dict[str, Any]) -> dict[str, Any]:
    known = fields.get(_HEAD)
    if not isinstance(known, int):
        raise BackupDamagedError(f"this is not a backup of metadata: its first line has no {_HEAD}")
    if known != BACKUP_FORMAT:
        raise NewerFormatError(f"the backup has format {known}; this release reads format {BACKUP_FORMAT}", format=known)
    return fields


def _entry(fields: dict[str, Any], number: int) -> BackupEntry:
    try:
        value = base64.b64decode(fields["base64"], validate=True) if "base64" in fields else fields["value"].encode()
        key, version = fields["key"], fields["version"]
        if not isinstance(key, str) or not isinstance(version, int) or version < 0:
            raise ValueError("key or version")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise BackupDamagedError(f"line {number} of the backup is not a record: {error}", line=number) from None
    return BackupEntry(key, version, value)
