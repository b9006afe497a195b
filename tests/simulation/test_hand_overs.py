"""Bundles that are handed over while a client publishes, and what happens when a broker fails in one of the steps.

The client does what official ones do: it keeps what was not answered, goes where a close sends it, and sends it again in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from cepheid_broker.admin import AdminContext
from cepheid_broker.ownership import HandOverCall, There
from cepheid_broker.ownership.hand_over import Heir
from cepheid_broker.publishing.producer import Producer, ProducerState
from cepheid_broker.topics.topic import Topic
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.scripted_client import ScriptedClient
from tests.simulation.test_sim_serving import TOPIC, Served, play
from tests.simulation.world.sim_broker import SimBroker

COUNT = 120
PAUSE_S = 0.004


class Publisher:
    """Publishes 0 .. COUNT-1, one entry each, whatever happens to its topic's broker."""

    def __init__(self, stage: Served) -> None:
        self._stage = stage
        self.answered: dict[int, tuple[int, int]] = {}
        self.moves: list[str] = []
        """Brokers to which a close sent it."""
        self.refused = 0
        """By a broker to which a close had sent it."""
        self.not_open = 0
        """Closes that sent it to a broker which did not have the topic open."""
        self._epoch = 0

    async def run(self) -> None:
        told = ""
        while len(self.answered) < COUNT:
            broker = told or (await self._stage.owner()).name
            try:
                told = await self._publish_at(broker, is_told=bool(told))
            except (ConnectionError, TimeoutError, AssertionError):
                told = ""
                await asyncio.sleep(0.1)

    async def _publish_at(self, broker: str, *, is_told: bool) -> str:
        """Returns where it is to go on, "" where a lookup has to say it."""
        client = await self._stage.client(broker)
        ask = pb.CommandProducer(
            topic=str(TOPIC), producer_id=0, request_id=client.request_id(), producer_name="p", epoch=self._epoch
        )
        self._epoch += 1
        client.send(ask)
        answer = await client.receive(5.0)
        if answer is None or not isinstance(answer.body, pb.CommandProducerSuccess):
            self.refused += is_told
            client.abort()
            return ""
        sending = asyncio.ensure_future(self._send(client))
        try:
            while len(self.answered) < COUNT:
                received = await client.receive(5.0)
                if received is None:
                    return ""
                if isinstance(received.body, pb.CommandSendReceipt):
                    assert received.body.sequence_id == len(self.answered), "answered in order, and once"
                    self.answered[received.body.sequence_id] = received.position
                elif isinstance(received.body, pb.CommandCloseProducer):
                    told = received.body.assignedBrokerServiceUrl.removeprefix("pulsar://").partition(":")[0]
                    if told:
                        self.moves.append(told)
                        self.not_open += self._stage.brokers[told].broker.topics.find(TOPIC) is None
                    return str(told)
            return ""
        finally:
            sending.cancel()
            client.abort()

    async def _send(self, client: ScriptedClient) -> None:
        for sequence_id in range(len(self.answered), COUNT):
            client.send_message(sequence_id)
            await asyncio.sleep(PAUSE_S)


async def consumed(stage: Served) -> list[tuple[int, int]]:
    """Everything that is stored, in order."""
    client = await stage.client((await stage.owner()).name)
    await client.subscribe(str(TOPIC), "readers", permits=1000)
    found = [received.position for received in await client.skim_messages(COUNT)]
    more = [body.message_id for body in await client.receive_for(1.0) if isinstance(body, pb.CommandMessage)]
    return found + [(ident.ledgerId, ident.entryId) for ident in more]


def hand_over(
    disturb: Callable[[Served, HandOverCall, SimBroker, SimBroker], None] = lambda *_: None,
    *,
    may_repeat: bool = False,
    drains: bool = False,
) -> Publisher:
    """One, in the middle of publishing. `disturb` is called before each call of the giver: stage, call, giver, heir.

    `may_repeat`: what a broker had stored and not answered when it crashed is sent, and stored, again. `drains`: the giver is
    drained, and must have given everything away in the end unless it was restarted."""
    publishers: list[Publisher] = []

    async def script(stage: Served) -> None:
        try:
            await publish_and_move(stage)
        finally:
            for client in stage._clients:
                client.abort()

    async def publish_and_move(stage: Served) -> None:
        giver = await stage.owner()
        heir = next(broker for broker in stage.brokers.values() if broker is not giver)
        reader = await stage.client(giver.name)
        await reader.subscribe(str(TOPIC), "readers")
        await reader.close()
        assert giver.peers is not None
        giver.peers.breaks = False  # the test says which calls fail
        call = giver.peers.call

        async def disturbed(there: There, method: str, target: str, body: bytes = b"") -> Any:
            disturb(stage, HandOverCall.model_validate_json(body), giver, heir)
            return await call(there, method, target, body)

        publisher = Publisher(stage)
        publishers.append(publisher)
        publishing = asyncio.ensure_future(publisher.run())
        while len(publisher.answered) < COUNT // 4:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.005)
        with mock.patch.object(giver.peers, "call", disturbed), contextlib.suppress(Exception):
            if drains:
                await stage.operator.call(drain, at=giver)
                await drained(giver)
            else:
                await stage.operator.unload_bundle(TOPIC, to=heir.name, at=giver)
        async with asyncio.timeout(60):
            await publishing
        if drains:
            assert await drained(giver), "it goes on after the trouble, or ends with the process"
        answered, found = [publisher.answered[number] for number in range(COUNT)], await consumed(stage)
        assert answered == sorted(answered), "in order"
        assert set(answered) <= set(found), "nothing is lost"
        assert may_repeat or found == answered, "nothing is stored twice"

    play(script)
    return publishers[0]


