"""The channel against a transport that the test itself plays: what travels together, who hears of what, and what is bounded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from cepheid_ledger import LedgerSettings
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.lane import Lane, merge_small
from cepheid_rpc import (
    AddAnswer,
    AddRequest,
    AddSource,
    AddStream,
    BookieUnavailableError,
    LacAnswer,
    LacRequest,
    Status,
    encode_group,
)
from tests.ledger.ledger_world import FAST
from tests.support import run_virtual, wait_until


class Transport:
    """A connection whose streams do nothing by themselves."""

    bookie_id = "a"

    def __init__(self) -> None:
        self.sources: list[AddSource] = []
        self.wakes = 0
        self.closed = 0

    @property
    def source(self) -> AddSource:
        return self.sources[-1]

    def open_add_stream(self, source: AddSource) -> AddStream:
        self.sources.append(source)
        return self

    def wake(self) -> None:
        self.wakes += 1

    async def aclose(self) -> None:
        self.closed += 1

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        raise NotImplementedError

    def take(self, max_bytes: int = 1 << 20) -> list[tuple[int, int, int]]:
        """(ledger, first, last) of what goes into the next message."""
        return [ids(request) for request in self.source.next_message(max_bytes)]

    def answer(self, *answers: tuple[int, int, int], status: Status = Status.OK) -> None:
        self.source.on_answers([AddAnswer(*answer, status) for answer in answers])


class Listener:
    def __init__(self, spare: bool = False) -> None:
        self.added: list[int] = []
        self.failures: list[str] = []
        self.refusals: list[Status] = []
        self.spare = spare

    def on_added(self, bookie_id: str, last_entry_id: int) -> None:
        self.added.append(last_entry_id)

    def on_add_failed(self, bookie_id: str, reason: str) -> None:
        self.failures.append(reason)

    def on_refused_for_good(self, bookie_id: str, status: Status) -> None:
        self.refusals.append(status)

    def can_do_without(self, bookie_id: str) -> bool:
        return self.spare


def ids(request: AddRequest) -> tuple[int, int, int]:
    return request.group.ledger_id, request.group.first_entry_id, request.group.last_entry_id


def add(ledger_id: int, first: int, last: int, size: int = 10) -> AddRequest:
    return AddRequest(encode_group(ledger_id, first, first - 1, 0, [bytes(size)] * (last - first + 1)), b"k" * 16)


class Setting:
    """One channel, one ledger 7 with a lane."""

    def __init__(self, settings: LedgerSettings = FAST) -> None:
        self.transport = Transport()
        self.unavailable = False
        self.channel = BookieChannel("a", self.connection_of, settings)
        self.listener = Listener()
        self.lane = self.channel.open_lane(7, self.listener)

    def connection_of(self, bookie_id: str) -> Any:
        if self.unavailable:
            raise BookieUnavailableError(f"{bookie_id} is not registered")
        return self.transport

    def send(self, *ranges: tuple[int, int], size: int = 5_000) -> None:
        """Groups too large to be merged, unless `size` says otherwise."""
        for first, last in ranges:
            self.channel.send(self.lane, add(7, first, last, size))


def in_setting(test: object, settings: LedgerSettings = FAST) -> None:
    async def main() -> None:
        setting = Setting(settings)
        try:
            await test(setting)  # type: ignore[operator]
        finally:
            await setting.channel.aclose()
        assert setting.channel.statistics().waiting_bytes == 0, "bytes leaked"
        assert setting.channel.statistics().lanes == 0

    run_virtual(main())


def test_what_waits_travels_together_ledger_by_ledger() -> None:
    async def test(s: Setting) -> None:
        other = Listener()
        lane = s.channel.open_lane(8, other)
        s.send((0, 1))
        s.channel.send(lane, add(8, 0, 0))
        s.send((2, 2))
        assert s.transport.take() == [(7, 0, 1), (7, 2, 2), (8, 0, 0)]
        assert s.transport.take() == []
        s.transport.answer((8, 0, 0), (7, 0, 2))
        assert (s.listener.added, other.added) == ([2], [0])

    in_setting(test)


def test_a_message_is_bounded_and_ledgers_take_turns() -> None:
    async def test(s: Setting) -> None:
        lane = s.channel.open_lane(8, Listener())
        s.send(*[(n, n) for n in range(3)])
        s.channel.send(lane, add(8, 0, 0))
        assert s.transport.take(max_bytes=6_000) == [(7, 0, 0), (7, 1, 1)], "soft by one request of 5,036 bytes"
        assert s.transport.take(max_bytes=6_000) == [(8, 0, 0), (7, 2, 2)], "the other ledger first, then what was left"

    in_setting(test)


def test_small_groups_of_a_ledger_travel_as_one() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 1), (2, 2), size=100)
        s.send((3, 3))
        s.send((4, 4), (5, 5), (6, 8), size=100)
        message = s.transport.source.next_message(1 << 20)
        assert [ids(request) for request in message] == [(7, 0, 2), (7, 3, 3), (7, 4, 8)]
        for request in message:
            request.group.verify()
        s.transport.answer((7, 0, 1))
        s.transport.answer((7, 2, 8))
        assert s.listener.added == [1, 8]

    in_setting(test)


def test_merged_groups_stay_background_adds_and_are_not_mixed_with_others() -> None:
    background = [dataclasses.replace(add(7, n, n), recovery=True, background=True) for n in range(2)]
    merged = merge_small([*background, add(7, 2, 2), add(7, 3, 3)])
    assert [(*ids(request), request.recovery, request.background) for request in merged] == [
        (7, 0, 1, True, True),
        (7, 2, 3, False, False),
    ]


@pytest.mark.parametrize(
    "answers",
    [
        [(7, 0, 5)],  # one answer for several requests
        [(7, 0, 2), (7, 3, 5)],
        [(7, 0, 0), (7, 1, 1), (7, 2, 4), (7, 5, 5)],  # parts of requests
    ],
)
def test_answers_may_cover_parts_or_several_requests(answers: Sequence[tuple[int, int, int]]) -> None:
    async def test(s: Setting) -> None:
        s.send((0, 2), (3, 4), (5, 5))
        s.transport.take()
        for answer in answers:
            s.transport.answer(answer)
        assert s.listener.added == [last for _, _, last in answers]
        assert s.channel.statistics().waiting_bytes == 0

    in_setting(test)


@pytest.mark.parametrize("answer", [(7, 1, 2), (7, 0, 9), (9, 0, 0), (7, 2, 1), (7, 0, -1)])
def test_an_answer_to_nothing_drops_the_stream(answer: tuple[int, int, int]) -> None:
    async def test(s: Setting) -> None:
        s.send((0, 2))
        s.transport.take()
        s.transport.answer(answer)
        assert s.listener.added == []
        assert "which it was not asked" in s.listener.failures[0]
        await wait_until(lambda: s.transport.closed == 1)

    in_setting(test)


def test_a_broken_stream_fails_what_was_unanswered_and_keeps_what_was_not_sent() -> None:
    async def test(s: Setting) -> None:
        unsent = Listener()
        s.send((0, 0))
        s.transport.take()
        lane = s.channel.open_lane(8, unsent)
        s.channel.send(lane, add(8, 0, 0))
        s.send((1, 1))
        s.transport.source.on_broken(BookieUnavailableError("reset"))
        assert len(s.listener.failures) == 1
        assert unsent.failures == []
        await wait_until(lambda: len(s.transport.sources) == 2, what="a new stream")
        assert s.transport.take() == [(8, 0, 0)], "and nothing of the failed ledger"
        s.transport.answer((8, 0, 0))
        assert unsent.added == [0]

    in_setting(test)


def test_a_bookie_that_is_not_registered_is_waited_for() -> None:
    async def test(s: Setting) -> None:
        s.unavailable = True
        s.send((0, 0))
        await wait_until(lambda: s.channel.statistics().streams_broken >= 2)
        s.unavailable = False
        await wait_until(lambda: bool(s.transport.sources))
        assert s.transport.take() == [(7, 0, 0)]
        s.transport.answer((7, 0, 0))
        assert s.listener.added == [0]

    in_setting(test)


def test_ledgers_that_gave_a_dead_bookie_up_are_not_remembered() -> None:
    async def test(s: Setting) -> None:
        s.unavailable = True
        for ledger_id in range(8, 28):
            listener = Listener()
            lane = s.channel.open_lane(ledger_id, listener)
            s.channel.send(lane, add(ledger_id, 0, 0))
            s.channel.close_lane(lane)
        s.send((0, 0))
        await wait_until(lambda: bool(s.listener.failures))
        await wait_until(lambda: len(s.channel._ready) == 0)

    in_setting(test)


def test_a_pause_longer_than_the_timeout_is_no_silence() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0), status=Status.OVERLOADED)
        await wait_until(lambda: bool(s.lane.queue))
        assert s.listener.failures == []

    in_setting(test, FAST.model_copy(update={"add_timeout_s": 0.05, "refusal_delay_s": 0.2, "refusal_retry_s": 5.0}))


def test_news_of_a_dropped_stream_reach_nobody() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        old = s.transport.source
        old.on_broken(BookieUnavailableError("reset"))
        again = Listener()
        lane = s.channel.open_lane(7, again)
        s.channel.send(lane, add(7, 0, 0))
        await wait_until(lambda: len(s.transport.sources) == 2)
        s.transport.take()
        old.on_answers([AddAnswer(7, 0, 0, Status.OK)])
        old.on_broken(BookieUnavailableError("again"))
        assert old.next_message(1 << 20) == ()
        assert (again.added, again.failures) == ([], [])

    in_setting(test)


def test_pauses_between_attempts_grow() -> None:
    async def test(s: Setting) -> None:
        for attempt in range(1, 4):
            s.channel.send(s.channel.open_lane(attempt, Listener()), add(attempt, 0, 0))
            await wait_until(lambda: len(s.transport.sources) == attempt)  # noqa: B023 - awaited within the turn
            broken_at = asyncio.get_running_loop().time()
            s.transport.source.on_broken(BookieUnavailableError("reset"))
        await wait_until(lambda: len(s.transport.sources) == 4)
        assert asyncio.get_running_loop().time() - broken_at > 0.03, "10 ms, 20 ms, then 40 ms"

    in_setting(test, FAST.model_copy(update={"add_timeout_s": 60.0}))  # no tick comes in between


def test_a_bookie_that_came_back_is_not_kept_waiting_for_the_end_of_a_pause() -> None:
    async def test(s: Setting) -> None:
        s.channel.reopen_now()  # for nobody
        s.send((0, 0))
        s.transport.take()
        s.transport.source.on_broken(BookieUnavailableError("reset"))
        again = s.channel.open_lane(8, Listener())
        s.channel.send(again, add(8, 0, 0))
        assert len(s.transport.sources) == 1
        s.channel.reopen_now()
        assert len(s.transport.sources) == 2
        assert s.transport.take() == [(8, 0, 0)]

    in_setting(test, FAST.model_copy(update={"reconnect_delay_s": 60.0, "add_timeout_s": 60.0}))


@pytest.mark.parametrize("status", [Status.FENCED, Status.UNAUTHORIZED])
def test_a_fatal_refusal_ends_the_lane(status: Status) -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0), (1, 1))
        s.transport.take()
        s.transport.answer((7, 0, 0), status=status)
        assert s.listener.refusals == [status]
        s.transport.answer((7, 1, 1), status=status)
        assert s.listener.refusals == [status], "told once"
        s.send((2, 2))
        assert s.transport.take() == []

    in_setting(test)


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.READ_ONLY, Status.UNKNOWN, Status.STOPPED, Status.BAD_DIGEST])
def test_any_other_refusal_fails_the_bookie_for_this_ledger(status: Status) -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0), status=status)
        assert status.name in s.listener.failures[0]

    in_setting(test)


def test_refused_entries_go_again_with_all_that_follow_in_order() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0), (1, 1), (2, 2))
        s.transport.take()
        s.send((3, 3))
        s.transport.answer((7, 0, 0))
        s.transport.answer((7, 1, 1), status=Status.OVERLOADED)
        assert s.transport.take() == [], "an overloaded bookie gets nothing more of this ledger"
        s.send((4, 4))
        s.transport.answer((7, 2, 2))
        assert s.listener.added == [0], "2 is held, 1 is not"
        await wait_until(lambda: bool(s.lane.queue and s.lane.refused is None), what="the pause to end")
        assert s.transport.take() == [(7, n, n) for n in (1, 2, 3, 4)]
        s.transport.answer((7, 1, 4))
        assert s.listener.added == [0, 4]
        assert s.channel.statistics().refusals == 1

    in_setting(test)


def test_a_request_refused_in_part_is_repeated_as_a_whole_and_progress_never_falls() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 3))
        s.transport.take()
        s.transport.answer((7, 0, 1))
        s.transport.answer((7, 2, 3), status=Status.NO_SPACE)
        await wait_until(lambda: bool(s.lane.queue and s.lane.refused is None))
        assert s.transport.take() == [(7, 0, 3)]
        s.transport.answer((7, 0, 0))
        s.transport.answer((7, 1, 3))
        assert s.listener.added == [1, 3]

    in_setting(test)


def test_a_bookie_that_refuses_for_too_long_has_failed() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        deadline = asyncio.get_running_loop().time() + 5
        while not s.listener.failures:
            assert asyncio.get_running_loop().time() < deadline
            if s.transport.take():
                s.transport.answer((7, 0, 0), status=Status.NO_SPACE)
            await asyncio.sleep(0.001)
        assert "refused entries for 0.3 s" in s.listener.failures[0]
        assert s.channel.statistics().refusals > 3

    in_setting(test)


def test_an_answer_for_two_lanes_of_one_ledger_reaches_both() -> None:
    """A writer that failed and a recovery of the same ledger share a stream."""

    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        recovery = Listener()
        lane = s.channel.open_lane(7, recovery)
        s.channel.send(lane, add(7, 1, 1))
        s.transport.take()
        s.transport.answer((7, 0, 1))
        assert (s.listener.added, recovery.added) == ([0], [1])

    in_setting(test)


def test_a_recovery_that_sends_lower_entries_does_not_make_the_answers_of_the_writer_before_it_look_wrong() -> None:
    async def test(s: Setting) -> None:
        s.send((5, 6), (7, 7))
        s.transport.take()
        s.channel.close_lane(s.lane)
        recovery = Listener()
        lane = s.channel.open_lane(7, recovery)
        s.channel.send(lane, add(7, 3, 4))
        s.transport.take()
        s.transport.answer((7, 5, 7), status=Status.FENCED)
        s.transport.answer((7, 3, 4))
        assert (recovery.added, recovery.failures) == ([4], [])
        assert s.channel.statistics().streams_broken == 0

    in_setting(test)


def test_an_answer_across_a_gap_between_requests_drops_the_stream() -> None:
    async def test(s: Setting) -> None:
        s.send((3, 4))
        s.transport.take()
        lane = s.channel.open_lane(7, Listener())
        s.channel.send(lane, add(7, 6, 9))
        s.transport.take()
        s.transport.answer((7, 3, 6))
        assert s.listener.added == []
        assert "which it was not asked" in s.listener.failures[0]

    in_setting(test)


def test_answers_to_a_closed_lane_are_not_taken_for_those_of_its_successor() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.channel.close_lane(s.lane)
        recovery = Listener()
        lane = s.channel.open_lane(7, recovery)
        s.channel.send(lane, add(7, 0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0))
        assert recovery.added == [], "this answered the writer's add"
        s.transport.answer((7, 0, 0))
        assert recovery.added == [0]

    in_setting(test)


def test_a_bookie_that_answers_nothing_for_a_ledger_fails_for_that_ledger_only() -> None:
    async def test(s: Setting) -> None:
        lively = Listener()
        lane = s.channel.open_lane(8, lively)
        s.send((0, 0))
        entry_id = 0
        deadline = asyncio.get_running_loop().time() + 5
        while not s.listener.failures:
            assert asyncio.get_running_loop().time() < deadline
            s.channel.send(lane, add(8, entry_id, entry_id))
            s.transport.take()
            s.transport.answer((8, entry_id, entry_id))
            entry_id += 1
            await asyncio.sleep(0.005)
        assert "answered nothing for 0.2 s" in s.listener.failures[0]
        assert lively.failures == []
        assert len(s.transport.sources) == 1, "the stream itself is well"

    in_setting(test)


def test_a_stream_on_which_nothing_moves_is_dropped() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        await wait_until(lambda: bool(s.listener.failures))
        assert s.channel.statistics().streams_broken == 1

    in_setting(test)


def test_an_idle_channel_has_no_timer_and_an_idle_ledger_does_not_fail() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0))
        await asyncio.sleep(0.15)  # a few ticks: the last one finds nothing to do
        assert s.channel._ticker is None
        s.send((1, 1))
        await asyncio.sleep(0.1)
        s.transport.take()
        s.transport.answer((7, 1, 1))
        assert s.listener.failures == []

    in_setting(test)


def test_a_full_window_gives_up_those_who_can_do_without_this_bookie() -> None:
    async def test(s: Setting) -> None:
        spare = Listener(spare=True)
        lane = s.channel.open_lane(8, spare)
        s.channel.send(lane, add(8, 0, 0, size=500))
        s.send((0, 0), size=10)
        assert spare.failures == []
        s.channel.send(s.lane, add(7, 1, 1, size=600))
        assert "more than 2000 bytes" in spare.failures[0]
        assert s.listener.failures == [], "its publishers are bounded elsewhere"
        assert s.channel.statistics().waiting_bytes == 10 + 600 + 2 * (36 + 512)

    in_setting(test, FAST.model_copy(update={"channel_window_bytes": 2_000}))


@pytest.mark.parametrize("end", ["answered", "broken"])
def test_a_window_that_was_overfull_is_as_small_as_before_when_it_has_drained(end: str) -> None:
    async def test(s: Setting) -> None:
        for first in range(10):
            s.send((first, first), size=2_000)  # its publishers have as much unanswered
        s.transport.take()
        if end == "answered":
            s.transport.answer((7, 0, 9))
        else:
            s.channel.drop_stream(ConnectionError("cut"))
        assert s.channel.statistics().waiting_bytes == 0
        spare = Listener(spare=True)
        lane = s.channel.open_lane(8, spare)
        for first in range(3):
            s.channel.send(lane, add(8, first, first, size=500))
        assert spare.failures, f"{s.channel!r}"

    in_setting(test, FAST.model_copy(update={"channel_window_bytes": 2_000}))


@pytest.mark.parametrize("end", ["close", "fail"])
def test_a_lane_that_ends_while_it_waits_to_repeat_repeats_nothing(end: str) -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0), status=Status.OVERLOADED)
        assert len(s.channel._repeaters) == 1
        if end == "close":
            s.channel.close_lane(s.lane)
        else:
            await s.channel.aclose()
            assert s.listener.failures == ["the ledger client was closed"]
        assert s.channel._repeaters == {}

    in_setting(test)


def test_pauses_before_refused_entries_go_again_grow_up_to_a_bound() -> None:
    lane = Lane(7, Listener())
    pauses = []
    for _ in range(7):
        lane.start_refusal(now=0.0, first_delay_s=1.0)
        pauses.append(lane.delay_s)
        lane.repeat()
    assert pauses == [1, 2, 4, 8, 16, 25, 25]


@pytest.mark.parametrize(("status", "missed"), [(Status.OK, []), (Status.IO_ERROR, ["a"]), (Status.FENCED, ["a"])])
def test_a_writer_that_left_learns_only_that_a_bookie_missed_entries(status: Status, missed: list[str]) -> None:
    async def test(s: Setting) -> None:
        found: list[str] = []
        s.send((0, 0))
        s.transport.take()
        s.channel.leave_lane(s.lane, found.append)
        s.transport.answer((7, 0, 0), status=status)
        assert (s.listener.added, s.listener.failures, s.listener.refusals) == ([], [], [])
        assert (found, s.lane.closed) == (missed, True)

    in_setting(test)


def test_a_channel_that_is_closed_reports_what_it_did_not_deliver_to_a_writer_that_left() -> None:
    async def test(s: Setting) -> None:
        found: list[str] = []
        s.send((0, 0))
        s.transport.take()
        s.channel.leave_lane(s.lane, found.append)
        await s.channel.aclose()
        assert (found, s.lane.closed) == (["a"], True)

    in_setting(test)


def test_what_goes_again_after_a_long_pause_has_its_time_to_be_answered() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0))
        s.transport.take()
        s.transport.answer((7, 0, 0), status=Status.OVERLOADED)
        await wait_until(lambda: bool(s.lane.queue))
        s.transport.take()
        ticks = s.channel._tick
        await wait_until(lambda: s.channel._tick >= ticks + 2, what="two of the four ticks of a timeout")
        assert s.listener.failures == []
        s.transport.answer((7, 0, 0))
        assert s.listener.added == [0]

    in_setting(test, FAST.model_copy(update={"add_timeout_s": 0.4, "refusal_delay_s": 1.0, "refusal_retry_s": 30.0}))


def test_the_patience_with_refusals_begins_anew_after_an_ok() -> None:
    async def test(s: Setting) -> None:
        for entry_id in range(2):
            s.send((entry_id, entry_id))
            s.transport.take()
            s.transport.answer((7, entry_id, entry_id), status=Status.OVERLOADED)
            assert s.listener.failures == []
            await wait_until(lambda: bool(s.lane.queue))
            s.transport.take()
            s.transport.answer((7, entry_id, entry_id))
            await asyncio.sleep(0.06)
        assert s.listener.added == [0, 1]

    in_setting(test, FAST.model_copy(update={"refusal_retry_s": 0.05}))


def test_a_refusal_for_a_lane_that_closed_meanwhile_keeps_nothing() -> None:
    async def test(s: Setting) -> None:
        s.send((0, 0), (1, 1))
        s.transport.take()
        s.channel.close_lane(s.lane)
        s.transport.answer((7, 0, 1), status=Status.OVERLOADED)
        assert s.channel.statistics().waiting_bytes == 0
        assert s.lane.refused is None

    in_setting(test)
