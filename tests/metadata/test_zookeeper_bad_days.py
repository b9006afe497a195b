"""The ZooKeeper store when things break: a real server that restarts or stands still, and a proxy that loses connectivity."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cepheid_dev.zookeeper_server import ZooKeeperServer
from cepheid_metadata import (
    AccessDeniedError,
    Create,
    LedgerIds,
    SessionLostError,
    SessionState,
    StoreClosedError,
    StoreOpenError,
    StoreUnavailableError,
    Versioned,
    zookeeper_watches,
)
from cepheid_metadata.kazoo_connection import Digest
from cepheid_metadata.zookeeper_store import ZooKeeperStore
from cepheid_ports import Ports
from tests.support import free_port, run_async, wait_until
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_support import new_chroot, shared_zookeeper

SHORT_S = 3.0  # session timeout of tests that wait for its end
OUTLIVES_S = 8.0  # of one that survives a server that comes back: its JVM may take seconds between starting and taking connections
CONNECTED, SUSPENDED, LOST = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.LOST


@pytest.fixture
def root() -> str:
    return new_chroot()


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    with TcpProxy(shared_zookeeper().address) as made:
        yield made


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """For tests that stop it; they leave it running."""
    server = ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"), free_port())
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def opened(
    address: str, root: str, *, session_timeout_s: float = 15.0, request_timeout_s: float | None = None, patience_s: float = 10.0
) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.open(
        [address],
        Ports(),
        root=root,
        session_timeout_s=session_timeout_s,
        request_timeout_s=request_timeout_s,
        patience_s=patience_s,
    )
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def watched_and_watcher(proxy: TcpProxy, root: str) -> AsyncIterator[tuple[ZooKeeperStore, ZooKeeperStore]]:
    """One behind the proxy, with a short session, and one that looks on."""
    async with opened(shared_zookeeper().address, root) as other:
        async with opened(proxy.address, root, session_timeout_s=SHORT_S) as store:
            yield store, other


def history_of(store: ZooKeeperStore) -> list[SessionState]:
    states: list[SessionState] = []
    store.subscribe(states.append)
    return states


async def wait_for_state(store: ZooKeeperStore, state: SessionState, timeout_s: float = 30.0) -> None:
    await wait_until(lambda: store.session_state is state, timeout_s, f"{store!r} {state.value}")


def zookeeper_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zookeeper")]


# Outages of the server.


@pytest.mark.slow
async def test_a_restart_of_the_server_is_a_pause(own_server: ZooKeeperServer, root: str) -> None:
    async with opened(own_server.address, root, patience_s=15) as store:
        states = history_of(store)
        await store.create("/mine", b"", ephemeral=True)
        watch = await store.watch("/mine")
        own_server.kill()
        await wait_for_state(store, SUSPENDED)
        waiting = asyncio.create_task(store.create("/while-it-was-down", b"x"))
        await asyncio.sleep(0)
        own_server.start()
        assert await waiting == "/while-it-was-down"  # it had patience
        assert states == [SUSPENDED, CONNECTED]
        assert await store.exists("/mine")
        assert watch.has_fired  # perhaps for nothing, but it cannot have missed anything
        assert store.statistics()["sessions"] == 1


@pytest.mark.slow
async def test_an_outage_longer_than_the_session_timeout_ends_no_session(own_server: ZooKeeperServer, root: str) -> None:
    async with opened(own_server.address, root, session_timeout_s=OUTLIVES_S, patience_s=0.3) as store:
        states = history_of(store)
        await store.create("/mine", b"", ephemeral=True)
        own_server.kill()
        await wait_for_state(store, SUSPENDED)
        outage_ends = asyncio.get_running_loop().time() + 1.1 * OUTLIVES_S
        with pytest.raises(StoreUnavailableError, match=r"nothing was sent \(Connection dropped: ") as caught:
            await store.create("/refused", b"")
        assert not caught.value.outcome_unknown
        with pytest.raises(StoreUnavailableError):
            await store.get("/mine")
        await asyncio.sleep(outage_ends - asyncio.get_running_loop().time())
        own_server.start()
        await wait_for_state(store, CONNECTED)
        assert states == [SUSPENDED, CONNECTED]
        assert await store.exists("/mine")
        assert not await store.exists("/refused")


@pytest.mark.slow
async def test_a_server_that_stands_still_is_noticed_and_survived(own_server: ZooKeeperServer, root: str) -> None:
    async with opened(own_server.address, root, session_timeout_s=SHORT_S) as store:
        states = history_of(store)
        await store.create("/a", b"0")
        own_server.pause()
        try:
            with pytest.raises(StoreUnavailableError) as caught:
                await store.put("/a", b"1", 0)
            assert caught.value.outcome_unknown  # the bytes are in the server's socket
            await wait_for_state(store, SUSPENDED)
        finally:
            own_server.resume()
        await wait_until(lambda: states[-1] is CONNECTED, what="the session after the pause")
        found = await store.get("/a")
        assert found in (Versioned(b"0", 0), Versioned(b"1", 1))
        assert await store.put("/a", b"2", found.version) == found.version + 1


async def test_nobody_there_is_an_error_that_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreOpenError, match=rf"no session on ZooKeeper at {address}/r within 0\.3 s .*Connection refused"):
        await ZooKeeperStore.open([address], Ports(), root="/r", open_timeout_s=0.3)
    assert not zookeeper_threads()


# The end of a session.


@pytest.mark.slow
async def test_an_expired_session_is_lost_and_then_replaced(proxy: TcpProxy, root: str) -> None:
    async with (
        opened(shared_zookeeper().address, root) as other,
        opened(proxy.address, root, session_timeout_s=SHORT_S) as store,
    ):
        states = history_of(store)
        old_key_at: dict[SessionState, asyncio.Task[bool]] = {}
        store.subscribe(lambda state: old_key_at.update({state: asyncio.create_task(other.exists("/brokers/me"))}))
        await store.create("/brokers/me", b"", ephemeral=True)
        watch, child_watch = await store.watch("/x"), await store.watch_children("/x")
        gone = await other.watch("/brokers/me")
        proxy.stall()
        await gone.wait()  # the server gave the session up
        assert states in ([], [SUSPENDED])  # nobody has told us
        proxy.refuse()
        await wait_for_state(store, SUSPENDED)
        proxy.heal()
        await wait_until(lambda: states[-1] is CONNECTED, what="a new session")
        assert states == [SUSPENDED, LOST, CONNECTED]
        for each in (watch, child_watch):
            with pytest.raises(SessionLostError):
                await each.wait()
        assert not await old_key_at[CONNECTED]
        assert await store.create("/brokers/me", b"again", ephemeral=True) == "/brokers/me"
        assert store.statistics()["sessions"] == 2


@pytest.mark.slow
async def test_between_two_sessions_everything_is_refused_by_name(
    proxy: TcpProxy, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        opened(shared_zookeeper().address, root) as other,
        opened(proxy.address, root, session_timeout_s=SHORT_S) as store,
    ):
        states = history_of(store)
        await store.create("/mine", b"", ephemeral=True)
        gone = await other.watch("/mine")
        proxy.stall()
        await gone.wait()
        release = asyncio.Event()
        forget = store._forget_old_keys

        async def forget_later() -> None:  # as if the server still were at ending the old session
            await release.wait()
            await forget()

        monkeypatch.setattr(store, "_forget_old_keys", forget_later)
        proxy.cut()
        proxy.heal()
        await wait_for_state(store, LOST)
        await wait_until(lambda: store.statistics()["sessions"] == 2, what="a new session")
        for call in (store.get("/a"), store.create("/a", b""), store.watch("/a"), store.sync("/a")):
            with pytest.raises(SessionLostError):
                await call
        assert states[-1] is LOST
        release.set()
        await wait_for_state(store, CONNECTED)
        assert await store.create("/a", b"") == "/a"


async def test_connected_waits_for_the_end_of_the_old_sessions_keys(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as owner, opened(shared_zookeeper().address, root) as store:
        await owner.create("/old", b"", ephemeral=True)
        # As if `store` had owned it in a session that the server is about to end.
        store._old_keys["/old"] = None
        store._old_sessions.add(owner._session_id)
        begun = asyncio.create_task(store._begin_session(store._connection_changes))
        await asyncio.sleep(0.1)
        assert not begun.done()
        await owner.aclose()
        await begun
        assert not await store.exists("/old")


@pytest.mark.slow
async def test_a_client_that_gave_up_is_replaced(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as store:
        states = history_of(store)
        await store.create("/mine", b"", ephemeral=True)
        await store._worker.run(store._connection.client.stop)  # as kazoo does after an error of its own
        await wait_until(lambda: states[-1:] == [CONNECTED], what="a new client")
        assert states == [LOST, CONNECTED]
        assert not await store.exists("/mine")
        assert len(zookeeper_threads()) == 2  # its connection and its worker


# Lost and late answers.


async def test_a_write_whose_answer_is_lost_may_have_happened(proxy: TcpProxy, root: str) -> None:
    async with opened(shared_zookeeper().address, root) as other, opened(proxy.address, root) as store:
        await store.create("/a", b"0")
        changed = await other.watch("/a")
        proxy.drop_answers()
        writing = asyncio.create_task(store.put("/a", b"1", 0))
        reading = asyncio.create_task(store.get("/a"))
        await changed.wait()
        await wait_until(lambda: proxy.lost_bytes > 0, what="the loss of the answer")
        proxy.heal()  # which breaks the connection that lost the answer
        with pytest.raises(StoreUnavailableError, match="write /a: the connection was lost before the answer") as caught:
            await writing
        assert caught.value.outcome_unknown
        with pytest.raises(StoreUnavailableError) as caught:
            await reading
        assert not caught.value.outcome_unknown
        assert await store.get("/a") == Versioned(b"1", 1)  # reading again decides


async def test_a_write_that_never_arrived_looks_the_same_and_is_not_sent_again(proxy: TcpProxy, root: str) -> None:
    async with opened(proxy.address, root) as store:
        await store.create("/a", b"0")
        proxy.stall()
        writing = asyncio.create_task(store.put("/a", b"1", 0))
        await wait_until(lambda: store._lane._on_their_way == 1)
        proxy.cut()
        proxy.heal()
        with pytest.raises(StoreUnavailableError) as caught:
            await writing
        assert caught.value.outcome_unknown
        assert await store.get("/a") == Versioned(b"0", 0)
        assert await store.put("/a", b"2", 0) == 1


async def test_a_write_held_up_on_the_way_cannot_happen_after_the_reading_that_decided(proxy: TcpProxy, root: str) -> None:
    with TcpProxy(shared_zookeeper().address) as other_way:
        other_way.refuse()
        store = await ZooKeeperStore.open([proxy.address, other_way.address], Ports(), root=root, session_timeout_s=12)
        try:
            states = history_of(store)
            await store.create("/a", b"0")
            other_way.heal()
            proxy.stall()
            proxy.refuse(cut=False)
            writing = asyncio.create_task(store.put("/a", b"1", 0))
            await wait_until(lambda: proxy.held_bytes > 0, what="the write in the proxy")
            store._connection.cut()  # the client's side of the connection; what it sent is still on its way
            with pytest.raises(StoreUnavailableError):
                await writing
            assert await store.get("/a") == Versioned(b"0", 0)  # by the other way, in the same session
            await wait_until(lambda: proxy.open_connections == 0, what="the end of the old connection, by the server")
            proxy.heal()
            await store.sync("/a")
            assert await store.get("/a") == Versioned(b"0", 0)
            assert states == [SUSPENDED, CONNECTED]
            assert other_way.connections == 1
        finally:
            await store.aclose()


@pytest.mark.slow
async def test_silence_is_noticed_within_the_session_timeout(proxy: TcpProxy, root: str) -> None:
    async with opened(proxy.address, root, session_timeout_s=OUTLIVES_S) as store:
        states = history_of(store)
        proxy.stall()
        await wait_for_state(store, SUSPENDED, 2 * OUTLIVES_S)
        proxy.heal()
        await wait_until(lambda: states[-1] is CONNECTED, what="the session after the silence")
        await store.create("/a", b"")


async def test_a_late_answer_is_a_timeout_and_then_nothing(proxy: TcpProxy, root: str) -> None:
    async with opened(proxy.address, root, request_timeout_s=0.2) as store:
        await store.create("/a", b"0")
        proxy.stall()
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.2 s") as caught:
            await store.put("/a", b"1", 0)
        assert caught.value.outcome_unknown
        proxy.heal()
        await wait_until(lambda: store._lane._on_their_way == 0)
        assert await store.get("/a") == Versioned(b"1", 1)
        assert store.statistics()["request_timeouts"] == 1


async def test_a_cancelled_caller_leaves_nothing_behind(proxy: TcpProxy, root: str) -> None:
    async with opened(proxy.address, root) as store:
        proxy.stall()
        callers = [asyncio.create_task(store.create(f"/c/{n}", b"")) for n in range(300)]
        await wait_until(lambda: store._lane._on_their_way == 128)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        proxy.heal()
        await wait_until(lambda: store._lane._on_their_way == 0)
        assert repr(store._lane) == "<RequestLane connected, 0 waiting, 0 on their way>"
        await store.create("/after", b"")
        assert not store._lane._by_age


@pytest.mark.slow
async def test_a_stalled_server_does_not_stall_the_loop(proxy: TcpProxy, root: str) -> None:
    async with opened(proxy.address, root) as store:
        await store.create("/n", b"")
        proxy.stall()
        value = bytes(10_000)  # far more than sockets hold
        callers = [asyncio.create_task(store.create(f"/n/{n}", value)) for n in range(2_000)]
        loop = asyncio.get_running_loop()
        longest_s, last = 0.0, loop.time()
        for _ in range(100):
            await asyncio.sleep(0.002)
            longest_s, last = max(longest_s, loop.time() - last), loop.time()
        assert longest_s < 10  # a loop that waits for the server waits for ever: only this test heals the connection
        proxy.heal()
        assert len(await asyncio.gather(*callers)) == 2_000


# Watches and reads.


async def test_a_watch_survives_a_reconnect_and_misses_nothing(proxy: TcpProxy, root: str) -> None:
    async with opened(shared_zookeeper().address, root) as other, opened(proxy.address, root) as store:
        await store.create("/w/a", b"")
        watches = [await store.watch("/w/a"), await store.watch("/w/none"), await store.watch_children("/w")]
        proxy.refuse()
        await wait_for_state(store, SUSPENDED)
        await other.put("/w/a", b"changed", 0)
        assert not [watch for watch in watches if watch.has_fired]
        proxy.heal()
        for watch in watches:
            await watch.wait()
        again = await store.watch("/w/a")  # at the server, not only in our books
        await other.put("/w/a", b"changed again", 1)
        await again.wait()


async def test_a_second_watch_joins_the_first_without_a_request(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as store:
        first = await store.watch("/a")
        before = store.statistics()["requests"]
        second = await store.watch("/a")
        assert store.statistics()["requests"] == before
        await store.create("/a", b"")
        assert first.has_fired
        assert second.has_fired
        third = await store.watch("/a")
        assert store.statistics()["requests"] == before + 2
        await store.put("/a", b"", 0)
        assert third.has_fired


async def test_a_key_is_watched_and_read_with_one_request(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as store:
        await store.create("/a", b"x")
        before = store.statistics()["requests"]
        watch, found = await store.watch_and_get("/a")
        assert found == Versioned(b"x", 0)
        assert store.statistics()["requests"] == before + 1
        joined = await store.watch("/a")
        assert store.statistics()["requests"] == before + 1
        await store.delete("/a", 0)
        assert watch.has_fired
        assert joined.has_fired


async def test_watches_that_nobody_waits_for_are_removed_from_the_server(
    own_server: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_watches, "MAX_UNUSED", 3)
    async with opened(own_server.address, root) as store:

        async def watched_at_server() -> int:
            told = await asyncio.to_thread(own_server.ask, "mntr")
            return int(next(line.split()[1] for line in str(told).splitlines() if line.startswith("zk_watch_count")))

        before = await watched_at_server()
        await store.create("/k/there", b"")
        kept = await store.watch("/k/there")
        for n in range(20):
            for key in (f"/k/none-{n}", "/k"):
                (await store.watch(key)).cancel()
                (await store.watch_children(key)).cancel()
        cancelled = asyncio.create_task(store.watch("/k/late"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await store.sync("/k")
        assert store.statistics()["watches_at_server"] <= 1 + 2 * 3
        deadline = asyncio.get_running_loop().time() + 10  # removals may be on their way
        while (there := await watched_at_server() - before) != (told := store.statistics()["watches_at_server"]):
            assert asyncio.get_running_loop().time() < deadline, f"{there} at the server, {told} by our account"
        again = [await store.watch("/k/none-0"), await store.watch_children("/k"), await store.watch("/k/none-19")]
        await store.create("/k/none-0", b"")
        await store.create("/k/none-19", b"")
        assert [watch.has_fired for watch in again] == [True] * 3
        await store.put("/k/there", b"", 0)
        assert kept.has_fired


async def test_sync_asks_the_server(proxy: TcpProxy, root: str) -> None:
    async with opened(shared_zookeeper().address, root) as other, opened(proxy.address, root) as store:
        proxy.stall()
        syncing = asyncio.create_task(store.sync("/a"))
        await other.create("/a", b"new")
        done, _ = await asyncio.wait([syncing], timeout=0.1)
        assert not done
        proxy.heal()
        await syncing
        assert await store.get("/a") == Versioned(b"new", 0)


async def test_ten_thousand_children_in_one_listing(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as store:
        names = [f"child-{n:05d}" for n in range(10_000)]
        for first in range(0, len(names), 500):
            await store.multi([Create(f"/many/{name}", b"") for name in names[first : first + 500]])
        assert await store.children("/many") == names
        watch = await store.watch_children("/many")
        await store.delete("/many/child-00007", 0)
        assert watch.has_fired
        assert len(await store.children("/many")) == 9_999


# Order, parents, identifiers.


async def test_requests_are_executed_in_the_order_of_asking(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as store:
        first = asyncio.create_task(store.create("/n", b""))
        puts = [asyncio.create_task(store.put("/n", b"%d" % version, version)) for version in range(400)]
        last = asyncio.create_task(store.get("/n"))
        assert await first == "/n"
        assert await asyncio.gather(*puts) == list(range(1, 401))
        assert await last == Versioned(b"399", 400)


@pytest.mark.slow
async def test_many_creates_below_the_same_missing_parents(root: str) -> None:
    async with opened(shared_zookeeper().address, root) as one, opened(shared_zookeeper().address, root) as other:
        made = await asyncio.gather(*((one, other)[n % 2].create(f"/fresh/a/b/{n:03d}", b"") for n in range(200)))
        assert await one.children("/fresh/a/b") == [key[-3:] for key in sorted(made)]


async def test_ledger_ids_of_two_processes_never_meet(proxy: TcpProxy, root: str) -> None:
    async with opened(shared_zookeeper().address, root) as one, opened(proxy.address, root) as other:
        ids = [LedgerIds(one, block=5), LedgerIds(other, block=5)]
        taken: list[int] = []

        async def take(count: int, of: LedgerIds) -> None:
            for _ in range(count):
                try:
                    taken.append(await of.take())
                except StoreUnavailableError:
                    pass  # at worst a block stays unused

        async with asyncio.TaskGroup() as group:
            for n in range(8):
                group.create_task(take(40, ids[n % 2]))
            for _ in range(5):
                await asyncio.sleep(0.02)
                proxy.cut()
        assert len(set(taken)) == len(taken) > 160


# The end of the store.


@pytest.mark.slow
@pytest.mark.parametrize("breakage", ["nothing", "stall", "refuse"])
def test_closing_is_prompt_and_leaves_no_thread(proxy: TcpProxy, root: str, breakage: str) -> None:
    async def main() -> None:
        async with opened(proxy.address, root, session_timeout_s=20) as store:
            await store.create("/mine", b"", ephemeral=True)
            if breakage == "stall":
                proxy.stall()
            elif breakage == "refuse":
                proxy.refuse()
                await wait_for_state(store, SUSPENDED)
            asking = asyncio.create_task(store.get("/mine"))
            await asyncio.sleep(0)
            began = asyncio.get_running_loop().time()
            await store.aclose()
            assert asyncio.get_running_loop().time() - began < 15  # and not for the end of the session
            if breakage == "nothing":
                assert await asking is not None  # it was under way, and the server answered
            else:
                with pytest.raises((StoreClosedError, StoreUnavailableError)):
                    await asking
        async with opened(shared_zookeeper().address, root) as other:
            assert await other.exists("/mine") is (breakage != "nothing")  # else: when the session times out

    run_async(main())
    assert not zookeeper_threads()


def test_a_loop_that_ends_without_closing_hears_nothing_more(proxy: TcpProxy, root: str, caplog: pytest.LogCaptureFixture) -> None:
    stores: list[ZooKeeperStore] = []

    async def main() -> None:
        store = await ZooKeeperStore.open([proxy.address], Ports(), root=root)
        stores.append(store)
        await store.watch("/a")
        await store._worker.aclose()

    asyncio.run(main())
    proxy.cut()  # events for a loop that is gone
    stores[0]._connection.stop()
    assert not zookeeper_threads()
    assert not caplog.records


# Credentials.


def test_what_a_user_makes_is_for_that_user_and_its_password_is_nowhere(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    logging.getLogger("kazoo").setLevel(1)
    address, told = shared_zookeeper().address, []

    async def main() -> None:
        digest = Digest("cepheid", "s3cret-word")
        store = await ZooKeeperStore.open([address], Ports(), root=root, digest=digest)
        stranger = await ZooKeeperStore.open([address], Ports(), root=root + "x")
        wrong = await ZooKeeperStore.open([address], Ports(), root=root + "y", digest=Digest("cepheid", "s3cret-w0rd"))
        try:
            await store.create("/a/b", b"mine")
            assert await store.get("/a/b") == Versioned(b"mine", 0)
            for other in (stranger, wrong):
                other._tree._root = root
                for call in (other.get("/a/b"), other.put("/a/b", b"", 0), other.create("/a/c", b""), other.children("/a")):
                    with pytest.raises(AccessDeniedError, match="ZooKeeper denies access") as caught:
                        await call
                    told.append(f"{caught.value!r} {caught.value}")
            told.append(f"{store!r} {digest!r} {store._connection!r} {store._lane!r}")
        finally:
            for each in (store, stranger, wrong):
                await each.aclose()

    run_async(main())
    assert "s3cret" not in " ".join(told)
    assert "s3cret" not in caplog.text


@pytest.mark.slow
def test_without_a_root_zookeepers_own_nodes_are_not_listed(tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path, free_port())
    server.start()

    async def main() -> None:
        async with opened(server.address, "") as store:
            assert await store.children("/") == []
            await store.create("/a", b"")
            assert await store.children("/") == ["a"]

    try:
        run_async(main())
    finally:
        server.kill()
