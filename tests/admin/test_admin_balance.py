"""Load reports, split bundles, isolation policies and settings that change while brokers run, by their calls and command lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_broker.admin import load_balance
from cepheid_broker.admin.load_balance import _shown
from cepheid_broker.balancing import BrokerReport, BundleOrders, HttpPeers, LoadBalancer
from cepheid_broker.balancing.balance import BalanceRules, BrokerState, balance
from cepheid_broker.balancing.balance_memory import BalanceMemory
from cepheid_broker.balancing.load_balancer import BalanceView
from cepheid_broker.balancing.loads import MESSAGES_PER_S, BundleLoad
from cepheid_broker.ownership import bundles_of
from cepheid_broker.settings import BalanceSettings
from cepheid_cli.app import app
from cepheid_cli.brokers import list_brokers
from cepheid_cli.cluster import balance_lines
from cepheid_metadata import LeaderRecord
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_wire import NamespaceName, TopicName
from tests.admin.admin_world import AdminWorld
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.broker.test_two_brokers_admin import Admin, two_brokers
from tests.support import wait_until

NAMESPACES = "/admin/v2/namespaces"
ISOLATION = "/admin/v2/clusters/standalone/namespaceIsolationPolicies"
POLICY = {
    "namespaces": ["public/iso.*"],
    "primary": ["a.example.*"],
    "secondary": ["b.example"],
    "auto_failover_policy": {"policy_type": "min_available", "parameters": {"min_limit": "2", "usage_threshold": "80"}},
}


def bundles(admin: AdminWorld, namespace: str) -> list[str]:
    found: list[str] = admin.get(f"{NAMESPACES}/public/{namespace}/bundles").json()["boundaries"]
    return found


def test_a_bundle_is_split_where_the_caller_says(admin: AdminWorld) -> None:
    assert admin.put(f"{NAMESPACES}/public/cut", json={"bundles": {"numBundles": 1}}).status_code == 204
    path = f"{NAMESPACES}/public/cut"
    for number in range(3):
        assert admin.put(f"/admin/v2/persistent/public/cut/t-{number}").status_code == 204
    hashes = admin.get(f"{path}/0x00000000_0xffffffff/topicHashPositions").json()
    assert (hashes["namespace"], hashes["bundle"], len(hashes["topicHashPositions"])) == ("public/cut", "0x00000000_0xffffffff", 3)
    assert admin.put(f"{path}/0x00000000_0xffffffff/split").status_code == 204
    assert bundles(admin, "cut") == ["0x00000000", "0x80000000", "0xffffffff"]
    positions = {"splitAlgorithmName": "specified_positions_divide"}
    answer = admin.put(f"{path}/0x80000000_0xffffffff/split", params=positions, json=[0xC0000000, 0xE0000000])
    assert answer.status_code == 204
    assert bundles(admin, "cut") == ["0x00000000", "0x80000000", "0xc0000000", "0xe0000000", "0xffffffff"]
    for number in range(3):
        topic = f"/admin/v2/persistent/public/cut/t-{number}"
        assert admin.put(f"{topic}/subscription/s").status_code in (200, 204)
        assert admin.get(f"/lookup/v2/topic/persistent/public/cut/t-{number}/bundle").text in [
            f"{start}_{end}" for start, end in zip(bundles(admin, "cut"), bundles(admin, "cut")[1:], strict=False)
        ]


def test_a_namespace_may_be_created_with_any_boundaries(admin: AdminWorld) -> None:
    ends = ["0x00000000", "0x10000000", "0xffffffff"]
    assert admin.put(f"{NAMESPACES}/public/uneven", json={"bundles": {"boundaries": ends}}).status_code == 204
    assert bundles(admin, "uneven") == ends
    half = {"splitAlgorithmName": "topic_count_equally_divide"}
    for number in range(4):
        admin.put(f"/admin/v2/persistent/public/uneven/t-{number}")
    assert admin.put(f"{NAMESPACES}/public/uneven/0x10000000_0xffffffff/split", params=half).status_code == 204
    assert len(bundles(admin, "uneven")) == 4


@pytest.mark.parametrize(
    ("bundle", "query", "body", "status", "why"),
    [
        ("0x00000000_0x40000000", {"splitAlgorithmName": "by_magic"}, None, 412, "is not one of range_equally_divide"),
        ("0x00000000_0x40000000", {"splitAlgorithmName": "specified_positions_divide"}, None, 412, "needs a body"),
        ("0x00000000_0x40000000", {"splitAlgorithmName": "specified_positions_divide"}, [1 << 31], 412, "not at 2147483648"),
        ("0x00000000_0x40000000", {"splitAlgorithmName": "topic_count_equally_divide"}, None, 412, "it has 0 topics"),
        ("0x00000000_0x20000000", {}, None, 412, "is not a bundle of"),
        ("0x00000000_0x40000000", {"splitAlgorithmName": "specified_positions_divide"}, ["x"], 400, "body"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(
    admin: AdminWorld, bundle: str, query: dict[str, str], body: Any, status: int, why: str
) -> None:
    admin.put(f"{NAMESPACES}/public/whole")
    answer = admin.put(f"{NAMESPACES}/public/whole/{bundle}/split", params=query, json=body)
    assert answer.status_code == status
    assert why in answer.json()["reason"]
    assert len(bundles(admin, "whole")) == 5


def test_isolation_policies_come_and_go(admin: AdminWorld) -> None:
    assert admin.get(ISOLATION).status_code == 404
    assert admin.post(f"{ISOLATION}/p", json=POLICY).status_code == 204
    assert admin.get(f"{ISOLATION}/p").json() == POLICY
    assert admin.get(ISOLATION).json() == {"p": POLICY}
    (broker,) = admin.get("/admin/v2/brokers").json()
    host = broker.rpartition(":")[0]
    assert admin.post(f"{ISOLATION}/here", json={"namespaces": ["public/.*"], "primary": [host]}).status_code == 204
    (shown,) = admin.get(f"{ISOLATION}/brokers").json()
    assert shown == admin.get(f"{ISOLATION}/brokers/{broker}").json()
    assert (shown["brokerName"], shown["policyName"], shown["isPrimary"], shown["primary"]) == (broker, "here", True, True)
    owned = admin.get(f"/admin/v2/brokers/standalone/{broker}/ownedNamespaces").json()
    assert owned["public/default/0x00000000_0x40000000"] == {
        "broker_assignment": "primary", "is_controlled": True, "is_active": True
    }  # fmt: skip
    for name in ("p", "here", "none"):
        assert admin.delete(f"{ISOLATION}/{name}").status_code == 204
    assert admin.get(f"{ISOLATION}/p").status_code == 404
    assert admin.get(f"{ISOLATION}/brokers/nobody:1").status_code == 404
    assert admin.get("/admin/v2/clusters/elsewhere/namespaceIsolationPolicies").status_code == 412


@pytest.mark.parametrize(
    "body",
    [
        {"namespaces": ["("], "primary": ["a"]},
        {"namespaces": [], "primary": ["a"]},
        {"namespaces": ["a/b"], "primary": []},
        {"namespaces": ["a/b"], "primary": ["a"], "auto_failover_policy": {"parameters": {"min_limit": "many"}}},
        {"namespaces": ["a/b"], "primary": ["a"], "autoFailoverPolicy": {}},
        {"namespaces": ["a/b"], "primary": ["a"], "unload_scope": "everything"},
        None,
    ],
)
def test_an_isolation_policy_that_cannot_be_used_is_refused(admin: AdminWorld, body: Any) -> None:
    assert admin.post(f"{ISOLATION}/bad", json=body).status_code == 400
    assert admin.get(f"{ISOLATION}/bad").status_code == 404


def test_a_load_report_has_the_shape_that_tools_read(admin: AdminWorld) -> None:
    admin.put("/admin/v2/persistent/public/default/loaded")
    admin.put("/admin/v2/persistent/public/default/loaded/subscription/s")
    report = admin.get("/admin/v2/broker-stats/load-report").json()
    assert report["numTopics"] >= 1
    assert report["bundles"] == list(report["lastStats"])
    assert set(report["cpu"]) == {"usage", "limit"}
    assert report["load"] >= 0
    assert any(stats["topics"] for stats in report["lastStats"].values())


def test_the_only_broker_of_a_cluster_is_listed_and_moves_nothing(admin: AdminWorld) -> None:
    def invoke(*words: str) -> str:
        result = admin.in_thread(lambda: CliRunner().invoke(app, [*words, "--admin-url", admin.standalone.admin_url]))
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    head, row = invoke("brokers", "list").splitlines()
    assert head.split() == ["broker", "address", "state", "load", "msg/s", "topics", "bundles"]
    assert row.split()[2] == "serving"
    assert "there is one broker: nothing can be moved" in invoke("cluster", "balance", "--dry-run")
    assert admin.post("/cepheid/v1/balance").status_code == 405


async def start_balancers(world: BrokersWorld, **settings: Any) -> list[LoadBalancer]:
    await storage_format_record(world.store).create(None, StorageFormat(storage_format=2))
    started = []
    for one in world.brokers:
        peers = HttpPeers(one.ownership, one.broker.peers)
        orders = BundleOrders(one.session, one.ownership, one.broker.own_load)  # type: ignore[arg-type]
        balancer = LoadBalancer(orders, peers, BalanceSettings(interval_s=0.05, **settings))
        one.broker.balancer = balancer
        balancer.start()
        started.append(balancer)
        await wait_until(lambda: any(each.is_leader for each in started))
    return started


def balanced(test: Callable[[BrokersWorld, Admin, Admin, list[LoadBalancer]], Awaitable[None]], **settings: Any) -> None:
    async def run(world: BrokersWorld, first: Admin, second: Admin) -> None:
        started = await start_balancers(world, **settings)
        try:
            await test(world, first, second, started)
        finally:
            for balancer in started:
                await balancer.aclose()

    two_brokers(run, bundles=16, rate_window_s=1000.0)  # rates stay as the test sets them


async def load(broker: OneBroker, count: int) -> None:
    """Open topics in as many bundles of this broker, each with a load of 0.1."""
    held = []
    for number in range(10_000):
        name = TopicName.parse(full(f"t-{number}"))
        bundle = await broker.ownership.bundle_of(name)
        if bundle not in held and await broker.ownership.owner_of(bundle) is None:
            held.append(bundle)
            await broker.ownership.locate(name, authoritative=True)
            topic = await broker.broker.topics.get(name, may_create=True)
            topic.published.message_rate_per_s = 0.1 * MESSAGES_PER_S
            if len(held) == count:
                return


@pytest.mark.slow
def test_any_broker_shows_what_would_move_and_does_it() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin, started: list[LoadBalancer]) -> None:
        await load(world.brokers[0], 4)
        shown = [(await admin("GET", "/cepheid/v1/balance")).json() for admin in (first, second)]
        for found in shown:
            assert found["leader"] == "broker-1"
            assert [broker["state"] for broker in found["brokers"]] == ["serving", "serving"]
            assert [(action["action"], action["from"], action["to"]) for action in found["plan"]] == [
                ("move", "broker-1", "broker-2")
            ] * 2
        done = (await second("POST", "/cepheid/v1/balance")).json()
        assert [action["error"] for action in done] == [None, None]
        assert len(world.brokers[0].ownership.owned_bundles()) == 2
        leader = (await second("GET", "/admin/v2/brokers/leaderBroker")).json()["brokerId"]
        assert f"http://{leader}" == world.brokers[0].admin_url

    balanced(test, enabled=False)


@pytest.mark.slow
def test_a_leader_that_does_not_answer_keeps_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balance, "_SHOWN_WITHIN_S", 0.1)

    async def test(world: BrokersWorld, first: Admin, second: Admin, started: list[LoadBalancer]) -> None:
        monkeypatch.setattr(started[0], "view", asyncio.Event().wait)
        answer = await second("GET", "/cepheid/v1/balance")
        assert (answer.status_code, "does not answer within 0.1 s" in answer.json()["reason"]) == (503, True)

    balanced(test, enabled=False)


@pytest.mark.slow
def test_the_command_line_shows_moves_and_switches_balancing() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin, started: list[LoadBalancer]) -> None:
        async def invoke(*words: str) -> list[str]:
            arguments = [*words, "--admin-url", world.brokers[1].admin_url]
            result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            assert result.exit_code == 0, result.output
            return str(result.stdout).splitlines()

        await load(world.brokers[0], 4)
        assert (await invoke("brokers", "list"))[1].split()[:1] == ["broker-1*"]
        lines = await invoke("cluster", "balance", "--dry-run")
        assert lines[0] == "balancing  OFF: cepheid cluster balance --on; leader broker-1"
        assert sum(line.startswith("would      move public/default/") for line in lines) == 2
        done = await invoke("cluster", "balance")
        assert len(done) == 2
        assert all(" from broker-1 to broker-2 (loads: broker-1 0." in line for line in done)
        await invoke("cluster", "balance", "--on")
        values = (await first("GET", "/admin/v2/brokers/configuration/values")).json()
        assert values == {"balance.enabled": "true"}
        assert json.loads("\n".join(await invoke("cluster", "balance", "--dry-run", "--json")))["settings"]["enabled"] is True
        assert "balance.tolerance" in (await first("GET", "/admin/v2/brokers/configuration")).json()
        assert (await first("POST", "/admin/v2/brokers/configuration/balance.tolerance/7")).status_code == 412
        assert (await first("POST", "/admin/v2/brokers/configuration/balance.tolerance/0.5")).status_code == 204
        assert (await second("DELETE", "/admin/v2/brokers/configuration/balance.tolerance")).status_code == 204
        assert (await second("GET", "/admin/v2/brokers/configuration/values")).json() == {"balance.enabled": "true"}

    balanced(test, enabled=False)


@pytest.mark.slow
def test_a_bundle_is_split_at_its_owner_whichever_broker_is_asked() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin, started: list[LoadBalancer]) -> None:
        owner = world.brokers[0]
        name = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(name)
        answer = await second("PUT", f"{NAMESPACES}/public/default/{bundle.range}/split?unload=true")
        assert answer.status_code == 204
        assert (await first("GET", f"{NAMESPACES}/public/default/bundles")).json()["numBundles"] == 17
        assert not owner.ownership.owns(name)

    balanced(test, enabled=False)


@pytest.mark.page
def test_the_page_shows_what_the_commands_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown_balance()
    monkeypatch.setattr("cepheid_cli.brokers.connect_admin", lambda url: SimpleNamespace(call=lambda method, path: found))
    list_brokers()
    page = (Path(__file__).parents[2] / "docs" / "ownership.md").read_text()
    listed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in (*listed, *balance_lines(found)):
        assert line in page.splitlines(), line


def test_a_broker_that_is_not_steady_is_listed_as_such() -> None:
    states = [BrokerState("broker-1", ()), BrokerState("broker-2", (), takes=False, note="it starts again and again")]
    assert [broker["state"] for broker in shown(states)["brokers"]] == ["serving", "unsteady"]


def shown_balance() -> dict[str, Any]:
    """What the leader of three brokers shows after the third was added."""
    names = iter(bundles_of(NamespaceName("public", "default"), 8))
    loads = {"broker-1": (0.24, 0.18, 0.12, 0.06), "broker-2": (0.21, 0.15, 0.13, 0.08), "broker-3": ()}

    def report(broker: str) -> BrokerReport:
        """One hundred topics are as much load as one hundred messages a second."""
        held = [BundleLoad(str(next(names)), MESSAGES_PER_S * load - 100, topics=100) for load in loads[broker]]
        return BrokerReport(broker, tuple(held), started_at_ms=0, reported_at_ms=10**6)

    reports = {broker: report(broker) for broker in loads}
    states = BalanceMemory().states(0.0, list(reports.values()))
    return shown(states, reports)


def shown(states: Sequence[BrokerState], reports: Mapping[str, BrokerReport] = MappingProxyType({})) -> dict[str, Any]:
    leader = LeaderRecord(broker_id="broker-1", since_ms=0)
    view = BalanceView(leader, BalanceSettings(), states, reports, (), (), balance(states, BalanceRules()))
    addresses = {state.broker_id: {"http": f"10.0.0.{number}:8080"} for number, state in enumerate(states, 1)}
    context: Any = SimpleNamespace(broker=SimpleNamespace(ownership=SimpleNamespace(brokers=addresses)))
    return _shown(context, view)
