"""Probes, and the figures that Prometheus scrapes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from cepheid_bookie import RealDisk
from cepheid_ports.prometheus import Family, Sample, counter, encode, gauge, histogram
from tests.admin.admin_world import NAMESPACE, AdminWorld, running_admin
from tests.support import wait_until

DOCS = Path(__file__).parents[2] / "docs" / "admin.md"
IN_A_CLUSTER = (  # tests of the roles (tests/bookie, tests/cli) and tests/broker/test_two_brokers_admin.py see them
    "cepheid_bookie_ready",
    "cepheid_broker_balance_leader",
    "cepheid_broker_balance_moves_total",
    "cepheid_broker_balance_refused_total",
    "cepheid_broker_balance_splits_total",
    "cepheid_broker_brokers_known",
    "cepheid_broker_bundles_acquired_total",
    "cepheid_broker_bundles_lost_total",
    "cepheid_broker_bundles_owned",
    "cepheid_broker_bundles_released_total",
    "cepheid_broker_hand_overs_failed_total",
    "cepheid_broker_lookups_waited_total",
    "cepheid_broker_lookups_waiting",
    "cepheid_broker_peer_calls_failed_total",
    "cepheid_broker_peer_calls_total",
    "cepheid_broker_peers_challenged_total",
    "cepheid_broker_peers_gone_total",
    "cepheid_broker_peers_heard",
    "cepheid_broker_ready",
    "cepheid_broker_sessions_lost_total",
    "cepheid_broker_topics_moved_total",
    "cepheid_metadata_connected",
)
FULL = "persistent://public/default"
SAMPLE = re.compile(r'(?P<name>[a-z_:][a-z0-9_:]*)(\{(?P<labels>([a-z_]+="([^"\\\n]|\\.)*",?)*)\})? (?P<value>\S+)')


def scraped(text: str) -> dict[str, float]:
    """Sums over labels, by name; checks the format on the way."""
    values: dict[str, float] = {}
    described: list[str] = []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in described, f"{name} has two blocks"
            assert (kind == "counter") == name.endswith("_total"), f"{name} is a {kind}"
            described.append(name)
        elif not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name = match["name"]
            assert name.startswith(described[-1]), f"{name} is outside of its block"
            values[name] = values.get(name, 0.0) + float(match["value"])
    return values


def metrics_of(admin: AdminWorld) -> dict[str, float]:
    return scraped(admin.get("/metrics").text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/status.html", "OK"),
        ("/health", "ok"),
        ("/ready", "ok"),
        ("/admin/v2/brokers/ready", "ok"),
        ("/admin/v2/brokers/health", "ok"),
    ],
)
def test_a_healthy_broker_says_so(admin: AdminWorld, path: str, body: str) -> None:
    answer = admin.get(path)
    assert (answer.status_code, answer.text) == (200, body)
    assert answer.headers["content-type"].startswith("text/plain")


def test_the_health_check_stores_a_message_out_of_sight(admin: AdminWorld) -> None:
    before = metrics_of(admin)["cepheid_bookie_added_entries_total"]
    assert admin.get("/admin/v2/brokers/health?topicVersion=V2").status_code == 200
    assert metrics_of(admin)["cepheid_bookie_added_entries_total"] == before + 1
    assert admin.get("/admin/v2/persistent/pulsar/system").json() == []


def test_the_version_is_bare_text(admin: AdminWorld) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", admin.get("/admin/v2/brokers/version").text)


def test_brokers_and_bookies_are_named(admin: AdminWorld) -> None:
    here = admin.standalone.admin_url
    assert admin.get("/admin/v2/brokers").json() == [here.removeprefix("http://")]
    assert admin.get("/admin/v2/brokers/standalone").json() == [here.removeprefix("http://")]
    assert admin.get("/admin/v2/brokers/nowhere").status_code == 404
    assert admin.get("/admin/v2/brokers/leaderBroker").json() == {"brokerId": here.removeprefix("http://"), "serviceUrl": here}
    assert admin.get("/admin/v2/bookies/all").json() == {"bookies": [{"bookieId": "bookie-1"}]}


@pytest.mark.parametrize("topic", ["made-by-a-client", "not-there-yet"])
def test_lookup_over_http_names_the_broker(admin: AdminWorld, topic: str) -> None:
    found = admin.get(f"/lookup/v2/topic/persistent/public/default/{topic}").json()
    assert found["brokerUrl"] == found["nativeUrl"] == admin.standalone.service_url
    assert found["httpUrl"] == admin.standalone.admin_url
    assert (found["brokerUrlTls"], found["brokerUrlSsl"]) == ("", ""), "strings, or the C++ client fails"
    assert admin.get(f"{NAMESPACE}/{topic}/partitions").status_code == 404, "a lookup creates nothing"


def test_lookup_of_what_cannot_be(admin: AdminWorld) -> None:
    override = {"autoTopicCreationOverride": {"allowAutoTopicCreation": False}}
    admin.put("/admin/v2/namespaces/public/closed", json=override)
    assert admin.get("/lookup/v2/topic/persistent/public/closed/t").status_code == 404
    assert admin.get("/lookup/v2/topic/persistent/public/nowhere/t").status_code == 404
    assert admin.get("/lookup/v2/topic/imaginary/public/default/t").status_code == 412


def test_the_scrape_is_prometheus_text(admin: AdminWorld) -> None:
    for path in ("/metrics", "/metrics/"):
        answer = admin.get(path)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        values = scraped(answer.text)
    assert 10e6 < values["process_resident_memory_bytes"] < 2e9
    assert values["cepheid_bookie_writable"] == 1
    assert values["cepheid_broker_tail_cache_limit_bytes"] > 0
    assert values["cepheid_bookie_journal_sync_duration_seconds_count"] > 0


@pytest.mark.page
def test_the_docs_list_every_metric(admin: AdminWorld) -> None:
    admin.publish(f"{FULL}/documented", [b"a"])  # some have samples only once there is something to count
    named = re.findall(r"^# TYPE (\w+) (\w+)$", admin.get("/metrics").text, re.MULTILINE)
    documented = re.findall(r"`((?:cepheid|process|pulsar)_\w+)`", DOCS.read_text())
    assert sorted(documented) == sorted([*(name for name, _ in named), *IN_A_CLUSTER])


def test_tail_reads_cause_no_bookie_read_and_publishing_is_counted(admin: AdminWorld) -> None:
    writer = admin.in_thread(lambda: admin.wire_client(f"{FULL}/tailed"))
    reader = admin.in_thread(lambda: admin.wire_client(f"{FULL}/tailed"))
    try:
        admin.in_thread(writer.open_producer)
        admin.in_thread(lambda: reader.subscribe("s", shared=False, earliest=True))
        before = metrics_of(admin)
        messages = reader.receive()
        for number in range(10):
            admin.in_thread(lambda number=number: writer.send(number, b"x" * 100))  # type: ignore[misc]
            assert admin.in_thread(lambda: next(messages).payload) == b"x" * 100
        after = metrics_of(admin)
    finally:
        writer.close()
        reader.close()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["cepheid_bookie_read_requests_total"] == 0
    assert grown["cepheid_bookie_added_entries_total"] == 10
    assert grown["cepheid_broker_published_messages_total"] == 10
    assert grown["cepheid_broker_delivered_messages_total"] == 10
    assert grown["cepheid_broker_tail_cache_hits_total"] >= 10
    assert after["cepheid_broker_connections"] >= 2
    assert after["cepheid_broker_topics"] >= 1


def test_catching_up_is_told_apart(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/caught-up/subscription/s", json={"ledgerId": -1, "entryId": -1})
    admin.publish(f"{FULL}/caught-up", [b"x" * 100] * 5)
    admin.put(f"{NAMESPACE}/caught-up/unload")  # the tail cache forgets the topic
    before = metrics_of(admin)
    reader = admin.in_thread(lambda: admin.wire_client(f"{FULL}/caught-up"))
    try:
        admin.in_thread(lambda: reader.subscribe("s", shared=False, earliest=True))
        messages = reader.receive()
        admin.in_thread(lambda: [next(messages) for _ in range(5)])
    finally:
        reader.close()
    assert metrics_of(admin)["cepheid_bookie_read_requests_total"] > before["cepheid_bookie_read_requests_total"]


def test_counters_never_fall_when_topics_are_unloaded(admin: AdminWorld) -> None:
    admin.publish(f"{FULL}/unloaded", [b"a"] * 7)
    before = metrics_of(admin)["cepheid_broker_published_messages_total"]
    admin.put(f"{NAMESPACE}/unloaded/unload")
    assert metrics_of(admin)["cepheid_broker_published_messages_total"] == before


def test_families_of_one_name_become_one_block() -> None:
    text = encode([gauge("a_bytes", "A.", 1, bookie="x"), counter("b_total", "B.", 2), gauge("a_bytes", "A.", 3.5, bookie="y")])
    assert text.splitlines() == [
        "# HELP a_bytes A.",
        "# TYPE a_bytes gauge",
        'a_bytes{bookie="x"} 1',
        'a_bytes{bookie="y"} 3.5',
        "# HELP b_total B.",
        "# TYPE b_total counter",
        "b_total 2",
    ]


def test_labels_and_numbers_are_written_as_the_format_wants() -> None:
    family = Family("a", "gauge", "Say \\ and\nbreak.", (Sample(math.inf, {"name": 'q"u\\o\nte'}),))
    assert encode([family]).splitlines() == ["# HELP a Say \\\\ and\\nbreak.", "# TYPE a gauge", 'a{name="q\\"u\\\\o\\nte"} +Inf']


def test_buckets_are_cumulative() -> None:
    text = encode([histogram("a_seconds", "A.", [(0.1, 3), (1.0, 0), (math.inf, 2)], 7.5, bookie="x")])
    assert text.splitlines()[2:] == [
        'a_seconds_bucket{bookie="x",le="0.1"} 3',
        'a_seconds_bucket{bookie="x",le="1"} 3',
        'a_seconds_bucket{bookie="x",le="+Inf"} 5',
        'a_seconds_sum{bookie="x"} 7.5',
        'a_seconds_count{bookie="x"} 5',
    ]


def test_backlogs_are_scraped_under_the_usual_names(admin: AdminWorld) -> None:
    for name in ("scraped-1", "scraped-2"):
        admin.put(f"{NAMESPACE}/{name}/subscription/s")
        admin.publish(f"{FULL}/{name}", [b"x" * 100] * 3)
    text = admin.get("/metrics").text
    assert re.search(r'pulsar_subscription_back_log\{cluster="standalone",topic="\S+/scraped-1",subscription="s"\} 3', text)
    values = scraped(text)
    assert values["pulsar_msg_backlog"] >= 6
    assert values["pulsar_storage_backlog_size"] > 600
    assert values["pulsar_topics_count"] >= 2
    assert values["cepheid_broker_metrics_subscriptions_left_out"] == 0
    assert 'pulsar_storage_size{cluster="standalone",namespace="public/default"}' in text


def test_series_of_subscriptions_are_bounded(admin: AdminWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_broker.admin.pulsar_metrics.MAX_SUBSCRIPTIONS", 2)
    monkeypatch.setattr("cepheid_broker.admin.pulsar_metrics.MAX_NAMESPACES", 0)
    for number in range(4):
        admin.put(f"{NAMESPACE}/bounded/subscription/s{number}")
    admin.publish(f"{FULL}/bounded", [b"x"])
    text = admin.get("/metrics").text
    assert text.count("pulsar_subscription_back_log{") == 2
    values = scraped(text)
    assert values["cepheid_broker_metrics_subscriptions_left_out"] >= 2
    assert values["cepheid_broker_metrics_topics_left_out"] >= 1
    assert "pulsar_msg_backlog{" not in text


def test_a_bookie_that_takes_no_entries_is_called_read_only_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk has less than what must stay free."""
    monkeypatch.setattr(RealDisk, "free_bytes", lambda disk: 1_000)
    with running_admin(tmp_path / "data") as admin:
        reason = "bookie-1 is read-only: its journal disk has 1,000 bytes free, fewer than storage.min_free_journal_bytes"
        (ready, problem) = admin.get("/ready").text.splitlines()
        assert ready == "ok", "what is stored can be read: restarting would not help"
        assert problem.startswith(reason)
        assert admin.get("/ready", headers={"host": "evil.example"}).text == "ok", "a page may have made this address its own"
        assert [bookie["state"] for bookie in admin.get("/cepheid/v1/bookies").json()["bookies"]] == ["readonly"]
        assert scraped(admin.get("/metrics").text)["cepheid_bookie_writable"] == 0
        answer = admin.get("/admin/v2/brokers/health")
        assert answer.status_code == 500
        assert reason in answer.text
        assert "start more bookies" not in answer.text


