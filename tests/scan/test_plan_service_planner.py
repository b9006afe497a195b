"""What is asked of the plan service and made of its answers; real ones: test_planners.py."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from cepheid_decode import (
    AdminRefusedError,
    Fragment,
    HistoryPlan,
    NoSuchTopicError,
    PlanSource,
    PlanUnavailableError,
    SchemaVersion,
    TopicSelection,
)
from cepheid_scan import plan_service
from cepheid_scan.plan_service import PlanServicePlanner

TOPIC = "persistent://public/default/t"


class ScriptedHttp:
    """Answers by what is asked; notes the questions."""

    def __init__(self) -> None:
        self.ledgers: dict[str, list[dict[str, Any]]] = {}
        self.alone: set[str] = set()  # called like partitions, and none
        self.counts: dict[str, int | None] = {}
        self.asked: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.format = 1
        self.incarnation = "i"

    def get(self, path: str, query: Mapping[str, Any]) -> Any:
        self.asked.append({name: value for name, value in query.items() if value is not None})
        if path == "/cepheid/v1/topics":
            names = query.get("topic", self.counts)
            return {"format": self.format, "topics": {name: self.counts.get(name) for name in names}}
        parts = self.parts_of(query["topic"])
        if not parts:
            raise AdminRefusedError("no", status=404)
        after = -1 if query["after"] is None else query["after"]
        return {
            "format": self.format,
            "plans": [
                {
                    "topic": name,
                    "partition": int(name.rpartition("-")[2]) if "-partition-" in name else -1,
                    "incarnation": self.incarnation,
                    "ledgers": [_shown(ledger, after) for ledger in self.ledgers[name]],
                }
                for name in sorted(parts)
            ],
            "schemas": [],
            "bookies": {"b": "h:1"},
            "read_ticket": f"ticket of {query['topic']}",
            **self.more,
        }

    def parts_of(self, topic: str) -> list[str]:
        alone = [name for name in self.ledgers if name == topic]
        return alone or [name for name in self.ledgers if name not in self.alone and name.startswith(f"{topic}-partition-")]

    def close(self) -> None:
        pass


def _shown(ledger: dict[str, Any], after: int) -> dict[str, Any]:
    brief = ledger["entries"] is not None and ledger["ledger_id"] <= after
    return {name: value for name, value in ledger.items() if not (brief and name == "fragments")}


def ledger(ledger_id: int, entries: int | None, last: int = 0) -> dict[str, Any]:
    return {
        "ledger_id": ledger_id,
        "entries": entries,
        "last_entry_id": last if entries is None else entries - 1,
        "size_bytes": 10,
        "closed_at_ms": 0 if entries is None else 5,
        "ensemble_size": 1,
        "write_quorum": 1,
        "fragments": [{"first_entry_id": 0, "ensemble": ["b"]}],
        "master_key": base64.b64encode(b"k" * 16).decode(),
        "something_new": 1,
    }


@pytest.fixture
def http() -> ScriptedHttp:
    return ScriptedHttp()


@pytest.fixture
def planner(http: ScriptedHttp) -> PlanServicePlanner:
    planner = PlanServicePlanner(PlanSource(admin_url="http://nowhere"))
    planner._http = http  # type: ignore[assignment]
    return planner


def shape(plan: HistoryPlan) -> dict[str, list[tuple[int, int]]]:
    return {history.topic: [(one.ledger_id, one.last_entry_id) for one in history.ledgers] for history in plan.topics}


def test_a_plan_is_read_field_by_field(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, None, 7)]
    version = {"version": "AAAAAAAAAAE=", "type": "AVRO", "data": "e30=", "properties": {"a": "b"}}
    http.more = {"schemas": [version], "unknown": 1}
    plan = planner.plan([TOPIC], schemas=True)
    (history,) = plan.topics
    closed, opened = history.ledgers
    assert (closed.is_open, closed.last_entry_id, closed.closed_at_ms) == (False, 9, 5)
    assert (opened.is_open, opened.last_entry_id, opened.closed_at_ms) == (True, 7, None)
    assert opened.fragments == (Fragment(0, ("b",)),)
    assert opened.master_key == b"k" * 16
    assert plan.ticket == f"ticket of {TOPIC}".encode()
    assert plan.schemas == {TOPIC: (SchemaVersion(bytes(7) + b"\1", "AVRO", b"{}", {"a": "b"}),)}


def test_closed_ledgers_are_asked_for_once(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, None, 7)]
    first = planner.plan([TOPIC])
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, 9), ledger(8, None, 2)]
    assert shape(planner.plan([TOPIC])) == {TOPIC: [(3, 9), (5, 8), (8, 2)]}
    assert planner.plan([TOPIC]).topics[0].ledgers[0] == first.topics[0].ledgers[0]
    assert [question.get("after") for question in http.asked] == [None, 3, 5]


def test_ledgers_of_another_incarnation_are_others_under_the_same_ids(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    """As in a cluster that was set up again, while a stream went on."""
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, None, 7)]
    planner.plan([TOPIC])
    http.ledgers[TOPIC], http.incarnation = [ledger(3, 4), ledger(5, None, 1)], "j"
    assert shape(planner.plan([TOPIC])) == {TOPIC: [(3, 3), (5, 1)]}
    assert shape(planner.plan([TOPIC])) == {TOPIC: [(3, 3), (5, 1)]}
    assert [question.get("after") for question in http.asked] == [None, 3, None, 3]


def test_what_was_open_and_is_not_known_as_closed_is_asked_for_in_full(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    """Another partition's ledger may have a higher id: then the brief answer has a hole."""
    one, two = f"{TOPIC}-partition-0", f"{TOPIC}-partition-1"
    http.ledgers = {one: [ledger(3, None, 4)], two: [ledger(4, 9), ledger(9, None)]}
    planner.plan([one, two])
    http.ledgers[one] = [ledger(3, 6), ledger(11, None, 1)]
    assert shape(planner.plan([one, two])) == {one: [(3, 5), (11, 1)], two: [(4, 8), (9, 0)]}
    assert [question.get("after") for question in http.asked] == [None, 4, None]


