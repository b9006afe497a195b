"""The confirmed ends of open ledgers, from the bookies of their last fragment.

    newest_ends ──► every bookie, once ──► the largest LAC                                a plan without a broker
    EndWatch    ──► every bookie, parked there until its LAC has moved ──► ends()         a waiting stream: long polls

Rules
1. A LAC counts if it is in an entry with a valid digest, or was sent by the writer itself. Each is a lower bound: the largest
   is safe, and a bookie that does not answer only makes it less fresh. Nothing here fences.
2. `EndWatch` is one thread. gRPC's own threads only put answers into its queue; `ends()` reads a dict that is never modified.
3. A ledger whose LAC moves constantly is polled at most every `_LEAST_PAUSE_S`, less often if many are watched.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cepheid_decode.errors import PlanUnavailableError
from cepheid_decode.history import HistoryPlan, LedgerHistory
from cepheid_rpc import (
    NO_ENTRY_ID,
    READ_LAC,
    DigestMismatchError,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    Status,
    channel_options,
    decode_lac_answer,
    encode_lac_request,
    method_path,
)
from cepheid_scan.bookie_channels import open_channel
from cepheid_security import ClientTls

log = logging.getLogger(__name__)

_ANSWER_S = 5.0  # for a bookie's answer, beyond the requested wait
_LEAST_PAUSE_S, _PAUSE_PER_POLL_S = 0.05, 0.002
_FAILED_PAUSE_S = 1.0
_LATE_KEY_S = 1.1  # a bookie reads the keys of tickets again when it meets an unknown one, at most every second
_AT_ONCE = 200  # requests: with thousands at once gRPC's server drops any of them, also reads of brokers
_FIRST_PAUSE_S, _LONGEST_FIRST_ROUND_S = 0.001, 20.0

LedgerKey = tuple[str, int]  # topic with partition, ledger id


class _KeyUnknownError(PlanUnavailableError):
    """A bookie does not know the key of the ticket."""


class LacCalls:
    """ReadLac calls to bookies by address, each on its own connection.

    `close` once. `tls`: the certificate for bookies with TLS.
    """

    def __init__(self, tls: ClientTls | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, Any] = {}
        self._lock = threading.Lock()

    def ask(self, address: str, request: LacRequest, timeout_s: float) -> Any:
        """Return a future of gRPC whose result `end_told` reads."""
        with self._lock:
            if (channel := self._channels.get(address)) is None:
                channel = self._channels[address] = open_channel(address, channel_options(), self._tls)
        call = channel.unary_unary(method_path(READ_LAC), request_serializer=None, response_deserializer=None)
        return call.future(encode_lac_request(request), timeout=timeout_s)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """The end of a ledger.

    `size_bytes`: of the payloads up to there, by the bookie's average, which includes later ones; 0: unknown.
    """

    last_entry_id: int
    size_bytes: int


def end_told(answer: LacAnswer, ledger_id: int) -> LedgerEnd | None:
    """Return what can be trusted of an answer (rule 1); None: nothing."""
    if answer.status.certain_no:
        return LedgerEnd(NO_ENTRY_ID, 0)
    if answer.status is not Status.OK:
        return None
    group = answer.highest_entry
    if group is None or group.ledger_id != ledger_id or len(group) != 1:
        return LedgerEnd(answer.explicit_lac, 0)
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        return LedgerEnd(answer.explicit_lac, 0)
    header = group.header(group.first_entry_id)
    lac = max(answer.explicit_lac, header.last_add_confirmed)
    # A bookie knows nothing about what follows its last entry.
    size_bytes = header.length * (lac + 1) // (group.first_entry_id + 1) if lac <= group.first_entry_id else 0
    return LedgerEnd(lac, size_bytes)


def newest_ends(ledgers: Sequence[LedgerHistory], bookies: Mapping[str, str], timeout_s: float, calls: LacCalls) -> list[LedgerEnd]:
    """Return the confirmed ends of open ledgers; -1: no entry is confirmed. `timeout_s`: per group of hundreds asked together.

    Raises PlanUnavailableError if no bookie answers for one of them.
    """
    ends: list[LedgerEnd] = []
    silent: dict[str, str] = {}  # bookies that did not answer in time are asked again only if there is no other
    for first in range(0, len(ledgers), _AT_ONCE):
        together = ledgers[first : first + _AT_ONCE]
        deadline = time.monotonic() + timeout_s
        asked = [_ask(calls, ledger, bookies, silent, timeout_s) for ledger in together]
        for ledger, futures in zip(together, asked, strict=True):
            try:
                ends.append(_largest(ledger, futures, deadline, silent))
            except _KeyUnknownError:  # the ticket was signed just now: the key has not arrived yet
                time.sleep(_LATE_KEY_S)
                again = _ask(calls, ledger, bookies, silent, timeout_s)
                ends.append(_largest(ledger, again, time.monotonic() + timeout_s, silent))
    return ends


def _ask(
    calls: LacCalls, ledger: LedgerHistory, bookies: Mapping[str, str], silent: Container[str], timeout_s: float
) -> dict[str, Any]:
    request = LacRequest(ledger.ledger_id, ledger.master_key, ticket=ledger.ticket)
    return {bookie: calls.ask(bookies[bookie], request, timeout_s) for bookie in _to_ask(ledger, bookies, silent)}


def _to_ask(ledger: LedgerHistory, bookies: Container[str], silent: Container[str]) -> list[str]:
    up = [bookie for bookie in ledger.fragments[-1].ensemble if bookie in bookies]
    return [bookie for bookie in up if bookie not in silent] or up


def _largest(ledger: LedgerHistory, futures: Mapping[str, Any], deadline: float, silent: dict[str, str]) -> LedgerEnd:
    """Return the largest end. Adds bookies that missed the deadline to `silent`, with the result of the request."""
    ensemble = ledger.fragments[-1].ensemble
    problems = {bookie: silent.get(bookie, "it is down") for bookie in ensemble if bookie not in futures}
    told: list[LedgerEnd] = []
    for bookie, future in futures.items():
        try:
            answer = decode_lac_answer(future.result(timeout=max(0.0, deadline - time.monotonic()) + 0.1))
            end = end_told(answer, ledger.ledger_id)
            if end is None:
                problems[bookie] = answer.status.name
            else:
                told.append(end)
        except Exception as error:  # of gRPC, which has several kinds, or for an invalid answer
            problems[bookie] = _text_of(error)
            if time.monotonic() >= deadline:
                silent[bookie] = problems[bookie]
    said = "; ".join(f"{bookie}: {problem}" for bookie, problem in problems.items())
    if not told:
        kind = _KeyUnknownError if Status.TICKET_KEY_UNKNOWN.name in problems.values() else PlanUnavailableError
        raise kind(f"no bookie tells how far ledger {ledger.ledger_id} goes: {said}", ledger_id=ledger.ledger_id)
    if problems:
        log.warning("scan.bookies_silent: of ledger %d: %s", ledger.ledger_id, said, extra={"bookies": problems})
    return max(told, key=lambda end: (end.last_entry_id, end.size_bytes))


@dataclass(slots=True)
class _Watched:
    ledger: LedgerHistory
    end: LedgerEnd
    heard_at: float
    silent: dict[str, str] = field(default_factory=dict)  # reasons of bookies that gave no answer


class EndWatch:
    """Watches open ledgers. `update` takes the newest plan; `ends` answers from memory. `close` once."""

    def __init__(self, *, retry_s: float = 60.0, wait_s: float = 10.0, tls: ClientTls | None = None) -> None:
        """`wait_s`: how long a bookie parks a request."""
        self._retry_s = retry_s
        self._wait_s = wait_s
        self._calls = LacCalls(tls)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watched: dict[LedgerKey, _Watched] = {}
        self._bookies: Mapping[str, str] = {}
        self._polls: dict[tuple[LedgerKey, str], Any] = {}  # future, None: waits for its turn
        self._due: list[tuple[float, int, LedgerKey, str, bool]] = []
        self._numbers = itertools.count()
        self._ends: Mapping[LedgerKey, LedgerEnd] = {}
        self._failure: PlanUnavailableError | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def update(self, plan: HistoryPlan) -> None:
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cepheid-end-watch", daemon=True)
            self._thread.start()
        self._inbox.put(plan)

    def ends(self) -> Mapping[LedgerKey, LedgerEnd]:
        """Return the last confirmed entries, by topic and open ledger. Raises PlanUnavailableError if for one of them no bookie has
        answered for `retry_s`.
        """
        if self._failure is not None:
            raise self._failure
        return self._ends

    def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._calls.close()

    # In the thread

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a defect must not look like a topic in which nothing happens
            log.exception("scan.end_watch_failed")
            self._failure = PlanUnavailableError(f"the watch of open ledgers failed: {error!r}")
        finally:
            for future in list(self._polls.values()):
                if future is not None:
                    future.cancel()

    def _watch(self) -> None:
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else _FAILED_PAUSE_S
            try:
                event = self._inbox.get(timeout=min(wait_s, _FAILED_PAUSE_S))
            except queue.Empty:
                event = ()
            if event is None:
                return
            if isinstance(event, HistoryPlan):
                self._on_plan(event)
            elif event:
                self._on_answer(*event)
            self._ask_due(time.monotonic())
            self._check_silence(time.monotonic())

    def _on_plan(self, plan: HistoryPlan) -> None:
        now = time.monotonic()
        self._bookies = plan.bookies
        open_now = {
            (history.topic, ledger.ledger_id): ledger for history in plan.topics for ledger in history.ledgers if ledger.is_open
        }
        for key in [key for key in self._watched if key not in open_now]:
            del self._watched[key]
        polls = sum(len(ledger.fragments[-1].ensemble) for ledger in open_now.values())
        pause_s = min(_FIRST_PAUSE_S, _LONGEST_FIRST_ROUND_S / max(1, polls))
        due = now
        for key, ledger in open_now.items():
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = _Watched(ledger, _known_end(ledger), now)
            watched.ledger = ledger
            if ledger.last_entry_id > watched.end.last_entry_id:
                watched.end = _known_end(ledger)
            for bookie in ledger.fragments[-1].ensemble:
                if (key, bookie) not in self._polls:
                    self._schedule(key, bookie, due)
                    due += pause_s
        self._ends = {key: watched.end for key, watched in self._watched.items()}

    def _schedule(self, key: LedgerKey, bookie: str, at: float, *, parked: bool = True) -> None:
        self._polls[key, bookie] = None
        heapq.heappush(self._due, (at, next(self._numbers), key, bookie, parked))

    def _ask_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, key, bookie, parked = heapq.heappop(self._due)
            watched = self._watched.get(key)
            if watched is None or bookie not in watched.ledger.fragments[-1].ensemble:
                del self._polls[key, bookie]
                continue
            address = self._bookies.get(bookie)
            if address is None:
                watched.silent[bookie] = "it is down"
                self._schedule(key, bookie, now + _FAILED_PAUSE_S)
                continue
            wait_ms = round(1000 * self._wait_s) if parked else 0
            ledger, above = watched.ledger, watched.end.last_entry_id
            request = LacRequest(key[1], ledger.master_key, above=above, wait_ms=wait_ms, ticket=ledger.ticket)
            future = self._calls.ask(address, request, wait_ms / 1000 + _ANSWER_S)
            self._polls[key, bookie] = future
            future.add_done_callback(functools.partial(self._note_answer, key, bookie, now, parked))

    def _note_answer(self, key: LedgerKey, bookie: str, asked_at: float, parked: bool, future: Any) -> None:
        """Queue an answer; called in a thread of gRPC."""
        self._inbox.put((key, bookie, asked_at, parked, future))

    def _on_answer(self, key: LedgerKey, bookie: str, asked_at: float, parked: bool, future: Any) -> None:
        now = time.monotonic()
        watched = self._watched.get(key)
        if watched is None:
            self._polls.pop((key, bookie), None)
            return
        try:
            answer = decode_lac_answer(future.result())
            end, problem = end_told(answer, key[1]), answer.status.name
        except Exception as error:  # as in `_largest`
            end, problem = None, _text_of(error)
        if end is None:
            watched.silent[bookie] = problem
            # Every second request to one that allows no waiting (full of readers, or of an older release) asks without it.
            self._schedule(key, bookie, now + _FAILED_PAUSE_S, parked=not parked)
            return
        watched.heard_at = now
        watched.silent.pop(bookie, None)
        moved = end.last_entry_id > watched.end.last_entry_id
        if moved:
            watched.end = end
            self._ends = {**self._ends, key: end}
        pause_s = max(_LEAST_PAUSE_S, _PAUSE_PER_POLL_S * len(self._polls)) if moved else _FAILED_PAUSE_S
        self._schedule(key, bookie, max(now, asked_at + pause_s))

    def _check_silence(self, now: float) -> None:
        for (topic, ledger_id), watched in self._watched.items():
            if now - watched.heard_at > self._retry_s + self._wait_s + _FAILED_PAUSE_S:
                said = "; ".join(f"{bookie}: {problem}" for bookie, problem in watched.silent.items()) or "no answer"
                self._failure = PlanUnavailableError(
                    f"for {self._retry_s:g} s no bookie tells how far ledger {ledger_id} of {topic} goes: {said}",
                    topic=topic,
                    ledger_id=ledger_id,
                )
                return
        self._failure = None


def _known_end(ledger: LedgerHistory) -> LedgerEnd:
    return LedgerEnd(ledger.last_entry_id, ledger.size_bytes)


def _text_of(error: BaseException) -> str:
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):
        return f"{code().name}: {details()}"
    return str(error) or type(error).__name__
