"""A sweep deletes what no topic needs, and never what a chain names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_metadata import Chain, ChainLedger, MemoryStore, MemoryTree, OffloadedLedger, chain_records, found_cluster, keys
from cepheid_metadata.repositories import restored_record
from cepheid_metadata.restored_records import RestoredMetadata
from cepheid_ports import Ports
from cepheid_tiered.object_store import StoredObject
from cepheid_tiered.segment import DamagedSegmentError, SegmentError
from cepheid_tiered.sweep import Named, Sighting, SweepRefusedError, Why, place_of, plan_sweep, sweep, topic_path
from cepheid_wire import TopicName
from tests.tiered.fake_bucket import NOW_MS, ROOT, FakeBucket, manifest_of, object_name, offloaded

ORDERS = TopicName.parse("persistent://t/n/orders")
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("name", "age_ms", "cluster_id", "why"),
    [
        (object_name(1), 2 * HOUR_MS, "ours", Why.ORPHAN),
        (object_name(7), 2 * HOUR_MS, "ours", Why.NAMED),
        (object_name(7), 2 * HOUR_MS, "other", Why.NAMED),
        (object_name(1), HOUR_MS - 1, "ours", Why.YOUNG),
        (object_name(1), 2 * HOUR_MS, "other", Why.OTHER_CLUSTER),
        (object_name(1), 2 * HOUR_MS, None, Why.UNKNOWN_CLUSTER),
        ("manifest.json", 2 * HOUR_MS, "ours", Why.ORPHAN),
        ("notes.txt", 2 * HOUR_MS, "ours", Why.NOT_OURS),
        ("1-ab.parquet", 2 * HOUR_MS, "ours", Why.NOT_OURS),
    ],
)
def test_decides_about_one_object(name: str, age_ms: int, cluster_id: str | None, why: Why) -> None:
    directory = f"{ROOT}/t/n/orders"
    found = StoredObject(f"{directory}/{name}?region=eu", 1, NOW_MS - age_ms)
    named = Named(frozenset([f"{directory}/{object_name(7)}"]))
    plan = plan_sweep([found], named, {directory: Sighting(cluster_id)}, "ours", NOW_MS, HOUR_MS)
    assert plan.decisions == ((found, why),)


@pytest.mark.parametrize(
    ("named", "name", "why"),
    [
        (Named(frozenset(), topics=frozenset(["t/n/a%20b"])), "manifest.json", Why.NAMED),
        (Named(frozenset(), topics=frozenset(["t/n/a%20b"])), object_name(1), Why.ORPHAN),
        (Named(frozenset(), unreadable=frozenset(["t/n/a%20b"])), object_name(1), Why.UNKNOWN_CHAIN),
    ],
)
def test_a_topic_that_lives_keeps_its_manifest_and_one_that_cannot_be_read_keeps_all(named: Named, name: str, why: Why) -> None:
    assert topic_path(TopicName.parse("persistent://t/n/a b")) == "t/n/a%20b"
    directory = f"{ROOT}/t/n/a%20b"
    plan = plan_sweep([StoredObject(f"{directory}/{name}", 1, 0)], named, {directory: Sighting("ours")}, "ours", NOW_MS, HOUR_MS)
    assert [decision for _, decision in plan.decisions] == [why]


@given(st.data())
def test_nothing_that_a_chain_names_is_ever_deleted(data: st.DataObject) -> None:
    """Uploads, completions, trims, crashes and deletions of topics go on between the listing, the reading and the deletion."""
    chains: dict[int, set[str]] = {topic: set() for topic in range(2)}
    objects: dict[str, int] = {}
    urls = (f"{ROOT}/t/n/{topic}/{object_name(number)}" for number in range(1_000) for topic in [number % 2])
    now_ms = 0

    def live() -> None:
        nonlocal now_ms
        for step in data.draw(
            st.lists(st.sampled_from(["begin", "offload", "upload", "forget", "delete topic", "wait"]), max_size=8)
        ):
            topic = data.draw(st.sampled_from([0, 1]))
            if step in ("begin", "offload"):
                url = next(urls)
                chains[int(url.split("/")[-2])].add(url)  # recorded before the upload begins
                if step == "offload":
                    objects[url] = now_ms
            elif step == "upload" and chains[topic]:
                objects.setdefault(data.draw(st.sampled_from(sorted(chains[topic]))), now_ms)
            elif step == "forget" and chains[topic]:
                chains[topic].discard(data.draw(st.sampled_from(sorted(chains[topic]))))
            elif step == "delete topic":
                chains[topic].clear()
            else:
                now_ms += HOUR_MS

    live()
    now_ms += data.draw(st.sampled_from([0, 2 * HOUR_MS]))
    listed = [StoredObject(url, 1, at_ms) for url, at_ms in objects.items()]
    live()
    named = Named(frozenset(place_of(url) for urls_of in chains.values() for url in urls_of))
    live()
    sightings = {f"{ROOT}/t/n/{topic}": Sighting(data.draw(st.sampled_from(["ours", "ours", "other", None]))) for topic in chains}
    plan = plan_sweep(listed, named, sightings, "ours", now_ms, grace_ms=HOUR_MS)
    live()
    deleted = {found.url for found in plan.orphans}
    assert not deleted.intersection(*[set().union(*chains.values())])
    assert all(sightings[url.rpartition("/")[0]].cluster_id == "ours" for url in deleted)
    assert all(objects[url] <= now_ms - HOUR_MS for url in deleted)


def run(test: Callable[[MemoryStore, FakeBucket, str], Awaitable[None]]) -> None:
    async def main() -> None:
        store = MemoryStore(MemoryTree())
        identity = await found_cluster(store, "c", Ports())
        await test(store, FakeBucket(), identity.cluster_id)

    asyncio.run(main())


def orders_url(ledger_id: int) -> str:
    return f"{ROOT}/t/n/orders/{object_name(ledger_id)}"


def chain_of(*, complete: tuple[int, ...] = (), begun: tuple[int, ...] = (), to_delete: tuple[int, ...] = ()) -> Chain:
    ids = (*complete, *begun)
    return Chain(
        incarnation="i",
        ledgers=tuple(ChainLedger(ledger_id=ledger_id, entries=10) for ledger_id in ids),
        offloaded={one: OffloadedLedger(url=orders_url(one), started_at_ms=1, complete=one in complete) for one in ids},
        object_deletions=tuple(map(orders_url, to_delete)),
    )


def test_an_object_that_a_chain_names_by_another_url_stays() -> None:
    """A link to the directory, or another name of the store's host."""
    elsewhere = f"{ROOT}-link/t/n/orders"
    named = Named(frozenset([f"{ROOT}/t/n/orders/{object_name(7)}"]))
    found = StoredObject(f"{elsewhere}/{object_name(7)}", 1, 0)
    plan = plan_sweep([found], named, {elsewhere: Sighting("ours")}, "ours", NOW_MS, HOUR_MS)
    assert plan.decisions == ((found, Why.NAMED),)


