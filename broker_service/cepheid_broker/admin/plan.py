"""The plan service: where the history of a topic is stored, for readers that read it directly from bookies (docs/plan-service.md).

    GET /cepheid/v1/plan?topic=T ──► end ──► chain with recorded ends ──► fragments of each ledger ──► addresses of the bookies
    GET /cepheid/v1/topics?topic=T&topic=U ──► their numbers of partitions          ?namespace=N ──► of all topics in it

Rules
1. The end is read before the chain, so everything up to the end is in ledgers that the answer names.
2. The chain's record of a ledger contains its end (cepheid_ledger.chain_end). The open ledger has none: it is certain up to its
   hint.
3. Entries never pass through the broker, and the answer is a snapshot: a reader that misses a ledger, trimmed since, asks again.
4. A reader that plans repeatedly names the last ledger that it knows (`after`): only later ledgers come with fragments.
5. With security each ledger comes with a ticket for its entries, signed for the caller's role, instead of its master key. Such an
   answer has format 3. The broker that is asked signs all of them, even those of partitions that others serve. Until the cluster's
   upgrade is finished the answer has both, and an older format: brokers and readers of the previous release do not know tickets.
6. A ledger with a complete copy in object storage names it (`offloaded`), whatever `after` says, since a ledger moves there after
   it ended. A ledger that is only an object has no fragments: an answer that names one has format 2, which older readers refuse.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from cepheid_broker.admin.access import call_of, require, visible_topics
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, NotServedError
from cepheid_broker.admin.read_ticket import issue_ticket
from cepheid_broker.errors import ServiceNotReadyError, TopicNotFoundError
from cepheid_broker.ownership import NotOwnerError
from cepheid_broker.schemas import HistoryStore, encode_version
from cepheid_broker.topics import is_system_topic
from cepheid_ledger import master_key_of, readable_end
from cepheid_metadata import (
    BookieRegistration,
    Chain,
    ChainLedger,
    LedgerMetadata,
    OffloadedLedger,
    Position,
    available_bookies,
    keys,
    ledger_records,
    list_records,
    list_topics,
    read_chain,
    readonly_bookies,
    topic_records,
)
from cepheid_metadata.ticket_keyring import TicketKeyring
from cepheid_rpc import bookie_address
from cepheid_security import Need
from cepheid_security.read_tickets import LAST_ENTRY
from cepheid_wire import PERSISTENT, NamespaceName, TopicName

FORMAT = 1
FORMAT_WITH_OBJECTS = 2  # rule 6
FORMAT_WITH_TICKETS = 3  # rule 5
_AT_ONCE = 64  # records read concurrently, and partitions opened concurrently
_ATTEMPTS = 3  # for a chain that is trimmed while it is read
_ENCODED_AT_ONCE = 200
_MOST_NAMES = 1000  # in one request
_ON_BOOKIES = {"on_bookies": True}
_PUBLIC_STORE_OPTIONS = frozenset({"endpoint", "region"})

N = TypeVar("N")
R = TypeVar("R")


def plan(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get(
        "/plan",
        response_class=JSONResponse,
        responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
    )
    async def plan_of(request: Request, topic: str, schemas: bool = False, after: int = -1) -> Response:
        """Return where the topic's history is stored, for readers that bypass the brokers (docs/plan-service.md)"""
        name = _persistent(topic)
        await require(context, request, Need.CONSUME, name)
        partitions = await context.broker.catalog.partitions(name)
        if partitions is None:
            raise TopicNotFoundError(f"Topic {name} does not exist", topic=str(name))
        parts = [name.partition(index) for index in range(partitions)] or [name]
        bookies = await _bookies(context)
        plans = await _plans(context, name, parts, after)
        if context.tickets is not None:
            await _sign_tickets(plans, context.tickets, call_of(request).client_role)
        has_tickets_alone = context.tickets is not None and context.tickets.are_required
        answer = {
            "format": FORMAT_WITH_TICKETS if has_tickets_alone else _format_of(plans),
            "topic": str(name),
            "partitions": partitions,
            "plans": plans,
            "schemas": await _schemas(context, name) if schemas else [],
            # A reader without TLS here has no certificates for bookies either, which have both kinds of port for a while.
            "bookies": {
                bookie.bookie_id: bookie_address(bookie.addresses, prefer_tls=request.url.scheme == "https") for bookie in bookies
            },
            "racks": {bookie.bookie_id: bookie.rack for bookie in bookies if bookie.rack is not None},
            "read_ticket": "" if has_tickets_alone else issue_ticket(name, context.broker.ports.wall_ms()),
        }
        return Response(await _encoded(answer), media_type="application/json")

    @router.get("/topics")
    async def partitions_of(
        request: Request, topic: Annotated[list[str] | None, Query()] = None, namespace: str = ""
    ) -> dict[str, Any]:
        """Return the number of partitions of each topic; 0: not partitioned; null: no such topic"""
        if namespace:
            asked = NamespaceName.parse(namespace)
            await require(context, request, Need.NAMESPACE_READ, asked)
            return {"format": FORMAT, "topics": await _topics_in(context, request, asked)}
        if topic is None or len(topic) > _MOST_NAMES:
            raise BadRequestError(f"name a namespace, or 1 to {_MOST_NAMES} topics")
        names = [_persistent(each) for each in topic]
        for name in names:
            await require(context, request, Need.CONSUME, name)
        counts = await _in_groups(names, lambda name: _partitions(context, name))
        return {"format": FORMAT, "topics": {str(name): count for name, count in zip(names, counts, strict=True)}}

    return router


