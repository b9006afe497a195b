"""The lease of a query: a subscription that retains what it has still to read. Retention respects it, and every tool shows its lag.

    hold ──► missing? ──► PUT subscription/NAME at the start positions, with the property cepheid-lease-expires
    hold_on, each minute ──► write the property again; wrong position? ──► move it back
    move ──► POST resetcursor, some entries before what Spark has committed ──► ledgers before it may be trimmed
    nothing is ever deleted here: the broker drops the lease of a query that is silent for its time to live (docs/topics.md)

Rules
1. It has no consumers, so a reset disturbs none: a subscription at which a query only begins is never its lease. It never
   moves forward beyond what was committed, and always keeps one entry that was read: the ledger of the query's position stays
   in the chain.
2. A subscription that a user created for the query (it has no such property) is moved, and never gets an expiry. A batch read does
   not move it: it may have consumers.
3. Nothing here runs inside a micro-batch, but in one thread; the newest position of a topic replaces older ones.
4. A lease further on than the query's position is moved back to it, or what is between would not be held. This
   happens if the broker moved it (time to live, quotas), or a query that has lost the name meanwhile.
5. It belongs to one query at a time (lease_holder.py). Batch reads have no mark: they move nothing forward, and may share a name.
6. A query that finds its lease must know whether it is the old one, or was created again after a gap: it says where it begins.
   That is looked up before it is created, since the effect of a repeated call, or of a dead caller's, is unknown.
7. No topic is created for its lease, as the broker would: a topic that is not found was deleted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cepheid_decode import AdminRefusedError, BadOptionError, MessagePosition, PlanUnavailableError
from cepheid_spark.lease_holder import HOLDER_PROPERTY, SILENCE_MS, Holder, wall_ms
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_scan.admin_http import AdminHttp

log = logging.getLogger(__name__)

LEASE_PROPERTY = "cepheid-lease-expires"
"""Property with wall-clock ms since 1970, as text; the broker drops an expired subscription with it (lease_expiry.py)."""

FROM_PROPERTY = "cepheid-lease-from"
"""Property `ledger:entry`: a query's lease has held everything from there on; earlier entries may have been lost (rule 6)."""

AT_ONCE = 8
"""Calls to brokers at the same time: they mostly wait."""
_EARLIEST = {"ledgerId": -1, "entryId": -1}
_CONFLICT, _NOT_FOUND, _NO_SUCH_PLACE = 409, 404, 412
_ATTEMPTS = 3  # to create a subscription that exists, but not at the next request


class Held(Enum):
    """How a lease came to hold a topic."""

    MADE = "made"
    FOUND = "found"  # it existed there, or held more
    FOUND_LATER = "found later"  # it holds all that exists, but begins further on: perhaps created again after a gap
    MOVED_BACK = "moved back"  # before, it held less
    NO_TOPIC = "no topic"  # nothing is held


def ends_ms(found: Mapping[str, str]) -> int:
    """Return the expiry in ms; 0: there is none that could be read."""
    text = found.get(LEASE_PROPERTY, "")
    return int(text) if text.isascii() and text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class _Chain:
    """The kept ledgers of a topic, oldest first, and the first entry that the lease holds. `stands` None: there is no lease."""

    ledger_ids: Sequence[int]
    stands: MessagePosition | None

    def place(self, first: MessagePosition) -> MessagePosition:
        """Return the first position at or after it. A missing ledger was trimmed, or was empty when its owner died."""
        later = [ledger_id for ledger_id in self.ledger_ids if ledger_id >= first.ledger_id]
        return MessagePosition(later[0], 0) if later and later[0] > first.ledger_id else first


def _body(first: MessagePosition) -> dict[str, int]:
    return {"ledgerId": first.ledger_id, "entryId": max(0, first.entry_id)}


def _text(place: MessagePosition) -> str:
    return f"{place.ledger_id}:{max(0, place.entry_id)}"


def _parsed(text: str) -> MessagePosition | None:
    """Return the position; None: not a text of ours."""
    try:
        return MessagePosition.parse(text)
    except BadOptionError:
        return None


def _topic_path(topic: str) -> str:
    name = TopicName.parse(topic)
    return f"/admin/v2/persistent/{name.namespace}/{quote(name.local_name, safe='')}"


def new_lease_name(kind: str = "") -> str:
    return f"spark-{kind}{uuid.uuid4()}"


