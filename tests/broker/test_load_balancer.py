"""The leader with several brokers in one loop: election, reports, moves and splits, and orders that are not carried out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_broker.balancing import (
    BrokerReport,
    BundleOrders,
    LoadBalancer,
    Move,
    MoveOrder,
    OrderRefusedError,
    SplitOrder,
    balance_memory,
    load_balancer,
)
from cepheid_broker.balancing.balance_memory import STARTING_S
from cepheid_broker.balancing.load_balancer import changed
from cepheid_broker.balancing.loads import MESSAGES_PER_S
from cepheid_broker.balancing.own_load import OwnLoad
from cepheid_broker.ownership import Division, PeerSilentError, PeerUnreachableError, RemoteRefusedError, SoleOwnership
from cepheid_broker.ownership.bundles import Bundle, bundles_of
from cepheid_broker.settings import BalanceSettings
from cepheid_metadata import DynamicSettings, IsolationPolicies, IsolationPolicy, LeaderRecord, dynamic_settings, isolation_policies
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_ports import CepheidError, Ports
from cepheid_wire import NamespaceName, TopicName
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.support import wait_until

NAMESPACE = NamespaceName("public", "default")
FAST = BalanceSettings(interval_s=0.02)


class Balanced:
    """The balancers of a world's brokers, which call one another directly. `rates` are messages/s of a topic, by its short name."""

    def __init__(self, world: BrokersWorld) -> None:
        self.world = world
        self.rates: dict[str, float] = {}
        self.balancers: dict[str, LoadBalancer] = {}
        self.unreachable: list[str] = []
        self.silent: list[str] = []
        """These never answer."""

    def add(self, broker: OneBroker, settings: BalanceSettings = FAST) -> LoadBalancer:
        own_load = broker.broker.own_load
        own_load.loaded = lambda: self._rated(broker)
        own_load._started_s -= STARTING_S
        orders = BundleOrders(broker.session, broker.ownership, own_load)  # type: ignore[arg-type]
        balancer = LoadBalancer(orders, self, settings)
        broker.broker.balancer = self.balancers[broker.id] = balancer
        balancer.start()
        return balancer

    def _rated(self, broker: OneBroker) -> list[Any]:
        topics = list(broker.broker.topics.loaded())
        for topic in topics:
            topic.published.message_rate_per_s = self.rates.get(topic.name.local_name, 0.0)
        return topics

    def _check(self, broker_id: str) -> None:
        if broker_id in self.unreachable:
            raise PeerUnreachableError(f"planted: {broker_id} does not answer")
        if broker_id not in self.balancers:
            raise RemoteRefusedError(f"planted: {broker_id} is of a release without load balancing", status=404)

    async def report(self, broker_id: str, loads: Mapping[str, float], unsteady: Sequence[str]) -> BrokerReport:
        self._check(broker_id)
        if broker_id in self.silent:
            await asyncio.Event().wait()
        self.balancers[broker_id].learn_loads(loads, unsteady)
        return await self.balancers[broker_id].orders.own_load.report()

    async def move(self, broker_id: str, order: MoveOrder) -> None:
        self._check(broker_id)
        await self.balancers[broker_id].orders.move(order)

    async def split(self, broker_id: str, order: SplitOrder) -> None:
        self._check(broker_id)
        await self.balancers[broker_id].orders.split(order)

    async def leader(self) -> LoadBalancer:
        await wait_until(lambda: any(balancer.is_leader for balancer in self.balancers.values()))
        (found,) = [balancer for balancer in self.balancers.values() if balancer.is_leader]
        return found

    async def load(self, broker: OneBroker, count: int, load: float) -> list[TopicName]:
        """Open topics at this broker, together with that load, each in another bundle as far as there are some."""
        opened: list[TopicName] = []
        held: list[Bundle] = []
        for number in range(10_000):
            name = TopicName.parse(full(f"t-{number}"))
            bundle = await broker.ownership.bundle_of(name)
            if bundle in held or not isinstance(await broker.ownership.owner_of(bundle), type(None)):
                continue
            await broker.ownership.locate(name, authoritative=True)
            await broker.broker.topics.get(name, may_create=True)
            held.append(bundle)
            opened.append(name)
            self.rates[name.local_name] = load / count * MESSAGES_PER_S
            if len(opened) == count:
                return opened
        raise AssertionError(f"only {len(opened)} bundles are free")

    async def use(self) -> None:
        """What clients do: look up their topics, and have them opened where they are."""
        while True:
            await asyncio.sleep(0.01)
            for local_name in list(self.rates):
                name = TopicName.parse(full(local_name))
                try:
                    owner = await self.world.owner_of(local_name)
                    await owner.ownership.locate(name, authoritative=True)
                    await owner.broker.topics.get(name, may_create=True)
                except CepheidError:
                    continue  # it is being moved