async def _sign_tickets(plans: Sequence[dict[str, Any]], tickets: TicketKeyring, role: str) -> None:
    """Give each ledger on bookies a ticket, usually instead of its master key (rule 5).

    Pauses between groups of ledgers.
    """
    for plan in plans:
        for place, ledger in enumerate(plan["ledgers"], 1):
            if tickets.are_required:
                ledger.pop("master_key", None)
            ledger.pop("ticket", None)  # from the broker that serves the partition, for this broker's role instead of the reader's
            last = LAST_ENTRY if ledger["open"] else ledger["last_entry_id"]
            if last >= 0 and ledger.get("offloaded", _ON_BOOKIES)["on_bookies"]:
                ledger["ticket"] = tickets.sign(ledger["ledger_id"], last, role).decode()
            if place % _ENCODED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _persistent(topic: str) -> TopicName:
    name = TopicName.parse(topic)
    if not name.is_persistent:
        raise NotServedError(f"{name} is not persistent: it has no history")
    return name


async def _partitions(context: AdminContext, name: TopicName) -> int | None:
    found = await context.broker.catalog.find(name)
    if found is None or found.record.deleted:
        return None
    return 0 if name.is_partition else found.record.partitions


async def _topics_in(context: AdminContext, request: Request, namespace: NamespaceName) -> dict[str, int]:
    """Return partition counts of topics, without system topics, those being deleted, and those that the caller may not consume."""
    await context.require_namespace(namespace)
    listed = await list_topics(context.store, namespace.tenant, namespace.local_name, PERSISTENT)
    names = [name for name in listed if not is_system_topic(name)]
    names = await visible_topics(context, request, namespace, names, Need.CONSUME)
    records = await _in_groups(names, topic_records(context.store).get)
    return {
        str(name): found.record.partitions
        for name, found in zip(names, records, strict=True)
        if found is not None and not found.record.deleted
    }


async def _schemas(context: AdminContext, name: TopicName) -> list[dict[str, Any]]:
    """Return every version that an entry may name, oldest first, including those no longer in force."""
    histories = HistoryStore(context.store)
    found = await histories.get(name)
    rows = () if found is None else found.record.versions
    definitions = await _in_groups(rows, lambda row: histories.definition(name, row))
    return [
        {
            "version": base64.b64encode(encode_version(row.version)).decode(),
            "type": definition.type,
            "data": base64.b64encode(definition.data).decode(),
            "properties": dict(definition.properties),
        }
        for row, definition in zip(rows, definitions, strict=True)
        if definition is not None  # else it was deleted meanwhile
    ]


async def _plans(context: AdminContext, name: TopicName, parts: Sequence[TopicName], after: int) -> list[dict[str, Any]]:
    """Return the plans of all parts. Raises NotOwnerError for a plain topic of another broker, to which app.py redirects."""
    if parts == [name]:
        return [await _plan_of_partition(context, name, after)]
    return await _in_groups(parts, lambda part: _plan_here_or_there(context, part, after))


async def _plan_here_or_there(context: AdminContext, part: TopicName, after: int) -> dict[str, Any]:
    try:
        return await _plan_of_partition(context, part, after)
    except NotOwnerError as error:
        query = urlencode({"topic": str(part), "after": after})
        answer = await context.broker.peers.call(error.there, "GET", f"/cepheid/v1/plan?{query}")
        (plan,) = answer["plans"]
        return dict(plan)


async def _plan_of_partition(context: AdminContext, name: TopicName, after: int) -> dict[str, Any]:
    """Return the plan of one partition, opening the topic if needed: only then is the end of its acknowledged entries known."""
    for _ in range(_ATTEMPTS):
        topic = await context.broker.topics.get(name, may_create=False)
        end, open_bytes = topic.ledger.last_confirmed, topic.ledger.ledgers.last_size_bytes  # rule 1
        found = await read_chain(context.store, name)
        if found is None:
            continue  # being deleted; the next attempt raises
        ledgers = await _ledgers(context, found.record, end, open_bytes, after)
        if None not in ledgers:  # else it was trimmed meanwhile
            return {
                "topic": str(name),
                "partition": name.partition_index,
                "incarnation": found.record.incarnation,
                "epoch": found.record.epoch,
                "end": {"ledger_id": end.ledger_id, "entry_id": end.entry_id},
                "ledgers": ledgers,
            }
    raise ServiceNotReadyError(f"The chain of {name} changed {_ATTEMPTS} times while it was read", topic=str(name))


