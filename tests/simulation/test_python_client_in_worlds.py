"""The Python client in worlds: its real code on the virtual loop and the simulated network, beside a scripted producer.

    anna: cepheid producer ─┐                       ┌─ bert: cepheid consumers of each type
    carl: scripted producer ┴─► east, west ─► b1..b3 └─ what each application is told ──► the judge of tests/history

Brokers crash and stop, topics are unloaded, connections are reset or pass nothing. The seed decides everything: wall clock and
randomness of the client are the world's, so a run repeats itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import cepheid
from cepheid.acks import AckTracker
from cepheid_managed_ledger import ManagedLedgerConfig, Retention
from cepheid_metadata import MemoryStore, TopicRecord, topic_records
from cepheid_ports import CepheidError
from cepheid_wire import TopicName, count_messages, decode_batch, parse_metadata, split_tail
from tests.history.checker import judge
from tests.history.events import Event, Position
from tests.history.verdict import Promises
from tests.simulation.checks.audit_waits import read_all
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.checks.client_trims import EVERYTHING
from tests.simulation.faults.plan import CALM
from tests.simulation.world.node import Node
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_client import SimClient
from tests.simulation.world.sim_clock import true_ms
from tests.simulation.world.sim_operator import Operator
from tests.simulation.world.sim_producer import SimProducer
from tests.simulation.world.sim_serving import found_cluster
from tests.simulation.world.stage import Stage
from tests.support import wait_until

TOPIC = TopicName.parse("persistent://public/default/orders")
URL = "pulsar://east:6650,west:6650"
MESSAGES = 150
QUIET_S = 3.0
SEEDS = range(5)
MORE_SEEDS = range(5, 45)
Kind = Literal["exclusive", "failover", "shared", "key_shared"]
JUDGED_AS: dict[Kind, str] = {"exclusive": "Exclusive", "failover": "Failover", "shared": "Shared", "key_shared": "Key_Shared"}


class PythonClientWorld(Stage):
    def __init__(self, seed: int) -> None:
        super().__init__(f"python client {seed}", CALM)
        self.seed = seed
        self.notes = ClientNotes(self.history)
        self.incidents: Counter[str] = Counter()
        self._rng = random.Random(f"{seed}/incidents")
        self._batching = self._rng.random() < 0.5
        self._producing = True

    @property
    def events(self) -> list[Event]:
        return self.notes.events[str(TOPIC)]

    def run(self) -> Counter[str]:
        """Return the rules that were checked. Raises AssertionError with the first one that is broken."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cepheid.topic_producer.time", SimpleNamespace(time_ns=lambda: true_ms() * 1_000_000))
            patch.setattr("cepheid.backoff.random", random.Random(f"{self.seed}/backoff"))
            self.play(self._live())
        judgement = judge(self.events, Promises(deduplication=True))
        assert not judgement.violations, f"seed {self.seed}: {judgement.violations[0]}"
        return judgement.asked

    async def _live(self) -> None:
        self.build(3, ("east", "west"), registers=True)
        await found_cluster(self.tree)
        record = TopicRecord(created_at_ms=1, deduplication=True, retention=EVERYTHING)
        await topic_records(MemoryStore(self.tree)).create(TOPIC, record)
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            broker.serves, broker.ledger_config = True, ManagedLedgerConfig(3, 3, 2, Retention(time_ms=-1, size_bytes=-1))
            broker.start()
        await wait_until(lambda: all(broker.ready for broker in self.brokers.values()))
        kinds: list[Kind] = ["exclusive", "failover", "shared"] if self._batching else list(JUDGED_AS)
        bert = Node("bert")
        await self.spawn(bert, self._subscribe_first(kinds), "subscribe")
        producing = self.spawn(Node("anna"), self._publish(), "publish")
        carl = SimClient("carl", list(self.brokers), random.Random(f"{self.seed}/carl"), self.history)
        scripted = SimProducer(carl, TOPIC, "carl", self.notes)
        self.spawn(carl.node, scripted.stay_connected(), "scripted producer")
        self.start_outside(self._publish_beside(scripted), "scripted publishing")
        consuming = [
            self.spawn(bert, self._consume(kind, index), f"{kind} {index}")
            for kind in kinds
            for index in range(1 if kind == "exclusive" else 2)
        ]
        await self._break_things()
        await producing
        self._producing = False
        await wait_until(lambda: not scripted.unanswered)
        await asyncio.wait(consuming)
        await asyncio.wait([self.spawn(bert, self._drain(kind), f"drain {kind}") for kind in kinds])
        await self._audit()

    # What the applications do

    async def _publish(self) -> None:
        rng = random.Random(f"{self.seed}/anna")
        async with cepheid.connect(URL, keep_alive_s=1.0) as client:
            producer = await client.producer(str(TOPIC), name="anna", batching=self._batching, batch_messages=5)

            async def send(number: int) -> None:
                uid, key = f"anna/{number}", None if self._batching else f"key-{rng.randrange(5)}"
                self.notes.send(TOPIC, "anna", uid, key or "", number)
                try:
                    stored = await producer.send(uid.encode(), key=key)
                except cepheid.Error as error:
                    self.notes.refused(TOPIC, "anna", uid, type(error).__name__)
                else:
                    self.notes.sent(TOPIC, "anna", uid, _place(stored))

            sends = []
            for number in range(MESSAGES):
                sends.append(asyncio.get_running_loop().create_task(send(number)))
                await asyncio.sleep(rng.expovariate(25.0))
            await asyncio.gather(*sends)

    async def _publish_beside(self, scripted: SimProducer) -> None:
        rng = random.Random(f"{self.seed}/scripted")
        while self._producing:
            await asyncio.sleep(rng.expovariate(5.0))
            scripted.publish(rng.choice((1, 1, 3)) if self._batching else 1, "", batch=self._batching)

    async def _subscribe_first(self, kinds: list[Kind]) -> None:
        """Before the first message, so that each subscription owes the whole topic."""
        async with cepheid.connect(URL) as client:
            for kind in kinds:
                await self._opened(client, kind, f"{kind}-first")

    async def _opened(self, client: cepheid.Client, kind: Kind, name: str) -> cepheid.Consumer[bytes]:
        return await client.consumer(
            str(TOPIC), kind, type=kind, name=name, start="earliest", receiver_queue=10, nack_backoff=cepheid.NackBackoff(0.1, 0.4)
        )

    async def _consume(self, kind: Kind, index: int) -> None:
        rng, life = random.Random(f"{self.seed}/{kind}/{index}"), 0
        async with cepheid.connect(URL, keep_alive_s=1.0) as client:
            while self._producing:
                life += 1
                await self._one_life(client, kind, f"{kind}-{index}-{life}", rng)
                await asyncio.sleep(rng.random() * 0.2)

    async def _one_life(self, client: cepheid.Client, kind: Kind, name: str, rng: random.Random) -> None:
        self._note("open", kind, name, type=JUDGED_AS[kind])
        try:
            consumer = await self._opened(client, kind, name)
        except cepheid.Error:
            self._note("close", kind, name)
            return
        self._note("opened", kind, name)
        ends_s = self.loop.time() + rng.uniform(1.0, 5.0)
        while self._producing and self.loop.time() < ends_s:
            try:
                message = await consumer.receive(0.2)
            except cepheid.TimedOutError:
                continue
            self._note_received(kind, name, message)
            choice, position = rng.random(), _place(message.message_id)
            if choice < 0.7:
                is_cumulative = kind in ("exclusive", "failover") and choice < 0.1
                self._note("ack", kind, name, position=position, cumulative=is_cumulative)
                (consumer.ack_cumulative_nowait if is_cumulative else consumer.ack_nowait)(message)
            elif choice < (0.85 if kind in ("shared", "key_shared") else 0.72):
                self._note("nack", kind, name, position=position)
                consumer.nack(message)
        self._note("close", kind, name)
        await consumer.close()

    async def _drain(self, kind: Kind) -> None:
        """One consumer takes and acknowledges everything that is left."""
        name = f"{kind}-last"
        async with cepheid.connect(URL) as client:
            self._note("open", kind, name, type=JUDGED_AS[kind])
            consumer = await self._opened(client, kind, name)
            self._note("opened", kind, name)
            while True:
                try:
                    message = await consumer.receive(QUIET_S)
                except cepheid.TimedOutError:
                    break
                self._note_received(kind, name, message)
                self._note("ack", kind, name, position=_place(message.message_id))
                await consumer.ack(message)
            self._note("close", kind, name)

    def _note(self, event: str, kind: Kind, name: str, **fields: Any) -> None:
        self.notes.note(event, TOPIC, name, subscription=kind, **fields)

    def _note_received(self, kind: Kind, name: str, message: cepheid.Message[bytes]) -> None:
        self._note(
            "received",
            kind,
            name,
            uid=message.data.decode(),
            key=message.key or "",
            position=_place(message.message_id),
            redelivery_count=message.redelivery_count,
        )

    # What breaks

    async def _break_things(self) -> None:
        incidents: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "reset": self._reset,
            "silence": self._silence,
            "crash": self._crash,
            "stop": self._stop,
            "unload": self._unload,
        }
        for _ in range(self._rng.randint(3, 5)):
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))
            what = self._rng.choice(list(incidents))
            self.incidents[what] += 1
            self.notes.note("restart", TOPIC)
            await incidents[what]()
            self.notes.note("restarted", TOPIC)

    async def _reset(self) -> None:
        self.sockets.reset(self._rng.choice(("anna", "bert")))

    async def _silence(self) -> None:
        """Nothing passes between two machines, and neither learns that: connections are half open."""
        client, broker = self._rng.choice(("anna", "bert")), self._rng.choice(("east", "west"))
        for pair in ((client, broker), (broker, client)):
            self.network.block(*pair, "bytes")
        await asyncio.sleep(self._rng.uniform(0.5, 4.0))
        for pair in ((client, broker), (broker, client)):
            self.network.unblock(*pair, "bytes")

    def _some_broker(self) -> SimBroker:
        return self.brokers[self._rng.choice(("east", "west"))]

    async def _crash(self) -> None:
        broker = self._some_broker()
        broker.crash(lingers=self._rng.random() < 0.5)
        await self._start_again(broker)

    async def _stop(self) -> None:
        broker = self._some_broker()
        await broker.stop()
        await self._start_again(broker)

    async def _start_again(self, broker: SimBroker) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        broker.start()
        await wait_until(lambda: broker.ready)

    async def _unload(self) -> None:
        try:
            await Operator(self.brokers, self._rng).unload(TOPIC)
        except CepheidError as error:
            self.history.note(f"unload: {error!r}")

    # What is stored

    async def _audit(self) -> None:
        for broker in self.brokers.values():
            await broker.stop()
        auditor = self.new_broker("auditor")
        auditor.start()
        await self.spawn(auditor.node, self._read(auditor), "audit")

    async def _read(self, auditor: SimBroker) -> None:
        config = ManagedLedgerConfig(3, 3, 2, Retention(time_ms=-1, size_bytes=-1))
        while True:
            try:
                stored = await read_all(await auditor.managed_ledgers.open(TOPIC, config))
                break
            except CepheidError as error:
                self.history.note(f"audit: {error!r}")
                await asyncio.sleep(0.5)
        for position, tail in stored:
            place, metadata, payload = (position.ledger_id, position.entry_id), parse_metadata(tail), split_tail(tail)[1]
            if metadata.HasField("num_messages_in_batch"):
                for index, (_, body) in enumerate(decode_batch(payload, count_messages(tail))):
                    self.notes.note("audit", TOPIC, uid=bytes(body).decode(), key=metadata.partition_key, position=(*place, index))
            else:
                self.notes.note("audit", TOPIC, uid=bytes(payload).decode(), key=metadata.partition_key, position=(*place, -1))


