"""Applications that speak the binary protocol to a broker: what is delivered to them, in which order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.bundles import bundle_of
from cepheid_broker.ownership.ownership import Here
from cepheid_metadata import BundleOwner, MemoryStore, TopicRecord, keys, topic_records
from cepheid_wire import TopicName
from tests.history.events import Position
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.scenarios.language import ScenarioError, kind, step
from tests.simulation.scenarios.scene import CourseFailed, Scene
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_client import SimClient
from tests.simulation.world.sim_clock import true_ms
from tests.simulation.world.sim_consumer import Delivery, SimConsumer
from tests.simulation.world.sim_operator import Operator, ask
from tests.simulation.world.sim_producer import SimProducer
from tests.simulation.world.sim_serving import found_cluster

_PADDING_BYTES = 400
"""Of a message: two of them are a read of the simulated brokers, so that much is left to be read."""


_BUNDLES = 4
_SUBSCRIPTION = "audit"


@dataclass(slots=True)
class Application:
    client: SimClient
    producer: SimProducer | None = None
    consumer: SimConsumer | None = None
    held: dict[tuple[int, int], Delivery] = field(default_factory=dict)  # taken
    seek: asyncio.Task[bool] | None = None

    @property
    def consuming(self) -> SimConsumer:
        if self.consumer is None:
            raise ScenarioError(f"{self.client.name} has not subscribed")
        return self.consumer


@dataclass(slots=True)
class ClientCourse:
    scene: Scene
    notes: ClientNotes = field(init=False)
    topic: TopicName = field(default_factory=lambda: TopicName.parse("persistent://public/default/orders"))
    applications: dict[str, Application] = field(default_factory=dict)
    published_ms: list[int] = field(default_factory=list)  # when, of each message
    sleeper: SimBroker | None = None

    def __post_init__(self) -> None:
        self.notes = ClientNotes(self.scene.history)

    def named(self, name: str) -> Application:
        if name not in self.applications:
            brokers = [broker.name for broker in self.scene.brokers.values() if broker.serves and not broker.node.paused]
            self.applications[name] = Application(SimClient(name, brokers, random.Random(name), self.scene.history))
        return self.applications[name]

    def place(self, number: int) -> tuple[int, int]:
        """Of the message that was published as the so manieth: its entry."""
        return self.message(number)[:2]

    def message(self, number: int) -> Position:
        """Likewise, with its place in its batch."""
        told = self._told()
        if not 0 < number <= len(told):
            raise ScenarioError(f"{len(told)} messages are published")
        return told[number - 1]

    def batch_of(self, number: int) -> int:
        """How many messages are in one entry with it."""
        entry = self.place(number)
        return sum(place[:2] == entry for place in self._told())

    def _told(self) -> list[Position]:
        events = self.notes.events.get(str(self.topic), ())
        return [event.position for event in events if event.kind == "sent" and event.position is not None]


def of(scene: Scene) -> ClientCourse:
    return scene.part(ClientCourse)


@kind("application", "(?:shop|desk)", "desk (or shop)")
def application(scene: Scene, text: str) -> Application:
    return of(scene).named(text)


@step("{broker} serves applications")
async def serves_applications(scene: Scene, broker: SimBroker) -> None:
    """It is started again with its port open; every topic is its own."""
    broker.crash()
    await found_cluster(scene.tree)
    broker.serves, broker.orderly = True, False
    broker.start()
    await scene.wait_until(lambda: broker.ready, f"{broker.name} serves")


@step("{names} share the topics of applications")
async def share_topics(scene: Scene, names: Sequence[str]) -> None:
    """They are started again with their ports open, ask whose a topic is, and hold connections to each other."""
    await found_cluster(scene.tree, bundles=_BUNDLES)
    brokers = [scene.brokers[name] for name in names]
    for broker in brokers:
        broker.crash()
        broker.serves, broker.orderly = True, True
        broker.start()
    await scene.wait_until(lambda: all(broker.ready for broker in brokers), "they serve")


@step("the owner of their topic falls asleep")
def owner_sleeps(scene: Scene) -> None:
    """Its process takes no step; its session with metadata goes on for a while."""
    owner = of(scene).sleeper = _owner(scene)
    owner.node.pause()


@step("the owner of before wakes up")
def owner_wakes(scene: Scene) -> None:
    """It goes on where it was."""
    sleeper = of(scene).sleeper
    if sleeper is None:
        raise ScenarioError("no owner fell asleep")
    sleeper.node.resume()


@step("a lookup of their topic at another broker waits, and leads to that broker within {seconds}")
async def lookup_waits(scene: Scene, limit_s: float) -> None:
    """Nothing else asks for the topic meanwhile."""
    topic, asked = of(scene).topic, next(broker for broker in scene.brokers.values() if broker.serves and not broker.node.paused)
    until_s, found = scene.history.now_s + limit_s, None
    with contextlib.suppress(ServiceNotReadyError):
        found = await ask(asked, lambda context: context.broker.ownership.locate(topic))
    in_time = isinstance(found, Here) and scene.history.now_s <= until_s
    scene.history.check("V4", in_time, lambda: f"a lookup leads to {found} after {scene.history.now_s - until_s + limit_s} s")


def _owner(scene: Scene) -> SimBroker:
    node = scene.tree.nodes.get(keys.bundle_key(*bundle_of(of(scene).topic, _BUNDLES).noun))
    if node is None:
        raise ScenarioError("nobody owns their topic")
    return scene.brokers[BundleOwner.decode(node.value, "owner").broker_id]


@step("application {application} publishes a message, which is answered within {seconds}")
async def is_answered_soon(scene: Scene, application: Application, limit_s: float) -> None:
    """Being connected first is part of that time."""
    until_s = scene.history.now_s + limit_s
    try:
        producer = await _producing(scene, application)
    except CourseFailed:
        scene.history.check("V4", False, lambda: f"{application.client.name} finds no broker that serves its topic")
        raise
    of(scene).published_ms.append(true_ms())
    producer.publish(1, "", batch=False, padding=_PADDING_BYTES)
    await scene.wait_until(lambda: not producer.unanswered or scene.history.now_s > until_s, "it is answered")
    scene.history.check("V4", scene.history.now_s <= until_s, lambda: f"{application.client.name} waited for more than {limit_s} s")


@step("what applications publish lives for {number} days")
async def lives_for_days(scene: Scene, days: int) -> None:
    """A policy of their topic: what is older and not consumed is given up."""
    record = TopicRecord(created_at_ms=1, message_ttl_s=days * 86_400)
    await topic_records(MemoryStore(scene.tree)).create(of(scene).topic, record)


@step("application {application} publishes {number} messages, and all are answered")
async def publishes_messages(scene: Scene, application: Application, count: int) -> None:
    """To one topic, one by one, numbered in their order: the very first is 1."""
    course, producer = of(scene), await _producing(scene, application)
    for _ in range(count):
        course.published_ms.append(true_ms())
        producer.publish(1, "", batch=False, padding=_PADDING_BYTES)
    await scene.wait_until(lambda: not producer.unanswered, "all are answered")


@step("application {application} publishes a batch of {number} messages, and it is answered")
async def publishes_batch(scene: Scene, application: Application, count: int) -> None:
    """In one entry; each has a number of its own."""
    producer = await _producing(scene, application)
    of(scene).published_ms += [true_ms()] * count
    producer.publish(count, "", batch=True)
    await scene.wait_until(lambda: not producer.unanswered, "it is answered")


async def _producing(scene: Scene, application: Application) -> SimProducer:
    if application.producer is None:
        course = of(scene)
        application.producer = SimProducer(application.client, course.topic, application.client.name, course.notes)
        scene.spawn(application.client.node, application.producer.stay_connected(), "produce")
    producer = application.producer
    await scene.wait_until(lambda: producer.ready, "it is connected")
    return producer


@step("application {application} subscribes, with room for {number} messages")
async def subscribes(scene: Scene, application: Application, room: int) -> None:
    """To that topic from its start, as the only consumer; whenever it is disconnected it comes back."""
    await _subscribe(scene, application, room)


@step("application {application} subscribes at the end, with room for {number} messages")
async def subscribes_at_the_end(scene: Scene, application: Application, room: int) -> None:
    """Likewise; if the subscription is new it gets what is published from now on. Else it goes on where it stood."""
    await _subscribe(scene, application, room, at_the_end=True)


async def _subscribe(scene: Scene, application: Application, room: int, *, at_the_end: bool = False) -> None:
    client, topic = application.client, of(scene).topic
    application.consumer = SimConsumer(client, topic, _SUBSCRIPTION, "Exclusive", client.name, queue=room, at_the_end=at_the_end)
    scene.spawn(application.client.node, application.consumer.stay_connected(), "consume")
    await scene.wait_until(lambda: application.consuming.connection is not None, "it is connected")


@step("an operator deletes the topic of the applications")
async def deletes_topic(scene: Scene) -> None:
    """With force, with all that is in it; applications that stay connected make it anew when they come again."""
    serving = {name: broker for name, broker in scene.brokers.items() if broker.serves}
    await Operator(serving, random.Random("operator")).delete_topic(of(scene).topic, force=True)


@step("application {application} leaves")
async def leaves(scene: Scene, application: Application) -> None:
    """It closes its consumer. The subscription stays."""
    application.consuming.close()
    await asyncio.sleep(0.1)


@step("application {application} is given messages {number} to {number}")
async def is_given(scene: Scene, application: Application, first: int, last: int) -> None:
    """Waits until it has taken them; nothing else comes before or between."""
    for number in range(first, last + 1):
        await _is_given_next(scene, application, number)


@step("application {application} is given messages {number} to {number} of their batch")
async def is_given_of_batch(scene: Scene, application: Application, first: int, last: int) -> None:
    """Waits until it has taken that batch; of its messages it is to have these, and no others."""
    course = of(scene)
    delivery = await _is_given_next(scene, application, first)
    start, end = course.message(first)[2], course.message(last)[2] + 1
    scene.require(delivery.left == (1 << end) - (1 << start), lambda: f"{delivery} comes, not {start} to {end - 1} of it")


async def _is_given_next(scene: Scene, application: Application, number: int) -> Delivery:
    taken: list[Delivery] = []

    def arrives() -> bool:
        delivery = application.consuming.take()
        if delivery is not None:
            taken.append(delivery)
        return bool(taken)

    await scene.wait_until(arrives, f"message {number} comes")
    delivery, wanted = taken[0], of(scene).place(number)
    scene.require(delivery.position == wanted, lambda: f"{delivery} comes, not {number} at {wanted}")
    application.held[wanted] = delivery
    return delivery


@step("application {application} acknowledges message {number}")
def acknowledges_message(scene: Scene, application: Application, number: int) -> None:
    """By itself, and waits for nothing."""
    delivery = application.held.get(of(scene).place(number))
    if delivery is None:
        raise ScenarioError(f"it has not got message {number}")
    application.consuming.acknowledge([delivery])


@step("an operator skips {number} messages")
async def operator_skips(scene: Scene, count: int) -> None:
    """Of what applications have not acknowledged, the first ones."""
    operator = Operator(scene.brokers, random.Random(0))
    serving = next(broker for broker in scene.brokers.values() if broker.serves)
    await operator.skip(of(scene).topic, _SUBSCRIPTION, count, at=serving)


@step("application {application} begins to seek message {number}")
async def begins_to_seek(scene: Scene, application: Application, number: int) -> None:
    """It asks its broker to go on with that one, also of a batch, and the course goes on meanwhile."""
    course = of(scene)
    *place, index = course.message(number)
    seeking = application.consuming.seek((place[0], place[1]), index=max(0, index), messages=course.batch_of(number))
    application.seek = application.client.node.start(seeking, name="seek")
    await asyncio.sleep(0)


@step("application {application} begins to seek the time when message {number} was published")
async def begins_to_seek_time(scene: Scene, application: Application, number: int) -> None:
    """Likewise, by that time instead of its id."""
    seeking = application.consuming.seek_time(of(scene).published_ms[number - 1])
    application.seek = application.client.node.start(seeking, name="seek")
    await asyncio.sleep(0)


@step("application {application} is told that the seek is done")
async def seek_done(scene: Scene, application: Application) -> None:
    """Waits for the answer."""
    if application.seek is None:
        raise ScenarioError("it has not asked for one")
    scene.require(await application.seek, "the seek failed")
