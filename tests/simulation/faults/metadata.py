"""The metadata store: sessions that end, connections that break, outages, elections, followers that are behind, slow requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cepheid_metadata import SessionState
from tests.simulation.faults.machines import some_bookie, some_broker

if TYPE_CHECKING:
    from tests.simulation.world.sim_store import SimStore
    from tests.simulation.world.world import World


class MetadataFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._expire_session: 1.0,
            self._expire_session_of_bookie: 1.0,
            self._break_connection: 1.0,
            self._lose: 0.8,
            self._elect: 1.2,
            self._lag: 1.0,
            self._lag_behind_bookie: 3.0,
            self._slow_down: 0.8,
        }

    def _expire_session(self) -> None:
        """The store gives the broker up; it gets a new session a while later."""
        broker = some_broker(self._world, self._random)
        if broker is None or broker.store.memory.session_state is SessionState.LOST:
            return
        if self._world.plan.deals("metadata session expired"):
            broker.store.expire()
            self._world.later(self._random.choice((0.1, 1.0, 3.0)), broker.store.renew)

    def _expire_session_of_bookie(self) -> None:
        bookie = some_bookie(self._world, self._random)
        if bookie is not None and bookie.store is not None and self._world.plan.deals("metadata session of a bookie expired"):
            bookie.store.expire()
            self._world.later(self._random.choice((0.1, 1.0, 3.0)), bookie.store.renew)

    def _break_connection(self) -> None:
        """Of one process; its session lives. What was under way has an unknown outcome."""
        tree, machine = self._world.tree, some_broker(self._world, self._random)
        store = None if machine is None else machine.store
        if self._random.random() < 0.3 and (bookie := some_bookie(self._world, self._random)) is not None:
            store = bookie.store
        if store is not None and self._world.plan.deals("metadata connection of a process lost"):
            store.suspend()
            self._world.later(self._random.choice((0.05, 0.5, 2.5)), lambda: tree.out or store.resume())

    def _lose(self) -> None:
        """Nobody reaches the store; sessions live on."""
        tree = self._world.tree
        if not tree.out and self._world.plan.deals("metadata outage"):
            tree.begin_outage()
            self._world.later(self._random.choice((0.2, 1.0, 4.0, 9.0)), lambda: tree.out and tree.end_outage())

    def _elect(self) -> None:
        """Perhaps for longer than anybody waits for an answer: then a write has an unknown outcome, and takes effect later."""
        tree, plan = self._world.tree, self._world.plan
        if not tree.electing and plan.deals("metadata leader elected"):
            tree.begin_election()
            self._world.later(self._random.choice((0.2, 1.0, 8.0)), lambda: tree.end_election(plan))

    def _lag(self) -> None:
        """A broker reads from a follower that is behind."""
        if (broker := some_broker(self._world, self._random)) is not None and self._world.plan.deals("metadata follower behind"):
            self._fall_behind(broker.store, (0.05, 0.3, 1.5), (0.5, 3.0))

    def _lag_behind_bookie(self) -> None:
        """For longer than its garbage collector takes between two looks; perhaps the follower is so busy that a look takes long."""
        bookie = some_bookie(self._world, self._random)
        if bookie is not None and bookie.store is not None and self._world.plan.deals("metadata follower of a bookie behind"):
            bookie.store.slow = self._random.choice((1.0, 40.0))
            self._fall_behind(bookie.store, (0.3, 1.5, 6.0), (3.0, 8.0))

    def _fall_behind(self, store: SimStore, lags_s: Sequence[float], lasts_s: Sequence[float]) -> None:
        store.lag_s = self._random.choice(lags_s)
        self._world.later(self._random.choice(lasts_s), store.catch_up)

    def _slow_down(self) -> None:
        """So that much happens between a request and its answer."""
        if self._world.plan.deals("slow metadata"):
            self._world.tree.slow = self._random.choice((50.0, 300.0))
            self._world.later(self._random.choice((1.0, 5.0)), self._world.tree.recover)