def test_a_topic_made_anew_has_nothing_of_the_old_one(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, None, 7)]
    planner.plan([TOPIC])
    http.ledgers[TOPIC] = [ledger(20, None, 1)]
    assert shape(planner.plan([TOPIC])) == {TOPIC: [(20, 1)]}


def test_partitions_of_a_topic_are_one_question(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    parts = [f"{TOPIC}-partition-{index}" for index in range(4)]
    http.ledgers = {part: [ledger(index, None)] for index, part in enumerate(parts)} | {"persistent://a/b/c": [ledger(9, None)]}
    plan = planner.plan([parts[3], "persistent://a/b/c", parts[1]])
    assert [history.topic for history in plan.topics] == [parts[3], "persistent://a/b/c", parts[1]]
    assert sorted(question["topic"] for question in http.asked) == ["persistent://a/b/c", TOPIC]
    assert plan.tickets == {TOPIC: f"ticket of {TOPIC}".encode(), "persistent://a/b/c": b"ticket of persistent://a/b/c"}
    http.asked.clear()
    planner.plan([parts[2]])
    assert [question["topic"] for question in http.asked] == [parts[2]]
    with pytest.raises(NoSuchTopicError, match="partition-7"):
        planner.plan([parts[0], f"{TOPIC}-partition-7"])


def test_topics_that_are_called_like_partitions_are_asked_for_by_their_names(
    http: ScriptedHttp, planner: PlanServicePlanner
) -> None:
    solo = [f"{TOPIC}-partition-{index}" for index in range(2)]
    http.ledgers = {name: [ledger(index, None)] for index, name in enumerate(solo)}
    http.alone = set(solo)
    plan = planner.plan(solo)
    assert shape(plan) == {solo[0]: [(0, 0)], solo[1]: [(1, 0)]}
    assert [question["topic"] for question in http.asked] == [TOPIC, *solo]
    http.ledgers[TOPIC] = [ledger(7, None)]
    plan = planner.plan([TOPIC, *solo])
    assert shape(plan) == {TOPIC: [(7, 0)], solo[0]: [(0, 0)], solo[1]: [(1, 0)]}
    assert [plan.ticket_of(name, number) for number, name in enumerate(solo)] == [f"ticket of {name}".encode() for name in solo]
    assert plan.ticket_of(TOPIC, -1) == f"ticket of {TOPIC}".encode()
    with pytest.raises(NoSuchTopicError, match="partition-2 does not exist"):
        planner.plan([*solo, f"{TOPIC}-partition-2"])


def test_many_names_are_asked_for_in_groups(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    names = [f"persistent://public/default/{number}" for number in range(250)]
    http.counts = dict.fromkeys(names, 0)
    assert planner.topics(TopicSelection(tuple(names))) == sorted(names)
    assert sorted(len(question["topic"]) for question in http.asked) == [50, 100, 100]


def test_another_format_is_refused_by_name(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.ledgers[TOPIC], http.format = [ledger(1, None)], 4
    with pytest.raises(PlanUnavailableError, match="format 4, this release reads formats up to 3"):
        planner.plan([TOPIC])


def test_a_known_ledger_moves_to_its_object(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    """Closed ledgers are remembered with their fragments; where their copies are is in every answer."""
    url = "s3://bucket/3.parquet"
    http.ledgers[TOPIC] = [ledger(3, 10), ledger(5, None)]
    places = []
    for copy in (None, {"url": url, "object_bytes": 70, "on_bookies": True}, {"url": url, "object_bytes": 70, "on_bookies": False}):
        http.ledgers[TOPIC][0] |= {} if copy is None else {"offloaded": copy}
        (first, _) = planner.plan([TOPIC]).topics[0].ledgers
        places.append((first.object_url, first.object_bytes, bool(first.fragments), first.last_entry_id, first.is_on_bookies))
    assert places == [("", 0, True, 9, True), (url, 70, True, 9, True), (url, 70, False, 9, False)]


def test_a_ledger_that_is_only_an_object_needs_no_fragments(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    copy = {"url": "s3://bucket/3.parquet", "object_bytes": 70, "on_bookies": False}
    bare = {name: value for name, value in ledger(3, 10).items() if name not in ("fragments", "ensemble_size", "master_key")}
    http.ledgers[TOPIC], http.format = [bare | {"offloaded": copy}, ledger(5, None)], 2
    for _ in range(2):  # the second time it is known
        assert shape(planner.plan([TOPIC])) == {TOPIC: [(3, 9), (5, 0)]}


def test_a_look_at_many_topics_costs_each_of_them_once(
    http: ScriptedHttp, planner: PlanServicePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is known was copied and searched for each topic: a second of processor time a look at 800."""
    topics = [f"persistent://public/default/t{number}" for number in range(800)]
    http.ledgers = {topic: [ledger(3, 10), ledger(5, None)] for topic in topics}
    monkeypatch.setattr(ScriptedHttp, "parts_of", lambda http, topic: [topic])
    planner.plan(topics)
    monkeypatch.setattr(plan_service, "in_threads", lambda nouns, ask: [ask(noun) for noun in nouns])
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        planner.plan(topics)
    finally:
        sys.setprofile(None)
    assert calls < 400 * len(topics)
    assert http.asked[-1] == {"topic": topics[-1], "after": 3}


def test_too_many_known_ledgers_are_forgotten_but_for_the_newest(
    http: ScriptedHttp, planner: PlanServicePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_service, "_MOST_KNOWN_LEDGERS", 3)
    one, two = "persistent://a/b/one", "persistent://a/b/two"
    http.ledgers = {one: [ledger(3, 10), ledger(5, 9)], two: [ledger(4, 10), ledger(6, 9)]}
    for topic in (one, one, two, two, one, one):
        planner.plan([topic])
    assert [question.get("after") for question in http.asked] == [None, 5, None, 6, None, 5]
    assert planner._known_ledgers == 2


def test_a_partition_that_no_topic_has_is_an_error(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.counts = {TOPIC: 3, f"{TOPIC}2": 8, f"{TOPIC}0": 0}
    with pytest.raises(NoSuchTopicError, match=r"no partition 3: .* has 3, from 0 to 2"):
        planner.topics(TopicSelection((TOPIC,), partitions=frozenset({1, 3})))
    both = TopicSelection((TOPIC, f"{TOPIC}2"), partitions=frozenset({7}))
    assert planner.topics(both) == [f"{TOPIC}2-partition-7"], "one of them has it"
    mixed = TopicSelection((TOPIC, f"{TOPIC}0"), partitions=frozenset({1}))
    assert planner.topics(mixed) == [f"{TOPIC}-partition-1"], "one that is not partitioned has none"
    with pytest.raises(NoSuchTopicError, match=r"no partition 0: .*t0 is not partitioned"):
        planner.topics(TopicSelection((f"{TOPIC}0",), partitions=frozenset({0})))
    assert planner.topics(TopicSelection((f"{TOPIC}0",), partitions=frozenset({0}), fail_on_missing=False)) == []
    with pytest.raises(NoSuchTopicError, match=r"no partition 8: .*t2 has 8"):
        planner.topics(TopicSelection(pattern=f"{TOPIC}.*", partitions=frozenset({7, 8})))
    assert planner.topics(TopicSelection((TOPIC,), partitions=frozenset({3}), fail_on_missing=False)) == []


def test_a_partition_that_is_named_has_its_own_number_alone(http: ScriptedHttp, planner: PlanServicePlanner) -> None:
    http.counts = {f"{TOPIC}-partition-5": 0}
    assert planner.topics(TopicSelection((f"{TOPIC}-partition-5",), partitions=frozenset({5}))) == [f"{TOPIC}-partition-5"]
    with pytest.raises(NoSuchTopicError, match="no partition 4"):
        planner.topics(TopicSelection((f"{TOPIC}-partition-5",), partitions=frozenset({4})))
