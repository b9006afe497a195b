"""Two brokers, one cluster: lookups, takeover, unloading, and the owner that wakes up too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundles import Bundle, bundle_of
from cepheid_broker.ownership.isolation import IsolationRules
from cepheid_broker.ownership.ownership import DestinationRefusedError, Here, NotOwnerError, There
from cepheid_metadata import (
    IsolationPolicies,
    IsolationPolicy,
    MemoryStore,
    NamespaceRecord,
    RegistrationTakenError,
    broker_records,
    bundle_histories,
    bundle_owners,
    keys,
    namespace_records,
    topic_changes,
)
from cepheid_ports import Ports
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import ScriptedClient, full
from tests.support import wait_until


class Nobody:
    """Serves nothing."""

    def drop_unowned(self) -> None:
        return

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        return


def lookup_of(client: ScriptedClient, topic: str, *, authoritative: bool = False) -> pb.CommandLookupTopic:
    return pb.CommandLookupTopic(topic=full(topic), request_id=client.request_id(), authoritative=authoritative)


async def lookup(broker: OneBroker, topic: str, *, authoritative: bool = False) -> pb.CommandLookupTopicResponse:
    async with await broker.client() as client:
        return await client.ask(lookup_of(client, topic, authoritative=authoritative), pb.CommandLookupTopicResponse)


async def test_lookups_at_any_broker_lead_to_the_same_one() -> None:
    async with BrokersWorld(bundles=16) as world:
        first, second = world.brokers
        owners = set()
        for number in range(20):
            answers = [await lookup(broker, f"t-{number}") for broker in world.brokers]
            kinds = sorted(answer.response for answer in answers)
            assert kinds == [pb.CommandLookupTopicResponse.Redirect, pb.CommandLookupTopicResponse.Connect]
            (url,) = {answer.brokerServiceUrl for answer in answers}
            owners.add(url)
        assert owners == {first.service_url, second.service_url}


async def test_a_redirect_to_a_broker_that_is_to_take_it_is_authoritative_and_taken() -> None:
    async with BrokersWorld() as world:
        chosen = await world.owner_of("t")
        other = world.other_than(chosen)
        if chosen.ownership.owns(TopicName.parse(full("t"))):  # the first was asked, and it was its own
            await chosen.ownership.release(await chosen.ownership.bundle_of(TopicName.parse(full("t"))), to=chosen.id)
        redirect = await lookup(other, "t")
        assert (redirect.response, redirect.authoritative) == (pb.CommandLookupTopicResponse.Redirect, True)
        assert not chosen.ownership.owns(TopicName.parse(full("t"))), "nobody asked it yet"
        connect = await lookup(chosen, "t", authoritative=True)
        assert connect.response == pb.CommandLookupTopicResponse.Connect
        assert connect.brokerServiceUrl == redirect.brokerServiceUrl == chosen.service_url
        again = await lookup(other, "t")
        assert (again.response, again.authoritative) == (pb.CommandLookupTopicResponse.Redirect, False), "it is owned now"


async def test_whoever_is_told_to_take_a_bundle_takes_it_though_another_would_be_chosen() -> None:
    async with BrokersWorld() as world:
        name = TopicName.parse(full("t"))
        location = await world.brokers[0].ownership.locate(name)
        other = world.brokers[1] if isinstance(location, Here) else world.brokers[0]
        if isinstance(location, Here):
            await world.brokers[0].ownership.release(await other.ownership.bundle_of(name), to="broker-1")
        assert await other.ownership.locate(name, authoritative=True) == Here()
        assert isinstance(await world.other_than(other).ownership.locate(name), There)


async def test_two_brokers_that_acquire_at_once_leave_one_owner() -> None:
    async with BrokersWorld(3) as world:
        for number in range(20):
            name = TopicName.parse(f"persistent://public/default/t-{number}")
            found = await asyncio.gather(
                *(broker.ownership.locate(name, authoritative=True) for broker in world.brokers), return_exceptions=True
            )
            owners = [broker for broker in world.brokers if broker.ownership.owns(name)]
            assert len(owners) == 1, found
            there = {location.broker_id for location in found if isinstance(location, There)}
            assert there == {owners[0].id}
            bundle = await owners[0].ownership.bundle_of(name)
            record = await bundle_owners(world.store).get(bundle.noun)
            assert record is not None
            assert record.record.broker_id == owners[0].id


async def test_a_producer_at_the_wrong_broker_is_sent_back_to_look_again() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        async with await other.client() as client:
            ask = pb.CommandProducer(topic=full(topic), producer_id=0, request_id=client.request_id())
            error = await client.ask(ask, pb.CommandError)
            assert error.error == ServerError.SERVICE_NOT_READY
            assert owner.id in error.message
            await client.ping()  # the connection, and everything else on it, lives
        assert not other.has_open(topic)
        with pytest.raises(NotOwnerError) as refused:
            await other.broker.topics.get(TopicName.parse(full(topic)), may_create=True)
        assert refused.value.there.addresses["pulsar"] == f"127.0.0.1:{owner.port}"


async def test_non_persistent_topics_and_topics_of_a_namespace() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        await owner.broker.catalog.create(TopicName.parse(full(topic)), 0)
        name = TopicName.parse("non-persistent://public/default/np")
        await owner.ownership.locate(name, authoritative=True)
        elsewhere = next(broker for broker in world.brokers if not broker.ownership.owns(name))
        async with await elsewhere.client() as client:
            ask = pb.CommandProducer(topic=str(name), producer_id=0, request_id=client.request_id())
            assert (await client.ask(ask, pb.CommandError)).error == ServerError.SERVICE_NOT_READY
        async with await other.client() as client:
            ask_topics = pb.CommandGetTopicsOfNamespace(request_id=client.request_id(), namespace="public/default")
            assert list((await client.ask(ask_topics, pb.CommandGetTopicsOfNamespaceResponse)).topics) == [full(topic)]
            ask_partitions = pb.CommandPartitionedTopicMetadata(topic=full(topic), request_id=client.request_id())
            assert (await client.ask(ask_partitions, pb.CommandPartitionedTopicMetadataResponse)).partitions == 0


async def test_when_the_owners_session_ends_another_takes_over_with_everything() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client, await other.client() as heir:
            await client.produce_on(topic)
            receipts = [receipt.position for receipt in await client.publish(5)]
            owner.session.expire()
            assert not owner.has_open(topic), "nothing is served from the moment it hears of it"
            await client.expect(pb.CommandCloseProducer)
            answer = await heir.ask(lookup_of(heir, topic), pb.CommandLookupTopicResponse)
            if answer.response == pb.CommandLookupTopicResponse.Redirect:  # it has not heard yet that the owner is gone
                await wait_until(lambda: list(other.ownership.directory.brokers) == [other.id])
                answer = await heir.ask(lookup_of(heir, topic), pb.CommandLookupTopicResponse)
            assert answer.response == pb.CommandLookupTopicResponse.Connect
            await heir.subscribe(topic, "s", permits=10)
            assert [message.position for message in await heir.expect_messages(5)] == receipts
            await heir.produce_on(topic, 1)
            (later,) = await heir.publish(1, producer_id=1)
            assert later.position > receipts[-1]
        bundle = await other.ownership.bundle_of(TopicName.parse(full(topic)))
        history = await bundle_histories(world.store).get(bundle.noun)
        assert history is not None
        assert history.record.epoch == 2


async def test_a_broker_with_a_new_session_is_registered_and_takes_bundles_again() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        owner.session.expire()
        with pytest.raises(ServiceNotReadyError):
            await owner.broker.topics.get(TopicName.parse(full(topic)), may_create=True)
        await wait_until(lambda: list(other.ownership.directory.brokers) == [other.id])
        owner.session.renew()
        await wait_until(lambda: list(other.ownership.directory.brokers) == [owner.id, other.id])
        await wait_until(lambda: list(owner.ownership.directory.brokers) == [owner.id, other.id])
        assert await owner.ownership.locate(TopicName.parse(full(topic)), authoritative=True) == Here()
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(3)


async def test_an_owner_that_slept_acknowledges_nothing_when_it_wakes() -> None:
    """Scenario 26: it was asleep beyond its session; another serves the topic; it publishes on its old handle."""
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client, await heir.client() as other:
            await client.produce_on(topic)
            await client.publish(3)
            owner.session.sleep()
            await wait_until(lambda: list(heir.ownership.directory.brokers) == [heir.id])
            await other.subscribe(topic, "s", permits=100)
            await other.expect_messages(3)
            assert owner.has_open(topic), "it has heard of nothing"
            client.send_message(3, b"from the old owner")
            await client.expect_nothing()  # fenced: whatever its broker believes
            await other.produce_on(topic, 7)
            other.send_message(0, b"from the heir", producer_id=7)
            got = await other.skim_messages(1)
            assert got[0].tail.endswith(b"from the heir"), "and nothing of the old owner came in between"
            owner.session.wake()
            assert not list(owner.broker.topics.loaded())
            await client.expect(pb.CommandCloseProducer)  # and no receipt
            assert not list(owner.ownership.states.owned())
            async with await owner.client() as late:
                ask = pb.CommandProducer(topic=full(topic), producer_id=0, request_id=late.request_id())
                assert (await late.ask(ask, pb.CommandError)).error == ServerError.SERVICE_NOT_READY
            owner.session.renew()
            redirect = await lookup(owner, topic)
            assert redirect.brokerServiceUrl == heir.service_url


async def test_an_owner_whose_loop_stood_still_loses_only_what_was_asked_for_and_acknowledges_nothing_of_it() -> None:
    """Its session lives on, in a thread of its own. It has not answered the challenge of another broker."""
    async with BrokersWorld(bundles=16) as world:
        owner, heir = world.brokers
        asked_for, kept = [await world.topic_on(owner, prefix) for prefix in ("asked", "kept")]
        assert len(owner.ownership.owned_bundles()) > 1, "they are in different bundles"
        async with await owner.client() as client, await owner.client() as other, await heir.client() as late:
            await client.produce_on(asked_for)
            await client.publish(3)
            await other.produce_on(kept)
            owner.session.cut()  # nothing of what happens reaches it
            heir.ownership._tenures._liveness = FoundGone({owner.id})
            await late.subscribe(asked_for, "s", permits=100)
            await late.expect_messages(3)
            assert owner.has_open(asked_for), "it has heard of nothing"
            client.send_message(3, b"what came while it stood still")
            await client.expect_nothing()
            owner.session.mend()
            await client.expect(pb.CommandCloseProducer)  # and no receipt
            assert not owner.has_open(asked_for)
            assert (await lookup(owner, asked_for)).brokerServiceUrl == heir.service_url
            await other.publish(3)
            await late.expect_nothing()
            assert owner.ownership.statistics().bundles_lost == 1


async def test_an_outage_of_metadata_takes_nothing_and_gives_nothing() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic, foreign = await world.topic_on(owner), await world.topic_on(other)
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(1)
            for broker in world.brokers:
                broker.session.cut()
            await client.publish(5, first_sequence_id=1)
            own = await client.ask(lookup_of(client, topic), pb.CommandLookupTopicResponse)
            assert own.response == pb.CommandLookupTopicResponse.Connect, "owned bundles go on"
            answer = await client.ask(lookup_of(client, foreign), pb.CommandLookupTopicResponse)
            assert answer.response == pb.CommandLookupTopicResponse.Failed
            assert answer.error == ServerError.SERVICE_NOT_READY
            assert "Failed to acquire ownership" in answer.message, "C++ clients keep the connection for these words"
            for broker in world.brokers:
                broker.session.mend()
            answer = await client.ask(lookup_of(client, foreign), pb.CommandLookupTopicResponse)
            assert answer.brokerServiceUrl == other.service_url
            await client.publish(1, first_sequence_id=6)


async def test_a_broker_whose_session_outlives_an_outage_stays_registered_without_a_gap() -> None:
    async with BrokersWorld() as world:
        broker, key = world.brokers[0], keys.broker_key(world.brokers[0].id)
        watch = await world.store.watch(key)
        for _ in range(2):
            broker.session.cut()
            broker.session.mend()
        await broker.ownership.directory.refresh()
        assert not watch.has_fired
        await world.store.delete(key, None)
        await wait_until(lambda: key in world.tree.nodes, what="deleted by somebody: it is made again")


async def test_unloading_a_bundle_moves_it_on_and_a_destination_is_kept() -> None:
    async with BrokersWorld(3) as world:
        owner = world.brokers[0]
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        bundle = await owner.ownership.bundle_of(name)
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(3)
            await owner.ownership.release(bundle)
            closed = await client.expect(pb.CommandCloseProducer)
            assert closed.producer_id == 0
        second = await world.owner_of(topic)
        assert second is not owner, "the next in the order of choice"
        assert await second.ownership.locate(name, authoritative=True) == Here()
        (third,) = (broker for broker in world.brokers if broker not in (owner, second))
        await second.ownership.release(bundle, to=third.id)
        assert await world.owner_of(topic, asked=second) is third
        assert await world.owner_of(topic, asked=owner) is third
        assert await third.ownership.locate(name) == Here(), "it is its to take"
        async with await third.client() as client:
            await client.subscribe(topic, "s", permits=10)
            await client.expect_messages(3)


@pytest.mark.parametrize("why", ["does not run", "is being drained", "an isolation policy"])
async def test_a_destination_that_cannot_have_the_bundle_is_refused(why: str) -> None:
    async with BrokersWorld(3) as world:
        owner, other, third = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        to = "nowhere" if why == "does not run" else other.id
        if why == "is being drained":
            other.ownership.drain()
            await wait_until(lambda: other.id in owner.ownership.leaving)
        elif why == "an isolation policy":
            policy = IsolationPolicy(namespaces=("public/default",), primary=(owner.id, third.id))
            owner.ownership.placement.isolation = IsolationRules(IsolationPolicies(policies={"p": policy}))
        with pytest.raises(DestinationRefusedError, match=why):
            await owner.ownership.release(await owner.ownership.bundle_of(name), to=to)
        assert owner.ownership.owns(name)


async def test_the_only_broker_that_unloads_a_bundle_takes_it_again() -> None:
    async with BrokersWorld(1) as world:
        (owner,) = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        await owner.ownership.release(await owner.ownership.bundle_of(name))
        assert not owner.ownership.owns(name)
        assert await owner.ownership.locate(name) == Here()


async def test_a_topic_that_is_being_opened_goes_with_its_bundle() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        bundle = await owner.ownership.bundle_of(name)
        for turns in range(12):  # the release falls into every step of the opening
            await owner.ownership.locate(name, authoritative=True)
            opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            await owner.ownership.release(bundle)
            assert not owner.has_open(topic), f"after {turns} turns"
            (outcome,) = await asyncio.gather(opening, return_exceptions=True)
            assert isinstance(outcome, NotOwnerError | ServiceNotReadyError) or outcome.closed, outcome  # type: ignore[union-attr]
            found = await other.broker.topics.get(name, may_create=True)
            assert not found.closed
            await other.ownership.release(bundle)


async def test_a_topic_that_is_being_opened_when_the_session_ends_is_not_served() -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        for turns in range(12):
            await owner.ownership.locate(name, authoritative=True)
            opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            owner.session.expire()
            assert not owner.has_open(topic), f"after {turns} turns"
            (outcome,) = await asyncio.gather(opening, return_exceptions=True)
            assert isinstance(outcome, Exception) or outcome.closed, outcome
            owner.session.renew()
            await wait_until(lambda: len(owner.ownership.directory.brokers) == 2)


async def test_a_broker_that_stops_gives_its_bundles_away_in_order() -> None:
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(2)
            await owner.stop()
        await wait_until(lambda: list(heir.ownership.directory.brokers) == [heir.id])
        assert await heir.ownership.locate(TopicName.parse(full(topic))) == Here()
        async with await heir.client() as client:
            await client.produce_on(topic)
            await client.subscribe(topic, "s", permits=10)
            await client.expect_messages(2)


async def test_a_broker_that_is_started_anew_at_its_address_does_not_wait_for_its_old_session() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        addresses = owner.ownership.brokers[owner.id]
        await owner.broker.topics.get(name, may_create=True)
        dead = owner.session  # a crash: its records stay until the server ends the session
        store = MemoryStore(world.tree)
        again = BundleOwnership(store, Ports())
        again.user = Nobody()
        await again.start(owner.id, addresses)
        assert await again.locate(name) == Here()
        assert isinstance(await other.ownership.locate(name), There)
        await wait_until(lambda: not owner.ownership.owns(name), what="the record is not the old process's any more")
        assert not owner.has_open(topic), "if it lives after all, it ends what it has open"
        dead.expire()  # what it still has goes, and nothing of the new process
        assert again.owns(name)
        found = await bundle_owners(world.store).get((await again.bundle_of(name)).noun)
        assert found is not None
        assert found.record.incarnation == again.states.incarnation
        await again.aclose()
        await store.aclose()
        dead.renew()


async def test_a_broker_that_is_started_again_at_a_new_address_is_not_looked_for_at_the_old_one() -> None:
    """As a pod whose address changes: another broker's challenge has removed the registration, and the old session lives on."""
    async with BrokersWorld() as world:
        owner, other = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        assert owner.ownership._registration is not None
        await owner.ownership._registration._tasks.aclose()  # the process is dead
        await broker_records(world.store).delete(owner.id, None)
        store = MemoryStore(world.tree)
        again = BundleOwnership(store, Ports())
        again.user = Nobody()
        addresses = {"pulsar": "10.9.9.9:6650"}
        await again.start(owner.id, addresses)
        await wait_until(lambda: other.ownership.brokers.get(owner.id) == addresses)
        assert await again.locate(name) == Here()
        assert await other.ownership.locate(name) == There(owner.id, addresses)
        await wait_until(lambda: not owner.ownership.owns(name), what="the record is not the old process's any more")
        await again.aclose()
        await store.aclose()


