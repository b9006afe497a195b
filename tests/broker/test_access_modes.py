"""Access modes over the wire: answers in time and in order, epochs that survive, names and limits (protocol.md §9)."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_broker.policies.topic_policies import QuotaAction, TopicPolicies
from cepheid_metadata import StoreUnavailableError
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full
from tests.support import wait_until

MODE = pb.ProducerAccessMode
NO_REQUEST = (1 << 64) - 1


def asking(name: str, mode: Any, producer_id: int = 0, request_id: int = 50, **fields: Any) -> pb.CommandProducer:
    return pb.CommandProducer(
        topic=full("t"),
        producer_id=producer_id,
        request_id=request_id,
        producer_name=name,
        producer_access_mode=mode,
        **fields,
    )


async def open_as(client: ScriptedClient, name: str, mode: Any, producer_id: int = 0, **fields: Any) -> pb.CommandProducerSuccess:
    return await client.ask(asking(name, mode, producer_id, **fields), pb.CommandProducerSuccess)


async def refused_as(client: ScriptedClient, name: str, mode: Any, producer_id: int = 0, **fields: Any) -> ServerError:
    return ServerError((await client.ask(asking(name, mode, producer_id, **fields), pb.CommandError)).error)


async def test_exclusive_allows_none_beside_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        answer = await open_as(client, "a", MODE.Exclusive)
        assert (answer.producer_ready, answer.topic_epoch) == (True, 0)
        assert answer.HasField("topic_epoch")
        assert await refused_as(client, "b", MODE.Exclusive, 1) == ServerError.PRODUCER_FENCED
        assert await refused_as(client, "c", MODE.Shared, 2) == ServerError.PRODUCER_BUSY
        await client.publish(1)
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=9), pb.CommandSuccess)
        assert (await open_as(client, "c", MODE.Shared, 2)).topic_epoch == 0
        assert await refused_as(client, "a", MODE.Exclusive, topic_epoch=0) == ServerError.PRODUCER_FENCED


async def test_an_exclusive_holder_that_lives_is_asked_and_stays() -> None:
    async with BrokerWorld() as world, await world.client() as holder, await world.client() as other:
        await open_as(holder, "a", MODE.Exclusive)
        other.send(asking("b", MODE.Exclusive))
        await holder.expect_nothing(0.2)  # it answers the broker's PING
        assert (await other.expect(pb.CommandError)).error == ServerError.PRODUCER_FENCED
        await holder.publish(1)


@pytest.mark.slow
async def test_trap_22_waiting_is_answered_at_once_and_again_when_it_is_its_turn() -> None:
    async with BrokerWorld(request_timeout_s=1.0) as world, await world.client() as holder, await world.client() as waiting:
        await open_as(holder, "a", MODE.WaitForExclusive)
        first = await open_as(waiting, "b", MODE.WaitForExclusive, 3, request_id=77)
        assert (first.request_id, first.producer_name, first.producer_ready) == (77, "b", False)
        assert first.HasField("schema_version")
        assert not first.HasField("topic_epoch")
        await waiting.expect_nothing(1.2)  # no timeout, although other requests have one
        assert await refused_as(waiting, "b", MODE.WaitForExclusive, 3) == ServerError.SERVICE_NOT_READY  # sent twice
        await holder.close()
        second = await waiting.expect(pb.CommandProducerSuccess)
        assert (second.request_id, second.producer_ready, second.topic_epoch) == (77, True, 1)
        await waiting.publish(2, producer_id=3)


async def test_whoever_stops_waiting_is_passed_over() -> None:
    async with BrokerWorld() as world, await world.client() as holder, await world.client() as gone:
        async with await world.client() as closing, await world.client() as last:
            await open_as(holder, "a", MODE.Exclusive)
            assert not (await open_as(gone, "b", MODE.WaitForExclusive)).producer_ready
            assert not (await open_as(closing, "c", MODE.WaitForExclusive)).producer_ready
            assert not (await open_as(last, "d", MODE.WaitForExclusive)).producer_ready
            gone.abort()
            closing.send(pb.CommandCloseProducer(producer_id=0, request_id=4))
            assert (await closing.expect(pb.CommandError)).error == ServerError.SERVICE_NOT_READY  # it waits no longer
            assert (await closing.expect(pb.CommandSuccess)).request_id == 4
            await wait_until(lambda: len(world.topic("t").admission) == 2)
            await holder.ask(pb.CommandCloseProducer(producer_id=0, request_id=4), pb.CommandSuccess)
            assert (await last.expect(pb.CommandProducerSuccess)).topic_epoch == 1
            await closing.expect_nothing()


async def test_fencing_pushes_everybody_aside_and_the_old_holder_stays_out() -> None:
    async with BrokerWorld() as world, await world.client() as old, await world.client() as new, await world.client() as third:
        assert (await open_as(old, "a", MODE.Exclusive)).topic_epoch == 0
        assert not (await open_as(third, "w", MODE.WaitForExclusive)).producer_ready
        assert (await open_as(new, "b", MODE.ExclusiveWithFencing)).topic_epoch == 1
        closed = await old.expect(pb.CommandCloseProducer)
        assert (closed.producer_id, closed.request_id) == (0, NO_REQUEST)
        assert (await third.expect(pb.CommandError)).error == ServerError.PRODUCER_FENCED
        old.send_message(0, b"too late")  # was on its way: dropped, the connection lives
        assert await refused_as(old, "a", MODE.Exclusive, topic_epoch=0, epoch=1) == ServerError.PRODUCER_FENCED
        await new.publish(1)
        assert world.topic("t").published.entries == 1


async def test_the_epoch_survives_the_topic_being_unloaded() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        for epoch in range(3):
            assert (await open_as(client, f"p{epoch}", MODE.Exclusive, epoch)).topic_epoch == epoch
            await client.ask(pb.CommandCloseProducer(producer_id=epoch, request_id=9), pb.CommandSuccess)
        await world.broker.topics.unload(TopicName.parse("t"))
        assert await refused_as(other, "p1", MODE.Exclusive, topic_epoch=1) == ServerError.PRODUCER_FENCED
        assert (await open_as(client, "p2", MODE.Exclusive, topic_epoch=2)).topic_epoch == 2
        await world.broker.topics.unload(TopicName.parse("t"))
        await client.expect(pb.CommandCloseProducer)
        assert (await open_as(other, "new", MODE.ExclusiveWithFencing)).topic_epoch == 3


async def test_an_epoch_that_cannot_be_saved_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as waiting:
        await client.produce_on("t", 9)

        async def fail(_epoch: int) -> None:
            raise StoreUnavailableError("planted")

        admission = world.topic("t").admission
        save = admission._save_epoch
        monkeypatch.setattr(admission, "_save_epoch", fail)
        assert not (await open_as(waiting, "w", MODE.WaitForExclusive)).producer_ready
        await client.ask(pb.CommandCloseProducer(producer_id=9, request_id=9), pb.CommandSuccess)
        assert (await waiting.expect(pb.CommandError)).error == ServerError.SERVICE_NOT_READY
        monkeypatch.setattr(admission, "_save_epoch", save)
        assert (await open_as(waiting, "w", MODE.WaitForExclusive)).topic_epoch == 0


async def test_a_reconnect_takes_the_place_of_its_predecessor() -> None:
    """Also in front of who waits (protocol.md §9.3)."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as waiting:
        await open_as(client, "a", MODE.Exclusive)
        await open_as(waiting, "w", MODE.WaitForExclusive)
        assert (await open_as(client, "a", MODE.Exclusive, epoch=1, topic_epoch=0)).topic_epoch == 0
        await client.publish(3)
        await waiting.expect_nothing()
        assert len(world.topic("t").admission) == 2


