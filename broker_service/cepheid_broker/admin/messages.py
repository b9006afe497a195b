"""Single messages of a topic: by their place in a backlog, in the topic, by id, by time. Nothing is consumed by looking."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError, UnprocessableError
from cepheid_broker.admin.message_ids import MessageIdIn, message_id
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.stored_entries import read_entry
from cepheid_broker.admin.stored_message import message_answer
from cepheid_broker.admin.topic_access import open_plain, subscription_of
from cepheid_broker.topics import Topic, position_at_time
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_wire import BadTailError

_ENDS = ("earliest", "latest")


def messages(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/subscription/{sub}/position/{messagePosition}", response_class=Response)
    async def peek(topic: TopicPath, sub: SubscriptionPath, messagePosition: int) -> Response:
        """The how manieth unacknowledged entry, from 1; a batch comes whole. The payload decompressed, the rest in headers"""
        opened = await open_plain(context, topic)
        cursor = subscription_of(opened, sub).cursor
        position = cursor.nth_unacknowledged(messagePosition) if 0 < messagePosition <= cursor.backlog_entries else None
        if position is None:
            message = f"The backlog of {sub!r} of {topic} has {cursor.backlog_entries} entries: there is none at {messagePosition}"
            raise NotFoundError(message, topic=str(topic), subscription=sub)
        return await _entry(opened, position)

    @router.get("/examinemessage", response_class=Response)
    async def examine(topic: TopicPath, initialPosition: str = "latest", messagePosition: int = 1) -> Response:
        """`initialPosition` earliest or latest, `messagePosition` from 1: counted in entries, without a subscription"""
        if initialPosition not in _ENDS:
            raise PreconditionError(f"initialPosition {initialPosition[:100]!r} is none of {', '.join(_ENDS)}")
        if messagePosition < 1:
            raise PreconditionError(f"messagePosition {messagePosition} is not above 0: the first message has number 1")
        opened = await open_plain(context, topic)
        ledgers = opened.ledger.ledgers
        entries = ledgers.total_entries
        if entries == 0:
            raise PreconditionError(f"Topic {topic} is empty", topic=str(topic))
        if messagePosition > entries:
            raise NotFoundError(f"Topic {topic} has {entries} entries: there is none at {messagePosition}", topic=str(topic))
        rank = messagePosition if initialPosition == "earliest" else entries - messagePosition + 1
        return await _entry(opened, ledgers.at_rank(rank))

    @router.get("/ledger/{ledgerId}/entry/{entryId}", response_class=Response)
    async def get_by_id(topic: TopicPath, ledgerId: int, entryId: int) -> Response:
        """As `position/…` answers it, acknowledged or not"""
        return await _entry(await open_plain(context, topic), Position(ledgerId, entryId))

    @router.get("/messageid/{timestamp}")
    async def message_id_at(topic: TopicPath, timestamp: int) -> dict[str, Any]:
        """The first message published at or after that time (ms); where the next one will be, if all are older"""
        opened = await open_plain(context, topic)
        return message_id(await position_at_time(opened.ledger, timestamp), topic)

    @router.put("/backlogSize")
    async def backlog_size(topic: TopicPath, message: MessageIdIn) -> int:
        """Stored bytes behind a message id, exactly; of all for the earliest"""
        opened = await open_plain(context, topic)
        message.check_partition(topic)
        if message.position == LATEST:
            return 0
        behind = opened.ledger.first_position() if message.position == EARLIEST else message.position
        return await opened.ledger.counts.bytes_after(behind)

    return router


async def _entry(topic: Topic, position: Position) -> Response:
    tail = await read_entry(topic.ledger, position)
    if tail is None:
        message = f"Topic {topic.name} has no entry {position.ledger_id}:{position.entry_id}, or no longer"
        raise NotFoundError(message, topic=str(topic.name))
    try:
        body, headers = message_answer(position, tail)
    except BadTailError as error:
        raise UnprocessableError(f"Entry {position} of {topic.name} is stored, and cannot be shown: {error}") from None
    answer = Response(body, media_type="application/octet-stream")
    for name, value in headers:
        answer.headers.append(name, value)
    return answer
