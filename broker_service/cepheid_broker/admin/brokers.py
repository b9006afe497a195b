"""What a broker says of itself and of its neighbours; and its settings, read only.

The API names a broker by the address of its admin API, which is what tools go on to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.ownership import There, boundaries
from cepheid_broker.protocol import advertised_url
from cepheid_metadata import list_namespaces, list_tenants

NO_CONTENT = 204


def brokers(context: AdminContext) -> APIRouter:
    """The routes with fixed names come first: `{cluster}` would take them."""
    router = APIRouter(prefix="/admin/v2/brokers")
    release = version("cepheid")

    @router.get("")
    async def list_brokers(request: Request) -> list[str]:
        return brokers_of(context, request)

    @router.get("/version")
    async def get_version() -> PlainTextResponse:
        """Bare text"""
        return PlainTextResponse(release)

    @router.get("/leaderBroker")
    async def leader(request: Request) -> dict[str, str]:
        """One that all brokers name alike; it has no other duty"""
        first = brokers_of(context, request)[0]
        return {"brokerId": first, "serviceUrl": _url_of_broker(context, request, first)}

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
        return dict(_flat("", context.broker.settings))

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

    @router.get("/backlog-quota-check", status_code=NO_CONTENT)
    async def check_backlogs() -> None:
        """Looks at the backlogs of all open topics now; this happens every `backlog_check_s` anyway"""
        await context.broker.backlog_checks.check_all()

    @router.get("/{cluster}")
    async def brokers_of_cluster(cluster: ClusterPath, request: Request) -> list[str]:
        await context.require_cluster(cluster)
        return brokers_of(context, request) if cluster == context.cluster else []

    @router.get("/{cluster}/{broker}/ownedNamespaces", response_model=dict[str, dict[str, Any]])
    async def owned(cluster: ClusterPath, broker: str, request: Request) -> Any:
        """Bundles that it serves now; of another broker: 307 to it"""
        await context.require_cluster(cluster)
        name = decode_once(broker)
        if cluster != context.cluster or name not in brokers_of(context, request):
            raise NotFoundError(f"Broker {name[:200]!r} of {cluster} does not exist")
        if name != broker_id(context, request):
            target = f"{_url_of_broker(context, request, name)}{request.scope['path']}"
            return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": target})
        status = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
        owned = context.broker.ownership.owned_bundles()
        return dict.fromkeys(await _all_bundles(context) if owned is None else map(str, owned), status)

    return router


def brokers_of(context: AdminContext, request: Request) -> list[str]:
    """Sorted by their ids, the first is the leader."""
    registered = [name for addresses in context.broker.ownership.brokers.values() if (name := _name_of(addresses)) is not None]
    return registered or [broker_id(context, request)]


def _name_of(addresses: Mapping[str, str]) -> str | None:
    """Return the address that names a broker in the API: without TLS if that port is open. None: it has no admin API."""
    return addresses.get("http") or addresses.get("https")


def _url_of_broker(context: AdminContext, request: Request, name: str) -> str:
    """Return where a caller reaches the broker with this name: over TLS if it uses TLS here, and the broker has it."""
    over_tls = request.scope["scheme"] == "https"
    for broker, addresses in context.broker.ownership.brokers.items():
        url = There(broker, addresses).admin_url(over_tls=over_tls)
        if url is not None and _name_of(addresses) == name:
            return url
    return admin_url(context, request)  # brokers are not registered, as in standalone


def id_of_broker(context: AdminContext, request: Request, name: str) -> str:
    """Return the id under which a broker is registered, for its id or the address of its API. Raises PreconditionError."""
    ownership = context.broker.ownership
    own = broker_id(context, request)
    if name == own:  # also where brokers are not registered, as in standalone
        return ownership.broker_id
    brokers = ownership.brokers
    found = name if name in brokers else next((key for key, known in brokers.items() if _name_of(known) == name), None)
    if found is None:
        raise PreconditionError(f"Broker {name[:200]!r} does not run: choose one of {', '.join(brokers) or own}")
    return found


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
            yield f"{prefix}{name}", _shown(value if isinstance(value, str) else json.dumps(value, default=str))


def _shown(text: str) -> str:
    """Without what may be a secret: a `data:` URL holds the key itself."""
    return re.sub(r"data:[^\"]*", "data:…", text)


def _not_dynamic(name: str) -> PreconditionError:
    return PreconditionError(f"{decode_once(name)[:200]!r} cannot be changed while the broker runs: no setting can")


def admin_urls(context: AdminContext, request: Request) -> dict[str, str]:
    """Return the addresses of this API by scheme, as registered, or the one by which the client reaches it."""
    ownership = context.broker.ownership
    registered = ownership.brokers.get(ownership.broker_id, {})
    if found := {scheme: f"{scheme}://{registered[scheme]}" for scheme in ("http", "https") if scheme in registered}:
        return found
    scheme = request.scope["scheme"]
    host, port = request.scope["server"]
    return {scheme: advertised_url(scheme, context.broker.settings, port, host)}


def admin_url(context: AdminContext, request: Request) -> str:
    """Return the address of this API for a caller: with TLS if it uses TLS."""
    urls = admin_urls(context, request)
    return urls.get(request.scope["scheme"]) or next(iter(urls.values()))


def broker_id(context: AdminContext, request: Request) -> str:
    """Return the name of this broker in the API."""
    urls = admin_urls(context, request)
    return (urls.get("http") or urls["https"]).partition("://")[2]