@pytest.mark.slow
def test_ledgers_whose_bookie_is_not_started_any_more_are_counted_and_said(tmp_path: Path) -> None:
    topic = "persistent://public/kept/t"
    with running_admin(tmp_path / "data", bookies=2) as admin:
        admin.keep_everything("kept")
        admin.publish(topic, [b"stored", b"twice"])
    with running_admin(tmp_path / "data", bookies=1) as admin:
        assert admin.get("/ready").text == "ok\nbookie-2 is not started: the setting `bookies` is 1"
        values = metrics_of(admin)
        assert (values["cepheid_bookies_known"], values["cepheid_bookies_registered"]) == (2, 1)
        assert values["cepheid_ledger_under_replicated"] == 0, "no topic is open yet"
        admin.publish(topic, [b"stored once"])
        admin.run(_wait_for_a_round(admin))
        assert metrics_of(admin)["cepheid_ledger_under_replicated"] == 1
        assert admin.get("/ready").text.splitlines()[-1].startswith("1 ledger of topics that are open here lacks a copy")


async def _wait_for_a_round(admin: AdminWorld) -> None:
    managed_ledgers = admin.standalone._serving.managed_ledgers
    await wait_until(lambda: managed_ledgers.under_replicated().ledgers > 0, what="the next round")
