"""Topics that no client opens: their old ledgers are offloaded and trimmed all the same, and they are closed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_metadata import EARLIEST, LATEST, Chain, read_chain
from cepheid_metadata.repositories import restored_record
from cepheid_metadata.restored_records import RestoredMetadata
from cepheid_ports import Ports
from cepheid_wire import TopicName, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.brokers_world import BrokersWorld
from tests.managed_ledger.memory_segments import MemorySegments, store_is_away
from tests.support import wait_until

NAME = TopicName.parse("persistent://public/default/old")
KEPT = {"retention_time_min": -1, "retention_size_mb": -1}
OFFLOADED: dict[str, Any] = {"policies": KEPT, "tiered": {"url": "file:///archive", "after_bytes": 0, "keep_s": 0}}
NO_PASSES = {"closed_topic_check_s": 0}


async def written(world: Any, *, age_s: float = 0.0, subscription: str | None = None, all_read: bool = False) -> None:
    """A topic with one entry, closed again. `all_read`: the subscription has acknowledged it."""
    topic = await world.broker.topics.get(NAME, may_create=True)
    assert isinstance(topic, PersistentTopic)
    if subscription is not None and not all_read:
        await topic.create_subscription(subscription, EARLIEST)
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=Ports().wall_ms() - int(1000 * age_s))
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    topic.publish([encode_tail(metadata, b"x")], lambda outcome, _: done.set_result(outcome))
    assert not isinstance(await done, Exception)
    if subscription is not None and all_read:
        await topic.create_subscription(subscription, LATEST)
    await world.broker.topics.unload(NAME)


async def chain_of(world: Any) -> Chain:
    found = await read_chain(world.store, NAME)
    assert found is not None
    return found.record


def with_entries(chain: Chain) -> list[int]:
    return [ledger.ledger_id for ledger in chain.ledgers if ledger.entries]


async def test_what_retention_does_not_keep_is_deleted_and_the_topic_closed_again() -> None:
    async with BrokerWorld(**NO_PASSES) as world:
        await written(world, subscription="s", all_read=True)
        assert with_entries(await chain_of(world))
        closed = world.broker.closed_topics
        await closed.check()
        assert with_entries(await chain_of(world)) == []
        assert (await chain_of(world)).deletions == ()
        assert world.broker.topics.find(NAME) is None
        assert (closed.figures().opened, closed.figures().waiting) == (1, 0)
        await closed.check()
        assert closed.figures().opened == 1, "its new, empty ledger is nothing to do"


async def test_what_nobody_has_subscribed_to_waits_for_a_client() -> None:
    async with BrokerWorld(**NO_PASSES) as world:
        await written(world)
        await world.broker.closed_topics.check()
        assert with_entries(await chain_of(world))


@pytest.mark.parametrize("settings", [{"policies": KEPT}, {"policies": {**KEPT, "message_ttl_s": 3600}}])
async def test_a_topic_without_work_is_not_opened(settings: dict[str, Any]) -> None:
    async with BrokerWorld(**NO_PASSES, **settings) as world:
        await written(world, subscription="s")
        before = (await chain_of(world)).epoch
        await world.broker.closed_topics.check()
        assert (await chain_of(world)).epoch == before


async def test_an_unread_backlog_is_kept_by_its_subscription() -> None:
    async with BrokerWorld(**NO_PASSES) as world:
        await written(world, subscription="s")
        await world.broker.closed_topics.check()
        assert world.broker.closed_topics.figures().opened == 0
        assert with_entries(await chain_of(world))


async def test_messages_past_their_time_to_live_are_expired_and_their_ledger_trimmed() -> None:
    async with BrokerWorld(**NO_PASSES, policies={"message_ttl_s": 1}) as world:
        await written(world, age_s=100, subscription="s")
        await asyncio.sleep(1.1)  # their ledger is older than the time to live
        await world.broker.closed_topics.check()
        assert with_entries(await chain_of(world)) == []


async def test_due_ledgers_are_offloaded_and_leave_the_bookies() -> None:
    segments = MemorySegments()
    async with BrokerWorld(**NO_PASSES, **OFFLOADED, segments=segments) as world:
        await written(world)
        (ledger_id,) = with_entries(await chain_of(world))
        for _ in range(2):  # one to copy it; it may be a millisecond too early then to let it leave
            await world.broker.closed_topics.check()
        chain = await chain_of(world)
        assert chain.offload_of(ledger_id) is not None
        assert not chain.is_on_bookies(ledger_id)
        assert world.broker.topics.find(NAME) is None
        assert len(segments.objects) == 1


async def test_a_store_that_is_away_shows_and_is_not_tried_in_every_pass() -> None:
    segments = MemorySegments()
    segments.fail = store_is_away()
    async with BrokerWorld(**NO_PASSES, **OFFLOADED, segments=segments) as world:
        await written(world)
        closed = world.broker.closed_topics
        await closed.check()
        await asyncio.sleep(0.01)
        figures = closed.figures()
        assert (figures.opened, figures.failed, figures.failing, figures.due_ledgers) == (1, 1, 1, 1)
        assert figures.oldest_due_age_ms > 0
        await closed.check()
        assert closed.figures().opened == 1
        segments.fail = lambda step, url: None
        closed._waiting[NAME] = closed._waiting[NAME].__class__(1, 1)  # the pause is over
        await closed.check()
        assert (closed.figures().failing, closed.figures().due_ledgers) == (0, 0)


async def test_without_the_libraries_the_alert_still_sees_what_is_due() -> None:
    async with BrokerWorld(**NO_PASSES, **OFFLOADED) as world:
        await written(world)
        await world.broker.closed_topics.check()
        figures = world.broker.closed_topics.figures()
        assert (figures.opened, figures.due_ledgers) == (0, 1)


async def test_a_topic_that_a_client_uses_meanwhile_stays_open() -> None:
    segments = MemorySegments()
    segments.gate = asyncio.Event()
    async with BrokerWorld(**NO_PASSES, **OFFLOADED, segments=segments) as world, await world.client() as client:
        await written(world)
        checking = asyncio.ensure_future(world.broker.closed_topics.check())
        await wait_until(lambda: world.broker.topics.find(NAME) is not None)
        await client.produce_on("old")
        segments.gate.set()
        await checking
        assert world.topic(str(NAME)).in_use
        await client.publish(1)


def is_uploading(topic: object) -> bool:
    return isinstance(topic, PersistentTopic) and topic.ledger.uploading_ledger_id is not None


async def test_a_pass_that_is_cut_off_leaves_no_topic_open() -> None:
    segments = MemorySegments()
    segments.gate = asyncio.Event()
    async with BrokerWorld(**NO_PASSES, **OFFLOADED, segments=segments) as world:
        await written(world)
        closed = world.broker.closed_topics
        closed._tasks.start(closed.check(), name="check")
        await wait_until(lambda: is_uploading(world.broker.topics.find(NAME)))
        await closed.aclose()
        assert world.broker.topics.find(NAME) is None
        segments.gate.set()
        await asyncio.sleep(0)
        assert segments.objects == {}


async def test_nothing_is_opened_before_a_restored_backup_is_confirmed() -> None:
    async with BrokerWorld(**NO_PASSES) as world:
        await written(world)
        await restored_record(world.store).create(
            None, RestoredMetadata(backup_sha256="x", backup_created_at_ms=1, restored_at_ms=1)
        )
        await world.broker.closed_topics.check()
        assert with_entries(await chain_of(world))


async def test_one_broker_of_several_does_it_also_for_bundles_that_nobody_owns() -> None:
    async with BrokersWorld() as world:
        owner = await world.owner_of("old")
        await owner.ownership.require(NAME)
        await written(owner)
        other = world.other_than(owner)
        assert await other.ownership.would_own([NAME]) == []
        assert await owner.ownership.would_own([NAME]) == [NAME]
        await owner.ownership.release(await owner.ownership.bundle_of(NAME))
        would = [broker for broker in world.brokers if await broker.ownership.would_own([NAME])]
        assert len(would) == 1
        assert not would[0].ownership.owns(NAME), "looking takes nothing"
