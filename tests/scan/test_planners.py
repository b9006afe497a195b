"""Both planners on a cluster of processes: the same answers from brokers and from ZooKeeper, whoever serves a topic."""

from __future__ import annotations

import asyncio
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from cepheid_decode import (
    BadOptionError,
    HistoryPlan,
    MessagePosition,
    NoSuchTopicError,
    PlanSource,
    PlanUnavailableError,
    ReadSettings,
    ScanCounters,
    TopicSelection,
)
from cepheid_metadata import PageLimits, StoredChain, keys, read_chain
from cepheid_metadata.chain_pages import changes, split
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.edges import end_of, first_of
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.ledger_ends import EndWatch, LacCalls, newest_ends
from cepheid_scan.open_planner import find_ledger, open_planner
from cepheid_scan.planner import Planner
from cepheid_scan.splits import TopicRange, cut_ranges
from cepheid_wire import TopicName
from tests.scan.scan_cluster import ADMIN, FULL, ScanCluster, ask_raw, running_cluster


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScanCluster]:
    with running_cluster(tmp_path_factory.mktemp("planners") / "cluster") as world:
        yield world
        close_channels()


@pytest.fixture(params=["plan service", "zookeeper"])
def planner(request: pytest.FixtureRequest, world: ScanCluster) -> Iterator[Planner]:
    source = world.source() if request.param == "plan service" else world.by_zookeeper
    with closing(open_planner(source)) as planner:
        yield planner


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


def entries_of(plan: HistoryPlan) -> list[tuple[str, int, int, bytes]]:
    """Everything that the plan names, read by its tasks."""
    ranges = [TopicRange(history, first_of(history), end_of(history)) for history in plan.topics]
    found: list[tuple[str, int, int, bytes]] = []
    for task in cut_ranges(ranges, plan, target_bytes=1 << 20):
        source = EntrySource(dict(task.bookies), task.ticket, ReadSettings(), ScanCounters(), replan=None)
        for piece in task.pieces:
            for group in source.read(piece):
                found += [
                    (piece.topic, piece.ledger_id, group.first_entry_id + place, bytes(payload)[-5:])
                    for place, payload in enumerate(group.payloads())
                ]
    return found


@pytest.mark.slow
def test_a_partitioned_topic_whoever_serves_its_parts(world: ScanCluster, planner: Planner) -> None:
    name = f"parted-{type(planner).__name__}"
    world.admin.request("PUT", f"{ADMIN}/{name}/partitions", body=6)
    stored: list[tuple[str, int, int, bytes]] = []
    for index in range(6):
        if index == 4:
            continue  # nobody has used it
        for round_number in range(2):
            payloads = [b"%d-%d-%d" % (index, round_number, number) for number in range(3)]
            places = world.publish(f"{name}-partition-{index}", payloads)
            stored += [(f"{FULL}/{name}-partition-{index}", *at, body[-5:]) for at, body in zip(places, payloads, strict=True)]
            if round_number == 0:
                world.unload(f"{name}-partition-{index}")
    topics = planner.topics(TopicSelection((name,)))
    assert topics == [f"{FULL}/{name}-partition-{index}" for index in range(6)]

    def is_told() -> bool:  # ZooKeeper's planner sees what a bookie knows to be confirmed: a moment later
        return entries_of(planner.plan(topics)) == stored

    eventually(is_told)
    plan = planner.plan(topics)
    assert [history.partition for history in plan.topics] == list(range(6))
    assert all(ledger.size_bytes > 0 for history in plan.topics for ledger in history.ledgers if ledger.last_entry_id >= 0)
    assert set(plan.bookies) == {"bookie-1", "bookie-2", "bookie-3"}
    assert planner.topics(TopicSelection((name,), partitions=frozenset({1, 5}))) == [topics[1], topics[5]]
    (single,) = planner.plan([topics[2]]).topics
    assert single == plan.topics[2]


@pytest.mark.slow
def test_planners_agree(world: ScanCluster) -> None:
    for _ in range(3):
        world.publish("agreed", [bytes(500)] * 7)
        world.unload("agreed")
    world.publish("agreed", [bytes(500)] * 2)
    with closing(open_planner(world.source())) as first, closing(open_planner(world.by_zookeeper)) as second:
        told = first.plan([f"{FULL}/agreed"])
        eventually(lambda: second.plan([f"{FULL}/agreed"]).topics == told.topics)
        assert second.plan([f"{FULL}/agreed"]).bookies == told.bookies
        again = first.plan([f"{FULL}/agreed"])
        assert again.topics == told.topics, "closed ledgers from memory, the open one anew"


