"""Ledgers of topics in an object store: when they are offloaded, and who dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from cepheid_managed_ledger import ManagedLedger, OffloadConfig, Retention
from cepheid_metadata import Chain, Op, Position, Put, keys
from cepheid_tiered.object_store import StoreUnavailableError
from tests.simulation.checks.topic import check_all_entries
from tests.simulation.scenarios.language import ScenarioError, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.topics import DAY_MS, TopicCourse, opens_again, publishes_until_rolled
from tests.simulation.world.node import current_node
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_objects import STORE_URL, SimObjects

_MOST_STEPS = 60


@step("there is an object store")
def object_store(scene: Scene) -> None:
    """One for all brokers. It comes before them."""
    if scene.brokers:
        raise ScenarioError("the brokers are there already, and know of none")
    scene.objects = SimObjects(scene.plan, scene.history)


@step("{topic} is offloaded as soon as ledgers end, and bookies keep them for {number} days")
def is_offloaded(scene: Scene, topic: TopicCourse, days: int) -> None:
    """A policy, from now on: 0 days, and a ledger leaves the bookies once its object is complete."""
    _set_policy(topic, OffloadConfig(STORE_URL, after_bytes=0, keep_ms=days * DAY_MS))


@step("the object store keeps half of the next object, and tells nobody")
def cuts_next(scene: Scene) -> None:
    """It answers the upload as if all was well."""
    _objects(scene).cuts_next = True


@step("the object store refuses the next {number} requests")
def refuses(scene: Scene, count: int) -> None:
    """As one that is overloaded does."""
    left = [None] * count

    def fails(at: str) -> bool:
        if left and at.startswith("before"):
            left.pop()
            raise StoreUnavailableError(f"{at}: refused")
        return False

    _objects(scene).on_step = fails


@step("all ended ledgers of {topic} are offloaded")
async def all_offloaded(scene: Scene, topic: TopicCourse) -> None:
    """Waits until their objects are complete, and no object waits for its deletion."""
    await scene.wait_until(lambda: _is_offloaded(topic.chain), lambda: f"all is offloaded: {topic.chain}")


@step("all ended ledgers of {topic} have left the bookies")
async def all_left(scene: Scene, topic: TopicCourse) -> None:
    """Waits until only their objects are read, and their records are gone."""
    await scene.wait_until(lambda: _has_left(scene, topic.chain), lambda: f"all has left: {topic.chain}")


@step("the ledgers of {topic} stay on the bookies for {seconds}")
async def all_stay(scene: Scene, topic: TopicCourse, seconds: float) -> None:
    """So long at least; the policy says for how long in truth."""
    await asyncio.sleep(seconds)
    left = [ledger.ledger_id for ledger in topic.chain.ledgers if not topic.chain.is_on_bookies(ledger.ledger_id)]
    scene.require(not left, f"ledgers {left} have left")


@step("{broker} truncates {topic} in the middle of an upload")
async def truncates(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Whatever retention says: the upload is stopped, and its object deleted."""
    managed_ledger = topic.at(broker)
    await scene.wait_until(lambda: managed_ledger.statistics().offload.uploading_ledger_id is not None, "an upload runs")
    topic.workload.model.note_policy(broker.process, Retention())
    await scene.at(broker, managed_ledger.truncate())
    await scene.wait_until(lambda: not topic.chain.object_deletions and not topic.chain.offloaded, "its object is deleted")


