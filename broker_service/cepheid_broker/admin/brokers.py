"""Brokers in the API: what a broker knows of itself and of others, and its settings.

The API names a broker by the address of its admin API, which tools then call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ValidationError

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotFoundError, PreconditionError
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.admin.policy_change import TRIES
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.balancing import PREFIX
from cepheid_broker.ownership import IsolationRules, There, boundaries, division_of, names_of
from cepheid_broker.protocol import advertised_url
from cepheid_broker.settings import BalanceSettings
from cepheid_metadata import (
    BadVersionError,
    DynamicSettings,
    KeyExistsError,
    NoSuchKeyError,
    dynamic_settings,
    isolation_policies,
    leader_record,
    list_namespaces,
    list_tenants,
)

NO_CONTENT = 204


def brokers(context: AdminContext) -> APIRouter:
    """Return the routes; those with fixed names come first, as `{cluster}` would take them."""
    router = APIRouter(prefix="/admin/v2/brokers")
    release = version("cepheid")

    @router.get("")
    async def list_brokers(request: Request) -> list[str]:
        return brokers_of(context, request)

    @router.get("/version")
    async def get_version() -> PlainTextResponse:
        """Return the version as plain text"""
        return PlainTextResponse(release)

    @router.get("/leaderBroker")
    async def leader(request: Request) -> dict[str, str]:
        """Return the broker that balances the load; while none is elected, the first by id"""
        name = await _leader_of(context) or brokers_of(context, request)[0]
        return {"brokerId": name, "serviceUrl": _url_of_broker(context, request, name)}

    @router.get("/configuration")
    async def changeable_settings() -> list[str]:
        """Return the settings that can be changed while brokers run: those of load balancing; in `cepheid standalone` none"""
        return _dynamic(context)

    @router.get("/configuration/values")
    async def changed_settings() -> dict[str, str]:
        """Return the changed settings with their values, which apply to all brokers"""
        found = await dynamic_settings(context.store).get(None)
        return {} if found is None else dict(found.record.values)

    @router.get("/configuration/runtime")
    async def runtime_settings() -> dict[str, str]:
        """Return every setting of this broker with its value, by Cepheid's names"""
        found = await dynamic_settings(context.store).get(None)
        return {**dict(_flat("", context.broker.settings)), **({} if found is None else found.record.values)}

    @router.post("/configuration/{configName}/{configValue}", status_code=NO_CONTENT)
    async def change_setting(configName: str, configValue: str) -> None:
        """Change a setting for all brokers, until it is reset. 412 if it needs a restart, or for a bad value"""
        name, value = decode_once(configName), decode_once(configValue)
        if name not in _dynamic(context):
            raise _not_dynamic(context, name)
        try:
            BalanceSettings.model_validate({name.removeprefix(PREFIX): value})
        except ValidationError as error:
            raise PreconditionError(f"{name} cannot be {value[:200]!r}: {error.errors()[0]['msg']}") from None
        await _change_dynamic(context, lambda values: {**values, name: value})

    @router.delete("/configuration/{configName}", status_code=NO_CONTENT)
    async def reset_setting(configName: str) -> None:
        """Reset a setting to the value that each broker was started with"""
        name = decode_once(configName)
        if name not in _dynamic(context):
            raise _not_dynamic(context, name)
        await _change_dynamic(context, lambda values: {each: value for each, value in values.items() if each != name})

    @router.get("/internal-configuration")
    async def internal_configuration() -> dict[str, str]:
        """Return where metadata is kept"""
        store = type(context.store).__name__
        return {"metadataStoreUrl": store, "configurationMetadataStoreUrl": store}

    @router.get("/backlog-quota-check", status_code=NO_CONTENT)
    async def check_backlogs() -> None:
        """Check the backlogs of all open topics now; this also happens every `backlog_check_s`"""
        await context.broker.backlog_checks.check_all()

    @router.get("/{cluster}")
    async def brokers_of_cluster(cluster: ClusterPath, request: Request) -> list[str]:
        await context.require_cluster(cluster)
        return brokers_of(context, request) if cluster == context.cluster else []

    @router.get("/{cluster}/{broker}/ownedNamespaces", response_model=dict[str, dict[str, Any]])
    async def owned(cluster: ClusterPath, broker: str, request: Request) -> Any:
        """Return the bundles that a broker serves now; another broker is reached by a 307 redirect"""
        await context.require_cluster(cluster)
        name = decode_once(broker)
        if cluster != context.cluster or name not in brokers_of(context, request):
            raise NotFoundError(f"Broker {name[:200]!r} of {cluster} does not exist")
        if name != broker_id(context, request):
            target = f"{_url_of_broker(context, request, name)}{request.scope['path']}"
            return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers={"Location": target})
        owned = context.broker.ownership.owned_bundles()
        found = await isolation_policies(context.store).get(None)
        rules = IsolationRules(None if found is None else found.record)
        names = names_of(context.broker.ownership.broker_id, {"http": name})
        return {
            bundle: _assignment(rules, bundle, names)
            for bundle in (await _all_bundles(context) if owned is None else map(str, owned))
        }

    return router


async def _leader_of(context: AdminContext) -> str | None:
    """Return the name of the elected leader; None if there is none, or it has no admin API."""
    found = await leader_record(context.store).get(None)
    addresses = {} if found is None else context.broker.ownership.brokers.get(found.record.broker_id, {})
    return _name_of(addresses)


def _assignment(rules: IsolationRules, bundle: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return Pulsar's `NamespaceOwnershipStatus` of a bundle at the broker with these names."""
    policy = rules.policy_of(bundle.rpartition("/")[0])
    kind = "shared"
    if policy is not None:
        kind = "primary" if policy in rules.policies_with_primary(names) else "secondary"
    return {"broker_assignment": kind, "is_controlled": policy is not None, "is_active": True}


async def _change_dynamic(context: AdminContext, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Change dynamic settings. Raises ConflictError after too many concurrent changes."""
    records = dynamic_settings(context.store)
    for _ in range(TRIES):
        found = await records.get(None)
        try:
            if found is None:
                await records.create(None, DynamicSettings(values=change({})))
            else:
                await records.replace(None, found.record.replace(values=change(found.record.values)), found.version)
            return
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            continue
    raise ConflictError("Settings are being changed by many callers at the same time: try again")


def brokers_of(context: AdminContext, request: Request) -> list[str]:
    """Return the names of all brokers, sorted by their ids."""
    registered = [name for addresses in context.broker.ownership.brokers.values() if (name := _name_of(addresses)) is not None]
    return registered or [broker_id(context, request)]


def _name_of(addresses: Mapping[str, str]) -> str | None:
    """Return the address that names a broker in the API, without TLS if that port is open; None if it has no admin API."""
    return addresses.get("http") or addresses.get("https")


def _url_of_broker(context: AdminContext, request: Request, name: str) -> str:
    """Return where a caller reaches the broker with this name: with TLS if it uses TLS here, and the broker has it."""
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
                ends = boundaries(division_of(found.record))
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
    """Return the text without what may be a secret: a `data:` URL contains the key itself."""
    return re.sub(r"data:[^\"]*", "data:…", text)


def _dynamic(context: AdminContext) -> list[str]:
    return [f"{PREFIX}{name}" for name in sorted(BalanceSettings.model_fields)] if context.broker.ownership.is_shared else []


def _not_dynamic(context: AdminContext, name: str) -> PreconditionError:
    can = ", ".join(_dynamic(context)) or "none"
    return PreconditionError(f"{name[:200]!r} cannot be changed while the broker runs; settings that can: {can}")


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