@asynccontextmanager
async def balanced(count: int = 2, **fields: Any) -> AsyncIterator[Balanced]:
    async with BrokersWorld(count=count, **fields) as world:
        await storage_format_record(world.store).create(None, StorageFormat(storage_format=2))
        found = Balanced(world)
        clients = asyncio.ensure_future(found.use())
        try:
            yield found
        finally:
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
            for balancer in found.balancers.values():
                await balancer.aclose()


async def test_one_broker_leads_and_the_next_one_when_its_session_ends() -> None:
    async with balanced() as found:
        first, second = found.world.brokers
        assert found.add(first).is_leader is False
        leader = await found.leader()
        found.add(second)
        record = await leader.leader()
        assert record is not None
        assert record.broker_id == first.id
        first.session.expire()
        await wait_until(lambda: found.balancers[second.id].is_leader)
        assert not found.balancers[first.id].is_leader
        first.session.renew()
        await asyncio.sleep(0.1)
        assert not found.balancers[first.id].is_leader


async def test_a_leader_that_no_other_broker_answers_gives_way() -> None:
    async with balanced(count=3) as found:
        first, second, third = found.world.brokers
        leader = found.add(first)
        await found.leader()
        found.unreachable += [second.id, third.id]  # each of them reaches the first
        found.add(second)
        found.add(third)
        await wait_until(lambda: found.balancers[second.id].is_leader or found.balancers[third.id].is_leader)
        assert not leader.is_leader


async def test_a_leader_that_is_drained_gives_way() -> None:
    async with balanced() as found:
        first, second = found.world.brokers
        leader = found.add(first)
        await found.leader()
        found.add(second)
        first.ownership.drain()
        await wait_until(lambda: found.balancers[second.id].is_leader)
        assert not leader.is_leader


async def test_a_broker_that_is_added_gets_its_share_and_then_nothing_moves() -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await found.load(first, 6, 0.6)
        leader = found.add(first)
        found.add(second)
        await wait_until(lambda: leader.moves == 3)
        await wait_until(lambda: [len(broker.ownership.owned_bundles()) for broker in (first, second)] == [3, 3])
        await asyncio.sleep(0.2)
        assert (leader.moves, leader.refused) == (3, 0)


async def test_a_round_that_could_not_move_all_is_followed_by_the_next_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance_memory, "CONFIRM_ROUNDS", 1)
    monkeypatch.setattr(load_balancer, "_HASTE", 0.0001)
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await found.load(first, 6, 0.6)
        rare = BalanceSettings(interval_s=300.0, moves_at_once=1)
        leader = found.add(first, rare)
        found.add(second, rare)
        await wait_until(lambda: leader.moves == 3)


async def test_the_view_says_what_moved_and_why() -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await found.load(first, 4, 0.4)
        leader = found.add(first, FAST.model_copy(update={"enabled": False}))
        found.add(second)
        await found.leader()
        await wait_until(lambda: len(leader._heard) == 2)
        view = await leader.view()
        assert [(move.source, move.target) for move in view.plan.moves] == [(first.id, second.id)] * 2
        assert view.plan.moves[0].why.startswith("loads: broker-1 0.40, broker-2 0.00, mean 0.20")
        assert (view.missing, view.leaving, view.recent) == ([], [], ())
        assert leader.moves == 0  # it is off
        outcomes = await leader.balance_now()
        assert [outcome.error for outcome in outcomes] == ["", ""]
        assert (await leader.view()).recent == tuple(outcomes)


