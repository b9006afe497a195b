"""Objects of a bucket as files that pyarrow reads by ranges, from threads that may block.

    URL + credentials ──► store, one per process ──► ObjectFile ──► ranges

The URL of an object names its store, with `endpoint` and `region` in its query. Credentials come from the reader's options
(StorageAccess), otherwise from the environment of the process. No text of this module contains them.
"""

from __future__ import annotations

import io
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadOptionError
from cepheid_decode.scan_request import ReadSettings, StorageAccess
from cepheid_tiered.object_store import StoreUrl
from cepheid_tiered.remote_objects import error_of
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError, SegmentError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

OBJECT_STORE = "object storage"
"""Name used instead of a bookie's in counters of bytes by source."""

_MAX_STORES = 64
_MAX_RETRIES = 8
_S3_OPTIONS = {"access_key": "access_key_id", "secret_key": "secret_access_key", "session_token": "session_token"}


class SegmentUnusableError(Exception):
    """An object cannot be read, or is not as uploaded. The text says why, without the URL."""

    def __init__(self, reason: str, *, is_missing: bool = False, is_damaged: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing
        self.is_damaged = is_damaged


_Options = tuple[tuple[str, str], ...]

_stores: dict[tuple[str, _Options, float], ObjectStore] = {}
_lock = threading.Lock()


def open_object(url: str, access: StorageAccess, settings: ReadSettings, counters: ScanCounters) -> ObjectFile:
    """Open an object. Raises SegmentUnusableError; BadOptionError if the library is not installed."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise BadOptionError(
            "reading ledgers from object storage needs obstore: pip install 'cepheid[tiered]', on every machine that reads",
            value="obstore",
        ) from None
    try:
        at = StoreUrl.parse(url)
        store = _store_of(f"{at.root}/" if at.scheme == "file" else at.root, _options_of(at, access), settings)
        size_bytes = _size(store, at.key)
    except Exception as error:
        raise _unusable(url, error) from None
    return ObjectFile(url, store, at.key, size_bytes, counters)


def _size(store: ObjectStore, key: str) -> int:
    import obstore

    try:
        return int(obstore.head(store, key)["size"])
    except FileNotFoundError:
        obstore.get_range(store, key, start=0, end=1)  # an answer to HEAD has no text that explains a failure
        raise


class ObjectFile(io.RawIOBase):
    """One object, read by ranges. Every error is a SegmentUnusableError, kept in `failure`, too, as pyarrow wraps it."""

    def __init__(self, url: str, store: ObjectStore, key: str, size_bytes: int, counters: ScanCounters) -> None:
        self._url = url
        self._store = store
        self._key = key
        self.size_bytes = size_bytes
        self._counters = counters
        self._at = 0
        self.failure: SegmentUnusableError | None = None

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
        data = self._fetch(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data

    def readall(self) -> Any:
        return self.read()

    def tail(self, size_bytes: int) -> bytes:
        """Return the last bytes of the object, up to this number."""
        start = max(0, self.size_bytes - size_bytes)
        return self._fetch(start, self.size_bytes) if self.size_bytes else b""

    def _fetch(self, start: int, end: int) -> bytes:
        import obstore

        try:
            data = obstore.get_range(self._store, self._key, start=start, end=end).to_bytes()
        except Exception as error:
            self.failure = _unusable(self._url, error)
            raise self.failure from None
        if len(data) != end - start:
            self.failure = SegmentUnusableError(f"it has {len(data)} bytes from {start} to {end}", is_damaged=True)
            raise self.failure
        with _lock:  # pyarrow reads from several threads
            self._counters.bytes += len(data)
            self._counters.by_bookie[OBJECT_STORE] = self._counters.by_bookie.get(OBJECT_STORE, 0) + len(data)
        return data


def _options_of(at: StoreUrl, access: StorageAccess) -> _Options:
    options: dict[str, str] = {}
    endpoint = access.endpoint or at.option("endpoint")
    region = access.region or at.option("region")
    if endpoint is not None:
        options["base_url" if at.scheme == "gs" else "endpoint"] = endpoint
    if at.scheme == "s3":
        if region is not None or endpoint is not None:
            options["region"] = region or "us-east-1"  # other implementations ignore it, but signatures need one
        given = {option: getattr(access, name) for name, option in _S3_OPTIONS.items()}
        options |= {option: value for option, value in given.items() if value is not None}
    return tuple(sorted(options.items()))


def _store_of(root: str, options: _Options, settings: ReadSettings) -> ObjectStore:
    name = (root, options, settings.unreachable_s)
    with _lock:
        if (store := _stores.get(name)) is None:
            if len(_stores) >= _MAX_STORES:  # tasks with ever new credentials
                _stores.clear()
            store = _stores[name] = _opened(root, dict(options), settings)
        return store


def _opened(root: str, options: dict[str, str], settings: ReadSettings) -> Any:
    from obstore.store import from_url

    if root.startswith("file:"):
        return from_url(root)
    client: Any = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=max(30.0, settings.read_timeout_s)),
        "allow_http": (options.get("endpoint") or options.get("base_url") or "").startswith("http://"),
    }
    retries: Any = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=max(1.0, settings.unreachable_s))}
    return from_url(root, client_options=client, retry_config=retries, **options)  # type: ignore[call-overload]


def _unusable(url: str, error: Exception) -> SegmentUnusableError:
    """Return the error. The library's text is not repeated unchanged: answers to bad signatures quote keys."""
    found = error if isinstance(error, SegmentError) else error_of(url, error)
    reason = str(found.args[0])[:500].removeprefix(url).lstrip(": ")
    return SegmentUnusableError(
        reason, is_missing=isinstance(found, NoSuchSegmentError), is_damaged=isinstance(found, DamagedSegmentError)
    )
