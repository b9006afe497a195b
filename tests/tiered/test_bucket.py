"""Small objects of a bucket, on the file system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cepheid_tiered.bucket import ObjectBucket
from cepheid_tiered.segment import NoSuchSegmentError, SegmentError


def test_objects_are_written_listed_read_and_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        bucket, root = ObjectBucket(), f"file://{tmp_path}/bucket"
        assert [found async for found in bucket.list(root)] == []
        url = f"{root}/t/n/a%2Fb/manifest.json"
        await bucket.put(url, b"one")
        await bucket.put(url, b"two")
        assert (tmp_path / "bucket/t/n/a%2Fb/manifest.json").read_bytes() == b"two"
        assert [(found.url, found.size_bytes) async for found in bucket.list(root)] == [(url, 3)]
        assert await bucket.get(url, max_bytes=3) == b"two"
        with pytest.raises(SegmentError, match="has 3 bytes; at most 2 are read"):
            await bucket.get(url, max_bytes=2)
        await bucket.delete(url)
        await bucket.delete(url)
        with pytest.raises(NoSuchSegmentError, match=r"manifest\.json does not exist"):
            await bucket.get(url, max_bytes=3)

    asyncio.run(main())


@pytest.mark.parametrize("url", ["bucket/prefix", "s3:///prefix", "ftp://host/x"])
def test_a_url_of_no_object_store_is_refused(url: str) -> None:
    with pytest.raises(SegmentError, match=r"object store|could not open"):
        asyncio.run(ObjectBucket().get(f"{url}/manifest.json", max_bytes=1))
