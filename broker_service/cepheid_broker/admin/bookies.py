"""Storage nodes, as metadata knows them. Racks are not looked at by placement yet, so there are none."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError
from cepheid_broker.admin.raw_path import decode_once
from cepheid_metadata import keys, list_names


def bookies(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/bookies")

    @router.get("/all")
    async def list_bookies() -> dict[str, Any]:
        """Registered ones, and those that are down"""
        parents = (keys.BOOKIE_COOKIES_KEY, keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY)
        names = sorted({name for parent in parents for name in await list_names(context.store, parent)})
        return {"bookies": [{"bookieId": name} for name in names]}

    @router.get("/racks-info")
    async def list_racks() -> dict[str, Any]:
        """`{}`: no bookie was given a rack"""
        return {}

    @router.get("/racks-info/{bookie}")
    async def rack_of(bookie: str) -> dict[str, Any]:
        """Always 404"""
        raise NotFoundError(f"Bookie {decode_once(bookie)[:200]!r} was not given a rack")

    return router
