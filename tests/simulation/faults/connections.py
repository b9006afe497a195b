"""Connections between clients and brokers that suffer longer than a message: cut, broken together, slow, not read; and clients
that crash. What befalls
single writes and reads is in `sim_transport.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.faults.machines import some_broker
from tests.simulation.world.sim_broker import SimBroker

if TYPE_CHECKING:
    from tests.simulation.world.world import World

_UNREAD_S = (0.3, 1.5, 5.0)  # shorter and longer than the broker's patience with a client that does not read


class ConnectionFaults:
    """Of worlds with clients; in others nothing happens."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._cut_client: 1.0,
            self._break_connections: 0.7,
            self._stop_reading: 1.0,
            self._slow_broker: 0.5,
            self._crash_client: 1.0,
        }

    def _some_pair(self) -> tuple[str, SimBroker] | None:
        """A client's machine, and a broker."""
        broker, clients = some_broker(self._world, self._random), self._world.clients
        if broker is None or clients is None:
            return None
        return self._random.choice(clients.clients).name, broker

    def _cut_client(self) -> None:
        if (pair := self._some_pair()) is None:
            return
        machine, broker = pair
        there, back = (machine, broker.name), (broker.name, machine)
        ways = self._random.choice(((there,), (back,), (there, back)))
        lasts_s = self._random.choice((0.2, 1.0, 6.0))
        if not self._world.plan.deals("client cut off, one way" if len(ways) == 1 else "client cut off"):
            return
        network = self._world.network
        for way in ways:
            network.block(*way)
        self._world.later(lasts_s, lambda: [network.unblock(*way) for way in ways])

    def _break_connections(self) -> None:
        """As when something between them is restarted."""
        broker = some_broker(self._world, self._random)
        if broker is not None and self._world.clients is not None and self._world.plan.deals("connections of a broker reset"):
            self._world.sockets.reset(broker.name)

    def _stop_reading(self) -> None:
        """An application that is busy with something else: its connections fill up."""
        if (pair := self._some_pair()) is None:
            return
        machine, unread_s = pair[0], self._random.choice(_UNREAD_S)
        if self._world.plan.deals("client does not read"):
            for end in self._world.sockets.ends_at(machine):
                end.sleep(unread_s)

    def _slow_broker(self) -> None:
        if (pair := self._some_pair()) is None:
            return
        network, name, lasts_s = self._world.network, pair[1].name, self._random.choice((0.5, 2.0))
        if self._world.plan.deals("slow broker"):
            network.slow[name] = 50.0
            self._world.later(lasts_s, lambda: network.slow.pop(name, None))

    def _crash_client(self) -> None:
        """The machine of applications: it comes back, and they begin anew."""
        world, rng = self._world, self._random
        if world.clients is None:
            return
        clients, client, power = world.clients, rng.choice(world.clients.clients), rng.random() < 0.5
        back_s = rng.choice((0.1, 1.0, 5.0))
        if client.node.alive and world.plan.deals("power loss of a client" if power else "client crash"):
            clients.crash(client, power=power)
            world.later(back_s, lambda: clients.restart(client))