async def test_a_bundle_with_all_the_load_is_split_and_a_part_of_it_moves() -> None:
    async with balanced(bundles=1) as found:
        first, second = found.world.brokers
        names = [TopicName.parse(full(f"t-{number}")) for number in range(8)]
        for name in names:
            await first.ownership.locate(name, authoritative=True)
            await first.broker.topics.get(name, may_create=True)
            found.rates[name.local_name] = 0.05 * MESSAGES_PER_S
        leader = found.add(first)
        found.add(second)
        await wait_until(lambda: leader.moves > 0)
        assert leader.splits >= 1
        assert leader.refused == 0


async def test_a_broker_that_does_not_answer_gets_nothing() -> None:
    async with balanced(count=3, bundles=16) as found:
        first, second, third = found.world.brokers
        await found.load(first, 4, 0.4)
        found.unreachable.append(second.id)
        leader = found.add(first)
        found.add(second)
        found.add(third)
        await wait_until(lambda: leader.moves == 2)
        view = await leader.view()
        assert {outcome.action.target for outcome in view.recent if isinstance(outcome.action, Move)} == {third.id}
        assert view.missing == [second.id]


async def test_a_broker_that_never_answers_holds_up_neither_rounds_nor_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "REPORT_LIMIT_S", 0.05)
    async with balanced(count=3, bundles=16) as found:
        first, second, third = found.world.brokers
        found.silent.append(third.id)
        await found.load(first, 4, 0.4)
        leader = found.add(first)
        found.add(second)
        found.add(third)
        await wait_until(lambda: leader.moves == 2)
        assert (await leader.view()).missing == [third.id]


