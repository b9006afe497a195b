"""What is written to a segment comes back as the same bytes, whatever the entries are and however it is read."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_rpc import EntryGroup
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError, segment_reader
from cepheid_tiered import segment_format as layout
from cepheid_tiered.memory_objects import MemoryObjects
from cepheid_tiered.object_store import StoreUnavailableError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import batched, message, single
from tests.support import run_async
from tests.tiered.segment_samples import (
    LEDGER_ID,
    ODD_ENTRIES,
    STORE,
    TOPIC,
    chunks,
    groups_of,
    parquet_of,
    segments_over,
    stored,
    write,
)
from tests.wire.official_clients.recorded import CLIENTS, CODECS, SHAPES, recorded_entries

FORMAT_1 = Path(__file__).with_name("format_1.parquet")
CODEC_NUMBERS = (pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY)


def any_entry() -> st.SearchStrategy[bytes]:
    payloads = st.binary(max_size=40)
    messages = st.builds(
        lambda payload, key, null: message(payload, null_value=null, **({} if key is None else {"partition_key": key})),
        payloads,
        st.none() | st.text(max_size=5),
        st.booleans(),
    )
    return st.one_of(
        st.builds(single, payloads, event_time=st.integers(0, 1 << 62)),
        st.builds(
            lambda some, codec: batched(some, compression=codec), st.lists(messages, min_size=1), st.sampled_from(CODEC_NUMBERS)
        ),
        st.sampled_from(sorted(ODD_ENTRIES.values())),
        payloads,
    )


@given(
    tails=st.lists(any_entry(), min_size=1, max_size=60),
    per_group=st.integers(1, 20),
    row_group_bytes=st.integers(50, 5000),
    max_bytes=st.integers(0, 3000),
)
@settings(max_examples=25, deadline=None)
def test_entries_come_back_as_the_same_bytes(tails: list[bytes], per_group: int, row_group_bytes: int, max_bytes: int) -> None:
    groups = groups_of(tails, per_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", row_group_bytes)
        run_async(_round_trip(groups, max_bytes))


async def _round_trip(groups: Sequence[EntryGroup], max_bytes: int = 1 << 20) -> None:
    entries = groups[-1].last_entry_id + 1
    async with segments_over(MemoryObjects()) as segments:
        url, summary = await write(segments, groups)
        assert summary.entries == entries
        assert summary.entry_bytes == sum(group.size_bytes for group in groups) - 36 * entries
        assert await segments.verify(url, LEDGER_ID) == summary
        reader = await segments.open(url, LEDGER_ID, entries)
        at, found = 0, []
        while at < entries:
            found += await reader.read(at, entries - 1, max_bytes=max_bytes)
            assert found[-1].last_entry_id >= at, "at least one entry"
            at = found[-1].last_entry_id + 1
        assert stored(found) == stored(groups)
        for entry_id in random.Random(0).choices(range(entries), k=3):
            (one,) = await reader.read(entry_id, entry_id, max_bytes=1)
            assert bytes(one.data) == bytes(next(g for g in groups if g.last_entry_id >= entry_id).entry(entry_id))


LARGE: dict[str, Callable[[], list[bytes]]] = {
    # made by the test itself: every process of a run imports this module
    "one of 5 MB": lambda: [single(b"x"), single(random.Random(1).randbytes(5_000_000)), single(b"y")],
    "20,000 small ones": lambda: [single(b"%d" % index) for index in range(20_000)],
    "a batch of 150,000": lambda: [batched([message(b"m%d" % index) for index in range(150_000)])],
    "several row groups": lambda: [single(bytes(100_000), compression=pb.NONE) for _ in range(200)],
}


@pytest.mark.parametrize("tails", LARGE)
async def test_large_and_many_entries_come_back(tails: str) -> None:
    await _round_trip(groups_of(LARGE[tails](), 3000))


@pytest.mark.parametrize("client", CLIENTS)
async def test_entries_of_official_clients_come_back(client: str) -> None:
    tails = [entry for codec in CODECS for shape in SHAPES for entry in recorded_entries(client, codec, shape)]
    await _round_trip(groups_of(tails))


async def test_objects_of_format_1_are_read() -> None:
    """Written by the release before `value_follows`: whole entries in the first row of each."""
    plain = batched([message(b"a"), message(b"b")])
    compressed = batched([message(b"a" * 50), message(b"b" * 50)], compression=pb.ZSTD)
    groups = groups_of([plain, ODD_ENTRIES["marker"], compressed, single(b"c")])
    objects = MemoryObjects()
    url = f"{STORE}/format-1.parquet"
    objects.objects[url] = FORMAT_1.read_bytes()
    async with segments_over(objects) as segments:
        assert (await segments.verify(url, LEDGER_ID)).entries == 4
        reader = await segments.open(url, LEDGER_ID, 4)
        assert stored(await reader.read(0, 3, max_bytes=1 << 20)) == stored(groups)


async def test_two_copies_of_a_ledger_have_the_same_checksum_and_different_urls() -> None:
    async with segments_over(MemoryObjects()) as segments:
        groups = groups_of([single(b"%d" % index) for index in range(10)], 3)
        (url, summary), (other_url, other) = await write(segments, groups), await write(segments, groups)
        assert summary.crc32c == other.crc32c
        assert url != other_url
        changed = groups_of([single(b"%d" % index) for index in range(1, 11)], 3)
        assert (await write(segments, changed))[1].crc32c != summary.crc32c


async def test_a_source_that_fails_leaves_no_object() -> None:
    async def failing() -> AsyncIterator[Sequence[EntryGroup]]:
        yield groups_of([single()])
        raise LookupError("the bookies are away")

    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        with pytest.raises(LookupError, match="away"):
            await segments.write(segments.url_of("memory:///b", TOPIC, LEDGER_ID), TOPIC, LEDGER_ID, failing())
    assert not objects.objects


async def test_a_store_that_fails_ends_the_source() -> None:
    ended = []

    async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
        try:
            for group in groups_of([single(random.Random(index).randbytes(500_000)) for index in range(60)], 5):
                yield [group]
        finally:
            ended.append(True)

    async def fail(operation: str, url: str) -> None:
        if operation == "part":
            raise StoreUnavailableError(f"{url} is away")

    async with segments_over(MemoryObjects(before=fail)) as segments:
        with pytest.raises(StoreUnavailableError, match="is away"):
            await segments.write(segments.url_of("memory:///b", TOPIC, LEDGER_ID), TOPIC, LEDGER_ID, groups())
    assert ended == [True]


@pytest.mark.parametrize("missing", [0, 5])
async def test_entries_out_of_order_are_refused(missing: int) -> None:
    objects = MemoryObjects()
    groups = groups_of([single(b"%d" % index) for index in range(10)], 1)
    del groups[missing]
    async with segments_over(objects) as segments:
        with pytest.raises(ValueError, match=f"{LEDGER_ID}:{missing} was expected"):
            await write(segments, groups)
    assert not objects.objects


async def test_a_sequential_reader_finds_the_next_row_group_fetched_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 10_000)
    objects = MemoryObjects()
    groups = groups_of([single(bytes(990)) for _ in range(100)], 10)
    async with segments_over(objects) as segments:
        url, _ = await write(segments, groups)
        reader = await segments.open(url, LEDGER_ID, 100)
        at = 0
        while at < 30:
            at = (await reader.read(at, 99, max_bytes=4000))[-1].last_entry_id + 1
        while segments._prefetches:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        before = objects.operations["get_range"]
        footer = await segments.footer(url, LEDGER_ID)
        last = footer.last_entry(footer.row_group_of(at - 1) + 1)
        await reader.read(at, last, max_bytes=1 << 20)
        assert objects.operations["get_range"] == before


async def test_the_cache_has_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 100_000)
    groups = groups_of([single(bytes(9_000)) for _ in range(300)], 10)
    async with segments_over(MemoryObjects(), cache_bytes=500_000) as segments:
        url, _ = await write(segments, groups)
        reader = await segments.open(url, LEDGER_ID, 300)
        for at in range(300):
            await reader.read(at, at, max_bytes=1)
            assert segments.cached_bytes <= 500_000


async def test_readers_at_one_place_fetch_it_once() -> None:
    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        url, _ = await write(segments, groups_of([single(b"%d" % index) for index in range(10)]))
        readers = [await segments.open(url, LEDGER_ID, 10) for _ in range(5)]
        before = objects.operations["get_range"]
        await asyncio.gather(*(reader.read(0, 9, max_bytes=100) for reader in readers))
        assert objects.operations["get_range"] == before + 1


async def test_a_chunked_message_is_a_row_at_its_last_chunk_and_every_chunk_comes_back() -> None:
    await _round_trip(groups_of([*chunks(b"0123456789", 3), single(b"after")], 2))


async def test_a_segment_of_another_ledger_or_length_is_refused() -> None:
    async with segments_over(MemoryObjects()) as segments:
        url, _ = await write(segments, groups_of([single()]))
        with pytest.raises(DamagedSegmentError, match=f"holds ledger {LEDGER_ID}, not 7"):
            await segments.open(url, 7, 1)
        with pytest.raises(DamagedSegmentError, match="has 1 entries of ledger 12, 2 are recorded"):
            await segments.open(url, LEDGER_ID, 2)


async def test_who_opens_a_segment_afresh_hears_that_somebody_deleted_it() -> None:
    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        url, _ = await write(segments, groups_of([single()]))
        await segments.open(url, LEDGER_ID, 1)
        await objects.delete(url)  # behind the back of `segments`, which has its footer in memory
        await segments.open(url, LEDGER_ID, 1)
        with pytest.raises(NoSuchSegmentError):
            await segments.open(url, LEDGER_ID, 1, fresh=True)


async def test_a_deleted_segment_is_gone_and_deleting_it_again_is_no_error() -> None:
    async with segments_over(MemoryObjects()) as segments:
        url, _ = await write(segments, groups_of([single()]))
        await segments.open(url, LEDGER_ID, 1)
        await segments.delete(url)
        with pytest.raises(NoSuchSegmentError, match=LEDGER_NAME):
            await segments.open(url, LEDGER_ID, 1)
        await segments.delete(url)


LEDGER_NAME = f"public/default/t-partition-3/{LEDGER_ID:020d}-[0-9a-f]{{16}}.parquet does not exist"


async def test_entries_that_lie_across_the_pieces_of_a_row_group_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_reader, "PIECE_BYTES", 2_000)
    batches = [batched([message(b"%d-%d" % (batch, index)) for index in range(300)]) for batch in range(3)]
    await _round_trip(groups_of([single(b"before"), *batches, single(b"between"), *batches]))


async def test_a_piece_of_a_row_group_that_is_kept_keeps_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_reader, "PIECE_BYTES", 100_000)
    async with segments_over(MemoryObjects(), cache_bytes=1) as segments:
        url, _ = await write(segments, groups_of([single(bytes(9_000)) for _ in range(100)]))
        reader = await segments.open(url, LEDGER_ID, 100)
        first, *others = await reader.read(0, 99, max_bytes=1 << 20)
        assert len(others) > 5
        assert len(memoryview(first.data).obj) == first.size_bytes


async def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """pyarrow imports it in many calls where it is installed, and it would take a tenth of a broker's memory."""
    tails = [
        single(b"v"),
        *ODD_ENTRIES.values(),
        batched([message(b"a"), message(b"b")]),
        batched([message(b"c")], compression=pb.LZ4),
    ]
    path = tmp_path / "segment"
    path.write_bytes(await parquet_of(tails))
    code = """if True:
        import pathlib, sys
        from cepheid_tiered.segment_reader import load_row_group, parse_footer
        data = pathlib.Path(sys.argv[1]).read_bytes()
        footer = parse_footer("url", int(sys.argv[2]), data, len(data))
        start, end = footer.raw_range(0)
        load_row_group("url", footer, 0, start, data[start:end])
        print("pandas" in sys.modules)
    """
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, str(path), str(LEDGER_ID)], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "False\n", ran.stderr


