"""What a broker says of itself and of its neighbours: one broker, so far; and its settings, read only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.advertised import advertised_url
from cepheid_broker.bundles import boundaries
from cepheid_metadata import list_namespaces, list_tenants

NO_CONTENT = 204


def brokers(context: AdminContext) -> APIRouter:
    """The routes with fixed names come first: `{cluster}` would take them."""
    router = APIRouter(prefix="/admin/v2/brokers")
    release = version("cepheid")

    @router.get("")
    async def list_brokers(request: Request) -> list[str]:
        return [broker_id(context, request)]

    @router.get("/version")
    async def get_version() -> PlainTextResponse:
        """Bare text"""
        return PlainTextResponse(release)

    @router.get("/leaderBroker")
    async def leader(request: Request) -> dict[str, str]:
        return {"brokerId": broker_id(context, request), "serviceUrl": admin_url(context, request)}

    @router.get("/configuration")
    async def dynamic_settings() -> list[str]:
        """Settings that can be changed while the broker runs: none, so `[]`"""
        return []

    @router.get("/configuration/values")
    async def changed_settings() -> dict[str, str]:
        """Those that were: `{}`"""
        return {}

    @router.get("/configuration/runtime")
    async def runtime_settings() -> dict[str, str]:
        """Every setting of this broker with its value, by our names"""
        return {**dict(_flat("", context.broker.settings)), **dict(_flat("admin.", context.settings))}

    @router.post("/configuration/{configName}/{configValue}", status_code=NO_CONTENT)
    async def change_setting(configName: str, configValue: str) -> None:
        """Always 412: settings come from the command line, the environment and the file"""
        raise _not_dynamic(configName)

    @router.delete("/configuration/{configName}", status_code=NO_CONTENT)
    async def reset_setting(configName: str) -> None:
        """Always 412"""
        raise _not_dynamic(configName)

    @router.get("/internal-configuration")
    async def internal_configuration() -> dict[str, str]:
        """Where metadata is kept"""
        store = type(context.store).__name__
        return {"metadataStoreUrl": store, "configurationMetadataStoreUrl": store}

    @router.get("/{cluster}")
    async def brokers_of_cluster(cluster: ClusterPath, request: Request) -> list[str]:
        await context.require_cluster(cluster)
        return [broker_id(context, request)] if cluster == context.cluster else []

    @router.get("/{cluster}/{broker}/ownedNamespaces")
    async def owned(cluster: ClusterPath, broker: str, request: Request) -> dict[str, dict[str, Any]]:
        """Every bundle: there is one broker"""
        await context.require_cluster(cluster)
        if cluster != context.cluster or decode_once(broker) != broker_id(context, request):
            raise NotFoundError(f"Broker {decode_once(broker)[:200]!r} of {cluster} does not exist")
        status = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
        return dict.fromkeys(await _all_bundles(context), status)

    return router


async def _all_bundles(context: AdminContext) -> list[str]:
    names: list[str] = []
    for tenant in await list_tenants(context.store):
        for namespace in await list_namespaces(context.store, tenant):
            found = await context.namespaces.get((tenant, namespace))
            if found is not None:
                ends = boundaries(found.record.bundles)
                names += [f"{tenant}/{namespace}/{start}_{end}" for start, end in pairwise(ends)]
    return names


def _flat(prefix: str, settings: BaseModel) -> Iterator[tuple[str, str]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _not_dynamic(name: str) -> PreconditionError:
    return PreconditionError(f"{decode_once(name)[:200]!r} cannot be changed while the broker runs: no setting can")


def admin_url(context: AdminContext, request: Request) -> str:
    """Of this API, as the client reaches it."""
    host, port = request.scope["server"]
    return advertised_url("http", context.broker.settings, port, host)


def broker_id(context: AdminContext, request: Request) -> str:
    return admin_url(context, request).removeprefix("http://")
