"""Each rule, broken by the shortest history that breaks it and nothing else; and histories that break none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.history.checker import check, judge
from tests.history.events import Event, Position, load, save
from tests.history.verdict import Promises


class Story:
    """Writes histories. Message `n` is stored at (1, n, -1) unless said otherwise; its uid is mN."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.clock_s = 0.0

    def add(self, kind: str, actor: str = "", number: int | None = None, **fields: object) -> Story:
        self.clock_s += 0.01
        if number is not None:
            fields = {"uid": f"m{number}", "position": (1, number, -1), **fields}
        self.events.append(Event(kind, at_s=self.clock_s, actor=actor, **fields))  # type: ignore[arg-type]
        return self

    def stored(self, count: int, producer: str = "p", keys: str = "") -> Story:
        """`count` messages sent, answered and found."""
        for number in range(count):
            key = keys[number] if keys else ""
            self.add("send", producer, uid=f"m{number}", sequence_id=number, key=key)
            self.add("sent", producer, number)
            self.audit(number, key=key)
        return self

    def audit(self, number: int, **fields: object) -> Story:
        return self.add("audit", "", number, **fields)

    def open(self, actor: str, kind: str, **fields: object) -> Story:
        return self.add("open", actor, subscription="s", type=kind, **fields)

    def consumer(self, kind: str, actor: str, number: int, **fields: object) -> Story:
        return self.add(kind, actor, number, subscription="s", **fields)

    def close(self, actor: str) -> Story:
        return self.add("close", actor, subscription="s")

    def rules(self, **promises: object) -> set[str]:
        return {violation.rule for violation in check(self.events, Promises(**promises))}  # type: ignore[arg-type]


def consumed(kind: str, count: int) -> Story:
    story = Story().stored(count, keys="k" * count).open("a", kind)
    for number in range(count):
        story.consumer("received", "a", number, key="k").consumer("ack", "a", number)
    return story


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "Shared", "Key_Shared"])
def test_what_happens_as_promised_breaks_no_rule(kind: str) -> None:
    assert consumed(kind, 5).rules(deduplication=True) == set()


def test_only_what_could_be_broken_counts_as_checked() -> None:
    assert not judge([]).asked
    assert set(judge(Story().stored(1).events).asked) == {"H1", "H2"}
    assert set(judge(Story().stored(2).events, Promises(deduplication=True)).asked) == {"H1", "H2", "H3", "H4"}
    assert set(judge(Story().stored(2).open("a", "Shared").events).asked) == {"H1", "H2", "H4", "H5"}
    alone = {"H1", "H2", "H4", "H5", "H6", "H7"}
    assert set(judge(consumed("Shared", 2).events).asked) == alone
    assert set(judge(consumed("Key_Shared", 2).events).asked) == alone
    assert set(judge(consumed("Failover", 2).events).asked) == {*alone, "H8"}
    both = consumed("Key_Shared", 2).open("b", "Key_Shared").consumer("received", "b", 1, key="k")
    assert set(judge(both.events).asked) == {*alone, "H9", "H10"}
    sought = consumed("Exclusive", 2).consumer("sought", "a", 0)
    assert set(judge(sought.events).asked) == {*alone, "H8"}
    assert set(judge(sought.consumer("received", "a", 0).events).asked) == {*alone, "H8", "H13"}


# Publishing


def test_h1_an_answered_message_is_missing() -> None:
    assert Story().add("send", "p", uid="m0").add("sent", "p", 0).rules() == {"H1"}


def test_h1_an_answered_message_is_elsewhere() -> None:
    story = Story().add("send", "p", uid="m0").add("sent", "p", 0, position=(1, 5, -1)).audit(0)
    assert story.rules() == {"H1"}


def test_h2_a_message_that_nobody_sent() -> None:
    assert Story().audit(0).rules() == {"H2"}


def test_h2_positions_fall() -> None:
    story = Story()
    for number in (0, 1):
        story.add("send", "p", uid=f"m{number}", sequence_id=number)
    story.audit(0, position=(2, 0, -1)).audit(1, position=(1, 9, -1))
    assert story.rules() == {"H2"}


def test_h2_two_answers_for_one_place() -> None:
    story = Story().stored(1).add("send", "q", uid="m9").add("sent", "q", uid="m9", position=(1, 0, -1))
    assert "H2" in story.rules()


def test_h2_copies_that_no_restart_explains() -> None:
    story = Story().stored(1).audit(0, position=(1, 1, -1))
    assert story.rules() == {"H2"}
    assert story.add("restart").rules() == set()


def test_h3_a_duplicate_in_spite_of_deduplication() -> None:
    story = Story().stored(2).audit(1, position=(1, 2, -1)).add("restart")
    assert story.rules() == set()
    assert story.rules(deduplication=True) >= {"H3"}


def test_h3_the_highest_answered_is_missing() -> None:
    story = Story().stored(1).add("send", "p", uid="m1", sequence_id=1).add("sent", "p", uid="m1", position=(-1, -1, -1))
    assert story.rules(deduplication=True) == {"H1", "H3"}


