"""Keeps a query's lease in the background: creates it for new topics, renews it, moves it up to what Spark has committed.

    hold (waits)   want, move (at once, coalesced) ──► one thread ──► Lease's calls, some at a time, retried after failures

Rules
1. `covers` a topic: the subscription exists; only then is the topic read.
2. `has_held`: it existed without a gap since the query's start, as far as the lease itself shows (rule 6 of lease.py). One that
   vanished (expired while the query was down, or was deleted) is created again at the query's position, but earlier entries
   may be lost. So they may if it was moved further on: each renewal checks that, and moves it back.
3. A failure affects only its topic: the leases of all others are renewed and moved.
4. A missing topic is not covered, and not created for its lease: when it is found again, the lease is requested again.
5. Once another query has the lease, nothing more is done to it: `check` raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from cepheid_decode import MessagePosition
from cepheid_ports import CepheidError
from cepheid_spark.lease import AT_ONCE, Held, Lease, call_all, drop_all
from cepheid_spark.lease_holder import LeaseTakenError

log = logging.getLogger(__name__)

RENEW_S = 60.0
_RETRY_S = 2.0
_LOOK_AGAIN_S = 0.2
_ANYWHERE = MessagePosition(0, 0)  # for a lease that was found: after the query's position


class LeaseKeeper:
    def __init__(self, lease: Lease, *, renew_s: float = RENEW_S, at_once: int = AT_ONCE, patience_s: float = 5.0) -> None:
        self._lease = lease
        self._renew_s = renew_s
        self._at_once = at_once
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._wanted: dict[str, tuple[MessagePosition, bool]] = {}
        self._moves: dict[str, MessagePosition] = {}
        self._at: dict[str, MessagePosition] = {}  # where it is created again; its keys are covered
        self._stands: dict[str, MessagePosition] = {}  # its position, as far as this process set it
        self._new: set[str] = set()  # created by this process
        self._broken: set[str] = set()  # rule 2
        self._failing: set[str] = set()  # those of the last round
        self._taken: LeaseTakenError | None = None
        self._renewed_at = time.monotonic()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.moved = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<LeaseKeeper {self.name}, {len(self._at)} topics, {self.moved} moves, {self.failures} failures>"

    @property
    def name(self) -> str:
        return self._lease.name

    def covers(self, topic: str) -> bool:
        with self._changed:
            return topic in self._at

    def has_held(self, topic: str) -> bool:
        with self._changed:
            return topic in self._at and topic not in self._broken

    def hold(self, firsts: Mapping[str, MessagePosition], *, must_exist: bool = False, takes: bool = True) -> None:
        """Return when all existing topics are covered. `must_exist`: the query has run before. Raises CepheidError.

        `takes`: also take the lease from another query. Otherwise `check` raises if there is one, and `take` takes it then.
        If this fails, or the lease belongs to another query, what was created here is deleted: the next start creates it again.
        """
        with self._changed:
            missing, new_before = sorted(firsts.keys() - self._at.keys()), set(self._new)
        calls = [partial(self._hold, topic, firsts[topic], must_exist=must_exist, takes=takes) for topic in missing]
        failures = call_all(calls, self._at_once, until=Exception)
        if (failures or self._taken is not None) and not must_exist:
            self._unmake([topic for topic in missing if topic in self._new - new_before])
        if failures:
            raise failures[0]
        self._start()
        with self._changed:
            self._changed.notify()  # paused while the lease belongs to another query

    def _unmake(self, topics: Sequence[str]) -> None:
        drop_all(self._lease, topics, self._at_once)
        with self._changed:
            places = {topic: self._at[topic] for topic in topics}
        self.forget(topics)
        with self._changed:
            if self._taken is not None:  # `take` creates it again there
                self._at |= places

    def check(self) -> None:
        """Raise LeaseTakenError if another query has the lease."""
        if self._taken is not None:
            raise self._taken

    def take(self, firsts: Mapping[str, MessagePosition]) -> None:
        """Take the lease for this query, which continues at `firsts`:

        the holder is its own earlier process, or must be notified.
        """
        with self._changed:
            is_taken, self._taken = self._taken is not None, None
            again = {topic: firsts.get(topic, at) for topic, at in self._at.items() if is_taken or firsts.get(topic, at) < at}
            for topic in again:
                del self._at[topic]
        if again:
            self.hold(again, must_exist=True)

    def doubt(self) -> None:
        """Note that the query has run before, so that leases created by this process were missing."""
        with self._changed:
            self._broken |= self._new

    def want(self, topic: str, first: MessagePosition, *, must_exist: bool = False) -> None:
        """Hold in the background, like `hold`."""
        with self._changed:
            if self._taken is None and topic not in self._at and topic not in self._wanted:
                self._wanted[topic] = first, must_exist
                self._changed.notify()
        self._start()

    def move(self, firsts: Mapping[str, MessagePosition]) -> None:
        """Forward only."""
        with self._changed:
            for topic, first in firsts.items() if self._taken is None else ():
                if topic in self._at and first > self._moves.get(topic, self._stands.get(topic, _ANYWHERE)):
                    self._moves[topic] = first
            self._changed.notify()

    def forget(self, topics: Iterable[str]) -> None:
        """Forget topics that are deleted."""
        with self._changed:
            for topic in topics:
                self._wanted.pop(topic, None)
                for places in (self._moves, self._at, self._stands):
                    places.pop(topic, None)
                for marked in (self._new, self._broken, self._failing):
                    marked.discard(topic)

    def drop(self) -> None:
        """Delete the lease if this process created it and no offset names it."""
        with self._changed:
            topics = sorted(self._at)
        self.close()
        drop_all(self._lease, topics, self._at_once)

    def close(self) -> None:
        """Stop; the subscription stays."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cepheid-lease", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            pause_s: float | None = None
            try:
                self._work()
            except Exception as error:  # a defect must not end the leases of a query that continues
                self.failures += 1
                pause_s = _RETRY_S
                facts = {"subscription": self.name, "failures": self.failures}
                log.warning("lease.failed: %s: %s", self.name, error, extra=facts, exc_info=not isinstance(error, CepheidError))
            with self._changed:
                if self._closed or (pause_s is None and (self._wanted or self._moves)):
                    continue
                if self._taken is None and pause_s is None:
                    pause_s = max(0.05, self._renewed_at + self._renew_s - time.monotonic())
                self._changed.wait(pause_s)  # taken: until it is taken back, or closed

    def _work(self) -> None:
        if self._taken is not None:
            return  # rule 5
        is_renewal = time.monotonic() - self._renewed_at >= self._renew_s
        with self._changed:
            wanted, moves = dict(self._wanted), dict(self._moves)
            renewed = sorted(self._at) if is_renewal else []
        calls = [(topic, partial(self._hold_wanted, topic)) for topic in wanted]
        calls += [(topic, partial(self._move, topic, first)) for topic, first in moves.items()]
        if is_renewal:
            self._renewed_at = time.monotonic()  # failed ones are renewed the next time
        failures = self._all(calls) + self._all([(topic, partial(self._renew, topic)) for topic in renewed])  # moved, then checked
        if failures:
            raise failures[0]

    def _all(self, calls: Sequence[tuple[str, Callable[[], None]]]) -> list[Exception]:
        """Make calls (rule 3). Calls to unavailable brokers do not delay the others."""
        in_order = sorted(calls, key=lambda call: call[0] in self._failing)
        return call_all([partial(self._unless_ended, *call) for call in in_order], self._at_once)

    def _unless_ended(self, topic: str, call: Callable[[], None]) -> None:
        if self._closed or self._taken is not None:
            return
        self._failing.add(topic)
        try:
            call()
        except LeaseTakenError as error:
            self._on_taken(error)
        self._failing.discard(topic)

    def _on_taken(self, error: LeaseTakenError) -> None:
        log.warning("lease.taken: %s", error, extra={"subscription": self.name})
        with self._changed:
            self._taken = error
            self._wanted.clear()
            self._moves.clear()

    def _hold_wanted(self, topic: str) -> None:
        with self._changed:
            wanted = self._wanted.get(topic)
        if wanted is not None:
            self._hold(topic, wanted[0], must_exist=wanted[1], takes=True)

    def _renew(self, topic: str) -> None:
        with self._changed:
            first = self._at.get(topic)
        if first is None:
            return
        held = self._lease.hold_on(topic, first)
        if held is None:
            self._hold(topic, first, must_exist=True, takes=True)
        elif held is not Held.FOUND:
            with self._changed:
                self._broken.add(topic)

    def _hold(self, topic: str, first: MessagePosition, *, must_exist: bool, takes: bool) -> None:
        held = self._ask_to_hold(topic, first, takes=takes)
        with self._changed:
            self._wanted.pop(topic, None)
            if held is Held.NO_TOPIC:
                return  # rule 4
            self._at[topic] = first
            if held in (Held.MADE, Held.MOVED_BACK):
                self._stands[topic] = first
            if held is Held.MADE:
                self._new.add(topic)
            if held in (Held.MOVED_BACK, Held.FOUND_LATER) or (must_exist and held is Held.MADE):
                self._broken.add(topic)
        if must_exist and held is Held.MADE:
            facts = {"topic": topic, "subscription": self.name, "position": str(first)}
            what = f"subscription {self.name} of {topic} was gone: it is created again at {first}, and earlier entries may be lost"
            log.warning("lease.made_again: %s", what, extra=facts)

    def _ask_to_hold(self, topic: str, first: MessagePosition, *, takes: bool) -> Held:
        """Hold, waiting for the process of a query that was just stopped; one whose clock is ahead is watched."""
        began, is_watched = time.monotonic(), False
        while self._taken is None:
            try:
                return self._lease.hold(topic, first, takes=takes)
            except LeaseTakenError as error:
                pause_s = max(_LOOK_AGAIN_S, error.watch_s / 100)
                if error.watch_s and not is_watched:
                    log.warning("lease.holder_is_watched: %s", error, extra={"subscription": self.name})
                    is_watched = True
                if self._taken is None and time.monotonic() - began >= max(self._patience_s, error.watch_s + pause_s):
                    self._on_taken(error)
                    break
            time.sleep(pause_s)
        return Held.FOUND

    def _move(self, topic: str, first: MessagePosition) -> None:
        if not self._lease.move(topic, first):
            self._renew(topic)
        with self._changed:
            self.moved += 1
            if self._moves.get(topic) == first:
                del self._moves[topic]
            if topic in self._at:
                self._at[topic] = self._stands[topic] = first