async def test_an_owner_with_a_newer_address_than_the_known_registration_keeps_its_bundle() -> None:
    async with BrokersWorld() as world:
        owner, other = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        directory = other.ownership.directory
        known = directory.brokers[owner.id]
        directory._brokers[owner.id] = known.replace(addresses={"pulsar": "10.9.9.9:6650"})  # read before the last change
        assert await other.ownership.locate(name) == There(owner.id, known.addresses)
        assert owner.ownership.owns(name)


async def test_a_watcher_hears_of_topics_that_another_broker_made_grew_and_deleted() -> None:
    async with BrokersWorld() as world:
        first, second = world.brokers
        async with await first.client() as client:
            ask = pb.CommandWatchTopicList(
                request_id=client.request_id(), watcher_id=1, namespace="public/default", topics_pattern=full("w.*")
            )
            assert not (await client.ask(ask, pb.CommandWatchTopicListSuccess)).topic
            catalog, name = second.broker.catalog, TopicName.parse(full("w"))
            await catalog.create(name, 1)
            update = await client.expect(pb.CommandWatchTopicUpdate)
            assert list(update.new_topics) == [full("w-partition-0")]
            found = await catalog.find(name)
            assert found is not None
            await catalog.replace(name, found, partitions=2)
            assert list((await client.expect(pb.CommandWatchTopicUpdate)).new_topics) == [full("w-partition-1")]
            await catalog.delete(name)
            gone = await client.expect(pb.CommandWatchTopicUpdate)
            assert sorted(gone.deleted_topics) == [full("w-partition-0"), full("w-partition-1")]


