"""Decides when background adds (copies made by repair) may be admitted. No I/O; the driver passes the time in.

    no foreground add for 0.5 s ──► free: the bound is what background adds have in the journal
    foreground adds             ──► paced: │ quiet │ window │ window │ … │ quiet │ window │ …
                                             │         └─► after each: raise the rate by a step, or halve it
                                             └─► nothing is admitted: the wait of foreground adds is the baseline

The measure is the journal queue time of foreground adds: from the admission of the first one of a batch until the batch is synced.
Its median and its high quantile in a window of background adds are compared with the baseline, which adapts slowly. The median
detects a small delay of all adds where the tail is long anyway; the high quantile detects delays of only some adds.

Rule 1: the rate never falls below the floor, so that a repair ends. At the floor, adds held back in a quiet window are admitted
after it.
Rule 2: above the floor, background adds are admitted only up to `PACED_BYTES` in the journal, or one that is larger.
Rule 3: the rate is raised only after a window that used it: an unused rate says nothing about the disk.
"""

from __future__ import annotations

SLICE_BYTES = 128 << 10
"""Limit of one background add while there are foreground adds: one slice delays a foreground sync only a little."""

FREE_SLICE_BYTES = 1 << 20
"""Limit of one background add while there are no foreground adds: each slice has a fixed CPU cost."""

PACED_BYTES = 2 * SLICE_BYTES
"""Limit of background adds in the journal while there are foreground adds and the rate is above the floor."""

FREE_BYTES = 4 << 20
"""Limit of background adds in the journal while there are no foreground adds: the next one waits for them."""

IDLE_S = 0.5
_WINDOW_S = 0.1
_LONGEST_WINDOW_S = 0.5
_WINDOW_BATCHES = 8  # measured batches before a window may end early
_QUIET_EVERY = 8  # windows
_QUANTILES = (0.5, 0.9)
_TOLERATED_RATIO = 1.25
_TOLERATED_S = 0.001
_STEP_BYTES_S2 = 20 << 20  # rise of the rate per second
_BURST_S = 0.005  # a timer may be this late without loss
_FLOOR_BURST_S = 0.2  # the same at the floor: adds held back in a quiet window
_MAX_RATE_BYTES_S = 1 << 30


