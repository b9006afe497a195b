"""The common interface of object stores, with objects named by URL; their URLs and errors.

    s3://bucket/prefix/tenant/ns/topic/00000000000000000007-9f0c….parquet?endpoint=http://127.0.0.1:9000&region=us-east-1
    └─ place ──┘└─ key, taken literally ──────────────────────────────┘ └─ options of the store, never a secret ────────┘

Rule 1: an object is visible only when it is complete. A failed or cancelled upload leaves nothing that a reader could see.
Rule 2: NoSuchSegmentError means that the store reported so. A missing bucket or folder is another error, since it may return.
Rule 3: every wait is bounded: requests have timeouts, and retries have a limit.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl

from cepheid_rpc import Buffer
from cepheid_tiered.segment import SegmentError

SCHEMES = ("file", "s3", "gs", "abfs", "abfss", "az")
_OPTIONS = ("endpoint", "region")
_MEMORY = "memory"  # for tests and the simulator


class BadStoreUrlError(SegmentError):
    """A URL that names no object store."""

    retriable = False
    hint = "use file:///path, s3://bucket/prefix, gs://bucket/prefix or abfs://container@account.dfs.core.windows.net/prefix"


class UnusableNameError(SegmentError):
    """The store cannot have an object of this name."""

    retriable = False
    hint = (
        "give the topic an offload URL of a store that takes longer names (s3://, gs://, abfs://), or switch offloading off for it"
    )


class StoreUnavailableError(SegmentError):
    """The object store could not be reached, timed out, or failed."""


class StoreRefusedError(SegmentError):
    """The object store refuses the request: no such bucket, no permission, another region."""


class NewerSegmentError(SegmentError):
    """An object in a format of a later release."""

    retriable = False
    hint = "upgrade this process"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL. `key` has no leading slash; for file:// it is the path below `/`."""

    scheme: str
    place: str
    """Bucket or container, as the URL has it; empty for files."""
    key: str
    options: tuple[tuple[str, str], ...] = ()
    query: str = ""

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL. Raises BadStoreUrlError."""
        scheme, separator, rest = url.partition("://")
        path, _, query = rest.partition("?")
        place, slash, key = path.partition("/")
        if not separator or scheme not in (*SCHEMES, _MEMORY):
            raise BadStoreUrlError(f"{url!r} does not begin with {'://, '.join(SCHEMES)}://", url=url)
        if scheme == "file" and (place or not slash):
            raise BadStoreUrlError(f"{url!r} must have an absolute path: file:///path", url=url)
        if scheme not in ("file", _MEMORY) and not place:
            raise BadStoreUrlError(f"{url!r} names no bucket", url=url)
        if "@" in place and not scheme.startswith("abfs"):
            raise BadStoreUrlError(
                f"the URL of bucket {place.rpartition('@')[2]!r} has a user: credentials do not belong into URLs"
            )
        if re.search(r"[\x00-\x20\x7f#]", url) or any(step in (".", "..") for step in key.split("/")):
            raise BadStoreUrlError(f"{url!r} has a blank, a control character, '#', '.' or '..' in its path", url=url)
        options = tuple(parse_qsl(query, keep_blank_values=True))
        for name, _value in options:
            if name not in _OPTIONS:
                known = " and ".join(_OPTIONS)
                raise BadStoreUrlError(f"the URL of {scheme}://{place} has an option {name!r}; there are {known}", option=name)
        return cls(scheme, place, key, options, query)

    def option(self, name: str) -> str | None:
        return dict(self.options).get(name)

    @property
    def root(self) -> str:
        """Return scheme and place, without a key."""
        return f"{self.scheme}://{self.place}"

    def with_key(self, key: str) -> str:
        """Return the URL of another object in the same store."""
        return f"{self.root}/{key}" + (f"?{self.query}" if self.query else "")

    def __str__(self) -> str:
        return self.with_key(self.key)


def join_url(store_url: str, *steps: str) -> str:
    """Return `store_url` with steps added to its path, before its query. Raises BadStoreUrlError."""
    base = StoreUrl.parse(store_url)
    return base.with_key("/".join(step for step in (base.key.strip("/"), *steps) if step))


@dataclass(frozen=True, slots=True)
class StoredObject:
    url: str
    size_bytes: int
    modified_ms: int


class ObjectStore(Protocol):
    """Objects of any store, by URL. Every method raises SegmentErrors that name the URL and the reason."""

    async def get_range(self, url: str, start: int, end: int) -> Buffer:
        """Return exactly the bytes from `start` to before `end`. Raises DamagedSegmentError if the object is shorter."""

    async def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return several ranges, each as `get_range` does. Ranges close to each other may be read by one request."""

    async def size(self, url: str) -> int:
        """Return the size of the object in bytes. Raises NoSuchSegmentError."""

    async def put(self, url: str, data: Buffer) -> None:
        """Write or replace a small object as a whole."""

    async def upload(self, url: str, parts: AsyncIterator[Buffer]) -> int:
        """Write an object from parts of any size, and return its size. It becomes visible only when this returns.

        If `parts` raises or the call is cancelled, the upload is aborted and its parts are removed, unless the process or the
        store fails at that moment: a bucket should expire incomplete multipart uploads (docs of the store)."""

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        """Yield all objects, if any, whose key begins with the path of the URL and a slash, in no particular order."""

    async def delete(self, url: str) -> None:
        """Delete an object. Succeeds if it does not exist."""