@pytest.mark.slow
async def test_marks_of_changed_topics_that_cannot_be_written_are_written_later() -> None:
    async with BrokersWorld() as world:
        second = world.brokers[1]
        await second.broker.catalog.create(TopicName.parse(full("w")), 0)
        second.session.cut()  # before the mark was written
        await asyncio.sleep(0.1)
        assert await topic_changes(world.store).get(("public", "default")) is None
        second.session.mend()
        for _ in range(3000):
            if (found := await topic_changes(world.store).get(("public", "default"))) is not None:
                break
            await asyncio.sleep(0.01)
        assert found is not None
        assert found.record.broker_id == second.id


async def test_names_given_to_producers_are_unique_and_topic_epochs_go_on_with_the_next_owner() -> None:
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic, other = await world.topic_on(owner), await world.topic_on(heir)
        async with await owner.client() as client, await heir.client() as late:
            names = [(await client.produce_on(topic, number)).producer_name for number in range(3)]
            names += [(await late.produce_on(other, number)).producer_name for number in range(3)]
            assert len(set(names)) == 6
            for number in range(3):
                request_id = client.request_id()
                await client.ask(pb.CommandCloseProducer(producer_id=number, request_id=request_id), pb.CommandSuccess)
            mode = pb.ExclusiveWithFencing
            first = await client.produce_on(topic, 10, producer_access_mode=mode)
            await owner.ownership.release(await owner.ownership.bundle_of(TopicName.parse(full(topic))))
            await heir.ownership.locate(TopicName.parse(full(topic)), authoritative=True)
            second = await late.produce_on(topic, 11, producer_access_mode=mode)
            assert second.topic_epoch > first.topic_epoch
            ask = pb.CommandProducer(
                topic=full(topic),
                producer_id=12,
                request_id=late.request_id(),
                topic_epoch=first.topic_epoch,
                producer_access_mode=mode,
            )
            assert (await late.ask(ask, pb.CommandError)).error == ServerError.PRODUCER_FENCED, "another owner gave it that"


