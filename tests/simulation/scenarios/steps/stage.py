"""Machines, wires, metadata and time: what every scenario is set on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cepheid_metadata import Op
from tests.simulation.scenarios.language import ScenarioError, kind, parts_of, several, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import SimBroker

_BOOKIE, _BROKER = r"b\d+", "(?:east|west|north|south)"
_MACHINE = rf"(?:{_BOOKIE}|{_BROKER}|r\d)"

_WIRE_KINDS = {
    "everything": "",
    "adds": "add",
    "fences": "fence",
    "LAC requests": "lac",
    "reads": "read",
    "recovery reads": "recovery read",
    "answers to adds": "add answer",
    "answers to fences": "fence answer",
    "answers to recovery reads": "recovery read answer",
}


@kind("number", r"\d+", "3")
def number(scene: Scene, text: str) -> int:
    return int(text)


@kind("seconds", r"\d+(?:\.\d+)? s", "0.5 s")
def seconds(scene: Scene, text: str) -> float:
    return float(text.removesuffix(" s"))


@kind("bookie", _BOOKIE, "b1")
def bookie(scene: Scene, text: str) -> SimBookie:
    if text not in scene.bookies:
        raise ScenarioError(f"there is no bookie {text}, but {', '.join(scene.bookies) or 'none'}")
    return scene.bookies[text]


@kind("bookies", several(_BOOKIE), "b1, b2 and b3")
def bookies(scene: Scene, text: str) -> list[SimBookie]:
    return [bookie(scene, name) for name in parts_of(text)]


@kind("broker", _BROKER, "east (or west, north, south)")
def broker(scene: Scene, text: str) -> SimBroker:
    if text not in scene.brokers:
        raise ScenarioError(f"there is no broker {text}, but {', '.join(scene.brokers) or 'none'}")
    return scene.brokers[text]


@kind("names", several(_BROKER), "east, west and north")
def names(scene: Scene, text: str) -> list[str]:
    return parts_of(text)


@kind("machines", several(_MACHINE), "b1 and b2")
def machines(scene: Scene, text: str) -> list[str]:
    return [_machine(scene, name) for name in parts_of(text)]


def _machine(scene: Scene, name: str) -> str:
    if name.startswith("r"):
        return str(scene.find("repairer", name).name)
    return bookie(scene, name).id if name in scene.bookies else broker(scene, name).name


@kind("messages", "(?:" + "|".join(sorted(_WIRE_KINDS, key=len, reverse=True)) + ")", "adds, or " + ", ".join(_WIRE_KINDS))
def messages(scene: Scene, text: str) -> str:
    return _WIRE_KINDS[text]


# -- machines -----------------------------------------------------------------------------------------------------------


@step("{number} (bookie|bookies), (broker|brokers) {names}")
async def curtain(scene: Scene, count: int, brokers: Sequence[str]) -> None:
    """The cluster: bookies b1, b2, …, all up, and these brokers. The first line of every scenario of ledgers."""
    await scene.raise_curtain(count, brokers)


@step("{broker} crashes")
def broker_crashes(scene: Scene, broker: SimBroker) -> None:
    """Its process ends, and metadata knows at once."""
    broker.crash()


@step("{broker} starts again")
def broker_starts(scene: Scene, broker: SimBroker) -> None:
    """A new process, which knows nothing of the one before."""
    broker.start()


@step("{broker} falls asleep")
def broker_sleeps(scene: Scene, broker: SimBroker) -> None:
    """Its process takes no step (a long pause of a virtual machine), and does not notice that time goes by."""
    broker.node.pause()


@step("{broker} wakes up")
def broker_wakes(scene: Scene, broker: SimBroker) -> None:
    """It goes on where it was."""
    broker.node.resume()


@step("{bookies} (crashes|crash)")
def bookies_crash(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Processes end; what they had written to files is still there."""
    for each in bookies:
        each.crash(power=False)


@step("{bookies} (loses|lose) power")
def bookies_lose_power(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Machines end; of what was not synced any part may be gone."""
    for each in bookies:
        each.crash(power=True)


@step("{bookies} (starts|start) again")
async def bookies_start(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """On the disks as they are. Before they serve they are asked for everything that they ever promised (S2, S3, S8)."""
    for each in bookies:
        await each.start()


@step("{bookies} (is|are) read-only")
def read_only(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Registered as such: no ledger gets it."""
    assert scene.directory is not None
    scene.directory.readonly.update((each.id, None) for each in bookies)


@step("{bookies} (is|are) writable")
def writable(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Again."""
    assert scene.directory is not None
    for each in bookies:
        scene.directory.readonly.pop(each.id, None)


# -- wires --------------------------------------------------------------------------------------------------------------


@step("{messages} from {machines} to {machines} (is|are) held up")
def hold_up(scene: Scene, message: str, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """From now on they wait on their way, and nobody is told."""
    for sender in senders:
        for receiver in receivers:
            scene.network.block(sender, receiver, message)


@step("{messages} from {machines} to {machines} (arrives|arrive)")
def let_through(scene: Scene, message: str, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """Those that were held up, late, and all later ones."""
    for sender in senders:
        for receiver in receivers:
            scene.network.unblock(sender, receiver, message)


@step("messages to {bookies} take {number} times as long")
def slow(scene: Scene, bookies: Sequence[SimBookie], times: int) -> None:
    """And so do the answers."""
    for each in bookies:
        scene.network.slow[each.id] = float(times)


@step("every message to a bookie arrives twice, the second time late")
def twice(scene: Scene) -> None:
    """From now on: adds, fences and reads. Nobody hears what the second one is answered."""
    scene.plan.faults = replace(scene.plan.faults, duplicate=1.0)


# -- metadata -----------------------------------------------------------------------------------------------------------


@step("metadata is out")
def metadata_out(scene: Scene) -> None:
    """Nobody reaches the store; sessions live on."""
    scene.tree.begin_outage()


@step("metadata is back")
def metadata_back(scene: Scene) -> None:
    """Everybody reaches the store again."""
    scene.tree.end_outage()


@step("writes from {broker} to metadata are held up")
def hold_writes(scene: Scene, broker: SimBroker) -> None:
    """From now on they wait on their way; reads go on."""
    broker.store.held_writes = asyncio.Event()


@step("writes from {broker} to metadata arrive")
def let_writes(scene: Scene, broker: SimBroker) -> None:
    """Those that were held up, late, and all later ones."""
    if broker.store.held_writes is None:
        raise ScenarioError(f"writes from {broker.name} are not held up")
    broker.store.held_writes.set()


@step("the answers to {broker}'s next {number} writes to metadata are lost")
def lose_answers(scene: Scene, broker: SimBroker, count: int) -> None:
    """They are applied, and reported as unknown."""
    lost: list[Sequence[Op]] = []

    def loses(ops: Sequence[Op]) -> bool:
        lost.append(ops)
        return len(lost) <= count

    broker.store.loses_answer = loses


@step("whoever reads metadata reads what it was {seconds} ago")
def lag(scene: Scene, lag_s: float) -> None:
    """A follower answers; never with less than the reader has seen itself."""
    scene.plan.faults = replace(scene.plan.faults, stale_read=1.0, stale_read_s=(lag_s, lag_s))


# -- time ---------------------------------------------------------------------------------------------------------------


@step("{seconds} (pass|passes)")
async def time_goes_by(scene: Scene, duration_s: float) -> None:
    """Simulated time. A bookie that answers nothing is given up by a writer after 2.0 to 2.5 s."""
    await asyncio.sleep(duration_s)
