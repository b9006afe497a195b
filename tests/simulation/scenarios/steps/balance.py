"""Load balancing: brokers that elect a leader, and orders of leaders of before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cepheid_broker.balancing import BrokerReport, BundleOrders, LoadBalancer, MoveOrder, SplitOrder
from cepheid_broker.balancing.loads import MESSAGES_PER_S
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.ownership import Here
from cepheid_broker.settings import BalanceSettings
from cepheid_metadata import LeaderRecord
from cepheid_ports import CepheidError
from cepheid_wire import NamespaceName, TopicName
from tests.simulation.scenarios.language import ScenarioError, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_operator import ask
from tests.simulation.world.sim_serving import NAMESPACE, found_cluster

_NAMESPACE = NamespaceName(*NAMESPACE)
_INTERVAL_S = 0.5
_LOAD = 0.1


@dataclass(slots=True)
class BalanceCourse:
    """The balancers of the brokers, and who was elected."""

    scene: Scene
    balancers: dict[str, LoadBalancer] = field(default_factory=dict)
    elected: dict[str, LeaderRecord] = field(default_factory=dict)

    def start(self, broker: SimBroker) -> None:
        own_load = broker.broker.own_load
        own_load.loop_cpu_s = lambda: 0.0  # else what a seed does depends on the machine
        own_load.loaded = lambda: rated(broker)
        orders = BundleOrders(broker.store, ownership_of(broker), own_load)  # type: ignore[arg-type]
        balancer = LoadBalancer(orders, Peers(self), BalanceSettings(interval_s=_INTERVAL_S))
        broker.broker.balancer = self.balancers[broker.name] = balancer
        balancer.start()

    def ordered(self, leader: SimBroker, bundle: Bundle, target: SimBroker) -> MoveOrder:
        if leader.name not in self.elected:
            raise ScenarioError(f"{leader.name} was never the leader")
        return MoveOrder(leader=self.elected[leader.name], bundle=str(bundle), target=target.name, why="a scenario")


class Peers:
    """Calls between brokers: the work runs in the process of the one that is asked."""

    def __init__(self, course: BalanceCourse) -> None:
        self._course = course

    async def report(self, broker_id: str, loads: Mapping[str, float], unsteady: Sequence[str]) -> BrokerReport:
        return await ask(self._broker(broker_id), lambda _: self._course.balancers[broker_id].orders.own_load.report())

    async def move(self, broker_id: str, order: MoveOrder) -> None:
        await ask(self._broker(broker_id), lambda _: self._course.balancers[broker_id].orders.move(order))

    async def split(self, broker_id: str, order: SplitOrder) -> None:
        await ask(self._broker(broker_id), lambda _: self._course.balancers[broker_id].orders.split(order))

    def _broker(self, broker_id: str) -> SimBroker:
        return self._course.scene.brokers[broker_id]


def of(scene: Scene) -> BalanceCourse:
    return scene.part(BalanceCourse)


def ownership_of(broker: SimBroker) -> BundleOwnership:
    ownership = broker.broker.ownership
    assert isinstance(ownership, BundleOwnership)
    return ownership


def rated(broker: SimBroker) -> Iterable[Any]:
    """Its open topics, each with the load that scenarios speak of."""
    topics = list(broker.broker.topics.loaded())
    for topic in topics:
        if topic.name.namespace == _NAMESPACE:
            topic.published.message_rate_per_s = _LOAD * MESSAGES_PER_S
    return topics


def bundles_of(broker: SimBroker) -> list[Bundle]:
    return [bundle for bundle in ownership_of(broker).owned_bundles() if bundle.namespace == _NAMESPACE]


@step("{names} serve applications, and {broker} leads")
async def serve_and_lead(scene: Scene, names: Sequence[str], leader: SimBroker) -> None:
    """They balance their load; the others would be elected next."""
    await found_cluster(scene.tree)
    brokers = [scene.brokers[name] for name in names]
    for broker in brokers:
        broker.crash()
        broker.serves = broker.orderly = True
        broker.start()
    for broker in brokers:
        await scene.wait_until(lambda broker=broker: broker.ready, f"{broker.name} serves")  # type: ignore[misc]
    course = of(scene)
    for broker in sorted(brokers, key=lambda broker: broker is not leader):
        broker.node.context.run(course.start, broker)
        await scene.wait_until(lambda: course.balancers[leader.name].is_leader, f"{leader.name} leads")
    record = course.balancers[leader.name]._election.candidacy
    assert record is not None
    course.elected[leader.name] = record


@step("another broker than {broker} leads")
async def another_leads(scene: Scene, before: SimBroker) -> None:
    """Waits for it."""
    balancers = of(scene).balancers
    await scene.wait_until(
        lambda: any(balancer.is_leader for name, balancer in balancers.items() if name != before.name), "another broker leads"
    )


@step("{broker} has {number} bundles, each with a load of 0.1")
async def has_load(scene: Scene, broker: SimBroker, count: int) -> None:
    """Of which no broker had any: a topic is open in each."""

    async def work(_: Any) -> None:
        for number in range(200):
            name = TopicName.parse(f"persistent://{_NAMESPACE}/t-{number}")
            bundle = await ownership_of(broker).bundle_of(name)
            if bundle not in bundles_of(broker) and await ownership_of(broker).owner_of(bundle) is None:
                assert await ownership_of(broker).locate(name, authoritative=True) == Here()
                await broker.broker.topics.get(name, may_create=True)
            if len(bundles_of(broker)) == count:
                return
        raise ScenarioError(f"there are no {count} bundles without an owner")

    await ask(broker, work)


@step("{broker} keeps {number} bundles")
def keeps(scene: Scene, broker: SimBroker, count: int) -> None:
    found = len(bundles_of(broker))
    scene.require(found == count, f"{broker.name} has {found} bundles")


@step("{broker} is to be drained")
async def is_to_be_drained(scene: Scene, broker: SimBroker) -> None:
    """All brokers know of it when this is over."""
    ownership_of(broker).drain()
    known = [ownership_of(other).directory for other in scene.brokers.values()]
    await scene.wait_until(
        lambda: all(directory.brokers[broker.name].draining for directory in known), f"all know that {broker.name} is drained"
    )


@step("{broker} refuses to give a bundle to {broker}, which {broker} orders as the leader")
async def refuses(scene: Scene, owner: SimBroker, target: SimBroker, leader: SimBroker) -> None:
    """By the record with which it was elected."""
    bundle = bundles_of(owner)[0]
    order = of(scene).ordered(leader, bundle, target)
    try:
        await ask(owner, lambda _: of(scene).balancers[owner.name].orders.move(order))
    except CepheidError as error:
        scene.history.note(f"{owner.name} refuses: {error}")
        return
    scene.require(False, f"{owner.name} gave {bundle} to {target.name}")


@step("{broker} is ordered by {broker} to give a bundle to {broker}, and {broker} crashes at once")
async def is_ordered(scene: Scene, owner: SimBroker, leader: SimBroker, target: SimBroker, crashing: SimBroker) -> None:
    """When the owner has begun to give it away."""
    bundle = bundles_of(owner)[0]
    order = of(scene).ordered(leader, bundle, target)
    moving = asyncio.ensure_future(ask(owner, lambda _: of(scene).balancers[owner.name].orders.move(order)))
    await scene.wait_until(lambda: not ownership_of(owner).states.owns(bundle), f"{owner.name} gives {bundle} away")
    crashing.crash()
    await moving