async def test_a_namespace_that_is_deleted_gives_its_bundles_back_and_a_refused_deletion_closes_nothing() -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        topic = TopicName.parse("persistent://public/short/t")
        records = namespace_records(world.store)
        await records.create(("public", "short"), NamespaceRecord(bundles=1))
        assert await owner.ownership.locate(topic, authoritative=True) == Here()
        found = await records.get(("public", "short"))
        assert found is not None
        await records.replace(("public", "short"), found.record.replace(deleted=True), found.version)
        await records.replace(("public", "short"), found.record, found.version + 1)
        await asyncio.sleep(0.05)
        assert owner.ownership.owns(topic)
        await records.delete(("public", "short"), None)
        await records.create(("public", "short"), NamespaceRecord(bundles=8))  # made anew, cut otherwise
        await wait_until(lambda: not owner.ownership.owns(topic))
        bundle = Bundle(topic.namespace, 0, 0xFFFFFFFF)
        await wait_until(lambda: bundle not in owner.ownership.owned_bundles())
        assert await bundle_owners(world.store).get(bundle.noun) is None
        assert await owner.ownership.locate(topic, authoritative=True) == Here()
        assert (await owner.ownership.bundle_of(topic)).range == bundle_of(topic, 8).range


class FoundGone(BrokerLiveness):
    """Says that these brokers left their last challenges unanswered."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def is_gone(self, broker_id: str) -> bool:
        return broker_id in self._names

    async def has_come_back(self, broker_id: str) -> bool:
        return False

    async def aclose(self) -> None:
        return


class Paused:
    """Openings of topics at one broker stand still when their ledger is open, until `go` is set."""

    def __init__(self, broker: OneBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        ledgers = broker.broker.managed_ledgers
        open_ledger = ledgers.open

        async def open_and_wait(*args: Any) -> Any:
            opened = await open_ledger(*args)
            self.reached.set()
            await self.go.wait()
            return opened

        monkeypatch.setattr(ledgers, "open", open_and_wait)


async def test_a_release_waits_for_what_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        name = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(name)
        paused = Paused(owner, monkeypatch)
        opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
        await paused.reached.wait()
        releasing = asyncio.ensure_future(owner.ownership.release(bundle))
        await asyncio.sleep(0.02)
        assert not releasing.done()
        assert await bundle_owners(world.store).get(bundle.noun) is not None, "nobody else takes it yet"
        paused.go.set()
        await releasing
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(outcome, ServiceNotReadyError)
        assert not list(owner.broker.topics.loaded())
        assert await bundle_owners(world.store).get(bundle.noun) is None


async def test_what_was_being_opened_in_a_session_that_ended_is_not_served_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        paused = Paused(owner, monkeypatch)
        opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
        await paused.reached.wait()
        owner.session.expire()
        owner.session.renew()
        assert await heir.ownership.locate(name, authoritative=True) == Here()
        paused.go.set()
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(outcome, Exception), outcome
        assert not owner.has_open(str(name))
        assert not (await heir.broker.topics.get(name, may_create=False)).closed


async def test_lookups_wait_for_a_release_and_are_told_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ones would come back later and later: clients wait twice as long each time."""
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        paused = Paused(owner, monkeypatch)
        opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
        await paused.reached.wait()
        releasing = asyncio.ensure_future(owner.ownership.release(await owner.ownership.bundle_of(name), to=heir.id))
        await asyncio.sleep(0)
        looking = [asyncio.ensure_future(lookup(owner, topic)) for _ in range(3)]
        await asyncio.sleep(0.1)  # that nobody is answered meanwhile is the subject
        assert not any(task.done() for task in looking)
        assert owner.ownership.statistics().lookups_waiting == 3
        paused.go.set()
        answers = await asyncio.gather(*looking)
        assert {answer.response for answer in answers} == {pb.CommandLookupTopicResponse.Redirect}
        assert {answer.brokerServiceUrl for answer in answers} == {heir.service_url}
        await releasing
        await asyncio.gather(opening, return_exceptions=True)


