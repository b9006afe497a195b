"""Routes of policies, generated from the table: read, set and remove one policy of a namespace or a topic.

GET answers the value set at that level, or 204 without body if there is none (clients read it as "not set"); with `applied=true`
the value in force there. Set and remove answer 204.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.policy_level import NEVER, Level, namespace_level, refuse_global, topic_level
from cepheid_broker.admin.policy_table import IN_FORCE, POLICIES, PathOf, PolicyKind
from cepheid_broker.admin.policy_values import INT_MAX

NO_CONTENT = 204


def namespace_policies(context: AdminContext) -> APIRouter:
    return _routes(context, "/admin/v2/namespaces/{tenant}/{namespace}", namespace_level(context))


def topic_policies(context: AdminContext) -> APIRouter:
    return _routes(context, "/admin/v2/persistent/{tenant}/{namespace}/{topic}", topic_level(context))


def _routes(context: AdminContext, prefix: str, level: Level) -> APIRouter:
    router = APIRouter(prefix=prefix)
    for kind in POLICIES:
        if (path := level.path_of(kind)) is not None:
            _add_read(router, level, kind, path)
            if path.in_query is None:
                _add_write(router, context, level, kind, path)
            else:
                _add_write_by_query(router, level, kind, path, path.in_query)
            if path.deletable:
                _add_remove(router, level, kind, path)
    return router


def _add_read(router: APIRouter, level: Level, kind: PolicyKind, path: PathOf) -> None:
    noun_of = level.noun_for(path)
    applied_of: Any = Query(False) if kind.has_in_force else NEVER

    async def read(noun: Any = noun_of, is_global: bool = level.is_global, applied: bool = applied_of) -> Response:
        value = None if is_global else getattr(await level.record(noun), kind.field)
        if value is not None and not (applied and kind.by_field):
            return JSONResponse(kind.encode(value))
        if path.unset is IN_FORCE or (applied and not is_global):
            return JSONResponse(kind.applied(await level.in_force(noun)))
        return Response(status_code=NO_CONTENT) if path.unset is None else JSONResponse(path.unset)

    router.add_api_route(
        f"/{path.word}",
        read,
        methods=["GET"],
        name=f"get_{level.what}_{path.word}",
        summary=f"Read of a {level.what}",
        description=kind.title[0].upper() + kind.title[1:],
        response_class=JSONResponse,
        responses={NO_CONTENT: {"description": "not set"}} if path.unset is None else None,
    )


def _add_write(router: APIRouter, context: AdminContext, level: Level, kind: PolicyKind, path: PathOf) -> None:
    shape = kind.body | None if kind.null_clears else kind.body
    noun_of, body_of = level.noun_for(path), json_body(shape)

    async def write(noun: Any = noun_of, is_global: bool = level.is_global, body: Any = body_of) -> None:
        refuse_global(is_global)
        value = None if body is None else kind.decode(body)
        if value is not None:
            await kind.check(context, value)
        await level.change(noun, {kind.field: value})

    content = {"application/json": {"schema": TypeAdapter(shape).json_schema()}}
    router.add_api_route(
        f"/{path.word}",
        write,
        methods=[path.set_by],
        status_code=NO_CONTENT,
        name=f"set_{level.what}_{path.word}",
        summary=f"Set for a {level.what}",
        openapi_extra={"requestBody": {"content": content}},
    )


def _add_write_by_query(router: APIRouter, level: Level, kind: PolicyKind, path: PathOf, name: str) -> None:
    noun_of, value_of = level.noun_for(path), Query(alias=name, ge=-INT_MAX, le=INT_MAX)

    async def write(noun: Any = noun_of, is_global: bool = level.is_global, value: int = value_of) -> None:
        refuse_global(is_global)
        await level.change(noun, {kind.field: kind.decode(value)})

    router.add_api_route(
        f"/{path.word}",
        write,
        methods=[path.set_by],
        status_code=NO_CONTENT,
        name=f"set_{level.what}_{path.word}",
        summary=f"Set for a {level.what}",
    )


def _add_remove(router: APIRouter, level: Level, kind: PolicyKind, path: PathOf) -> None:
    noun_of = level.noun_for(path)

    async def remove(noun: Any = noun_of, is_global: bool = level.is_global) -> None:
        refuse_global(is_global)
        await level.change(noun, {kind.field: None})

    router.add_api_route(
        f"/{path.removed_at or path.word}",
        remove,
        methods=["DELETE"],
        status_code=NO_CONTENT,
        name=f"remove_{level.what}_{path.word}",
        summary=f"Remove from a {level.what}",
    )