async def test_who_waits_is_told_when_the_topic_goes() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as waiting:
        await open_as(client, "a", MODE.Exclusive)
        await open_as(waiting, "w", MODE.WaitForExclusive)
        await world.broker.topics.unload(TopicName.parse("t"))
        assert (await waiting.expect(pb.CommandError)).error == ServerError.SERVICE_NOT_READY
        await client.expect(pb.CommandCloseProducer)


async def test_an_exclusive_holder_that_is_dead_makes_room() -> None:
    settings = {"liveness_probe_s": 0.1}
    async with BrokerWorld(connection=settings) as world, await world.client() as dead, await world.client() as other:
        dead.answer_pings = False
        await open_as(dead, "a", MODE.Exclusive)
        assert (await open_as(other, "b", MODE.Exclusive)).topic_epoch == 1


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("", None),
        (" \t\n\0", None),
        ("emoji \N{PILE OF POO}/%2F?#", None),
        ("../../etc/passwd", None),
        ("\u202eevil\ud7ff\ufeff", None),
        ("n" * 2048, None),
        ("n" * 2049, "limit is 2048"),
    ],
)
async def test_producer_names_of_every_kind(name: str, refusal: str | None) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        if refusal is None:
            answer = await open_as(client, name, MODE.Shared)
            assert answer.producer_name == name if name else answer.producer_name.startswith("standalone-")
            assert list(world.topic("t").producers) == [answer.producer_name]
        else:
            error = await client.ask(asking(name, MODE.Shared), pb.CommandError)
            assert error.error == ServerError.NOT_ALLOWED_ERROR
            assert refusal in error.message


