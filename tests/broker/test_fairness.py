"""What one connection may take of a turn of the loop, counted in commands and requests, so that speed does not matter."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.dispatch import READ_ENTRIES, Dispatcher
from cepheid_broker.protocol.connection import COMMANDS_PER_TURN, Connection
from cepheid_broker.protocol.requests import AT_WORK, Requests
from cepheid_ports import TaskOwner
from cepheid_wire import CommandType, FrameSplitter, encode_body
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, message, send_frame, subscribe
from tests.support import wait_until


class Answers:
    """What the broker writes to one connection, as types of commands."""

    def __init__(self, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[int] = []
        self._splitter = FrameSplitter(1 << 28)
        monkeypatch.setattr(connection._transport, "write", self._write)

    def _write(self, data: bytes) -> None:
        self.kinds += [frame.type for frame in self._splitter.feed(data)]


def connections_of(world: BrokerWorld, *clients: ScriptedClient) -> list[Connection]:
    found = list(world.broker._listener.connections)
    assert len(found) == len(clients)
    return found


async def test_a_flood_of_commands_leaves_every_turn_of_the_loop_to_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 10 * COMMANDS_PER_TURN
    async with BrokerWorld() as world, await world.client() as one, await world.client() as two:
        await one.ask(pb.CommandLookupTopic(topic=full("t"), request_id=0), pb.CommandLookupTopicResponse)
        flooded, other = connections_of(world, one, two)
        flood, calm = Answers(flooded, monkeypatch), Answers(other, monkeypatch)
        flooded.data_received(b"".join(encode_body(pb.CommandLookupTopic(topic=full("t"), request_id=n)) for n in range(lookups)))
        for turn in range(1, 11):
            assert flood.kinds == [CommandType.LOOKUP_RESPONSE] * (turn * COMMANDS_PER_TURN)
            assert flooded._transport.is_reading() is (turn == 10), "nothing more is read before it is served"
            other.data_received(encode_body(pb.CommandPing()))
            assert calm.kinds == [CommandType.PONG] * turn
            await asyncio.sleep(0)
        assert len(flood.kinds) == lookups


async def test_what_waits_for_its_turn_keeps_its_order_with_messages_and_with_what_breaks_the_connection() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        pings = [encode_body(pb.CommandPing())] * (COMMANDS_PER_TURN + 1)
        sends = [send_frame(pb.CommandSend(producer_id=0, sequence_id=n), message(n)) for n in range(3)]
        close = encode_body(pb.CommandCloseProducer(producer_id=0, request_id=7))
        client.send_bytes(b"".join([sends[0], *pings, sends[1], *pings, sends[2], close]))
        kinds = [type(await client.receive_body()) for _ in range(2 * len(pings) + 4)]
        assert [kind for kind in kinds if kind is not pb.CommandPong] == [pb.CommandSendReceipt] * 3 + [pb.CommandSuccess]
        client.send_bytes(b"".join([*pings, b"no frame " * 3]))
        for _ in pings:
            await client.expect(pb.CommandPong)
        await client.expect_closed()


async def test_a_connection_that_is_lost_leaves_nothing_of_its_flood_behind() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        asks = [subscribe("t", f"s{n}", n, n, subType=pb.CommandSubscribe.Shared) for n in range(50 * COMMANDS_PER_TURN)]
        client.send(*asks)
        await client.expect(pb.CommandSuccess)
        client.abort()
        await wait_until(lambda: not list(world.broker._listener.connections))
        await wait_until(lambda: not any(found.consumers for found in world.topic("t").subscriptions.values()))
        assert len(world.topic("t").subscriptions) < len(asks)


@pytest.mark.virtual_time
async def test_a_few_requests_of_a_connection_are_at_work_and_the_others_wait_in_order() -> None:
    tasks = TaskOwner("test")
    requests, at_work, most, done = Requests(tasks, 10_000), 0, 0, []

    async def work(number: int) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        for _ in range(3):
            await asyncio.sleep(0)
        at_work -= 1
        done.append(number)

    for number in range(20 * AT_WORK):
        requests.start(work(number), name="work")
    await wait_until(lambda: not requests)
    assert most == AT_WORK
    assert done == list(range(20 * AT_WORK))


@pytest.mark.virtual_time
async def test_requests_that_wait_for_something_themselves_hold_up_no_others_for_long() -> None:
    """A producer that waits while its topic is above the quota must not keep the consumer of that topic from subscribing."""
    tasks = TaskOwner("test")
    requests, never, done = Requests(tasks, 10_000), asyncio.Event(), asyncio.Event()

    async def finish() -> None:
        done.set()

    async def wait() -> None:
        await never.wait()

    cancelled: list[int] = []
    for number in range(5 * AT_WORK):
        requests.start(wait(), name="wait", on_cancelled=lambda number=number: cancelled.append(number))  # type: ignore[misc]
    requests.start(finish(), name="finish")
    async with asyncio.timeout(1):
        await done.wait()
    for number in range(AT_WORK):
        requests.start(wait(), name="wait", on_cancelled=lambda number=5 * AT_WORK + number: cancelled.append(number))  # type: ignore[misc]
    requests.start(finish(), name="never begun")
    requests.cancel_all()
    await wait_until(lambda: not requests)
    assert sorted(cancelled) == list(range(6 * AT_WORK)), "each is answered"
    await tasks.aclose()


async def test_a_consumer_that_catches_up_on_small_entries_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small entries are few bytes, and each takes the loop as long as a large one."""
    sent: list[int] = []  # entries of each pass
    one_pass = Dispatcher._pass

    def counted(dispatcher: Dispatcher) -> None:
        before = sum(consumer.traffic.entries for consumer in dispatcher._consumers.values())
        one_pass(dispatcher)
        sent.append(sum(consumer.traffic.entries for consumer in dispatcher._consumers.values()) - before)

    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        await client.publish(3 * READ_ENTRIES)
        monkeypatch.setattr(Dispatcher, "_pass", counted)
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10 * READ_ENTRIES))
        await wait_until(lambda: sum(sent) == 3 * READ_ENTRIES, what="all messages")
    assert max(sent) < 2 * READ_ENTRIES  # one read, and what the socket did not take of the one before
