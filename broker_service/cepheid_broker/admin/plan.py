"""The plan service: where the history of a topic lies, for those who read it straight from the bookies (docs/plan-service.md).

    GET /cepheid/v1/plan?topic=T ──► end ──► chain with recorded ends ──► fragments of each ledger ──► addresses of the bookies

Rules
1. The end is looked at before the chain, so everything up to the end lies in ledgers that the answer names.
2. The chain's record of a ledger is its end (cepheid_ledger.chain_end). The open ledger has none: up to its hint it is certain.
3. Entries never pass the broker, and the answer is a snapshot: who misses a ledger that was trimmed since asks anew.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotServedError
from cepheid_broker.errors import ServiceNotReadyError, TopicNotFoundError
from cepheid_broker.ownership import NotOwnerError
from cepheid_ledger import master_key_of, readable_end
from cepheid_metadata import (
    ChainLedger,
    LedgerMetadata,
    Position,
    available_bookies,
    chain_records,
    keys,
    ledger_records,
    list_names,
    readonly_bookies,
)
from cepheid_wire import TopicName

FORMAT = 1
_AT_ONCE = 64  # records asked for together, and partitions opened together
_ATTEMPTS = 3  # of a chain that is trimmed while it is looked at

N = TypeVar("N")
R = TypeVar("R")


def plan(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/plan")
    async def plan_of(topic: str) -> dict[str, Any]:
        """Ours, not Pulsar's: docs/plan-service.md"""
        name = TopicName.parse(topic)
        if not name.is_persistent:
            raise NotServedError(f"{name} is not persistent: it has no history")
        await context.authorize_history(name)
        partitions = await context.broker.catalog.partitions(name)
        if partitions is None:
            raise TopicNotFoundError(f"Topic {name} does not exist", topic=str(name))
        parts = [name.partition(index) for index in range(partitions)] or [name]
        return {
            "format": FORMAT,
            "topic": str(name),
            "partitions": partitions,
            "plans": await _plans(context, name, parts),
            "bookies": await _addresses(context),
            "read_ticket": "",  # signed, once bookies ask for it (cepheid_rpc.ReadRequest)
        }

    return router


async def _plans(context: AdminContext, name: TopicName, parts: Sequence[TopicName]) -> list[dict[str, Any]]:
    """Of a plain topic that another broker serves: NotOwnerError, the caller is sent there (app.py)."""
    if parts == [name]:
        return [await _plan_of_partition(context, name)]
    return await _in_groups(parts, lambda part: _plan_here_or_there(context, part))


async def _plan_here_or_there(context: AdminContext, part: TopicName) -> dict[str, Any]:
    try:
        return await _plan_of_partition(context, part)
    except NotOwnerError as error:
        answer = await context.broker.peers.call(error.there, "GET", f"/cepheid/v1/plan?topic={quote(str(part), safe='')}")
        (plan,) = answer["plans"]
        return dict(plan)


async def _plan_of_partition(context: AdminContext, name: TopicName) -> dict[str, Any]:
    """Opens the topic if nobody has: only then the end of what was acknowledged before is known."""
    records = ledger_records(context.store)
    for _ in range(_ATTEMPTS):
        topic = await context.broker.topics.get(name, may_create=False)
        end = topic.ledger.last_confirmed  # rule 1
        found = await chain_records(context.store).get(name)
        if found is None:
            continue  # being deleted; the next attempt says so
        found_ledgers = await _in_groups(found.record.ledgers, lambda ledger: records.get(ledger.ledger_id))
        ledgers = [ledger.record for ledger in found_ledgers if ledger is not None]
        if len(ledgers) == len(found_ledgers):  # else it was trimmed meanwhile
            return {
                "topic": str(name),
                "partition": name.partition_index,
                "incarnation": found.record.incarnation,
                "epoch": found.record.epoch,
                "end": {"ledger_id": end.ledger_id, "entry_id": end.entry_id},
                "ledgers": [
                    _ledger(recorded, metadata, end) for recorded, metadata in zip(found.record.ledgers, ledgers, strict=True)
                ],
            }
    raise ServiceNotReadyError(f"The chain of {name} changed {_ATTEMPTS} times while it was read", topic=str(name))


def _ledger(recorded: ChainLedger, metadata: LedgerMetadata, end: Position) -> dict[str, Any]:
    confirmed = end.entry_id if end.ledger_id == recorded.ledger_id else -1
    return {
        "ledger_id": recorded.ledger_id,
        "entries": recorded.entries,
        "last_entry_id": readable_end(recorded.entries, confirmed),
        "size_bytes": recorded.size_bytes,
        "closed_at_ms": recorded.closed_at_ms,
        "digest_type": metadata.digest_type,
        "master_key": base64.b64encode(master_key_of(metadata)).decode(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "fragments": [
            {"first_entry_id": fragment.first_entry_id, "ensemble": list(fragment.ensemble)} for fragment in metadata.fragments
        ],
    }


async def _addresses(context: AdminContext) -> dict[str, str]:
    """host:port of each registered bookie's gRPC endpoint. One that is down, or serves nobody outside, is not in it."""
    addresses: dict[str, str] = {}
    for parent_key, records in (
        (keys.AVAILABLE_BOOKIES_KEY, available_bookies(context.store)),
        (keys.READONLY_BOOKIES_KEY, readonly_bookies(context.store)),
    ):
        for bookie in await list_names(context.store, parent_key):
            found = await records.get(bookie)
            if found is not None and "grpc" in found.record.addresses:
                addresses[bookie] = found.record.addresses["grpc"]
    return addresses


async def _in_groups(nouns: Sequence[N], ask: Callable[[N], Awaitable[R]]) -> list[R]:
    """The answers in order, `_AT_ONCE` at a time. Raises the first failure, when all of its group have ended."""
    answers: list[R] = []
    for first in range(0, len(nouns), _AT_ONCE):
        for outcome in await asyncio.gather(*map(ask, nouns[first : first + _AT_ONCE]), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
    return answers
