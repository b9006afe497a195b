"""Ledgers: opening, appending, and what their writers are told. Entries are named by their payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from cepheid_ledger import ClosedLedger, LedgerError, LedgerFencedError
from cepheid_rpc import EntryGroup, Status
from tests.simulation.scenarios.language import ScenarioError, kind, parts_of, several, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import LEDGER_SETTINGS, SimBroker

RESUMES_S = LEDGER_SETTINGS.add_timeout_s * 1.25 + 0.2
"""Until a silent bookie is given up (its clock ticks four times in a timeout), another is recorded and has the entries."""
_GROUP = 50

_PAYLOAD = '"[^"]*"'


@dataclass(slots=True)
class OpenLedger:
    name: str
    broker: SimBroker
    writer: Any

    @property
    def id(self) -> int:
        return int(self.writer.ledger_id)


@dataclass(slots=True)
class Appended:
    ledger: OpenLedger
    entry_id: int  # that it has if the ledger took it
    outcome: list[Any]  # empty until its writer is told

    @property
    def told_ok(self) -> bool:
        return bool(self.outcome) and isinstance(self.outcome[0], EntryGroup)


@dataclass(slots=True)
class LedgerCourse:
    """What has been set going on ledgers."""

    scene: Scene
    appended: dict[bytes, Appended] = field(default_factory=dict)
    recoveries: dict[tuple[str, str], asyncio.Task[ClosedLedger]] = field(default_factory=dict)
    readers: dict[tuple[str, str], Any] = field(default_factory=dict)

    def entry(self, payload: bytes) -> Appended:
        if payload not in self.appended:
            raise ScenarioError(f'nobody has appended "{payload.decode()}"')
        return self.appended[payload]


def of(scene: Scene) -> LedgerCourse:
    return scene.part(LedgerCourse)


@kind("new_ledger", "[A-Z]", "A")
def new_ledger(scene: Scene, text: str) -> str:
    return text


@kind("ledger", "[A-Z]", "A")
def ledger(scene: Scene, text: str) -> OpenLedger:
    found: OpenLedger = scene.find("ledger", text)
    return found


@kind("payload", _PAYLOAD, '"x"')
def payload(scene: Scene, text: str) -> bytes:
    return text[1:-1].encode()


@kind("payloads", rf'(?:"\d+" to "\d+"|{several(_PAYLOAD)})', '"x" and "y", or "0" to "999"')
def payloads(scene: Scene, text: str) -> list[bytes]:
    if " to " not in text:
        return [part[1:-1].encode() for part in parts_of(text)]
    first, last = (int(part[1:-1]) for part in text.split(" to "))
    return [b"%d" % n for n in range(first, last + 1)]


# -- writing ------------------------------------------------------------------------------------------------------------


@step("{broker} opens ledger {new_ledger} on {bookies}, Qw {number} Qa {number}")
async def opens(scene: Scene, broker: SimBroker, name: str, bookies: Sequence[SimBookie], qw: int, qa: int) -> None:
    """A new ledger, of which this broker is the writer. Its ensemble is as large as there are bookies named."""
    create = broker.ledgers.create(ensemble_size=len(bookies), write_quorum=qw, ack_quorum=qa, custom={})
    with mock.patch.object(broker.client._placement, "_available", return_value=[each.id for each in bookies]):
        scene.bind("ledger", name, OpenLedger(name, broker, await scene.at(broker, create)))


@step("{broker} appends {payloads} to {ledger}")
def appends(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], ledger: OpenLedger) -> None:
    """Sends entries to the ledger's bookies, and waits for nothing. Each payload occurs once in a scenario: it names the entry."""
    course, writer = of(scene), ledger.writer
    if broker is not ledger.broker:
        raise ScenarioError(f"the writer of {ledger.name} is {ledger.broker.name}")
    for start in range(0, len(payloads), _GROUP):
        group, outcome = payloads[start : start + _GROUP], list[Any]()
        for entry_id, each in enumerate(group, writer.last_add_pushed + 1):
            if each in course.appended:
                raise ScenarioError(f'"{each.decode()}" was appended before')
            course.appended[each] = Appended(ledger, entry_id, outcome)
        broker.node.context.run(writer.append, group, outcome.append)


@step("{broker} appends {number} entries of {number} bytes to {ledger}, one after the other")
async def appends_many(scene: Scene, broker: SimBroker, count: int, size: int, ledger: OpenLedger) -> None:
    """Each when the one before was told OK. They have no names."""
    for _ in range(count):
        entry = b"%0*d" % (size, len(of(scene).appended))
        appends(scene, broker, [entry], ledger)
        await told_ok(scene, broker, [entry], LEDGER_SETTINGS.refusal_retry_s + RESUMES_S)


