"""Properties of a namespace: free text by name, without meaning to the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import NamespacePath
from cepheid_broker.admin.policy_change import change_namespace
from cepheid_broker.admin.raw_path import decode_once
from cepheid_wire import NamespaceName

NO_CONTENT = 204
MAX_PROPERTIES_BYTES = 64 << 10  # the record is read when topics are opened

PropertiesBody = Annotated[dict[str, str], json_body(dict[str, str])]


async def _key(key: str) -> str:
    return decode_once(key)


async def _value(value: str) -> str:
    return decode_once(value)


KeyPath = Annotated[str, Depends(_key)]
ValuePath = Annotated[str, Depends(_value)]


def namespace_properties(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces/{tenant}/{namespace}")

    @router.get("/properties")
    async def get_properties(namespace: NamespacePath) -> dict[str, str]:
        """Return all properties"""
        return (await context.require_namespace(namespace)).record.properties

    @router.put("/properties", status_code=NO_CONTENT)
    async def put_properties(namespace: NamespacePath, properties: PropertiesBody) -> None:
        """Add these properties, replacing others by name; up to 64 KiB in total"""
        await _change(context, namespace, lambda old: {**old, **properties})

    @router.delete("/properties", status_code=NO_CONTENT)
    async def clear_properties(namespace: NamespacePath) -> None:
        """Delete all properties"""
        await _change(context, namespace, lambda _: {})

    @router.put("/property/{key}/{value}", status_code=NO_CONTENT)
    async def put_property(namespace: NamespacePath, key: KeyPath, value: ValuePath) -> None:
        """Set one property"""
        await _change(context, namespace, lambda old: {**old, key: value})

    @router.get("/property/{key}", response_class=Response)
    async def get_property(namespace: NamespacePath, key: KeyPath) -> Response:
        """Return a property's value as plain text, 204 if there is none"""
        return _text((await context.require_namespace(namespace)).record.properties.get(key))

    @router.delete("/property/{key}", response_class=Response)
    async def delete_property(namespace: NamespacePath, key: KeyPath) -> Response:
        """Delete a property; return its value, 204 if there was none"""
        previous: list[str | None] = []

        def without(old: Mapping[str, str]) -> dict[str, str]:
            previous[:] = [old.get(key)]
            return {name: value for name, value in old.items() if name != key}

        await _change(context, namespace, without)
        return _text(previous[0])

    return router


def _text(value: str | None) -> Response:
    return Response(status_code=NO_CONTENT) if value is None else Response(value, media_type="text/plain")


async def _change(context: AdminContext, namespace: NamespaceName, plan: Callable[[Mapping[str, str]], dict[str, str]]) -> None:
    def checked(old: Mapping[str, str]) -> dict[str, str]:
        properties = plan(old)
        size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
        if size_bytes > MAX_PROPERTIES_BYTES:
            raise PreconditionError(
                f"The properties of {namespace} would have {size_bytes} bytes, {MAX_PROPERTIES_BYTES} are possible"
            )
        return properties

    await change_namespace(context, namespace, lambda record: {"properties": checked(record.properties)})