def test_h4_messages_of_one_producer_swapped() -> None:
    story = Story().add("send", "p", uid="m1", sequence_id=0).add("send", "p", uid="m0", sequence_id=1).audit(0).audit(1)
    assert story.rules() == {"H4"}


def test_h4_batches_by_key_keep_the_order_of_keys_alone() -> None:
    story = Story().add("send", "p", uid="m1", key="j").add("send", "p", uid="m0", key="k").audit(0).audit(1)
    assert story.rules(key_batches=True) == set()
    story = Story().add("send", "p", uid="m1", key="k").add("send", "p", uid="m0", key="k").audit(0).audit(1)
    assert story.rules(key_batches=True) == {"H4"}


def test_h4_a_repeated_end_is_no_swap() -> None:
    story = Story().stored(2).audit(0, position=(2, 0, -1)).audit(1, position=(2, 1, -1)).add("restart")
    assert story.rules() == set()


# Delivery


def test_h5_a_message_never_delivered() -> None:
    story = Story().stored(2).open("a", "Shared").consumer("received", "a", 0).consumer("ack", "a", 0)
    assert story.rules() == {"H5"}


def test_h6_a_message_gone_without_acknowledgement() -> None:
    story = Story().stored(1).open("a", "Shared").consumer("received", "a", 0).close("a").open("b", "Shared")
    assert story.rules() == {"H6"}
    assert story.consumer("received", "b", 0).rules() == set()


def test_h7_an_acknowledged_message_comes_again() -> None:
    story = consumed("Shared", 1).consumer("received", "a", 0)
    assert story.rules() == {"H7"}


def test_h7_what_is_acknowledged_while_connections_end_may_come_again() -> None:
    """Clients group acknowledgements, and drop a group when a connection ends, at any moment between the two events."""
    story = Story().stored(2).open("a", "Shared").consumer("received", "a", 0).consumer("ack", "a", 0)
    story.clock_s += 5
    story.add("restart").consumer("received", "a", 1).consumer("ack", "a", 1)
    story.clock_s += 5
    assert story.consumer("received", "a", 1).add("restarted").rules() == set()
    assert story.consumer("received", "a", 0).rules() == {"H7"}


def test_h7_a_crash_excuses_only_the_latest_acknowledgements() -> None:
    story = consumed("Shared", 1).add("restart").add("restarted").consumer("received", "a", 0)
    assert story.rules() == set()
    story = consumed("Shared", 1)
    story.clock_s += 2.0
    story.add("restart").add("restarted").consumer("received", "a", 0)
    assert story.rules() == {"H7"}


def test_h7_a_seek_back_makes_it_deliverable() -> None:
    story = consumed("Exclusive", 2).consumer("sought", "a", 0)
    for number in (0, 1):
        story.consumer("received", "a", number).consumer("ack", "a", number)
    assert story.rules() == set()


@pytest.mark.parametrize("kind", ["Exclusive", "Failover"])
def test_h8_order(kind: str) -> None:
    story = Story().stored(3).open("a", kind)
    for number in (0, 2, 1):
        story.consumer("received", "a", number)
    assert story.rules() == {"H8"}


def test_h8_a_gap() -> None:
    story = Story().stored(3).open("a", "Exclusive").consumer("received", "a", 0).consumer("received", "a", 2)
    assert "H8" in story.rules()


def test_h8_a_gap_of_acknowledged_ones_is_none() -> None:
    story = consumed("Exclusive", 3).close("a")
    story.consumer("sought", "a", 0)
    story = Story().stored(3).open("b", "Shared").consumer("received", "b", 1).consumer("ack", "b", 1).close("b")
    story.open("a", "Exclusive").consumer("received", "a", 0).consumer("received", "a", 2)
    assert story.rules() == set()


@pytest.mark.parametrize(("asked_s", "answered_s", "rules"), [(2.0, 5.0, set()), (4.0, 5.0, {"H7"})])
def test_h7_who_becomes_active_while_it_opens_gets_what_was_acknowledged_meanwhile(
    asked_s: float, answered_s: float, rules: set[str]
) -> None:
    story = Story().open("a", "Failover")

    def at(time_s: float) -> Story:
        story.clock_s = time_s
        return story

    steps = [
        (asked_s, lambda: story.open("b", "Failover")),
        (3.0, lambda: story.stored(2).consumer("received", "a", 0).consumer("ack", "a", 0)),
        (answered_s, lambda: story.add("opened", "b", subscription="s")),
        (6.0, lambda: story.consumer("received", "b", 0).consumer("received", "b", 1)),
    ]
    for time_s, step in sorted(steps, key=lambda each: each[0]):
        at(time_s)
        step()
    assert story.rules() == rules


def test_h8_the_next_active_consumer_leaves_something_out() -> None:
    story = Story().stored(3).open("a", "Failover").consumer("received", "a", 0).consumer("received", "a", 1).close("a")
    story.open("b", "Failover").consumer("received", "b", 1).consumer("received", "b", 2)
    assert story.rules() == {"H8", "H6"}


