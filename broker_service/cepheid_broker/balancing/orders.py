"""Carry out the leader's orders at the owner of a bundle: hand the bundle over, or split it.

    order ──► from the current leader? ──► served here? ──► may the target take it? ──► release or split

Rules
1. An order is refused if its sender is not the leader according to the record. So a leader that was paused beyond its session, or
   two brokers that both believe they are elected, move nothing twice.
2. An order is carried out by the broker it was sent to or not at all: the next owner of the bundle does not act on it.
3. A broker that is draining or gone, or that no isolation policy allows, gets no bundle. Whether the load of primary brokers
   lets secondary ones serve too is the leader's decision, since it knows the current loads.
4. Once begun, an order is completed even if the leader dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel

from cepheid_broker.balancing import split_points
from cepheid_broker.balancing.own_load import OwnLoad
from cepheid_broker.errors import BrokerError
from cepheid_broker.ownership import Bundle, Ownership, Placement
from cepheid_metadata import LeaderRecord, MetadataStore, leader_record


class OrderRefusedError(BrokerError):
    """An order of load balancing that is not carried out."""

    hint = "the leader plans again from the next reports"


class MoveOrder(BaseModel, frozen=True, extra="forbid"):
    """Hand a bundle, by its full name, to another broker, by its id."""

    leader: LeaderRecord
    bundle: str
    target: str
    why: str = ""


class SplitOrder(BaseModel, frozen=True, extra="forbid"):
    """Cut a bundle in two."""

    leader: LeaderRecord
    bundle: str
    by: Literal["load", "topics"]
    why: str = ""


class PlacedOwnership(Ownership, Protocol):
    """Ownership among several brokers."""

    placement: Placement


@dataclass(slots=True)
class BundleOrders:
    """Carries out the orders of the leader at one broker."""

    store: MetadataStore
    ownership: PlacedOwnership
    own_load: OwnLoad

    async def move(self, order: MoveOrder) -> None:
        """Hand the bundle over. Raises OrderRefusedError, and what `Ownership.release` raises."""
        bundle = await self._accepted(order.leader, order.bundle)
        brokers = self.ownership.brokers
        if order.target not in brokers or order.target in self.ownership.leaving:
            raise OrderRefusedError(f"broker {order.target} takes no bundles: it does not run, or is being drained")
        namespace = str(bundle.namespace)
        if order.target not in self.ownership.placement.isolation.allowed_at_most(namespace, brokers):
            raise OrderRefusedError(f"an isolation policy does not allow that {order.target} serves {namespace}")
        await self.ownership.release(bundle, to=order.target, reason=f"load balancing: {order.why}")

    async def split(self, order: SplitOrder) -> None:
        """Split the bundle. Raises OrderRefusedError, and what `Ownership.split` raises."""
        bundle = await self._accepted(order.leader, order.bundle)
        if order.by == "topics":
            cut = split_points.by_topics(self.own_load.topic_hashes(bundle))
        else:
            cut = split_points.by_load(self.own_load.topic_loads(bundle))
        if cut is None:
            raise OrderRefusedError(f"bundle {bundle} has fewer than two open topics: it cannot be split between them")
        await self.ownership.split(bundle, [cut], reason=f"load balancing: {order.why}")

    async def _accepted(self, leader: LeaderRecord, name: str) -> Bundle:
        """Return the bundle of an order that may be carried out (rules 1, 2). Raises OrderRefusedError, MetadataError."""
        current = await leader_record(self.store).get(None)
        if current is None or current.record != leader:
            now = "no broker is" if current is None else f"{current.record.broker_id} is"
            raise OrderRefusedError(f"{leader.broker_id} is not the leader that moves bundles: {now}")
        owned = self.ownership.owned_bundles() or ()
        bundle = next((bundle for bundle in owned if str(bundle) == name), None)
        if bundle is None:
            raise OrderRefusedError(f"bundle {name[:200]} is not served by this broker any more")
        return bundle