class BackgroundPace:
    """Owns the rate of background adds, the baseline, and the count of their bytes in the journal.

    `beside` is the pace of other work that yields to the same foreground adds (compaction): it shares what this one measures of
    them.
    """

    def __init__(self, floor_bytes_s: float, *, beside: BackgroundPace | None = None) -> None:
        self._beside = beside
        self._floor = floor_bytes_s
        self._rate = floor_bytes_s
        self._next_at = 0.0  # when the rate permits the next background add
        self._foreground_at = -IDLE_S - 1
        self._foreground_batches = 0  # in the journal
        self._baseline_s: tuple[float, ...] | None = None  # by quantile
        self._windows_since_quiet = 0
        self._window = _Window(0.0, quiet=False, clean_since=0.0)
        self.in_journal_bytes = 0
        self.slowdowns = 0

    def __repr__(self) -> str:
        baseline = "unknown" if self._baseline_s is None else " and ".join(f"{1000 * s:.1f} ms" for s in self._baseline_s)
        return f"<BackgroundPace {self._rate / 2**20:.1f} MiB/s, baseline {baseline}, {self.in_journal_bytes} B in the journal>"

    def rate_bytes_s(self, now: float) -> float | None:
        """Return the current rate; None while background adds are not limited."""
        return self._rate if self._is_paced(now) else None

    def slice_bytes(self, now: float) -> int:
        """Return the maximum size of one background add now; larger ones are cut."""
        return SLICE_BYTES if self._is_paced(now) else FREE_SLICE_BYTES

    def delay_s(self, now: float, size_bytes: int) -> float | None:
        """Return how long an add of this size must wait; None: until the journal has synced a batch.

        A quiet window may end before the returned time: ask again after each batch.
        """
        if not self._is_paced(now):
            return 0.0 if not self.in_journal_bytes or self.in_journal_bytes + size_bytes <= FREE_BYTES else None
        window = self._window
        if window.is_over(now):
            self._end_window(now)
            window = self._window
        if window.quiet:
            return window.started_at + _LONGEST_WINDOW_S - now
        if self._rate > self._floor and self.in_journal_bytes and self.in_journal_bytes + size_bytes > PACED_BYTES:
            return None
        return max(0.0, self._next_at - now)

    def on_background_admitted(self, now: float, size_bytes: int) -> None:
        """Count a background add that the journal has queued."""
        self.in_journal_bytes += size_bytes
        if not self._is_paced(now):
            return
        window = self._window
        window.background_bytes += size_bytes
        window.clean_since = None
        burst_s = max(_BURST_S, _FLOOR_BURST_S * self._floor / self._rate)
        self._next_at = max(self._next_at, now - burst_s) + size_bytes / self._rate

    def on_foreground_admitted(self, now: float) -> None:
        """Note the first foreground add of a journal batch."""
        if self._beside is not None:
            self._beside.on_foreground_admitted(now)
        if now - self._foreground_at >= IDLE_S and not self._foreground_batches:
            self._start_window(now, quiet=True)
        self._foreground_at = now
        self._foreground_batches += 1

    def on_batch(self, now: float, foreground_at: float | None, background_bytes: int, *, synced: bool) -> None:
        """Handle the end of a batch: when its first foreground add was admitted (None: it has none), and its background bytes."""
        if self._beside is not None:
            self._beside.on_batch(now, foreground_at, 0, synced=synced)
        window = self._window
        if background_bytes:
            self.in_journal_bytes -= background_bytes
            if not self.in_journal_bytes and not window.background_bytes:
                window.clean_since = now
        if foreground_at is None:
            return
        self._foreground_at = now
        self._foreground_batches -= 1
        # Not while the journal has background adds of the previous window.
        clean_since = window.clean_since
        if synced and (window.background_bytes or (clean_since is not None and foreground_at >= clean_since)):
            window.queue_times_s.append(now - foreground_at)
        if now - window.started_at >= _WINDOW_S and window.is_over(now):
            self._end_window(now)

    def _is_paced(self, now: float) -> bool:
        return self._foreground_batches > 0 or now - self._foreground_at < IDLE_S

    def _start_window(self, now: float, *, quiet: bool) -> None:
        self._window = _Window(now, quiet=quiet, clean_since=None if self.in_journal_bytes else now)

    def _end_window(self, now: float) -> None:
        window = self._window
        if window.clean_since is not None:
            if window.queue_times_s:
                self._learn_baseline(window.quantiles_s())
            self._windows_since_quiet = 0
        else:
            self._windows_since_quiet += 1
            if window.queue_times_s and self._baseline_s is not None:
                self._adapt_rate(window, now - window.started_at, self._baseline_s)
        used = window.background_bytes > 0
        self._start_window(now, quiet=used and (self._windows_since_quiet >= _QUIET_EVERY or self._baseline_s is None))

    def _learn_baseline(self, measured_s: tuple[float, ...]) -> None:
        """Adapt slowly, as one window on a shared disk says little; faster down than up, as flushes of background adds raise it."""
        known_s = self._baseline_s or measured_s
        self._baseline_s = tuple(
            known + (measured - known) / (4 if measured < known else 8) for known, measured in zip(known_s, measured_s, strict=True)
        )

    def _adapt_rate(self, window: _Window, duration_s: float, baseline_s: tuple[float, ...]) -> None:
        if any(
            measured > max(_TOLERATED_RATIO * known, known + _TOLERATED_S)
            for known, measured in zip(baseline_s, window.quantiles_s(), strict=True)
        ):
            if self._rate > self._floor:
                self._rate = max(self._floor, self._rate / 2)
                self.slowdowns += 1
        elif window.background_bytes >= self._rate * duration_s / 2:  # rule 3
            self._rate = min(_MAX_RATE_BYTES_S, self._rate + _STEP_BYTES_S2 * duration_s)


class _Window:
    """A short period and the waits of foreground adds in it.

    `clean_since`: the journal has had no background adds since; None: it has some, or had some that were admitted in the window.
    """

    __slots__ = ("background_bytes", "clean_since", "queue_times_s", "quiet", "started_at")

    def __init__(self, started_at: float, *, quiet: bool, clean_since: float | None) -> None:
        self.started_at = started_at
        self.quiet = quiet
        self.clean_since = clean_since
        self.background_bytes = 0
        self.queue_times_s: list[float] = []

    def is_over(self, now: float) -> bool:
        """Whether enough was measured, or enough time has passed."""
        age_s = now - self.started_at
        return age_s >= _LONGEST_WINDOW_S or (age_s >= _WINDOW_S and len(self.queue_times_s) >= _WINDOW_BATCHES)

    def quantiles_s(self) -> tuple[float, ...]:
        """Return the quantiles of the measurements, of which there must be at least one."""
        ordered = sorted(self.queue_times_s)
        return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in _QUANTILES)
