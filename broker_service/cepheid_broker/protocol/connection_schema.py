"""Schema requests of clients: GET_SCHEMA and GET_OR_CREATE_SCHEMA.

Errors are sent in the reply of the same kind: C++ clients ignore a general ERROR here (protocol.md §5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from cepheid_broker.errors import SchemaNotFoundError
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.access import Access
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.schemas import Schema, SchemaType, asked_schema, decode_version, encode_version, wire_schema
from cepheid_wire import CommandType, TopicName
from cepheid_wire import pulsar_api_pb2 as pb

Answer = pb.CommandGetSchemaResponse | pb.CommandGetOrCreateSchemaResponse


class SchemaCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests, access: Access) -> None:
        self._access = access
        self._peer = peer
        self._services = services
        self._requests = requests
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.GET_SCHEMA: self._on_get,
            CommandType.GET_OR_CREATE_SCHEMA: self._on_get_or_create,
        }

    def _on_get(self, ask: pb.CommandGetSchema) -> None:
        answer = pb.CommandGetSchemaResponse(request_id=ask.request_id)
        self._start(partial(self._get, ask, answer), answer, ask.topic, "get-schema")

    async def _get(self, ask: pb.CommandGetSchema, answer: pb.CommandGetSchemaResponse) -> None:
        topic, schemas = self._access.topic_named(CommandType.GET_SCHEMA, ask.topic), self._services.schemas
        await self._access.require(CommandType.GET_SCHEMA, topic)
        # Absent: the latest version. Empty is different: the version of a message without a schema (protocol.md §20).
        if not ask.HasField("schema_version"):
            found = await schemas.latest(topic)
        elif not ask.schema_version and await self._has_no_schema(topic):
            answer.schema.CopyFrom(wire_schema(topic.base.local_name, Schema(SchemaType.NONE, b"", {})))
            answer.schema_version = b""
            return
        else:
            found = await schemas.get(topic, decode_version(ask.schema_version))
        answer.schema.CopyFrom(wire_schema(topic.base.local_name, found.schema))
        answer.schema_version = encode_version(found.version)

    async def _has_no_schema(self, topic: TopicName) -> bool:
        """Return whether the topic has no schema: Go asks for the empty version of its messages (`NewBytesSchema`).

        If it has one, the empty version is refused. Raises SchemaNotFoundError if there is no such topic.
        """
        try:
            await self._services.schemas.latest(topic)
        except SchemaNotFoundError:
            if await self._services.catalog.find(topic) is None:
                raise
            return True
        return False

    def _on_get_or_create(self, ask: pb.CommandGetOrCreateSchema) -> None:
        answer = pb.CommandGetOrCreateSchemaResponse(request_id=ask.request_id)
        self._start(partial(self._get_or_create, ask, answer), answer, ask.topic, "get-or-create-schema")

    async def _get_or_create(self, ask: pb.CommandGetOrCreateSchema, answer: pb.CommandGetOrCreateSchemaResponse) -> None:
        # Sent by a producer of the topic, which is open for that reason; the rules are those of its first schema.
        name = self._access.topic_named(CommandType.GET_OR_CREATE_SCHEMA, ask.topic)
        await self._access.require(CommandType.GET_OR_CREATE_SCHEMA, name)
        topic = await self._services.topics.get(name, may_create=False)
        answer.schema_version = await self._services.schemas.for_producer(topic.name, asked_schema(ask), topic.policies)

    def _start(self, work: Callable[[], Awaitable[None]], answer: Answer, topic: str, name: str) -> None:
        self._requests.start(self._answered(work, answer, topic, name), name=name)

    async def _answered(self, work: Callable[[], Awaitable[None]], answer: Answer, topic: str, name: str) -> None:
        try:
            async with asyncio.timeout(self._services.settings.request_timeout_s):
                await work()
        except Exception as error:  # answer every request, even after an internal error
            code = server_error_of(error)
            if not isinstance(error, SchemaNotFoundError):  # asking whether there is one is not an offence
                topic = topic[:300]
                self._services.refusals.note("schema.refused", (topic, code), topic=topic, code=code.name, error=str(error))
            answer.error_code = cast(Any, int(code))
            answer.error_message = error_text(error)
        self._peer.send(answer)
