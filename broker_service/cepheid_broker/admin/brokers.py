"""What a broker says of itself and of its neighbours: one broker, so far."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.advertised import advertised_url
from cepheid_metadata import keys, list_names


def brokers(context: AdminContext) -> APIRouter:
    """The routes with fixed names come first: `{cluster}` would take them."""
    router = APIRouter(prefix="/admin/v2")
    release = version("cepheid")

    @router.get("/brokers")
    async def list_brokers(request: Request) -> list[str]:
        return [broker_id(context, request)]

    @router.get("/brokers/version")
    async def get_version() -> PlainTextResponse:
        return PlainTextResponse(release)

    @router.get("/brokers/leaderBroker")
    async def leader(request: Request) -> dict[str, str]:
        return {"brokerId": broker_id(context, request), "serviceUrl": admin_url(context, request)}

    @router.get("/brokers/{cluster}")
    async def brokers_of_cluster(cluster: ClusterPath, request: Request) -> list[str]:
        await context.require_cluster(cluster)
        return [broker_id(context, request)] if cluster == context.cluster else []

    @router.get("/bookies/all")
    async def list_bookies() -> dict[str, Any]:
        parents = (keys.BOOKIE_COOKIES_KEY, keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY)
        names = sorted({name for parent in parents for name in await list_names(context.store, parent)})
        return {"bookies": [{"bookieId": name} for name in names]}

    return router


def admin_url(context: AdminContext, request: Request) -> str:
    """Of this API, as the client reaches it."""
    host, port = request.scope["server"]
    return advertised_url("http", context.broker.settings, port, host)


def broker_id(context: AdminContext, request: Request) -> str:
    return admin_url(context, request).removeprefix("http://")
