"""What a topic still has, and what it says of the rest, when more was lost than its quorums allow."""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_ledger import EntryUnavailableError
from tests.simulation.scenarios.language import step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.topics import TopicCourse, damage
from tests.simulation.world.sim_broker import SimBroker


@step("{broker} reads {payloads} of {topic} from bookies")
async def reads_from_bookies(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], topic: TopicCourse) -> None:
    """Each entry by itself, past all caches, with the bytes that were published."""
    for payload in payloads:
        read = await scene.at(broker, _read(topic, broker, payload))
        scene.require(read == [payload], lambda payload=payload, read=read: f'for "{payload.decode()}" it reads {read}')


@step("{broker} cannot read {payloads} of {topic}, and is told that nobody gives it")
async def cannot_read(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], topic: TopicCourse) -> None:
    """An error, each time: nothing is left out or made up, and no bookie's answer is taken for a certain no."""
    for payload in payloads:
        try:
            read = await scene.at(broker, _read(topic, broker, payload))
        except EntryUnavailableError as error:
            scene.history.note(f"{broker.process} is told: {error}")
        else:
            scene.require(False, f'for "{payload.decode()}" it reads {read}')


async def _read(topic: TopicCourse, broker: SimBroker, payload: bytes) -> list[bytes]:
    groups = await topic.at(broker).read(topic.position(payload), max_entries=1, max_bytes=1)
    return [bytes(each) for group in groups for each in group.payloads()]


@step("every copy of {payloads} is damaged")
def damages(scene: Scene, payloads: Sequence[bytes]) -> None:
    """A bit of it, on every disk, in the entry logs: where it is in the journal alone it cannot be found yet."""
    damage(scene, payloads)
