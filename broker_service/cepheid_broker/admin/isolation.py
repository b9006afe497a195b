"""Namespace isolation policies: which brokers serve which namespaces (docs/reference/shapes.md §1, NamespaceIsolationData)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from cepheid_broker.admin.brokers import brokers_of
from cepheid_broker.admin.bundle_calls import bundle_path
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, ConflictError, NotFoundError, PreconditionError, http_status_of
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.part_calls import AT_ONCE, tolerated
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.admin.policy_change import TRIES
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.errors import BrokerError, NotAllowedError
from cepheid_broker.ownership import (
    Bundle,
    IsolationRules,
    There,
    bundles_of,
    compile_policy,
    division_of,
    names_of,
    preference,
)
from cepheid_metadata import (
    BadVersionError,
    IsolationPolicies,
    IsolationPolicy,
    KeyExistsError,
    NoSuchKeyError,
    isolation_policies,
    list_namespaces,
    list_tenants,
)
from cepheid_wire import NamespaceName

NO_CONTENT = 204
MAX_POLICIES = 100
_UNLOAD_TRIES, _UNLOAD_RETRY_S = 50, 0.1
"""Brokers learn of a new policy within a moment. Until then they refuse the destinations that it allows."""

Policies = dict[str, IsolationPolicy]


class FailoverPolicy(BaseModel):
    """When secondary brokers are used. The values of its parameters are strings."""

    model_config = ConfigDict(extra="forbid")

    policy_type: Literal["min_available"] = "min_available"
    parameters: dict[Literal["min_limit", "usage_threshold"], str] = Field(default_factory=dict)


class IsolationBody(BaseModel):
    """`NamespaceIsolationData`."""

    model_config = ConfigDict(extra="forbid")

    namespaces: list[str]
    primary: list[str]
    secondary: list[str] = Field(default_factory=list)
    auto_failover_policy: FailoverPolicy = Field(default_factory=FailoverPolicy)
    unload_scope: Literal["all_matching", "changed", "none"] | None = None
    """Which namespaces are unloaded at once; used only in this call, and not stored."""


def isolation(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/clusters/{cluster}/namespaceIsolationPolicies")

    @router.get("")
    async def all_policies(cluster: ClusterPath) -> dict[str, Any]:
        """Return policies by name; 404 if there are none"""
        found = await _policies(context, cluster)
        if not found:
            raise NotFoundError(f"Cluster {cluster} has no isolation policies")
        return {name: _data(policy) for name, policy in sorted(found.items())}

    @router.get("/brokers")
    async def brokers_with_policies(cluster: ClusterPath, request: Request) -> list[dict[str, Any]]:
        """Return each running broker with the policies in which it is primary"""
        rules = IsolationRules(IsolationPolicies(policies=await _policies(context, cluster)))
        return [_broker_data(context, rules, name) for name in brokers_of(context, request)]

    @router.get("/brokers/{broker}")
    async def policies_of_broker(cluster: ClusterPath, broker: str, request: Request) -> dict[str, Any]:
        """Return one broker, named by the address of its API, with the policies in which it is primary"""
        rules = IsolationRules(IsolationPolicies(policies=await _policies(context, cluster)))
        name = decode_once(broker)
        if name not in brokers_of(context, request):
            raise NotFoundError(f"Broker {name[:200]!r} of {cluster} does not exist")
        return _broker_data(context, rules, name)

    @router.get("/{policyName}")
    async def get_policy(cluster: ClusterPath, policyName: str) -> dict[str, Any]:
        name = decode_once(policyName)
        found = (await _policies(context, cluster)).get(name)
        if found is None:
            raise NotFoundError(f"Cluster {cluster} has no isolation policy {name[:200]!r}")
        return _data(found)

    @router.post("/{policyName}", status_code=NO_CONTENT)
    async def set_policy(cluster: ClusterPath, policyName: str, body: Annotated[IsolationBody, json_body(IsolationBody)]) -> None:
        """Create or replace a policy. `unload_scope`: `all_matching` unloads all bundles of matching namespaces before it
        answers, `changed` those of matching namespaces whose brokers it changes. With `none` or without it, misplaced bundles
        move within some rounds of load balancing"""
        await _require_own(context, cluster)
        name, policy = decode_once(policyName), _policy(body)
        try:
            compile_policy(name, policy)
        except NotAllowedError as error:
            raise BadRequestError(str(error)) from None
        before, after = await _change(context, lambda policies: {**policies, name: policy})
        if body.unload_scope in ("all_matching", "changed"):
            await _unload(context, name, before, after, only_changed=body.unload_scope == "changed")

    @router.delete("/{policyName}", status_code=NO_CONTENT)
    async def delete_policy(cluster: ClusterPath, policyName: str) -> None:
        """Delete a policy; succeeds if there is none, as in Pulsar"""
        await _require_own(context, cluster)
        name = decode_once(policyName)
        await _change(context, lambda policies: {each: policy for each, policy in policies.items() if each != name})

    return router


async def _require_own(context: AdminContext, cluster: str) -> None:
    """Raise PreconditionError for another cluster, as Pulsar does here; brokers know only their own."""
    if cluster != context.cluster:
        raise PreconditionError(f"Cluster {cluster} is not the cluster of this broker, {context.cluster}")


async def _policies(context: AdminContext, cluster: str) -> Policies:
    await _require_own(context, cluster)
    found = await isolation_policies(context.store).get(None)
    return {} if found is None else dict(found.record.policies)


async def _change(context: AdminContext, change: Callable[[Policies], Policies]) -> tuple[Policies, Policies]:
    """Change policies; return those before and after. Raises ConflictError, BadRequestError."""
    records = isolation_policies(context.store)
    for _ in range(TRIES):
        found = await records.get(None)
        before = {} if found is None else dict(found.record.policies)
        policies = change(before)
        if len(policies) > MAX_POLICIES:
            raise BadRequestError(f"{len(policies)} isolation policies: {MAX_POLICIES} are possible")
        try:
            if found is None:
                await records.create(None, IsolationPolicies(policies=policies))
            else:
                await records.replace(None, IsolationPolicies(policies=policies), found.version)
            return before, policies
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            continue
    raise ConflictError("Isolation policies are being changed by many callers at the same time: try again")


async def _unload(context: AdminContext, name: str, before: Policies, after: Policies, *, only_changed: bool) -> None:
    """Unload the namespaces that the policy matches, or matched. Raises their errors; the policy stays set in any case."""
    brokers = context.broker.ownership.brokers
    rules_before, rules = (IsolationRules(IsolationPolicies(policies=policies)) for policies in (before, after))
    matching = [
        IsolationRules(IsolationPolicies(policies={name: policies[name]}))
        for policies in ((before, after) if only_changed else (after,))
        if name in policies
    ]
    bundles: list[Bundle] = []
    for tenant in await list_tenants(context.store):
        for local_name in await list_namespaces(context.store, tenant):
            namespace = f"{tenant}/{local_name}"
            if all(each.policy_of(namespace) is None for each in matching):
                continue
            if only_changed and rules_before.allowed(namespace, brokers, {}) == rules.allowed(namespace, brokers, {}):
                continue
            if (found := await context.namespaces.get((tenant, local_name))) is not None:
                bundles += bundles_of(NamespaceName(tenant, local_name), division_of(found.record))
    turns = asyncio.Semaphore(AT_ONCE)

    async def unload(bundle: Bundle) -> None:
        async with turns:
            await _unload_bundle(context, bundle, rules)

    tolerated(bundles, await asyncio.gather(*map(unload, bundles), return_exceptions=True), ())


async def _unload_bundle(context: AdminContext, bundle: Bundle, rules: IsolationRules) -> None:
    """Have its owner, if there is one, unload it to a broker that the rules allow: the owner may not know them yet."""
    ownership = context.broker.ownership
    for tries_left in reversed(range(_UNLOAD_TRIES)):
        owner = await ownership.owner_of(bundle)
        if owner is None:
            return
        allowed = rules.allowed(str(bundle.namespace), ownership.brokers, {})
        to = next(iter(preference(bundle, (name for name in allowed if name not in ownership.leaving))), "")
        try:
            if isinstance(owner, There):
                query = f"?destinationBroker={quote(to, safe='')}" if to else ""
                await context.broker.peers.call(owner, "PUT", f"{bundle_path(bundle)}/unload{query}")
            else:
                await ownership.release(bundle, to=to)
            return
        except BrokerError as error:
            if not tries_left or http_status_of(error) != HTTPStatus.PRECONDITION_FAILED:
                raise
            await asyncio.sleep(_UNLOAD_RETRY_S)


def _policy(body: IsolationBody) -> IsolationPolicy:
    """Return the policy of a body. Raises BadRequestError."""
    if not body.namespaces or not body.primary:
        raise BadRequestError("an isolation policy needs at least one expression in namespaces, and one in primary")
    given = body.auto_failover_policy.parameters
    try:
        min_limit, threshold = int(given.get("min_limit", "1")), int(given.get("usage_threshold", "100"))
        if min_limit < 0 or not 0 <= threshold <= 100:
            raise ValueError
    except ValueError:
        raise BadRequestError("min_limit must be a number from 0, usage_threshold a number of percent, both as strings") from None
    return IsolationPolicy(
        namespaces=tuple(body.namespaces),
        primary=tuple(body.primary),
        secondary=tuple(body.secondary),
        min_limit=min_limit,
        usage_threshold=threshold,
    )


def _data(policy: IsolationPolicy) -> dict[str, Any]:
    return {
        "namespaces": list(policy.namespaces),
        "primary": list(policy.primary),
        "secondary": list(policy.secondary),
        "auto_failover_policy": {
            "policy_type": "min_available",
            "parameters": {"min_limit": str(policy.min_limit), "usage_threshold": str(policy.usage_threshold)},
        },
    }


def _broker_data(context: AdminContext, rules: IsolationRules, name: str) -> dict[str, Any]:
    """Describe the broker with the API address `name`. The API's description says `primary`, Go's client reads `isPrimary`."""
    registered = context.broker.ownership.brokers
    ids = [broker_id for broker_id, addresses in registered.items() if name in addresses.values()]
    matching = rules.policies_with_primary(names_of(ids[0] if ids else name, {"http": name}))
    return {
        "brokerName": name,
        "policyName": matching[-1].name if matching else None,
        "namespaceRegex": [text for policy in matching for text in policy.policy.namespaces],
        "primary": bool(matching),
        "isPrimary": bool(matching),
    }