async def test_missing_reports_are_not_taken_for_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is used for some rounds. `_SAME_START_S` is shorter than a round here, as it is with the defaults."""
    monkeypatch.setattr(balance_memory, "_SAME_START_S", 0.1)
    slow = FAST.model_copy(update={"interval_s": 0.2})
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        leader = found.add(first, slow)
        found.add(second, slow)
        await wait_until(lambda: second.id in leader._heard)
        for _ in range(2):
            found.unreachable.append(second.id)
            await wait_until(lambda: leader._rounds - leader._heard[second.id].round == 2)
            found.unreachable.clear()
            await wait_until(lambda: leader._rounds == leader._heard[second.id].round)
        assert [state.note for state in (await leader.view()).brokers] == ["", ""]


async def test_a_move_that_outlasts_its_call_counts_as_moved() -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await found.load(second, 4, 0.4)
        leader = found.add(first)
        found.add(second)
        moving: list[asyncio.Future[None]] = []
        move_all = found.move

        async def move(broker_id: str, order: MoveOrder) -> None:
            moving.append(asyncio.ensure_future(move_all(broker_id, order)))
            raise PeerSilentError("planted: timeout")

        found.move = move  # type: ignore[method-assign]
        await wait_until(lambda: len(moving) == 2)
        rounds = leader._rounds
        await wait_until(lambda: leader._rounds > rounds + 5)
        assert (len(moving), leader.refused) == (2, 0)
        assert [outcome.unanswered for outcome in leader._recent] == [True, True]


@pytest.mark.parametrize("what", ["not the leader", "not here", "no such target", "not allowed"])
async def test_an_order_that_does_not_hold_any_more_is_refused_by_the_owner(what: str) -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        (name,) = await found.load(first, 1, 0.1)
        bundle = await first.ownership.bundle_of(name)
        found.add(first, FAST.model_copy(update={"enabled": False}))
        record = await (await found.leader()).leader()
        assert record is not None
        orders = found.balancers[first.id].orders
        order = MoveOrder(leader=record, bundle=str(bundle), target=second.id)
        if what == "not the leader":
            order = order.model_copy(update={"leader": LeaderRecord(broker_id=second.id, since_ms=record.since_ms)})
        elif what == "not here":
            await first.ownership.release(bundle, to=second.id)
        elif what == "no such target":
            order = order.model_copy(update={"target": "broker-9"})
        else:
            policy = IsolationPolicy(namespaces=("public/default",), primary=("broker-1",))
            await isolation_policies(found.world.store).create(None, IsolationPolicies(policies={"p": policy}))
            await wait_until(lambda: not first.ownership.placement.isolation.is_empty)
        with pytest.raises(OrderRefusedError):
            await orders.move(order)
        assert first.ownership.owns(name) == (what != "not here")


async def test_a_policy_moves_bundles_to_the_brokers_that_it_allows() -> None:
    async with balanced(bundles=4) as found:
        first, second = found.world.brokers
        await found.load(first, 3, 0.01)
        leader = found.add(first)
        found.add(second)
        policy = IsolationPolicy(namespaces=("public/.*",), primary=(second.id,))
        await isolation_policies(found.world.store).create(None, IsolationPolicies(policies={"p": policy}))
        await wait_until(lambda: leader.moves == 3)
        ours = [bundle for bundle in first.ownership.owned_bundles() if bundle in bundles_of(NAMESPACE, 4)]
        assert ours == []


async def test_bundles_move_to_secondary_brokers_while_the_primary_ones_are_full() -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await found.load(first, 6, 0.9)
        policy = IsolationPolicy(
            namespaces=("public/default",), primary=(first.id,), secondary=(second.id,), min_limit=1, usage_threshold=60
        )
        await isolation_policies(found.world.store).create(None, IsolationPolicies(policies={"p": policy}))
        await wait_until(lambda: not first.ownership.placement.isolation.is_empty)
        leader = found.add(first)
        found.add(second)
        await wait_until(lambda: len(leader._recent) > 0)
        assert [outcome.error for outcome in leader._recent] == [""] * len(leader._recent)
        await wait_until(lambda: len(second.ownership.owned_bundles()) == leader.moves)
        rounds, moved = leader._rounds, leader.moves
        await wait_until(lambda: leader._rounds > rounds + 5)
        # They stay while they rest, although the first is free again. One more may be on its way at this moment.
        assert len(second.ownership.owned_bundles()) >= moved


async def test_settings_are_changed_for_all_brokers_while_they_run() -> None:
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        await dynamic_settings(found.world.store).create(None, DynamicSettings(values={"balance.enabled": "false"}))
        await found.load(first, 4, 0.4)
        leader = found.add(first)
        found.add(second)
        await wait_until(lambda: leader._rounds > 10)
        assert leader.moves == 0
        await dynamic_settings(found.world.store).replace(None, DynamicSettings(values={"balance.enabled": "true"}), 0)
        await wait_until(lambda: leader.moves == 2)


def test_a_changed_setting_that_does_not_fit_is_left_out() -> None:
    assert changed(FAST, {"balance.tolerance": "0.5", "other.thing": "1", "balance.new": "2"}).tolerance == 0.5
    assert changed(FAST, {"balance.tolerance": "-1"}) == FAST
    assert changed(FAST, {"balance.interval_s": "5000", "balance.enabled": "false"}).enabled is False


async def test_a_sleeping_leader_notices_a_shorter_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "_LOOK_S", 0.02)
    async with balanced(bundles=16) as found:
        first, second = found.world.brokers
        settings = dynamic_settings(found.world.store)
        await settings.create(None, DynamicSettings(values={"balance.interval_s": "300"}))
        leader = found.add(first)
        found.add(second)
        await wait_until(lambda: leader._rounds == 1)
        await settings.replace(None, DynamicSettings(values={}), 0)
        await wait_until(lambda: leader._rounds > 1)


@pytest.mark.virtual_time
async def test_the_age_of_a_broker_does_not_hang_on_its_clock() -> None:
    wall_ms = 10**12
    own_load = OwnLoad(SoleOwnership(), list, no_division, Ports(wall_ms=lambda: wall_ms))
    await asyncio.sleep(5.0)
    wall_ms -= 10**10  # the clock is set back by months
    assert (await own_load.report()).age_s == pytest.approx(5.0, abs=0.01)


async def no_division(namespace: NamespaceName) -> Division:
    return 1