async def _ledgers(context: AdminContext, chain: Chain, end: Position, open_bytes: int, after: int) -> list[dict[str, Any] | None]:
    """Return the ledgers, those up to `after` without placement unless open (rule 4); None in place of a deleted one."""
    records = ledger_records(context.store)

    async def ledger_of(recorded: ChainLedger) -> dict[str, Any] | None:
        offload = chain.offload_of(recorded.ledger_id)
        is_known = recorded.ledger_id <= after and not recorded.is_open
        if is_known or not chain.is_on_bookies(recorded.ledger_id):  # only an object, without metadata (rule 6)
            return _ledger(recorded, None, end, open_bytes, offload)
        found = await records.get(recorded.ledger_id)
        return None if found is None else _ledger(recorded, found.record, end, open_bytes, offload)

    return await _in_groups(chain.ledgers, ledger_of)


def _format_of(plans: Sequence[dict[str, Any]]) -> int:
    """Return the oldest format whose readers understand the answer (rule 6)."""
    objects = (ledger["offloaded"] for plan in plans for ledger in plan["ledgers"] if "offloaded" in ledger)
    return FORMAT if all(each["on_bookies"] for each in objects) else FORMAT_WITH_OBJECTS


async def _encoded(answer: dict[str, Any]) -> bytes:
    """Encode as JSON with pauses: more than ten thousand ledgers in one go would block the loop for a quarter of a second."""
    plans: list[str] = []
    for plan in answer["plans"]:
        ledgers: list[str] = []
        for first in range(0, len(plan["ledgers"]), _ENCODED_AT_ONCE):
            ledgers.append(json.dumps(plan["ledgers"][first : first + _ENCODED_AT_ONCE])[1:-1])
            await asyncio.sleep(0)
        head = json.dumps({name: value for name, value in plan.items() if name != "ledgers"})
        plans.append(f'{head[:-1]}, "ledgers": [{", ".join(ledgers)}]}}')
    head = json.dumps({name: value for name, value in answer.items() if name != "plans"})
    return f'{head[:-1]}, "plans": [{", ".join(plans)}]}}'.encode()


def _ledger(
    recorded: ChainLedger, metadata: LedgerMetadata | None, end: Position, open_bytes: int, offload: OffloadedLedger | None
) -> dict[str, Any]:
    is_last = end.ledger_id == recorded.ledger_id
    fields: dict[str, Any] = {
        "ledger_id": recorded.ledger_id,
        "open": recorded.is_open,
        "entries": recorded.entries,
        "last_entry_id": readable_end(recorded.entries, end.entry_id if is_last else -1),
        "size_bytes": open_bytes if recorded.is_open and is_last else recorded.size_bytes,
        "closed_at_ms": recorded.closed_at_ms,
    }
    if offload is not None:
        fields["offloaded"] = {
            "url": without_secrets(offload.url),
            "object_bytes": offload.object_bytes,
            "on_bookies": offload.on_bookies,
        }
    return fields if metadata is None else fields | _placement(metadata)


def without_secrets(url: str) -> str:
    """Return the URL without a user and password, and without options that are not known to be harmless.

    URLs in records have no credentials, as policies refuse them. This is the last place to stop any that got there otherwise.
    """
    parts = urlsplit(url)
    options = parse_qsl(parts.query)
    public = [(name, value) for name, value in options if name in _PUBLIC_STORE_OPTIONS]
    query = parts.query if public == options else urlencode(public, safe=":/")
    user, _, host = parts.netloc.rpartition("@")
    has_user = user and (":" in user or not parts.scheme.startswith("abfs"))  # in abfs://container@account… it is the container
    return urlunsplit(parts._replace(netloc=host if has_user else parts.netloc, query=query))


def _placement(metadata: LedgerMetadata) -> dict[str, Any]:
    return {
        "digest_type": metadata.digest_type,
        "master_key": base64.b64encode(master_key_of(metadata)).decode(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "fragments": [
            {"first_entry_id": fragment.first_entry_id, "ensemble": list(fragment.ensemble)} for fragment in metadata.fragments
        ],
    }


async def _bookies(context: AdminContext) -> list[BookieRegistration]:
    """Return bookies registered with a gRPC endpoint, with or without TLS; not those that are down or serve only their own
    process."""
    serving: list[BookieRegistration] = []
    for parent_key, records in (
        (keys.AVAILABLE_BOOKIES_KEY, available_bookies(context.store)),
        (keys.READONLY_BOOKIES_KEY, readonly_bookies(context.store)),
    ):
        found, _ = await list_records(context.store, parent_key, records)
        serving += [record for record in found.values() if bookie_address(record.addresses) is not None]
    return serving


async def _in_groups(nouns: Sequence[N], ask: Callable[[N], Awaitable[R]]) -> list[R]:
    """Return the answers in order, asking `_AT_ONCE` at a time. Raises the first failure once its whole group has ended."""
    answers: list[R] = []
    for first in range(0, len(nouns), _AT_ONCE):
        for outcome in await asyncio.gather(*map(ask, nouns[first : first + _AT_ONCE]), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
    return answers
