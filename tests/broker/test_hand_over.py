"""Bundles that move with their open topics: the next owner has opened them before clients are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cepheid_broker.admin.drains import drains
from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError
from cepheid_broker.ownership import HandOverCall, PeerUnreachableError
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.hand_over import AHEAD_S, Heir, TopicsAhead
from cepheid_broker.ownership.ownership import There
from cepheid_metadata import BrokerRegistration, BundleOwner, broker_records
from cepheid_wire import NamespaceName, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.support import wait_until

BUNDLE = Bundle(NamespaceName("public", "default"), 0, 0xFFFFFFFF)
TOPIC = TopicName.parse(full("t"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes is not the subject: a busy machine must not turn a hand-over into a plain unload."""
    for limit in ("PREPARE_LIMIT_S", "OPEN_LIMIT_S", "TAKE_LIMIT_S"):
        monkeypatch.setattr(f"cepheid_broker.ownership.hand_over.{limit}", 60.0)
    monkeypatch.setattr("cepheid_broker.topics.topics.OPEN_LIMIT_S", 60.0)


@pytest.fixture(autouse=True)
def few_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve only the calls between brokers: building all 350 routes takes longer than most of these tests."""
    monkeypatch.setattr("cepheid_broker.admin.app.ROUTERS", (drains,))


async def release(owner: OneBroker, topic: str, to: str = "") -> None:
    await owner.ownership.release(await owner.ownership.bundle_of(TopicName.parse(full(topic))), to=to)


async def closes(client: Any, count: int) -> list[Any]:
    """The next closes of producers and consumers."""
    found: list[Any] = []
    while len(found) < count:
        received = await client.receive()
        assert received is not None
        if isinstance(received.body, pb.CommandCloseProducer | pb.CommandCloseConsumer):
            found.append(received.body)
    return found


async def test_clients_are_sent_to_a_broker_that_has_the_topic_open() -> None:
    async with BrokersWorld(admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client, await heir.client() as late:
            await client.produce_on(topic)
            await client.subscribe(topic, "s", permits=10, subType=pb.CommandSubscribe.Shared)
            await client.publish(1)
            (message,) = await client.expect_messages(1)
            positions = [message.position]
            for sequence_id in (1, 2):
                client.send_message(sequence_id)
            found = await client.receive_for(0.2)
            assert sum(isinstance(body, pb.CommandMessage) for body in found) == 2
            last = next(b for b in reversed(found) if isinstance(b, pb.CommandMessage)).message_id
            client.acknowledge((last.ledgerId, last.entryId))  # an individual one, with a hole before it
            await release(owner, topic, heir.id)
            for close in await closes(client, 2):
                assert close.assignedBrokerServiceUrl == heir.service_url
            assert heir.has_open(topic)
            assert not owner.has_open(topic)
            assert heir.ownership.owned_bundles(), "the bundle has followed"
            figures = owner.ownership.statistics()
            assert (figures.bundles_released, figures.topics_moved, figures.hand_overs_failed, figures.bundles_lost) == (1, 1, 0, 0)
            await late.subscribe(topic, "s", permits=10, subType=pb.CommandSubscribe.Shared)
            again = await late.expect_messages(2)
            assert again[0].position == positions[0]
            assert (last.ledgerId, last.entryId) not in [message.position for message in again]
            await late.expect_nothing()


async def test_what_is_sent_while_a_topic_moves_is_neither_stored_nor_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld(admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        stopped, go = asyncio.Event(), asyncio.Event()
        take_in = heir.ownership.user.take_in

        async def take_in_late(topics: Any) -> Any:
            stopped.set()
            await go.wait()
            return await take_in(topics)

        monkeypatch.setattr(heir.ownership.user, "take_in", take_in_late)
        async with await owner.client() as client, await heir.client() as late:
            await client.produce_on(topic, producer_name="p")
            await client.publish(2)
            moving = asyncio.ensure_future(release(owner, topic, heir.id))
            await stopped.wait()
            client.send_message(2)
            await client.expect_nothing()
            go.set()
            await moving
            (close,) = await closes(client, 1)
            assert close.assignedBrokerServiceUrl == heir.service_url
            await late.produce_on(topic, producer_name="p", epoch=1)
            await late.publish(1, first_sequence_id=2)
            await late.subscribe(topic, "s", permits=10)
            payloads = await late.expect_messages(3)
            assert len({message.position for message in payloads}) == 3
            await late.expect_nothing()


async def test_what_was_gathered_before_the_move_is_stored_and_answered() -> None:
    """Also what waits for the append before it."""
    async with BrokersWorld(admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client:
            await client.produce_on(topic)
            for sequence_id in range(50):
                client.send_message(sequence_id)
                await asyncio.sleep(0)
            await wait_until(lambda: owner.broker.topics.find(TopicName.parse(full(topic))).published.entries > 0)  # type: ignore[union-attr]
            await release(owner, topic, heir.id)
            receipts = 0
            while not isinstance(body := (await client.receive()).body, pb.CommandCloseProducer):  # type: ignore[union-attr]
                assert body.sequence_id == receipts
                receipts += 1
            assert body.assignedBrokerServiceUrl == heir.service_url
        topic_there = heir.broker.topics.find(TopicName.parse(full(topic)))
        assert topic_there is not None
        assert topic_there.ledger.ledgers.total_entries == receipts


FAILURES: dict[str, Callable[[], BaseException]] = {
    "unreachable": lambda: PeerUnreachableError("planted"),
    "refuses": lambda: ServiceNotReadyError("planted"),
    "silent": TimeoutError,
    "defect": lambda: KeyError("planted"),
}


@pytest.mark.parametrize("step", ["prepare", "open", "take"])
@pytest.mark.parametrize("failure", list(FAILURES))
async def test_a_hand_over_that_fails_in_any_step_ends_as_a_plain_unload(
    step: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with BrokersWorld(admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        call = owner.broker.peers.call

        async def fail(there: There, method: str, target: str, body: bytes = b"") -> Any:
            if HandOverCall.model_validate_json(body).step == step:
                raise FAILURES[failure]()
            return await call(there, method, target, body)

        monkeypatch.setattr(owner.broker.peers, "call", fail)
        async with await owner.client() as client, await heir.client() as late:
            await client.produce_on(topic)
            await client.publish(3)
            await release(owner, topic, heir.id)
            (close,) = await closes(client, 1)
            assert bool(close.assignedBrokerServiceUrl) == (step == "take")
            assert not owner.ownership.owns(TopicName.parse(full(topic)))
            await heir.ownership.locate(TopicName.parse(full(topic)), authoritative=True)
            await late.produce_on(topic)
            await late.publish(1, first_sequence_id=3)
            await late.subscribe(topic, "s", permits=10)
            assert len(await late.expect_messages(4)) == 4


@pytest.mark.parametrize("answer", [None, {}, {"opened": None}, []])
async def test_an_answer_without_a_list_of_opened_topics_is_refused(answer: Any) -> None:
    heir = Heir(There("b", {"pulsar": "b:1"}), BUNDLE, "a", 1, AsyncMock(call=AsyncMock(return_value=answer)))
    with pytest.raises(ServiceNotReadyError, match=r"broker b answered .* without a list of opened topics"):
        await heir.open([TOPIC])
    assert not heir.moved


async def test_a_topic_that_moved_is_found_at_its_new_broker_while_the_rest_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_broker.topics.topics.MOVED_AT_ONCE", 1)
    async with BrokersWorld(admin=True, bundles=1) as world:
        owner, heir = world.brokers
        await world.topic_on(owner)
        names = [TopicName.parse(full(f"t-{number}")) for number in range(2)]
        for name in names:
            await owner.broker.topics.get(name, may_create=True)
        second, go = asyncio.Event(), asyncio.Event()
        take_in, calls = heir.ownership.user.take_in, 0

        async def take_in_late(topics: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                second.set()
                await go.wait()
            return await take_in(topics)

        monkeypatch.setattr(heir.ownership.user, "take_in", take_in_late)
        moving = asyncio.ensure_future(release(owner, "t-0", heir.id))
        await second.wait()
        (moved,) = [name for name in names if heir.broker.topics.find(name) is not None]
        location = await owner.ownership.locate(moved)
        assert isinstance(location, There)
        assert location.broker_id == heir.id
        assert heir.ownership.owns(moved)
        assert not owner.ownership.owns(moved)
        go.set()
        await moving
        assert all(heir.broker.topics.find(name) is not None for name in names)


async def test_a_drained_broker_gives_everything_away_and_takes_nothing_until_it_is_told() -> None:
    async with BrokersWorld(3, admin=True, bundles=8) as world:
        owner = world.brokers[0]
        topics = [await world.topic_on(owner, f"topic-{number}") for number in range(3)]
        async with await owner.client() as client:
            for number, topic in enumerate(topics):
                await client.produce_on(topic, number)
            owner.ownership.drain()
            assert all(close.assignedBrokerServiceUrl for close in await closes(client, 3))
        await wait_until(lambda: not owner.ownership.bundles_held)
        others = world.brokers[1:]
        await wait_until(lambda: all(other.ownership.directory.brokers[owner.id].draining for other in others))
        for number in range(20):
            name = TopicName.parse(full(f"new-{number}"))
            for broker in world.brokers:
                location = await broker.ownership.locate(name)
                assert not (isinstance(location, There) and location.broker_id == owner.id)
        assert not owner.ownership.bundles_held, "not even what it was asked for with authority"
        owner.ownership.undrain()
        await wait_until(lambda: not any(other.ownership.directory.brokers[owner.id].draining for other in others))
        await release(await world.owner_of(topics[0]), topics[0], owner.id)
        assert owner.ownership.owns(TopicName.parse(full(topics[0])))


async def test_a_drain_continues_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        for number in range(3):
            await world.topic_on(owner, f"topic-{number}")
        unload = owner.ownership.user.unload_bundle
        errors: list[Exception] = [KeyError("planted")]

        async def unload_bundle(bundle: Bundle, reason: str) -> None:
            if errors:
                raise errors.pop()
            await unload(bundle, reason)

        monkeypatch.setattr(owner.ownership.user, "unload_bundle", unload_bundle)
        owner.ownership.drain()
        await wait_until(lambda: not owner.ownership.bundles_held)
        assert not errors


async def test_a_repeated_drain_starts_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner = world.brokers[0]
        await world.topic_on(owner)
        with monkeypatch.context() as patch:
            patch.setattr(owner.ownership, "_takers", lambda: {"other": None})
            patch.setattr(owner.ownership._tenures, "give_away", AsyncMock(side_effect=asyncio.CancelledError))
            owner.ownership.drain()
            await asyncio.sleep(0.01)
        owner.ownership.drain()
        await wait_until(lambda: not owner.ownership.bundles_held)


async def test_a_heir_that_is_drained_before_it_has_the_bundle_hands_on_what_it_has_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the next owner opens the topic under it, and what its producers send is stored twice."""
    async with BrokersWorld(2, admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        take = Heir.take

        async def drain_first(self: Heir) -> None:
            if self.there.broker_id == heir.id:
                heir.ownership.drain()
            await take(self)

        monkeypatch.setattr(Heir, "take", drain_first)
        await owner.broker.topics.get(TopicName.parse(full(topic)), may_create=True)
        await release(owner, topic, heir.id)
        await wait_until(lambda: not heir.ownership.bundles_held)
        assert owner.has_open(topic)
        assert owner.ownership.owns(TopicName.parse(full(topic)))
        assert "managed_ledger.failed" not in caplog.messages


async def test_the_last_broker_is_drained_only_by_force() -> None:
    async with BrokersWorld(2, admin=True) as world:
        first, last = world.brokers
        topic = await world.topic_on(last)
        await last.broker.topics.get(TopicName.parse(full(topic)), may_create=True)
        first.ownership.drain()
        await wait_until(lambda: bool(last.ownership.directory.brokers[first.id].draining))
        with pytest.raises(NotAllowedError, match="the last one"):
            last.ownership.drain()
        assert last.has_open(topic)
        last.ownership.drain(force=True)
        await wait_until(lambda: not last.ownership.bundles_held)
        with pytest.raises(ServiceNotReadyError, match="drained"):
            await last.ownership.locate(TopicName.parse(full(topic)))
        last.ownership.undrain()
        await last.ownership.locate(TopicName.parse(full(topic)), authoritative=True)
        assert last.ownership.owns(TopicName.parse(full(topic)))


async def test_a_drain_outlives_the_session_in_which_it_began() -> None:
    async with BrokersWorld(2, admin=True) as world:
        owner, other = world.brokers
        owner.ownership.drain()
        await wait_until(lambda: bool(other.ownership.directory.brokers[owner.id].draining))
        owner.session.expire()
        owner.session.renew()
        await wait_until(lambda: owner.id in other.ownership.directory.brokers)
        assert other.ownership.directory.brokers[owner.id].draining


async def test_a_stop_hands_topics_over_within_its_limit() -> None:
    async with BrokersWorld(2, admin=True) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(3)
            stopping = asyncio.ensure_future(owner.stop())
            (close,) = await closes(client, 1)
            assert close.assignedBrokerServiceUrl == heir.service_url
            await stopping
        assert heir.has_open(topic)


async def test_a_stop_without_time_to_hand_over_closes_topics() -> None:
    async with BrokersWorld(2, admin=True, drain_timeout_s=0) as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        async with await owner.client() as client:
            await client.produce_on(topic)
            stopping = asyncio.ensure_future(owner.stop())
            (close,) = await closes(client, 1)
            assert not close.assignedBrokerServiceUrl
            await stopping
        assert not heir.has_open(topic)


async def test_only_the_owner_of_a_bundle_can_hand_it_over() -> None:
    async with BrokersWorld(2, admin=True) as world:
        owner, heir = world.brokers
        topic = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(topic)
        facts: dict[str, Any] = {"namespace": str(bundle.namespace), "first": bundle.first, "last": bundle.last}
        for giver, epoch in (("broker-9", 1), (owner.id, 7)):
            call = HandOverCall(step="prepare", giver=giver, epoch=epoch, **facts)
            with pytest.raises(ServiceNotReadyError, match="does not own it"):
                await heir.ownership.on_hand_over(call)
        call = HandOverCall(step="open", giver=owner.id, epoch=1, topics=(str(topic),), **facts)
        with pytest.raises(ServiceNotReadyError, match="not being handed over"):
            await heir.ownership.on_hand_over(call)
        assert not heir.ownership.owns(topic)


async def test_what_is_served_ahead_ends_when_the_owner_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_broker.ownership.hand_over.AHEAD_S", 0.1)
    async with BrokersWorld(2, admin=True) as world:
        owner, heir = world.brokers
        topic = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(topic)
        await owner.broker.topics.get(topic, may_create=True)
        facts: dict[str, Any] = {"namespace": str(bundle.namespace), "first": bundle.first, "last": bundle.last}
        facts |= {"giver": owner.id, "epoch": owner.ownership.states.find(bundle).epoch}  # type: ignore[union-attr]
        await heir.ownership.on_hand_over(HandOverCall(step="prepare", **facts))
        opened = await heir.ownership.on_hand_over(HandOverCall(step="open", topics=(str(topic),), **facts))
        assert opened == [topic]
        assert heir.ownership.owns(topic)
        await wait_until(lambda: heir.broker.topics.find(topic) is None)
        assert not heir.ownership.owns(topic)
        assert owner.ownership.owns(topic), "its record says so"


async def test_what_is_served_ahead_ends_when_a_third_broker_has_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner died in the middle, and somebody else was asked for a topic first. Found by seed 0x68 of the simulator (H5)."""
    monkeypatch.setattr("cepheid_broker.ownership.bundle_ownership.OWNER_LOOK_S", 0.05)
    monkeypatch.setattr("cepheid_broker.ownership.hand_over.AHEAD_S", 1000.0)
    async with BrokersWorld(2, admin=True) as world:
        owner, heir = world.brokers
        topic = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(topic)
        await owner.broker.topics.get(topic, may_create=True)
        epoch = owner.ownership.states.find(bundle).epoch  # type: ignore[union-attr]
        facts: dict[str, Any] = {"namespace": str(bundle.namespace), "first": bundle.first, "last": bundle.last}
        facts |= {"giver": owner.id, "epoch": epoch}
        await heir.ownership.on_hand_over(HandOverCall(step="prepare", **facts))
        await heir.ownership.on_hand_over(HandOverCall(step="open", topics=(str(topic),), **facts))
        third = BundleOwner(broker_id="broker-3", incarnation="x", epoch=epoch + 1, addresses={})
        monkeypatch.setattr(heir.ownership._tenures, "owner_of", AsyncMock(return_value=third))
        await wait_until(lambda: heir.broker.topics.find(topic) is None)
        assert not heir.ownership.owns(topic)


def test_topics_ahead_belong_to_one_giver_in_one_epoch() -> None:
    ahead = TopicsAhead()
    assert ahead.begin(BUNDLE, "a", 1, now_s=0.0)
    ahead.add(BUNDLE, [TOPIC])
    assert ahead.holds(TOPIC)
    assert not ahead.begin(BUNDLE, "a", 1, now_s=1.0), "told again"
    assert ahead.holds(TOPIC)
    assert ahead.ends_in(BUNDLE, now_s=1.0) == AHEAD_S
    with pytest.raises(ServiceNotReadyError, match="in epoch 2"):
        ahead.renew(BUNDLE, "a", 2, now_s=1.0)
    assert not ahead.begin(BUNDLE, "b", 2, now_s=2.0), "watched already"
    assert not ahead.holds(TOPIC), "the next owner has to say what it has closed"
    ahead.end(BUNDLE)
    assert ahead.ends_in(BUNDLE, now_s=3.0) is None


@pytest.mark.parametrize(("draining", "format"), [(None, 1), (True, 2)])
async def test_a_registration_is_newer_only_while_it_says_something_new(draining: bool | None, format: int) -> None:
    async with BrokersWorld(1) as world:
        record = BrokerRegistration(broker_id="b", addresses={}, started_at_ms=1, draining=draining)
        await broker_records(world.store).create("b", record)
        found = await broker_records(world.store).get("b")
        assert found is not None
        assert (found.record, found.record.format) == (record, format)
