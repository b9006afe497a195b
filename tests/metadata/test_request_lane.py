"""The lane of a ZooKeeper session, on a kazoo of the test's own: what is sent when, and what each loss means to the caller.

The watches on a lane are here as well, where they depend on what the server does between two requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionLoss,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)

from cepheid_metadata import SessionLostError, StoreClosedError, StoreUnavailableError, request_lane
from cepheid_metadata.request_lane import WINDOW, RequestLane
from cepheid_metadata.watch import Watch
from cepheid_metadata.zookeeper_watches import ZooKeeperWatches
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


class Result:
    """As kazoo's, without its thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Any = None
        self.exception: Exception | None = None
        self._told: Callable[[Result], None] | None = None

    def rawlink(self, told: Callable[[Result], None]) -> None:
        self._told = told

    def answer(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.exception = value, error
        assert self._told is not None
        self._told(self)


class Client:
    def __init__(self) -> None:
        self.sent: list[Result] = []

    def send(self, name: str) -> Callable[[Any], Any]:
        def send(client: Any) -> Any:
            assert client is self
            self.sent.append(Result(name))
            return self.sent[-1]

        return send

    @property
    def names(self) -> list[str]:
        return [result.name for result in self.sent]


def new_lane(*, timeout_s: float = 10.0, patience_s: float = 10.0, connected: bool = True) -> tuple[RequestLane, Client]:
    lane, client = RequestLane("ZooKeeper", timeout_s, patience_s), Client()
    lane.client = client
    if connected:
        connect(lane, client)
        client.sent.clear()
    return lane, client


def connect(lane: RequestLane, client: Client) -> None:
    """Its first request is answered at once, so that it does not count."""
    before = len(client.sent)
    lane.connect(client.send("sync"))
    assert client.names[before] == "sync"
    client.sent.pop(before).answer()


def ask(lane: RequestLane, client: Client, name: str, *, is_write: bool = True) -> asyncio.Task[Any]:
    return asyncio.create_task(lane.ask(client.send(name), name, is_write=is_write))


async def test_no_more_than_the_window_is_on_its_way_and_the_order_is_kept() -> None:
    lane, client = new_lane()
    asking = [ask(lane, client, str(n)) for n in range(WINDOW + 50)]
    await asyncio.sleep(0)
    assert client.names == [str(n) for n in range(WINDOW)]
    asking[WINDOW + 3].cancel()
    await asyncio.sleep(0)
    for result in client.sent[:10]:
        result.answer("done")
    assert len(client.sent) == WINDOW
    lane.pump()
    assert client.names[WINDOW:] == [str(n) for n in range(WINDOW, WINDOW + 11) if n != WINDOW + 3]
    assert await asyncio.gather(*asking[:10]) == ["done"] * 10
    lane.fail_all(StoreClosedError("closed"))
    assert {type(each) for each in await asyncio.gather(*asking[10:], return_exceptions=True)} == {
        StoreClosedError,
        asyncio.CancelledError,
    }


@pytest.mark.parametrize(
    ("lost", "expected", "unknown"),
    [
        (ConnectionLoss(), StoreUnavailableError, True),
        (OperationTimeoutError(), StoreUnavailableError, True),
        (SessionMovedError(), StoreUnavailableError, True),
        (SessionExpiredError(), SessionLostError, True),
        (ConnectionClosedError(), SessionLostError, True),
        (RuntimeError("xids do not match"), StoreUnavailableError, True),
        (NoNodeError(), NoNodeError, None),
    ],
)
@pytest.mark.parametrize("is_write", [True, False])
async def test_what_a_lost_answer_means(lost: Exception, expected: type[Exception], unknown: bool | None, is_write: bool) -> None:
    lane, client = new_lane()
    asking = ask(lane, client, "x", is_write=is_write)
    await asyncio.sleep(0)
    client.sent[0].answer(error=lost)
    client.sent[0].answer(error=lost)  # kazoo may tell twice
    with pytest.raises(expected) as caught:
        await asking
    if unknown is not None:
        assert getattr(caught.value, "outcome_unknown") is (unknown and is_write)  # noqa: B009
    assert " 0 on their way" in repr(lane)


async def test_nothing_is_sent_between_the_loss_of_a_connection_and_its_return_which_begins_with_a_sync() -> None:
    lane, client = new_lane()
    first = ask(lane, client, "first")
    await asyncio.sleep(0)
    client.sent[0].answer(error=ConnectionLoss())
    second = ask(lane, client, "second")  # before anybody said that the connection is gone
    with pytest.raises(StoreUnavailableError):
        await first
    lane.pump()
    lane.suspend()
    lane.tell(client.send("nobody needs it"), "x")
    assert client.names == ["first"]
    lane.connect(client.send("sync"))
    assert client.names == ["first", "sync", "second"]
    client.sent[2].answer("done")
    assert await second == "done"


async def test_patience_ends_and_begins_anew_with_each_outage() -> None:
    lane, client = new_lane(patience_s=0.03)
    for _ in range(2):
        lane.suspend()
        lane.suspend()
        waited = ask(lane, client, "waits")
        with pytest.raises(StoreUnavailableError, match="nothing was sent") as caught:
            await waited
        assert not caught.value.outcome_unknown
        with pytest.raises(StoreUnavailableError, match="nothing was sent"):
            await lane.ask(client.send("late"), "late")
        connect(lane, client)
        assert client.sent == []


async def test_one_request_out_of_time_does_not_touch_the_others() -> None:
    lane, client = new_lane(timeout_s=0.1)
    early = ask(lane, client, "early")
    await wait_until(lambda: bool(client.sent))
    await asyncio.sleep(0.05)
    later = ask(lane, client, "later")
    with pytest.raises(StoreUnavailableError, match=r"early: no answer within 0\.1 s") as caught:
        await early
    assert caught.value.outcome_unknown
    assert not later.done()
    client.sent[1].answer("done")
    assert await later == "done"
    client.sent[0].answer("too late")
    assert " 0 on their way" in repr(lane)
    assert lane.timeouts == 1


async def test_a_request_that_never_left_was_not_sent_when_its_time_is_over() -> None:
    lane, client = new_lane(timeout_s=0.03, connected=False)
    with pytest.raises(StoreUnavailableError) as caught:
        await ask(lane, client, "x")
    assert not caught.value.outcome_unknown
    connect(lane, client)
    assert client.sent == []


async def test_who_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_lane, "MAX_WAITING", 3)
    lane, client = new_lane(connected=False)
    asking = [ask(lane, client, str(n)) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailableError, match="3 requests wait for ZooKeeper, the limit"):
        await ask(lane, client, "one too many")
    lane.refuse(SessionLostError("the session ended"))
    for each in asking:
        with pytest.raises(SessionLostError):
            await each


