"""The leader's calls to other brokers, for reports and orders: over the admin API, like all calls between brokers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from cepheid_broker.balancing.loads import BrokerReport, report_from
from cepheid_broker.balancing.orders import MoveOrder, SplitOrder
from cepheid_broker.ownership import Ownership, PeerCalls, PeerUnreachableError, There

PATH = "/cepheid/v1/balance"


class BalancePeers(Protocol):
    """All other brokers, by id. Every call raises PeerUnreachableError, PeerSilentError, or RemoteRefusedError."""

    async def report(self, broker_id: str, loads: Mapping[str, float], unsteady: Sequence[str]) -> BrokerReport:
        """Return the broker's report, and send it the loads of all brokers and which of them are unsteady."""

    async def move(self, broker_id: str, order: MoveOrder) -> None: ...

    async def split(self, broker_id: str, order: SplitOrder) -> None: ...


class HttpPeers:
    """`BalancePeers` over the admin API."""

    def __init__(self, ownership: Ownership, calls: PeerCalls) -> None:
        self._ownership = ownership
        self._calls = calls

    def __repr__(self) -> str:
        return f"<HttpPeers by {self._calls!r}>"

    async def report(self, broker_id: str, loads: Mapping[str, float], unsteady: Sequence[str]) -> BrokerReport:
        body = json.dumps({"loads": dict(loads), "unsteady": list(unsteady)}).encode()
        answer = await self._calls.call(self._place(broker_id), "POST", f"{PATH}/report", body)
        try:
            return report_from(answer)
        except ValueError as error:
            raise PeerUnreachableError(f"broker {broker_id}: {error}", broker=broker_id) from None

    async def move(self, broker_id: str, order: MoveOrder) -> None:
        await self._calls.call(self._place(broker_id), "POST", f"{PATH}/move", order.model_dump_json().encode())

    async def split(self, broker_id: str, order: SplitOrder) -> None:
        await self._calls.call(self._place(broker_id), "POST", f"{PATH}/split", order.model_dump_json().encode())

    def _place(self, broker_id: str) -> There:
        addresses = self._ownership.brokers.get(broker_id)
        if addresses is None:
            raise PeerUnreachableError(f"broker {broker_id} is not registered any more", broker=broker_id)
        return There(broker_id, addresses)
