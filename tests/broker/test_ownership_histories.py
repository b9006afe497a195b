"""Ownership with its drivers: real `BundleOwnership`s over sessions that are slow, cut, ended, put to sleep, and that lose answers.
In half of the histories bundles are split meanwhile.

Whatever happens: two brokers never have one epoch, and who serves without the record hears of it. Once all is well again, every
broker names the same owner for every bundle, and that one serves it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundle_states import Tenure
from cepheid_broker.ownership.bundles import Bundle, Division, bundle_of, bundles_of, division_of, topic_hash
from cepheid_broker.ownership.ownership import Here, There
from cepheid_metadata import (
    MemoryStore,
    MemoryTree,
    NamespaceRecord,
    Op,
    OpResult,
    SessionState,
    StoreUnavailableError,
    Versioned,
    bundle_owners,
    namespace_records,
)
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_ports import CepheidError, Ports
from cepheid_wire import NamespaceName, TopicName
from tests.broker.brokers_world import SessionOf
from tests.simulation.world.virtual_loop import run_simulated

pytestmark = pytest.mark.virtual_time

NAMESPACE = NamespaceName("public", "default")
BUNDLES = 3
TOPICS = [TopicName.parse(f"persistent://public/default/t-{number}") for number in range(12)]
HISTORY_S = 60.0


class SlowSession(SessionOf):
    """Every request takes its time, both ways, and some answers of writes are lost."""

    def __init__(self, tree: MemoryTree, rng: random.Random) -> None:
        super().__init__(tree)
        self._rng = rng
        self.loses_answers = 0.2

    async def get(self, key: str) -> Versioned | None:
        await asyncio.sleep(self._rng.random() * 0.05)
        found = await super().get(key)
        await asyncio.sleep(self._rng.random() * 0.05)
        return found

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        await asyncio.sleep(self._rng.random() * 0.05)
        results = await super().multi(ops)
        await asyncio.sleep(self._rng.random() * 0.05)
        if self._rng.random() < self.loses_answers:
            raise StoreUnavailableError("planted: the answer is lost", outcome_unknown=True)
        return results


class Server:
    """What a broker serves of its bundles: the user of one ownership."""

    def __init__(self, name: str, tree: MemoryTree, rng: random.Random) -> None:
        self.name = name
        self.session = SlowSession(tree, rng)
        self.ownership = BundleOwnership(self.session, Ports(random=rng), timeout_s=5.0)
        self.ownership.user = self
        self.open: dict[TopicName, None] = {}
        self.epochs: dict[tuple[Bundle, int], None] = {}
        self._rng = rng

    def __repr__(self) -> str:
        return f"<Server {self.name}, {len(self.open)} open, {self.ownership!r}>"

    def drop_unowned(self) -> None:
        self.open = {topic: None for topic in self.open if self.ownership.owns(topic)}

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        await asyncio.sleep(self._rng.random() * 0.2)
        self.open = {topic: None for topic in self.open if not bundle.holds(topic)}

    async def use(self, topic: TopicName, *, authoritative: bool) -> str | None:
        """Who serves it, by this broker's word; None: not now."""
        try:
            location = await self.ownership.locate(topic, authoritative=authoritative)
        except CepheidError:
            return None
        if isinstance(location, There):
            return location.broker_id
        if self.ownership.owns(topic):  # in the same step: between the answer and this it may have gone
            self.open[topic] = None
            tenure = self._tenure_of(topic)
            self.epochs[(tenure.bundle, tenure.epoch)] = None
        return self.name

    def _tenure_of(self, topic: TopicName) -> Tenure:
        division = self.ownership._divisions.known(NAMESPACE)
        assert division is not None
        found = self.ownership.states.find(bundle_of(topic, division))
        assert found is not None
        return found


async def disturb(servers: list[Server], rng: random.Random) -> None:
    """Sessions are cut and mended, ended, put to sleep."""
    while True:
        await asyncio.sleep(rng.random() * 4)
        session = rng.choice(servers).session
        for_s = rng.random() * 3
        match rng.choice(("cut", "expire", "sleep")):
            case "cut":
                session.cut()
                await asyncio.sleep(for_s)
                session.mend()
            case "expire":
                session.expire()
                await asyncio.sleep(for_s)
                session.renew()
            case "sleep":
                session.sleep()
                await asyncio.sleep(for_s)
                session.wake()
                await asyncio.sleep(rng.random())
                session.renew()


async def use(servers: list[Server], rng: random.Random, *, splits: bool) -> None:
    while True:
        await asyncio.sleep(rng.random() * 0.3)
        server = rng.choice(servers)
        if splits and rng.random() < 0.03:
            await split(server, rng)
        elif rng.random() < 0.1:
            owned = server.ownership.owned_bundles()
            if owned:
                to = rng.choice(["", rng.choice(servers).name])
                try:
                    await server.ownership.release(rng.choice(owned), to=to)
                except CepheidError:
                    pass
        else:
            await server.use(rng.choice(TOPICS), authoritative=rng.random() < 0.3)


