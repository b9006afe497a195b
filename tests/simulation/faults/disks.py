"""Disks of bookies: full, slow, lost in whole or in part, exchanged for old copies or blank ones, decaying.

What is lost for good is lost on fewer than Qa bookies in a run (`World.disks_to_lose`): every entry keeps a copy, so nothing
acknowledged may be missing in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.checks.disk import proven_batches
from tests.simulation.faults.machines import some_bookie
from tests.simulation.world.cluster import SimBookie

if TYPE_CHECKING:
    from tests.simulation.world.world import World

_FILLS_MOST = 0.3
"""Of worlds: disks fill up on so many bookies at once that too few are writable for a ledger."""

_SEEN = 0.5
"""Of lost disks were taken from a bookie whose process ended before: its writers know, and make connections to the next one."""


class DiskFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng
        self._decaying: SimBookie | None = None
        self._fills_most = random.Random(f"{world.seed}/fills most").random() < _FILLS_MOST
        self._losses: tuple[tuple[str, Callable[[SimBookie], object]], ...] = (
            ("disks lost", SimBookie.lose_disk),
            ("blank bookie under an old id", SimBookie.blank),
            ("disks lost, cookies kept", SimBookie.blank_but_for_cookie),
            ("index lost", lambda bookie: bookie.lose_one("index")),
            ("one of two disks lost", self._lose_one_of_two),
            ("one of two disks lost", self._lose_one_of_two),
        )

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._fill: 1.5,
            self._slow_down: 1.0,
            self._lose: 5.0,  # a run has few of them
            self._restore_old_copy: 4.0,
            self._lose_cookie: 0.6,
            self._decay_entry_log: 0.8,
            self._decay_journal: 1.8,
            self._lose_end_of_journal: 6.0,
        }

    def _fill(self) -> None:
        """No space: on all of it, or on one disk, or for the index alone."""
        if (bookie := some_bookie(self._world, self._random)) is None:
            return
        places = {"disk full": bookie.disks, "index full": (bookie.index,)}
        if bookie.has_two_disks:
            places |= {"journal disk full": (bookie.journal_disk,), "data disk full": (bookie.disk,)}
        kind, full_s = self._random.choice(list(places)), self._random.choice((0.3, 1.5, 6.0))
        if self._fills_most:
            self._fill_most(bookie, full_s)
        elif self._world.plan.deals(kind):
            for place in places[kind]:
                place.full = True
            self._world.later(full_s, bookie.free_space)

    def _fill_most(self, bookie: SimBookie, full_s: float) -> None:
        """So many that no ledger can be created: topics are opened without one."""
        others = [other for other in self._world.bookies.values() if other is not bookie]
        filled = [bookie, *others][: len(others) + 2 - self._world.quorums.ensemble_size]
        if self._world.plan.deals("disks of most bookies full"):
            for each in filled:
                for disk in each.disks:
                    disk.full = True
                self._world.later(full_s, each.free_space)

    def _slow_down(self) -> None:
        """The disk of one thread takes very long, the others go on."""
        bookie, thread, slow_s = some_bookie(self._world, self._random), self._random.choice(("journal", "flush")), (0.2, 2.0)
        if self._random.random() < 0.3:
            slow_s = (10.0, 30.0)
        if bookie is None or not self._world.plan.deals("slow journal disk" if thread == "journal" else "slow data disk"):
            return
        bookie.slow_thread, bookie.slow_thread_s = thread, slow_s

        def recover() -> None:
            bookie.slow_thread = ""

        self._world.later(self._random.choice((0.5, 3.0)), recover)

    def _lose(self) -> None:
        """For good; at most so often in a run that every entry keeps a copy."""
        world = self._world
        if world.disks_to_lose == 0 or (bookie := some_bookie(world, self._random)) is None:
            return
        kind, lose = self._random.choice(self._losses)
        if "two" in kind and not bookie.has_two_disks:
            kind, lose = self._losses[0]
        if world.plan.deals(kind):
            world.disks_to_lose -= 1
            world.history.note(f"{bookie.id}: {kind}")
            if self._random.random() < _SEEN:
                bookie.crash(power=False)
            lose(bookie)

    def _lose_one_of_two(self, bookie: SimBookie) -> None:
        bookie.lose_one(self._random.choice(("data", "journal")))

    def _restore_old_copy(self) -> None:
        """A copy of some bookie's disks is made, and put back when the bookie has begun another life."""
        world, bookie = self._world, some_bookie(self._world, self._random)
        if world.disks_to_lose == 0 or bookie is None or bookie.has_old_copy:
            return
        bookie.keep_copy()

        def restart() -> None:
            if bookie.serving and world.plan.active and world.plan.deals("bookie crash"):
                bookie.crash(power=False)

        def restore() -> None:
            if not world.plan.active or world.disks_to_lose == 0:
                return
            if not bookie.has_old_copy:
                world.later(0.5, restore)  # it is not up again
            elif world.plan.deals("old disks restored"):
                world.disks_to_lose -= 1
                bookie.restore_copy()
                bookie.accepts_empty_disk = True

        restart_s = self._random.choice((0.3, 1.0))
        world.later(restart_s, restart)
        world.later(restart_s + self._random.choice((0.3, 1.0, 3.0)), restore)

    def _lose_cookie(self) -> None:
        bookie = some_bookie(self._world, self._random)
        if bookie is not None and self._world.plan.deals("cookie lost"):  # who serves has one in each directory
            bookie.lose_cookie()

    def _decay_entry_log(self) -> None:
        """The medium of one bookie's entry logs, here and there. What is on it counts as lost (see `_lose`)."""
        world, rng = self._world, self._random
        if self._decaying is None:
            if world.disks_to_lose == 0 or (bookie := some_bookie(world, rng)) is None or not bookie.disk.durable_paths("entrylog"):
                return
            world.disks_to_lose -= 1
            self._decaying = bookie
        for _ in range(rng.choice((1, 10))):
            if self._decaying.disk.durable_paths("entrylog") and world.plan.deals("bit of an entry log decayed"):
                self._decaying.disk.decay(rng, "entrylog")

    def _decay_journal(self) -> None:
        """In what was synced and is not checkpointed yet: whoever starts on it must refuse."""
        world, rng = self._world, self._random
        bookies = [bookie for bookie in world.bookies.values() if bookie.serving and proven_batches(bookie.disks)]
        if bookies and world.plan.begins() and rng.choice(bookies).decay_journal(rng):
            world.plan.saw("bit of a journal decayed")

    def _lose_end_of_journal(self) -> None:
        """Of what was synced, and nothing behind it proves that: whoever starts on it must not deny it (see `_lose`)."""
        world, rng = self._world, self._random
        if world.disks_to_lose == 0 or (bookie := some_bookie(world, rng)) is None or not world.plan.begins():
            return
        kind, lose = rng.choice(
            (("end of a journal cut off", bookie.cut_journal), ("bit of the end of a journal decayed", bookie.decay_end_of_journal))
        )
        if lose(rng):
            world.disks_to_lose -= 1
            world.history.note(f"{bookie.id}: {kind}")
            world.plan.saw(kind)