async def test_a_lookup_that_a_release_outlasts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        monkeypatch.setattr(owner.ownership, "_timeout_s", 0.1)
        paused = Paused(owner, monkeypatch)
        opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
        await paused.reached.wait()
        releasing = asyncio.ensure_future(owner.ownership.release(await owner.ownership.bundle_of(name)))
        await asyncio.sleep(0)
        refused = await lookup(owner, topic)
        assert refused.error == ServerError.SERVICE_NOT_READY
        assert "it is being unloaded" in refused.message
        paused.go.set()
        await releasing
        await asyncio.gather(opening, return_exceptions=True)


async def test_a_storm_of_lookups_costs_few_reads_of_metadata_and_is_answered() -> None:
    """Ten thousand clients that lost their broker ask at once, half of them for topics that no broker has yet."""
    async with BrokersWorld() as world:
        owner, asked = world.brokers
        topic = await world.topic_on(owner)
        names = [TopicName.parse(full(f"{topic}-{number}")) for number in range(10_000)]
        reads = 0
        get = asked.session.get

        async def counted(key: str) -> Any:
            nonlocal reads
            reads += 1
            return await get(key)

        asked.session.get = counted  # type: ignore[method-assign]
        asked.ownership._timeout_s = 120.0  # ten thousand tasks take as long as the machine lets them
        found = await asyncio.gather(*map(asked.ownership.locate, names))
        assert {type(location) for location in found} == {Here, There}
        assert {location.broker_id for location in found if isinstance(location, There)} == {owner.id}
        assert reads < 100


