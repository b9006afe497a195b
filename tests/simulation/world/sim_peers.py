"""Calls between brokers, as far as they hand bundles over: there is no HTTP in a world.

    Heir ──► SimPeers.call ──► the network ──► the heir's process: `on_hand_over` ──► the network ──► the answer

A message may be late, a call may not arrive, and an answer may be lost although the work was done.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership import HAND_OVER_PATH, HandOverCall, PeerCalls, PeerUnreachableError, RemoteRefusedError, There
from cepheid_ports import CepheidError
from tests.simulation.checks.history import History
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.sim_network import Network

if TYPE_CHECKING:
    from tests.simulation.world.sim_broker import SimBroker

_TIMEOUT_S = 8.0
_LOST = 0.03
_DELAY_S = (0.001, 0.02)
_LATE_S = (0.5, 4.0)
_LATE = 0.03


class SimPeers(PeerCalls):
    """The calls of one broker."""

    def __init__(self, name: str, brokers: Mapping[str, SimBroker], network: Network, plan: FaultPlan, history: History) -> None:
        super().__init__(_TIMEOUT_S)
        self.breaks = True
        """False: every message arrives, soon. For scenarios."""
        self._name = name
        self._brokers = brokers
        self._network = network
        self._plan = plan
        self._history = history
        self._random: random.Random = plan.stream(f"peers of {name}")

    async def call(self, there: There, method: str, target: str, body: bytes = b"") -> Any:
        if target != HAND_OVER_PATH:
            raise PeerUnreachableError(f"{method} {target} at {there.broker_id}: a world has no HTTP", broker=there.broker_id)
        call = HandOverCall.model_validate_json(body)
        self.made += 1
        await self._travel(self._name, there.broker_id)
        broker = self._brokers.get(there.broker_id)
        if broker is None or not broker.ready:
            raise PeerUnreachableError(f"{there.broker_id} does not take calls", broker=there.broker_id)
        opened = await self._ask(broker, call)
        self._history.did(f"peers: {call.step}")
        await self._travel(there.broker_id, self._name)
        return json.loads(json.dumps({"opened": [str(topic) for topic in opened]}))

    async def _ask(self, broker: SimBroker, call: HandOverCall) -> Any:
        from tests.simulation.world.sim_operator import ask  # it knows SimBroker, which knows this

        async def work(context: AdminContext) -> Any:
            try:
                return await context.broker.ownership.on_hand_over(call)
            except CepheidError as error:
                return error

        try:
            outcome = await ask(broker, work)
        except ServiceNotReadyError as error:
            raise PeerUnreachableError(str(error), broker=broker.name) from None
        if isinstance(outcome, CepheidError):
            raise RemoteRefusedError(str(outcome), status=503, broker=broker.name)
        return outcome

    async def _travel(self, sender: str, receiver: str) -> None:
        """Raises PeerUnreachableError, or never returns: the caller's limit ends it."""
        delay_s = self._random.uniform(*_DELAY_S)
        if self.breaks and self._plan.strikes("call between brokers late", _LATE):
            delay_s = self._random.uniform(*_LATE_S)
        await asyncio.sleep(delay_s)
        if (self.breaks and self._plan.strikes("call between brokers lost", _LOST)) or self._network.is_blocked(
            sender, receiver, "call"
        ):
            await asyncio.get_running_loop().create_future()
