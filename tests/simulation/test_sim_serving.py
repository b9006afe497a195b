"""The real broker as a process of the simulated cluster: served, crashed, paused, stopped and started again under its name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_managed_ledger import ManagedLedgerConfig
from cepheid_metadata import EARLIEST, Position
from cepheid_ports import CepheidError
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.scripted_client import ScriptedClient
from tests.simulation.faults.plan import CALM, Faults
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_operator import Operator
from tests.simulation.world.sim_serving import PORT, found_cluster
from tests.simulation.world.stage import Stage
from tests.support import wait_until

parse = TopicName.parse
TOPIC = parse("persistent://public/default/orders")


class Served(Stage):
    """Three bookies, and brokers on their ports."""

    def __init__(self, seed: str = "serving", faults: Faults = CALM, *, orderly: bool = True) -> None:
        super().__init__(seed, faults, trace=True)
        self._orderly = orderly

    def run(self, script: Callable[[Served], Coroutine[Any, Any, None]]) -> Served:
        self.play(self._run(script))
        return self

    async def _run(self, script: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
        self.build(3, registers=True)
        await found_cluster(self.tree)
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            broker.serves, broker.orderly = True, self._orderly
            broker.ledger_config = ManagedLedgerConfig(3, 3, 2)
            broker.start()
        await wait_until(lambda: all(broker.ready for broker in self.brokers.values()))
        self.operator = Operator(self.brokers, random.Random("operator"))
        self._clients: list[ScriptedClient] = []
        await script(self)
        for client in self._clients:
            client.abort()

    async def client(self, broker: str, machine: str = "anna") -> ScriptedClient:
        client = ScriptedClient(*await asyncio.open_connection(broker, PORT, local_addr=(machine, 0)))
        self._clients.append(client)
        client.send(pb.CommandConnect(client_version="scripted", protocol_version=20))
        await client.expect(pb.CommandConnected)
        return client

    async def owner(self, ask: str = "east") -> SimBroker:
        """Whom lookups name in the end; one that does not answer is asked for again, as clients do."""
        named = ""
        while True:
            try:
                client = await self.client(named or ask)
            except (ConnectionRefusedError, TimeoutError):
                await asyncio.sleep(0.2)
                named = ""
                continue
            client.send(pb.CommandLookupTopic(topic=str(TOPIC), request_id=client.request_id(), authoritative=False))
            answer = await client.expect(pb.CommandLookupTopicResponse, 20)
            await client.close()
            asked, named = named or ask, answer.brokerServiceUrl.removeprefix("pulsar://").partition(":")[0]
            if answer.response == pb.CommandLookupTopicResponse.Connect and named == asked:
                return self.brokers[named]
            assert answer.response != pb.CommandLookupTopicResponse.Failed, answer

    async def publish(self, broker: SimBroker, count: int) -> list[tuple[int, int]]:
        """Once there is a subscription that keeps it."""
        client = await self.client(broker.name)
        await client.subscribe(str(TOPIC), "readers")
        await client.produce_on(str(TOPIC))
        receipts = await client.publish(count)
        await client.close()
        return [receipt.position for receipt in receipts]

    async def consume(self, broker: SimBroker, count: int, *, acknowledge: int = 0) -> list[tuple[int, int]]:
        """What a consumer is given of a subscription, and how much of it it acknowledges for good."""
        client = await self.client(broker.name)
        await client.subscribe(str(TOPIC), "readers", permits=1000)
        positions = [received.position for received in await client.skim_messages(count)]
        if acknowledge:
            await client.acknowledge_saved(*positions[:acknowledge])
        await client.close()
        return positions


def play(script: Callable[[Served], Coroutine[Any, Any, None]], seed: str = "serving", *, orderly: bool = True) -> Served:
    return Served(seed, orderly=orderly).run(script)


def test_clients_publish_and_consume_at_the_broker_that_lookups_name() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        assert await stage.owner("west") is owner
        sent = await stage.publish(owner, 20)
        assert await stage.consume(owner, 20, acknowledge=12) == sent
        assert await stage.consume(owner, 8) == sent[12:]

    play(script)


def test_a_crashed_broker_is_succeeded_and_what_it_had_answered_is_there() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        sent = await stage.publish(owner, 20)
        await stage.consume(owner, 20, acknowledge=5)
        client = await stage.client(owner.name)
        owner.crash(lingers=True)
        await client.expect_closed()
        other = next(broker for broker in stage.brokers.values() if broker is not owner)
        assert await stage.owner(other.name) is other
        assert await stage.consume(other, 15) == sent[5:]
        owner.start()  # under its name: a new process
        await wait_until(lambda: owner.ready)
        assert owner.node.incarnation == 2
        assert await stage.owner(owner.name) is other

    play(script)


def test_a_broker_that_stops_gives_its_topics_away_before_it_ends() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        sent = await stage.publish(owner, 10)
        client = await stage.client(owner.name)
        await client.subscribe(str(TOPIC), "readers", permits=100)
        await client.skim_messages(10)
        client.acknowledge(*sent[:4])
        await client.ping_through()
        await owner.stop()
        await client.expect_closed()
        assert not owner.node.alive
        assert stage.sockets.ends_at(owner.name) == []
        assert any("stopped" in line for line in stage.history.trace or [])
        other = next(broker for broker in stage.brokers.values() if broker is not owner)
        assert await stage.owner(other.name) is other
        assert await stage.consume(other, 6) == sent[4:]  # acknowledgements without an answer are saved by a good stop

    play(script)


def test_a_broker_without_power_says_nothing_and_its_clients_find_out_by_pings() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        sent = await stage.publish(owner, 5)
        client = await stage.client(owner.name)
        owner.crash(power=True)
        client.send(pb.CommandPing())
        with pytest.raises(TimeoutError):
            await client.receive(30)
        other = next(broker for broker in stage.brokers.values() if broker is not owner)
        assert await stage.owner(other.name) is other
        assert await stage.consume(other, 5) == sent
        owner.start()
        await wait_until(lambda: owner.ready)
        client.send(pb.CommandPing())
        assert await client.receive() is None

    play(script)


def test_a_paused_broker_that_lost_its_session_and_resumes_tells_nobody_ok_for_what_it_had_open() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        client = await stage.client(owner.name)
        await client.subscribe(str(TOPIC), "readers")
        await client.produce_on(str(TOPIC))
        before = [receipt.position for receipt in await client.publish(3)]
        owner.node.pause()
        owner.store.expire()
        other = next(broker for broker in stage.brokers.values() if broker is not owner)
        assert await stage.owner(other.name) is other
        after = await stage.publish(other, 4)
        client.send_message(3, b"too late")
        owner.node.resume()
        bodies = await client.receive_for(5.0)
        assert not any(isinstance(body, pb.CommandSendReceipt) for body in bodies), bodies
        assert await stage.consume(other, 7) == before + after

    play(script)


def test_brokers_that_fight_over_a_topic_lose_nothing_that_they_answered() -> None:
    async def script(stage: Served) -> None:
        east, west = stage.brokers.values()
        sent = await stage.publish(east, 5)
        sent += await stage.publish(west, 5)
        late = await stage.client(east.name)
        await late.produce_on(str(TOPIC))  # east believes that the topic is open here
        late.send_message(0, b"too late")
        assert isinstance(await late.receive_body(), pb.CommandCloseProducer)
        await late.produce_on(str(TOPIC))
        sent += [receipt.position for receipt in await late.publish(5)]
        assert (await stage.consume(east, 15)) == sent

    play(script, orderly=False)


def test_a_silent_client_is_pinged_and_closed() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        client = await stage.client(owner.name)
        stage.network.block("anna", owner.name)

        def is_connected() -> bool:
            return any(end.get_extra_info("peername")[0] == "anna" for end in stage.sockets.ends_at(owner.name))

        await wait_until(lambda: not is_connected())
        assert any("silent for" in line for line in stage.history.trace or [])
        stage.network.heal()
        await client.expect_closed()

    play(script)


def test_a_client_that_does_not_read_stops_dispatch_to_itself() -> None:
    async def script(stage: Served) -> None:
        stage.sockets.window_bytes = 2 << 10
        owner = await stage.owner()
        await stage.publish(owner, 300)
        slow = await stage.client(owner.name, "slow")
        await slow.subscribe(str(TOPIC), "slow", permits=1000)
        await slow.ping_through()
        (end,) = stage.sockets.ends_at("slow")
        end.pause_reading()
        await asyncio.sleep(1.0)
        (served,) = [end for end in stage.sockets.ends_at(owner.name) if end.get_extra_info("peername")[0] == "slow"]
        waiting_bytes = served.get_write_buffer_size()
        high_bytes = owner.broker_settings.connection.write_high_bytes
        assert high_bytes < waiting_bytes < 3 * high_bytes
        assert len(await stage.consume(owner, 300)) == 300  # nobody else waits
        end.resume_reading()
        assert len(await slow.skim_messages(300)) == 300

    play(script)


def test_what_an_operator_does() -> None:
    async def script(stage: Served) -> None:
        operator = stage.operator
        owner = await stage.owner()
        sent = await stage.publish(owner, 30)
        await operator.create_subscription(TOPIC, "others", EARLIEST)
        assert await operator.skip(TOPIC, "readers", 4) == 4
        assert await operator.expire_until(TOPIC, "readers", Position(*sent[9])) == 6
        assert await stage.consume(owner, 20) == sent[10:]
        assert await operator.reset_to(TOPIC, "readers", Position(*sent[2])) == Position(*sent[2])
        assert await operator.reset_to_time(TOPIC, "readers", 0) == Position(*sent[0])
        assert await operator.expire_older_than(TOPIC, "readers", 3600) == 0
        await operator.unload(TOPIC)
        assert await stage.consume(await stage.owner(), 30) == sent
        await operator.set_quorums(TOPIC.namespace, 2, 2, 2)
        await operator.unload_bundle(TOPIC)
        new_owner = await stage.owner()
        assert new_owner is not owner
        sent += await stage.publish(new_owner, 1)
        ledger = stage.history.ledgers[sent[-1][0]]
        assert (len(ledger.last_fragment.ensemble), ledger.write_quorum, ledger.ack_quorum) == (2, 2, 2)
        assert await operator.skip_all(TOPIC, "readers") == 31
        await operator.set_retention(TOPIC, 0, 0)
        await operator.trim(TOPIC)
        assert await operator.terminate(TOPIC) == Position(*sent[-1])
        with pytest.raises(CepheidError):
            await operator.skip_all(TOPIC, "nobody")
        for name in ("readers", "others"):
            await operator.delete_subscription(TOPIC, name)
        await operator.truncate(TOPIC)
        await operator.delete_topic(TOPIC)
        with pytest.raises(CepheidError):
            await operator.unload_bundle(parse("persistent://public/nowhere/else"))

    play(script)


def test_a_call_ends_with_the_process_that_works_on_it() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        await stage.publish(owner, 1)
        stage.later(0.0005, lambda: owner.crash())
        with pytest.raises(ServiceNotReadyError, match="is gone"):
            await stage.operator.unload_bundle(TOPIC, at=owner)
        with pytest.raises(ServiceNotReadyError, match="does not take calls"):
            await stage.operator.trim(TOPIC, at=owner)

    play(script)


def test_the_same_seed_gives_the_same_course() -> None:
    async def script(stage: Served) -> None:
        owner = await stage.owner()
        await stage.publish(owner, 20)
        owner.crash(lingers=True)
        other = next(broker for broker in stage.brokers.values() if broker is not owner)
        await stage.owner(other.name)
        await stage.consume(other, 20)

    assert play(script).history.trace == play(script).history.trace
