"""Splitting a bundle: topics stay open, all brokers agree on the parts, and a bundle that was split is acquired by no broker."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_broker.balancing.split_points import by_load, by_topics, middle
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.bundles import Bundle, bundle_of, bundles_of, division_of, is_in
from cepheid_broker.ownership.ownership import Here, SplitRefusedError, There
from cepheid_metadata import (
    BundleHistory,
    NamespaceRecord,
    StoreUnavailableError,
    bundle_histories,
    bundle_owners,
    namespace_records,
)
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_wire import NamespaceName, TopicName
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.support import wait_until

NOUN = ("public", "default")
WHOLE = Bundle(NamespaceName(*NOUN), 0, 0xFFFFFFFF)


async def split_world(world: BrokersWorld) -> None:
    await storage_format_record(world.store).create(None, StorageFormat(storage_format=2))


async def record(world: BrokersWorld) -> NamespaceRecord:
    found = await namespace_records(world.store).get(NOUN)
    assert found is not None
    return found.record


def names(count: int) -> list[TopicName]:
    return [TopicName.parse(full(f"t-{number}")) for number in range(count)]


async def knows_split(broker: OneBroker, world: BrokersWorld) -> None:
    division = division_of(await record(world))
    namespace = NamespaceName(*NOUN)
    await wait_until(lambda: broker.ownership._divisions.known(namespace) in (None, division))


async def test_topics_stay_open_and_every_broker_finds_them_in_the_parts() -> None:
    async with BrokersWorld(bundles=1) as world:
        await split_world(world)
        owner = await world.owner_of("t-0")
        other = world.other_than(owner)
        await owner.ownership.locate(names(1)[0], authoritative=True)
        async with await owner.client() as client:
            for number, name in enumerate(names(8)):
                await client.produce_on(name.local_name, number)
            parts = await owner.ownership.split(WHOLE, [0x80000000])
            assert [part.range for part in parts] == ["0x00000000_0x80000000", "0x80000000_0xffffffff"]
            for number in range(8):
                await client.publish(1, producer_id=number)  # on the same connection, with the same producers
            await client.expect_nothing()
        assert owner.ownership.owned_bundles() == parts
        await knows_split(other, world)
        for name in names(8):
            assert owner.ownership.owns(name)
            location = await other.ownership.locate(name)
            assert isinstance(location, There)
            assert location.broker_id == owner.id
        epochs = [await bundle_owners(world.store).get(part.noun) for part in parts]
        assert [found.record.epoch for found in epochs if found is not None] == [2, 2]
        assert await bundle_owners(world.store).get(WHOLE.noun) is None


async def test_a_part_moves_alone_and_is_split_again() -> None:
    async with BrokersWorld(bundles=1) as world:
        await split_world(world)
        owner, other = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        lower, upper = await owner.ownership.split(WHOLE, [0x40000000])
        await owner.ownership.release(upper, to=other.id)
        moved = next(name for name in names(20) if upper.holds(name))
        kept = next(name for name in names(20) if lower.holds(name))
        assert await other.ownership.locate(moved) == Here()
        assert owner.ownership.owns(kept)
        assert await other.ownership.split(upper, [0x80000000, 0xC0000000]) == bundles_of(NamespaceName(*NOUN), 4)[1:]
        assert division_of(await record(world)) == (0, 0x40000000, 0x80000000, 0xC0000000)
        await knows_split(owner, world)
        assert owner.ownership.owns(kept)
        assert isinstance(await owner.ownership.locate(moved), There)


@pytest.mark.parametrize(
    ("bundle", "starts", "why"),
    [
        (WHOLE, [0], "it can be split at 1 or later, not at 0"),
        (WHOLE, [], "it can be split at 1 or later"),
        (WHOLE, [1 << 32], "not at 4294967296"),
        (WHOLE, list(range(1, 200)), "would have 200 bundles, and 128 are possible"),
    ],
)
async def test_a_cut_that_is_not_possible_is_refused_and_changes_nothing(bundle: Bundle, starts: list[int], why: str) -> None:
    async with BrokersWorld(count=1, bundles=1) as world:
        await split_world(world)
        (owner,) = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        with pytest.raises(SplitRefusedError, match=why):
            await owner.ownership.split(bundle, starts)
        assert owner.ownership.owned_bundles() == [WHOLE]
        assert (await record(world)).bundle_starts is None
        await owner.ownership.release(WHOLE)


async def test_a_cluster_whose_upgrade_is_not_finished_splits_nothing() -> None:
    async with BrokersWorld(count=1, bundles=1) as world:
        (owner,) = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        with pytest.raises(SplitRefusedError, match="cepheid cluster finish-upgrade"):
            await owner.ownership.split(WHOLE, [5])


async def test_only_the_owner_splits() -> None:
    async with BrokersWorld(bundles=1) as world:
        await split_world(world)
        owner, other = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        with pytest.raises(ServiceNotReadyError, match="it is not served here"):
            await other.ownership.split(WHOLE, [5])


@pytest.mark.parametrize("reaches_store", [True, False])
async def test_a_split_whose_answer_is_lost_is_found_done_or_not(reaches_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld(count=1, bundles=1) as world:
        await split_world(world)
        (owner,) = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        multi, lost = owner.session.multi, [True]

        async def losing(ops: Any) -> Any:
            if lost and reaches_store:
                lost.pop()
                await multi(ops)
                raise StoreUnavailableError("planted: the answer is lost", outcome_unknown=True)
            if lost:
                lost.pop()
                raise StoreUnavailableError("planted: it did not arrive", outcome_unknown=True)
            return await multi(ops)

        monkeypatch.setattr(owner.session, "multi", losing)
        parts = await owner.ownership.split(WHOLE, [0x80000000])
        assert owner.ownership.owned_bundles() == parts
        assert all(owner.ownership.owns(name) for name in names(8))
        await owner.ownership.release(parts[0])


async def test_a_policy_that_changes_at_the_same_time_is_kept() -> None:
    async with BrokersWorld(count=1, bundles=1) as world:
        await split_world(world)
        (owner,) = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        records = namespace_records(world.store)
        get, changed = owner.ownership._splits._namespaces.get, [True]

        async def get_and_change(noun: Any) -> Any:
            found = await get(noun)
            if changed:
                changed.pop()
                await records.replace(NOUN, found.record.replace(message_ttl_s=7), found.version)
            return found

        owner.ownership._splits._namespaces.get = get_and_change  # type: ignore[method-assign]
        await owner.ownership.split(WHOLE, [0x80000000])
        assert (await record(world)).message_ttl_s == 7
        assert (await record(world)).bundles == 2


async def test_a_broker_that_does_not_know_of_the_split_does_not_acquire_the_bundle() -> None:
    async with BrokersWorld(bundles=1) as world:
        await split_world(world)
        owner, other = world.brokers
        name = names(1)[0]
        await owner.ownership.locate(name, authoritative=True)
        await other.ownership.locate(name)
        other.ownership._divisions._on_change = lambda namespace: None  # type: ignore[method-assign]
        parts = await owner.ownership.split(WHOLE, [0x80000000])
        for part in parts:
            await owner.ownership.release(part, to=other.id)
        assert await other.ownership.locate(name, authoritative=True) == Here()
        assert other.ownership.owned_bundles() == [bundle_of(name, (0, 0x80000000))]
        assert await bundle_owners(world.store).get(WHOLE.noun) is None


async def test_a_namespace_that_was_deleted_and_created_again_has_its_first_bundles_again() -> None:
    async with BrokersWorld(count=1) as world:
        await split_world(world)
        (owner,) = world.brokers
        topic, noun = TopicName.parse("persistent://public/short/t"), ("public", "short")
        whole = Bundle(topic.namespace, 0, 0xFFFFFFFF)
        records = namespace_records(world.store)
        await records.create(noun, NamespaceRecord(bundles=1))
        await owner.ownership.locate(topic)
        await owner.ownership.split(whole, [0x80000000])
        await records.delete(noun, None)
        await records.create(noun, NamespaceRecord(bundles=1))
        await wait_until(lambda: not owner.ownership.owned_bundles())
        history = await bundle_histories(world.store).get(whole.noun)
        assert history is not None
        assert history.record == BundleHistory(epoch=1, split_at=(0x80000000,))
        assert await owner.ownership.locate(topic) == Here()
        assert owner.ownership.owned_bundles() == [whole]


async def test_a_session_that_ends_takes_the_parts_along() -> None:
    async with BrokersWorld(count=1, bundles=1) as world:
        await split_world(world)
        (owner,) = world.brokers
        await owner.ownership.locate(names(1)[0], authoritative=True)
        await owner.ownership.split(WHOLE, [0x80000000])
        owner.session.expire()
        assert owner.ownership.owned_bundles() == []
        owner.session.renew()
        await wait_until(lambda: owner.id in owner.ownership.directory.brokers)
        assert await owner.ownership.locate(names(1)[0], authoritative=True) == Here()


@pytest.mark.parametrize(
    ("hashes", "cut"), [([], None), ([5], None), ([5, 5], None), ([1, 9], 5), ([1, 2, 3, 9], 3), ([1, 1, 1, 2, 3], 2)]
)
def test_topics_are_divided_into_as_many_below_as_above(hashes: list[int], cut: int | None) -> None:
    assert by_topics(hashes) == cut


def test_load_is_divided_where_both_sides_are_most_alike() -> None:
    assert by_load({1: 10.0, 2: 1.0, 3: 1.0}) == 2
    assert by_load({1: 1.0, 2: 1.0, 3: 10.0}) == 3
    assert by_load({7: 1.0}) is None


def test_the_middle_of_a_range_leaves_something_on_both_sides() -> None:
    assert middle(0, 0xFFFFFFFF) == 0x80000000
    assert middle(4, 5) == 5
    assert middle(4, 4) is None


def test_a_bundle_is_in_a_division_only_with_both_its_ends() -> None:
    lower, upper = WHOLE.parts([0x80000000])
    assert is_in(WHOLE, 1)
    assert not is_in(WHOLE, 2)
    assert not is_in(lower, 1)
    assert is_in(lower, 2)
    assert is_in(upper, (0, 0x80000000))
    assert not is_in(upper, (0, 0x80000000, 0xC0000000))