@step("{broker} reads {topic} one by one while its ledgers leave the bookies")
async def reads_while_it_leaves(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """From the first entry to the last. In the middle of a ledger the bookies' copies go; no entry is missed or read twice."""

    async def on_read(count: int) -> None:
        if count == 3:
            is_offloaded(scene, topic, 0)
            await all_left(scene, topic)

    await _read_all(scene, broker, topic, on_read, at_once=1)


@step("{broker} hears no answer to its writes of the chain of {topic} until all is offloaded")
async def hears_no_answer(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """Every write is applied, and its outcome unknown: it has to be looked up."""
    key = keys.chain_key(topic.workload.topic)
    broker.store.loses_answer = lambda ops: any(isinstance(op, Put) and op.key == key for op in ops)
    try:
        await all_left(scene, topic)
    finally:
        broker.store.loses_answer = lambda ops: False


@step("{broker} and {broker} take turns in dying at each step of offloading {topic}")
async def die_in_turn(scene: Scene, one: SimBroker, other: SimBroker, topic: TopicCourse) -> None:
    """A step is a request to the object store, before it and after it had its effect, or a write of the chain that was applied.
    Each time the other one takes over, and offloads everything; nothing is missing then."""
    owner, successor = one, other
    for number in range(1, _MOST_STEPS):
        steps = 0

        def dies(at: str, owner: SimBroker = owner, number: int = number) -> bool:
            nonlocal steps
            if current_node() is not owner.node:
                return False
            steps += 1
            if steps == number:
                scene.history.note(f"{owner.process} dies {at}")
                owner.crash()
            return not owner.node.alive

        await _publish_a_ledger(scene, owner, topic)
        _objects(scene).on_step = dies
        owner.store.loses_answer = _on_chain(topic, dies)
        await scene.wait_until(lambda owner=owner: not owner.node.alive or _has_left(scene, topic.chain), "it dies or is ready")
        owner.store.loses_answer = lambda ops: False
        _objects(scene).on_step = lambda step: False
        if owner.node.alive:
            scene.require(number > 8, f"there were only {steps} steps")
            return
        owner.start()
        await opens_again(scene, successor, topic)
        await all_left(scene, topic)
        await _read_all(scene, successor, topic)
        owner, successor = successor, owner
    scene.require(False, "it never ends")


def _on_chain(topic: TopicCourse, dies: Callable[[str], bool]) -> Callable[[Sequence[Op]], bool]:
    key = keys.chain_key(topic.workload.topic)
    return lambda ops: any(isinstance(op, Put) and op.key == key for op in ops) and dies("after a write of the chain")


async def _publish_a_ledger(scene: Scene, broker: SimBroker, topic: TopicCourse) -> None:
    """One that is ended, and not offloaded yet."""
    _set_policy(topic, OffloadConfig())
    await publishes_until_rolled(scene, broker, topic, 1)
    _set_policy(topic, OffloadConfig(STORE_URL, after_bytes=0, keep_ms=0))


async def _nothing(count: int) -> None:
    pass


async def _read_all(
    scene: Scene,
    broker: SimBroker,
    topic: TopicCourse,
    on_read: Callable[[int], Awaitable[None]] = _nothing,
    *,
    at_once: int = 100,
) -> None:
    """`on_read` is called after each read, with the number of entries read so far."""
    managed_ledger: ManagedLedger = topic.at(broker)

    async def read() -> list[tuple[Position, bytes]]:
        entries: list[tuple[Position, bytes]] = []
        position = managed_ledger.first_position()
        while groups := await managed_ledger.read(position, max_entries=at_once, max_bytes=100_000):
            for group in groups:
                ids = range(group.first_entry_id, group.last_entry_id + 1)
                entries += [(Position(group.ledger_id, entry_id), bytes(group.payload(entry_id))) for entry_id in ids]
            position = Position(entries[-1][0].ledger_id, entries[-1][0].entry_id + 1)
            await on_read(len(entries))
        return entries

    check_all_entries(scene.history, topic.workload.model, await scene.at(broker, read()))


def _is_offloaded(chain: Chain) -> bool:
    ended = [ledger for ledger in chain.ledgers if ledger.entries]
    return all(chain.offload_of(ledger.ledger_id) is not None for ledger in ended) and not chain.object_deletions


def _has_left(scene: Scene, chain: Chain) -> bool:
    ended = [ledger.ledger_id for ledger in chain.ledgers if ledger.entries]
    gone = all(not chain.is_on_bookies(ledger_id) and ledger_id not in scene.history.ledgers for ledger_id in ended)
    return gone and _is_offloaded(chain)


def _set_policy(topic: TopicCourse, offload: OffloadConfig) -> None:
    topic.workload.config = replace(topic.workload.config, offload=offload)
    topic.workload.model.keeps_on_bookies_ms = offload.keep_ms if offload.url is not None else 0
    for managed_ledger in topic.openings.values():
        managed_ledger.config = topic.workload.config


def _objects(scene: Scene) -> SimObjects:
    if scene.objects is None:
        raise ScenarioError("there is no object store")
    return scene.objects
