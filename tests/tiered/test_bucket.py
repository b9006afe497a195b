"""Small objects of a bucket, on the file system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cepheid_ports import ThreadWorker
from cepheid_tiered.bucket import ObjectBucket
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.segment import NoSuchSegmentError, SegmentError


def test_objects_are_written_listed_read_and_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        worker = ThreadWorker("objects")
        bucket, root = ObjectBucket(ObjectStores(worker)), f"file://{tmp_path}"
        url = f"{root}/t/n/a%20b/manifest.json"
        await bucket.put(url, b"one")
        await bucket.put(url, b"two")
        assert (tmp_path / "t/n/a%20b/manifest.json").read_bytes() == b"two"
        assert [(found.url, found.size_bytes) async for found in bucket.list(root)] == [(url, 3)]
        assert await bucket.get(url, max_bytes=3) == b"two"
        with pytest.raises(SegmentError, match="has 3 bytes; at most 2 are read"):
            await bucket.get(url, max_bytes=2)
        await bucket.delete(url)
        await bucket.delete(url)
        with pytest.raises(NoSuchSegmentError, match=r"manifest\.json"):
            await bucket.get(url, max_bytes=3)
        await worker.aclose()

    asyncio.run(main())
