"""Calls on a name with several parts: each part's broker handles its part, and the answers are combined.

    on_parts ──► plain topic: `local` ──► NotOwnerError? 307 to its owner (app.py)
             └─► partitions, some at a time: ours? `local` : the same call on the partition's name at its owner

Rules
1. `local` does to one part what a call on that part's own name does, refusals included: it does not matter which broker serves it.
2. Refusals with a status that the caller tolerates count as "nothing to do there"; if all parts refuse, the call is refused like
   that.
3. Everything that was begun ends before a failure is answered; the failure names partition and broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import http_status_of
from cepheid_broker.admin.topic_access import parts_of
from cepheid_broker.ownership import NotOwnerError, topic_path
from cepheid_ports import CepheidError
from cepheid_wire import TopicName

AT_ONCE = 16
"""Parts that one call works on concurrently."""

N = TypeVar("N")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """The request to a part's owner. `below`: its path and query under the topic; `read` converts the answer to what `local`
    returns."""

    method: str
    below: str
    body: bytes = b""
    read: Callable[[Any], Any] = lambda answer: answer


def same_call(request: Request, read: Callable[[Any], Any] = lambda answer: answer) -> Ask:
    """Return the call that is being answered, for a part's name."""
    below = "/".join(request.scope["path"].split("/")[7:])  # after /admin/v2/{domain}/{tenant}/{namespace}/{topic}
    query = request.scope["query_string"].decode("ascii", errors="replace")
    body = getattr(request.state, "body", b"")
    return Ask(request.method, f"/{below}?{query}" if query else f"/{below}", body, read)


async def on_parts(
    context: AdminContext,
    topic: TopicName,
    local: Callable[[TopicName], Awaitable[T]],
    ask: Ask,
    *,
    tolerate: Collection[HTTPStatus] = (),
) -> dict[TopicName, T]:
    """Return each part's answer, in order. Raises TopicNotFoundError, NotOwnerError (for a plain topic) and the errors of parts."""
    parts = await parts_of(context, topic)
    if parts == [topic]:
        return {topic: await local(topic)}
    return await on_topics(context, parts, local, ask, tolerate=tolerate)


async def on_topics(
    context: AdminContext,
    topics: Iterable[TopicName],
    local: Callable[[TopicName], Awaitable[T]],
    ask: Ask,
    *,
    tolerate: Collection[HTTPStatus] = (),
) -> dict[TopicName, T]:
    """Call `local` for each topic, or its owner, as `on_parts` does for parts."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def do(topic: TopicName) -> T:
        async with turns:
            try:
                return await local(topic)
            except NotOwnerError as error:
                target = topic_path(topic) + ask.below
                answer: T = ask.read(await context.broker.peers.call(error.there, ask.method, target, ask.body))
                return answer

    names = list(topics)
    outcomes = await asyncio.gather(*map(do, names), return_exceptions=True)
    return tolerated(names, outcomes, tolerate)


def tolerated(names: Sequence[N], outcomes: Sequence[Any], tolerate: Collection[HTTPStatus]) -> dict[N, Any]:
    """Return answers by name, without tolerated refusals (rule 2). Raises any other failure, or a refusal if there are only
    such."""
    refused: list[CepheidError] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, CepheidError) or http_status_of(outcome) not in tolerate:
                raise outcome
            refused.append(outcome)
    if refused and len(refused) == len(outcomes):  # 404 is the least specific: other refusals are preferred
        raise next((error for error in refused if http_status_of(error) != HTTPStatus.NOT_FOUND), refused[0])
    return {name: outcome for name, outcome in zip(names, outcomes, strict=True) if not isinstance(outcome, BaseException)}