async def test_lookups_wait_until_a_broker_that_starts_is_registered() -> None:
    """Its port is open first: a client that comes meanwhile is not sent away for longer than the start takes."""
    async with BrokersWorld(1) as world:
        name = TopicName.parse(full("t"))
        store = MemoryStore(world.tree)
        ownership = BundleOwnership(store, Ports(), timeout_s=10.0)
        ownership.user = Nobody()
        looking = asyncio.ensure_future(ownership.locate(name))
        await asyncio.sleep(0.05)
        assert not looking.done()
        await ownership.start("broker-2", {"pulsar": "127.0.0.1:2"})
        location = await looking
        assert location == Here() or isinstance(location, There)
        assert await ownership.locate(name) == location
        await ownership.aclose()
        await store.aclose()
        late = BundleOwnership(MemoryStore(world.tree), Ports(), timeout_s=0.05)
        with pytest.raises(ServiceNotReadyError, match="not registered yet"):
            await late.locate(name)
        await late.aclose()


async def test_a_broker_that_finds_its_id_taken_leaves_the_registration_alone() -> None:
    async with BrokersWorld(1) as world:
        (first,) = world.brokers
        store = MemoryStore(world.tree)
        second = BundleOwnership(store, Ports())
        second.user = Nobody()
        starting = asyncio.ensure_future(second.start(first.id, {"pulsar": "127.0.0.1:2", "http": "127.0.0.1:3"}))
        await wait_until(lambda: bool(second.directory.brokers))
        await asyncio.sleep(0.05)
        assert not starting.done()
        starting.cancel()
        await asyncio.wait([starting])
        await second.release_all()
        await second.aclose()
        await store.aclose()
        found = await broker_records(world.store).get(first.id)
        assert found is not None
        assert found.record.addresses["pulsar"] == f"127.0.0.1:{first.port}"


