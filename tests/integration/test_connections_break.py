"""Connections cut and stalled between processes that all live."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pulsar
import pytest

from tests.integration.proxied_cluster import ProxiedCluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared() -> Iterator[ProxiedCluster]:
    with ProxiedCluster() as cluster:
        yield cluster


@pytest.fixture
def proxied(shared: ProxiedCluster, chaos_round: int) -> Iterator[ProxiedCluster]:
    yield shared
    shared.heal()


@pytest.mark.parametrize("how", ["refuse", "stall"])
def test_a_bookie_that_the_broker_cannot_reach_is_replaced(proxied: ProxiedCluster, how: str) -> None:
    """It is registered all the time: the broker alone knows that it is not there."""
    with proxied.workload(f"bookie-{how}") as work:
        victim = proxied.ensemble(work.topic)[0]
        work.fault(how)
        getattr(proxied.bookies[victim], how)()
        work.goes_on(receipts=200)
        proxied.wait_until_replaced(victim, work.topic)
        assert victim in proxied.writable()
        work.fault("heal")
        proxied.bookies[victim].heal()
        work.goes_on()
        work.ends_well()


def test_connections_to_bookies_that_break_now_and_then_repeat_nothing(proxied: ProxiedCluster) -> None:
    with proxied.workload("bookies-cut", types="Exclusive,Key_Shared") as work:
        for name, proxy in proxied.bookies.items():
            work.fault(f"cut of {name}")
            proxy.cut()
            work.goes_on()
        work.ends_well()


def test_a_broker_cut_off_from_zookeeper_for_less_than_its_session_goes_on(proxied: ProxiedCluster) -> None:
    with proxied.workload("zookeeper-cut") as work:
        work.fault("refuse")
        proxied.zookeepers["broker-1"].refuse()
        work.goes_on(receipts=200)
        work.fault("heal")
        proxied.zookeepers["broker-1"].heal()
        work.goes_on(receipts=200)
        work.ends_well()


def test_a_broker_cut_off_from_zookeeper_for_longer_opens_its_topics_again(proxied: ProxiedCluster) -> None:
    """Its session ended while it could not know: it goes on, as nobody fenced its ledgers, and opens anew when it hears."""
    with proxied.workload("zookeeper-stalled") as work:
        owner = proxied.owner(work.topic)
        assert owner
        work.fault("stall")
        stalled_at = time.monotonic()
        proxied.zookeepers["broker-1"].stall()
        work.goes_on(receipts=100)
        proxied.wait_until(lambda: proxied.owner(work.topic) == "", "the session has ended")
        time.sleep(0.5)  # it does not know it yet, and goes on
        work.goes_on()
        with work.connections_end("heal"):
            proxied.zookeepers["broker-1"].heal()
            proxied.wait_until(lambda: proxied.owner(work.topic) == owner, "the topic is owned again")
            work.goes_on()
        # Acknowledgements from just before the outage on are not saved: who got no response for them gets their messages again.
        work.ends_well(ack_window_s=2.0 + time.monotonic() - stalled_at)


# Two brokers, of which one is cut off in one direction only


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[ProxiedCluster]:
    with ProxiedCluster(bookies=3, brokers=2) as cluster:
        yield cluster


@pytest.fixture
def pair(shared_pair: ProxiedCluster, chaos_round: int) -> Iterator[ProxiedCluster]:
    yield shared_pair
    shared_pair.heal()


def said(cluster: ProxiedCluster, what: str) -> Mapping[str, int]:
    return {name: cluster.log(name).count(what) for name in cluster.brokers}


def test_a_broker_that_reaches_zookeeper_but_not_its_peers_keeps_its_topics(pair: ProxiedCluster) -> None:
    """Brokers take one another for silent. Each answers the challenge of the other, and clients notice nothing."""
    with pair.workload("peers-cut") as work:
        owner, before = pair.owner(work.topic), said(pair, "broker.out_of_reach")
        work.fault("peers refused")
        for proxy in pair.brokers.values():
            proxy.refuse_who_says(b"cepheid-broker")
        pair.wait_until(lambda: all(said(pair, "broker.out_of_reach")[name] > before[name] for name in before), "both are alone")
        work.goes_on(receipts=200)
        assert pair.owner(work.topic) == owner
        work.fault("heal")
        opened = said(pair, "client_version='cepheid-broker")
        pair.heal()
        pair.wait_until(
            lambda: all(count > opened[name] for name, count in said(pair, "client_version='cepheid-broker").items()),
            "brokers hear each other again",
        )
        work.goes_on()
        work.ends_well()


def test_a_broker_that_reaches_its_peers_but_not_zookeeper_is_not_challenged(pair: ProxiedCluster) -> None:
    """Not as long as its session lasts; its bundles are free then, for whoever is asked."""
    with pair.workload("zookeeper-of-one") as work:
        owner, before = pair.owner(work.topic), said(pair, "broker.challenged")
        other = next(name for name in pair.brokers if name != owner)
        work.fault("stall")
        stalled_at = time.monotonic()
        pair.zookeepers[owner].stall()
        work.goes_on(receipts=200)
        assert pair.owner(work.topic) == owner
        assert said(pair, "broker.challenged") == before
        pair.wait_until(lambda: pair.owner(work.topic) == "", "its session has ended")
        with work.connections_end("another broker is asked"):
            client = pulsar.Client(f"pulsar://{pair.brokers[other].address}")
            client.create_producer(work.topic).close()
            client.close()
            assert pair.owner(work.topic) == other
            pair.zookeepers[owner].heal()
            work.goes_on()
        work.ends_well(ack_window_s=2.0 + time.monotonic() - stalled_at)
