"""Schemas of topics, plain or partitioned; a topic that does not exist yet can also be given a schema."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import SchemaPath
from cepheid_broker.errors import IncompatibleSchemaError, InvalidSchemaError, SchemaNotFoundError
from cepheid_broker.schemas import (
    MAX_SCHEMA_BYTES,
    RegisteredSchema,
    Schema,
    SchemaType,
    encode_version,
    key_value_data,
    key_value_json,
)
from cepheid_wire import TopicName

ACCEPTED = 202
_MAX_BODY_BYTES = 4 * MAX_SCHEMA_BYTES  # JSON inside a JSON string: quotes and line ends take two bytes, other characters up to six


class PostSchemaPayload(BaseModel):
    """A schema in a request. `schema_` is the definition as text (docs/reference/shapes.md §5)."""

    type: str
    schema_: str | None = Field("", alias="schema")
    properties: dict[str, str] | None = None

    def schema_value(self) -> Schema:
        """Return the schema. Raises InvalidSchemaError."""
        kind = SchemaType.__members__.get(self.type)
        if kind is None:
            raise InvalidSchemaError(f"{self.type[:100]!r} is not a type of a schema: {', '.join(SchemaType.__members__)}")
        data = (self.schema_ or "").encode(errors="replace")
        if kind is SchemaType.KEY_VALUE:
            data = key_value_data(data)
        return Schema(kind, data, self.properties or {})


SchemaBody = Annotated[PostSchemaPayload, json_body(PostSchemaPayload, max_bytes=_MAX_BODY_BYTES)]


def schemas(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/schemas/{tenant}/{namespace}/{topic}")

    @router.get("/schema")
    async def latest_schema(topic: SchemaPath) -> dict[str, Any]:
        return _shown(await context.broker.schemas.latest(topic))

    @router.get("/schema/{version}")
    async def schema_of_version(topic: SchemaPath, version: int) -> dict[str, Any]:
        return _shown(await context.broker.schemas.get(topic, version))

    @router.get("/schemas")
    async def all_versions(topic: SchemaPath) -> dict[str, Any]:
        found = [_shown(schema) async for schema in context.broker.schemas.versions(topic)]
        if not found:
            raise SchemaNotFoundError(f"topic {topic} has no schema", topic=str(topic))
        return {"getSchemaResponses": found}

    @router.post("/schema")
    async def upload_schema(topic: SchemaPath, payload: SchemaBody) -> dict[str, str]:
        policies = await context.broker.catalog.policies(topic)
        # An administrator's schema is added even where clients must not add any (policy isAllowAutoUpdateSchema).
        version = await context.broker.schemas.register(topic, payload.schema_value(), policies.schema_compatibility)
        return {"version": base64.b64encode(encode_version(version)).decode()}

    @router.delete("/schema")
    async def delete_schema(topic: SchemaPath, force: bool = False) -> dict[str, int]:
        return {"version": await context.broker.schemas.delete(topic, force=force)}

    @router.post("/compatibility", status_code=ACCEPTED)
    async def check_compatibility(topic: SchemaPath, payload: SchemaBody) -> dict[str, Any]:
        return await _compatibility(context, topic, payload.schema_value())

    @router.post("/version")
    async def version_of_schema(topic: SchemaPath, payload: SchemaBody) -> dict[str, int]:
        return {"version": await context.broker.schemas.version_of(topic, payload.schema_value())}

    return router


async def _compatibility(context: AdminContext, topic: TopicName, schema: Schema) -> dict[str, Any]:
    policies = await context.broker.catalog.policies(topic)
    answer: dict[str, Any] = {"compatibility": True, "schemaCompatibilityStrategy": policies.schema_compatibility.value}
    try:
        await context.broker.schemas.check(topic, schema, policies.schema_compatibility)
    except IncompatibleSchemaError as error:
        answer |= {"compatibility": False, "reason": str(error)}  # beyond Pulsar's format: its clients ignore unknown fields
    return answer


def _shown(found: RegisteredSchema) -> dict[str, Any]:
    schema = found.schema
    is_pair = schema.type is SchemaType.KEY_VALUE
    return {
        "version": found.version,
        "type": schema.type.value,
        "timestamp": found.created_at_ms,
        "data": key_value_json(schema) if is_pair else schema.data.decode(errors="replace"),
        "properties": dict(schema.properties),  # C++ clients fail if it is missing (protocol.md §8)
    }
