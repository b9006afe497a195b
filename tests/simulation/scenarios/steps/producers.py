"""Producers that send again what they were not answered, to a topic that removes duplicates; and many entries at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_metadata import CursorRecord, Position, keys
from cepheid_wire import TopicName, parse_metadata
from tests.simulation.checks.audit_waits import read_all
from tests.simulation.scenarios.language import ScenarioError, kind, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.ledgers import OpenLedger
from tests.simulation.scenarios.steps.topics import TopicCourse
from tests.simulation.workloads.dedup import POLICIES, REPEATED, Client, DedupWorkload
from tests.simulation.workloads.ledgers import Quorums
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import SimBroker


@dataclass(slots=True)
class Producing:
    """One producer with its topic."""

    workload: DedupWorkload
    client: Client
    broker: SimBroker  # that serves the topic
    topic: PersistentTopic

    def hear(self) -> int:
        """How many messages are answered by now."""
        if self.client.peer is not None:
            self.workload.hear(self.client)
        return len(self.client.answered)


@kind("new_producer", "(?:ann|bob)", "ann")
def new_producer(scene: Scene, text: str) -> str:
    return text


@kind("producer", "(?:ann|bob)", "ann (or bob)")
def producer(scene: Scene, text: str) -> Producing:
    found: Producing = scene.find("producer", text)
    return found


@step("{broker} serves producer {new_producer} a topic without duplicates")
async def serves(scene: Scene, broker: SimBroker, name: str) -> None:
    """A real topic with deduplication, Qw 1 Qa 1; the producer is connected when this line is over."""
    workload = DedupWorkload("payments", scene.random, scene.history, Quorums(1, 1, 1), clients=1)
    topic = await scene.at(broker, workload.open(broker))
    producing = Producing(workload, workload.clients[0], broker, topic)
    scene.bind("producer", name, producing)
    workload.serving = {broker.name: (broker.node, topic)}
    await connects(scene, producing)


@step("{broker} takes over the topic of {producer}, who connects to it")
async def takes_over(scene: Scene, broker: SimBroker, producer: Producing) -> None:
    """Whatever is not answered is sent again."""
    producer.broker, producer.topic = broker, await scene.at(broker, producer.workload.open(broker))
    producer.workload.serving = {broker.name: (broker.node, producer.topic)}
    await connects(scene, producer)


@step("{producer} connects again")
async def connects(scene: Scene, producer: Producing) -> None:
    """To whoever serves the topic; whatever is not answered is sent again."""
    scene.require(await producer.workload.connect(producer.client), "nobody lets it in")


@step("{producer} sends {number} (message|messages)")
async def sends(scene: Scene, producer: Producing, count: int) -> None:
    """In one go, with the next sequence ids, and waits for nothing but that the broker has taken them."""
    if producer.client.peer is None:
        raise ScenarioError("it is not connected")
    producer.workload.publish(producer.client, count, chunks=1)
    await asyncio.sleep(0)


@step("{producer} sends a message of {number} chunks; the first is stored when its connection breaks")
async def sends_a_chunk(scene: Scene, producer: Producing, chunks: int) -> None:
    """The others do not arrive, and it does not hear of the first: it has all of them to send again."""
    workload, client = producer.workload, producer.client
    if client.peer is None:
        raise ScenarioError("it is not connected")
    workload.publish(client, chunks=chunks, arrive=1)
    peer = client.peer
    await scene.wait_until(lambda: bool(peer.heard), "the first chunk is stored")
    workload.disconnect(client)


@step("{producer} has {number} answers")
async def has_answers(scene: Scene, producer: Producing, count: int) -> None:
    """Waits until so many of its messages are answered in all: with a position, or as sent before. Answers come in order (H4)."""
    await scene.wait_until(lambda: producer.hear() >= count, lambda: f"it has {count} answers, and not {producer.hear()}")


@step("{producer} is told of {number} messages that they were stored before")
def told_repeated(scene: Scene, producer: Producing, count: int) -> None:
    """So far: its broker recognised them, whoever had stored them."""
    found = [sequence_id for sequence_id, position in producer.client.answered.items() if position == REPEATED]
    scene.require(len(found) == count, lambda: f"of {found}, in {producer.client.answered}")


@step("{number} others publish to the topic of {producer}, and are answered")
async def others_publish(scene: Scene, count: int, producer: Producing) -> None:
    """A message each, with names of their own: the topic has as many sequence ids more to remember."""
    workload = producer.workload
    for _ in range(count):
        other = Producing(workload, Client(f"client-{len(workload.clients) + 1}"), producer.broker, producer.topic)
        workload.clients.append(other.client)
        await connects(scene, other)
        await sends(scene, other, 1)
        await has_answers(scene, other, 1)


@step("the connection of {producer} breaks")
def breaks(scene: Scene, producer: Producing) -> None:
    """The broker notices at its next step."""
    producer.workload.disconnect(producer.client)


@step("a snapshot of the sequence ids of {producer} is due")
async def snapshot_due(scene: Scene, producer: Producing) -> None:
    """So much time goes by."""
    await asyncio.sleep(POLICIES.dedup_snapshot_s + 0.1)


@step("the snapshot of the sequence ids of {producer} is taken")
def snapshot_taken(scene: Scene, producer: Producing) -> None:
    """Metadata being well, it is saved within a tenth of a second."""
    producer.broker.node.call_soon(producer.topic.on_tick, 1.0)


@step("{new_ledger} is the ledger that has the sequence ids of {producer}")
def names_ledger_of_ids(scene: Scene, name: str, producer: Producing) -> None:
    """With all others of its topic: they are too many for a record."""
    ledger_id = _ids_record(scene, producer).cursor_ledger_id
    scene.require(ledger_id is not None, "they are in a record")
    scene.bind("ledger", name, OpenLedger(name, producer.broker, SimpleNamespace(ledger_id=ledger_id)))


@step("an operator at {broker} deletes {ledger} with the sequence ids of {producer}")
async def deletes_ids(scene: Scene, broker: SimBroker, ledger: OpenLedger, producer: Producing) -> None:
    """By mistake. What is left is the position in a record."""
    scene.require(_ids_record(scene, producer).cursor_ledger_id == ledger.id, "they are elsewhere by now")
    await scene.at(broker, broker.ledgers.recover(ledger.id))
    await scene.at(broker, broker.ledgers.delete(ledger.id))


def _ids_record(scene: Scene, producer: Producing) -> CursorRecord:
    return scene.history.cursor_records[keys.cursor_key(producer.workload.topic, DEDUP_CURSOR)]


@step("{broker} has found the sequence ids of {producer} with the position that they belong to")
def found_ids(scene: Scene, broker: SimBroker, producer: Producing) -> None:
    """Of each name the last one of what was stored up to that position, and nothing of what is stored behind it (C6)."""
    if broker is not producer.broker:
        raise ScenarioError(f"its topic is served by {producer.broker.name}")
    cursor = producer.topic.ledger.cursors[DEDUP_CURSOR]
    found, stored = dict(cursor.sequence_ids), dict[str, int]()
    for position, payload in _stored(scene, producer.workload.topic):
        if position <= cursor.mark_delete:
            metadata = parse_metadata(payload)
            stored[metadata.producer_name] = metadata.sequence_id
    scene.require(bool(found), f"it is at {cursor.mark_delete}, and has found none")
    scene.require(found == stored, f"it is at {cursor.mark_delete} with {found}; up to there {stored} are stored")


def _stored(scene: Scene, topic: TopicName) -> Iterator[tuple[Position, bytes]]:
    """What its committed chain has for certain, in order."""
    history = scene.history
    for ledger in history.chains[keys.chain_key(topic)].ledgers:
        for entry_id, payload in enumerate(history.sent[ledger.ledger_id][: history.entries_of(ledger.ledger_id)]):
            yield Position(ledger.ledger_id, entry_id), payload


@step("{producer} is told to come back")
async def told_to_come_back(scene: Scene, producer: Producing) -> None:
    """Waits until its topic is closed, and it hears of that."""
    await scene.wait_until(lambda: producer.topic.closed, "its topic is closed")
    producer.hear()
    scene.require(producer.client.peer is None, "it still has its connection")


@step("the topic of {producer} was never closed")
def never_closed(scene: Scene, producer: Producing) -> None:
    """It is the one that was opened first."""
    scene.require(not producer.topic.closed, "it was")


@step("each message of {producer} is stored once, in order")
async def stored_once(scene: Scene, producer: Producing) -> None:
    """Those that were answered, for certain (H3). Read from the first entry to the last."""
    producer.workload.check(await scene.at(producer.broker, read_all(producer.topic.ledger)))


# -- many at once -------------------------------------------------------------------------------------------------------


@step("{broker} publishes {number} entries of {number} bytes to {topic}, {number} a second")
async def floods(scene: Scene, broker: SimBroker, count: int, size_bytes: int, topic: TopicCourse, rate_per_s: int) -> None:
    """Each as an append of its own, and waits for none."""
    for number in range(count):
        payload = b"flood %d " % number
        topic.published[payload] = topic.publish(broker, [payload.ljust(size_bytes, b".")])
        await asyncio.sleep(1 / rate_per_s)


@step("{broker} publishes {payload} of {number} bytes to {topic}")
def publishes_large(scene: Scene, broker: SimBroker, payload: bytes, size_bytes: int, topic: TopicCourse) -> None:
    """An append of its own, filled up to that size; and waits for nothing: what the next line publishes comes in the same moment.
    A topic here takes 64 KiB that are not stored."""
    if payload in topic.published:
        raise ScenarioError(f'"{payload.decode()}" was published before')
    topic.published[payload] = topic.publish(broker, [payload.ljust(size_bytes, b".")])


@step("{topic} has refused some of it")
def has_refused(scene: Scene, topic: TopicCourse) -> None:
    """More waited to be stored than it takes."""
    scene.require(bool(topic.workload.model.refused), "nothing was refused")


@step("every producer of {topic} is answered")
async def all_answered(scene: Scene, topic: TopicCourse) -> None:
    """Waits until each append is told OK or an error (V9)."""
    for payload, future in list(topic.published.items()):
        await scene.wait_until(future.done, f'the producer is told of "{payload.decode()}"')


@step("{bookies} are restarted in turn while {broker} publishes to {topic}")
async def rolls(scene: Scene, bookies: Sequence[SimBookie], broker: SimBroker, topic: TopicCourse) -> None:
    """One after the other loses power and comes back a second later, with twenty entries around it; all are told OK."""
    for bookie in bookies:
        told = await _publishes_ten(topic, broker, {2: lambda bookie=bookie: bookie.crash(power=True)})
        await bookie.start()
        told += await _publishes_ten(topic, broker, {})
        await _all_ok(scene, told, f"while {bookie.id} is restarted")


@step("metadata is restarted while {broker} publishes to {topic}")
async def metadata_rolls(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Out for half a second, then for half a second without a leader, with thirty entries around it, of several ledgers; all are
    told OK."""
    tree, plan = scene.tree, scene.plan
    told = await _publishes_ten(topic, broker, {5: tree.begin_outage})
    told += await _publishes_ten(topic, broker, {0: tree.end_outage, 1: tree.begin_election, 6: lambda: tree.end_election(plan)})
    told += await _publishes_ten(topic, broker, {})
    await _all_ok(scene, told, "while metadata is restarted")