async def test_of_two_processes_at_one_address_the_later_one_stays_registered_and_the_other_gives_up() -> None:
    async with BrokersWorld(1) as world:
        stores = MemoryStore(world.tree), MemoryStore(world.tree)
        failures: list[list[BaseException]] = [[], []]
        earlier, later = (
            BundleOwnership(store, Ports(wall_ms=lambda number=number: number), patience_s=0.02, on_failed=failures[number].append)
            for number, store in enumerate(stores)
        )
        for ownership in (earlier, later):
            ownership.user = Nobody()
            await ownership.start("twin", {"pulsar": "127.0.0.1:2"})
        await wait_until(lambda: bool(failures[0]), what="the earlier one hears of it")
        assert isinstance(failures[0][0], RegistrationTakenError)
        for ownership in (earlier, later):
            found = await broker_records(world.store).get("twin")
            assert found is not None
            assert found.record.started_at_ms == 1
            await ownership.aclose()
        assert await broker_records(world.store).get("twin") is None
        assert not failures[1]
        for store in stores:
            await store.aclose()


async def test_a_broker_whose_registration_vanished_makes_it_anew() -> None:
    async with BrokersWorld() as world:
        first, other = world.brokers
        topic = await world.topic_on(first)
        await broker_records(world.store).delete(first.id, None)  # by hand, or by a process that took it for its own
        await wait_until(lambda: keys.broker_key(first.id) in world.tree.nodes, what="it is made anew")
        await wait_until(lambda: first.id in other.ownership.directory.brokers)
        assert first.ownership.owns(TopicName.parse(full(topic))), "nothing else has changed"
        await first.stop()
        await wait_until(lambda: list(other.ownership.directory.brokers) == [other.id])
        await asyncio.sleep(0.05)
        assert await broker_records(world.store).get(first.id) is None, "it stopped"


