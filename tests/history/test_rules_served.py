"""Rules about deliveries that were noted at the servers' end: each is broken by the shortest history that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.checker import check
from tests.history.events import Event
from tests.history.verdict import Promises

SERVED = Promises(noted_at_servers=True)
FIRST, SECOND = ("east#1", 1), ("west#1", 2)


class Story:
    """Five stored messages m0 to m4 at 1:0 to 1:4; what happens is told line by line, each a second after the other."""

    def __init__(self, kind: str = "Exclusive", key: str = "") -> None:
        self.kind = kind
        self.events: list[Event] = []
        for index in range(5):
            self.events.append(Event("send", actor="p", uid=f"m{index}", key=key, sequence_id=index))
        self._audit = [Event("audit", uid=f"m{index}", key=key, position=(1, index, -1)) for index in range(5)]

    def note(self, kind: str, actor: str = "", **fields: Any) -> Story:
        self.events.append(Event(kind, float(len(self.events)), actor, subscription="s", **fields))
        return self

    def open(self, actor: str, opening: tuple[str, int] = FIRST) -> Story:
        return self.note("open", actor, type=self.kind, details={"opening": opening})

    def got(self, actor: str, *entries: int, **fields: Any) -> Story:
        for entry_id in entries:
            self.note("received", actor, position=(1, entry_id, -1), **fields)
        return self

    def acks(self, actor: str, *entries: int, **fields: Any) -> Story:
        for entry_id in entries:
            self.note("ack", actor, position=(1, entry_id, -1), **fields)
        return self

    def all_of(self, actor: str) -> Story:
        return self.got(actor, *range(5)).acks(actor, *range(5))

    def broken(self) -> list[str]:
        return [violation.rule for violation in check([*self.events, *self._audit], SERVED)]


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "Shared", "Key_Shared"])
def test_what_is_delivered_once_and_acknowledged_breaks_nothing(kind: str) -> None:
    assert Story(kind, key="k").open("a").all_of("a").broken() == []


def test_what_nobody_got_or_acknowledged_is_missed() -> None:
    assert Story("Shared").open("a").got("a", 0, 1, 2, 3).acks("a", 0, 1, 2, 3).broken() == ["H5"]
    assert Story("Shared").open("a").got("a", 0, 1, 2, 3, 4).acks("a", 0, 1, 2, 3).broken() == ["H6"]


def test_a_cumulative_acknowledgement_is_none_on_shared_subscriptions() -> None:
    told = Story("Shared").open("a").got("a", *range(5)).acks("a", 4, cumulative=True)
    assert told.broken() == ["H6"]
    assert Story("Exclusive").open("a").got("a", *range(5)).acks("a", 4, cumulative=True).broken() == []


def test_what_is_acknowledged_does_not_come_again() -> None:
    assert "H7" in Story("Shared").open("a").all_of("a").got("a", 2).broken()


def test_the_next_opening_knows_what_was_answered_as_saved_and_may_not_know_the_rest() -> None:
    unsaved = Story("Shared").open("a").got("a", 0).acks("a", 0).open("b", SECOND).all_of("b")
    assert unsaved.broken() == []
    saved = Story("Shared").open("a").got("a", 0).acks("a", 0)
    saved.note("saving", "a", details={"ask": 1}).note("saved", "a", details={"ask": 1})
    assert saved.open("b", SECOND).all_of("b").broken() == ["H7"]


def test_a_seek_voids_what_was_saved() -> None:
    told = Story().open("a").all_of("a").note("saving", "a", details={"ask": 1}).note("saved", "a", details={"ask": 1})
    told.note("seeking", "a", position=(1, 1, -1)).note("close", "a").note("sought", "b", position=(1, 1, -1))
    assert told.open("b", SECOND).all_of("b").broken() == []


@pytest.mark.parametrize(("first", "broken"), [(2, []), (3, ["H13"]), (1, ["H7", "H13"])])
def test_after_a_seek_its_target_comes_first(first: int, broken: list[str]) -> None:
    told = Story().open("a").open("b").all_of("a")
    told.note("seeking", "a", position=(1, 2, -1)).note("sought", "a", position=(1, 2, -1))
    told.got("a", *range(first, 5)).acks("a", *range(5))
    assert [rule for rule in told.broken() if rule in ("H7", "H13")] == broken


def test_ordered_subscriptions_leave_out_and_turn_back_for_nothing() -> None:
    assert "H8" in Story().open("a").got("a", 0, 2, 1, 3, 4).acks("a", *range(5)).broken()
    taken_over = Story("Failover").open("a").got("a", 0, 1).open("b").got("b", 2, 3, 4)
    assert "H8" in taken_over.acks("b", *range(5)).broken(), "what the one before held comes again"
    again = Story().open("a").got("a", 0, 1).note("nack", "a").all_of("a")
    assert again.broken() == []


def test_an_active_consumer_starts_where_something_is_owed() -> None:
    assert Story("Failover").open("b").got("b", 0).open("a").all_of("a").broken() == []
    assert Story("Failover").open("b").got("b", 0, 1).note("close", "b").open("a").got("a", 1, 2).broken()[0] == "H8"


def test_nothing_is_held_by_two() -> None:
    held = Story("Shared").open("a").open("b").got("a", 0)
    assert held.got("b", 0).acks("b", *range(5)).broken() == ["H9"]
    for way, count in (("close", 0), ("nack", 1)):
        given = Story("Shared").open("a").open("b").got("a", 0).note(way, "a").got("b", 0, redelivery_count=count)
        assert given.got("b", *range(1, 5)).acks("b", *range(5)).broken() == [], way
    deposed = Story("Shared").open("a").got("a", 0).open("b", SECOND)
    assert deposed.all_of("b").broken() == [], "a deposed server may not know yet"


def test_delivery_counts_do_not_fall_within_an_opening() -> None:
    told = Story("Shared").open("a").got("a", 0, redelivery_count=1).note("nack", "a").all_of("a")
    assert told.broken() == ["H9"]


@pytest.mark.parametrize(("counts", "broken"), [((1, 2), []), ((1, 1), ["H9"]), ((0,), ["H9"]), ((3, 4), [])])
def test_what_is_given_back_comes_again_with_a_higher_count(counts: tuple[int, ...], broken: list[str]) -> None:
    told = Story("Key_Shared").open("a").got("a", 0)
    for count in counts:
        told.note("nack", "a", position=(1, 0, -1)).got("a", 0, redelivery_count=count)
    assert told.got("a", 1, 2, 3, 4).acks("a", *range(5)).broken() == broken


def test_who_gives_back_what_it_does_not_hold_changes_no_count() -> None:
    told = Story("Shared").open("a").open("b").got("a", 0).note("nack", "b", position=(1, 0, -1)).note("close", "a")
    assert told.all_of("b").broken() == []


def test_a_key_waits_for_who_holds_earlier_messages_of_it() -> None:
    told = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).got("b", 1)
    assert told.acks("a", *range(5)).broken()[0] == "H10"
    passed = Story("Key_Shared", key="k").open("a").got("a", 1, 0)
    assert passed.acks("a", *range(5)).broken()[0] == "H10"


def test_an_administrators_move_is_known_when_it_is_done_and_doubtful_before() -> None:
    skipped = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).note("moving")
    skipped.note("moved", position=(1, 0, -1), details={"opening": FIRST})
    assert skipped.got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == [], "what was skipped nobody holds"
    moved = Story("Shared").open("a").note("moving").note("moved", position=(1, 2, -1), details={"opening": FIRST})
    assert moved.got("a", 3, 4).acks("a", 3, 4).broken() == []
    assert Story("Shared").open("a").note("moving").broken() == [], "it may have gone anywhere"


def test_what_is_skipped_is_held_by_nobody_before_that_is_answered() -> None:
    def told(**moving: Any) -> list[str]:
        story = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).note("moving", **moving).got("b", 1)
        story.note("moved", position=(1, 0, -1), details={"opening": FIRST})
        return story.got("b", 2, 3, 4).acks("b", *range(1, 5)).broken()

    assert told() == told(details={"opening": FIRST}) == []
    assert told(details={"opening": SECOND})[0] == "H10", "of another server: here nobody let go of it"


def test_of_two_moves_at_once_nobody_knows_which_came_last() -> None:
    told = Story("Failover").open("a").note("moving").note("moving")
    told.note("moved", position=(1, 3, -1), details={"reset": True, "opening": FIRST})
    told.note("moved", position=(1, 0, -1), details={"opening": FIRST})
    assert told.open("b", SECOND).got("b", 3, 4).acks("b", 3, 4).broken() == []


def test_a_move_voids_what_was_said_while_it_was_done_whatever_became_of_others() -> None:
    told = Story("Shared").note("moving", details={"opening": FIRST}).open("a", SECOND).note("moving", details={"opening": SECOND})
    told.all_of("a").note("saving", "a", details={"ask": 1}).note("saved", "a", details={"ask": 1}).note("close", "a")
    told.note("moved", position=(1, 0, -1), details={"reset": True, "opening": SECOND})
    again = told.open("b", SECOND).all_of("b").note("saving", "b", details={"ask": 2}).note("saved", "b", details={"ask": 2})
    assert again.broken() == []
    assert again.open("c", ("east#2", 3)).got("c", 0).broken() == ["H7"], "said after it"


def test_a_move_that_nobody_heard_of_may_have_begun_the_counts_anew() -> None:
    told = Story("Shared").open("a").got("a", 0, redelivery_count=1).note("nack", "a").note("moving")
    assert told.all_of("a").broken() == []


def test_a_move_of_unknown_outcome_may_be_done_at_any_later_moment_of_its_opening() -> None:
    """Whoever asked was told that it takes too long. It voids what was acknowledged before it, also what is then answered."""
    told = Story().open("a").all_of("a").note("close", "a").note("moving", details={"opening": FIRST}).open("b")
    told.all_of("b").note("saving", "b", details={"ask": 1}).note("saved", "b", details={"ask": 1}).note("close", "b")
    assert told.open("c").all_of("c").open("d", SECOND).all_of("d").broken() == []
    elsewhere = Story().note("moving", details={"opening": FIRST}).open("a", SECOND)
    assert elsewhere.all_of("a").note("close", "a").open("b", SECOND).got("b", 0).broken() == ["H7"], "it moves only where it is"
    done = Story().open("a").note("moving", details={"opening": FIRST})
    done.note("moved", position=(1, 0, -1), details={"reset": True, "opening": FIRST})
    assert "H7" in done.all_of("a").note("nack", "a").got("a", 1).broken(), "once it is known it is done once"


def test_an_opening_that_was_deposed_before_a_move_stands_where_it_stood() -> None:
    told = Story().open("b", SECOND).got("b", *range(5)).acks("b", *range(5)).note("moving")
    told.note("moved", position=(1, 1, -1), details={"reset": True, "opening": SECOND})
    stale = told.open("a", FIRST).got("a", 3)
    assert stale.got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == []
