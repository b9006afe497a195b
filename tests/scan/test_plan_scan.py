"""A bounded scan planned against a standalone server, and its tasks read: the right entries, wherever its edges lie."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from cepheid_decode import (
    EARLIEST,
    LATEST,
    BadOptionError,
    DataLossError,
    Edge,
    MessagePosition,
    NoSuchTopicError,
    PlanSource,
    PlanUnavailableError,
    ReadMode,
    ReadSettings,
    RowFilter,
    ScanCounters,
    ScanRequest,
    ScanSpec,
    ScanTask,
    TopicSelection,
)
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.open_planner import open_planner
from cepheid_scan.plan_scan import plan_ranges, plan_scan
from cepheid_testkit import ProcessCluster
from tests.support import free_port
from tests.wire_client import WireClient

FULL = "persistent://public/default"
ADMIN = "/admin/v2/persistent/public/default"
Place = tuple[int, int]


class World:
    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.source = PlanSource(service_url=cluster.service_url, retry_s=20)
        self.admin = AdminHttp(PlanSource(admin_url=cluster.admin_url, retry_s=20))

    def publish(self, topic: str, *rounds: int) -> list[Place]:
        """A ledger for each round, the last one stays open."""
        places: list[Place] = []
        for number, entries in enumerate(rounds):
            if number:
                self.admin.request("PUT", f"{ADMIN}/{topic}/unload")
            with WireClient(self.cluster.service_url, f"{FULL}/{topic}") as client:
                client.open_producer()
                places += [client.send(entry, bytes(100)) for entry in range(entries)]
        return places

    def request(self, *topics: str, **fields: object) -> ScanRequest:
        spec = ScanSpec(ReadMode.ENTRIES, ("topic",))
        return replace(
            ScanRequest(self.source, TopicSelection(topics), spec, target_task_bytes=2000, timestamp_skew_ms=0), **fields
        )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ProcessCluster(bookies=1) as cluster:
        world = World(cluster)
        retention = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        world.admin.request("POST", "/admin/v2/namespaces/public/default/retention", body=retention)
        yield world
        world.admin.close()
        close_channels()
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


def read(tasks: Sequence[ScanTask], spec: ScanSpec) -> list[Place]:
    found: list[Place] = []
    for task in tasks:
        source = EntrySource(dict(task.bookies), task.ticket, spec.settings, ScanCounters(), replan=None)
        for piece in task.pieces:
            for group in source.read(piece):
                found += [(group.ledger_id, entry_id) for entry_id in range(group.first_entry_id, group.last_entry_id + 1)]
    return found


def planned(request: ScanRequest) -> list[Place]:
    tasks, spec, _ = plan_scan(request)
    assert max((len(pickle.dumps(task)) for task in tasks), default=0) < 4096
    return read(tasks, spec)


@pytest.mark.slow
def test_the_whole_of_a_topic(world: World) -> None:
    places = world.publish("whole", 30, 1, 40)
    assert planned(world.request("whole")) == places
    tasks, spec, plan = plan_scan(world.request("whole"))
    assert len(tasks) > 3
    assert spec.plan_source == world.source
    assert all(task.ticket == plan.ticket != b"" for task in tasks)
    assert sum(task.size_bytes for task in tasks) > 70 * 100


def test_ranges_by_position(world: World) -> None:
    places = world.publish("ranges", 10, 10)

    def edge(place: int, index: int = -1) -> Edge:
        return Edge(positions=((f"{FULL}/ranges", MessagePosition(*places[place], index)),))

    assert planned(world.request("ranges", start=edge(5), end=edge(15))) == places[5:15]
    assert planned(world.request("ranges", start=edge(9), end=edge(10))) == places[9:10]
    assert planned(world.request("ranges", start=edge(12), end=edge(3))) == []
    assert planned(world.request("ranges", start=edge(5, 3), end=edge(15, 2))) == places[5:16], "filtered within both"
    assert planned(world.request("ranges", start=LATEST)) == []


def test_a_start_behind_the_end_is_refused_and_not_an_empty_range(world: World, caplog: pytest.LogCaptureFixture) -> None:
    places = world.publish("behind", 3, 3)
    ledger_id, last = places[-1]

    def request(ledger_id: int, entry_id: int, index: int = -1, *, fails: bool = True) -> ScanRequest:
        start = Edge(positions=((f"{FULL}/behind", MessagePosition(ledger_id, entry_id, index)),))
        spec = ScanSpec(ReadMode.ENTRIES, ("topic",), fail_on_data_loss=fails)
        return world.request("behind", start=start, spec=spec)

    assert planned(request(ledger_id, last + 1)) == [], "the next message: nothing is new"
    assert planned(request(ledger_id, last + 1, 3)) == []
    assert planned(request(places[0][0], 99)) == places[3:], "behind its ledger's end, so in the next one"
    for place in ((ledger_id, last + 2), (ledger_id + 1000, 0)):
        with pytest.raises(BadOptionError, match=rf"start {place[0]}:{place[1]} of {FULL}/behind .* end, {ledger_id}:{last + 1}"):
            plan_scan(request(*place))
        assert planned(request(*place, fails=False)) == []
        assert [text for text in caplog.messages if text.startswith("scan.start_behind_end: the start ")]
    assert planned(world.request("behind", start=LATEST)) == []


def test_a_stream_may_start_in_the_open_ledger_before_it_is_written(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ledger_id, last = world.publish("to-come", 3)[-1]
    with closing(open_planner(world.source)) as planner:
        plan = planner.plan([f"{FULL}/to-come"])

        def ranges(ledger_id: int, entry_id: int) -> list[MessagePosition]:
            start = Edge(positions=((f"{FULL}/to-come", MessagePosition(ledger_id, entry_id)),))
            found = plan_ranges(world.request("to-come", start=start), plan, planner, is_stream=True)
            return [each.first for each in found]

        assert ranges(ledger_id, last + 1) == [MessagePosition(ledger_id, last + 1)]
        assert "scan.start_behind_end" not in caplog.text
        assert ranges(ledger_id, last + 9) == [MessagePosition(ledger_id, last + 9)]
        assert "scan.start_behind_end" in caplog.text
        with pytest.raises(BadOptionError, match="created again since"):
            ranges(ledger_id + 1, 0)


def test_ranges_by_time(world: World) -> None:
    first = world.publish("times", 20)
    time.sleep(0.05)  # an instant between the two
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    second = world.publish("times", 0, 20)
    after = planned(world.request("times", start=Edge(publish_time_ms=between_ms)))
    before = planned(world.request("times", end=Edge(publish_time_ms=between_ms)))
    assert (before, after) == (first, second)
    wide = planned(world.request("times", start=Edge(publish_time_ms=between_ms), timestamp_skew_ms=3_600_000))
    assert wide == first + second, "rows are filtered by their own time"
    _, spec, _ = plan_scan(
        world.request(
            "times",
            start=Edge(publish_time_ms=between_ms),
            end=Edge(publish_time_ms=between_ms + 9),
            spec=ScanSpec(ReadMode.ENTRIES, ("topic",), RowFilter(publish_from_ms=5, publish_until_ms=between_ms + 4)),
        )
    )
    assert (spec.row_filter.publish_from_ms, spec.row_filter.publish_until_ms) == (between_ms, between_ms + 4)


def test_from_where_a_subscription_stands(world: World) -> None:
    places = world.publish("subscribed", 5, 5)
    ledger_id, entry_id = places[3]
    world.admin.request("PUT", f"{ADMIN}/subscribed/subscription/s", body={"ledgerId": ledger_id, "entryId": entry_id})
    assert planned(world.request("subscribed", start=Edge(subscription="s"))) == places[3:]
    with pytest.raises(BadOptionError, match="no subscription 'other': it has s"):
        plan_scan(world.request("subscribed", start=Edge(subscription="other")))


def test_several_topics_and_partitions(world: World) -> None:
    world.admin.request("PUT", f"{ADMIN}/parts/partitions", body=3)
    places = [place for index in (0, 2) for place in world.publish(f"parts-partition-{index}", 4, 4)]
    alone = world.publish("alone", 3)
    assert planned(world.request("parts", "alone")) == alone + places
    assert planned(replace(world.request("x"), topics=TopicSelection(("parts",), partitions=frozenset({2})))) == places[8:]
    assert planned(replace(world.request("x"), topics=TopicSelection(("parts",), partitions=frozenset({1})))) == []


def test_the_look_back_of_the_settings_is_planned(world: World) -> None:
    places = world.publish("looked-back", 9, 9, 9)
    start = Edge(positions=((f"{FULL}/looked-back", MessagePosition(*places[20])),))
    for look_back, expected in ((1000, [9, 9]), (6, [6]), (2, []), (0, [])):
        spec = ScanSpec(ReadMode.ENTRIES, ("topic",), settings=ReadSettings(chunk_lookback=look_back))
        (task,), _, _ = plan_scan(world.request("looked-back", start=start, spec=spec))
        assert [tail.last_entry_id - tail.first_entry_id + 1 for tail in task.pieces[0].before] == expected


def test_what_was_trimmed_before_the_start(world: World) -> None:
    places = world.publish("trimmed", 10, 10, 10)
    start = Edge(positions=((f"{FULL}/trimmed", MessagePosition(*places[4])),))
    world.admin.request("POST", f"{ADMIN}/trimmed/retention", body={"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    world.admin.request("POST", f"{ADMIN}/trimmed/trim")

    def kept() -> list[Place]:
        return planned(world.request("trimmed"))

    deadline = time.monotonic() + 20
    while len(kept()) > 20:
        assert time.monotonic() < deadline
        world.admin.request("POST", f"{ADMIN}/trimmed/trim")
        time.sleep(0.05)
    left = kept()
    with pytest.raises(DataLossError) as lost:
        plan_scan(world.request("trimmed", start=start))
    text = str(lost.value)
    assert f"{FULL}/trimmed" in text
    assert f"from {places[4][0]}:{places[4][1]} to before {left[0][0]}:0" in text
    assert "retention" in text
    assert "failOnDataLoss=false" in text
    assert "at least 6 entries" in text, "the trimmed ledger's record is still there"
    lenient = replace(world.request("trimmed").spec, fail_on_data_loss=False)
    assert planned(world.request("trimmed", start=start, spec=lenient)) == left
    assert planned(world.request("trimmed", start=EARLIEST)) == left


def test_a_subscription_may_stand_in_what_it_gave_up(world: World) -> None:
    """It has acknowledged a whole ledger, which is trimmed: nothing is lost."""
    places = world.publish("finished", 5, 5)
    world.admin.request("POST", f"{ADMIN}/finished/retention", body={"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    body = {"ledgerId": places[5][0], "entryId": 0}
    world.admin.request("PUT", f"{ADMIN}/finished/subscription/s", body=body)
    world.admin.request("POST", f"{ADMIN}/finished/trim")
    assert planned(world.request("finished", start=Edge(subscription="s"))) == places[5:]


def test_topics_that_are_not_there(world: World) -> None:
    world.publish("there", 2)
    with pytest.raises(NoSuchTopicError, match=r"ther does not exist; similar: .*default/there"):
        plan_scan(world.request("ther"))
    lenient = TopicSelection(("ther",), fail_on_missing=False)
    tasks, _, plan = plan_scan(replace(world.request("x"), topics=lenient))
    assert (tasks, plan.topics) == ([], ())


def test_typed_scans_know_every_version_of_the_schema(world: World) -> None:
    world.publish("typed", 1)
    definition = '{"type": "record", "name": "Row", "fields": []}'
    world.admin.request(
        "POST", "/admin/v2/schemas/public/default/typed/schema", body={"type": "AVRO", "schema": definition, "properties": {}}
    )
    _, spec, _ = plan_scan(world.request("typed", spec=ScanSpec(ReadMode.TYPED, ())))
    assert [(schema.kind, schema.definition.decode()) for schema in spec.schemas] == [("AVRO", definition)]
    world.publish("untyped", 1)
    with pytest.raises(BadOptionError, match=r"default/untyped: its messages cannot be shown .*it has no schema"):
        plan_scan(world.request("typed", "untyped", spec=ScanSpec(ReadMode.TYPED, ())))


def test_nobody_there(world: World) -> None:
    nowhere = PlanSource(service_url=f"pulsar://127.0.0.1:{free_port()}", retry_s=0.2)
    with pytest.raises(PlanUnavailableError, match="nothing listens there"):
        plan_scan(replace(world.request("x"), source=nowhere))
    with pytest.raises(BadOptionError, match=r"service\.url"):
        plan_scan(replace(world.request("x"), source=PlanSource()))
