"""The pace of background adds: free without foreground adds, else as fast as these do not notice, and never below the floor."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cepheid_bookie.background_pace import FREE_BYTES, FREE_SLICE_BYTES, IDLE_S, PACED_BYTES, SLICE_BYTES, BackgroundPace

MiB = 1 << 20
FLOOR = 2 * MiB
STEP_S = 0.0005
ENTRY_BYTES = 1_000


@dataclass
class Journal:
    """A journal with one batch in flight, which takes `base_s` and its bytes at `bytes_s`; foreground adds at a steady rate."""

    pace: BackgroundPace
    base_s: float = 0.001
    bytes_s: float = 400e6
    now: float = 100.0
    background_bytes: int = 0  # admitted
    _open_at: float | None = None
    _open_background: int = 0
    _in_flight: tuple[float | None, int] | None = None
    _done_at: float = 0.0

    def run(self, seconds: float, *, foreground_s: float | None = 0.0005, background: bool = True) -> list[float]:
        """Returns how long the first foreground add of each batch waited."""
        waited = []
        end, due = self.now + seconds, self.now
        while self.now < end:
            if foreground_s is not None and self.now >= due:
                due += foreground_s
                if self._open_at is None:
                    self._open_at = self.now
                    self.pace.on_foreground_admitted(self.now)
            if self._in_flight is not None and self.now >= self._done_at:
                foreground_at, size = self._in_flight
                self._in_flight = None
                self.pace.on_batch(self.now, foreground_at, size, synced=True)
                if foreground_at is not None:
                    waited.append(self.now - foreground_at)
            while background and self.pace.delay_s(self.now, SLICE_BYTES) == 0:
                self.pace.on_background_admitted(self.now, SLICE_BYTES)
                self._open_background += SLICE_BYTES
                self.background_bytes += SLICE_BYTES
            if self._in_flight is None and (self._open_at is not None or self._open_background):
                self._in_flight, self._open_at, self._open_background = (self._open_at, self._open_background), None, 0
                self._done_at = self.now + self.base_s + self._in_flight[1] / self.bytes_s
            self.now += STEP_S
        return waited

    @property
    def rate_bytes_s(self) -> float:
        rate = self.pace.rate_bytes_s(self.now)
        assert rate is not None, "there are no foreground adds"
        return rate


def p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


def test_without_foreground_adds_only_the_bytes_in_the_journal_are_bounded() -> None:
    pace = BackgroundPace(FLOOR)
    for _ in range(FREE_BYTES // SLICE_BYTES):
        assert pace.delay_s(1.0, SLICE_BYTES) == 0
        pace.on_background_admitted(1.0, SLICE_BYTES)
    assert pace.delay_s(1.0, SLICE_BYTES) is None
    pace.on_batch(1.1, None, FREE_BYTES, synced=True)
    assert pace.delay_s(1.1, 2 * FREE_BYTES) == 0  # one add is always possible
    assert pace.rate_bytes_s(1.1) is None


def test_adds_are_cut_smaller_while_there_are_foreground_adds() -> None:
    pace = BackgroundPace(FLOOR)
    assert pace.slice_bytes(1.0) == FREE_SLICE_BYTES
    pace.on_foreground_admitted(1.0)
    assert pace.slice_bytes(1.0) == SLICE_BYTES
    pace.on_batch(1.1, 1.0, 0, synced=True)
    assert (pace.slice_bytes(1.1), pace.slice_bytes(1.1 + IDLE_S)) == (SLICE_BYTES, FREE_SLICE_BYTES)


def test_the_first_background_adds_wait_until_the_baseline_is_known() -> None:
    journal = Journal(BackgroundPace(FLOOR))
    journal.run(0.05)
    assert journal.background_bytes == 0
    journal.run(0.3)
    assert journal.background_bytes > 0


def test_a_fast_journal_is_used_and_foreground_adds_hardly_notice() -> None:
    journal = Journal(BackgroundPace(FLOOR))
    before = journal.run(2, background=False)
    beside = journal.run(10)
    assert journal.background_bytes > 10 * 15 * MiB
    assert p90(beside) <= p90(before) + 0.0015


def test_a_slow_journal_gets_the_floor_and_recovers() -> None:
    journal = Journal(BackgroundPace(FLOOR))
    journal.run(8)
    fast = journal.rate_bytes_s
    journal.bytes_s = 10e6
    journal.run(4)
    assert journal.pace.slowdowns >= 3
    admitted = journal.background_bytes
    journal.run(10)
    assert 0.95 * FLOOR <= (journal.background_bytes - admitted) / 10 <= 2 * FLOOR
    journal.bytes_s = 400e6
    journal.run(8)
    assert journal.rate_bytes_s > fast / 2


def test_what_foreground_adds_do_to_themselves_is_not_blamed_on_background_adds() -> None:
    journal = Journal(BackgroundPace(FLOOR))
    journal.run(5)
    journal.base_s = 0.006  # a flush of a neighbour, say
    journal.run(20)
    slowed = journal.pace.slowdowns
    journal.run(5)
    assert journal.rate_bytes_s > 10 * MiB
    assert journal.pace.slowdowns - slowed <= 10, "the baseline did not adapt"


def test_an_unused_rate_does_not_grow() -> None:
    journal = Journal(BackgroundPace(FLOOR))
    journal.run(3)
    rate = journal.rate_bytes_s
    journal.run(60, background=False)
    assert journal.rate_bytes_s <= rate + 5 * MiB  # the window that was under way


def test_background_adds_are_free_again_when_foreground_adds_end() -> None:
    journal = Journal(BackgroundPace(FLOOR), bytes_s=100e6)
    journal.run(2)
    journal.run(IDLE_S + 0.1, foreground_s=None)
    assert journal.pace.rate_bytes_s(journal.now) is None
    admitted = journal.background_bytes
    journal.run(1, foreground_s=None)
    assert journal.background_bytes - admitted > 80e6


histories = st.lists(
    st.tuples(
        st.floats(0.01, 1.5),  # seconds
        st.sampled_from([None, 0.0005, 0.02, 0.4, 2.0]),  # between foreground adds
        st.booleans(),
        st.sampled_from([1e6, 10e6, 400e6]),  # the journal's bytes a second
        st.sampled_from([0.0, 0.001, 0.3]),  # the time of a sync
    ),
    max_size=6,
)


@given(histories)
def test_bounds_hold_in_any_history(history: list[tuple[float, float | None, bool, float, float]]) -> None:
    pace = BackgroundPace(FLOOR)
    journal = Journal(pace)
    on_background_admitted = pace.on_background_admitted

    def check_bound(now: float, size_bytes: int) -> None:
        rate = pace.rate_bytes_s(now)
        on_background_admitted(now, size_bytes)
        if rate is None:
            assert pace.in_journal_bytes <= FREE_BYTES
        elif rate > FLOOR:
            assert pace.in_journal_bytes <= PACED_BYTES

    pace.on_background_admitted = check_bound  # type: ignore[method-assign]
    for seconds, foreground_s, background, bytes_s, base_s in history:
        journal.bytes_s, journal.base_s = bytes_s, base_s
        journal.run(seconds, foreground_s=foreground_s, background=background)
        rate = pace.rate_bytes_s(journal.now)
        assert rate is None or rate >= FLOOR
    journal.run(60, foreground_s=None, background=False)
    assert pace.in_journal_bytes == 0
