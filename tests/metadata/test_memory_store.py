"""Several sessions on one tree in memory, and how a session ends."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_metadata import MemoryStore, MemoryTree, SessionLostError, SessionState, Versioned


async def test_sessions_share_the_tree_and_each_other_s_watches() -> None:
    tree = MemoryTree()
    one, other = MemoryStore(tree), MemoryStore(tree)
    watch = await one.watch("/a")
    await other.create("/a", b"from the other")
    assert watch.has_fired
    assert await one.get("/a") == Versioned(b"from the other", 0)


async def test_an_expired_session_loses_its_ephemeral_keys_and_only_those() -> None:
    tree = MemoryTree()
    one, other = MemoryStore(tree), MemoryStore(tree)
    await one.create("/live/one", b"", ephemeral=True)
    await other.create("/live/other", b"", ephemeral=True)
    watch = await other.watch_children("/live")
    one.expire_session()
    assert watch.has_fired
    assert await other.children("/live") == ["other"]


async def test_after_expiry_everything_is_refused_until_there_is_a_new_session() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    heard: list[SessionState] = []
    end_subscription = store.subscribe(heard.append)
    waiting = asyncio.create_task((await store.watch("/a")).wait())
    await asyncio.sleep(0)
    store.expire_session()
    with pytest.raises(SessionLostError, match="session 1 expired"):
        await waiting
    for call in (store.get("/a"), store.create("/a", b""), store.children("/"), store.watch("/a"), store.sync("/a")):
        with pytest.raises(SessionLostError, match="no new one yet"):
            await call
    store.renew_session()
    assert heard == [SessionState.LOST, SessionState.CONNECTED]
    await store.create("/a", b"", ephemeral=True)
    end_subscription()
    end_subscription()
    store.expire_session()
    assert len(heard) == 2
    assert "/a" not in tree.nodes
    await store.aclose()


async def test_a_failing_subscriber_does_not_silence_the_others() -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    store = MemoryStore(MemoryTree())
    heard: list[SessionState] = []

    def fail(state: SessionState) -> None:
        raise ValueError(state)

    store.subscribe(fail)
    store.subscribe(heard.append)
    store.expire_session()
    assert heard == [SessionState.LOST]
    assert isinstance(reported[0]["exception"], ValueError)
