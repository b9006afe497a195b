"""The description of the API for machines, with what the framework cannot know.

Bodies are read by dependencies of ours, and all refusals have the same format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from cepheid_broker.admin.json_body import adapter_of

_COMPONENTS = "#/components/schemas/"
_REFUSED = {
    "description": "Refused: the status says why, the reason says it in words",
    "content": {
        "application/json": {"schema": {"type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"]}}
    },
}


def routes_of(router: APIRouter) -> Iterator[APIRoute]:
    for route in router.routes:
        if isinstance(route, APIRoute):
            yield route
        else:  # newer FastAPI keeps an included router whole
            yield from routes_of(route.original_router)  # type: ignore[attr-defined]


def complete(description: dict[str, Any], routers: Iterable[APIRouter]) -> dict[str, Any]:
    """Add request bodies and refusals to the description."""
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for route in chain.from_iterable(map(routes_of, routers)):
        for method in route.methods or ():
            operation = description["paths"][route.path][method.lower()]
            operation["responses"].pop("422", None)  # the framework's own refusal is 400 here
            operation["responses"]["default"] = _REFUSED
            for schema in _bodies(route.dependant, schemas):
                operation["requestBody"] = {"required": False, "content": {"application/json": {"schema": schema}}}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return description


def _bodies(dependant: Dependant, schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for inner in dependant.dependencies:
        if (adapter := adapter_of(inner.call)) is not None:
            schema = adapter.json_schema(ref_template=_COMPONENTS + "{model}")
            schemas.update(schema.pop("$defs", {}))
            yield schema
        yield from _bodies(inner, schemas)
