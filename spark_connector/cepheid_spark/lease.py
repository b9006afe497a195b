"""The subscription by which a query keeps what it has still to read: retention respects it, and every tool shows its lag.

    hold ──► PUT subscription/NAME at the start positions, with the property cepheid-lease-expires ──► renewed each minute
    move ──► POST resetcursor, some entries before what Spark has committed ──► ledgers before it may be trimmed
    nothing is ever deleted here: a query that is silent for its time to live loses the lease at the broker (docs/topics.md)

Rules
1. Nobody consumes from it, so a reset disturbs no one. It never moves forward beyond what was committed, and always leaves one
   entry of what was read: the ledger of the query's position stays in the chain.
2. A subscription that somebody made for the query (it has no such property) is moved, and never gets an expiry.
3. Nothing here runs inside a micro-batch: one thread does it, the newest position of a topic replaces older ones.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cepheid_scan import AdminRefusedError, MessagePosition, PlanSource
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_scan.admin_http import AdminHttp

LEASE_PROPERTY = "cepheid-lease-expires"
"""Wall-clock ms since 1970, as text; the broker drops an expired subscription of this property (lease_expiry.py)."""

_EARLIEST = {"ledgerId": -1, "entryId": -1}
_CONFLICT, _NOT_FOUND, _NO_SUCH_PLACE = 409, 404, 412


def _place(first: MessagePosition) -> dict[str, int]:
    return {"ledgerId": first.ledger_id, "entryId": max(0, first.entry_id)}


def _topic_path(topic: str) -> str:
    name = TopicName.parse(topic)
    return f"/admin/v2/persistent/{name.namespace}/{quote(name.local_name, safe='')}"


def new_lease_name(kind: str = "") -> str:
    return f"spark-{kind}{uuid.uuid4()}"


def wall_ms() -> int:
    return int(time.time() * 1000)


class Lease:
    """The calls, one topic each; all of them may be repeated."""

    def __init__(self, http: AdminHttp, name: str, ttl_s: float, now_ms: Callable[[], int] = wall_ms) -> None:
        self._http = http
        self._ttl_ms = int(ttl_s * 1000)
        self._now_ms = now_ms
        self.name = name

    def __repr__(self) -> str:
        return f"<Lease {self.name}>"

    def hold(self, topic: str, first: MessagePosition) -> bool:
        """From `first` on everything stays. Returns whether there was such a subscription already: then it stays where it is."""
        expiry = {"properties": {LEASE_PROPERTY: self._expires()}}
        refusal = self._call("PUT", topic, "", {**_place(first), **expiry}, accept=(_CONFLICT, _NO_SUCH_PLACE))
        if refusal == _NO_SUCH_PLACE:  # the ledger went meanwhile: rather too much than nothing
            refusal = self._call("PUT", topic, "", {**_EARLIEST, **expiry}, accept=(_CONFLICT,))
        if refusal == _CONFLICT:
            self.renew(topic)
        return refusal == _CONFLICT

    def renew(self, topic: str) -> bool:
        """False: there is no such subscription."""
        found = self._properties(topic)
        if found is None:
            return False
        if LEASE_PROPERTY not in found:
            return True  # rule 2
        return self._call("PUT", topic, "/properties", {**found, LEASE_PROPERTY: self._expires()}, accept=(_NOT_FOUND,)) is None

    def move(self, topic: str, first: MessagePosition) -> bool:
        """What lies before `first` is not needed any more. False: there is no such subscription, or no such place."""
        return self._call("POST", topic, "/resetcursor", _place(first), accept=(_NOT_FOUND, _NO_SUCH_PLACE)) is None

    def drop(self, topic: str) -> None:
        """For one that nobody will ever ask for."""
        self._call("DELETE", topic, "", accept=(_NOT_FOUND, _NO_SUCH_PLACE))

    def is_topic_there(self, topic: str) -> bool:
        """`hold` would make it, where topics may be made by whoever uses them."""
        try:
            self._http.request("GET", f"{_topic_path(topic)}/subscriptions")
        except AdminRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return False
        return True

    def _expires(self) -> str:
        return str(self._now_ms() + self._ttl_ms)

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

    def _properties(self, topic: str) -> dict[str, str] | None:
        try:
            return dict(self._http.request("GET", self._path(topic, "/properties")) or {})
        except AdminRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return None


def pin_batch(source: PlanSource, starts: Mapping[str, MessagePosition], *, ttl_s: float, name: str | None = None) -> str:
    """A lease at the start positions of a batch read; its name. It ends by its time to live, whatever becomes of the job."""
    from cepheid_scan.admin_http import AdminHttp

    with closing(AdminHttp(source)) as http:
        lease = Lease(http, name or new_lease_name("batch-"), ttl_s)
        for topic in sorted(starts):
            lease.hold(topic, starts[topic])
    return lease.name
