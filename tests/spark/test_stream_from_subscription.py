"""A stream that begins where a subscription stands: it reads on from there, and the subscription stays its consumers'."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing

import pulsar
import pytest

from cepheid_decode import Edge, MessagePosition
from cepheid_spark.lease import LEASE_PROPERTY, Held
from cepheid_spark.offsets import StreamOffset
from cepheid_spark.options import parse_options
from cepheid_spark.stream_query import StreamQuery, open_stream_query
from cepheid_spark.stream_state import Snapshot
from cepheid_testkit import ProcessCluster
from tests.spark.stream_courses import Course, ModelLease, World
from tests.spark.streams import StreamedTopic
from tests.spark.test_stream_courses import check_whole, course_of, live

BILLING = "billing"
FROM_BILLING = {"startingOffsets": "subscription", "subscription": BILLING}
A = "persistent://public/default/a"


@pytest.fixture
def streamed(server: ProcessCluster, client: pulsar.Client, topic: str) -> Iterator[StreamedTopic]:
    with StreamedTopic(server, client, topic) as streamed:
        yield streamed


def query_of(server: ProcessCluster, topic: str, **options: str) -> StreamQuery:
    given = {"serviceUrl": server.service_url, "topic": topic, "chunkLookback": "0", **FROM_BILLING, **options}
    return open_stream_query(parse_options(given, streaming=True))


def one_batch(query: StreamQuery) -> StreamOffset:
    initial = query.initial()
    end = query.latest(initial, is_limited=True)
    query.plan(initial, end)
    return end


@pytest.mark.slow
def test_its_consumers_get_every_message_while_the_stream_reads_and_commits(
    server: ProcessCluster, client: pulsar.Client, streamed: StreamedTopic
) -> None:
    consumer = client.subscribe(streamed.topic, BILLING, receiver_queue_size=2)
    streamed.send(range(50))
    received = [int(acknowledged(consumer)) for _ in range(5)]
    saved(streamed, entry=4)
    with closing(query_of(server, streamed.topic)) as query:
        end = one_batch(query)
        assert end.starts[streamed.topic].entry_id == 5
        assert end.subscription is not None
        assert end.subscription.startswith("spark-")
        query.commit(end)
        place = f"{end.ends[streamed.topic].ledger_id}:48"  # one entry stays
        wait_until(lambda: mark(streamed, end.subscription or "") == place)
        received += [int(acknowledged(consumer)) for _ in range(45)]
    assert received == list(range(50))
    assert LEASE_PROPERTY not in (streamed.admin("GET", f"/subscription/{BILLING}/properties") or {})
    consumer.close()


@pytest.mark.slow
def test_a_checkpoint_that_names_it_as_the_lease_gives_it_back(server: ProcessCluster, streamed: StreamedTopic) -> None:
    """Earlier versions took the subscription of the start for the lease."""
    streamed.send(range(10))
    (ledger_id,) = streamed.ledgers()
    streamed.admin("PUT", f"/subscription/{BILLING}", {"ledgerId": ledger_id, "entryId": 2})
    old = StreamOffset.from_json({"v": 2, "t": {streamed.topic: [ledger_id, 4]}, "sub": BILLING})
    with closing(query_of(server, streamed.topic)) as query:
        end = query.latest(old, is_limited=True)
        assert end.subscription is not None
        assert end.subscription.startswith("spark-")
        assert query.latest(old, is_limited=True) == end, "the same lease at each look"
        query.plan(old, end)
        query.commit(end)
        wait_until(lambda: mark(streamed, end.subscription or "") == f"{ledger_id}:8")
    assert mark(streamed, BILLING) == f"{ledger_id}:1"


def acknowledged(consumer: pulsar.Consumer) -> bytes:
    message = consumer.receive(30_000)
    consumer.acknowledge(message)
    return bytes(message.data())


def mark(streamed: StreamedTopic, name: str) -> str:
    position: str = streamed.admin("GET", "/internalStats")["cursors"][name]["markDeletePosition"]
    return position


def saved(streamed: StreamedTopic, entry: int) -> None:
    wait_until(lambda: mark(streamed, BILLING).endswith(f":{entry}"))


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FromBilling(Course):
    """Of the model: the subscription stands in the world's cursors, and its consumers go on all the time."""

    def _resolve(self, snapshot: Snapshot) -> dict[str, MessagePosition]:
        starts: dict[str, MessagePosition] = {}
        for topic, view in snapshot.views.items():
            head = MessagePosition(view.history.ledgers[0].ledger_id, 0)
            starts[topic] = max(self.world.cursors.setdefault((topic, BILLING), head), head)
        return starts