async def test_a_broker_that_stops_takes_nothing_also_when_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld(1) as world:
        (owner,) = world.brokers
        name, later = TopicName.parse(full("topic-0")), TopicName.parse(full("topic-1"))
        assert await owner.ownership.bundle_of(name) != await owner.ownership.bundle_of(later)
        paused = Paused(owner, monkeypatch)
        opening = asyncio.ensure_future(owner.broker.topics.get(name, may_create=True))
        await paused.reached.wait()
        stopping = asyncio.ensure_future(owner.ownership.release_all())
        await wait_until(lambda: not owner.ownership.owns(name))
        for authoritative in (False, True):
            with pytest.raises(ServiceNotReadyError, match="stops"):
                await owner.ownership.locate(later, authoritative=authoritative)
        assert await bundle_owners(world.store).get((await owner.ownership.bundle_of(later)).noun) is None
        paused.go.set()
        await asyncio.gather(opening, stopping, return_exceptions=True)


async def test_a_bundle_that_another_broker_took_since_the_look_is_not_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner, late = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        owners = late.ownership._tenures._owners
        seen = [None]  # as it was a moment ago
        read = owners.get

        async def read_late(noun: Any) -> Any:
            return seen.pop() if seen else await read(noun)

        monkeypatch.setattr(owners, "get", read_late)
        location = await late.ownership.locate(name, authoritative=True)
        assert isinstance(location, There)
        assert location.broker_id == owner.id
        assert owner.ownership.owns(name)
        assert not late.ownership.owns(name)
        assert owner.ownership.states.lost == 0