async def test_a_given_name_avoids_one_that_somebody_chose() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        prefix, number = (await open_as(client, "", MODE.Shared)).producer_name.rsplit("-", 1)
        chosen = f"{prefix}-{int(number) + 1}"
        await open_as(client, chosen, MODE.Shared, 1)
        assert (await open_as(client, "", MODE.Shared, 2)).producer_name not in (chosen, f"{prefix}-{number}")


async def test_one_id_is_not_two_producers() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        again = await client.produce_on("t", producer_name="p")
        assert again.producer_name == "p"
        other = pb.CommandProducer(topic=full("t2"), producer_id=0, request_id=60)
        assert "is open on persistent://public/default/t" in (await client.ask(other, pb.CommandError)).message


async def test_the_policy_bounds_the_producers_of_a_topic() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        world.topic("t").on_policies(TopicPolicies(max_producers=2))
        await client.produce_on("t", 1, producer_name="mine")
        assert await refused_as(client, "more", MODE.Shared, 2) == ServerError.PRODUCER_BUSY
        await open_as(client, "mine", MODE.Shared, 1, epoch=1)  # takes its own place


async def test_the_policy_holds_for_producers_that_come_at_once() -> None:
    async with BrokerWorld(policies={"max_producers": 2}) as world, await world.client() as client:
        client.send(*(asking(f"p{index}", MODE.Shared, index, index) for index in range(5)))
        answers = [await client.receive() for _ in range(5)]
        assert sum(isinstance(answer.body, pb.CommandProducerSuccess) for answer in answers if answer) == 2
        assert len(world.topic("t").producers) == 2
        client.send(asking("f", MODE.ExclusiveWithFencing, 9))  # which makes room for itself
        for _ in range(2):
            await client.expect(pb.CommandCloseProducer)
        assert (await client.expect(pb.CommandProducerSuccess)).producer_name == "f"


async def test_properties_are_bounded() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        large = [pb.KeyValue(key="k", value="v" * 65536)]
        error = await client.ask(asking("p", MODE.Shared, metadata=large), pb.CommandError)
        assert "properties" in error.message
        await open_as(client, "p", MODE.Shared, metadata=[pb.KeyValue(key="k", value="v")])
        assert world.topic("t").producers["p"].metadata == {"k": "v"}


async def test_encryption_that_is_required_closes_and_refuses_who_does_not_encrypt() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.produce_on("t", 1, producer_name="e", encrypted=True)
        world.topic("t").on_policies(TopicPolicies(encryption_required=True))
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        assert await refused_as(client, "p", MODE.Shared, epoch=1) == ServerError.NOT_ALLOWED_ERROR
        assert list(world.topic("t").producers) == ["e"]


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (QuotaAction.HOLD, ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR),
        (QuotaAction.REFUSE, ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION),
    ],
)
async def test_above_the_quota_producers_are_closed_after_their_receipts_and_new_ones_refused(
    action: QuotaAction, code: ServerError
) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        topic = world.topic("t")
        client.send_message(0)
        await wait_until(lambda: topic.published.entries + topic.producers["p"].pending_entries == 1)
        topic.set_publish_blocked(action)
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        assert await refused_as(client, "new", MODE.Shared, 1) == code
        back = asking("p", MODE.Shared, epoch=1)
        client.send(back)
        if action is QuotaAction.HOLD:  # it goes on as soon as there is room
            await client.expect_nothing()
            await client.subscribe("t", "s", permits=1)  # the connection is read meanwhile
            assert (await client.expect_message()).position[1] == 0
            topic.set_publish_blocked(None)
            assert (await client.expect(pb.CommandProducerSuccess)).request_id == back.request_id
        else:
            assert (await client.expect(pb.CommandError)).error == code
            topic.set_publish_blocked(None)
            await open_as(client, "p", MODE.Shared, epoch=2)
        await client.publish(1, first_sequence_id=1)


