"""Single messages of a topic: by position in a backlog or in the topic, by id, by time. Reading them consumes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import Response

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError, UnprocessableError
from cepheid_broker.admin.message_ids import MessageIdIn, message_id
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.stored_entries import read_entry
from cepheid_broker.admin.stored_message import message_answer
from cepheid_broker.admin.topic_access import open_plain, subscription_of
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.topics import Topic, position_at_time
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_security.connection_limits import is_loopback
from cepheid_wire import BadTailError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

PEEKS_AT_ONCE = 4
"""Most messages in memory for clients that peek; further calls wait. Each may take 64 MiB, however little is stored of it."""
PEEKS_PER_ADDRESS = 2
"""Most of these for one client address, so that a slow reader leaves some to others. Loopback is exempt."""
PLACE_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0  # for the client to read one message

_ENDS = ("earliest", "latest")
_PIECE_BYTES = 256 << 10


def messages(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")
    places = _Places()

    @router.get("/subscription/{sub}/position/{messagePosition}", response_class=Response)
    async def peek(topic: TopicPath, sub: SubscriptionPath, messagePosition: int) -> Response:
        """Return the nth unacknowledged entry, from 1; a batch is returned whole. Payload decompressed, metadata in headers"""
        opened = await open_plain(context, topic)
        cursor = subscription_of(opened, sub).cursor
        position = cursor.nth_unacknowledged(messagePosition) if 0 < messagePosition <= cursor.backlog_entries else None
        if position is None:
            message = f"The backlog of {sub!r} of {topic} has {cursor.backlog_entries} entries: there is none at {messagePosition}"
            raise NotFoundError(message, topic=str(topic), subscription=sub)
        return _Peek(places, opened, position)

    @router.get("/examinemessage", response_class=Response)
    async def examine(topic: TopicPath, initialPosition: str = "latest", messagePosition: int = 1) -> Response:
        """Return a message by its number in entries, without a subscription: `initialPosition` earliest or latest,
        `messagePosition` from 1"""
        if initialPosition not in _ENDS:
            raise PreconditionError(f"initialPosition {initialPosition[:100]!r} is not one of {', '.join(_ENDS)}")
        if messagePosition < 1:
            raise PreconditionError(f"messagePosition must be 1 or more, got {messagePosition}")
        opened = await open_plain(context, topic)
        ledgers = opened.ledger.ledgers
        entries = ledgers.total_entries
        if entries == 0:
            raise PreconditionError(f"Topic {topic} is empty", topic=str(topic))
        if messagePosition > entries:
            raise NotFoundError(f"Topic {topic} has {entries} entries: there is none at {messagePosition}", topic=str(topic))
        rank = messagePosition if initialPosition == "earliest" else entries - messagePosition + 1
        return _Peek(places, opened, ledgers.at_rank(rank))

    @router.get("/ledger/{ledgerId}/entry/{entryId}", response_class=Response)
    async def get_by_id(topic: TopicPath, ledgerId: int, entryId: int) -> Response:
        """Return an entry by its id as `position/…` does, acknowledged or not"""
        return _Peek(places, await open_plain(context, topic), Position(ledgerId, entryId))

    @router.get("/messageid/{timestamp}")
    async def message_id_at(topic: TopicPath, timestamp: int) -> dict[str, Any]:
        """Return the first message published at or after that time (ms); if all are older, the position of the next one"""
        opened = await open_plain(context, topic)
        return message_id(await position_at_time(opened.ledger, timestamp), topic)

    @router.put("/backlogSize")
    async def backlog_size(topic: TopicPath, message: MessageIdIn) -> int:
        """Return the exact stored bytes after a message id; for the earliest, of all entries"""
        opened = await open_plain(context, topic)
        message.check_partition(topic)
        if message.position == LATEST:
            return 0
        behind = opened.ledger.first_position() if message.position == EARLIEST else message.position
        return await opened.ledger.counts.bytes_after(behind)

    return router


class _Places:
    """Places for messages in memory, in total and for each address."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(PEEKS_AT_ONCE)
        self._of_address: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()  # calls of each address that have a place or wait for one

    @asynccontextmanager
    async def place(self, address: str) -> AsyncIterator[None]:
        """Wait for a place, and free it at the end. Raises ServiceNotReadyError after waiting too long."""
        async with self._share_of(address) as share:
            limit = f"{PEEKS_PER_ADDRESS} messages are being read by admin clients at {address}, which is the limit for an address"
            try:
                async with asyncio.timeout(PLACE_TIMEOUT_S):
                    async with AsyncExitStack() as taken:
                        if share is not None:
                            await taken.enter_async_context(share)
                        limit = f"{PEEKS_AT_ONCE} messages are being read by other admin clients, which is the limit"
                        await taken.enter_async_context(self._all)
                        held = taken.pop_all()
            except TimeoutError:
                raise ServiceNotReadyError(f"{limit}; ask again later") from None
            async with held:
                yield

    @asynccontextmanager
    async def _share_of(self, address: str) -> AsyncIterator[asyncio.Semaphore | None]:
        """Return the places of an address; None if they are not limited."""
        if is_loopback(address):
            yield None
            return
        share = self._of_address.setdefault(address, asyncio.Semaphore(PEEKS_PER_ADDRESS))
        self._users[address] += 1
        try:
            yield share
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address], self._of_address[address]


class _Peek(Response):
    """One message as an answer.

    It is read and decompressed once there is a place for it, and keeps the place until its client has read it: this bounds memory,
    whatever clients ask for and however slowly they read. Raises ServiceNotReadyError (503) after waiting too long for a place.
    """

    def __init__(self, places: _Places, topic: Topic, position: Position) -> None:
        super().__init__()
        self._places = places
        self._topic = topic
        self._position = position

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        async with self._places.place(client[0] if client else ""):
            await self._answer(send)

    async def _answer(self, send: Send) -> None:
        body, headers = await _entry(self._topic, self._position)
        try:
            headers += [("Content-Type", "application/octet-stream"), ("Content-Length", str(len(body)))]
            raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            async with asyncio.timeout(READ_TIMEOUT_S):
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": raw_headers})
                for start in range(0, len(body), _PIECE_BYTES):  # each waits until the client has read most of the earlier ones
                    piece = body[start : start + _PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
        except TimeoutError:  # the server closes the connection of an incomplete answer
            log.warning("admin.peek_not_read", extra={"topic": str(self._topic.name), "waited_s": READ_TIMEOUT_S})


async def _entry(topic: Topic, position: Position) -> tuple[bytes, list[tuple[str, str]]]:
    tail = await read_entry(topic.ledger, position)
    if tail is None:
        message = f"Topic {topic.name} has no entry {position.ledger_id}:{position.entry_id}, or no longer"
        raise NotFoundError(message, topic=str(topic.name))
    try:
        return message_answer(position, tail)
    except BadTailError as error:
        raise UnprocessableError(f"Entry {position} of {topic.name} is stored, and cannot be shown: {error}") from None
