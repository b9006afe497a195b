"""The subscription by which a query keeps what it has still to read: retention respects it, and every tool shows its lag.

    hold ──► is it there? ──► PUT subscription/NAME at the start positions, with the property cepheid-lease-expires
    hold_on, each minute ──► the property anew; does it stand where it should? ──► else moved back
    move ──► POST resetcursor, some entries before what Spark has committed ──► ledgers before it may be trimmed
    nothing is ever deleted here: a query that is silent for its time to live loses the lease at the broker (docs/topics.md)

Rules
1. Nobody consumes from it, so a reset disturbs no one: a subscription that a query only begins at is never its lease. It never
   moves forward beyond what was committed, and always leaves one entry of what was read: the ledger of the query's position stays
   in the chain.
2. A subscription that somebody made for the query (it has no such property) is moved, and never gets an expiry. A batch read does
   not move it: it may have consumers.
3. Nothing here runs inside a micro-batch: one thread does it, the newest position of a topic replaces older ones.
4. One that stands further on than where the query does is moved back to there: it would hold nothing of what lies between. So
   it is where the broker moved it (time to live, quotas), or a query that has lost the name meanwhile.
5. One query at a time has it (lease_holder.py). Batch reads have no mark: they move nothing forward, and may share a name.
6. Whoever finds a query's lease must know whether it is the old one, or was made anew behind a gap: it says where it begins.
   That is looked up before it is made, since a call that is repeated, or whose caller dies, tells nobody what it has done.
7. No topic is made for its lease, as the broker would: one that is not there when it is looked up was deleted.
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
"""Wall-clock ms since 1970, as text; the broker drops an expired subscription of this property (lease_expiry.py)."""

FROM_PROPERTY = "cepheid-lease-from"
"""`ledger:entry`: from there on a query's lease has held everything; what lies before it may have gone unseen (rule 6)."""

AT_ONCE = 8
"""Calls to brokers at the same time: they are mostly waiting."""
_EARLIEST = {"ledgerId": -1, "entryId": -1}
_CONFLICT, _NOT_FOUND, _NO_SUCH_PLACE = 409, 404, 412
_ATTEMPTS = 3  # to make a subscription that is there, and is gone at the next question


class Held(Enum):
    """How a lease came to hold a topic."""

    MADE = "made"
    FOUND = "found"  # it stood there, or held more
    FOUND_LATER = "found later"  # it holds all there is, but begins further on: it may have been made anew behind a gap
    MOVED_BACK = "moved back"  # until then it held less
    NO_TOPIC = "no topic"  # nothing is held


def ends_ms(found: Mapping[str, str]) -> int:
    """0: it has no end that could be read."""
    text = found.get(LEASE_PROPERTY, "")
    return int(text) if text.isascii() and text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class _Chain:
    """What is kept of a topic, oldest first, and the first entry that the lease holds of it. `stands` None: there is no lease."""

    ledger_ids: Sequence[int]
    stands: MessagePosition | None

    def place(self, first: MessagePosition) -> MessagePosition:
        """The first one at or behind it. A ledger that is not there any more was trimmed, or was empty when its owner went."""
        later = [ledger_id for ledger_id in self.ledger_ids if ledger_id >= first.ledger_id]
        return MessagePosition(later[0], 0) if later and later[0] > first.ledger_id else first


def _body(first: MessagePosition) -> dict[str, int]:
    return {"ledgerId": first.ledger_id, "entryId": max(0, first.entry_id)}


def _text(place: MessagePosition) -> str:
    return f"{place.ledger_id}:{max(0, place.entry_id)}"