def test_what_another_cluster_wrote_into_our_directory_stays() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        bucket.add_topic(manifest_of("t/n/orders", *(offloaded(number) for number in (4, 5, 6)), cluster_id=cluster_id))
        writers = {orders_url(4): cluster_id, orders_url(5): "other"}

        async def writer_of(url: str) -> str:
            if url not in writers:
                raise DamagedSegmentError(f"{url} has no footer")
            return writers[url]

        plan = await sweep(store, bucket, ROOT, NOW_MS, writer_of=writer_of)
        assert [found.url for found in plan.orphans][:1] == [orders_url(4)]
        assert (plan.count(Why.OTHER_CLUSTER), plan.count(Why.UNKNOWN_CLUSTER)) == (1, 1)
        assert {orders_url(5), orders_url(6)} <= set(bucket.objects)

    run(test)


def test_remains_are_deleted_and_what_the_chain_names_stays() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        bucket.add_topic(manifest_of("t/n/orders", *(offloaded(number) for number in range(1, 6)), cluster_id=cluster_id))
        bucket.add_topic(manifest_of("t/n/deleted", offloaded(9), cluster_id=cluster_id))
        bucket.add_topic(manifest_of("t/n/foreign", offloaded(9), cluster_id="other"))
        await chain_records(store).create(ORDERS, chain_of(complete=(1,), begun=(2,), to_delete=(3,)))
        gone = [
            *(f"{ROOT}/t/n/deleted/{name}" for name in (object_name(9), "manifest.json")),
            *map(orders_url, (4, 5)),
        ]
        before = dict(bucket.objects)
        plan = await sweep(store, bucket, ROOT, NOW_MS, dry_run=True)
        assert [found.url for found in plan.orphans] == gone
        assert bucket.objects == before
        assert plan.count(Why.OTHER_CLUSTER) == 2
        await sweep(store, bucket, ROOT, NOW_MS)
        assert bucket.deleted == gone  # a directory's manifest last
        assert set(bucket.objects) == set(before).difference(gone)

    run(test)


def test_nothing_is_deleted_while_restored_metadata_is_not_confirmed() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        bucket.add_topic(manifest_of("t/n/deleted", offloaded(9), cluster_id=cluster_id))
        note = RestoredMetadata(backup_sha256="0" * 64, backup_created_at_ms=1, restored_at_ms=1)
        await restored_record(store).create(None, note)
        with pytest.raises(SweepRefusedError, match="not confirmed yet: nothing is deleted"):
            await sweep(store, bucket, ROOT, NOW_MS)
        assert bucket.deleted == []

    run(test)


def test_a_damaged_chain_keeps_the_directory_of_its_topic() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(1), cluster_id=cluster_id))
        await store.create(keys.chain_key(ORDERS), b"garbage")
        plan = await sweep(store, bucket, ROOT, NOW_MS)
        assert {why for _, why in plan.decisions} == {Why.UNKNOWN_CHAIN}

    run(test)


@pytest.mark.parametrize("restored_by", ["this cluster", "another cluster"])
def test_a_topic_that_is_restored_after_the_chains_were_read_keeps_its_objects(restored_by: str) -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        url = bucket.add_topic(manifest_of("t/n/orders", offloaded(1), cluster_id=cluster_id))
        sync, syncs = store.sync, 0

        async def sync_then_restore(key: str) -> None:
            nonlocal syncs
            syncs += key == keys.RESTORED_KEY
            if syncs == 2 and key == keys.RESTORED_KEY:  # the deletion is about to begin
                if restored_by == "this cluster":
                    await chain_records(store).create(ORDERS, chain_of(complete=(1,)))
                else:
                    claimed = manifest_of("t/n/orders", offloaded(1), cluster_id="other")
                    bucket.objects[url] = (claimed.encode(), 0)
            await sync(key)

        store.sync = sync_then_restore  # type: ignore[method-assign]
        await sweep(store, bucket, ROOT, NOW_MS)
        assert bucket.deleted == []

    run(test)


def test_a_bucket_that_is_away_ends_the_sweep() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket, cluster_id: str) -> None:
        bucket.is_away = True
        with pytest.raises(SegmentError, match="connection refused"):
            await sweep(store, bucket, ROOT, NOW_MS)

    run(test)
