"""Plans from the plan service of brokers (docs/plan-service.md): one request per topic, whatever its number of partitions.

    topics of one base name ──one request──► all of its partitions, from whichever brokers serve them
    several base names      ──a few at a time, in threads
    named like a partition but not one ──one request each, after that for the base name

A repeated plan names the last known closed ledger, so that fragments of closed ledgers are sent only once.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from cepheid_decode.errors import AdminRefusedError, BadOptionError, PlanUnavailableError
from cepheid_decode.history import Fragment, HistoryPlan, LedgerHistory, SchemaVersion, TopicHistory
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import PlanSource, TopicSelection
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.gone_ledgers import GoneLedgers
from cepheid_scan.planner import in_threads, no_such_topics, parse_topic, selected
from cepheid_wire import TopicName

_FORMATS = (1, 2, 3)  # 2: ledgers may be objects only, without fragments; 3: ledgers have tickets instead of master keys
_NAMES_PER_REQUEST = 100  # their URL stays below 64 KB
_MOST_KNOWN_LEDGERS = 100_000  # kept between plans


class PlanServicePlanner:
    def __init__(self, source: PlanSource) -> None:
        self._http = AdminHttp(source)
        self._known: dict[str, dict[str, TopicHistory]] = {}  # by base name and topic
        self._known_ledgers = 0
        self._lock = threading.Lock()
        self._gone = GoneLedgers(lambda path, query: self._http.get(path, query))

    def close(self) -> None:
        self._http.close()

    # Topics

    def topics(self, selection: TopicSelection) -> list[str]:
        return selected(selection, self._counts, lambda namespace: self._listed(str(namespace)))

    def _counts(self, names: Sequence[TopicName]) -> dict[str, int]:
        groups = [list(map(str, names[first : first + _NAMES_PER_REQUEST])) for first in range(0, len(names), _NAMES_PER_REQUEST)]
        answers = in_threads(groups, lambda group: self._http.get("/cepheid/v1/topics", {"topic": group}))
        return {name: count for answer in answers for name, count in _checked(answer)["topics"].items() if count is not None}

    def _listed(self, namespace: str) -> dict[str, int]:
        """Return the topics of a namespace; empty if it does not exist."""
        try:
            return dict(_checked(self._http.get("/cepheid/v1/topics", {"namespace": namespace}))["topics"])
        except AdminRefusedError as error:
            if error.status != 404:
                raise
            return {}

    def _neighbours(self, topic: str) -> Iterable[str]:
        return self._listed(str(parse_topic(topic).namespace))

    # Locations

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        self._gone.forget()
        by_base: dict[str, list[str]] = {}
        for topic in topics:
            by_base.setdefault(str(parse_topic(topic).base), []).append(topic)
        asked = [(base, names[0] if len(names) == 1 else base) for base, names in by_base.items()]
        answers = in_threads(asked, lambda one: self._answers(one[1], by_base[one[0]], schemas))
        histories: dict[str, TopicHistory] = {}
        bookies: dict[str, str] = {}
        racks: dict[str, str] = {}
        tickets: dict[str, bytes] = {}
        versions: dict[str, tuple[SchemaVersion, ...]] = {}
        for (base, _), of_base in zip(asked, answers, strict=True):
            for answer in of_base.values():
                histories |= {history.topic: history for history in answer.histories}
                bookies |= answer.bookies
                racks |= answer.racks
            first, *others = of_base
            tickets |= {base: of_base[first].ticket, **{name: of_base[name].ticket for name in others}}
            if schemas:
                versions[base] = of_base[first].schemas
        if missing := [topic for topic in topics if topic not in histories]:
            raise no_such_topics(missing, histories)
        ticket = next(iter(tickets.values())) if len(tickets) == 1 else b""
        return HistoryPlan(tuple(histories[topic] for topic in topics), bookies, ticket, versions, tickets, racks)

    def _answers(self, asked: str, wanted: Sequence[str], schemas: bool) -> dict[str, _Answer]:
        """Return answers by requested name, mostly `asked`. A topic may be named like a partition of another without being one:
        it is then requested by its own name. Raises NoSuchTopicError.
        """
        answers: dict[str, _Answer] = {}
        found: set[str] = set()
        for name in (asked, *wanted):
            if name not in found and name not in answers:
                answer = self._ask(name, schemas)
                if answer is not None:
                    answers[name] = answer
                    found |= {history.topic for history in answer.histories}
                elif name in wanted:
                    raise no_such_topics([name], self._neighbours(name))
        return answers

    def _ask(self, topic: str, schemas: bool) -> _Answer | None:
        """Return the answer; None: there is no such topic."""
        base = str(parse_topic(topic).base)
        with self._lock:
            known = dict(self._known.get(base, {}))
        for after in (_last_known(topic, known), None):
            try:
                query = {"topic": topic, "schemas": "true" if schemas else None, "after": after}
                answer = _checked(self._http.get("/cepheid/v1/plan", query))
            except AdminRefusedError as error:
                if error.status != 404:
                    raise
                return None
            # Ledger ids may be used again if a cluster was set up again.
            now = {plan["topic"]: plan["incarnation"] for plan in answer["plans"]}
            same = {name: _closed(history) for name, history in known.items() if history.incarnation == now.get(name)}
            parsed = _parse(answer, same)
            if parsed is not None:
                self._remember(base, parsed.histories)
                return parsed
        raise PlanUnavailableError(f"the plan of {topic} omits ledgers: the broker is of another release", topic=topic)

    def _remember(self, base: str, histories: Sequence[TopicHistory]) -> None:
        with self._lock:
            known = self._known.setdefault(base, {})
            before = sum(len(known[history.topic].ledgers) for history in histories if history.topic in known)
            known |= {history.topic: history for history in histories}
            self._known_ledgers += sum(len(history.ledgers) for history in histories) - before
            if self._known_ledgers > _MOST_KNOWN_LEDGERS:
                self._known = {base: {history.topic: history for history in histories}}
                self._known_ledgers = sum(len(history.ledgers) for history in histories)

    # Positions of subscriptions

    def subscription_position(self, topic: str, subscription: str) -> MessagePosition:
        name = parse_topic(topic)
        path = f"/admin/v2/persistent/{name.namespace}/{quote(name.local_name, safe='')}/internalStats"
        try:
            cursors = self._http.get(path)["cursors"]
        except AdminRefusedError as error:
            if error.status != 404:
                raise
            raise no_such_topics([topic], self._neighbours(topic)) from None
        if subscription not in cursors:
            names = ", ".join(sorted(cursors)) or "none"
            raise BadOptionError(f"{topic} has no subscription {subscription!r}: it has {names}", topic=topic)
        ledger_id, entry_id = cursors[subscription]["markDeletePosition"].split(":")
        return MessagePosition(max(0, int(ledger_id)), int(entry_id) + 1)

    # Deleted ledgers

    def deleted_ledger_end(self, ledger_id: int) -> int | None:
        try:
            ledger = self._http.get(f"/cepheid/v1/ledgers/{ledger_id}")["ledger"]
        except AdminRefusedError:
            return None
        last: int | None = ledger.get("last_entry_id")
        return last

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        return self._gone.of(topic, incarnation, ids)


@dataclass(slots=True)
class _Answer:
    histories: list[TopicHistory]
    bookies: dict[str, str]
    racks: dict[str, str]
    ticket: bytes
    schemas: tuple[SchemaVersion, ...]


def _closed(history: TopicHistory) -> dict[int, LedgerHistory]:
    return {ledger.ledger_id: ledger for ledger in history.ledgers if not ledger.is_open}


def _last_known(topic: str, known: Mapping[str, TopicHistory]) -> int | None:
    """Return the last known closed ledger. `known`: of topics of one base name."""
    asked = (history for name, history in known.items() if name == topic or name.startswith(f"{topic}-partition-"))
    return max((max(closed) for history in asked if (closed := _closed(history))), default=None)


def _checked(answer: Any) -> dict[str, Any]:
    found = answer.get("format") if isinstance(answer, dict) else None
    if found not in _FORMATS:
        raise PlanUnavailableError(
            f"the plan service answers in format {found}, this release reads formats up to {_FORMATS[-1]}: upgrade it"
        )
    return dict(answer)


def _parse(answer: Mapping[str, Any], known: Mapping[str, Mapping[int, LedgerHistory]]) -> _Answer | None:
    """Return the answer; None: a ledger came without its fragments, and is not known here."""
    shared: dict[str, str] = {}  # one object per bookie: tasks are pickled, and repeated objects cost two bytes
    histories = []
    for plan in answer["plans"]:
        before = known.get(plan["topic"], {})
        ledgers: list[LedgerHistory] = []
        for ledger in plan["ledgers"]:
            found = _ledger(ledger, shared, before.get(ledger["ledger_id"]))
            if found is None:
                return None
            ledgers.append(found)
        histories.append(TopicHistory(plan["topic"], plan["partition"], plan["incarnation"], tuple(ledgers)))
    schemas = tuple(
        SchemaVersion(base64.b64decode(schema["version"]), schema["type"], base64.b64decode(schema["data"]), schema["properties"])
        for schema in answer.get("schemas", ())
    )
    racks = dict(answer.get("racks", {}))  # an older broker does not send them
    return _Answer(histories, dict(answer["bookies"]), racks, answer["read_ticket"].encode(), schemas)


def _ledger(ledger: Mapping[str, Any], shared: dict[str, str], known: LedgerHistory | None) -> LedgerHistory | None:
    """Return a ledger. `known`: its data in an earlier plan, needed if the answer omits the fragments.

    Information on a copy in object storage is always current: a ledger moves there after it ended.
    """
    is_open = ledger["entries"] is None
    offloaded = ledger.get("offloaded")
    url, object_bytes = (offloaded["url"], offloaded["object_bytes"]) if offloaded else ("", 0)
    is_on_bookies = offloaded is None or offloaded["on_bookies"]
    ticket = ledger.get("ticket", "").encode()
    if is_on_bookies and "fragments" not in ledger:
        if known is None or not known.fragments:
            return None
        same = (known.object_url, known.object_bytes, known.ticket) == (url, object_bytes, ticket)
        return known if same else replace(known, object_url=url, object_bytes=object_bytes, ticket=ticket)
    return LedgerHistory(
        ledger["ledger_id"],
        ledger["last_entry_id"],
        is_open,
        ledger["size_bytes"],
        None if is_open else ledger["closed_at_ms"],
        ledger["ensemble_size"] if is_on_bookies else 0,
        ledger["write_quorum"] if is_on_bookies else 0,
        fragments=tuple(
            Fragment(fragment["first_entry_id"], tuple(shared.setdefault(bookie, bookie) for bookie in fragment["ensemble"]))
            for fragment in (ledger["fragments"] if is_on_bookies else ())
        ),
        master_key=base64.b64decode(ledger.get("master_key", "")),
        object_url=url,
        object_bytes=object_bytes,
        ticket=ticket,
    )
