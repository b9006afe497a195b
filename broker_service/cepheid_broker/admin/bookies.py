"""Bookies from metadata. A bookie's rack is its own setting, so it is shown here but cannot be set."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError
from cepheid_broker.admin.raw_path import decode_once
from cepheid_metadata import available_bookies, keys, list_names, list_records, readonly_bookies
from cepheid_ports import host_of

_GROUP = "default"  # Pulsar's name for bookies without a group


def bookies(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/bookies")

    @router.get("/all")
    async def list_bookies() -> dict[str, Any]:
        """Return registered bookies, and those that are down"""
        parents = (keys.BOOKIE_COOKIES_KEY, keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY)
        names = sorted({name for parent in parents for name in await list_names(context.store, parent)})
        return {"bookies": [{"bookieId": name} for name in names]}

    @router.get("/racks-info")
    async def list_racks() -> dict[str, Any]:
        """Return running bookies that have a rack, in the one group `default`; `hostname` is that of their gRPC address"""
        racks = await _racks(context)
        return {_GROUP: racks} if racks else {}

    @router.get("/racks-info/{bookie}")
    async def rack_of(bookie: str) -> dict[str, Any]:
        """Return a bookie's rack; 404 also for a bookie that does not run now"""
        racks, name = await _racks(context), decode_once(bookie)
        if name not in racks:
            raise NotFoundError(f"Bookie {name[:200]!r} is not registered with a rack; start it with --rack region/rack")
        return racks[name]

    return router


_ADDRESSES = ("grpc", "grpc+tls", "http", "https")
"""Kinds of a bookie's address whose host is shown: the first that it has."""


async def _racks(context: AdminContext) -> dict[str, dict[str, str]]:
    """Return the racks and hosts of running bookies by id, from their registrations."""
    racks: dict[str, dict[str, str]] = {}
    for parent_key, records in (
        (keys.READONLY_BOOKIES_KEY, readonly_bookies(context.store)),
        (keys.AVAILABLE_BOOKIES_KEY, available_bookies(context.store)),
    ):
        found, _ = await list_records(context.store, parent_key, records)
        for name, record in found.items():
            if record.rack is not None:
                address = next((record.addresses[kind] for kind in _ADDRESSES if kind in record.addresses), name)
                racks[name] = {"rack": record.rack, "hostname": host_of(address)}
    return dict(sorted(racks.items()))