def test_a_producer_goes_where_the_close_sends_it_and_nothing_is_stored_twice() -> None:
    publisher = hand_over()
    assert len(publisher.moves) == 1
    assert (publisher.refused, publisher.not_open) == (0, 0), "the topic is open where it was sent"


def crash_heir(stage: Served, giver: SimBroker, heir: SimBroker) -> None:
    heir.crash()
    stage.later(1.0, heir.start)


def crash_giver(stage: Served, giver: SimBroker, heir: SimBroker) -> None:
    stage.later(0.002, lambda: giver.crash())
    stage.later(3.0, giver.start)


def cut(stage: Served, giver: SimBroker, heir: SimBroker) -> None:
    stage.network.block(giver.name, heir.name, "call")


def cut_answers(stage: Served, giver: SimBroker, heir: SimBroker) -> None:
    stage.network.block(heir.name, giver.name, "call")


def sleep(stage: Served, giver: SimBroker, heir: SimBroker) -> None:
    heir.node.pause()
    stage.later(6.0, heir.node.resume)


async def drain(context: AdminContext) -> None:
    context.broker.ownership.drain()


async def drained(broker: SimBroker) -> bool:
    """Wait until a broker that is being drained has no bundles. False: it has not become that far in time."""
    for _ in range(400):
        if broker.ready:
            ownership = broker.broker.ownership
            if not ownership.draining or not ownership.bundles_held:
                return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize("drains", [False, True], ids=["unload", "drain"])
@pytest.mark.parametrize("step", ["prepare", "open", "take"])
@pytest.mark.parametrize("trouble", [crash_heir, crash_giver, cut, cut_answers, sleep])
def test_a_hand_over_that_fails_in_any_step_costs_no_entry_and_doubles_none(
    step: str, trouble: Callable[..., None], drains: bool
) -> None:
    began: list[str] = []

    def disturb(stage: Served, call: HandOverCall, giver: SimBroker, heir: SimBroker) -> None:
        if call.step == step and not began:
            began.append(step)
            trouble(stage, giver, heir)

    hand_over(disturb, may_repeat=trouble is crash_giver, drains=drains)
    assert began == [step]


# Mistakes that these tests would find


@contextlib.contextmanager
def without_the_last_group() -> Iterator[None]:
    """The clients are sent on although nothing was opened for them."""

    async def open_nothing(self: Heir, topics: Any) -> Any:
        return list(topics)

    with mock.patch.object(Heir, "open", open_nothing):
        yield


@contextlib.contextmanager
def to_the_wrong_address() -> Iterator[None]:
    close = Topic.close_clients

    def close_wrongly(self: Topic, reason: str, moved_to: Any = None) -> None:
        own = {"pulsar": "east:6650"}
        other = {"pulsar": "west:6650"}
        close(self, reason, None if moved_to is None else own if moved_to["pulsar"] == other["pulsar"] else other)

    with mock.patch.object(Topic, "close_clients", close_wrongly):
        yield


@contextlib.contextmanager
def while_it_takes_on() -> Iterator[None]:
    """What comes after the stop is answered as if it were stored."""
    take = Producer.take

    def take_on(self: Producer, send: Any, tail: Any) -> None:
        if self.state is ProducerState.CLOSING:
            receipt = pb.CommandSendReceipt(producer_id=self.producer_id, sequence_id=send.sequence_id)
            receipt.message_id.ledgerId, receipt.message_id.entryId = 0, send.sequence_id
            self.peer.send(receipt)
        else:
            take(self, send, tail)

    with mock.patch.object(Producer, "take", take_on):
        yield


@pytest.mark.parametrize("mistake", [without_the_last_group, to_the_wrong_address, while_it_takes_on])
def test_mistakes_in_a_hand_over_are_found(mistake: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with mistake(), pytest.raises((AssertionError, TimeoutError)):
        test_a_producer_goes_where_the_close_sends_it_and_nothing_is_stored_twice()
