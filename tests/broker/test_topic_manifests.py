"""The owner of an offloaded topic keeps its manifest: when it is written, what is in it, and what happens on bad days."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cepheid_broker.topics import TopicManifests
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_metadata import EARLIEST, Chain, MemoryStore, MemoryTree, OffloadedLedger, Position, chain_records, found_cluster
from cepheid_ports import Ports
from cepheid_tiered.manifest import Manifest
from cepheid_tiered.restore import Outcome, restore_topics
from cepheid_wire import TopicName
from tests.broker.broker_world import BrokerWorld
from tests.support import run_async
from tests.tiered.fake_bucket import FakeBucket

NAME = TopicName.parse("persistent://public/default/orders")
ROOT = "s3://bucket/prefix"
URL = f"{ROOT}/public/default/orders/manifest.json?region=eu"
INTERVAL_S = 1_000.0


class Bench:
    """A topic whose open ledger gets entries and ends, and a bucket; the test says when a tick comes."""

    def __init__(self, world: BrokerWorld, topic: PersistentTopic) -> None:
        self.world, self.topic, self.bucket = world, topic, FakeBucket()
        self.manifests = self.new_manifests(INTERVAL_S)

    def new_manifests(self, interval_s: float) -> TopicManifests:
        broker = self.world.broker
        return TopicManifests(broker.topics.loaded, broker.store, self.bucket, broker._tasks, Ports(), interval_s)

    async def publish(self, entries: int) -> None:
        for number in range(entries):
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            self.topic.publish([b"x" * 100], lambda found, _, done=done: done.set_result(found))  # type: ignore[misc]
            assert isinstance(await done, Position), number

    async def end_ledger(self) -> int:
        """Return its id; the topic gets a new one."""
        before = self.topic.ledger.chain.ledgers[-1].ledger_id
        await self.topic.ledger._upkeep._rollover.run(self.topic.ledger.config)  # type: ignore[union-attr]
        return before

    async def offload(self, ledger_id: int, *, complete: bool = True) -> None:
        url = f"{ROOT}/public/default/orders/{ledger_id:020d}-{ledger_id:016x}.parquet?region=eu"
        copy = OffloadedLedger(url=url, started_at_ms=1, complete=complete, completed_at_ms=2, object_bytes=3)
        if complete:
            self.bucket.objects[url] = (b"xyz", 0)

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            return chain.replace(offloaded={**(chain.offloaded or {}), ledger_id: copy}), ()

        await self.topic.ledger._keeper.commit(plan)

    async def tick(self) -> bool:
        """Whether something was written."""
        before = self.manifests.written
        self.manifests.on_tick()
        if self.manifests._writing is not None:
            await self.manifests._writing
        return self.manifests.written > before

    @property
    def manifest(self) -> Manifest:
        return Manifest.decode(self.bucket.objects[URL][0], URL)


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with BrokerWorld() as world:
            await found_cluster(world.store, "standalone", Ports())
            topic = await world.broker.topics.get(NAME, may_create=True)
            assert isinstance(topic, PersistentTopic)
            await test(Bench(world, topic))

    run_async(main())


def test_is_written_when_an_offload_begins_and_when_it_completes() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        assert not await bench.tick(), "nothing is offloaded"
        first = await bench.end_ledger()
        await bench.publish(2)
        await bench.offload(first, complete=False)
        assert await bench.tick()
        ended = bench.manifest.ledgers[0]
        assert (ended.ledger_id, ended.entries, ended.object) == (first, 5, None)
        await bench.offload(first)
        assert await bench.tick()
        assert not await bench.tick(), "nothing has changed"
        done, still_open = bench.manifest.ledgers
        assert done.object is not None
        assert (done.entries, done.size_bytes, done.object.name) == (5, 500, f"{first:020d}-{first:016x}.parquet")
        assert (still_open.entries, still_open.size_bytes, still_open.object, still_open.ended_at_ms) == (2, 200, None, 0)

    run(test)


def test_changes_of_cursors_wait_for_the_interval() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        await bench.offload(await bench.end_ledger())
        assert await bench.tick()
        await bench.topic.create_subscription("sub", EARLIEST, properties={"a": "b"})
        assert not await bench.tick()
        bench.manifests._topics[NAME].next_at = 0.0
        assert await bench.tick()
        (cursor,) = bench.manifest.cursors
        assert (cursor.name, cursor.properties) == ("sub", {"a": "b"})
        bench.topic.ledger.cursors["sub"].acknowledge_cumulative(Position(bench.topic.ledger.chain.ledgers[0].ledger_id, 3))
        bench.manifests._topics[NAME].next_at = 0.0
        assert await bench.tick()
        assert bench.manifest.cursors[0].mark_delete == (bench.topic.ledger.chain.ledgers[0].ledger_id, 3)

    run(test)


def test_a_bucket_that_is_away_costs_nothing_and_is_tried_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        await bench.offload(await bench.end_ledger())
        bench.bucket.is_away = True
        assert not await bench.tick()
        assert not await bench.tick()
        assert bench.manifests.failures == 1, "not in every tick"
        bench.bucket.is_away = False
        bench.manifests._topics[NAME].next_at = 0.0
        assert await bench.tick()

    run(test)


def test_the_manifest_of_another_cluster_is_not_overwritten() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        await bench.offload(await bench.end_ledger())
        assert await bench.tick()
        theirs = replace(bench.manifest, cluster_id="theirs").encode()
        bench.bucket.objects[URL] = (theirs, 0)
        bench.manifests = bench.new_manifests(INTERVAL_S)  # the topic is opened by another broker
        assert not await bench.tick()
        assert bench.bucket.objects[URL][0] == theirs

    run(test)


def test_the_manifest_of_a_newer_release_is_not_overwritten_and_a_damaged_one_is() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        await bench.offload(await bench.end_ledger())
        for content, written in ((b'{"format":9}', False), (b"garbage", True)):
            bench.bucket.objects[URL] = (content, 0)
            bench.manifests = bench.new_manifests(INTERVAL_S)
            assert await bench.tick() is written

    run(test)


def test_a_deleted_topic_loses_its_manifest() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        await bench.offload(await bench.end_ledger())
        assert await bench.tick()
        await bench.world.broker.topics.unload(NAME)
        await bench.manifests.on_topic_deleting(NAME)
        assert URL not in bench.bucket.objects

    run(test)


def test_what_was_written_can_be_restored_into_another_cluster() -> None:
    async def test(bench: Bench) -> None:
        await bench.publish(5)
        first = await bench.end_ledger()
        await bench.publish(3)
        await bench.topic.create_subscription("sub", EARLIEST)
        bench.topic.ledger.cursors["sub"].acknowledge([Position(first, 0), Position(first, 1), Position(first, 3)])
        await bench.offload(first)
        assert await bench.tick()
        chain = bench.topic.ledger.chain
        store = MemoryStore(MemoryTree())
        await found_cluster(store, "second", Ports())
        bench.bucket.objects = {name.partition("?")[0]: found for name, found in bench.bucket.objects.items()}
        (report,) = await restore_topics(store, bench.bucket, ROOT, 0)
        assert (report.outcome, report.entries, [one.entries for one in report.lost]) == (Outcome.RESTORED, 5, [3])
        found = await chain_records(store).get(NAME)
        assert found is not None
        assert (found.record.incarnation, [one.ledger_id for one in found.record.ledgers]) == (chain.incarnation, [first])

    run(test)
