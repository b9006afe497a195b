"""Repair in a world: its processes, the bookies that are gone for good, and how many more may be lost at the moment.

Rule: bookies are lost one after another, as fast as repair allows. So many at once that a copy of every entry is left (fewer than
Qa of any ensemble), and the next one when what the last one had is somewhere else.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cepheid_ledger import is_finished
from cepheid_metadata import LedgerMetadata, MemoryStore, RepairSwitch, draining_bookies, keys, repair_switch
from cepheid_metadata.errors import MetadataError
from tests.simulation.checks.repair import lacking, needed, not_whole
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_repairer import RECOVERY_SETTINGS, SimRepairer

if TYPE_CHECKING:
    from tests.simulation.world.world import World

SHARE = 0.1
"""Of worlds have repair."""
SPARES = 3
_SETTLED_S = 3.0
"""After a loss, until the session of the bookie has ended and writers have heard of it."""
_IDS_TAKEN = 100
"""Ledger ids that may have been taken, in blocks, and not been used, when a disk was lost: it takes no adds of these either."""
_LONGEST_S = 35.0
"""After which a world does not wait for more losses."""


class Repairs:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng
        self.store = MemoryStore(world.tree)  # of operators
        self.gone: dict[str, SimBookie] = {}
        self.reserved = 0  # disks that other faults may lose
        self.losses = 0
        self.last_loss_s = -_SETTLED_S
        self._wanted = rng.choice((1, 2, 3))
        settings = RECOVERY_SETTINGS.model_copy(
            update={"grace_s": rng.choice((3.0, 5.0)), "open_ledger_grace_s": rng.choice((1.0, 3.0))}
        )
        self.repairers = {
            name: SimRepairer(name, world.tree, world.network, world.plan, world.history, settings)
            for name in ("r1", "r2")[: rng.choice((1, 2, 2))]
        }

    def __repr__(self) -> str:
        return f"<Repairs by {list(self.repairers)}, gone: {list(self.gone)}>"

    def start(self) -> None:
        self._world.history.on_forgotten = lambda name: self._world.later(0.0, lambda: self._on_forgotten(name))
        for repairer in self.repairers.values():
            repairer.start()

    @property
    def waits_for_more(self) -> bool:
        """Losses are still wanted, and possible."""
        world = self._world
        enough = self.losses >= self._wanted or len(world.bookies) <= self._largest_ensemble()
        return not enough and world.history.now_s < _LONGEST_S

    def come_back(self, repairer: SimRepairer) -> None:
        if not (repairer.node.alive or self._world.healed):
            repairer.start()

    def may_lose(self, victim: SimBookie) -> bool:
        """Whether every entry keeps a copy, and every open ledger enough bookies to be recovered."""
        history = self._world.history
        if history.now_s - self.last_loss_s < _SETTLED_S:
            return False
        if len(self._world.bookies) <= self._largest_ensemble() or any(mark.lost for mark in history.marks.values()):
            return False
        records = [*history.ledgers.values(), *(history.deleted[each] for each in history.restorable if each in history.deleted)]
        return all(self._survives(record, victim.id) for record in records)

    def _survives(self, record: LedgerMetadata, victim: str) -> bool:
        """A writer may choose any bookie for an open fragment, also one that takes none of its adds since it lost its disk."""
        for fragment in needed(record):
            finished = is_finished(record, fragment)
            if victim in fragment.ensemble or not finished:
                others = fragment.ensemble if finished else [*self._world.bookies, *fragment.ensemble]
                bad = [each for each in dict.fromkeys(others) if each != victim and self._is_bad(record, each, finished=finished)]
                if len(bad) + 1 + self.reserved >= record.ack_quorum:
                    return False
        return True

    def _is_bad(self, record: LedgerMetadata, bookie: str, *, finished: bool) -> bool:
        if bookie in self.gone:
            return True
        facts = self._world.history.bookie(bookie)
        if not finished:
            return facts.losses > 0 and record.ledger_id <= facts.forgotten_through + _IDS_TAKEN
        return record.ledger_id <= facts.forgotten_through and bool(lacking(self._world.history, record, bookie))

    def _largest_ensemble(self) -> int:
        return max([self._world.quorums.ensemble_size, *(each.ensemble_size for each in self._world.history.ledgers.values())])

    def lose_for_good(self, bookie: SimBookie) -> None:
        """Its machine burns down, and nobody builds another one."""
        world = self._world
        self.gone[bookie.id] = world.bookies.pop(bookie.id)
        world.history.note(f"{bookie.id} is gone for good")
        bookie.gone = True
        if bookie.node.alive:
            bookie.crash(power=True)
        world.history.bookie(bookie.id).lose_disks(max(world.history.creators, default=-1), world.history.now_s)
        self.count_loss()

    def count_loss(self) -> None:
        self.losses += 1
        self.last_loss_s = self._world.history.now_s

    def _on_forgotten(self, name: str) -> None:
        """A bookie was drained and away for long: it may be thrown away, unless it got new ledgers meanwhile."""
        world, bookie = self._world, self._world.bookies.get(name)
        if bookie is None:
            return
        if self.may_lose(bookie):
            self.lose_for_good(bookie)
        else:
            world.history.note(f"{name} gets its cookie back")
            world.start_outside(self.store.create(keys.bookie_cookie_key(name), world.history.cookies[name]), "restore a cookie")

    def left(self) -> list[str]:
        """Ledgers that are not whole (V5)."""
        history = self._world.history
        return [
            f"{history.story(record.ledger_id)} names {bad}, its mark is {history.marks.get(record.ledger_id)}"
            for record in history.ledgers.values()
            if (bad := not_whole(history, record, list(self.gone)))
        ]

    async def end_orders(self) -> None:
        """What operators had ordered is called off, as at the end of maintenance."""
        await self.switch(off=False)
        for name in list(self._world.tree.nodes):
            if name.startswith(f"{keys.DRAINING_BOOKIES_KEY}/"):
                await self.cancel(name.rpartition("/")[2])

    async def switch(self, *, off: bool) -> None:
        try:
            if off:
                await repair_switch(self.store).create(None, RepairSwitch(off_since_ms=0, reason="maintenance"))
            else:
                await repair_switch(self.store).delete(None, None)
        except MetadataError:
            pass  # it is so already

    async def cancel(self, bookie_id: str) -> None:
        try:
            await draining_bookies(self.store).delete(bookie_id, None)
        except MetadataError:
            pass  # the auditor was quicker

    def end_lasting_faults(self) -> None:
        world = self._world
        for repairer in self.repairers.values():
            world.plan.clocks.of(repairer.name).correct()
            if repairer.node.paused:
                repairer.node.resume()
            if repairer.node.alive:
                repairer.store.catch_up()
                repairer.store.renew()
            else:
                repairer.start()

    def stop(self) -> None:
        for repairer in self.repairers.values():
            if repairer.node.alive:
                repairer.crash()