# Watches


class WatchedServer:
    """Executes requests as they are sent, and says everything in that order, a group for each `deliver`."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._armed: dict[str, list[Callable[[Any], None]]] = {}
        self._said: list[Callable[[], None]] = []

    def sync_async(self, path: str) -> Result:
        return self._say(Result("sync"))

    def get_async(self, path: str, watch: Callable[[Any], None] | None) -> Result:
        return self._say_of(path, watch, (b"", SimpleNamespace(version=0)))

    def get_children_async(self, path: str, watch: Callable[[Any], None] | None) -> Result:
        return self._say_of(path, watch, [])

    def exists_async(self, path: str, watch: Callable[[Any], None]) -> Result:
        self._armed.setdefault(path, []).append(watch)
        return self._say(Result("exists"), SimpleNamespace(version=0) if path in self.keys else None)

    def create(self, path: str) -> None:
        """As another session does."""
        self.keys.add(path)
        for watch in self._armed.pop(path, []):
            self._said.append(lambda watch=watch: watch(SimpleNamespace(type="CREATED")))  # type: ignore[misc]

    async def deliver(self) -> None:
        said, self._said = self._said, []
        for each in said:
            each()
        await asyncio.sleep(0)

    def _say_of(self, path: str, watch: Callable[[Any], None] | None, value: Any) -> Result:
        if path not in self.keys:
            return self._say(Result("no node"), error=NoNodeError())
        if watch is not None:
            self._armed.setdefault(path, []).append(watch)
        return self._say(Result("node"), value)

    def _say(self, result: Result, value: Any = None, error: Exception | None = None) -> Result:
        self._said.append(lambda: result.answer(value, error))
        return result


@pytest.mark.parametrize("other", ["watch", "watch_and_get"])
@pytest.mark.parametrize("first", ["watch_and_get", "watch_children"])
async def test_a_creation_is_not_missed_when_another_request_arms_the_key_first(first: str, other: str) -> None:
    """`first` is answered that there is no such key. `other` arms it after it was created, which `first` must not rely on."""
    server, lane = WatchedServer(), RequestLane("ZooKeeper", 10.0, 10.0)
    lane.client = server
    lane.connect(lambda client: client.sync_async("/"))
    watches = ZooKeeperWatches(lane, lambda key: key)
    asking: asyncio.Task[Any] = asyncio.create_task(getattr(watches, first)("/topic"))
    await asyncio.sleep(0)
    server.create("/topic")
    asking_too = asyncio.create_task(getattr(watches, other)("/topic"))
    for _ in range(10):
        await asyncio.sleep(0)
        await server.deliver()
    await asking_too
    if first == "watch_and_get":
        watch, found = await asking
        assert found is not None or watch.has_fired
    else:
        watch = await asking
        assert isinstance(watch, Watch)
        assert watch.has_fired or "/topic" in watches._armed_children
    lane.fail_all(StoreClosedError("closed"))


async def test_children_of_a_key_that_is_watched_and_not_there_are_watched_by_its_watch() -> None:
    server, lane = WatchedServer(), RequestLane("ZooKeeper", 10.0, 10.0)
    lane.client = server
    lane.connect(lambda client: client.sync_async("/"))
    watches = ZooKeeperWatches(lane, lambda key: key)
    watched = []
    for watch in (watches.watch, watches.watch_children):
        asking = asyncio.create_task(watch("/topic"))
        for _ in range(10):
            await asyncio.sleep(0)
            await server.deliver()
        assert asking.done()
        watched.append(await asking)
    server.create("/topic")
    await server.deliver()
    assert all(watch.has_fired for watch in watched)
    lane.fail_all(StoreClosedError("closed"))