def consume_and_trim(world: World, topic: str) -> None:
    """Up to somewhere in what is acknowledged."""
    stands = world.cursors.get((topic, BILLING))
    ahead = [place for place in world.places[topic] if stands is not None and MessagePosition(*place) >= stands]
    if ahead:
        ledger_id, entry_id = ahead[world.chance.randrange(len(ahead))]
        world.cursors[topic, BILLING] = MessagePosition(ledger_id, entry_id + 1)
    world.trim(topic)


def test_what_its_consumers_acknowledge_before_the_lease_is_made_is_behind_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(random.Random(3))
    world.create(A)
    for _ in range(4):
        world.write(A, 5)
        world.roll(A)
    course = FromBilling(world, from_latest=False, disturb=lambda _: None, **FROM_BILLING)
    world.cursors[A, BILLING] = MessagePosition(world.chains[A][0].ledger_id, 0)
    hold, reached = ModelLease.hold, world.chains[A][2].ledger_id

    def hold_after_a_while(lease: ModelLease, topic: str, first: MessagePosition, *, takes: bool = False) -> Held:
        world.cursors[topic, BILLING] = max(world.cursors[topic, BILLING], MessagePosition(reached, 2))
        world.trim(topic)
        return hold(lease, topic, first, takes=takes)

    monkeypatch.setattr(ModelLease, "hold", hold_after_a_while)
    course.run(5)
    assert course.rows(A) == course.expected(A) == list(range(13, 21))
    assert world.cursors[A, BILLING] == MessagePosition(reached, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_batches_together_are_the_topic_though_its_consumers_go_on_and_all_they_leave_is_trimmed(part: int) -> None:
    for seed in range(part * 40, (part + 1) * 40):
        stood: dict[str, MessagePosition] = {}

        def harm(course: Course, stood: dict[str, MessagePosition] = stood) -> None:
            world = course.world
            for topic in sorted(world.chains):
                assert stood.get(topic, world.cursors.get((topic, BILLING))) == world.cursors.get((topic, BILLING)), "moved"
                if world.chance.random() < 0.2:
                    consume_and_trim(world, topic)
                if (topic, BILLING) in world.cursors:
                    stood[topic] = world.cursors[topic, BILLING]

        course, disturbance = course_of(seed, harm, kind=FromBilling, **FROM_BILLING)
        live(course, disturbance)
        check_whole(course)


def test_the_start_may_be_named_where_it_is_said_and_the_lease_apart() -> None:
    given = {"serviceUrl": "pulsar://b:1", "topic": "t"}

    def parsed(streaming: bool, **options: str) -> tuple[Edge, str | None, bool]:
        options = {"startingOffsets": "subscription:billing", **options}
        found = parse_options({**given, **options}, streaming=streaming)
        return found.start, found.subscription, found.has_lease

    start = Edge(subscription=BILLING)
    for streaming in (True, False):
        assert parsed(streaming, **FROM_BILLING) == (start, None, True)
        assert parsed(streaming) == (start, None, True)
        assert parsed(streaming, subscription=BILLING) == (start, None, True)
        assert parsed(streaming, subscription="mine") == (start, "mine", True)
        assert parsed(streaming, subscription="none") == (start, None, False)