class Lease:
    """Calls for one topic each, which may be repeated, and made from several threads. `holder` None: for a batch read."""

    def __init__(
        self, http: AdminHttp, name: str, ttl_s: float, now_ms: Callable[[], int] = wall_ms, *, holder: Holder | None = None
    ) -> None:
        self._http = http
        self._ttl_ms = int(ttl_s * 1000)
        self._now_ms = now_ms
        self._holder = holder
        self._elapsed_s = time.monotonic
        self._marks_seen: dict[Holder, float] = {}  # of holders whose clocks are ahead, and when first
        self._silent: set[str] = set()
        self.name = name

    def hold(self, topic: str, first: MessagePosition, *, takes: bool = False) -> Held:
        """Retain everything from `first` on. `takes`: also take the lease from another query, which is notified.

        Raises LeaseTakenError if it belongs to another living query.
        """
        for _ in range(_ATTEMPTS):
            chain = self._chain(topic)
            if chain is None:
                return Held.NO_TOPIC  # rule 7
            if chain.stands is None:
                if self._make(topic, chain, first):
                    return Held.MADE
            elif (held := self._take_up(topic, first, chain, takes=takes)) is not None:
                return held
        what = "keeps appearing and disappearing, or cannot be moved: another client deletes or resets it"
        raise AdminRefusedError(f"subscription {self.name!r} of {topic} {what}", status=_CONFLICT)

    def hold_on(self, topic: str, first: MessagePosition) -> Held | None:
        """Hold like `hold`, if the subscription exists. None: it does not."""
        chain = self._chain(topic)
        return None if chain is None or chain.stands is None else self._take_up(topic, first, chain, takes=False)

    def _make(self, topic: str, chain: _Chain, first: MessagePosition) -> bool:
        """Create the subscription; return False if it exists already."""
        marks, place = self._marks({LEASE_PROPERTY: ""}), chain.place(first)
        body = {**_body(place), "properties": self._with_begin(marks, place)}
        refusal = self._call("PUT", topic, "", body, accept=(_CONFLICT, _NO_SUCH_PLACE))
        if refusal == _NO_SUCH_PLACE and chain.ledger_ids:  # the ledger was deleted meanwhile: hold rather too much than nothing
            body = {**_EARLIEST, "properties": self._with_begin(marks, MessagePosition(chain.ledger_ids[0], 0))}
            refusal = self._call("PUT", topic, "", body, accept=(_CONFLICT, _NO_SUCH_PLACE))
        return refusal is None

    def _take_up(self, topic: str, first: MessagePosition, chain: _Chain, *, takes: bool) -> Held | None:
        """Take the existing lease; None: it disappeared meanwhile, or could not be moved."""
        found = self.properties(topic)
        if found is None or chain.stands is None:
            return None
        if not takes:
            self._check_other(topic, found)
        place, stands = chain.place(first), chain.place(chain.stands)
        is_further_on = chain.stands > place
        begins = stands if is_further_on else min(stands, _parsed(found.get(FROM_PROPERTY, "")) or stands)
        if not self._mark(topic, found, begins):
            return None
        if not is_further_on:
            return Held.FOUND if begins <= first else Held.FOUND_LATER
        facts = {"topic": topic, "subscription": self.name, "stood": str(chain.stands), "position": str(first)}
        what = f"subscription {self.name} of {topic} was at {chain.stands}, after the start {first}"
        if self._holder is None and LEASE_PROPERTY not in found:  # rule 2
            log.warning(
                "lease.holds_less: %s: what is between is not held, since the subscription belongs to a user", what, extra=facts
            )
            return Held.FOUND
        log.warning("lease.moved_back: %s: it is moved there", what, extra=facts)
        return Held.MOVED_BACK if self._reset(topic, _body(place)) or self._reset(topic, _EARLIEST) else None

    def renew(self, topic: str, *, below_s: float = math.inf) -> bool:
        """Renew, unless `below_s` are left. Return False if there is no such subscription. Raises LeaseTakenError."""
        found = self.properties(topic)
        if found is None:
            return False
        if self._holder is not None:
            self._check_other(topic, found)
        if ends_ms(found) - self._now_ms() > 1000 * below_s:
            return True
        return self._mark(topic, found)

    def move(self, topic: str, first: MessagePosition) -> bool:
        """Release what is before `first`. Return False if there is no such subscription or position.

        Raises LeaseTakenError if another query has it, which may still need that.
        """
        found = self.properties(topic)
        if found is None:
            return False
        self._check_other(topic, found)
        return self._reset(topic, _body(first))

    def drop(self, topic: str) -> None:
        """Delete a lease that will never be used. Another query that has taken it meanwhile keeps it."""
        found = self.properties(topic)
        if found is None or self._other(found) is not None:
            return
        self._call("DELETE", topic, "", accept=(_NOT_FOUND, _NO_SUCH_PLACE))

    def properties(self, topic: str) -> dict[str, str] | None:
        """Return the properties; None: there is no such subscription."""
        try:
            return dict(self._http.request("GET", self._path(topic, "/properties")) or {})
        except AdminRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def _reset(self, topic: str, body: Mapping[str, int]) -> bool:
        """Reset it; return False if there is no such subscription or position, or another reset is in progress."""
        return self._call("POST", topic, "/resetcursor", body, accept=(_NOT_FOUND, _NO_SUCH_PLACE)) is None

    def _mark(self, topic: str, found: Mapping[str, str], begins: MessagePosition | None = None) -> bool:
        """Write the marks; return False if it disappeared meanwhile."""
        marks = self._with_begin(self._marks(found), begins)
        return not marks or self._call("PUT", topic, "/properties", {**found, **marks}, accept=(_NOT_FOUND,)) is None

    def _marks(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return the marks to write into existing properties, or into `found` for a new subscription."""
        now_ms = self._now_ms()
        marks: dict[str, str] = {}
        if LEASE_PROPERTY in found:  # rule 2
            known_ms = ends_ms(found) if self._holder is None else 0
            marks[LEASE_PROPERTY] = str(max(known_ms, now_ms + self._ttl_ms))  # a batch does not shorten a stream's
        if self._holder is not None:
            marks[HOLDER_PROPERTY] = self._holder.text(now_ms)
        return marks

    def _with_begin(self, marks: dict[str, str], begins: MessagePosition | None) -> dict[str, str]:
        """Add where a query's lease begins; no query returns to that of a batch read."""
        return marks if self._holder is None or begins is None else {**marks, FROM_PROPERTY: _text(begins)}

    def _check_other(self, topic: str, found: Mapping[str, str]) -> None:
        """Raises LeaseTakenError."""
        other = self._other(found)
        if other is not None:
            raise other.taken(self.name, topic, self._now_ms())

    def _other(self, found: Mapping[str, str]) -> Holder | None:
        """Return another living query that holds it."""
        holder = Holder.parse(found.get(HOLDER_PROPERTY))
        if holder is None or (self._holder is not None and holder.holder_id == self._holder.holder_id):
            return None
        now_ms = self._now_ms()
        return holder if holder.lives(now_ms) and not (holder.is_ahead(now_ms) and self._is_silent(holder)) else None

    def _is_silent(self, holder: Holder) -> bool:
        """Return whether a holder whose clock is ahead is silent, by our clock. One that is silent on one topic is so on all."""
        since_s = self._marks_seen.setdefault(holder, self._elapsed_s())
        if self._elapsed_s() - since_s >= SILENCE_MS / 1000:
            self._silent.add(holder.holder_id)
        return holder.holder_id in self._silent

    def _chain(self, topic: str) -> _Chain | None:
        """Return the chain; None: there is no such topic."""
        try:
            stats = self._http.request("GET", f"{_topic_path(topic)}/internalStats")
        except AdminRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return None
        stands = None
        if self.name in stats["cursors"]:
            ledger_id, entry_id = stats["cursors"][self.name]["markDeletePosition"].split(":")
            stands = MessagePosition(max(0, int(ledger_id)), int(entry_id) + 1)
        return _Chain([ledger["ledgerId"] for ledger in stats["ledgers"]], stands)

    def _path(self, topic: str, what: str) -> str:
        return f"{_topic_path(topic)}/subscription/{quote(self.name, safe='')}{what}"

    def _call(self, method: str, topic: str, what: str, body: Any = None, *, accept: tuple[int, ...]) -> int | None:
        """Make a call. None: done; otherwise the status of the refusal, one of `accept`."""
        try:
            self._http.request(method, self._path(topic, what), body=body)
        except AdminRefusedError as error:
            if error.status not in accept:
                raise
            return error.status
        return None


def drop_all(lease: Lease, topics: Sequence[str], at_once: int = AT_ONCE) -> None:
    """Delete the leases; those that cannot be deleted stay until they expire."""
    failures = call_all([partial(lease.drop, topic) for topic in topics], at_once, until=PlanUnavailableError)
    if failures:
        facts = {"subscription": lease.name, "topics": len(topics)}
        log.warning("lease.not_dropped: %s, which ends by its time to live: %s", lease.name, failures[0], extra=facts)


def call_all(
    calls: Sequence[Callable[[], None]], at_once: int = AT_ONCE, *, until: type[Exception] | None = None
) -> list[Exception]:
    """Return the failures in the order of the calls. All calls are made, but none begins after one that failed with `until`.

    A call that reaches no broker waits as long as readers are patient.
    """
    ended = threading.Event()

    def attempt(call: Callable[[], None]) -> Exception | None:
        if ended.is_set():
            return None
        try:
            call()
        except Exception as error:
            if until is not None and isinstance(error, until):
                ended.set()
            return error
        return None

    if at_once == 1 or len(calls) <= 1:
        outcomes = [attempt(call) for call in calls]
    else:
        with ThreadPoolExecutor(min(at_once, len(calls)), thread_name_prefix="cepheid-lease-call") as threads:
            outcomes = list(threads.map(attempt, calls))
    return [error for error in outcomes if error is not None]
