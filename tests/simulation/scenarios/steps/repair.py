"""Repair: processes that find and copy what ledgers lack, bookies that are gone for good, and ledgers that are whole again."""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_metadata import (
    DecommissionedBookie,
    DrainingBookie,
    MemoryStore,
    bookie_cookies,
    bookie_lives,
    decommissioned_bookies,
    draining_bookies,
)
from tests.simulation.checks.repair import lacking, needed
from tests.simulation.scenarios.language import kind, parts_of, several, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.ledgers import OpenLedger
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_repairer import SimRepairer


@kind("repairers", several(r"r\d"), "r1 and r2")
def repairers(scene: Scene, text: str) -> list[str]:
    return parts_of(text)


@step("{number} bookies that register, (broker|brokers) {names}")
async def curtain_with_registrations(scene: Scene, count: int, brokers: Sequence[str]) -> None:
    """The cluster, as above; everybody learns of bookies from metadata, as repair does."""
    await scene.raise_curtain(count, brokers, registers=True)
    await scene.wait_until(
        lambda: all(scene.history.is_registered(bookie) for bookie in scene.bookies), "all bookies are registered"
    )


@step("{repairers} (repairs|repair)")
def repairs(scene: Scene, names: Sequence[str]) -> None:
    """Processes with an auditor and a worker each. Lost is a bookie after 5 s; an open ledger is recovered 3 s later."""
    for name in names:
        repairer = SimRepairer(name, scene.tree, scene.network, scene.plan, scene.history)
        scene.bind("repairer", name, repairer)
        repairer.start()


@step("{bookies} (is|are) gone for good")
def gone(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Their machines burn down, and nobody builds others."""
    for each in bookies:
        each.crash(power=False)
        scene.history.bookie(each.id).lose_disks(max(scene.history.creators, default=-1), scene.history.now_s)


@step("{bookie} is decommissioned")
async def decommissioned(scene: Scene, bookie: SimBookie) -> None:
    """An operator wants it empty. It goes on serving what it has."""
    await draining_bookies(MemoryStore(scene.tree)).create(bookie.id, DrainingBookie(bookie_id=bookie.id, since_ms=0))


@step("metadata forgets {bookie} within {seconds}")
async def forgotten(scene: Scene, bookie: SimBookie, limit_s: float) -> None:
    """It was drained and has ended, so repair removes its records."""
    records = bookie_cookies(MemoryStore(scene.tree))
    known: list[bool] = []

    async def ask() -> None:
        known.append(await records.exists(bookie.id))

    def is_forgotten() -> bool:
        scene.start_outside(ask(), "ask whether it is known")
        return bool(known) and not known[-1]

    await scene.wait_until(is_forgotten, f"{bookie.id} is forgotten", limit_s)


@step("metadata forgets {bookie} as if it were drained")
async def forgotten_too_soon(scene: Scene, bookie: SimBookie) -> None:
    """A walk found it empty, and it only lost its session: ledgers name it by now."""
    store = MemoryStore(scene.tree)
    cookie = await bookie_cookies(store).get(bookie.id)
    assert cookie is not None
    record = DecommissionedBookie(bookie_id=bookie.id, incarnation=cookie.record.incarnation, at_ms=0)
    await decommissioned_bookies(store).create(bookie.id, record)
    await bookie_cookies(store).delete(bookie.id, cookie.version)
    await bookie_lives(store).delete(bookie.id, None)


@step("{bookie} is drained within {seconds}")
async def drained(scene: Scene, bookie: SimBookie, limit_s: float) -> None:
    """Repair says that nothing names it any more, and that is so."""
    records = draining_bookies(MemoryStore(scene.tree))
    told: list[bool] = []

    async def ask() -> None:
        found = await records.get(bookie.id)
        told.append(found is not None and found.record.drained_at_ms is not None)

    def is_told() -> bool:
        scene.start_outside(ask(), "ask whether it is drained")
        return bool(told) and told[-1]

    await scene.wait_until(is_told, f"{bookie.id} is drained", limit_s)
    naming = [each for each, record in scene.history.ledgers.items() if bookie.id in _named(scene, each)]
    scene.require(not naming, lambda: f"ledgers {naming} name it")


@step("{ledger} is marked for {bookies} within {seconds}")
async def marked(scene: Scene, ledger: OpenLedger, bookies: Sequence[SimBookie], limit_s: float) -> None:
    """The auditor found out that they lack copies."""

    def is_marked() -> bool:
        mark = scene.history.marks.get(ledger.id)
        return mark is not None and all(each.id in mark.bookies for each in bookies)

    await scene.wait_until(is_marked, lambda: f"its mark is {scene.history.marks.get(ledger.id)}", limit_s)


@step("{ledger} is whole without {bookies} within {seconds}")
async def whole_without(scene: Scene, ledger: OpenLedger, bookies: Sequence[SimBookie], limit_s: float) -> None:
    """Other bookies have what these had, metadata names them, and no mark is left."""

    def is_whole() -> bool:
        names = _named(scene, ledger.id)
        return not any(each.id in names for each in bookies) and not _short(scene, ledger.id)

    await scene.wait_until(is_whole, lambda: f"it is not whole: {_why(scene, ledger.id)}", limit_s)


@step("{ledger} is whole within {seconds}")
async def whole(scene: Scene, ledger: OpenLedger, limit_s: float) -> None:
    """Every bookie that metadata names has what it has to hold, and no mark is left."""
    await scene.wait_until(lambda: not _short(scene, ledger.id), lambda: f"it is not whole: {_why(scene, ledger.id)}", limit_s)


def _named(scene: Scene, ledger_id: int) -> list[str]:
    """By finished fragments with entries, and by the open one."""
    return [bookie for fragment in needed(scene.history.ledgers[ledger_id]) for bookie in fragment.ensemble]


def _short(scene: Scene, ledger_id: int) -> bool:
    history = scene.history
    names = dict.fromkeys(_named(scene, ledger_id))
    return ledger_id in history.marks or any(lacking(history, history.ledgers[ledger_id], bookie) for bookie in names)


def _why(scene: Scene, ledger_id: int) -> str:
    return f"{scene.history.story(ledger_id)}, its mark is {scene.history.marks.get(ledger_id)}"