async def split(server: Server, rng: random.Random) -> None:
    """Cut one of its bundles at a topic of it. What it has open of the bundle stays open, unless it loses the bundle."""
    topic = rng.choice(TOPICS)
    if not server.ownership.owns(topic):
        return
    bundle = bundle_of(topic, server.ownership._divisions.known(NAMESPACE) or BUNDLES)
    try:
        parts = await server.ownership.split(bundle, [topic_hash(topic)])
    except CepheidError:
        return
    assert [part for part in parts if part in server.ownership.owned_bundles()] == parts


async def division(store: MemoryStore) -> Division:
    found = await namespace_records(store).get((NAMESPACE.tenant, NAMESPACE.local_name))
    assert found is not None
    return division_of(found.record)


def check_epochs(servers: list[Server]) -> None:
    """No two brokers have had one epoch of a bundle."""
    had = [epoch for server in servers for epoch in server.epochs]
    assert len(had) == len(set(had)), sorted(str(epoch) for epoch in had if had.count(epoch) > 1)


async def check_quiet(servers: list[Server], store: MemoryStore) -> None:
    """All is well again: within some seconds everybody names one owner, which serves."""
    for bundle in bundles_of(NAMESPACE, await division(store)):
        topic = next((topic for topic in TOPICS if bundle.holds(topic)), None)
        if topic is None:
            continue
        async with asyncio.timeout(30):
            while True:
                named = {await server.use(topic, authoritative=False) for server in servers}
                if len(named) == 1 and None not in named:
                    break
                await asyncio.sleep(0.5)
        owning = [server.name for server in servers if server.ownership.owns(topic)]
        assert owning == list(named), f"{named} was named, {owning} serve"
        record = await bundle_owners(store).get(bundle.noun)
        assert record is not None
        assert [record.record.broker_id] == owning
        assert [server.name for server in servers if topic in server.open] == owning, "nobody else has it open"


async def history(seed: int) -> None:
    rng = random.Random(seed)
    tree = MemoryTree()
    store = MemoryStore(tree)
    await namespace_records(store).create((NAMESPACE.tenant, NAMESPACE.local_name), NamespaceRecord(bundles=BUNDLES))
    await storage_format_record(store).create(None, StorageFormat(storage_format=2))
    servers = [Server(f"b{number}", tree, rng) for number in range(3)]
    for number, server in enumerate(servers):
        await server.ownership.start(server.name, {"pulsar": f"host:{number}"})
    tasks = [
        asyncio.ensure_future(work)
        for work in (disturb(servers, rng), *(use(servers, rng, splits=seed % 2 == 1) for _ in range(4)))
    ]
    await asyncio.sleep(HISTORY_S)
    check_epochs(servers)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError), outcome
    for server in servers:
        server.session.loses_answers = 0.0
        if server.session.asleep:
            server.session.wake()
        if server.session.state is SessionState.LOST:
            server.session.renew()
        server.session.mend()
    await check_quiet(servers, store)
    check_epochs(servers)
    for server in servers:
        await server.ownership.release_all()
        await server.ownership.aclose()
    for bundle in bundles_of(NAMESPACE, await division(store)):
        assert await bundle_owners(store).get(bundle.noun) is None, "all went in order"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_histories_of_brokers_that_lose_touch(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            run_simulated(history(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


async def test_a_lookup_while_nobody_answers_is_refused_in_time() -> None:
    rng = random.Random(1)
    tree = MemoryTree()
    store = MemoryStore(tree)
    await namespace_records(store).create((NAMESPACE.tenant, NAMESPACE.local_name), NamespaceRecord(bundles=BUNDLES))
    server = Server("b0", tree, rng)
    await server.ownership.start("b0", {"pulsar": "host:0"})
    assert await server.ownership.locate(TOPICS[0]) == Here()
    server.session.cut()
    assert await server.ownership.locate(TOPICS[0]) == Here(), "what it has it goes on with"
    other = next(topic for topic in TOPICS if not server.ownership.owns(topic))
    assert await server.use(other, authoritative=True) is None
    server.session.mend()
    assert await server.use(other, authoritative=True) == "b0"
    await server.ownership.aclose()


async def test_a_release_and_an_acquisition_whose_answers_are_lost_were_done() -> None:
    """Rule 4: they count as not done, until the record says otherwise."""
    rng = random.Random(1)
    tree = MemoryTree()
    store = MemoryStore(tree)
    await namespace_records(store).create((NAMESPACE.tenant, NAMESPACE.local_name), NamespaceRecord(bundles=BUNDLES))
    server = Server("b0", tree, rng)
    await server.ownership.start("b0", {"pulsar": "host:0"})
    server.session.loses_answers = 1.0
    bundle = bundle_of(TOPICS[0], BUNDLES)
    assert await server.ownership.locate(TOPICS[0]) == Here(), "the record is found to be its own"
    with pytest.raises(ServiceNotReadyError):
        await server.ownership.release(bundle)
    assert server.ownership.owns(TOPICS[0]), "as far as it knows"
    await asyncio.sleep(1)
    assert not server.ownership.owns(TOPICS[0])
    assert await bundle_owners(store).get(bundle.noun) is None
    await server.ownership.aclose()
