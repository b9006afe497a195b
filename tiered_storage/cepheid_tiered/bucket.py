"""Small objects and listings: what manifests, sweeps and restores ask of an object store.

Segments are written and read by a `SegmentStore`, in ranges and with their own checks. This is the rest, by URL as well. The path
of a URL is the object's key as it is, percent signs included: a name that is encoded once in a URL is encoded once in the bucket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from cepheid_tiered.segment import NoSuchSegmentError, SegmentError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_OPTIONS = {"region": "aws_region", "endpoint": "aws_endpoint"}


@dataclass(frozen=True, slots=True)
class BucketObject:
    """One object as a listing shows it."""

    url: str
    size_bytes: int
    modified_at_ms: int
    """By the clock of the object store."""


class Bucket(Protocol):
    """Errors are SegmentErrors that name the URL; only NoSuchSegmentError says that an object is not there."""

    def list(self, url: str) -> AsyncIterator[BucketObject]:
        """All objects below this URL, which is a directory. None below it is success; a listing ends whole, or raises."""

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        """Raises NoSuchSegmentError."""

    async def put(self, url: str, data: bytes) -> None:
        """Write the object whole, over what was there: a reader sees the old one or the new one."""

    async def delete(self, url: str) -> None:
        """No such object is success."""


class ObjectBucket:
    """Every store that obstore knows: s3://, gs://, abfs:// (az://), file://. Credentials come from the environment."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}

    def __repr__(self) -> str:
        return f"<ObjectBucket {', '.join(self._stores)}>"

    async def list(self, url: str) -> AsyncIterator[BucketObject]:
        import obstore

        store, prefix = self._find(url)
        parts = urlsplit(url)
        try:
            async for group in obstore.list(store, prefix=prefix or None, chunk_size=1_000):
                for found in group:
                    path = urlunsplit(parts._replace(path=f"/{found['path']}"))
                    yield BucketObject(path, found["size"], int(found["last_modified"].timestamp() * 1_000))
        except FileNotFoundError:
            return  # a directory that nobody made has no objects
        except Exception as error:
            raise _failed("list", url, error) from error

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        import obstore

        store, key = self._find(url)
        try:
            found = await obstore.get_async(store, key)
            if (size_bytes := found.meta["size"]) > max_bytes:
                raise SegmentError(f"{url} has {size_bytes} bytes; at most {max_bytes} are read", url=url)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            raise NoSuchSegmentError(f"{url} does not exist", url=url) from None
        except SegmentError:
            raise
        except Exception as error:
            raise _failed("read", url, error) from error

    async def put(self, url: str, data: bytes) -> None:
        import obstore

        store, key = self._find(url)
        try:
            await obstore.put_async(store, key, data, use_multipart=False)
        except Exception as error:
            raise _failed("write", url, error) from error

    async def delete(self, url: str) -> None:
        import obstore

        store, key = self._find(url)
        try:
            await obstore.delete_async(store, key)
        except FileNotFoundError:
            return
        except Exception as error:
            raise _failed("delete", url, error) from error

    def _find(self, url: str) -> tuple[ObjectStore, str]:
        """The store, and the key in it. Raises SegmentError for a URL that is none of an object store."""
        from obstore.store import from_url

        parts = urlsplit(url)
        if not parts.scheme or (not parts.netloc and parts.scheme != "file"):
            raise SegmentError(
                f"{url!r} is not the URL of an object store: s3://bucket/prefix, gs://, abfs:// or file:///path", url=url
            )
        root = f"{parts.scheme}://{parts.netloc}" if parts.netloc else "file:///"
        name = f"{root}?{parts.query}"
        if (store := self._stores.get(name)) is None:
            options = {_OPTIONS.get(key, key): value for key, value in parse_qsl(parts.query)}
            if options.get("aws_endpoint", "").startswith("http://"):
                options["aws_allow_http"] = "true"
            try:
                store = from_url(root, config=options) if options else from_url(root)  # type: ignore[arg-type]
            except Exception as error:
                raise _failed("open", url, error) from error
            self._stores[name] = store
        return store, parts.path.strip("/")


def _failed(what: str, url: str, error: Exception) -> SegmentError:
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return SegmentError(f"could not {what} {url}: {reason}", url=url)
