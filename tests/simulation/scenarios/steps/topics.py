"""Topics: owners that depose each other, what their producers are told, what is trimmed, and where subscriptions stand."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from cepheid_managed_ledger import ManagedLedger, Retention
from cepheid_metadata import Chain, CursorRecord, Op, Position, Put, keys
from tests.simulation.checks.audit_waits import read_all
from tests.simulation.checks.topic import acked_messages, check_all_entries
from tests.simulation.checks.topic_model import Acked, CursorModel
from tests.simulation.scenarios.language import ScenarioError, kind, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.ledgers import OpenLedger
from tests.simulation.workloads.ledgers import EXPECTED, Quorums
from tests.simulation.workloads.topics import TopicWorkload
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import SimBroker

_TOPIC = "(?:orders|payments)"
_SUBSCRIPTION = "(?:audit|billing)"
EVERYTHING = Retention(time_ms=-1, size_bytes=-1)
_OPENINGS = 3
"""By an auditor: the owner, whom nobody told, may record its next ledger in between."""
DAY_MS = 86_400_000


@dataclass(slots=True)
class TopicCourse:
    """What has been set going on one topic."""

    scene: Scene
    workload: TopicWorkload
    openings: dict[str, ManagedLedger] = field(default_factory=dict)  # by broker: the last one, deposed or not
    published: dict[bytes, asyncio.Future[bool]] = field(default_factory=dict)
    moves: list[asyncio.Task[None]] = field(default_factory=list)

    def at(self, broker: SimBroker) -> ManagedLedger:
        if broker.name not in self.openings:
            raise ScenarioError(f"{broker.name} has not opened {self.workload.topic.local_name}")
        return self.openings[broker.name]

    @property
    def chain(self) -> Chain:
        return self.scene.history.chains[keys.chain_key(self.workload.topic)]

    def outcome(self, payload: bytes) -> asyncio.Future[bool]:
        if payload not in self.published:
            raise ScenarioError(f'nobody has published "{payload.decode()}"')
        return self.published[payload]

    def position(self, payload: bytes) -> Position:
        """Where its producer was told that it is."""
        for position, stored in self.workload.model.stored.items():
            if stored == payload:
                return position
        raise ScenarioError(f'no producer was told where "{payload.decode()}" is')

    def publish(self, broker: SimBroker, payloads: Sequence[bytes]) -> asyncio.Future[bool]:
        if broker.node.paused:
            raise ScenarioError(f"{broker.name} sleeps")
        managed_ledger = self.at(broker)
        opening = (broker.process, managed_ledger.chain.epoch)
        return broker.node.context.run(self.workload.append, opening, managed_ledger, list(payloads))


@kind("new_topic", _TOPIC, "orders")
def new_topic(scene: Scene, text: str) -> str:
    return text


@kind("topic", _TOPIC, "orders (or payments)")
def topic(scene: Scene, text: str) -> TopicCourse:
    found: TopicCourse = scene.find("topic", text)
    return found


@kind("subscription", _SUBSCRIPTION, "audit (or billing)")
def subscription(scene: Scene, text: str) -> str:
    return text


# -- owners -------------------------------------------------------------------------------------------------------------


@step("{broker} opens topic {new_topic}, Qw {number} Qa {number}")
async def opens_topic(scene: Scene, broker: SimBroker, name: str, qw: int, qa: int) -> None:
    """For the first time. Everything is kept until the text says otherwise."""
    course = TopicCourse(scene, TopicWorkload(name, scene.random, scene.history, Quorums(qw, qw, qa)))
    course.workload.config = replace(course.workload.config, retention=EVERYTHING)
    course.workload.weather = lambda _: 0
    scene.bind("topic", name, course)
    await opens_again(scene, broker, course)


@step("{broker} opens {topic}")
async def opens_again(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """From its records: whoever owned it is fenced. Everything that clients were promised before must be there."""
    managed_ledger = await scene.at(broker, topic.workload.open(broker))
    scene.require(managed_ledger is not None, f"{broker.name} cannot open it")
    assert managed_ledger is not None
    topic.openings[broker.name] = managed_ledger


@step("{broker} cannot open {topic}")
async def cannot_open(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """It tries, and is refused."""
    managed_ledger = await scene.at(broker, topic.workload.open(broker))
    scene.require(managed_ledger is None, lambda: f"{broker.name} opened {managed_ledger!r}")


@step("{broker} has given {topic} up")
async def has_given_up(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Waits until its opening is over: nothing is answered OK from it any more."""
    managed_ledger = topic.at(broker)
    await scene.wait_until(lambda: not managed_ledger.is_usable, lambda: f"{broker.name} still has {managed_ledger!r}")