async def test_who_is_held_above_the_quota_is_refused_when_that_becomes_the_policy() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        topic = world.topic("t")
        topic.set_publish_blocked(QuotaAction.HOLD)
        await client.expect(pb.CommandCloseProducer)
        client.send(asking("p", MODE.Shared, epoch=1))
        await client.ping()
        topic.set_publish_blocked(QuotaAction.REFUSE)
        assert (await client.expect(pb.CommandError)).error == ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION
        topic.set_publish_blocked(None)
        topic.set_publish_blocked(QuotaAction.HOLD)
        client.send(asking("p", MODE.Shared, epoch=2))
        await client.ping()
        topic.set_publish_blocked(None)
        topic.set_publish_blocked(QuotaAction.HOLD)  # before who waited could look
        await client.expect_nothing(0.05)
        topic.set_publish_blocked(None)
        await client.expect(pb.CommandProducerSuccess)


async def test_who_waits_for_exclusive_is_not_let_in_above_the_quota() -> None:
    async with BrokerWorld() as world, await world.client() as holder, await world.client() as waiting:
        await open_as(holder, "a", MODE.Exclusive)
        await open_as(waiting, "w", MODE.WaitForExclusive)
        topic = world.topic("t")
        topic.set_publish_blocked(QuotaAction.HOLD)
        await holder.expect(pb.CommandCloseProducer)
        assert (await waiting.expect(pb.CommandProducerSuccess)).producer_ready
        await waiting.expect(pb.CommandCloseProducer)
        waiting.send(asking("w", MODE.WaitForExclusive, epoch=1, topic_epoch=1))
        await waiting.expect_nothing()
        topic.set_publish_blocked(None)
        assert (await waiting.expect(pb.CommandProducerSuccess)).topic_epoch == 1
        await waiting.publish(1)


async def test_evicting_quotas_hold_no_producer() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        topic = world.topic("t")
        topic.set_publish_blocked(QuotaAction.EVICT)
        (receipt,) = await client.publish(1)
        assert receipt.body.message_id.entryId == 0
        await client.produce_on("t", 1, producer_name="q")
        assert sorted(topic.producers) == ["p", "q"]


async def test_a_terminated_topic_takes_no_producer() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        await client.publish(2)
        await world.topic("t").ledger.terminate()
        client.send_message(2)
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        assert await refused_as(client, "p", MODE.Shared, epoch=1) == ServerError.TOPIC_TERMINATED_ERROR
        assert world.topic("t").published.entries == 2


async def test_an_initial_subscription_is_created_unless_the_policy_forbids_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await open_as(client, "p", MODE.Shared, initial_subscription_name="dlq")
        topic = world.topic("t")
        assert list(topic.subscriptions) == ["dlq"]
        topic.on_policies(TopicPolicies(auto_subscription_creation=False))
        await open_as(client, "q", MODE.Shared, 1, initial_subscription_name="dlq")
        refused = await refused_as(client, "r", MODE.Shared, 2, initial_subscription_name="other")
        assert refused == ServerError.NOT_ALLOWED_ERROR
        assert list(topic.subscriptions) == ["dlq"]


async def test_the_limit_of_producers_per_connection_is_an_error_and_not_the_end() -> None:
    async with BrokerWorld(connection={"max_producers": 20}) as world, await world.client() as client:
        asks = [asking(f"p{index}", MODE.Shared, index, 100 + index) for index in range(25)]
        client.send(*asks)
        answers = [await client.receive() for _ in asks]
        refused = sorted(
            answer.body.request_id for answer in answers if answer is not None and isinstance(answer.body, pb.CommandError)
        )
        assert refused == list(range(120, 125))
        await client.publish(1, producer_id=19)


@pytest.mark.slow
async def test_ten_thousand_producers_on_one_connection() -> None:
    count = 10_000
    async with BrokerWorld() as world, await world.client() as client:
        for first in range(0, count, 1000):
            client.send(*(asking("", MODE.Shared, index, index) for index in range(first, first + 1000)))
            for _ in range(1000):
                assert isinstance((await client.expect(pb.CommandProducerSuccess, 20)).producer_name, str)
        error = await client.ask(asking("", MODE.Shared, count, count), pb.CommandError)
        assert error.error == ServerError.PRODUCER_BUSY
        assert "10000" in error.message
        for index in range(0, count, 100):
            client.send_message(0, producer_id=index)
        for index in range(0, count, 100):
            assert (await client.expect(pb.CommandSendReceipt)).producer_id == index
        topic = world.topic("t")
        assert len(topic.producers) == count
        client.abort()
        await wait_until(lambda: not topic.producers)
