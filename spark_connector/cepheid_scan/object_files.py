"""Objects of a bucket as files that pyarrow reads by ranges, from threads that may block.

    URL + credentials ──► store, one per process ──► ObjectFile ──► ranges

The URL of an object names its store, with `endpoint` and `region` in its query. Credentials come from the reader's options
(StorageAccess), else from the environment of the process. They are in no text that this module makes.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadOptionError
from cepheid_decode.scan_request import ReadSettings, StorageAccess

if TYPE_CHECKING:
    from obstore.store import ObjectStore

OBJECT_STORE = "object storage"
"""In place of a bookie's name, where counters say who gave how many bytes."""

_MAX_STORES = 64
_TAIL_BYTES = 64 << 10  # read with the first request: a footer of about a hundred row groups
_MAX_RETRIES = 8
_S3_OPTIONS = {"access_key": "access_key_id", "secret_key": "secret_access_key", "session_token": "session_token"}
_EVERY_OPTION = {"endpoint": "endpoint", "region": "region"}


class SegmentUnusableError(Exception):
    """An object cannot be read, or is not what was uploaded. The text says why, without the URL."""

    def __init__(self, reason: str, *, is_missing: bool = False, is_damaged: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing
        self.is_damaged = is_damaged


@dataclass(frozen=True, slots=True)
class _Place:
    root: str
    key: str
    options: tuple[tuple[str, str], ...]


_stores: dict[tuple[str, tuple[tuple[str, str], ...], float], ObjectStore] = {}
_lock = threading.Lock()


def open_object(url: str, access: StorageAccess, settings: ReadSettings, counters: ScanCounters) -> ObjectFile:
    """Raises SegmentUnusableError; BadOptionError where the library is not installed."""
    try:
        import obstore
    except ImportError:
        raise BadOptionError(
            "reading ledgers from object storage needs obstore: pip install 'cepheid[tiered]', on every machine that reads",
            value="obstore",
        ) from None
    place = _place_of(url, access)
    store = _store_of(place, settings)
    try:
        size_bytes = int(obstore.head(store, place.key)["size"])
    except Exception as error:
        raise _unusable(error) from None
    return ObjectFile(store, place.key, size_bytes, counters)


class ObjectFile(io.RawIOBase):
    """One object, read by ranges. Any error is a SegmentUnusableError, kept in `failure` too: pyarrow wraps what is raised."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int, counters: ScanCounters) -> None:
        self._store = store
        self._key = key
        self.size_bytes = size_bytes
        self._counters = counters
        self._at = 0
        self._tail_start = max(0, size_bytes - _TAIL_BYTES)
        self._tail: bytes | None = None
        self.failure: SegmentUnusableError | None = None

    def __repr__(self) -> str:
        return f"<ObjectFile of {self.size_bytes} bytes>"

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence] + offset
        return self._at

    def size(self) -> int:
        return self.size_bytes

    def read(self, size: int = -1) -> Any:
        end = self.size_bytes if size is None or size < 0 else min(self.size_bytes, self._at + size)
        data = self._range(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data

    def readall(self) -> Any:
        return self.read()

    def _range(self, start: int, end: int) -> Any:
        if start >= self._tail_start:
            if self._tail is None:
                self._tail = self._fetch(self._tail_start, self.size_bytes)
            return self._tail[start - self._tail_start : end - self._tail_start]
        return self._fetch(start, end)

    def _fetch(self, start: int, end: int) -> bytes:
        import obstore

        try:
            data = obstore.get_range(self._store, self._key, start=start, end=end).to_bytes()
        except Exception as error:
            self.failure = _unusable(error)
            raise self.failure from None
        if len(data) != end - start:
            self.failure = SegmentUnusableError(f"it has {len(data)} bytes from {start} to {end}", is_damaged=True)
            raise self.failure
        with _lock:  # pyarrow reads from several threads
            self._counters.bytes += len(data)
            self._counters.by_bookie[OBJECT_STORE] = self._counters.by_bookie.get(OBJECT_STORE, 0) + len(data)
        return data


def _place_of(url: str, access: StorageAccess) -> _Place:
    parts = urlsplit(url)
    root = f"{parts.scheme}://{parts.netloc}" if parts.netloc else f"{parts.scheme}:///"
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "s3":
        options = {_EVERY_OPTION.get(name, name): value for name, value in options.items()}
        for name, option in (_S3_OPTIONS | _EVERY_OPTION).items():
            if (given := getattr(access, name)) is not None:
                options[option] = given
        if options.get("endpoint", "").startswith("http://"):
            options["allow_http"] = "true"
    return _Place(root, parts.path.strip("/"), tuple(sorted(options.items())))


def _store_of(place: _Place, settings: ReadSettings) -> ObjectStore:
    from obstore.store import from_url

    name = (place.root, place.options, settings.unreachable_s)
    with _lock:
        if (store := _stores.get(name)) is None:
            if len(_stores) >= _MAX_STORES:  # of tasks with ever new credentials
                _stores.clear()
            try:
                store = _stores[name] = _opened(from_url, place, settings)
            except Exception as error:
                raise _unusable(error) from None
        return store


def _opened(from_url: Any, place: _Place, settings: ReadSettings) -> ObjectStore:
    if place.root == "file:///":
        return from_url(place.root)  # type: ignore[no-any-return]
    return from_url(  # type: ignore[no-any-return]
        place.root,
        config=dict(place.options) or None,
        client_options={"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=max(30.0, settings.read_timeout_s))},
        retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=max(1.0, settings.unreachable_s))},
    )


def _unusable(error: Exception) -> SegmentUnusableError:
    if isinstance(error, SegmentUnusableError):
        return error
    if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError":
        return SegmentUnusableError("it is not there", is_missing=True)
    reason = str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
    return SegmentUnusableError(f"{type(error).__name__}: {reason}")
