"""What breaks on purpose, beside what messages and disk operations suffer by chance: machines, processes, wires, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_metadata import SessionState
from tests.simulation.cluster import SimBookie
from tests.simulation.sim_broker import SimBroker

if TYPE_CHECKING:
    from tests.simulation.world import World

_RATE = 0.12
"""Of a fault at each visit of the world's own loop."""
_SESSION_S = 3.0
"""How long the metadata store keeps a session of which it hears nothing."""


class Nemesis:
    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.plan.stream("nemesis")  # its own: a fault left out does not change what others are drawn
        self._decaying: SimBookie | None = None
        self._acts: tuple[Callable[[], None], ...] = (
            self._lose_power,
            self._crash_bookie,
            self._crash_broker,
            self._cut_wire,
            self._fill_disk,
            self._pause_broker,
            self._expire_session,
            self._lose_power_everywhere,
            self._lose_metadata,
            self._lag_metadata,
            self._slow_metadata,
            self._slow_bookie,
            self._pause_bookie,
            self._lose_disk,
            self._decay,
            self._hit_ensemble,
            self._hit_ensemble,
            self._expire_session_of_bookie,
        )

    def act(self) -> None:
        if self._random.random() < _RATE:
            self._random.choice(self._acts)()

    async def heal(self) -> None:
        """Ends every fault that lasts, and waits until every machine is up."""
        world = self._world
        world.network.heal()
        world.tree.slow = 1.0
        if world.tree.out:
            world.tree.end_outage()
        for bookie in world.bookies.values():
            bookie.disk.full = False
            if bookie.node.paused:
                bookie.node.resume()
            if bookie.store is not None:
                bookie.store.renew()
        for broker in world.brokers.values():
            if broker.node.paused:
                broker.node.resume()
            if broker.node.alive:
                broker.store.lag_s = None
                broker.store.renew()
            if not broker.node.alive:
                world.begin(broker)
        while not all(bookie.serving for bookie in world.bookies.values()):
            for bookie in world.bookies.values():
                if not bookie.node.alive:
                    await bookie.start()
            await asyncio.sleep(0.05)

    def _some_bookie(self) -> SimBookie | None:
        serving = [bookie for bookie in self._world.bookies.values() if bookie.serving]
        return self._random.choice(serving) if serving else None

    def _some_broker(self) -> SimBroker | None:
        up = [broker for broker in self._world.brokers.values() if broker.node.alive and not broker.node.paused]
        return self._random.choice(up) if up else None

    def _lose_power(self) -> None:
        if (bookie := self._some_bookie()) is not None and self._world.plan.deals("power loss"):
            bookie.crash(power=True)

    def _lose_power_everywhere(self) -> None:
        if self._random.random() < 0.3 and self._world.plan.deals("power loss everywhere"):
            for bookie in self._world.bookies.values():
                if bookie.node.alive:
                    bookie.crash(power=True)

    def _crash_bookie(self) -> None:
        if (bookie := self._some_bookie()) is not None and self._world.plan.deals("bookie crash"):
            bookie.crash(power=False)

    def _crash_broker(self) -> None:
        if (broker := self._some_broker()) is not None and self._world.plan.deals("broker crash"):
            broker.crash()
            self._world.later(self._random.choice((0.1, 0.5, 2.0)), lambda: broker.node.alive or self._world.begin(broker))

    def _cut_wire(self) -> None:
        broker, bookie = self._some_broker(), self._some_bookie()
        if broker is None or bookie is None:
            return
        network = self._world.network
        ways = self._random.choice(
            (((broker.name, bookie.id),), ((bookie.id, broker.name),), ((broker.name, bookie.id), (bookie.id, broker.name)))
        )
        if not self._world.plan.deals("partition, one way" if len(ways) == 1 else "partition"):
            return
        for way in ways:
            network.block(*way)
        self._world.later(self._random.choice((0.2, 1.0, 6.0)), lambda: [network.unblock(*way) for way in ways])

    def _fill_disk(self) -> None:
        if (bookie := self._some_bookie()) is not None and self._world.plan.deals("disk full"):
            bookie.disk.full = True

            def free() -> None:
                bookie.disk.full = False

            self._world.later(self._random.choice((0.3, 1.5, 6.0)), free)

    def _expire_session(self) -> None:
        """The metadata store gives the broker up; it gets a new session a while later."""
        broker = self._some_broker()
        if broker is None or broker.store.memory.session_state is SessionState.LOST:
            return
        if not self._world.plan.deals("metadata session expired"):
            return
        broker.store.expire()
        self._world.later(self._random.choice((0.1, 1.0, 3.0)), broker.store.renew)

    def _expire_session_of_bookie(self) -> None:
        bookie = self._some_bookie()
        if bookie is not None and bookie.store is not None and self._world.plan.deals("metadata session of a bookie expired"):
            bookie.store.expire()
            self._world.later(self._random.choice((0.1, 1.0, 3.0)), bookie.store.renew)

    def _pause_broker(self) -> None:
        """Perhaps for longer than its session lives: it wakes up, and does not know."""
        if (broker := self._some_broker()) is not None and self._world.plan.deals("broker paused"):
            node, store, pause_s = broker.node, broker.store, self._random.choice((0.1, 1.0, 7.0))
            node.pause()
            if pause_s > _SESSION_S:
                self._world.later(_SESSION_S, lambda: node.paused and store.expire())
                self._world.later(pause_s + 0.1, store.renew)
            self._world.later(pause_s, lambda: node.paused and node.resume())

    def _lose_metadata(self) -> None:
        """Nobody reaches the store; sessions live on."""
        tree = self._world.tree
        if not tree.out and self._world.plan.deals("metadata outage"):
            tree.begin_outage()
            self._world.later(self._random.choice((0.2, 1.0, 4.0, 9.0)), lambda: tree.out and tree.end_outage())

    def _lag_metadata(self) -> None:
        """A broker reads from a follower that is behind."""
        if (broker := self._some_broker()) is not None and self._world.plan.deals("metadata follower behind"):
            store = broker.store
            store.lag_s = self._random.choice((0.05, 0.3, 1.5))

            def catch_up() -> None:
                store.lag_s = None

            self._world.later(self._random.choice((0.5, 3.0)), catch_up)

    def _slow_metadata(self) -> None:
        """So that much happens between a request and its answer."""
        tree = self._world.tree
        if not self._world.plan.deals("slow metadata"):
            return
        tree.slow = self._random.choice((50.0, 300.0))

        def recover() -> None:
            tree.slow = 1.0

        self._world.later(self._random.choice((1.0, 5.0)), recover)

    def _hit_ensemble(self) -> None:
        """What chance alone brings together too rarely: in one ensemble some bookies are late while another one ends, and metadata
        takes its time to hear of it."""
        world, rng = self._world, self._random
        open_ledgers = [record for record in world.history.ledgers.values() if not record.is_closed]
        if not open_ledgers or not world.plan.deals("ensemble hit"):
            return
        ensemble = list(rng.choice(open_ledgers).last_fragment.ensemble)
        rng.shuffle(ensemble)
        ends, late = ensemble[0], ensemble[1 : rng.randrange(len(ensemble)) + 1]
        self._slow_metadata()
        for name in late:
            world.network.slow[name] = 100.0
            world.later(1.0, lambda name=name: world.network.slow.pop(name, None))
        bookie, power = world.bookies[ends], rng.random() < 0.3
        world.later(rng.choice((0.005, 0.02, 0.1)), lambda: bookie.serving and bookie.crash(power=power))

    def _slow_bookie(self) -> None:
        """It answers, many times later."""
        if (bookie := self._some_bookie()) is not None and self._world.plan.deals("slow bookie"):
            network, name = self._world.network, bookie.id
            network.slow[name] = self._random.choice((50.0, 50.0, 1_000.0))
            self._world.later(self._random.choice((0.5, 2.0, 8.0)), lambda: network.slow.pop(name, None))

    def _pause_bookie(self) -> None:
        if (bookie := self._some_bookie()) is not None and not bookie.node.paused and self._world.plan.deals("bookie paused"):
            node = bookie.node
            node.pause()
            self._world.later(self._random.choice((0.1, 1.0, 4.0)), lambda: node.paused and node.resume())

    def _decay(self) -> None:
        """The medium of one bookie's entry logs, here and there. What is on it counts as lost (see `_lose_disk`)."""
        world, rng = self._world, self._random
        if self._decaying is None:
            if world.disks_to_lose == 0 or (bookie := self._some_bookie()) is None or not bookie.disk.listdir("entrylog"):
                return
            world.disks_to_lose -= 1
            self._decaying = bookie
        for _ in range(rng.choice((1, 10))):
            if self._decaying.disk.decay(rng, "entrylog"):
                world.plan.deals("bit of an entry log decayed")

    def _lose_disk(self) -> None:
        """For good, or but for an old copy; at most so often in a run that every entry keeps a copy."""
        world = self._world
        if world.disks_to_lose == 0 or (bookie := self._some_bookie()) is None:
            return
        if not bookie.has_old_copy and self._random.random() < 0.5:
            bookie.keep_copy()
            return
        if not world.plan.deals("old disks restored" if bookie.has_old_copy else "disks lost"):
            return
        world.disks_to_lose -= 1
        if bookie.has_old_copy:
            bookie.restore_copy()
            bookie.accepts_empty_disk = True
        else:
            bookie.lose_disk()