def _parsed(text: str) -> MessagePosition | None:
    """None: nothing that we wrote."""
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
    """The calls, one topic each; all of them may be repeated, and made from several threads. `holder` None: of a batch read."""

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
        """From `first` on everything stays. `takes`: also from another query, which hears of it.

        Raises LeaseTakenError: another query that lives has it.
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
        what = "comes and goes, or cannot be moved: somebody deletes or resets it"
        raise AdminRefusedError(f"subscription {self.name!r} of {topic} {what}", status=_CONFLICT)

    def hold_on(self, topic: str, first: MessagePosition) -> Held | None:
        """As `hold`, of one that is there. None: there is no such subscription."""
        chain = self._chain(topic)
        return None if chain is None or chain.stands is None else self._take_up(topic, first, chain, takes=False)

    def _make(self, topic: str, chain: _Chain, first: MessagePosition) -> bool:
        """False: there is such a subscription already."""
        marks, place = self._marks({LEASE_PROPERTY: ""}), chain.place(first)
        body = {**_body(place), "properties": self._with_begin(marks, place)}
        refusal = self._call("PUT", topic, "", body, accept=(_CONFLICT, _NO_SUCH_PLACE))
        if refusal == _NO_SUCH_PLACE and chain.ledger_ids:  # the ledger went meanwhile: rather too much than nothing
            body = {**_EARLIEST, "properties": self._with_begin(marks, MessagePosition(chain.ledger_ids[0], 0))}
            refusal = self._call("PUT", topic, "", body, accept=(_CONFLICT, _NO_SUCH_PLACE))
        return refusal is None

    def _take_up(self, topic: str, first: MessagePosition, chain: _Chain, *, takes: bool) -> Held | None:
        """None: it went meanwhile, or could not be moved."""
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
        what = f"subscription {self.name} of {topic} stood at {chain.stands}, behind the start {first}"
        if self._holder is None and LEASE_PROPERTY not in found:  # rule 2
            log.warning("lease.holds_less: %s: what lies between is not held, since it is somebody's own", what, extra=facts)
            return Held.FOUND
        log.warning("lease.moved_back: %s: it is moved there", what, extra=facts)
        return Held.MOVED_BACK if self._reset(topic, _body(place)) or self._reset(topic, _EARLIEST) else None

    def renew(self, topic: str, *, below_s: float = math.inf) -> bool:
        """Renew, unless `below_s` are left. False: there is no such subscription. Raises LeaseTakenError."""
        found = self.properties(topic)
        if found is None:
            return False
        if self._holder is not None:
            self._check_other(topic, found)
        if ends_ms(found) - self._now_ms() > 1000 * below_s:
            return True
        return self._mark(topic, found)

    def move(self, topic: str, first: MessagePosition) -> bool:
        """What lies before `first` is not needed any more. False: there is no such subscription, or no such place.

        Raises LeaseTakenError: another query has it, and may still need that.
        """
        found = self.properties(topic)
        if found is None:
            return False
        self._check_other(topic, found)
        return self._reset(topic, _body(first))

    def drop(self, topic: str) -> None:
        """For one that nobody will ever ask for. Another query that has taken it meanwhile keeps it."""
        found = self.properties(topic)
        if found is None or self._other(found) is not None:
            return
        self._call("DELETE", topic, "", accept=(_NOT_FOUND, _NO_SUCH_PLACE))

    def properties(self, topic: str) -> dict[str, str] | None:
        """None: there is no such subscription."""
        try:
            return dict(self._http.request("GET", self._path(topic, "/properties")) or {})
        except AdminRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def _reset(self, topic: str, body: Mapping[str, int]) -> bool:
        """False: there is no such subscription, or no such place, or somebody else is resetting it."""
        return self._call("POST", topic, "/resetcursor", body, accept=(_NOT_FOUND, _NO_SUCH_PLACE)) is None

    def _mark(self, topic: str, found: Mapping[str, str], begins: MessagePosition | None = None) -> bool:
        """False: it went meanwhile."""
        marks = self._with_begin(self._marks(found), begins)
        return not marks or self._call("PUT", topic, "/properties", {**found, **marks}, accept=(_NOT_FOUND,)) is None

    def _marks(self, found: Mapping[str, str]) -> dict[str, str]:
        """What is written anew into properties that are there, or `found` of those that a new one gets."""
        now_ms = self._now_ms()
        marks: dict[str, str] = {}
        if LEASE_PROPERTY in found:  # rule 2
            known_ms = ends_ms(found) if self._holder is None else 0
            marks[LEASE_PROPERTY] = str(max(known_ms, now_ms + self._ttl_ms))  # a batch shortens no stream's
        if self._holder is not None:
            marks[HOLDER_PROPERTY] = self._holder.text(now_ms)
        return marks

    def _with_begin(self, marks: dict[str, str], begins: MessagePosition | None) -> dict[str, str]:
        """Of a query's lease: nobody comes back to one of a batch read."""
        return marks if self._holder is None or begins is None else {**marks, FROM_PROPERTY: _text(begins)}

    def _check_other(self, topic: str, found: Mapping[str, str]) -> None:
        """Raises LeaseTakenError."""
        other = self._other(found)
        if other is not None:
            raise other.taken(self.name, topic, self._now_ms())

    def _other(self, found: Mapping[str, str]) -> Holder | None:
        """Another query that holds it, and lives."""
        holder = Holder.parse(found.get(HOLDER_PROPERTY))
        if holder is None or (self._holder is not None and holder.holder_id == self._holder.holder_id):
            return None
        now_ms = self._now_ms()
        return holder if holder.lives(now_ms) and not (holder.is_ahead(now_ms) and self._is_silent(holder)) else None

    def _is_silent(self, holder: Holder) -> bool:
        """Of one whose clock is ahead: by ours, since its mark is looked at. One that is silent on one topic is so on all."""
        since_s = self._marks_seen.setdefault(holder, self._elapsed_s())
        if self._elapsed_s() - since_s >= SILENCE_MS / 1000:
            self._silent.add(holder.holder_id)
        return holder.holder_id in self._silent

    def _chain(self, topic: str) -> _Chain | None:
        """None: there is no such topic."""
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
        """None: done; else the status of the refusal, one of `accept`."""
        try:
            self._http.request(method, self._path(topic, what), body=body)
        except AdminRefusedError as error:
            if error.status not in accept:
                raise
            return error.status
        return None


def drop_all(lease: Lease, topics: Sequence[str], at_once: int = AT_ONCE) -> None:
    """What cannot be dropped stays until its time to live is over."""
    failures = call_all([partial(lease.drop, topic) for topic in topics], at_once, until=PlanUnavailableError)
    if failures:
        facts = {"subscription": lease.name, "topics": len(topics)}
        log.warning("lease.not_dropped: %s, which ends by its time to live: %s", lease.name, failures[0], extra=facts)


def call_all(
    calls: Sequence[Callable[[], None]], at_once: int = AT_ONCE, *, until: type[Exception] | None = None
) -> list[Exception]:
    """What failed, in the order of the calls. Every one is made, whatever becomes of the others, but for `until`: none is begun
    behind one that failed so. Each that finds nobody waits for as long as readers are patient."""
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