@step("{broker} crashes while it publishes to {topic}")
async def crashes_under_load(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Behind ten entries, the last of which nobody hears of any more."""
    told = await _publishes_ten(topic, broker, {})
    told += [_publish_unnamed(topic, broker) for _ in range(3)]
    await asyncio.sleep(0.001)
    broker.crash()
    heard = [each.done() for each in told]
    scene.require(heard[0] and not heard[-1], "it had no load")


@step("{broker} closes {topic} in good order while it publishes")
async def closes_under_load(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """As when a bundle is handed over, with three entries on their way and ten that come later, or too late; each is answered."""
    told = [_publish_unnamed(topic, broker) for _ in range(3)]
    closing = broker.node.start(topic.workload.close(topic.at(broker)), name="close")
    told += await _publishes_ten(topic, broker, {})
    await closing
    for each in told:
        await scene.wait_until(each.done, "an entry is answered")
    scene.require(told[0].result() and not told[-1].result(), "it had no load")


async def _publishes_ten(
    topic: TopicCourse, broker: SimBroker, meanwhile: Mapping[int, Callable[[], None]]
) -> list[asyncio.Future[bool]]:
    """Within a second; before some of them something happens."""
    told = []
    for tenth in range(10):
        meanwhile.get(tenth, lambda: None)()
        told.append(_publish_unnamed(topic, broker))
        await asyncio.sleep(0.1)
    return told


def _publish_unnamed(topic: TopicCourse, broker: SimBroker) -> asyncio.Future[bool]:
    return topic.publish(broker, [b"unnamed %d" % len(topic.workload.model.sent)])


async def _all_ok(scene: Scene, told: Sequence[asyncio.Future[bool]], when: str) -> None:
    for each in told:
        await scene.wait_until(each.done, "an entry is answered")
        scene.require(each.result(), f"an entry is not told OK {when}")