@pytest.mark.slow
def test_planners_agree_on_topics_that_are_called_like_partitions(world: ScanCluster) -> None:
    """Of a topic that is not there, and of one that is not partitioned."""
    names = ["odd-none-partition-0", "odd-none-partition-1", "odd-plain", "odd-plain-partition-0", "odd-plain-partition-1"]
    for name in names:
        world.publish(name, [b"a"])
    expected = [f"{FULL}/{name}" for name in names]
    with closing(open_planner(world.source())) as first, closing(open_planner(world.by_zookeeper)) as second:
        for planner in (first, second):
            assert sorted(planner.topics(TopicSelection(pattern="odd-.*"))) == sorted(expected)
            assert planner.topics(TopicSelection(tuple(names[:2]))) == expected[:2]
        told = first.plan(expected)
        assert [history.topic for history in told.topics] == expected
        eventually(lambda: second.plan(expected).topics == told.topics)
        assert sorted(topic for topic, *_ in entries_of(told)) == sorted(expected)


def test_topics_by_pattern(world: ScanCluster, planner: Planner) -> None:
    mark = type(planner).__name__
    for name in ("x", "y", "other"):
        world.publish(f"p-{mark}-{name}", [b"a"])
    world.admin.request("PUT", f"{ADMIN}/p-{mark}-z/partitions", body=2)
    found = planner.topics(TopicSelection(pattern=f"{FULL}/p-{mark}-[xyz]"))
    assert found == [f"{FULL}/p-{mark}-{name}" for name in ("x", "y", "z-partition-0", "z-partition-1")]
    assert planner.topics(TopicSelection(pattern=f"p-{mark}-o.*")) == [f"{FULL}/p-{mark}-other"]
    with pytest.raises(NoSuchTopicError, match="no topic matches"):
        planner.topics(TopicSelection(pattern=f"{FULL}/nothing-.*"))
    assert planner.topics(TopicSelection(pattern=f"{FULL}/nothing-.*", fail_on_missing=False)) == []
    for bad in ("persistent://pub.*/default/x", "a/b", f"{FULL}/(", "non-persistent://public/default/.*"):
        with pytest.raises(BadOptionError):
            planner.topics(TopicSelection(pattern=bad))


def test_topics_that_are_not_there(world: ScanCluster, planner: Planner) -> None:
    world.publish("flights", [b"a"])
    with pytest.raises(NoSuchTopicError, match=r"flihgts does not exist; similar: .*/flights"):
        planner.topics(TopicSelection(("flihgts", "flights")))
    assert planner.topics(TopicSelection(("flihgts", "flights"), fail_on_missing=False)) == [f"{FULL}/flights"]
    with pytest.raises(NoSuchTopicError, match="nothing"):
        planner.plan([f"{FULL}/nothing"])
    with pytest.raises(NoSuchTopicError):
        planner.topics(TopicSelection(("no-tenant/there/x",)))
    with pytest.raises(BadOptionError, match="not persistent"):
        planner.topics(TopicSelection(("non-persistent://public/default/x",)))
    with pytest.raises(BadOptionError, match="parts"):
        planner.topics(TopicSelection(("a/b",)))


def test_every_schema_version_is_planned(world: ScanCluster, planner: Planner) -> None:
    topic = f"typed-{type(planner).__name__}"
    world.publish(topic, [b"a"])
    record = '{"type": "record", "name": "Row", "fields": [%s]}'
    definitions = [record % "", record % '{"name": "note", "type": ["null", "string"], "default": null}']
    for definition in definitions:
        body = {"type": "AVRO", "schema": definition, "properties": {"a": "b"}}
        world.admin.request("POST", f"/admin/v2/schemas/public/default/{topic}/schema", body=body)
    plan = planner.plan([f"{FULL}/{topic}"], schemas=True)
    versions = plan.schemas[f"{FULL}/{topic}"]
    assert [version.definition.decode() for version in versions] == definitions
    assert [version.version for version in versions] == [bytes(8), bytes(7) + b"\1"]
    assert [(version.kind, dict(version.properties)) for version in versions] == [("AVRO", {"a": "b"})] * 2
    assert planner.plan([f"{FULL}/{topic}"]).schemas == {}


def test_where_a_subscription_stands(world: ScanCluster, planner: Planner) -> None:
    topic = f"held-{type(planner).__name__}"
    stored = world.publish(topic, [b"a", b"b", b"c"])
    world.admin.request("PUT", f"{ADMIN}/{topic}/subscription/at-start", body={"ledgerId": stored[1][0], "entryId": stored[1][1]})
    world.admin.request("PUT", f"{ADMIN}/{topic}/subscription/at-end")
    assert planner.subscription_position(f"{FULL}/{topic}", "at-start") == MessagePosition(*stored[1])
    assert planner.subscription_position(f"{FULL}/{topic}", "at-end") == MessagePosition(stored[2][0], stored[2][1] + 1)
    with pytest.raises(BadOptionError, match="at-end, at-start"):
        planner.subscription_position(f"{FULL}/{topic}", "nobody")


def test_a_topic_made_anew_is_another_one(world: ScanCluster, planner: Planner) -> None:
    topic = f"anew-{type(planner).__name__}"
    world.publish(topic, [b"old"] * 3)
    (old,) = planner.plan([f"{FULL}/{topic}"]).topics
    world.admin.request("DELETE", f"{ADMIN}/{topic}?force=true")
    with pytest.raises(NoSuchTopicError):
        planner.plan([f"{FULL}/{topic}"])
    world.publish(topic, [b"new"])
    (new,) = planner.plan([f"{FULL}/{topic}"]).topics
    assert new.incarnation != old.incarnation
    assert new.ledgers[0].ledger_id > old.ledgers[-1].ledger_id


def test_how_far_a_trimmed_ledger_went(world: ScanCluster, planner: Planner) -> None:
    topic = f"went-{type(planner).__name__}"
    ((ledger_id, _), *_) = world.publish(topic, [b"a"] * 4)
    world.unload(topic)
    world.publish(topic, [b"b"])
    world.admin.request("DELETE", f"{ADMIN}/{topic}/truncate")

    def is_trimmed() -> bool:
        return ledger_id not in [ledger.ledger_id for ledger in planner.plan([f"{FULL}/{topic}"]).topics[0].ledgers]

    eventually(is_trimmed)
    eventually(lambda: planner.deleted_ledger_end(ledger_id) == 3)
    assert planner.deleted_ledger_end(999_999) is None


def test_what_became_of_ledgers_that_left_a_chain(world: ScanCluster, planner: Planner) -> None:
    """Of one with entries the record tells for a while; of an empty one, as every restart of a broker leaves it, there is none."""
    topic = f"became-{type(planner).__name__}"

    def look() -> tuple[str, list[int]]:
        (history,) = planner.plan([f"{FULL}/{topic}"]).topics
        return history.incarnation, [ledger.ledger_id for ledger in history.ledgers]

    world.admin.request("PUT", f"{ADMIN}/{topic}")
    world.admin.request("PUT", f"{ADMIN}/{topic}/subscription/s")  # cursors have ledgers, too
    world.unload(topic)
    incarnation, (empty, *_) = look()
    world.unload(topic)
    ((written, _), *_) = world.publish(topic, [b"a"] * 4)
    assert empty not in look()[1]
    assert planner.gone_ledgers(f"{FULL}/{topic}", incarnation, range(empty, written)) == {}
    world.unload(topic)
    world.admin.request("DELETE", f"{ADMIN}/{topic}/truncate")
    eventually(lambda: written not in look()[1])
    _, (head, *_) = look()
    assert planner.gone_ledgers(f"{FULL}/{topic}", incarnation, range(empty, head)) == {written: 3}
    assert planner.gone_ledgers(f"{FULL}/{topic}", incarnation, range(empty, written)) == {}
    assert planner.gone_ledgers(f"{FULL}/{topic}", incarnation, range(written + 1, head)) == {}
    assert planner.gone_ledgers(f"{FULL}/{topic}", "another", range(empty, head)) == {}
    assert planner.gone_ledgers(f"{FULL}/another", incarnation, range(empty, head)) == {}
    eventually(lambda: planner.deleted_ledger_end(written) == 3)
    assert planner.gone_ledgers(f"{FULL}/{topic}", incarnation, range(empty, head)) == {written: 3}, "it is deleted by now"