@step("{bookies} (stores|store) {payloads}")
async def store(scene: Scene, bookies: Sequence[SimBookie], payloads: Sequence[bytes]) -> None:
    """Waits until each of these bookies has answered OK for each of these entries."""
    for bookie in bookies:
        for each in payloads:
            what = f'{bookie.id} stores "{each.decode()}"'
            await scene.wait_until(lambda bookie=bookie, each=each: has(scene, bookie.id, each), what)


@step("only {bookies} (stores|store) {payloads}")
async def only_store(scene: Scene, bookies: Sequence[SimBookie], payloads: Sequence[bytes]) -> None:
    """Waits likewise; no other bookie has answered OK for any of them by then."""
    await store(scene, bookies, payloads)
    lack(scene, [each for each in scene.bookies.values() if each not in bookies], payloads)


@step("{bookies} (lacks|lack) {payloads}")
def lack(scene: Scene, bookies: Sequence[SimBookie], payloads: Sequence[bytes]) -> None:
    """None of these bookies has answered OK for any of these entries so far."""
    for bookie in bookies:
        for each in payloads:
            scene.require(not has(scene, bookie.id, each), f'{bookie.id} has "{each.decode()}"')


@step("{bookies} (refuses|refuse) {payloads}")
async def refuse(scene: Scene, bookies: Sequence[SimBookie], payloads: Sequence[bytes]) -> None:
    """Waits until each of these bookies has got the entry, and has answered FENCED, or READ_ONLY: its fence may be lost."""
    for bookie in bookies:
        refused = scene.history.bookie(bookie.id).refused
        for each in payloads:
            entry = of(scene).entry(each)
            name, what = (entry.ledger.id, entry.entry_id), f'{bookie.id} refuses "{each.decode()}"'
            await scene.wait_until(lambda refused=refused, name=name: name in refused, what)
            scene.require(refused[name] in (Status.FENCED, Status.READ_ONLY), f"{what}: {refused[name].name}")


def has(scene: Scene, bookie_id: str, payload: bytes) -> bool:
    entry = of(scene).entry(payload)
    return entry.entry_id in scene.history.bookie(bookie_id).ok.get(entry.ledger.id, {})


@step("{broker} closes {ledger}, which ends with {payload}")
async def closes(scene: Scene, broker: SimBroker, ledger: OpenLedger, payload: bytes) -> None:
    """Its writer does, after everything that it appended was told."""
    ends_with(scene, await scene.at(broker, ledger.writer.close()), payload)


# -- what writers are told ----------------------------------------------------------------------------------------------


@step("{broker} is told OK for {payloads}")
async def told_ok(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], limit_s: float = RESUMES_S) -> None:
    """Waits for it, as long as a bookie that fails may delay it (2.7 s)."""
    for each, entry in entries(scene, broker, payloads):
        await scene.wait_until(lambda entry=entry: bool(entry.outcome), f'{broker.name} is told of "{each}"', limit_s)
        scene.require(entry.told_ok, lambda entry=entry: f"{broker.name} is told {entry.outcome}")


@step("{broker} is told FENCED for {payloads}")
async def told_fenced(scene: Scene, broker: SimBroker, payloads: Sequence[bytes]) -> None:
    """Waits for it. Somebody recovers the ledger: its writer is out."""
    await told_error(scene, broker, payloads, LedgerFencedError)


@step("{broker} is told of an error for {payloads}")
async def told_error(scene: Scene, broker: SimBroker, payloads: Sequence[bytes], wanted: type[LedgerError] = LedgerError) -> None:
    """Waits for it, whatever the error is."""
    for each, entry in entries(scene, broker, payloads):
        await scene.wait_until(lambda entry=entry: bool(entry.outcome), f'{broker.name} is told of "{each}"')
        scene.require(isinstance(entry.outcome[0], wanted), lambda entry=entry: f"{broker.name} is told {entry.outcome}")


@step("{broker} is told nothing of {payloads}")
def told_nothing(scene: Scene, broker: SimBroker, payloads: Sequence[bytes]) -> None:
    """So far: neither OK nor an error."""
    for each, entry in entries(scene, broker, payloads):
        scene.require(not entry.outcome, f'{broker.name} was told {entry.outcome} for "{each}"')


def entries(scene: Scene, broker: SimBroker, payloads: Sequence[bytes]) -> Iterator[tuple[str, Appended]]:
    for each in payloads:
        entry = of(scene).entry(each)
        if entry.ledger.broker is not broker:
            raise ScenarioError(f'"{each.decode()}" was appended by {entry.ledger.broker.name}')
        yield each.decode(), entry


def ends_with(scene: Scene, end: ClosedLedger, payload: bytes) -> None:
    entry_id = of(scene).entry(payload).entry_id
    message = f'it ends at entry {end.last_entry_id}; "{payload.decode()}" is entry {entry_id}'
    scene.require(end.last_entry_id == entry_id, message)
