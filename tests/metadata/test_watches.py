"""Watches, on every store: one shot, armed before reading, merged, never missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cepheid_metadata import BadVersionError, Check, Create, MetadataStore, Put, Versioned
from cepheid_metadata.store import watch_and_get
from tests.metadata.store_harness import Harness

Change = Callable[[MetadataStore], Awaitable[object]]


CHANGES: list[tuple[str, Change, bool, bool]] = [
    ("a put", lambda store: store.put("/w/there", b"x", 0), True, False),
    ("its deletion", lambda store: store.delete("/w/there", None), True, True),
    ("a child comes", lambda store: store.create("/w/there/a", b""), False, True),
    ("a grandchild comes, its parent with it", lambda store: store.create("/w/there/a/b", b""), False, True),
    ("a child comes in a multi", lambda store: store.multi([Create("/w/there/a", b"")]), False, True),
    ("a put in a multi", lambda store: store.multi([Put("/w/there", b"x", 0)]), True, False),
    ("a sibling", lambda store: store.create("/w/there2", b""), False, False),
    ("a refused put", lambda store: store.put("/w/there", b"x", 5), False, False),
    ("a multi that fails later", lambda store: store.multi([Put("/w/there", b"", 0), Check("/w", 9)]), False, False),
    ("a check", lambda store: store.multi([Check("/w/there", 0)]), False, False),
    ("reads", lambda store: asyncio.gather(store.get("/w/there"), store.children("/w/there")), False, False),
]


@pytest.mark.parametrize("on_children", [False, True])
@pytest.mark.parametrize(("change", "key_fires", "children_fire"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
async def test_what_fires(harness: Harness, change: Change, key_fires: bool, children_fire: bool, on_children: bool) -> None:
    async with harness.session() as store:
        await store.create("/w/there", b"")
        watch = await (store.watch_children("/w/there") if on_children else store.watch("/w/there"))
        try:
            await change(store)
        except BadVersionError:
            pass
        assert watch.has_fired is (children_fire if on_children else key_fires)


async def test_a_put_to_a_child_is_no_change_of_the_children(harness: Harness) -> None:
    async with harness.session() as store:
        await store.create("/w/a", b"")
        watch = await store.watch_children("/w")
        await store.put("/w/a", b"x", 0)
        assert not watch.has_fired
        await store.delete("/w/a", None)
        assert watch.has_fired


async def test_a_watch_waits_for_a_key_that_is_not_there_yet(harness: Harness) -> None:
    async with harness.session() as store:
        watch, child_watch = await store.watch("/w/later"), await store.watch_children("/w")
        waiting = asyncio.gather(watch.wait(), child_watch.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        await store.create("/w/later", b"")
        await waiting


async def test_a_watch_that_is_armed_with_a_read_fires_for_what_comes_after_the_read(harness: Harness) -> None:
    async with harness.session() as store:
        none, nothing = await watch_and_get(store, "/w")
        assert nothing is None
        await store.create("/w", b"0")
        assert none.has_fired
        first, found = await watch_and_get(store, "/w")
        second, found_again = await watch_and_get(store, "/w")
        assert found == found_again == Versioned(b"0", 0)
        assert not first.has_fired
        await store.put("/w", b"1", 0)
        assert first.has_fired
        assert second.has_fired


async def test_a_watch_fires_once_and_merges(harness: Harness) -> None:
    async with harness.session() as store:
        await store.create("/w", b"0")
        watch = await store.watch("/w")
        for version in range(3):
            await store.put("/w", b"x", version)
        await watch.wait()
        await watch.wait()  # still fired: waiting late is no mistake
        again = await store.watch("/w")
        assert not again.has_fired
        again.cancel()


async def test_many_watchers_all_hear(harness: Harness) -> None:
    async with harness.session() as store:
        watches = [await store.watch("/w") for _ in range(50)]
        watches[7].cancel()
        await store.create("/w", b"")
        assert [n for n, watch in enumerate(watches) if not watch.has_fired] == [7]


async def test_a_cancelled_watch_leaves_nothing_behind(harness: Harness) -> None:
    async with harness.session() as store:
        before = repr(store)
        with await store.watch("/w") as watch, await store.watch_children("/w"):
            assert repr(watch) == "<Watch /w: armed>"
            assert not watch.has_fired
        assert repr(watch) == "<Watch /w: cancelled>"
        watch.cancel()
        assert repr(store) == before
        waiting = asyncio.create_task((await store.watch("/w")).wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
