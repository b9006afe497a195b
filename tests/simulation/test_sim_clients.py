"""The simulated clients against a simulated broker: what they send again, what they acknowledge, and what is noted of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cepheid_managed_ledger import ManagedLedgerConfig
from cepheid_wire import TopicName, encode_body
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.client_notes import ClientNotes, mask_of
from tests.simulation.checks.history import InvariantViolation
from tests.simulation.checks.wire_tap import WireTap
from tests.simulation.faults.plan import CALM
from tests.simulation.world.sim_client import SimClient
from tests.simulation.world.sim_consumer import Delivery, SimConsumer
from tests.simulation.world.sim_operator import Operator
from tests.simulation.world.sim_producer import SimProducer
from tests.simulation.world.sim_reader import SimReader
from tests.simulation.world.sim_serving import found_cluster
from tests.simulation.world.stage import Stage
from tests.support import wait_until

TOPIC = TopicName.parse("persistent://public/default/orders")


class Scene(Stage):
    """One broker, three bookies, one application."""

    def __init__(self) -> None:
        super().__init__("clients", CALM)
        self.notes = ClientNotes(self.history)

    def run(self, script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        self.play(self._run(script))

    async def _run(self, script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        self.build(3, ("east",), registers=True)
        await found_cluster(self.tree)
        for bookie in self.bookies.values():
            await bookie.start()
        self.east = self.brokers["east"]
        self.east.serves, self.east.ledger_config = True, ManagedLedgerConfig(3, 3, 2)
        self.taps: list[WireTap] = []
        self.sockets.listened_in = self._listen
        self.east.start()
        await wait_until(lambda: self.east.ready)
        self.anna = SimClient("anna", ["east"], random.Random("anna"), self.history)
        self.producer = SimProducer(self.anna, TOPIC, "p", self.notes)
        self.consumer = SimConsumer(self.anna, TOPIC, "s", "Shared", "c", queue=20)
        for each in (self.consumer, self.producer):
            self.spawn(self.anna.node, each.stay_connected(), repr(each))
        await wait_until(lambda: self.producer.ready and self.consumer.connection is not None)
        await script(self)

    def _listen(self, protocol: asyncio.Protocol, _: str) -> WireTap:
        self.taps.append(WireTap(protocol, self.notes, lambda topic: ("east", 1)))
        return self.taps[-1]

    def joins(self, client: SimClient) -> SimConsumer:
        consumer = SimConsumer(client, TOPIC, "s", "Shared", f"c of {client.name}", queue=20)
        self.spawn(client.node, consumer.stay_connected(), repr(consumer))
        return consumer

    async def take(self, count: int) -> list[Delivery]:
        await wait_until(lambda: len(self.consumer.waiting) >= count)
        return [delivery for _ in range(count) if (delivery := self.consumer.take()) is not None]

    def noted(self, *kinds: str) -> list[str]:
        return [event.kind for event in self.notes.events[str(TOPIC)] if not kinds or event.kind in kinds]


def test_batches_and_single_messages_are_answered_and_delivered_in_their_order() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(3, "k", batch=True)
        scene.producer.publish(2, "k", batch=False)
        scene.producer.publish(1, "k", batch=False, chunks=2)
        taken = await scene.take(5)
        await wait_until(lambda: not scene.producer.unanswered)
        told = [event for event in scene.notes.events[str(TOPIC)] if event.kind == "sent"]
        assert [event.uid for event in told] == ["p/0", "p/1", "p/2", "p/3", "p/4", "p/5#0", "p/5#1"]
        assert [event.position[2] for event in told if event.position] == [0, 1, 2, -1, -1, -1, -1]
        assert [delivery.messages for delivery in taken] == [3, 1, 1, 1, 1]
        assert [delivery.position for delivery in taken] == sorted({event.position[:2] for event in told if event.position})

    Scene().run(script)


def test_a_part_of_a_batch_is_acknowledged_and_the_rest_of_it_comes_again() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(3, "", batch=True)
        (batch,) = await scene.take(1)
        answer = scene.consumer.acknowledge([batch], keep=0b101, response=True)
        assert answer is not None
        await answer
        scene.consumer.give_back([batch])
        (again,) = await scene.take(1)
        assert (again.position, again.left) == (batch.position, 0b101)
        noted = scene.noted("received", "ack", "saving", "saved", "nack")
        assert noted == ["received", "ack", "saving", "saved", "nack", "received"]

    Scene().run(script)


def test_what_was_not_answered_is_sent_again_in_order_when_a_connection_was_lost() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(3, "", batch=False)
        scene.anna.connections[0].abort()
        assert not scene.producer.ready
        scene.producer.publish(1, "", batch=False)
        await wait_until(lambda: not scene.producer.unanswered)
        told = [event.uid for event in scene.notes.events[str(TOPIC)] if event.kind == "sent"]
        assert told == ["p/0", "p/1", "p/2", "p/3"]
        assert scene.noted("resend", "close", "open").count("resend") == 4
        assert scene.noted("close", "open") == ["open", "close", "open"], "the broker saw its consumer leave and come back"

    Scene().run(script)


def test_a_damaged_message_is_refused_in_its_turn_and_given_up_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(1, "", batch=False)
        scene.producer.publish(2, "", batch=True, damaged=True)
        scene.producer.publish(1, "", batch=False)
        await wait_until(lambda: not scene.producer.unanswered)
        told = [(event.uid, event.error) for event in scene.notes.events[str(TOPIC)] if event.kind == "sent"]
        assert told == [("p/0", ""), ("p/1", "ChecksumError"), ("p/2", "ChecksumError"), ("p/3", "")]
        assert len(await scene.take(2)) == 2
        assert scene.noted("resend") == [], "the connection is as it was"

    Scene().run(script)


def test_what_was_given_out_in_a_turn_is_noted_before_what_is_heard_in_it() -> None:
    """The broker writes at the end of a turn of the loop."""

    async def script(scene: Scene) -> None:
        tap = next(tap for tap in scene.taps if tap._seats)
        connection: Any = tap._inner
        write_buffers, (consumer_id,) = connection.write_buffers, tap._seats
        ask = encode_body(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id))

        def hears_more(buffers: list[Any]) -> None:
            connection.write_buffers = write_buffers
            scene.loop.call_soon(tap.data_received, ask)
            write_buffers(buffers)

        connection.write_buffers = hears_more
        scene.producer.publish(1, "", batch=False)
        await wait_until(lambda: len(scene.noted("received")) > 1)
        assert scene.noted("received", "nack") == ["received", "nack", "received"]

    Scene().run(script)


def test_a_seek_is_noted_between_its_question_and_its_answer_and_delivery_goes_on_there() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(4, "", batch=False)
        taken = await scene.take(4)
        scene.consumer.acknowledge(taken)
        assert await scene.consumer.seek(taken[2].position)
        assert [delivery.position for delivery in await scene.take(2)] == [taken[2].position, taken[3].position]
        assert scene.noted("seeking", "close", "sought") == ["seeking", "close", "sought"]

    Scene().run(script)


def test_whoever_unsubscribes_begins_at_the_beginning_when_it_comes_again() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(2, "", batch=False)
        taken = await scene.take(2)
        scene.consumer.acknowledge(taken)
        await scene.consumer.unsubscribe()
        assert scene.consumer.ended
        scene.consumer = scene.joins(scene.anna)
        assert [delivery.position for delivery in await scene.take(2)] == [delivery.position for delivery in taken]
        assert scene.noted("moving", "moved", "open", "close") == ["open", "moving", "close", "moved", "open"]

    Scene().run(script)


@pytest.mark.parametrize("power", [True, False])
def test_what_a_crashed_client_held_comes_to_others(power: bool) -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(3, "", batch=False)
        held = await scene.take(3)
        ben = SimClient("ben", ["east"], random.Random("ben"), scene.history)
        if power:
            scene.sockets.lose_power("anna")
        scene.anna.node.crash()
        scene.consumer = scene.joins(ben)
        assert [delivery.position for delivery in await scene.take(3)] == [delivery.position for delivery in held]

    Scene().run(script)


def test_a_delayed_message_comes_when_it_is_due() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(1, "", batch=False, delay_ms=3_000)
        sent_s = scene.loop.time()
        await wait_until(lambda: not scene.producer.unanswered)
        await scene.take(1)
        assert 3.0 <= scene.loop.time() - sent_s < 4.0

    Scene().run(script)


def test_consumers_that_ask_for_ranges_of_hashes_get_those_and_say_so_if_not() -> None:
    async def script(scene: Scene) -> None:
        halves = ((0, 32767), (32768, 65535))
        both = [SimConsumer(scene.anna, TOPIC, "k", "Key_Shared", f"c{half}", ranges=(half,)) for half in halves]
        for consumer in both:
            scene.spawn(scene.anna.node, consumer.stay_connected(), repr(consumer))
        await wait_until(lambda: all(consumer.connection is not None for consumer in both))
        for key in range(10):
            scene.producer.publish(1, f"k{key}", batch=False)
        await wait_until(lambda: sum(len(consumer.waiting) for consumer in both) == 10)
        assert all(consumer.waiting for consumer in both)
        both[0]._ranges = (halves[1],)  # a broker that were wrong
        for key in range(10):
            scene.producer.publish(1, f"k{key}", batch=False)
        await wait_until(lambda: scene.loop.failure is not None)

    with pytest.raises(InvariantViolation, match="H10"):
        Scene().run(script)


def test_a_reader_goes_on_behind_what_it_took_last() -> None:
    async def script(scene: Scene) -> None:
        reader = SimReader(scene.anna, TOPIC, "r", queue=2)
        scene.spawn(scene.anna.node, reader.stay_connected(), "read")
        scene.producer.publish(2, "", batch=False)
        scene.producer.publish(3, "", batch=True)
        await wait_until(lambda: len(reader.waiting) >= 2)
        first = reader.next()
        scene.anna.connections[0].abort()
        rest = []
        while len(rest) < 2:
            await wait_until(lambda: len(reader.waiting) > 0)
            rest += [delivery for _ in range(3) if (delivery := reader.next()) is not None]
        told = {event.position[:2] for event in scene.notes.events[str(TOPIC)] if event.kind == "sent" and event.position}
        assert first is not None
        assert [first.position, *(delivery.position for delivery in rest)] == sorted(told) == list(reader.read)

    Scene().run(script)


def test_consumers_hear_that_a_terminated_topic_is_at_its_end() -> None:
    async def script(scene: Scene) -> None:
        scene.producer.publish(2, "", batch=False)
        taken = await scene.take(2)
        await Operator(scene.brokers, random.Random(0)).terminate(TOPIC)
        await wait_until(lambda: scene.producer.terminated)
        assert not scene.consumer.at_end
        scene.consumer.acknowledge(taken)
        await wait_until(lambda: scene.consumer.at_end)

    Scene().run(script)


def test_a_silent_broker_is_given_up() -> None:
    async def script(scene: Scene) -> None:
        (connection,) = scene.anna.connections
        scene.east.node.pause()
        await wait_until(lambda: connection.lost, 30)
        assert not scene.producer.ready
        scene.east.node.resume()
        await wait_until(lambda: scene.producer.ready, 30)

    Scene().run(script)


def test_words_of_an_ack_set_are_one_mask() -> None:
    assert mask_of([0b101, -1]) == (((1 << 64) - 1) << 64) | 0b101