def test_h8_the_next_active_consumer_starts_at_the_first_unacknowledged() -> None:
    story = Story().stored(3).open("a", "Failover").open("b", "Failover")
    story.consumer("received", "a", 0).consumer("ack", "a", 0).consumer("received", "a", 1).close("a")
    story.consumer("received", "b", 1).consumer("received", "b", 2)
    assert story.rules() == set()


def test_h9_two_hold_the_same() -> None:
    story = Story().stored(1).open("a", "Shared").open("b", "Shared").consumer("received", "a", 0).consumer("received", "b", 0)
    assert story.rules() == {"H9"}


@pytest.mark.parametrize("release", ["nack", "close"])
def test_h9_what_was_given_back_may_go_to_another(release: str) -> None:
    story = Story().stored(1).open("a", "Shared").open("b", "Shared").consumer("received", "a", 0)
    story = story.close("a") if release == "close" else story.consumer("nack", "a", 0)
    assert story.consumer("received", "b", 0, redelivery_count=1).rules() == set()


def test_h9_a_count_falls() -> None:
    story = Story().stored(1).open("a", "Shared").consumer("received", "a", 0, redelivery_count=2).consumer("nack", "a", 0)
    assert story.consumer("received", "a", 0, redelivery_count=1).rules() == {"H9"}


def test_h9_counts_start_anew_with_a_broker_but_not_while_it_lives() -> None:
    story = Story().stored(1).open("a", "Shared").add("restart")
    story.consumer("received", "a", 0, redelivery_count=2)  # from the client's own queue: it was sent before
    story.consumer("received", "a", 0, redelivery_count=0).add("restarted")
    assert story.rules() == set()
    story.clock_s += Promises().reconnect_s
    story.consumer("received", "a", 0, redelivery_count=2).consumer("received", "a", 0, redelivery_count=1)
    assert story.rules() == {"H9"}


REFUSED = ("ChecksumError", "Result.NotAllowedError")


@pytest.mark.parametrize("error", REFUSED)
def test_h1_what_was_refused_is_not_stored(error: str) -> None:
    story = Story().add("send", "p", uid="m0").add("sent", "p", uid="m0", error=error)
    assert story.rules() == set()
    assert set(judge(story.events).asked) == {"H1"}
    assert story.audit(0).rules() == {"H1"}


@pytest.mark.parametrize("error", REFUSED)
@pytest.mark.parametrize("attempt", ["resend", "restart"])
def test_h1_an_earlier_attempt_of_what_was_refused_may_be_stored(error: str, attempt: str) -> None:
    story = Story().add("send", "p", uid="m0").add(attempt, "p", uid="m0").add("sent", "p", uid="m0", error=error).audit(0)
    assert story.rules() == set()
    assert story.audit(0, position=(1, 1, -1)).rules() == {"H1"}, "but not both"


@pytest.mark.parametrize("error", ["PersistenceError", "Result.Timeout", "Result.TopicTerminated"])
def test_h1_what_failed_otherwise_may_be_stored(error: str) -> None:
    assert Story().add("send", "p", uid="m0").add("sent", "p", uid="m0", error=error).audit(0).rules() == set()


def test_h10_a_later_message_of_a_key_goes_elsewhere_too_early() -> None:
    story = Story().stored(2, keys="kk").open("a", "Key_Shared").open("b", "Key_Shared")
    story.consumer("received", "a", 0, key="k").consumer("received", "b", 1, key="k")
    assert story.rules() == {"H10"}
    assert story.rules(out_of_order_allowed=True) == set()


def test_h10_first_deliveries_of_a_key_are_in_order() -> None:
    story = Story().stored(2, keys="kk").open("a", "Key_Shared")
    story.consumer("received", "a", 1, key="k").consumer("received", "a", 0, key="k")
    assert story.rules() == {"H10"}


def test_h10_other_keys_and_acknowledged_ones_do_not_matter() -> None:
    story = Story().stored(3, keys="kjk").open("a", "Key_Shared").open("b", "Key_Shared")
    story.consumer("received", "b", 1, key="j").consumer("received", "a", 0, key="k").consumer("ack", "a", 0)
    assert story.consumer("received", "b", 2, key="k").rules() == set()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_h13_the_first_delivery_after_a_seek(first: int) -> None:
    story = consumed("Exclusive", 3).consumer("sought", "a", 1)
    for number in range(first, 3):
        story.consumer("received", "a", number)
    assert ("H13" in story.rules()) == (first != 1)
    assert first != 1 or story.rules() == set()


def test_histories_survive_being_saved(tmp_path: Path) -> None:
    events = consumed("Key_Shared", 3).add("restart").events
    save(events, tmp_path / "history.jsonl")
    assert load(tmp_path / "history.jsonl") == events
    (tmp_path / "bad.jsonl").write_text('{"kind": "send"}\n{"kin": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: .*kin"):
        load(tmp_path / "bad.jsonl")


def test_positions_are_where_the_audit_says() -> None:
    position: Position = (9, 9, -1)
    story = Story().stored(1).open("a", "Shared").consumer("received", "a", 0, position=position)
    assert "H2" in story.rules()
