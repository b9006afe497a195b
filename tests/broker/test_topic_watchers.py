"""Watchers of topic lists and filtered lists: patterns, hashes, order, hostile patterns, what a client that does not read costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.linear_pattern import MAX_PATTERN_CHARS
from cepheid_broker.topics.topic_pattern import TopicPattern
from cepheid_broker.topics.topic_watches import TopicWatches, topics_hash
from cepheid_metadata import TenantRecord, namespace_records, tenant_records
from cepheid_ports import TaskOwner
from cepheid_wire import NamespaceName, ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full
from tests.support import wait_until

NAMESPACE = "public/default"


async def watch(client: ScriptedClient, pattern: str, watcher_id: int = 0, **fields: Any) -> pb.CommandWatchTopicListSuccess:
    ask = pb.CommandWatchTopicList(
        request_id=client.request_id(), watcher_id=watcher_id, namespace=NAMESPACE, topics_pattern=pattern, **fields
    )
    answer = await client.ask(ask, pb.CommandWatchTopicListSuccess)
    assert (answer.request_id, answer.watcher_id) == (ask.request_id, watcher_id)
    assert answer.topics_hash == topics_hash(answer.topic) or ask.topics_hash
    return answer


async def topics_of(client: ScriptedClient, **fields: Any) -> pb.CommandGetTopicsOfNamespaceResponse:
    ask = pb.CommandGetTopicsOfNamespace(request_id=client.request_id(), namespace=NAMESPACE, **fields)
    return await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)


async def test_a_watcher_hears_of_topics_that_come_and_go() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("orders-1")
        await world.create_topic("other")
        first = await watch(client, f"persistent://{NAMESPACE}/orders-.*")
        assert list(first.topic) == [full("orders-1")]
        await world.create_topic("unseen")
        await world.create_topic("orders-2")
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert (list(update.new_topics), list(update.deleted_topics)) == ([full("orders-2")], [])
        assert update.topics_hash == topics_hash([full("orders-1"), full("orders-2")])
        await world.broker.topics.delete(TopicName.parse("orders-1"))
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert (list(update.new_topics), list(update.deleted_topics)) == ([], [full("orders-1")])
        await client.ask(pb.CommandWatchTopicListClose(request_id=9, watcher_id=0), pb.CommandSuccess)
        assert len(world.broker.topic_watches) == 0
        await world.create_topic("orders-3")
        await client.expect_nothing()


async def test_trap_35_partitions_are_listed_each_and_matched_by_the_name_of_their_topic() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        parts = [full("split-partition-0"), full("split-partition-1")]
        assert list((await watch(client, f"{NAMESPACE}/split")).topic) == parts
        listed = await topics_of(client, topics_pattern="public/default/split")
        assert (list(listed.topics), listed.filtered, listed.changed) == (parts, True, True)
        await world.broker.partitioned.grow(TopicName.parse("split"), 3)
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert list(update.new_topics) == [full("split-partition-2")]


async def test_an_equal_hash_saves_the_list() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("t")
        known = (await watch(client, ".*")).topics_hash
        again = await watch(client, ".*", 1, topics_hash=known)
        assert (list(again.topic), again.topics_hash) == ([], known)
        listed = await topics_of(client, topics_pattern=".*", topics_hash=known)
        assert (list(listed.topics), listed.changed) == ([], False)
        listed = await topics_of(client, topics_hash="00000000")
        assert (list(listed.topics), listed.changed, listed.filtered) == ([full("t")], True, False)


async def test_many_changes_reach_every_watcher_in_order() -> None:
    """Replaying the updates gives the list, whatever was merged on the way."""
    async with BrokerWorld() as world, await world.client() as client:
        topics = {watcher: dict.fromkeys((await watch(client, f"{NAMESPACE}/t.*", watcher)).topic) for watcher in range(3)}
        for number in range(40):
            await world.create_topic(f"t{number}")
            if number % 3 == 0:
                await world.broker.catalog.delete(TopicName.parse(f"t{number // 2}"))
        expected = sorted(map(str, await world.broker.catalog.topics_of(NamespaceName.parse(NAMESPACE))))
        while any(sorted(names) != expected for names in topics.values()):
            update = await client.expect(pb.CommandWatchTopicUpdate)
            names = topics[update.watcher_id]
            for name in update.deleted_topics:
                del names[name]
            for name in update.new_topics:
                assert name not in names
                names[name] = None
            assert topics_hash(names) == update.topics_hash


async def test_a_client_that_does_not_read_is_told_the_difference_later() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await watch(client, ".*")
        (connection,) = [c for c in world.broker._listener.connections if c._watches._open]
        connection.pause_writing()
        await watch(other, ".*")
        for name in ("a", "b"):
            await world.create_topic(name)
            await other.expect(pb.CommandWatchTopicUpdate)
        await world.broker.catalog.delete(TopicName.parse("a"))
        await other.expect(pb.CommandWatchTopicUpdate)
        connection.resume_writing()
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert (list(update.new_topics), list(update.deleted_topics)) == ([full("b")], [])


async def test_a_lost_connection_leaves_no_watcher() -> None:
    async with BrokerWorld() as world:
        async with await world.client() as client:
            await watch(client, ".*")
            await watch(client, ".*", 1)
            assert len(world.broker.topic_watches) == 2
        async with await world.client() as other:
            await other.ping()
            await wait_until(lambda: len(world.broker.topic_watches) == 0, what="no watcher")


async def test_refusals_are_named() -> None:
    async with BrokerWorld(connection={"max_topic_watchers": 2}) as world, await world.client() as client:
        await tenant_records(world.store).create("t", TenantRecord())
        for namespace, pattern, code, text in (
            (NAMESPACE, "a(", ServerError.NOT_ALLOWED_ERROR, "missing )"),
            (NAMESPACE, "(?=a)b", ServerError.NOT_ALLOWED_ERROR, "RE2"),
            (NAMESPACE, "a" * (MAX_PATTERN_CHARS + 1), ServerError.NOT_ALLOWED_ERROR, "characters"),
            ("public/none", ".*", ServerError.TOPIC_NOT_FOUND, "does not exist"),
            ("none", ".*", ServerError.NOT_ALLOWED_ERROR, "tenant/namespace"),
        ):
            ask = pb.CommandWatchTopicList(request_id=3, watcher_id=0, namespace=namespace, topics_pattern=pattern)
            refused = await client.ask(ask, pb.CommandError)
            assert (refused.request_id, refused.error) == (3, code), refused
            assert text in refused.message
        await watch(client, ".*", 0)
        await watch(client, ".*", 1)
        await watch(client, ".*", 1)  # again: starts anew
        ask = pb.CommandWatchTopicList(request_id=4, watcher_id=2, namespace=NAMESPACE, topics_pattern=".*")
        assert "watchers" in (await client.ask(ask, pb.CommandError)).message
        assert len(world.broker.topic_watches) == 2
        ask = pb.CommandWatchTopicList(request_id=4, watcher_id=2, namespace=NAMESPACE, topics_pattern="a(")
        assert (await client.ask(ask, pb.CommandError)).request_id == 4
        lost = pb.CommandWatchTopicListClose(request_id=5, watcher_id=77)
        assert (await client.ask(lost, pb.CommandSuccess)).request_id == 5


async def test_a_list_that_fits_no_frame_is_refused_with_what_to_do() -> None:
    """Java and Go would close the connection on it, come back, and ask again for ever."""
    async with BrokerWorld(max_message_bytes=64 * 1024) as world, await world.client() as client:
        for number in range(90):
            await world.create_topic(f"{number:03}" + "x" * 900)
        ask = pb.CommandGetTopicsOfNamespace(request_id=1, namespace=NAMESPACE)
        error = await client.ask(ask, pb.CommandError)
        assert error.error == ServerError.NOT_ALLOWED_ERROR
        assert "ask with a pattern" in error.message
        watcher = pb.CommandWatchTopicList(request_id=2, watcher_id=0, namespace=NAMESPACE, topics_pattern=".*")
        error = await client.ask(watcher, pb.CommandError)
        assert (error.request_id, error.error) == (2, ServerError.NOT_ALLOWED_ERROR)
        assert len(world.broker.topic_watches) == 0
        assert len((await watch(client, f"{NAMESPACE}/06.*")).topic) == 10


async def test_a_namespace_that_goes_takes_its_topics_along() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("t")
        await watch(client, ".*")
        await world.broker.catalog.delete(TopicName.parse("t"))
        await namespace_records(world.store).delete(("public", "default"), None)
        assert list((await client.expect(pb.CommandWatchTopicUpdate)).deleted_topics) == [full("t")]


async def test_a_slow_listing_does_not_undo_a_later_one() -> None:
    topics, started, held = [TopicName.parse("a")], asyncio.Event(), asyncio.Event()

    async def list_topics(_: NamespaceName) -> list[TopicName]:
        found = list(topics)
        if not started.is_set():  # the first one is slow
            started.set()
            await held.wait()
        return found

    told: list[tuple[list[str], list[str]]] = []

    def tell(new: Sequence[str], deleted: Sequence[str], _: str) -> bool:
        told.append((list(new), list(deleted)))
        return True

    tasks = TaskOwner("test")
    watches = TopicWatches(list_topics, tasks)
    slow = asyncio.ensure_future(watches.open(NamespaceName.parse(NAMESPACE), TopicPattern(".*"), tell))
    await started.wait()
    topics.append(TopicName.parse("b"))
    later = asyncio.ensure_future(watches.open(NamespaceName.parse(NAMESPACE), TopicPattern(".*"), tell))
    for _ in range(5):
        await asyncio.sleep(0)
    held.set()
    assert list((await later).topics) == [full("a"), full("b")]
    assert list((await slow).topics) == [full("a"), full("b")]
    assert told == [([full("b")], [])], "the first watcher hears of b, and nobody of its going"
    await tasks.aclose()


async def test_a_topic_made_during_the_first_listing_is_told_and_not_found_a_minute_later() -> None:
    topics, held = [TopicName.parse("a")], asyncio.Event()

    async def list_topics(_: NamespaceName) -> list[TopicName]:
        found = list(topics)
        await held.wait()
        return found

    told: list[str] = []
    tasks = TaskOwner("test")
    watches = TopicWatches(list_topics, tasks)
    opening = asyncio.ensure_future(
        watches.open(NamespaceName.parse(NAMESPACE), TopicPattern(".*"), lambda new, deleted, _: told.extend(new) or True)
    )
    await asyncio.sleep(0)
    topics.append(TopicName.parse("b"))
    watches.on_changed(topics[-1])
    for _ in range(5):
        await asyncio.sleep(0)
    held.set()
    watch = await opening
    await wait_until(lambda: told == [full("b")])
    watch.close()
    await tasks.aclose()


async def test_trap_04_only_who_asks_gets_these_commands_and_the_broker_says_that_it_can() -> None:
    """C++ and Go close the connection on commands that they do not know."""
    async with BrokerWorld() as world, await world.client(handshake=False) as client, await world.client() as other:
        client.send(pb.CommandConnect(client_version="scripted", protocol_version=20))
        assert (await client.expect(pb.CommandConnected)).feature_flags.supports_topic_watchers
        await watch(other, ".*")
        await client.subscribe("t", "s")
        await other.expect(pb.CommandWatchTopicUpdate)
        await client.expect_nothing(0.1)


@pytest.mark.parametrize(
    ("pattern", "topic", "matches"),
    [
        ("public/default/t", "t", True),
        ("public/default/t", "t1", False),
        ("default/t", "t", False),  # the whole name
        ("persistent://public/default/.*", "t", True),
        ("^persistent://public/default/t$", "t", True),
        ("non-persistent://public/default/.*", "non-persistent://public/default/t", True),
        (".*/(a|b)", "b", True),
        (".*é", "é", True),
        (".*/a", "a-partition-7", True),
        (".*/a-partition-01", "a-partition-01", True),  # no partition
    ],
)
def test_patterns_match_the_whole_name_without_scheme(pattern: str, topic: str, matches: bool) -> None:
    assert TopicPattern(pattern).matches(TopicName.parse(topic)) is matches


def test_a_hostile_pattern_costs_no_time_and_no_memory() -> None:
    name = TopicName.parse("a" * 900 + "b")
    began = time.process_time()
    for pattern in (r".*/(a+)+$", r".*/(a|aa)+$", r".*/(a*)*(a*)*(a*)*$", r"(.*)(.*)(.*)(.*)(.*)[^b]"):
        assert not TopicPattern(pattern).matches(name)
    with pytest.raises(NotAllowedError, match=r"too large|invalid repetition"):
        TopicPattern("((a{100}){100}){100}")
    with pytest.raises(NotAllowedError, match=r"too large|invalid repetition"):
        TopicPattern("(x{900}){900}" * 3)
    assert time.process_time() - began < 10  # a pattern that is tried in every way takes for ever