async def test_a_row_group_that_was_read_goes_before_one_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 100_000)
    objects = MemoryObjects()
    groups = groups_of([single(bytes(9_000)) for _ in range(100)], 10)
    async with segments_over(objects, cache_bytes=250_000) as segments:
        url, _ = await write(segments, groups)
        slow, fast = [await segments.open(url, LEDGER_ID, 100) for _ in range(2)]
        await slow.read(0, 0, max_bytes=1)
        at = 20
        while at < 100:
            at = (await fast.read(at, 99, max_bytes=1 << 20))[-1].last_entry_id + 1
        before = objects.operations["get_range"]
        await slow.read(1, 1, max_bytes=1)
        assert objects.operations["get_range"] == before


async def test_nothing_is_fetched_ahead_without_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 100_000)
    async with segments_over(MemoryObjects(), cache_bytes=150_000) as segments:
        url, _ = await write(segments, groups_of([single(bytes(9_000)) for _ in range(100)], 10))
        reader = await segments.open(url, LEDGER_ID, 100)
        for at in range(5):
            await reader.read(at, at, max_bytes=1)
            assert not segments._prefetching


async def test_a_row_group_that_a_reader_left_goes_when_others_were_used_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ENTRY_BYTES", 100_000)
    async with segments_over(MemoryObjects(), cache_bytes=250_000) as segments:
        url, _ = await write(segments, groups_of([single(bytes(9_000)) for _ in range(300)], 10))
        seeker, fast = [await segments.open(url, LEDGER_ID, 300) for _ in range(2)]
        await seeker.read(0, 0, max_bytes=1)
        for at in range(20, 300):
            await fast.read(at, at, max_bytes=1)
        assert not segments.is_cached(url, 0)


async def test_a_footer_larger_than_the_cache_is_read_once() -> None:
    objects = MemoryObjects()
    async with segments_over(objects, footer_bytes=1) as segments:
        url, _ = await write(segments, groups_of([single(bytes(100)) for _ in range(10)]))
        reader = await segments.open(url, LEDGER_ID, 10)
        for at in range(10):
            await reader.read(at, at, max_bytes=1)
        assert objects.operations["size"] == 1


async def test_a_store_that_hangs_does_not_hold_up_another() -> None:
    objects = MemoryObjects()
    async with segments_over(objects) as segments:
        written = [await write(segments, groups_of([single(b"x")]), f"memory://{place}/p") for place in ["away"] * 5 + ["near"]]
        *away, near = [await segments.open(url, LEDGER_ID, 1) for url, _ in written]

        async def hang(_operation: str, url: str) -> None:
            if "away" in url:
                await asyncio.Event().wait()

        objects.before = hang
        waiting = [asyncio.ensure_future(reader.read(0, 0, max_bytes=1)) for reader in away]
        await asyncio.sleep(0)
        assert len(await near.read(0, 0, max_bytes=1)) == 1
        for reading in waiting:
            reading.cancel()
        await asyncio.wait(waiting)
