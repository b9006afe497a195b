"""Recovering and reading ledgers, and what metadata says of them in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cepheid_ledger import ClosedLedger
from cepheid_metadata import LedgerMetadata, LedgerState
from tests.simulation.scenarios.language import ScenarioError, kind, step
from tests.simulation.scenarios.scene import REFUSALS, Scene
from tests.simulation.scenarios.steps.ledgers import OpenLedger, ends_with, of
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import SimBroker


@kind("state", "(?:OPEN|IN_RECOVERY|CLOSED)", "OPEN, or IN_RECOVERY, CLOSED")
def state(scene: Scene, text: str) -> LedgerState:
    return LedgerState(text)


# -- recovering ---------------------------------------------------------------------------------------------------------


@step("{broker} recovers {ledger}, which ends with {payload}")
async def recovers(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes) -> None:
    """Fences it, finds its end, copies what needs it, and closes it; waits until that is done."""
    ends_with(scene, await scene.at(broker, broker.ledgers.recover(ledger.id)), payload)


@step("{broker} recovers {ledger}, which ends empty")
async def recovers_empty(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """Likewise: no entry is in it."""
    end = await scene.at(broker, broker.ledgers.recover(ledger.id))
    scene.require(end.last_entry_id == -1, f"it ends at entry {end.last_entry_id}")


@step("{broker} begins to recover {ledger}")
def begins_to_recover(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """And the course goes on meanwhile."""
    recovery = broker.node.start(broker.ledgers.recover(ledger.id), name="recover")
    of(scene).recoveries[broker.name, ledger.name] = recovery


@step("{broker}'s recovery of {ledger} ends it with {payload}")
async def recovery_ends(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes) -> None:
    """Waits for what was begun."""
    ends_with(scene, await _recovery(scene, broker, ledger), payload)


@step("{broker}'s recovery of {ledger} fails")
async def recovery_fails(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """Waits for what was begun: too few bookies know, and nobody may guess."""
    recovery = _recovery(scene, broker, ledger)
    await scene.wait_until(recovery.done, "the recovery is over")
    error = recovery.exception()
    scene.require(isinstance(error, REFUSALS), lambda: f"it ended: {recovery!r}")


@step("{broker}'s recovery of {ledger} ends it with {payload} within {seconds}")
async def recovery_ends_within(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes, limit_s: float) -> None:
    """Waits no longer for what was begun."""
    recovery = _recovery(scene, broker, ledger)
    await scene.wait_until(recovery.done, "the recovery is over", limit_s)
    ends_with(scene, recovery.result(), payload)


@step("{broker}'s recovery of {ledger} fails within {seconds}")
async def recovery_fails_within(scene: Scene, broker: SimBroker, ledger: OpenLedger, limit_s: float) -> None:
    """Waits no longer for what was begun: who has to be heard is silent."""
    await scene.wait_until(_recovery(scene, broker, ledger).done, "the recovery is over", limit_s)
    await recovery_fails(scene, broker, ledger)


def _recovery(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> asyncio.Task[ClosedLedger]:
    found = of(scene).recoveries.get((broker.name, ledger.name))
    if found is None:
        raise ScenarioError(f"{broker.name} has not begun to recover {ledger.name}")
    return found


@step("{broker} has heard from {number} bookies that {payload} is absent")
async def has_heard(scene: Scene, broker: SimBroker, count: int, payload: bytes) -> None:
    """Waits until so many answered its recovery reads with a certain no."""
    entry = of(scene).entry(payload)
    negatives = scene.history.recoverer(broker.process, entry.ledger.id).negatives

    def denying() -> int:
        return sum(any(first <= entry.entry_id <= last for first, last in ranges) for ranges in negatives.values())

    await scene.wait_until(lambda: denying() >= count, lambda: f"{count} deny it, and not {denying()}")


# -- reading ------------------------------------------------------------------------------------------------------------


@step("{broker} opens {ledger} for reading")
async def opens_reader(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """Without recovering it: a reader that follows a living ledger."""
    of(scene).readers[broker.name, ledger.name] = await scene.at(broker, broker.ledgers.open_reader(ledger.id))


@step("{broker} reads that {ledger} is confirmed up to {payload} at most")
async def reads_at_most(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes) -> None:
    """What bookies tell a reader about the last entry confirmed (LAC)."""
    lac = await scene.at(broker, of(scene).readers[broker.name, ledger.name].read_lac())
    scene.require(lac <= of(scene).entry(payload).entry_id, f"it reads LAC {lac}")


@step("{broker} reads that {ledger} is confirmed up to {payload}")
async def reads_lac(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes) -> None:
    """And reads every entry up to it (its bytes are compared: L7)."""
    reader = of(scene).readers[broker.name, ledger.name]
    lac = await scene.at(broker, reader.read_lac())
    scene.require(lac == of(scene).entry(payload).entry_id, f"it reads LAC {lac}")
    read = 0
    while read <= lac:
        groups = await scene.at(broker, reader.read(read, lac, max_bytes=1 << 20))
        read = groups[-1].last_entry_id + 1


@step("{broker} reads all of {ledger} within {seconds}")
async def reads_all_within(scene: Scene, broker: SimBroker, ledger: OpenLedger, limit_s: float) -> None:
    """A closed ledger, with the reader that was opened (its bytes are compared: L7)."""
    reader = of(scene).readers[broker.name, ledger.name]

    async def read_all() -> None:
        read = 0
        while read <= reader.known_end:
            groups = await reader.read(read, reader.known_end, max_bytes=1 << 20)
            read = groups[-1].last_entry_id + 1

    reading = broker.node.start(read_all(), name="read")
    await scene.wait_until(reading.done, "all of it is read", limit_s)
    reading.result()


# -- deleting -----------------------------------------------------------------------------------------------------------


@step("{broker} deletes {ledger}")
async def deletes(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """Its record; bookies drop it when it can be brought back no more."""
    await scene.at(broker, broker.ledgers.delete(ledger.id))


@step("{broker} brings {ledger} back")
async def brings_back(scene: Scene, broker: SimBroker, ledger: OpenLedger) -> None:
    """As an operator does who deleted it by mistake."""
    await scene.at(broker, broker.ledgers.undelete(ledger.id))


# -- metadata -----------------------------------------------------------------------------------------------------------


@step("{ledger} is {state}")
async def is_in_state(scene: Scene, ledger: OpenLedger, state: LedgerState) -> None:
    """Waits until metadata says so."""
    await scene.wait_until(lambda: record(scene, ledger).state is state, lambda: f"it is {record(scene, ledger).state}")


@step("metadata names {bookies} for {ledger}")
async def named(scene: Scene, bookies: Sequence[SimBookie], ledger: OpenLedger) -> None:
    """Waits until these are the ensemble of its last fragment, in whatever order."""
    wanted = sorted(each.id for each in bookies)
    await scene.wait_until(lambda: sorted(ensemble(scene, ledger)) == wanted, lambda: f"it names {ensemble(scene, ledger)}")


@step("metadata does not name {bookies} for {ledger}")
def not_named(scene: Scene, bookies: Sequence[SimBookie], ledger: OpenLedger) -> None:
    """At present, in its last fragment."""
    found = [each.id for each in bookies if each.id in ensemble(scene, ledger)]
    scene.require(not found, f"it names {found}")


@step("metadata names {bookies} for {ledger} from {payload} on")
async def named_from(scene: Scene, bookies: Sequence[SimBookie], ledger: OpenLedger, payload: bytes) -> None:
    """Likewise: a fragment begins with that entry."""
    await named(scene, bookies, ledger)
    first = record(scene, ledger).last_fragment.first_entry_id
    scene.require(first == of(scene).entry(payload).entry_id, f"that fragment begins with entry {first}")


@step("metadata names {bookies} for {ledger} behind {payload}")
async def named_behind(scene: Scene, bookies: Sequence[SimBookie], ledger: OpenLedger, payload: bytes) -> None:
    """Likewise: a fragment begins with the entry after that one."""
    await named(scene, bookies, ledger)
    first = record(scene, ledger).last_fragment.first_entry_id
    scene.require(first == of(scene).entry(payload).entry_id + 1, f"that fragment begins with entry {first}")


@step("{broker} knows that {bookies} (lacks|lack) copies of {ledger}")
def lacks_copies(scene: Scene, broker: SimBroker, bookies: Sequence[SimBookie], ledger: OpenLedger) -> None:
    """Its writer does: they failed, nobody could take their place, and they get no more adds of it."""
    found = list(ledger.writer.under_replicated)
    scene.require(sorted(found) == sorted(each.id for each in bookies), f"it knows of {found}")


@step("{ledger} has {number} fragments")
def fragments(scene: Scene, ledger: OpenLedger, count: int) -> None:
    """Runs of entries under one ensemble, in its record."""
    found = [fragment.first_entry_id for fragment in record(scene, ledger).fragments]
    scene.require(len(found) == count, f"they begin at {found}")


@step("{payloads} (is|are) on {number} bookies that metadata names")
def on_named(scene: Scene, payloads: Sequence[bytes], count: int) -> None:
    """At least so many of each entry's write set have answered OK for it, and have not lost their disks since."""
    for each in payloads:
        entry = of(scene).entry(each)
        holders = scene.history.holders(record(scene, entry.ledger), entry.entry_id)
        scene.require(len(holders) >= count, f'"{each.decode()}" is on {holders}')


def record(scene: Scene, ledger: OpenLedger) -> LedgerMetadata:
    return scene.history.ledgers[ledger.id]


def ensemble(scene: Scene, ledger: OpenLedger) -> tuple[str, ...]:
    """Of its last fragment."""
    return tuple(record(scene, ledger).last_fragment.ensemble)
