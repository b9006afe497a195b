"""Table views: the latest value of each key."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

import cepheid
import cepheid.sync
from cepheid.connection import Connection
from cepheid.errors import refused
from cepheid_wire import ServerError
from tests.client.conftest import TIMEOUT_S, ClusterThread
from tests.support import wait_until


async def test_it_has_the_latest_value_of_each_key(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str) as producer:
        for key, value in [("tea", "1"), ("milk", "2"), ("tea", "3"), (None, "no key"), ("sugar", "4")]:
            await producer.send(value, key=key)
        await producer.send(None, key="sugar")
        async with client.table_view(topic, schema=str) as view:
            assert dict(view) == {"tea": "3", "milk": "2"}
            assert view.get("sugar") is None
            assert "sugar" not in view
            assert len(view) == 2
            with pytest.raises(KeyError):
                view["sugar"]
            message = view.message("tea")
            assert message is not None
            assert message.value == "3"
            await producer.send("5", key="bread")
            await view.refresh()
            assert view["bread"] == "5"
        with pytest.raises(cepheid.ClosedError):
            view.get("tea")


async def test_it_follows_all_partitions_and_an_unloaded_topic(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 3)
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str) as producer:
        async with client.table_view(topic, schema=str) as view:
            assert dict(view) == {}
            for number in range(20):
                await producer.send(str(number), key=f"key-{number % 10}")
            await asyncio.to_thread(cluster.unload, topic)
            await producer.send("new", key="key-0")
            await view.refresh()
            assert dict(view) == {**{f"key-{number}": str(number + 10) for number in range(1, 10)}, "key-0": "new"}


async def test_a_refresh_does_not_wait_for_a_message_that_came_while_it_asked(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url, request_timeout_s=5.0) as client, client.producer(topic) as producer:
        async with client.table_view(topic) as view:
            (link,) = view._consumer.links.values()
            ask = link.has_message_available

            async def answer_late() -> bool:
                link.has_message_available = ask  # type: ignore[method-assign]
                await producer.send(b"1", key="a")
                await wait_until(lambda: "a" in view)
                return True  # as it was when the broker answered

            link.has_message_available = answer_late  # type: ignore[method-assign]
            await view.refresh()


async def test_a_refresh_asks_again_while_the_topic_is_being_unloaded(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.table_view(topic) as view:
        (link,) = view._consumer.links.values()
        request = link._request

        async def ask_early(_connection: Connection, _ask: Any, what: str) -> Any:
            link._request = request  # type: ignore[method-assign]
            raise refused(ServerError.SERVICE_NOT_READY, "the topic is being unloaded", what)

        link._request = ask_early  # type: ignore[method-assign]
        await view.refresh()


async def test_a_refresh_asks_again_after_the_broker_has_closed_the_consumer(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.table_view(topic) as view:
        (link,) = view._consumer.links.values()
        request = link._request

        async def ask_late(connection: Connection, ask: Any, what: str) -> Any:
            link._request = request  # type: ignore[method-assign]
            unloading = asyncio.create_task(asyncio.to_thread(cluster.unload, topic))
            await wait_until(lambda: link.connection is None)
            try:
                return await request(connection, ask, what)
            finally:
                await unloading

        link._request = ask_late  # type: ignore[method-assign]
        await view.refresh()


async def test_a_slow_watcher_gets_each_key_once_with_its_latest_value(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str) as producer:
        async with client.table_view(topic, schema=str) as view:
            changes = view.watch()
            first = asyncio.create_task(anext(changes))
            await asyncio.sleep(0)
            await producer.send("1", key="a")
            assert (await asyncio.wait_for(first, TIMEOUT_S)).value == "1"
            for number in range(2, 6):
                await producer.send(str(number), key="a")
            await producer.send("x", key="b")
            await producer.send(None, key="b")
            await view.refresh()
            assert [(change.key, change.value) for change in [await anext(changes), await anext(changes)]] == [
                ("a", "5"),
                ("b", None),
            ]
            ended = asyncio.create_task(anext(changes, None))
            await asyncio.sleep(0)
        assert await asyncio.wait_for(ended, TIMEOUT_S) is None, "it ends with the view"


async def test_a_watch_that_is_abandoned_is_forgotten(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str) as producer:
        async with client.table_view(topic, schema=str) as view:

            async def first_change() -> str | None:
                async for change in view.watch():
                    return change.value
                return None

            watching = asyncio.create_task(first_change())
            await asyncio.sleep(0)
            await producer.send("1", key="a")
            assert await asyncio.wait_for(watching, TIMEOUT_S) == "1"
            await wait_until(lambda: not view._watches)
            await producer.send("2", key="a")
            await view.refresh()
            assert view["a"] == "2"


class Text(cepheid.Schema[str]):
    """Text on a topic of bytes: the broker is told nothing of it."""

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, payload: bytes, writer: cepheid.TopicSchema | None = None) -> str:
        return cepheid.StringSchema().decode(payload)


async def test_a_value_that_cannot_be_read_is_an_error_of_its_key_alone(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        await producer.send(b"\xff", key="bad")
        await producer.send(b"fine", key="good")
        async with client.table_view(topic, schema=Text()) as view:
            assert view["good"] == "fine"
            with pytest.raises(cepheid.UnreadableMessageError):
                view["bad"]


async def test_a_view_of_a_closed_client_shows_no_old_state(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url, request_timeout_s=2.0) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"1", key="a")
        async with client.table_view(topic) as view:
            changes = view.watch()
            watching = asyncio.create_task(anext(changes))
            await client.close()
            with pytest.raises(StopAsyncIteration):
                await watching
            with pytest.raises(cepheid.ClosedError):
                dict(view)


def test_the_blocking_view(cluster: ClusterThread, topic: str) -> None:
    with cepheid.sync.connect(cluster.url) as client, client.producer(topic, schema=str) as producer:
        producer.send("1", key="a")
        with client.table_view(topic, schema=str) as view:
            assert view["a"] == "1"
            producer.send("2", key="b")
            view.refresh()
            assert view.items() == [("a", "1"), ("b", "2")]
            assert view.keys() == ["a", "b"]
            assert view.get("c", "none") == "none"
            assert "a" in view
            assert len(view) == 2
        with pytest.raises(cepheid.ClosedError, match=re.escape(topic)):
            view.get("a")