def test_a_chain_in_pages_is_planned_like_one_in_a_record(world: ScanCluster) -> None:
    for number in range(7):
        world.publish("paged", [b"a"] * (number + 1))
        world.unload("paged")
    with closing(open_planner(world.by_zookeeper)) as planner:
        before = planner.plan([f"{FULL}/paged"]).topics[0]
    assert [ledger.last_entry_id for ledger in before.ledgers] == list(range(7))
    cut_into_pages(world, "paged")
    with closing(open_planner(world.by_zookeeper)) as planner:
        assert planner.plan([f"{FULL}/paged"]).topics[0] == before
    with closing(open_planner(world.source())) as planner:
        assert [ledger.ledger_id for ledger in planner.plan([f"{FULL}/paged"]).topics[0].ledgers][:7] == [
            ledger.ledger_id for ledger in before.ledgers
        ]
    assert len(world.admin.request("GET", f"{ADMIN}/paged/internal-info")["ledgers"]) >= 7


def cut_into_pages(world: ScanCluster, topic: str) -> None:
    """Of a topic that no broker serves now."""
    name = TopicName.parse(f"{FULL}/{topic}")

    async def cut() -> None:
        store = await open_store(world.cluster.metadata_url, Ports())
        try:
            found = await read_chain(store, name)
            assert found is not None
            stored = StoredChain(found.record, found.record)
            after = split(found.record, stored, PageLimits(record_ledgers=1, page_ledgers=2, plain_ledgers=2))
            assert len(after.pages) == 2
            await store.multi(changes(keys.chain_key(name), found.version, stored, after))
        finally:
            await store.aclose()

    asyncio.run(cut())


def test_one_ledger_is_found_again(world: ScanCluster) -> None:
    ((ledger_id, _),) = world.publish("sought", [b"a"])
    for source in (world.source(), world.by_zookeeper):
        found = find_ledger(source, f"{FULL}/sought", ledger_id)[0]
        assert found is not None
        assert found.ledger_id == ledger_id
        assert find_ledger(source, f"{FULL}/sought", 999_999)[0] is None
        assert find_ledger(source, f"{FULL}/nothing", ledger_id)[0] is None


def test_the_protocol_port_sends_to_the_admin_port(world: ScanCluster) -> None:
    path = "/cepheid/v1/topics?topic=x%2Fy&a=b"
    sent = [ask_raw(f"http://127.0.0.1:{port}", "GET", path) for port in world.cluster.broker_ports.values()]
    assert sent == [(307, f"{url}{path}") for url in world.cluster.admin_urls]


@pytest.mark.slow
def test_the_open_ledgers_end_comes_from_the_bookies(world: ScanCluster) -> None:
    world.publish("open", [b"a"] * 5)
    with closing(open_planner(world.source())) as planner:
        plan = planner.plan([f"{FULL}/open"])
    (ledger,) = plan.topics[0].ledgers
    assert ledger.is_open
    eventually(lambda: newest_ends([ledger], plan.bookies, 5.0, LacCalls())[0].last_entry_id == 4)
    with pytest.raises(PlanUnavailableError, match="bookie-1: it is down"):
        newest_ends([ledger], {}, 1.0, LacCalls())
    wrong_key = replace(ledger, master_key=bytes(16))
    with pytest.raises(PlanUnavailableError, match="UNAUTHORIZED"):
        newest_ends([wrong_key], plan.bookies, 1.0, LacCalls())