@step("{broker} closes {topic} in good order")
async def closes_topic(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """As when a bundle is handed over: appends are answered, cursors saved, the ledger ended."""
    await scene.at(broker, topic.workload.close(topic.at(broker)))


@step("an operator at {broker} deletes {topic}")
async def deletes_topic(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """With all that was in it. Whoever has it open hears nothing of that; whoever opens it next makes it anew."""
    topic.workload.forget()
    await scene.at(broker, broker.managed_ledgers.delete(topic.workload.topic))
    topic.workload.begin_anew()


@step("an operator at {broker} cannot delete {topic}")
async def cannot_delete_topic(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """They try, and are refused: whoever opens it next must find all that was in it."""
    try:
        await scene.at(broker, broker.managed_ledgers.delete(topic.workload.topic))
    except EXPECTED:
        return
    scene.require(False, f"{broker.name} deleted it")


@step("{broker} starts a ledger for {topic}")
async def starts_ledger(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """It was opened without one; there are enough writable bookies now, and a producer asks."""
    await scene.at(broker, topic.at(broker).require_open_ledger())


@step("{broker} is down")
async def is_down(scene: Scene, broker: SimBroker) -> None:
    """Waits until its process has ended."""
    await scene.wait_until(lambda: not broker.node.alive, f"{broker.name} is down")


@step("{broker}'s session with metadata expires")
def session_expires(scene: Scene, broker: SimBroker) -> None:
    """The store gives it up. It hears of that in a step of its own: not while it sleeps."""
    broker.store.expire()


@step("{broker} gets a new session with metadata")
def session_renewed(scene: Scene, broker: SimBroker) -> None:
    """It reaches the store again."""
    broker.store.renew()


@step("{broker} reads metadata as it was {seconds} ago")
def reads_the_past(scene: Scene, broker: SimBroker, lag_s: float) -> None:
    """From a follower that is so far behind; never less than it has seen itself."""
    broker.store.lag_s = lag_s


@step("{broker} reads metadata as it is")
def reads_the_present(scene: Scene, broker: SimBroker) -> None:
    """The follower has caught up."""
    broker.store.lag_s = None


@step("{broker} falls asleep when it next records a ledger of {topic}, and does not hear the answer")
def sleeps_at_rollover(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """The write is applied; whoever wakes up has to find that out."""

    def falls_asleep(ops: Sequence[Op]) -> bool:
        rolls_over = any(op.key == keys.chain_key(topic.workload.topic) for op in ops)
        if rolls_over:
            broker.node.pause()
        return rolls_over

    broker.store.loses_answer = falls_asleep


# -- producers ----------------------------------------------------------------------------------------------------------


@step("{broker} publishes {payloads} to {topic}")
def publishes(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], topic: TopicCourse) -> None:
    """Each as an append of its own, one after the other, and waits for none. Each payload names its entry."""
    for payload in payloads:
        if payload in topic.published:
            raise ScenarioError(f'"{payload.decode()}" was published before')
        topic.published[payload] = topic.publish(broker, [payload])


@step("{broker} publishes to {topic} until it falls asleep")
async def publishes_until_asleep(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Entries of no name, so many that some go to the next ledger before it is recorded."""
    while not broker.node.paused:
        topic.publish(broker, [b"unnamed %d" % len(topic.workload.model.sent)])
        await asyncio.sleep(0.0005)


@step("{broker} publishes to {topic} until it takes ledger ids, and does not hear that they are its own")
async def publishes_until_ids_are_lost(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Entries of no name, one after the other, until its block of ids is used up. The write of the counter that takes the next one
    is applied, and reported as unknown; those before and after it are answered."""
    taken: list[Sequence[Op]] = []

    def loses(ops: Sequence[Op]) -> bool:
        takes = not taken and any(isinstance(op, Put) and op.key == keys.LEDGER_IDS_KEY for op in ops)
        if takes:
            taken.append(ops)
        return takes

    broker.store.loses_answer = loses
    while not taken:
        stored = await topic.publish(broker, [b"unnamed %d" % len(topic.workload.model.sent)])
        scene.require(stored, "an entry is not told OK")


@step("{broker} publishes to {topic} until it has {number} ledgers more")
async def publishes_until_rolled(scene: Scene, broker: SimBroker, topic: TopicCourse, count: int) -> None:
    """Entries of no name, one after the other; each is told OK."""
    before = len(topic.chain.ledgers)
    while len(topic.chain.ledgers) < before + count:
        stored = await topic.publish(broker, [b"unnamed %d" % len(topic.workload.model.sent)])
        scene.require(stored, "an entry is not told OK")


@step("the producer is told OK for {payloads}")
async def producer_told_ok(scene: Scene, payloads: Sequence[bytes]) -> None:
    """Waits for it. In every answer the committed chain is looked at: the entry must be there (M3)."""
    for payload in payloads:
        future = _outcome(scene, payload)
        await scene.wait_until(future.done, f'the producer is told of "{payload.decode()}"')
        scene.require(future.result(), f'the producer is told of an error for "{payload.decode()}"')


@step("the producer is told of an error for {payloads}")
async def producer_told_error(scene: Scene, payloads: Sequence[bytes]) -> None:
    """Waits for it. The entry may be stored or not; a client sends it again."""
    for payload in payloads:
        future = _outcome(scene, payload)
        await scene.wait_until(future.done, f'the producer is told of "{payload.decode()}"')
        scene.require(not future.result(), f'the producer is told OK for "{payload.decode()}"')


@step("the producer is told nothing of {payloads}")
def producer_told_nothing(scene: Scene, payloads: Sequence[bytes]) -> None:
    """So far."""
    for payload in payloads:
        scene.require(not _outcome(scene, payload).done(), f'the producer was told of "{payload.decode()}"')


def _outcome(scene: Scene, payload: bytes) -> asyncio.Future[bool]:
    for course in scene.all("topic"):
        if payload in course.published:
            found: asyncio.Future[bool] = course.outcome(payload)
            return found
    raise ScenarioError(f'nobody has published "{payload.decode()}"')


# -- ledgers of a topic -------------------------------------------------------------------------------------------------


@step("{new_ledger} is the ledger that {broker} writes for {topic}")
def names_ledger(scene: Scene, name: str, broker: SimBroker, topic: TopicCourse) -> None:
    """From now on it can be spoken of."""
    ledger_id = topic.at(broker).chain.ledgers[-1].ledger_id
    scene.bind("ledger", name, OpenLedger(name, broker, SimpleNamespace(ledger_id=ledger_id)))


@step("{broker} recovers {ledger}")
async def recovers_any(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """Fences it and closes it at whatever end it finds."""
    await scene.at(broker, broker.ledgers.recover(ledger.id))


@step("{bookies} (has|have) all that was sent to {ledger}")
async def has_all(scene: Scene, bookies: Sequence[SimBookie], ledger: OpenLedger) -> None:
    """Waits until each of them has answered OK for all of it, heard or not."""
    for each in bookies:
        held = lambda each=each: scene.history.bookie(each.id).ok.get(ledger.id, ())  # noqa: E731
        await scene.wait_until(lambda held=held: len(held()) == len(scene.history.sent[ledger.id]), f"{each.id} has all of it")


@step("{payloads} (is|are) in {ledger}")
def is_in(scene: Scene, payloads: Sequence[bytes], ledger: OpenLedger) -> None:
    """Their producer was told so."""
    for payload in payloads:
        position = _position(scene, payload)
        scene.require(position.ledger_id == ledger.id, f'"{payload.decode()}" is at {position}, {ledger.name} is {ledger.id}')


@step("{payloads} (is|are) behind {ledger}")
def is_behind(scene: Scene, payloads: Sequence[bytes], ledger: OpenLedger) -> None:
    """Their producer was told of a later ledger."""
    for payload in payloads:
        position = _position(scene, payload)
        scene.require(position.ledger_id > ledger.id, f'"{payload.decode()}" is at {position}, {ledger.name} is {ledger.id}')


def _position(scene: Scene, payload: bytes) -> Position:
    for course in scene.all("topic"):
        if payload in course.published:
            found: Position = course.position(payload)
            return found
    raise ScenarioError(f'nobody has published "{payload.decode()}"')


@step("{ledger} is deleted, and bookies have collected it")
async def is_collected(scene: Scene, ledger: OpenLedger) -> None:
    """Waits until metadata has it no more, nobody can bring it back, and two rounds of collection are over."""
    history = scene.history
    await scene.wait_until(lambda: ledger.id in history.deleted and ledger.id not in history.restorable, "it is deleted")
    await asyncio.sleep(5)


@step("{ledger} is listed by {topic}")
def is_listed(scene: Scene, ledger: OpenLedger, topic: TopicCourse) -> None:
    """Its committed chain has it."""
    listed = [each.ledger_id for each in topic.chain.ledgers]
    scene.require(ledger.id in listed, f"the chain has {listed}")


@step("{ledger} is not listed by {topic}")
def is_not_listed(scene: Scene, ledger: OpenLedger, topic: TopicCourse) -> None:
    """Its committed chain has it no more."""
    listed = [each.ledger_id for each in topic.chain.ledgers]
    scene.require(ledger.id not in listed, f"the chain has {listed}")


@step("every ledger that {topic} lists exists")
def all_exist(scene: Scene, topic: TopicCourse) -> None:
    """In metadata, where whoever reads the topic next looks for it."""
    missing = [each.ledger_id for each in topic.chain.ledgers if each.ledger_id not in scene.history.ledgers]
    scene.require(not missing, f"{missing} of {topic.chain.ledgers} are gone")


@step("no ledger exists but those that {topic} lists")
def nothing_else_exists(scene: Scene, topic: TopicCourse) -> None:
    """Nothing is left behind by an opening that came to nothing."""
    others = [ledger_id for ledger_id in scene.history.ledgers if ledger_id not in [each.ledger_id for each in topic.chain.ledgers]]
    scene.require(not others, f"{others} are there besides")


@step("{topic} has all that its producers were told OK for, in order")
async def is_all_there(scene: Scene, topic: TopicCourse) -> None:
    """As the next owner reads it, from the first entry to the last: nothing missing, doubled or out of order (M3, M4, M5)."""
    auditor = scene.new_broker("auditor")
    auditor.start()
    for _ in range(_OPENINGS):
        managed_ledger = await scene.at(auditor, topic.workload.open(auditor))
        if managed_ledger is not None:
            break
    scene.require(managed_ledger is not None, "it cannot be opened")
    assert managed_ledger is not None
    check_all_entries(scene.history, topic.workload.model, await scene.at(auditor, read_all(managed_ledger)))


# -- trimming -----------------------------------------------------------------------------------------------------------


@step("{topic} keeps everything")
def keeps_everything(scene: Scene, topic: TopicCourse) -> None:
    """From now on."""
    _keep(topic, EVERYTHING)


@step("{topic} keeps nothing that is consumed")
def keeps_nothing(scene: Scene, topic: TopicCourse) -> None:
    """Retention of no time and no size: what every subscription has acknowledged goes."""
    _keep(topic, Retention())


@step("{topic} keeps {number} bytes of what is consumed")
def keeps_bytes(scene: Scene, topic: TopicCourse, size_bytes: int) -> None:
    """Retention by size, whatever the age."""
    _keep(topic, Retention(time_ms=-1, size_bytes=size_bytes))


@step("{topic} keeps what is consumed for {number} days")
def keeps_days(scene: Scene, topic: TopicCourse, days: int) -> None:
    """Retention by age, whatever the size."""
    _keep(topic, Retention(time_ms=days * DAY_MS, size_bytes=-1))


def _keep(topic: TopicCourse, retention: Retention) -> None:
    topic.workload.config = replace(topic.workload.config, retention=retention)
    for name, managed_ledger in topic.openings.items():
        managed_ledger.config = topic.workload.config
        topic.workload.model.note_policy(topic.scene.brokers[name].process, retention)


@step("{broker} trims {topic}")
async def trims(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """What may go goes; each ledger that leaves is looked at (M6)."""
    await scene.at(broker, topic.at(broker).trim())


@step("{broker} trims {topic} while {number} entries are published")
async def trims_while_it_grows(scene: Scene, broker: SimBroker, topic: TopicCourse, count: int) -> None:
    """Entries of no name, from the first moment of the trim on."""
    trimming = broker.node.start(topic.at(broker).trim(), name="trim")
    for _ in range(count):
        await topic.publish(broker, [b"unnamed %d" % len(topic.workload.model.sent)])
    await trimming


@step("the clock of {broker}'s machine jumps {number} days ahead")
def clock_jumps(scene: Scene, broker: SimBroker, days: int) -> None:
    """As somebody sets it: what measures time by loop clocks does not notice."""
    scene.plan.clocks.of(broker.name).jump(days * DAY_MS)


# -- subscriptions ------------------------------------------------------------------------------------------------------


@step("{broker} makes subscription {subscription} of {topic}, from its start on")
async def makes_subscription(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse) -> None:
    """Durable when this line is over. Nothing counts as acknowledged."""
    managed_ledger = topic.at(broker)
    await scene.at(broker, topic.workload.create_cursor_at(managed_ledger, name, managed_ledger.first_position()))


@step("{broker} cannot make subscription {subscription} of {topic}")
async def cannot_make_subscription(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse) -> None:
    """It tries, and is refused."""
    managed_ledger = topic.at(broker)
    with contextlib.suppress(*EXPECTED):
        cursor = await scene.at(broker, managed_ledger.create_cursor(name, managed_ledger.first_position()))
        scene.require(False, lambda: f"{broker.name} made {cursor!r}")


@step("{broker} makes subscription {subscription} of {topic}, from its start on, while {topic} is trimmed")
async def makes_subscription_in_a_trim(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse, same: TopicCourse) -> None:
    """Both at once: whoever comes second sees what the first one did."""
    managed_ledger = topic.at(broker)
    making = topic.workload.create_cursor_at(managed_ledger, name, managed_ledger.first_position())
    made = broker.node.start(making, name="make subscription")
    trimmed = broker.node.start(managed_ledger.trim(), name="trim")
    await made
    await trimmed


@step("{subscription} of {topic} acknowledges {payloads} at {broker}")
def acknowledges(scene: Scene, name: str, topic: TopicCourse, payloads: Sequence[bytes], broker: SimBroker) -> None:
    """In that broker's memory; saved within a tenth of a second, or never."""
    asked = Acked(entries=dict.fromkeys(topic.position(payload) for payload in payloads))
    broker.node.context.run(topic.workload.acknowledge_these, _cursor(topic, broker, name), _model(topic, name), asked)


@step("{subscription} of {topic} acknowledges every second entry of {payloads} at {broker}")
def acknowledges_every_second(scene: Scene, name: str, topic: TopicCourse, payloads: Sequence[bytes], broker: SimBroker) -> None:
    """From the second of them on; likewise."""
    acknowledges(scene, name, topic, payloads[1::2], broker)


@step("{subscription} of {topic} acknowledges everything up to {payload} at {broker}")
def acknowledges_up_to(scene: Scene, name: str, topic: TopicCourse, payload: bytes, broker: SimBroker) -> None:
    """Cumulatively; likewise."""
    asked = Acked(upto=topic.position(payload))
    broker.node.context.run(topic.workload.acknowledge_these, _cursor(topic, broker, name), _model(topic, name), asked)


@step("{subscription} of {topic} acknowledges all of {ledger} at {broker}")
def acknowledges_ledger(scene: Scene, name: str, topic: TopicCourse, ledger: OpenLedger, broker: SimBroker) -> None:
    """Cumulatively, up to its last entry; likewise."""
    asked = Acked(upto=max(position for position in topic.workload.model.stored if position.ledger_id == ledger.id))
    broker.node.context.run(topic.workload.acknowledge_these, _cursor(topic, broker, name), _model(topic, name), asked)


@step("{subscription} of {topic} acknowledges everything so far at {broker}")
def acknowledges_all(scene: Scene, name: str, topic: TopicCourse, broker: SimBroker) -> None:
    """Cumulatively; likewise."""
    asked = Acked(upto=max(topic.workload.model.stored))
    broker.node.context.run(topic.workload.acknowledge_these, _cursor(topic, broker, name), _model(topic, name), asked)


@step("{subscription} of {topic} acknowledges messages {number} and {number} of the batch {payload} at {broker}")
def acknowledges_part(scene: Scene, name: str, topic: TopicCourse, one: int, other: int, payload: bytes, broker: SimBroker) -> None:
    """The entry counts as a batch of eight messages, counted from 0."""
    asked = Acked(messages={topic.position(payload): 1 << one | 1 << other})
    broker.node.context.run(topic.workload.acknowledge_these, _cursor(topic, broker, name), _model(topic, name), asked)


@step("{subscription} of {topic} hears from {broker} that its acknowledgements are saved")
async def hears_saved(scene: Scene, name: str, topic: TopicCourse, broker: SimBroker) -> None:
    """Waits for the answer. From now on they must be there after every crash (C2)."""
    await scene.at(broker, topic.workload.save(topic.at(broker), _cursor(topic, broker, name)))


@step("{broker} moves {subscription} of {topic} to {payload}")
async def moves(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse, payload: bytes) -> None:
    """A reset (seek): durable, and delivery starts there (C4)."""
    await begins_to_move(scene, broker, name, topic, payload)
    await move_done(scene, broker, name, topic)


@step("{broker} begins to move {subscription} of {topic} to {payload}")
async def begins_to_move(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse, payload: bytes) -> None:
    """Likewise, and the course goes on meanwhile."""
    cursor, model = _cursor(topic, broker, name), _model(topic, name)
    moving = topic.workload.reset_to(topic.at(broker), cursor, model, topic.position(payload))
    topic.moves.append(broker.node.start(moving, name="move"))
    await asyncio.sleep(0.05)  # until it has sent its write


@step("{broker}'s move of {subscription} of {topic} is done")
async def move_done(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse) -> None:
    """Waits for what was begun."""
    await topic.moves.pop()


@step("{broker} crashes as soon as it has moved {subscription} of {topic} to the edge of a ledger")
def crashes_at_edge(scene: Scene, broker: SimBroker, name: str, topic: TopicCourse) -> None:
    """Of the first one that stays, as trimming does before it takes ledgers away."""
    key = keys.cursor_key(topic.workload.topic, name)

    def dies(ops: Sequence[Op]) -> bool:
        if any(op.key == key for op in ops) and cursor_record(scene, topic, name).mark_delete.entry_id == -1:
            scene.later(0.0, broker.crash)
        return False

    broker.store.loses_answer = dies


@step("{broker} delivers {payload} again to {subscription} of {topic}, and saves how often")
async def delivers_again(scene: Scene, broker: SimBroker, payload: bytes, name: str, topic: TopicCourse) -> None:
    """Its delivery count is saved with the position."""
    position = topic.position(payload)
    _model(topic, name).redelivered[position] = 1
    _cursor(topic, broker, name).count_redelivery(*position)
    await scene.at(broker, _cursor(topic, broker, name).saved())


@step("{broker} would deliver {payload} next to {subscription} of {topic}")
def would_deliver(scene: Scene, broker: SimBroker, payload: bytes, name: str, topic: TopicCourse) -> None:
    """It is the first entry that the subscription has not acknowledged."""
    first, wanted = _cursor(topic, broker, name).first_unacknowledged(), topic.position(payload)
    scene.require(first == wanted, f'it would deliver {first}; "{payload.decode()}" is at {wanted}')


@step("{payloads} (is|are) acknowledged by {subscription} of {topic} at {broker}")
def are_acknowledged(scene: Scene, payloads: Sequence[bytes], name: str, topic: TopicCourse, broker: SimBroker) -> None:
    """They will not be delivered again."""
    cursor = _cursor(topic, broker, name)
    for payload in payloads:
        scene.require(cursor.is_acknowledged(topic.position(payload)), f'"{payload.decode()}" would be delivered: {cursor!r}')


@step(
    "messages {number} and {number} of the batch {payload} are acknowledged by {subscription} of {topic} at {broker}, and no others"
)
def part_acknowledged(scene: Scene, one: int, other: int, payload: bytes, name: str, topic: TopicCourse, broker: SimBroker) -> None:
    """The rest of it will be delivered."""
    acked = acked_messages(_cursor(topic, broker, name), topic.position(payload))
    scene.require(acked == 1 << one | 1 << other, f"acknowledged are {acked:#010b}")


@step("{payloads} (is|are) not acknowledged by {subscription} of {topic} at {broker}")
def are_not_acknowledged(scene: Scene, payloads: Sequence[bytes], name: str, topic: TopicCourse, broker: SimBroker) -> None:
    """They will be delivered."""
    cursor = _cursor(topic, broker, name)
    for payload in payloads:
        scene.require(not cursor.is_acknowledged(topic.position(payload)), f'"{payload.decode()}" is not delivered: {cursor!r}')


@step("{new_ledger} is the ledger that has the state of {subscription} of {topic}")
def names_cursor_ledger(scene: Scene, name: str, of: str, topic: TopicCourse) -> None:
    """Its record names it: the state is too large for the record."""
    ledger_id = cursor_record(scene, topic, of).cursor_ledger_id
    scene.require(ledger_id is not None, "its state is in its record")
    scene.bind("ledger", name, OpenLedger(name, next(iter(scene.brokers.values())), SimpleNamespace(ledger_id=ledger_id)))


@step("an operator at {broker} deletes {ledger} with the state of {subscription} of {topic}")
async def deletes_state(scene: Scene, broker: SimBroker, ledger: OpenLedger, name: str, topic: TopicCourse) -> None:
    """By mistake. What it said is lost, but for the position in the subscription's record."""
    await scene.at(broker, broker.ledgers.recover(ledger.id))
    await scene.at(broker, broker.ledgers.delete(ledger.id))
    topic.workload.forget_state(name, cursor_record(scene, topic, name).mark_delete)


@step("every copy of {ledger} with the state of {subscription} of {topic} is damaged")
def damages_state(scene: Scene, ledger: OpenLedger, name: str, topic: TopicCourse) -> None:
    """A bit of each of its entries, on every disk. What it said is lost, but for the position in the subscription's record."""
    damage(scene, scene.history.sent[ledger.id])
    topic.workload.forget_state(name, cursor_record(scene, topic, name).mark_delete)


@step("every copy of what was saved last in {ledger} is damaged")
def damages_newest(scene: Scene, ledger: OpenLedger) -> None:
    """A bit of its last entry, on every disk: the newest of the states that it has is not whole any more."""
    damage(scene, scene.history.sent[ledger.id][-1:])


def damage(scene: Scene, entries: Sequence[bytes]) -> None:
    """Wherever they are: recovery may have written them once more."""
    damaged = 0
    for bookie in scene.bookies.values():
        for path, content in bookie.disk.durable_files().items():
            for entry in entries if path.startswith("entrylog") and bookie.disk.exists(path) else ():
                for found in re.finditer(re.escape(entry), content):
                    bookie.disk.flip_bit(path, found.start() + len(entry) // 2, 0)
                    damaged += 1
    scene.require(damaged > 0, "no entry log has any of it yet")


def cursor_record(scene: Scene, topic: TopicCourse, name: str) -> CursorRecord:
    return scene.history.cursor_records[keys.cursor_key(topic.workload.topic, name)]


def _cursor(topic: TopicCourse, broker: SimBroker, name: str) -> Any:
    cursor = topic.at(broker).cursors.get(name)
    if cursor is None:
        raise ScenarioError(f"{broker.name} knows no subscription {name}")
    return cursor


def _model(topic: TopicCourse, name: str) -> CursorModel:
    if name not in topic.workload.model.cursors:
        raise ScenarioError(f"nobody has made subscription {name}")
    return topic.workload.model.cursors[name]