def _place(message_id: cepheid.MessageId) -> Position:
    return message_id.ledger_id, message_id.entry_id, message_id.batch_index


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_client_tells_its_application_holds_whatever_breaks(seed: int) -> None:
    PythonClientWorld(seed).run()


@pytest.mark.slow
def test_every_rule_is_checked_and_everything_breaks_in_some_world() -> None:
    asked: Counter[str] = Counter()
    incidents: Counter[str] = Counter()
    for seed in MORE_SEEDS:
        world = PythonClientWorld(seed)
        asked += world.run()
        incidents += world.incidents
    assert set(incidents) == {"reset", "silence", "crash", "stop", "unload"}
    assert {"H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8", "H9", "H10"} <= set(asked)


def acknowledge_the_whole_batch(acks: AckTracker, place: tuple[int, int], index: int, batch_size: int) -> None:
    acks._complete(place)


def send_no_acknowledgements(acks: AckTracker) -> list[Any]:
    acks._waiting.clear()
    return []


@pytest.mark.parametrize(
    ("name", "mistake", "rule"),
    [("ack", acknowledge_the_whole_batch, "H8"), ("take_individual", send_no_acknowledgements, "H[56]")],
)
def test_mistakes_of_the_client_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, mistake: Callable[..., Any], rule: str
) -> None:
    monkeypatch.setattr(AckTracker, name, mistake)
    with pytest.raises(AssertionError, match=f"seed 0: {rule}"):
        PythonClientWorld(0).run()


def test_a_world_with_the_client_repeats_itself() -> None:
    first, second = PythonClientWorld(0), PythonClientWorld(0)
    first.run()
    second.run()
    assert first.events == second.events
