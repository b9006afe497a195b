"""Objects in S3, Google Cloud Storage and Azure, through the library `obstore`. The README says why it was chosen.

Credentials come from the environment of the process (AWS_ACCESS_KEY_ID, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY, …, or
the machine's metadata service), and the library renews them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cepheid_rpc import Buffer
from cepheid_tiered.object_store import BadStoreUrlError, StoredObject, StoreRefusedError, StoreUnavailableError, StoreUrl
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError, SegmentError

PART_BYTES = 8 << 20
"""Size of a part of a multipart upload. S3's maximum of 10,000 parts is 80 GB."""
_PARTS_AT_ONCE = 2

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_NO_OBJECT = ("NoSuchKey", "BlobNotFound", "No such object")
"""Texts of S3 and Google, Azure, and Google's JSON for a missing object. A 404 without one may come from any web server."""
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "InvalidToken")
_WRONG_CLOCK = ("RequestTimeTooSkewed", "RequestExpired")
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "redirect")


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    connect_s: float = 5.0
    request_s: float = 60.0
    retries: int = 6
    retry_s: float = 60.0  # no retry begins later than this after the first attempt


class RemoteObjects:
    """All buckets, by URL."""

    def __init__(self, timeouts: StoreTimeouts | None = None) -> None:
        self._timeouts = timeouts or StoreTimeouts()
        self._stores: dict[tuple[str, str], Any] = {}

    async def get_range(self, url: str, start: int, end: int) -> Buffer:
        import obstore

        at, store = self.store_of(url)
        if start == end:
            return b""
        try:
            found = await obstore.get_range_async(store, at.key, start=start, end=end)
        except Exception as error:
            raise _told(url, at, error) from error
        if len(found) != end - start:
            raise DamagedSegmentError(f"{url}: {len(found)} bytes came of {start} to {end}: the object is shorter", url=url)
        return memoryview(found)

    async def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        import obstore

        at, store = self.store_of(url)
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            found = await obstore.get_ranges_async(store, at.key, starts=starts, ends=ends)
        except Exception as error:
            raise _told(url, at, error) from error
        for data, start, end in zip(found, starts, ends, strict=True):
            if len(data) != end - start:
                raise DamagedSegmentError(f"{url}: {len(data)} bytes came of {start} to {end}: the object is shorter", url=url)
        return [memoryview(data) for data in found]

    async def size(self, url: str) -> int:
        import obstore

        at, store = self.store_of(url)
        try:
            return int((await obstore.head_async(store, at.key))["size"])
        except Exception as error:
            # An answer to HEAD has no text: only another request can tell whether the bucket itself is missing.
            if isinstance(error, FileNotFoundError):
                await self.get_range(url, 0, 1)
            raise _told(url, at, error) from error

    async def put(self, url: str, data: Buffer) -> None:
        import obstore

        at, store = self.store_of(url)
        try:
            await obstore.put_async(store, at.key, bytes(data), use_multipart=False)
        except Exception as error:
            raise _told(url, at, error) from error

    async def upload(self, url: str, parts: AsyncIterator[Buffer]) -> int:
        import obstore

        at, store = self.store_of(url)
        source = _Parts(parts)
        # The library aborts an upload whose source raises, but not one that is cancelled. So it is never cancelled: its source
        # raises instead.
        uploading = asyncio.ensure_future(
            obstore.put_async(
                store, at.key, source.read(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            )
        )
        try:
            await asyncio.shield(uploading)
        except asyncio.CancelledError:
            source.stop()
            await asyncio.wait([uploading], timeout=self._timeouts.retry_s)
            if uploading.done() and not uploading.cancelled():
                uploading.exception()
            raise
        except Exception as error:
            source.stop()
            if source.failure is not None:
                raise source.failure from None
            raise _told(url, at, error) from error
        return source.size_bytes

    async def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        import obstore

        at, store = self.store_of(prefix_url)
        try:
            async for chunk in obstore.list(store, at.key.strip("/") or None, chunk_size=1000):
                for each in chunk:
                    modified_ms = int(each["last_modified"].timestamp() * 1000)
                    yield StoredObject(at.with_key(each["path"]), int(each["size"]), modified_ms)
        except SegmentError:
            raise
        except Exception as error:
            raise _told(prefix_url, at, error) from error

    async def delete(self, url: str) -> None:
        import obstore

        at, store = self.store_of(url)
        try:
            await obstore.delete_async(store, at.key)
        except Exception as error:
            told = _told(url, at, error)
            if not isinstance(told, NoSuchSegmentError):
                raise told from error

    def store_of(self, url: str) -> tuple[StoreUrl, Any]:
        """Return the parts of a URL and the library's store for it. Raises BadStoreUrlError."""
        at = StoreUrl.parse(url)
        name = (at.root, at.query)
        found = self._stores.get(name)
        if found is None:
            found = self._stores[name] = self._new_store(at)
        return at, found

    def _new_store(self, at: StoreUrl) -> Any:
        from obstore.store import from_url

        times = self._timeouts
        options: dict[str, Any] = {}
        endpoint = at.option("endpoint")
        if endpoint is not None:
            options["base_url" if at.scheme == "gs" else "endpoint"] = endpoint
        if at.scheme == "s3":
            if (region := at.option("region")) is not None:
                options["region"] = region
            elif endpoint is not None:
                options["region"] = "us-east-1"  # signatures need a region; servers of other vendors ignore it
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=times.connect_s),
            "timeout": timedelta(seconds=times.request_s),
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
        }
        retries: Any = {
            "max_retries": times.retries,
            "retry_timeout": timedelta(seconds=times.retry_s),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
        }
        try:
            return from_url(at.root, client_options=client, retry_config=retries, **options)  # type: ignore[call-overload]
        except Exception as error:
            raise BadStoreUrlError(f"{at.root} cannot be used: {_first_line(error)}", url=at.root) from error


