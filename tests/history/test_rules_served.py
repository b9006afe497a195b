"""Rules about deliveries that were noted at the servers' end: each is broken by the shortest history that breaks it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.history.checker import Judgement, judge
from tests.history.events import Event
from tests.history.verdict import Promises

SERVED = Promises(noted_at_servers=True)
FIRST, SECOND = ("east#1", 1), ("west#1", 2)
ANEW = ("west#1", 3)
"""Of a topic that was deleted in epoch 2."""


class Story:
    """Five stored messages m0 to m4 at 1:0 to 1:4; what happens is told line by line, each a second after the other.

    Of a Failover subscription the one that came last is the active consumer. `batch`: so many messages are one entry, 1:0."""

    def __init__(self, kind: str = "Exclusive", key: str = "", *, batch: int = 0) -> None:
        self.kind = kind
        self.events: list[Event] = []
        for index in range(5):
            self.events.append(Event("send", actor="p", uid=f"m{index}", key=key, sequence_id=index))
        places = [(1, 0, index) for index in range(batch)]
        places += [(1, number + bool(batch), -1) for number in range(5 - batch)]
        self._audit = [Event("audit", uid=f"m{index}", key=key, position=place) for index, place in enumerate(places)]

    def note(self, kind: str, actor: str = "", **fields: Any) -> Story:
        self.events.append(Event(kind, float(len(self.events)), actor, subscription="s", **fields))
        return self

    def open(self, actor: str, opening: tuple[str, int] = FIRST) -> Story:
        self.note("open", actor, type=self.kind, details={"opening": opening})
        return self.note("active", actor) if self.kind == "Failover" else self

    def begins(self, entry: int, opening: tuple[str, int] = FIRST, *, skips: int = 0) -> Story:
        """An administrator moves it: to this entry, or over so many, of those up to this one."""
        return self.note("moving", position=(1, entry, -1), details={"skips": skips, "opening": opening})

    def moved(self, entry: int, opening: tuple[str, int] = FIRST, *, skips: int = 0) -> Story:
        return self.note("moved", position=(1, entry, -1), details={"skips": skips, "opening": opening})

    def skips(self, entries: int, *, last: int = 4) -> Story:
        return self.begins(last, skips=entries).moved(last, skips=entries)

    def seek(self, actor: str, entry: int, *, opening: tuple[str, int] = FIRST, answered: bool = True) -> Story:
        """Which closes it."""
        where: Any = {"position": (1, entry, -1), "details": {"opening": opening}}
        self.note("seeking", actor, **where).note("close", actor)
        return self.note("sought", actor, **where) if answered else self

    def saves(self, actor: str, ask: int) -> Story:
        return self.note("saving", actor, details={"ask": ask}).note("saved", actor, details={"ask": ask})

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

    def judged(self) -> Judgement:
        return judge([*self.events, *self._audit], SERVED)

    def broken(self) -> list[str]:
        return [violation.rule for violation in self.judged().violations]


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


def test_a_cumulative_acknowledgement_counts_of_whoever_is_connected_active_or_not() -> None:
    standby = Story("Failover").open("a").open("b").got("b", *range(5)).acks("a", 4, cumulative=True)
    assert standby.broken() == []
    gone = Story("Failover").open("a").open("b").note("close", "a").got("b", *range(5)).acks("a", 4, cumulative=True)
    assert gone.broken() == ["H6"]


def test_what_is_acknowledged_does_not_come_again() -> None:
    assert "H7" in Story("Shared").open("a").all_of("a").got("a", 2).broken()


def test_the_next_opening_knows_what_was_answered_as_saved_and_may_not_know_the_rest() -> None:
    unsaved = Story("Shared").open("a").got("a", 0).acks("a", 0).open("b", SECOND).all_of("b")
    assert unsaved.broken() == []
    saved = Story("Shared").open("a").got("a", 0).acks("a", 0).saves("a", 1)
    assert saved.open("b", SECOND).all_of("b").broken() == ["H7"]


def test_a_deposed_server_may_not_have_yet_what_it_is_told_is_acknowledged() -> None:
    """Its successor recovered an entry, and delivered it, of which it has not heard itself that it is stored (seed 0x15764ada1)."""

    def told(acknowledged: int) -> list[str]:
        story = Story("Shared").open("a").got("a", 0, 1).open("b", SECOND).got("b", 0, 1, 2).acks("a", acknowledged)
        return story.got("a", acknowledged).got("b", 3, 4).acks("b", *range(5)).broken()

    assert told(2) == []
    assert told(1) == ["H7"]


def test_requests_of_several_consumers_may_have_one_number() -> None:
    story = Story("Shared").open("a").open("c").got("a", 0).got("c", 1)
    story.acks("a", 0).note("saving", "a", details={"ask": 7})
    story.acks("c", 1).note("saving", "c", details={"ask": 7})
    story.note("saved", "a", details={"ask": 7})
    begun = copy.deepcopy(story).open("b", SECOND)
    assert begun.got("b", 1).acks("b", 1).got("b", 2, 3, 4).acks("b", 2, 3, 4).broken() == [], "c was told nothing"
    assert copy.deepcopy(story).open("b", SECOND).all_of("b").broken() == ["H7"], "a was"
    story.note("saved", "c", details={"ask": 7})
    assert story.open("b", SECOND).got("b", 1).acks("b", 1).got("b", 2, 3, 4).acks("b", 2, 3, 4).broken() == ["H7"]


def test_a_seek_voids_what_was_saved() -> None:
    told = Story().open("a").all_of("a").saves("a", 1).seek("a", 1)
    assert told.open("b", SECOND).got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == []
    again = Story().open("a").all_of("a").saves("a", 1).seek("a", 1)
    assert "H7" in again.open("b", SECOND).all_of("b").broken(), "what is before its target it did not void"


@pytest.mark.parametrize(("first", "broken"), [(2, []), (3, ["H13"]), (1, ["H7", "H13"])])
def test_after_a_seek_its_target_comes_first(first: int, broken: list[str]) -> None:
    told = Story().open("a").all_of("a").seek("a", 2).open("b").got("b", *range(first, 5)).acks("b", *range(5))
    assert [rule for rule in told.broken() if rule in ("H7", "H13")] == broken


@pytest.mark.parametrize(("left", "broken"), [(0b1100, []), (0b1000, ["H6", "H13", "H8"]), (0b1110, ["H7", "H13"])])
def test_a_seek_into_a_batch_begins_with_the_message_that_it_names(left: int, broken: list[str]) -> None:
    """m0 to m3 are one entry, m4 is the next; the seek goes to m2."""
    where: Any = {"position": (1, 0, 2), "details": {"opening": FIRST}}
    told = Story(batch=4).open("a").got("a", 0, 1).acks("a", 0, 1)
    told.note("seeking", "a", **where).note("close", "a").note("sought", "a", **where).open("b")
    assert told.got("b", 0, details={"left": left}).got("b", 1).acks("b", 0, 1).broken() == broken


@pytest.mark.parametrize(("index", "owed"), [(1, True), (3, True), (4, False), (9, False)])
def test_a_seek_behind_the_last_message_of_a_batch_owes_nothing_of_it(index: int, owed: bool) -> None:
    where: Any = {"position": (1, 0, index), "details": {"opening": FIRST}}
    told = Story(batch=4).open("a").note("seeking", "a", **where).note("close", "a").note("sought", "a", **where)
    assert told.open("b").got("b", 1).acks("b", 1).broken() == (["H13", "H8", "H5"] if owed else [])


def test_ordered_subscriptions_leave_out_and_turn_back_for_nothing() -> None:
    assert "H8" in Story().open("a").got("a", 0, 2, 1, 3, 4).acks("a", *range(5)).broken()
    taken_over = Story("Failover").open("a").got("a", 0, 1).open("b").got("b", 2, 3, 4)
    assert "H8" in taken_over.acks("b", *range(5)).broken(), "what the one before held comes again"
    again = Story().open("a").got("a", 0, 1).note("nack", "a").all_of("a")
    assert again.broken() == []


def test_each_reason_to_start_over_is_one_for_the_next_delivery_alone() -> None:
    others_before = Story().open("x").note("close", "x").open("y").note("close", "y").open("a")
    assert others_before.got("a", 0, 1, 2, 0).all_of("a").broken()[0] == "H8"
    twice = Story().open("a").got("a", 0, 1).note("nack", "a").note("nack", "a").got("a", 0, 1, 0)
    assert twice.all_of("a").broken()[0] == "H8"
    assert Story("Failover").open("b").open("a").got("a", 0).note("nack", "b").all_of("a").broken() == ["H8"], "it held nothing"
    goes_on = Story().open("a").got("a", 0, 1).note("nack", "a").got("a", 2, 3, 4).acks("a", *range(5))
    assert goes_on.broken() == ["H8"], "what it gave back comes first"


def test_an_active_consumer_starts_where_something_is_owed() -> None:
    assert Story("Failover").open("b").got("b", 0).open("a").all_of("a").broken() == []
    assert Story("Failover").open("b").got("b", 0, 1).note("close", "b").open("a").got("a", 1, 2).broken()[0] == "H8"


def test_only_the_active_consumer_receives() -> None:
    three = Story("Failover").open("a").open("b").open("c").got("a", 0, 1).got("b", 0, 1).got("c", 0, 1, 2)
    assert three.acks("c", *range(5)).broken()[:2] == ["H8", "H8"]
    assert Story("Failover").open("a").open("b").got("a", 0).broken()[0] == "H8", "the other one has been chosen"
    gone = Story("Failover").open("b").open("a").got("a", 0).note("close", "a").got("b", 0, 1, 2, 3, 4).acks("b", *range(5))
    assert set(gone.broken()) == {"H8"}, "nobody has told it"
    assert Story().open("a").open("b").got("a", 0).got("b", 0).acks("b", *range(5)).broken()[0] == "H8"


def test_another_consumer_is_chosen_when_somebody_comes_or_goes() -> None:
    told = Story("Failover").open("b").open("a").got("a", 0).note("close", "a").note("active", "b")
    assert told.all_of("b").broken() == []
    again = Story("Failover").open("a").got("a", 0).note("active", "a").all_of("a")
    assert again.broken() == ["H8"], "it may not start over when it likes"


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


def test_what_is_sent_again_goes_before_later_messages_of_its_key() -> None:
    def after(*entries: int, key: str = "k") -> list[str]:
        """What came behind 0 and 1, which a had; then 0 was given back, or a left."""
        broken = []
        for gone, count in (("nack", 1), ("close", 0)):
            told = Story("Key_Shared", key=key).open("b").open("a").got("a", 0, 1).acks("a", 1)
            told.note(gone, "a", position=(1, 0, -1))
            for entry in entries:
                told.got("b", entry, redelivery_count=0 if entry else count)
            broken += told.acks("b", 0, 2, 3, 4).broken()
        return broken

    assert after(0, 2, 3, 4) == []
    assert after(2, 0, 3, 4) == ["H10", "H10"]
    assert after(2, 3, 4, 0) == ["H10"] * 6
    assert after(2, 0, 3, 4, key="") == [], "without a key there is no order"


def test_what_a_move_may_have_passed_holds_up_no_later_messages_of_its_key() -> None:
    """Nobody heard of the move, so it may be done by now; what is delivered before its target says that it is not."""

    def given_back() -> Story:
        told = Story("Key_Shared", key="k").open("a").open("b").begins(2)
        return told.got("a", 0).note("nack", "a", position=(1, 0, -1))

    assert given_back().got("b", 2, 3, 4).acks("b", 2, 3, 4).broken() == []
    assert given_back().got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == ["H10"]
    assert given_back().note("close", "a").open("c", SECOND).got("c", 2).acks("c", *range(5)).broken() == []
    held = Story("Key_Shared", key="k").open("a").open("b").begins(2).got("a", 0)
    assert held.got("b", 2, 3, 4).acks("b", 2, 3, 4).broken() == []
    skipped = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).begins(4, skips=2).got("a", 1).moved(4, skips=2)
    assert skipped.got("b", 2, 3, 4).acks("b", 2, 3, 4).broken() == [], "what is skipped nobody holds"
    crossed = given_back().begins(2).moved(2).moved(2).got("b", 2, 3, 4).acks("b", 2, 3, 4)
    assert "H10" not in crossed.broken(), "of two moves at once nobody knows which came last"
    back = Story("Key_Shared", key="k").open("a").begins(3).got("a", 3).acks("a", 3).begins(0).got("a", 0, 1, 2)
    assert "H10" not in back.broken()
    answered = given_back().moved(2).got("a", 2).note("nack", "a", position=(1, 2, -1)).got("b", 3)
    assert "H10" in answered.broken(), "once it is known it is done once"
    elsewhere = Story("Key_Shared", key="k").open("a", SECOND).open("b", SECOND).begins(2, FIRST).got("a", 0).got("b", 2)
    assert elsewhere.acks("b", *range(5)).broken()[0] == "H10", "another opening moves nothing here"


def test_what_is_acknowledged_or_skipped_holds_up_no_later_messages_of_its_key() -> None:
    told = Story("Key_Shared", key="k").open("a").got("a", 0).note("nack", "a", position=(1, 0, -1)).acks("a", 0)
    assert told.got("a", 1, 2, 3, 4).acks("a", 1, 2, 3, 4).broken() == []
    told = Story("Key_Shared", key="k").open("a").got("a", 0).note("nack", "a").skips(1)
    assert told.got("a", 1, 2, 3, 4).acks("a", 1, 2, 3, 4).broken() == []


def test_retention_takes_what_is_acknowledged_alone() -> None:
    def trimmed(story: Story, entry: int = 2) -> Story:
        return story.note("trimmed", position=(1, entry, -1))

    for kind in ("Exclusive", "Failover", "Shared", "Key_Shared"):
        told = Story(kind, key="k").open("a").got("a", 0, 1).acks("a", 0, 1)
        assert trimmed(told).got("a", 2, 3, 4).acks("a", 2, 3, 4).broken() == []
        told = Story(kind, key="k").open("a").got("a", 0, 1).acks("a", 0)
        assert trimmed(told).got("a", 2, 3, 4).acks("a", 2, 3, 4).broken() == ["M6"]
        told = Story(kind, key="k").open("a").got("a", 0, 1).acks("a", 0, 1)
        assert "H5" in trimmed(told, entry=1).got("a", 2, 3).acks("a", 2, 3).broken(), "what it leaves is owed"
    assert "M6" in trimmed(Story().open("a").all_of("a")).judged().asked
    assert "M6" not in trimmed(Story()).open("a").all_of("a").judged().asked


def test_what_retention_took_before_there_was_a_subscription_is_not_owed_to_it() -> None:
    def trimmed(story: Story) -> list[str]:
        story.note("trimmed", position=(1, 2, -1))
        return story.open("b").got("b", 2, 3, 4).acks("b", 2, 3, 4).broken()

    assert trimmed(Story()) == []
    deletion: dict[str, Any] = {"position": (-1, -1, -1), "details": {"reset": True, "opening": FIRST}}
    deleted = Story().open("a").got("a", 0).note("moving", **deletion).note("close", "a")
    assert trimmed(deleted) == [], "it may be deleted already"
    assert trimmed(Story().open("a").got("a", 0).note("moving", **deletion).note("close", "a").note("moved", **deletion)) == []
    again = Story("Shared").open("a").note("moving", **deletion).note("moved", **deletion).open("c").note("close", "c")
    assert trimmed(again) == ["M6"], "somebody subscribed once more"


@pytest.mark.parametrize("kind", ["Exclusive", "Shared"])
@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_a_seek_into_what_is_gone_goes_on_behind_it(kind: str, target: int) -> None:
    for trimmed_at in range(3):  # before it, while it is under way, afterwards
        where: Any = {"position": (1, target, -1), "details": {"opening": FIRST}}
        told = Story(kind).open("a").got("a", 0, 1).acks("a", 0, 1)
        steps = [("seeking", "a", where), ("close", "a", {}), ("sought", "a", where)]
        steps.insert(trimmed_at, ("trimmed", "", {"position": (1, 2, -1)}))
        for step, actor, fields in steps:
            told.note(step, actor, **fields)
        first = max(2, target)
        assert told.open("b").got("b", *range(first, 5)).acks("b", *range(first, 5)).broken() == []


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "Shared", "Key_Shared"])
def test_what_was_in_a_topic_that_was_deleted_nobody_is_owed_or_given_again(kind: str) -> None:
    """m0 to m2 were; m3 is published to the topic that was made anew."""

    def deleted(story: Story) -> Story:
        return story.note("deleted", position=(1, 3, -1), details={"epoch": 2})

    def told() -> Story:
        return deleted(Story(kind).open("a").got("a", 0, 1).acks("a", 0).note("close", "a"))

    assert told().open("b", ANEW).got("b", 3, 4).acks("b", 3, 4).broken() == []
    assert told().open("b", ANEW).broken() == ["H5"], "m3 and m4 are owed"
    assert told().open("b", ANEW).got("b", 2, 3, 4).acks("b", 3, 4).broken() == ["H2"]
    trimmed = told().note("trimmed", position=(1, 4, -1))
    assert trimmed.open("b", ANEW).got("b", 4).acks("b", 4).broken() == [], "before anybody subscribed again"
    late = told().open("c").note("trimmed", position=(1, 4, -1))
    assert late.open("b", ANEW).got("b", 4).acks("b", 4).broken() == [], "with one that was deposed nobody subscribes"


def test_a_move_of_what_was_deleted_moves_nothing_that_came_later() -> None:
    told = Story().open("a").all_of("a").begins(0).note("deleted", position=(1, 3, -1), details={"epoch": 2})
    assert told.moved(0).open("b", ANEW).got("b", 3, 4).acks("b", 3, 4).broken() == []
    assert told.note("close", "b").open("c", ANEW).got("c", 3).broken()[0] == "H7"


def test_a_server_that_is_deposed_waits_for_nothing_that_is_gone() -> None:
    told = Story("Key_Shared", key="k").open("a").got("a", 0).note("nack", "a").open("b", SECOND).got("b", 0).acks("b", 0)
    told.note("trimmed", position=(1, 1, -1)).got("a", 1).got("b", 1, 2, 3, 4)
    assert told.acks("b", 1, 2, 3, 4).broken() == []


def test_an_administrators_move_is_known_when_it_is_done_and_doubtful_before() -> None:
    skipped = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).skips(1)
    assert skipped.got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == [], "what was skipped nobody holds"
    moved = Story("Shared").open("a").skips(3)
    assert moved.got("a", 3, 4).acks("a", 3, 4).broken() == []
    assert Story("Shared").open("a").begins(5).broken() == [], "it may have gone there"


@pytest.mark.parametrize("kind", ["Failover", "Shared"])
def test_a_skip_goes_over_as_many_as_were_asked_for(kind: str) -> None:
    def told(*rest: int, last: int = 4) -> list[str]:
        story = Story(kind).open("a").got("a", 0, 1).acks("a", 1).skips(2, last=last)
        return story.got("a", *rest).acks("a", *rest).broken()

    assert told(3, 4) == []
    assert "H5" in told(4), "it went over three"
    assert told(2, 3, 4, last=1) == [], "there were no more"
    assert "H5" in told(3, 4, last=1)


def test_a_skip_counts_an_entry_of_which_a_part_is_acknowledged() -> None:
    def told(left: dict[str, int]) -> list[str]:
        story = Story("Shared").open("a").got("a", 0).note("ack", "a", position=(1, 0, -1), details=left)
        return story.skips(1).got("a", 2, 3, 4).acks("a", 2, 3, 4).broken()

    assert told({"left": 1}) == ["H5"], "it was to go over 0"
    assert told({}) == [], "it was to go over 1"


def test_a_skip_of_an_opening_that_may_not_know_what_was_acknowledged_before_it_ends_at_one_of_two_places() -> None:
    def told(*rest: int, saved: bool = False) -> list[str]:
        story = Story("Shared").open("a").got("a", 0).acks("a", 0)
        story = (story.saves("a", 1) if saved else story).open("b", SECOND).begins(4, SECOND, skips=1).moved(4, SECOND, skips=1)
        return story.got("b", *rest).acks("b", *rest).broken()

    assert told(1, 2, 3, 4) == told(2, 3, 4) == [], "over 0 or over 1"
    assert told(3, 4) == ["H5"]
    assert told(2, 3, 4, saved=True) == [], "over 1"


def test_what_is_skipped_is_held_by_nobody_before_that_is_answered() -> None:
    def told(opening: tuple[str, int]) -> list[str]:
        story = Story("Key_Shared", key="k").open("a").open("b").got("a", 0).begins(4, opening, skips=1).got("b", 1)
        story.moved(4, opening, skips=1)
        return story.got("b", 2, 3, 4).acks("b", *range(1, 5)).broken()

    assert told(FIRST) == []
    assert told(SECOND)[0] == "H10", "of another server: here nobody let go of it"


def test_of_two_moves_at_once_nobody_knows_which_came_last() -> None:
    for first in (0, 3):
        told = Story("Failover").open("a").note("close", "a").begins(3).begins(0).moved(3).moved(0)
        assert told.open("b", SECOND).got("b", *range(first, 5)).acks("b", *range(first, 5)).broken() == []
    one_by_one = Story("Failover").open("a").note("close", "a").begins(3).moved(3).begins(0).moved(0)
    assert one_by_one.open("b", SECOND).got("b", 3, 4).acks("b", 3, 4).broken()[0] == "H8"


def test_a_move_voids_what_was_said_while_it_was_done_whatever_became_of_others() -> None:
    told = Story("Shared").begins(0).open("a", SECOND).begins(0, SECOND).all_of("a").saves("a", 1).note("close", "a")
    again = told.moved(0, SECOND).open("b", SECOND).all_of("b").saves("b", 2)
    assert again.broken() == []
    assert again.open("c", ("east#2", 3)).got("c", 0).broken() == ["H7"], "said after it"


def test_a_move_that_nobody_heard_of_may_have_begun_the_counts_anew() -> None:
    told = Story("Shared").open("a").got("a", 0, redelivery_count=1).note("nack", "a").begins(0)
    assert told.all_of("a").broken() == []


def test_a_move_of_unknown_outcome_may_be_done_at_any_later_moment_of_its_opening() -> None:
    """Whoever asked was told that it takes too long. It voids what was acknowledged before it, also what is then answered."""
    told = Story().open("a").all_of("a").note("close", "a").begins(0).open("b").all_of("b").saves("b", 1).note("close", "b")
    assert told.open("c").all_of("c").open("d", SECOND).all_of("d").broken() == []
    elsewhere = Story().begins(0).open("a", SECOND).all_of("a").note("close", "a")
    assert elsewhere.open("b", SECOND).got("b", 0).broken() == ["H7"], "it moves only where it is"
    done = Story().open("a").begins(0).moved(0)
    assert "H7" in done.all_of("a").note("nack", "a").got("a", 1).broken(), "once it is known it is done once"


def test_a_move_that_nobody_heard_of_leaves_in_doubt_only_what_it_would_have_changed() -> None:
    def asked_for(entry: int) -> Story:
        return Story("Shared").open("a").got("a", 0, 1).acks("a", 0, 1).seek("a", entry, answered=False).open("b")

    assert asked_for(1).broken() == ["H5"], "2 is owed, whatever became of it"
    assert asked_for(4).got("b", 4).acks("b", 4).broken() == [], "2 and 3 may have been sought over"
    assert asked_for(1).got("b", 1, 2, 3, 4).acks("b", 2, 3, 4).broken() == [], "1 may be owed again"
    assert asked_for(1).got("b", 0).broken()[0] == "H7", "0 is not, in any case"


def test_after_a_move_that_nobody_heard_of_the_next_opening_is_judged_as_ever() -> None:
    def told() -> Story:
        return Story("Shared").open("a").all_of("a").seek("a", 1, answered=False).open("b", SECOND)

    assert told().got("b", 1, 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == [] == told().broken()
    assert told().got("b", 1).acks("b", 1).got("b", 1).broken() == ["H7"]
    assert told().got("b", 1).broken() == ["H6"], "it is owed, since it came"
    assert told().open("c", SECOND).got("b", 1).got("c", 1).acks("c", 1).broken() == ["H9"]
    ordered = Story().open("a").got("a", 0).acks("a", 0).seek("a", 0, answered=False).open("b", SECOND)
    assert ordered.got("b", 2, 3, 4).acks("b", 1, 2, 3, 4).broken() == ["H8"], "1 comes first, or 0 before it"


def test_the_next_move_that_is_answered_ends_the_doubt() -> None:
    def told() -> Story:
        return Story().open("a").all_of("a").seek("a", 1, answered=False).open("b").seek("b", 3).open("c")

    assert told().got("c", 3, 4).acks("c", 3, 4).broken() == []
    assert told().broken() == ["H6"]
    assert told().got("c", 4).acks("c", 3, 4).broken() == ["H13", "H8"]
    assert told().got("c", 3).acks("c", 3).note("nack", "c").got("c", 3, 4).acks("c", 4).broken()[0] == "H7"


def test_what_an_earlier_opening_is_asked_for_moves_no_later_one() -> None:
    told = Story("Shared").open("a").open("b", SECOND).got("b", 0, 1, 2).acks("b", 0, 1, 2)
    assert told.seek("a", 0).broken() == ["H5"]
    assert told.got("b", 0).broken()[0] == "H7"


def test_an_opening_that_was_deposed_before_a_move_stands_where_it_stood() -> None:
    told = Story().open("b", SECOND).all_of("b").note("close", "b").begins(1, SECOND).moved(1, SECOND)
    stale = told.open("a", FIRST).got("a", 3).open("c", SECOND)
    assert stale.got("c", 1, 2, 3, 4).acks("c", 1, 2, 3, 4).broken() == []


def test_only_what_could_have_failed_counts_as_asked() -> None:
    def asked(story: Story) -> set[str]:
        return set(story.judged().asked) - {"H2"}

    assert asked(Story("Shared")) == set()
    assert asked(Story("Shared").open("a")) == {"H5"}
    assert asked(Story("Shared").open("a").all_of("a")) == {"H5", "H6"}
    assert asked(Story("Shared").open("a").got("a", 0).acks("a", 0).got("a", 1)) == {"H5", "H6", "H7"}
    assert asked(Story("Shared").open("a").begins(5)) == set(), "all of it is in doubt"
    assert asked(Story().open("a").got("a", 0)) == {"H5", "H6", "H8"}
    assert asked(Story().open("a").seek("a", 2)) == {"H5"}
    assert asked(Story().open("a").seek("a", 2).open("b").got("b", 2)) == {"H5", "H6", "H7", "H8", "H13"}
    shared = Story("Key_Shared", key="k").open("a").open("b").got("a", 0)
    assert asked(shared) == {"H5", "H6", "H9", "H10"}


@pytest.mark.parametrize(("moves", "broken"), [(True, []), (False, ["H8"])])
def test_a_deposed_opening_that_is_moved_stands_where_it_was_moved_to(moves: bool, broken: list[str]) -> None:
    story = Story("Failover").open("a").open("b", SECOND)
    story = story.begins(4, FIRST, skips=1) if moves else story
    assert story.got("a", 1, 2).all_of("b").broken() == broken
