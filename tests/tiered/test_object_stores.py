"""Every object store does the same, and says by its errors what was wrong."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cepheid_ports import ThreadWorker
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError
from cepheid_tiered.memory_objects import MemoryObjects
from cepheid_tiered.object_store import (
    BadStoreUrlError,
    ObjectStore,
    StoreRefusedError,
    StoreUnavailableError,
    StoreUrl,
    UnusableNameError,
    join_url,
)
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.remote_objects import StoreTimeouts
from cepheid_tiered.segments import new_url
from cepheid_wire import TopicName
from tests.support import free_port
from tests.tiered.s3_server import S3Server, credentials, s3_server
from tests.tiered.segment_samples import LEDGER_ID, STORE, groups_of, segments_over, write

QUICK = StoreTimeouts(connect_s=1, request_s=10, retries=1, retry_s=2)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with credentials(), s3_server() as server:
        yield server


@pytest.fixture(params=["memory", "file", "s3"])
def url_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """The URL of an object in the store."""
    if request.param == "memory":
        return lambda path: f"memory:///{path}"
    if request.param == "file":
        return lambda path: f"file://{tmp_path}/{path}"
    server: S3Server = request.getfixturevalue("s3")
    return lambda path: server.url(f"{tmp_path.name}/{path}")


class Opened:
    """The store of a URL, closed with the block."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> ObjectStore:
        self._worker = ThreadWorker("files")
        return MemoryObjects() if self._url.startswith("memory") else ObjectStores(self._worker, QUICK)

    async def __aexit__(self, *_: object) -> None:
        await self._worker.aclose()


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def keys(store: ObjectStore, prefix: str) -> dict[str, int]:
    return {found.url: found.size_bytes async for found in store.list(prefix)}


async def test_what_was_put_is_read_listed_and_deleted(url_of: Callable[[str], str]) -> None:
    one, two, other = url_of("a/x%2Fy~1.parquet"), url_of("a/b/two"), url_of("ab/other")
    async with Opened(one) as store:
        for url in (one, two, other):
            await store.put(url, b"0123456789")
        await store.put(one, memoryview(b"9876543210"))
        assert bytes(await store.get_range(one, 3, 6)) == b"654"
        assert [bytes(found) for found in await store.get_ranges(one, [(0, 2), (8, 10)])] == [b"98", b"10"]
        assert await store.size(one) == 10
        assert await keys(store, url_of("a")) == {one: 10, two: 10}
        assert await keys(store, url_of("nothing")) == {}
        await store.delete(one)
        await store.delete(one)
        assert await keys(store, url_of("a")) == {two: 10}


async def test_an_upload_in_parts_is_visible_when_it_is_complete(url_of: Callable[[str], str]) -> None:
    url = url_of("t/big")
    data = random.Random(1).randbytes(20_000_000)
    seen: list[dict[str, int]] = []

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 6_000_000):
            yield data[start : start + 6_000_000]
            seen.append(await keys(store, url_of("t")))

    async with Opened(url) as store:
        assert await store.upload(url, parts()) == len(data)
        assert seen == [{}] * 4
        assert await store.size(url) == len(data)
        assert bytes(await store.get_range(url, 5_999_000, 12_001_000)) == data[5_999_000:12_001_000]


@pytest.mark.parametrize("how", ["the source fails", "the call is cancelled"])
async def test_an_upload_that_is_given_up_leaves_nothing(
    how: str, url_of: Callable[[str], str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of("t/big")
    sent = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield bytes(9_000_000)
        yield bytes(9_000_000)
        sent.set()
        if how == "the source fails":
            raise LookupError("away")
        await asyncio.sleep(3600)

    async with Opened(url) as store:
        uploading = asyncio.ensure_future(store.upload(url, parts()))
        await sent.wait()
        if how == "the call is cancelled":
            uploading.cancel()
        with pytest.raises((LookupError, asyncio.CancelledError)):
            await uploading
        assert await keys(store, url_of("t")) == {}
    if url.startswith("file"):
        assert files_below(tmp_path) == []
    if url.startswith("s3"):
        assert request.getfixturevalue("s3").unfinished_uploads() == 0


async def test_what_is_missing_or_short_is_said_so(url_of: Callable[[str], str]) -> None:
    url = url_of("a/b")
    async with Opened(url) as store:
        await store.put(url_of("a/other"), b"x")
        for asked in (store.get_range(url, 0, 1), store.size(url), store.get_ranges(url, [(0, 1)])):
            with pytest.raises(NoSuchSegmentError) as caught:
                await asked
            assert url in str(caught.value)
        await store.put(url, b"0123")
        for start, end in ((0, 5), (4, 6), (100, 200)):
            with pytest.raises(DamagedSegmentError, match=r"a/b"):
                await store.get_range(url, start, end)


async def test_a_missing_bucket_and_a_dead_server_are_no_missing_objects(s3: S3Server) -> None:
    url = s3.url("a", bucket="no-such-bucket")
    async with Opened(url) as store:
        for asked in (store.size(url), store.get_range(url, 0, 1), store.put(url, b"x"), store.upload(url, parts_of(b"x"))):
            with pytest.raises(StoreRefusedError, match="there is no bucket no-such-bucket"):
                await asked
        dead = f"s3://segments/a?endpoint=http://127.0.0.1:{free_port()}"
        with pytest.raises(StoreUnavailableError, match="could not be reached"):
            await store.size(dead)


async def test_a_404_of_any_server_is_no_missing_object() -> None:
    """What answers there is not the object store: a wrong endpoint, or a proxy that is being set up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        page = b"<html>nothing here</html>"
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(page) + page)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"s3://segments/a?endpoint=http://127.0.0.1:{port}"
    with credentials():
        async with server, Opened(url) as store:
            for asked in (store.size(url), store.get_range(url, 0, 1), store.delete(url)):
                with pytest.raises(StoreRefusedError, match="check bucket and endpoint"):
                    await asked


async def test_a_name_that_is_too_long_for_a_file_is_refused_for_good(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/{'é' * 200}/x.parquet"
    async with Opened(url) as store:
        for asked in (store.put(url, b"x"), store.upload(url, parts_of(b"x"))):
            with pytest.raises(UnusableNameError, match="400 bytes") as caught:
                await asked
            assert not caught.value.retriable
        await store.delete(url)  # there can be no such object


async def test_missing_folders_and_permissions_of_files_are_no_missing_objects(tmp_path: Path) -> None:
    gone = f"file://{tmp_path}/not-mounted/x"
    async with Opened(gone) as store:
        with pytest.raises(StoreUnavailableError, match="Is its disk mounted"):
            await store.size(gone)
        await store.delete(gone)
        if os.geteuid() != 0:
            (tmp_path / "closed").mkdir(mode=0o500)
            with pytest.raises(StoreRefusedError, match="no permission"):
                await store.put(f"file://{tmp_path}/closed/x", b"x")


async def test_deleting_a_file_removes_what_a_crash_left_of_its_upload(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/x.parquet"
    left = tmp_path / ".x.parquet.0a.part"
    left.write_bytes(b"half")
    async with Opened(url) as store:
        assert await keys(store, f"file://{tmp_path}") == {}
        await store.delete(url)
    assert not left.exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://x/y", "does not begin with"),
        ("bucket/x", "does not begin with"),
        ("file://host/x", "absolute path"),
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/x", "has a user"),
        ("s3://bucket/x?secret=1", "has an option 'secret'"),
        ("s3://bucket/../x", "'..' in its path"),
        ("s3://bucket/a b", "blank"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, text: str) -> None:
    with pytest.raises(BadStoreUrlError, match=text) as caught:
        StoreUrl.parse(url)
    assert "key:secret" not in str(caught.value)


def test_the_url_of_a_segment_has_the_topic_and_keeps_the_store_s_options() -> None:
    topic = TopicName.parse("persistent://acme/sales/o:r d?ers/é".replace("/é", "é"))
    assert new_url("s3://bucket/old/?endpoint=http://h:1&region=eu", topic, 7, "00ff") == (
        "s3://bucket/old/acme/sales/o%3Ar%20d%3Fers%C3%A9/00000000000000000007-00ff.parquet?endpoint=http://h:1&region=eu"
    )
    assert join_url("file:///data", "a", "manifest.json") == "file:///data/a/manifest.json"


async def test_a_segment_in_s3_comes_back_and_is_verified(s3: S3Server) -> None:
    from tests.decode.decode_reference import single
    from tests.tiered.segment_samples import read_range, stored

    groups = groups_of([single(random.Random(index).randbytes(60_000)) for index in range(300)], 10)
    async with Opened(s3.url("")) as store, segments_over(store) as segments:
        url, summary = await write(segments, groups, s3.url("archive"))
        assert summary.object_bytes == await store.size(url) > 16_000_000
        assert await segments.verify(url, LEDGER_ID) == summary
        reader = await segments.open(url, LEDGER_ID, 300)
        found = await read_range(reader, 100, 250)
        assert stored(found) == stored(groups[10:25]) + bytes(groups[25].entry(250))


@pytest.mark.parametrize(("operation", "exists"), [("before", False), ("after", True)])
async def test_the_store_in_memory_fails_before_or_after_the_effect(operation: str, exists: bool) -> None:
    async def fail(name: str, url: str) -> None:
        if name == "put":
            raise StoreUnavailableError(f"{url} is away")

    store = MemoryObjects(**{operation: fail})
    with pytest.raises(StoreUnavailableError, match="is away"):
        await store.put(f"{STORE}/x", b"")
    assert bool(await keys(store, STORE)) is exists


async def test_a_directory_whose_disk_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    worker = ThreadWorker("files", threads=1)
    objects = ObjectStores(worker)
    url = f"file://{tmp_path}/archive/t/n/orders/manifest.json"
    for attempt in (objects.put(url, b"x"), objects.delete(url), objects.size(url)):
        with pytest.raises(StoreUnavailableError, match="Is its disk mounted"):
            await attempt
    (tmp_path / "archive").mkdir()
    await objects.put(url, b"x")
    assert await objects.size(url) == 1
    await worker.aclose()
