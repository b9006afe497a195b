"""What every metadata store does: the rules of store.py, run on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cepheid_metadata import (
    MAX_REQUEST_BYTES,
    BadVersionError,
    Check,
    Create,
    Delete,
    EphemeralParentError,
    InvalidKeyError,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    NotEmptyError,
    Put,
    SessionState,
    StoreClosedError,
    ValueTooLargeError,
    Versioned,
)
from tests.metadata.store_harness import Harness
from tests.support import run_async

Scenario = Callable[[MetadataStore], Awaitable[None]]


def on_store(harness: Harness, scenario: Scenario) -> None:
    async def main() -> None:
        async with harness.session() as store:
            await scenario(store)

    run_async(main())


@pytest.mark.slow
def test_versions_count_the_puts(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        assert await store.get("/a") is None
        assert await store.create("/a", b"one") == "/a"
        assert await store.get("/a") == Versioned(b"one", 0)
        assert await store.put("/a", b"two", 0) == 1
        assert await store.put("/a", b"", 1) == 2
        assert await store.get("/a") == Versioned(b"", 2)

    on_store(harness, scenario)


def test_a_deleted_key_starts_again_at_version_zero(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a", b"one")
        await store.put("/a", b"two", 0)
        await store.delete("/a", 1)
        assert not await store.exists("/a")
        await store.create("/a", b"three")
        assert await store.get("/a") == Versioned(b"three", 0)

    on_store(harness, scenario)


def test_compare_and_set_refuses_what_was_not_read(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a", b"one")
        await store.put("/a", b"two", 0)
        for write in (store.put("/a", b"x", 0), store.put("/a", b"x", 2), store.delete("/a", 0)):
            with pytest.raises(BadVersionError, match="/a has version 1"):
                await write
        with pytest.raises(KeyExistsError, match="/a exists"):
            await store.create("/a", b"x")
        for missing in (store.put("/b", b"x", 0), store.delete("/b", 0), store.delete("/b", None)):
            with pytest.raises(NoSuchKeyError, match="/b does not exist"):
                await missing
        assert await store.get("/a") == Versioned(b"two", 1)

    on_store(harness, scenario)


def test_parents_are_made_and_stay(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a/b/c", b"leaf")
        assert await store.get("/a") == Versioned(b"", 0)
        assert await store.get("/a/b") == Versioned(b"", 0)
        await store.put("/a/b", b"has a value too", 0)
        await store.delete("/a/b/c", None)
        assert await store.get("/a/b") == Versioned(b"has a value too", 1)
        assert await store.children("/a/b") == []

    on_store(harness, scenario)


def test_children_are_sorted_names_of_one_level(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        # `a-x` sorts before `a/…` as text, and must not slip into the listing of `/t/a`.
        for key in ("/t/b", "/t/a/deep/er", "/t/a/x", "/t/a-x", "/t/a.x", "/t/0", "/u"):
            await store.create(key, b"")
        assert await store.children("/t") == ["0", "a", "a-x", "a.x", "b"]
        assert await store.children("/t/a") == ["deep", "x"]
        assert await store.children("/t/a/x") == []
        assert await store.children("/") == ["t", "u"]
        with pytest.raises(NoSuchKeyError, match="/t/c does not exist"):
            await store.children("/t/c")

    on_store(harness, scenario)


def test_the_root_is_always_there(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        assert await store.children("/") == []

    on_store(harness, scenario)


def test_a_key_with_children_cannot_be_deleted(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a/b", b"")
        with pytest.raises(NotEmptyError, match="/a has 1 children"):
            await store.delete("/a", None)
        await store.delete("/a/b", 0)
        await store.delete("/a", 0)
        assert await store.children("/") == []

    on_store(harness, scenario)


def test_sequential_keys_rise_and_never_repeat(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        made = [await store.create("/q/n-", b"", sequential=True) for _ in range(3)]
        assert [len(key) for key in made] == [len("/q/n-") + 10] * 3
        await store.delete(made[2], None)
        made.append(await store.create("/q/other-", b"", sequential=True))
        numbers = [int(key[-10:]) for key in made]
        assert numbers == sorted(set(numbers))

    on_store(harness, scenario)


async def test_ephemeral_keys_end_with_their_session(harness: Harness) -> None:
    async with harness.session() as store:
        await store.create("/live/a", b"", ephemeral=True)
        await store.create("/live/n-", b"", ephemeral=True, sequential=True)
        await store.create("/live/stays", b"")
        await store.multi([Create("/live/b", b"", ephemeral=True)])
        with pytest.raises(EphemeralParentError, match="/live/a is ephemeral"):
            await store.create("/live/a/child", b"")
        await store.delete("/live/b", 0)
        names = await store.children("/live")
        assert [name.rstrip("0123456789") for name in names] == ["a", "n-", "stays"]
    async with harness.session() as store:
        assert await store.children("/live") == ["stays"]
        await store.create("/live/a", b"again", ephemeral=True)


def test_multi_deletes_a_parent_after_its_children(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.multi([Create("/p", b""), Create("/p/a", b""), Create("/p/b", b"")])
        await store.multi([Delete("/p/a", 0), Delete("/p/b", 0), Delete("/p", 0)])
        assert not await store.exists("/p")
        assert "p" not in await store.children("/")

    on_store(harness, scenario)


def test_multi_answers_each_operation(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a", b"one")
        ops = [
            Check("/a", 0),
            Put("/a", b"two", 0),
            Create("/b/c", b"c"),
            Create("/q/n-", b"", sequential=True),
            Delete("/b/c"),
            Put("/a", b"three", 1),
        ]
        assert await store.multi(ops) == [None, 1, "/b/c", "/q/n-0000000000", None, 2]
        assert await store.get("/a") == Versioned(b"three", 2)
        assert not await store.exists("/b/c")
        assert await store.multi([]) == []

    on_store(harness, scenario)


@pytest.mark.parametrize(
    ("failing", "error_type"),
    [
        (Check("/a", 1), BadVersionError),
        (Check("/none", 0), NoSuchKeyError),
        (Create("/a", b""), KeyExistsError),
        (Put("/a", b"", 7), BadVersionError),
        (Delete("/parent"), NotEmptyError),
    ],
)
def test_multi_is_all_or_nothing(harness: Harness, failing: Check | Create | Put | Delete, error_type: type[MetadataError]) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/a", b"one")
        await store.create("/parent/child", b"")
        with pytest.raises(error_type) as caught:
            await store.multi([Create("/new", b""), Delete("/parent/child"), Create("/parent/x", b""), failing, Create("/z", b"")])
        assert caught.value.op_index == 3
        assert not await store.exists("/new")
        assert await store.children("/parent") == ["child"]
        assert await store.get("/a") == Versioned(b"one", 0)

    on_store(harness, scenario)


def test_requests_above_the_limit_are_refused(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        largest = b"x" * (MAX_REQUEST_BYTES - len("/a"))
        await store.create("/a", largest)
        assert await store.get("/a") == Versioned(largest, 0)
        with pytest.raises(ValueTooLargeError, match="the limit is 1000000"):
            await store.put("/a", largest + b"x", 0)
        half = largest[: MAX_REQUEST_BYTES // 2]
        with pytest.raises(ValueTooLargeError, match="a multi of 2 operations"):
            await store.multi([Create("/b", half), Create("/c", half)])
        assert await store.children("/") == ["a"]

    on_store(harness, scenario)


BAD_KEYS = ["", "a", "a/b", "/a/", "//a", "/a//b", "/a/./b", "/a/..", "/ö", "/a b", "/a\n", "/\x00", "/" + "x" * 9000]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused_everywhere(harness: Harness, key: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        calls = (
            store.get(key),
            store.exists(key),
            store.children(key),
            store.create(key, b""),
            store.put(key, b"", 0),
            store.delete(key, None),
            store.multi([Check(key, 0)]),
            store.watch(key),
            store.watch_children(key),
            store.sync(key),
        )
        for call in calls:
            with pytest.raises(InvalidKeyError):
                await call

    on_store(harness, scenario)


def test_only_one_of_many_creates_wins(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        results = await asyncio.gather(*(store.create("/lock", b"%d" % n) for n in range(100)), return_exceptions=True)
        winners = [n for n, result in enumerate(results) if result == "/lock"]
        assert len(winners) == 1
        assert sum(isinstance(result, KeyExistsError) for result in results) == 99
        assert await store.get("/lock") == Versioned(b"%d" % winners[0], 0)

    on_store(harness, scenario)


@pytest.mark.slow
def test_no_compare_and_set_is_lost_among_many(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create("/n", b"0")

        async def add_one() -> None:
            while True:
                found = await store.get("/n")
                assert found is not None
                try:
                    await store.put("/n", b"%d" % (int(found.value) + 1), found.version)
                    return
                except BadVersionError:
                    continue

        await asyncio.gather(*(add_one() for _ in range(40)))
        assert await store.get("/n") == Versioned(b"40", 40)

    on_store(harness, scenario)


def test_sync_is_allowed_on_keys_that_are_not_there(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.sync("/nothing/here")
        assert await store.get("/nothing/here") is None
        assert await store.get("/nothing") is None

    on_store(harness, scenario)


async def test_a_closed_store_refuses_by_name(harness: Harness) -> None:
    async with harness.session() as store:
        watch = await store.watch("/a")
        waiting = asyncio.create_task(watch.wait())
        await asyncio.sleep(0)
        await store.aclose()
        await store.aclose()
        with pytest.raises(StoreClosedError):
            await waiting
        for call in (store.get("/a"), store.create("/a", b""), store.watch("/a"), store.sync("/a"), store.children("/")):
            with pytest.raises(StoreClosedError):
                await call


def test_a_store_starts_connected(harness: Harness) -> None:
    async def scenario(store: MetadataStore) -> None:
        assert store.session_state is SessionState.CONNECTED

    on_store(harness, scenario)
