"""Calls on a whole namespace: each bundle's owner handles its bundle (part_calls.py does so for partitions)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.part_calls import AT_ONCE, tolerated
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.ownership import Bundle, NotOwnerError, There, bundles_of, division_of
from cepheid_wire import NamespaceName


async def _bundle(bundle: str) -> str:
    return decode_once(bundle)


BundlePath = Annotated[str, Depends(_bundle)]


async def on_bundles(
    context: AdminContext,
    namespace: NamespaceName,
    local: Callable[[Bundle], Awaitable[None]],
    below: str,
    *,
    method: str = "POST",
    tolerate: Collection[HTTPStatus] = (),
) -> None:
    """Call `local` for bundles of this broker, and `below` on the bundle at its owner for the others. Raises their errors."""
    ownership = context.broker.ownership
    turns = asyncio.Semaphore(AT_ONCE)

    async def do(bundle: Bundle) -> None:
        async with turns:
            location = await ownership.locate_bundle(bundle)
            if isinstance(location, There):
                await context.broker.peers.call(location, method, f"{bundle_path(bundle)}{below}")
            else:
                await local(bundle)

    bundles = bundles_of(namespace, division_of((await context.require_namespace(namespace)).record))
    outcomes = await asyncio.gather(*map(do, bundles), return_exceptions=True)
    tolerated(bundles, outcomes, tolerate)


async def unload_all(context: AdminContext, namespace: NamespaceName) -> None:
    """Unload every bundle that has an owner. Raises as `on_bundles`."""
    ownership = context.broker.ownership
    turns = asyncio.Semaphore(AT_ONCE)

    async def unload(bundle: Bundle) -> None:
        async with turns:
            location = await ownership.owner_of(bundle)
            if isinstance(location, There):
                await context.broker.peers.call(location, "PUT", f"{bundle_path(bundle)}/unload")
            elif location is not None:
                await ownership.release(bundle)

    bundles = bundles_of(namespace, division_of((await context.require_namespace(namespace)).record))
    outcomes = await asyncio.gather(*map(unload, bundles), return_exceptions=True)
    tolerated(bundles, outcomes, ())


def bundle_path(bundle: Bundle) -> str:
    namespace = bundle.namespace
    return f"/admin/v2/namespaces/{quote(namespace.tenant, safe='')}/{quote(namespace.local_name, safe='')}/{bundle.range}"


async def require_bundle(context: AdminContext, namespace: NamespaceName, name: str) -> Bundle:
    """Return the bundle of this name. Raises PreconditionError if the namespace has none."""
    bundles = bundles_of(namespace, division_of((await context.require_namespace(namespace)).record))
    if (found := next((bundle for bundle in bundles if bundle.range == name), None)) is None:
        starts = ", ".join(bundle.range.partition("_")[0] for bundle in bundles)
        raise PreconditionError(f"{name[:200]!r} is not a bundle of {namespace}: they start at {starts}", namespace=str(namespace))
    return found


async def require_owner(context: AdminContext, bundle: Bundle) -> None:
    """Raise NotOwnerError if another broker serves the bundle (app.py)."""
    location = await context.broker.ownership.locate_bundle(bundle)
    if isinstance(location, There):
        raise NotOwnerError(f"bundle {bundle} is served by broker {location.broker_id}", location, bundle=str(bundle))
