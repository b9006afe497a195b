"""Moving subscriptions: skip, expire, reset; and the contents of their backlogs.

Every call is durable when it is answered. Skipping and expiring leave consumers connected; a reset closes them, and they reconnect
and continue from the new position. Calls by number and by message id are for one topic or partition (405 on a partitioned name);
calls by time apply to every partition (docs/reference/behaviours.md §5).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotServedError, PreconditionError
from cepheid_broker.admin.message_ids import MessageIdBody, MessageIdIn, OptionalMessageIdIn, require_place
from cepheid_broker.admin.part_calls import on_parts, same_call
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.stored_entries import from_message
from cepheid_broker.admin.topic_access import open_plain, open_subscription, open_topic, subscription_of
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.topics import Subscription, Topic, exact_backlog, position_at_time
from cepheid_metadata import EARLIEST, Position
from cepheid_wire import TopicName

NO_CONTENT = 204
_SMALL_BACKLOG = 1_000
"""Entries. Below it, Pulsar refuses to expire while consumers are connected and nothing is old enough (409)."""
_NOT_THERE = (HTTPStatus.NOT_FOUND,)  # a subscription on only some partitions is not an error


def cursor_operations(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.post("/subscription/{sub}/skip_all", status_code=NO_CONTENT)
    async def skip_all(topic: TopicPath, sub: SubscriptionPath, request: Request) -> None:
        """Skip the whole backlog, on every partition"""

        async def skip_part(name: TopicName) -> None:
            _, subscription = await open_subscription(context, name, sub)
            await subscription.clear_backlog()

        await on_parts(context, topic, skip_part, same_call(request), tolerate=_NOT_THERE)

    @router.post("/subscription/{sub}/skip/{numMessages}", status_code=NO_CONTENT)
    async def skip(topic: TopicPath, sub: SubscriptionPath, numMessages: int) -> None:
        """Skip this many unacknowledged entries, or all if there are fewer; one topic or partition"""
        if numMessages < 0:
            raise PreconditionError(f"numMessages must be 0 or more, got {numMessages}")
        subscription = subscription_of(await open_plain(context, topic), sub)
        await subscription.skip(min(numMessages, subscription.cursor.backlog_entries))

    @router.post("/subscription/{sub}/expireMessages/{expireTimeInSeconds}", status_code=NO_CONTENT)
    async def expire_by_age(topic: TopicPath, sub: SubscriptionPath, expireTimeInSeconds: int, request: Request) -> None:
        """Acknowledge what is older than that, on every partition; 409 if the backlog is empty, or small, recent and being
        consumed"""
        before_ms = _before_ms(context, expireTimeInSeconds)

        async def expire_part(name: TopicName) -> None:
            part, subscription = await open_subscription(context, name, sub)
            entries = subscription.cursor.backlog_entries
            nearly_done = not entries or (entries < _SMALL_BACKLOG and subscription.consumers)
            if not await _expire(part, subscription, before_ms) and nearly_done:
                raise ConflictError(f"Nothing in the backlog of {sub!r} of {name} is older than {expireTimeInSeconds} s")

        await on_parts(context, topic, expire_part, same_call(request), tolerate={*_NOT_THERE, HTTPStatus.CONFLICT})

    @router.post("/subscription/{sub}/expireMessages", status_code=NO_CONTENT)
    async def expire_by_id(topic: TopicPath, sub: SubscriptionPath, message: MessageIdIn) -> None:
        """Expire up to and including this message (without it: `isExcluded`); 409 for one after the end of the topic"""
        opened = await open_plain(context, topic)
        subscription = subscription_of(opened, sub)
        message.check_partition(topic)
        if message.position > opened.ledger.last_confirmed:
            raise ConflictError(f"{message.position} is after the last message of {topic}, {opened.ledger.last_confirmed}")
        last = opened.ledger.ledgers.normalise(message.position)
        if message.isExcluded and last == message.position:
            last = opened.ledger.previous_position(last)
        await subscription.expire_until(last)

    @router.post("/all_subscription/expireMessages/{expireTimeInSeconds}", status_code=NO_CONTENT)
    async def expire_everywhere(topic: TopicPath, expireTimeInSeconds: int, request: Request) -> None:
        """Expire old messages for all subscriptions, on every partition"""
        before_ms = _before_ms(context, expireTimeInSeconds)

        async def expire_part(name: TopicName) -> None:
            part = await open_topic(context, name)
            for subscription in [found for found in part.subscriptions.values() if found.durable]:
                await _expire(part, subscription, before_ms)

        await on_parts(context, topic, expire_part, same_call(request))

    @router.post("/subscription/{sub}/resetcursor/{timestamp}", status_code=NO_CONTENT)
    async def reset_by_time(topic: TopicPath, sub: SubscriptionPath, timestamp: int, request: Request) -> None:
        """Continue with the first message published at or after that time (ms), on every partition"""

        async def reset_part(name: TopicName) -> None:
            part, subscription = await open_subscription(context, name, sub)
            try:
                await _reset(part, subscription, await position_at_time(part.ledger, timestamp))
            except ServiceNotReadyError as error:
                raise PreconditionError(str(error), topic=str(name), subscription=sub) from None

        tolerate = {*_NOT_THERE, HTTPStatus.PRECONDITION_FAILED}
        await on_parts(context, topic, reset_part, same_call(request), tolerate=tolerate)

    @router.post("/subscription/{sub}/resetcursor", status_code=NO_CONTENT)
    async def reset_by_id(topic: TopicPath, sub: SubscriptionPath, message: MessageIdIn) -> None:
        """Continue with this message, even within a batch, or with the next one (`isExcluded`)"""
        opened = await open_plain(context, topic)
        subscription = subscription_of(opened, sub)
        message.check_partition(topic)
        try:
            await _reset(opened, subscription, *await _place_of(opened, message))
        except ServiceNotReadyError as error:
            raise PreconditionError(str(error), topic=str(topic), subscription=sub) from None

    @router.post("/subscription/{sub}/analyzeBacklog")
    async def analyze_backlog(topic: TopicPath, sub: SubscriptionPath, start: OptionalMessageIdIn) -> dict[str, Any]:
        """Return exact entries and messages of the backlog; never `aborted`. A start in the body is not served (501)"""
        if start is not None and start.position != EARLIEST:
            raise NotServedError(f"A backlog is only counted as a whole, not from {start.position} on: leave the body out")
        opened = await open_plain(context, topic)
        return await _analysis(opened, subscription_of(opened, sub))

    return router


def _before_ms(context: AdminContext, age_s: int) -> int:
    if age_s < 0:
        raise PreconditionError(f"age must be 0 or more seconds, got {age_s}")
    return context.broker.ports.wall_ms() - 1000 * age_s


async def _expire(topic: Topic, subscription: Subscription, before_ms: int) -> int:
    """Expire what was published before that time; return the number of entries."""
    first_young = await position_at_time(topic.ledger, before_ms)
    return await subscription.expire_until(topic.ledger.previous_position(first_young))


async def _analysis(topic: Topic, subscription: Subscription) -> dict[str, Any]:
    """Return the analysis of a backlog. Without entry filters everything is accepted (docs/reference/shapes.md §8)."""
    first, last = subscription.cursor.first_unacknowledged(), topic.ledger.last_confirmed
    backlog = await exact_backlog(topic.ledger, subscription.cursor)
    counted: dict[str, Any] = {"entries": backlog.entries, "messages": backlog.messages}
    for unit, accepted in (("Entries", backlog.entries), ("Messages", backlog.messages)):
        counted |= {f"filterAccepted{unit}": accepted, f"filterRejected{unit}": 0, f"filterRescheduled{unit}": 0}
    if backlog.entries:
        counted |= {"firstMessageId": str(first), "lastMessageId": str(last)}
    return {**counted, "aborted": False}


async def _place_of(topic: Topic, message: MessageIdBody) -> tuple[Position, tuple[int, ...]]:
    """Return the entry where delivery continues, and which part of it if it is a batch."""
    if message.batchIndex < 0:
        return require_place(topic, message.first), ()
    return await from_message(topic.ledger, require_place(topic, message.position), message.batchIndex + message.isExcluded)


async def _reset(topic: Topic, subscription: Subscription, position: Position, words: tuple[int, ...] = ()) -> None:
    subscription.begin_seek()
    try:
        await topic.reset_subscription(subscription, position, words)
    finally:
        subscription.end_seek()