@pytest.mark.slow
def test_a_watch_tells_from_memory(world: ScanCluster) -> None:
    world.publish("watched", [b"a"] * 2)
    topic = f"{FULL}/watched"
    with closing(open_planner(world.source())) as planner, closing(EndWatch(retry_s=20)) as watch:
        plan = planner.plan([topic])
        ledger_id = plan.topics[0].ledgers[-1].ledger_id
        watch.update(plan)

        def ends() -> dict[tuple[str, int], int]:
            return {key: end.last_entry_id for key, end in watch.ends().items()}

        eventually(lambda: ends() == {(topic, ledger_id): 1})
        for more in range(3):
            world.publish("watched", [b"b"])
            eventually(lambda: ends() == {(topic, ledger_id): 2 + more})  # noqa: B023
        before = watch.ends()[topic, ledger_id].size_bytes
        world.publish("watched", [b"b" * 100_000])
        eventually(lambda: ends() == {(topic, ledger_id): 5})
        assert 100_000 < watch.ends()[topic, ledger_id].size_bytes - before < 101_000, "it tells how large the entries are"
        rounds = [timeit.timeit(watch.ends, number=100) for _ in range(20)]
        assert min(rounds) < 100 * 0.0002, "0.2 ms each, at most, when nothing else runs"
        world.unload("watched")
        world.publish("watched", [b"c"])
        watch.update(planner.plan([topic]))
        eventually(lambda: list(ends().values()) == [0])
        assert (topic, ledger_id) not in watch.ends(), "it has ended: the plan tells where"


@pytest.mark.slow
def test_a_watch_that_hears_nothing_says_so(world: ScanCluster) -> None:
    world.publish("unheard", [b"a"])
    with closing(open_planner(world.source())) as planner:
        plan = planner.plan([f"{FULL}/unheard"])
    with closing(EndWatch(retry_s=0.5, wait_s=0.5)) as watch:
        watch.update(replace(plan, bookies={}))
        said: list[str] = []

        def has_failed() -> bool:
            try:
                watch.ends()
            except PlanUnavailableError as error:
                said.append(str(error))
                return True
            return False

        eventually(has_failed)
        assert "bookie-1: it is down" in said[0]
        watch.update(plan)
        eventually(lambda: not has_failed())


@pytest.mark.slow
def test_zookeeper_plans_while_no_broker_runs(world: ScanCluster) -> None:
    """What was acknowledged and has had its LAC told is read from the bookies, and nothing is recovered or fenced for it."""
    topic = f"{FULL}/orphan"
    for _ in range(2):
        world.publish("orphan", [b"first"] * 4)
        world.unload("orphan")
    stored = world.publish("orphan", [b"later"] * 3)
    with closing(open_planner(world.by_zookeeper)) as planner:
        eventually(lambda: len(entries_of(planner.plan([topic]))) == 11)
        for broker in world.cluster.broker_ports:
            world.cluster.kill(broker)
        try:
            plan = planner.plan([topic])
            assert [entry[1:3] for entry in entries_of(plan)][-3:] == stored
            assert plan.topics[0].ledgers[-1].is_open
            with (
                pytest.raises(PlanUnavailableError, match="nothing listens there"),
                closing(open_planner(world.source(retry_s=0.2))) as other,
            ):
                other.plan([topic])
        finally:
            for broker in world.cluster.broker_ports:
                world.cluster.start(broker)
    assert world.publish("orphan", [b"after"])[0] > stored[-1]


@pytest.mark.slow
def test_bookies_that_come_back_are_waited_for(world: ScanCluster) -> None:
    world.publish("waiting", [b"a"] * 3)
    topic = f"{FULL}/waiting"
    with closing(open_planner(world.by_zookeeper)) as planner:
        eventually(lambda: len(entries_of(planner.plan([topic]))) == 3)
        for bookie in world.cluster.bookie_ports:
            world.cluster.kill(bookie)
        starting = threading.Thread(target=lambda: [world.cluster.start(bookie) for bookie in world.cluster.bookie_ports])
        starting.start()
        try:
            assert planner.plan([topic]).topics[0].ledgers[-1].last_entry_id == 2
        finally:
            starting.join()


def test_a_wrong_root_is_no_empty_cluster(world: ScanCluster) -> None:
    with pytest.raises(BadOptionError, match="does not contain a cluster"):
        open_planner(PlanSource(metadata=f"{world.cluster.metadata_url}/elsewhere", retry_s=5))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [("rocksdb:///data", "service.url"), ("http://127.0.0.1:1", "looks like zk://"), ("zk://a b", "not host:port")],
)
def test_addresses_of_metadata(metadata: str, said: str) -> None:
    with pytest.raises(BadOptionError, match=said):
        open_planner(PlanSource(metadata=metadata))


@pytest.mark.slow
def test_nobody_at_zookeepers_address() -> None:
    with pytest.raises(PlanUnavailableError, match=r"127\.0\.0\.1:1"):
        open_planner(PlanSource(metadata="zk://127.0.0.1:1", retry_s=1))