class _GivenUp(Exception):
    """Raised into the library so that it aborts an upload."""


class _Parts:
    """The parts of an upload; `stop` makes the reader of them fail."""

    def __init__(self, parts: AsyncIterator[Buffer]) -> None:
        self._parts = parts
        self._stopped = asyncio.Event()
        self.failure: BaseException | None = None
        self.size_bytes = 0

    def stop(self) -> None:
        self._stopped.set()

    async def read(self) -> AsyncIterator[bytes]:
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            while True:
                part = asyncio.ensure_future(anext(self._parts, None))
                await asyncio.wait([part, stopped], return_when=asyncio.FIRST_COMPLETED)
                if not part.done():
                    part.cancel()
                    await asyncio.wait([part])
                    raise _GivenUp
                data = part.result()
                if data is None:
                    return
                self.size_bytes += memoryview(data).nbytes
                yield data if isinstance(data, bytes) else bytes(data)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failure = error
            raise _GivenUp from error
        finally:
            stopped.cancel()


def _told(url: str, at: StoreUrl, error: BaseException) -> SegmentError:
    """Return this package's error for one of the library's, without its whole text: answers to bad signatures quote keys."""
    if isinstance(error, SegmentError):
        return error
    from obstore import exceptions

    text = str(error)
    code, reason = _reason(text)
    if any(mark in text for mark in _NO_BUCKET):
        return StoreRefusedError(f"{url}: there is no bucket {at.place} ({code or 'not found'})", url=url)
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        if at.scheme == "file" or any(mark in text for mark in _NO_OBJECT):
            return NoSuchSegmentError(f"{url} does not exist", url=url)
        what = f"the answer is 404, and does not say that the object is missing ({reason})"
        return StoreRefusedError(f"{url}: {what}: check bucket and endpoint", url=url)
    if code == "InvalidRange" or "Requested range" in text:
        return DamagedSegmentError(f"{url} is shorter than the range that was asked for", url=url)
    if any(mark in code for mark in _WRONG_REGION) or "redirect" in text.lower():
        return StoreRefusedError(f"{url}: the bucket {at.place} is in another region ({reason}): give it as ?region=", url=url)
    if code in _EXPIRED:
        return StoreRefusedError(f"{url}: the credentials have expired ({reason}): renew those in the environment", url=url)
    if code in _WRONG_CLOCK:
        return StoreRefusedError(f"{url}: the clock of this machine differs from that of the store ({reason}): set it", url=url)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or "status code: 403" in text:
        return StoreRefusedError(f"{url}: no permission ({reason}): check the credentials in the environment", url=url)
    if "missing credentials" in text.lower() or "credential" in text.lower() or "169.254.169.254" in text:
        return StoreRefusedError(f"{url}: no credentials were found in the environment ({reason})", url=url)
    return StoreUnavailableError(f"{url} could not be reached: {reason}", url=url)


def _reason(text: str) -> tuple[str, str]:
    """The store's code, and a short text: the code with its message, or the library's first line."""
    code = re.search(r"<Code>([^<]{1,100})</Code>", text)
    message = re.search(r"<Message>([^<]{1,200})", text)
    if code is None:
        return "", _first_line(text)
    return code[1], f"{code[1]}: {message[1]}" if message else code[1]


def _first_line(error: object) -> str:
    return str(error).split("\n", 1)[0].split("<?xml", 1)[0][:300].strip()


def error_of(url: str, error: BaseException) -> SegmentError:
    """Return the error of this package for one that obstore raised, for callers that use the library without a loop."""
    return _told(url, StoreUrl.parse(url), error)
