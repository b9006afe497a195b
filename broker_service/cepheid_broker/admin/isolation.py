"""Namespace isolation policies: which brokers serve which namespaces (docs/reference/shapes.md §1, NamespaceIsolationData)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from cepheid_broker.admin.brokers import brokers_of
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, ConflictError, NotFoundError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import ClusterPath
from cepheid_broker.admin.policy_change import TRIES
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.errors import NotAllowedError
from cepheid_broker.ownership import IsolationRules, compile_policy, names_of
from cepheid_metadata import (
    BadVersionError,
    IsolationPolicies,
    IsolationPolicy,
    KeyExistsError,
    NoSuchKeyError,
    isolation_policies,
)

NO_CONTENT = 204
MAX_POLICIES = 100

Policies = dict[str, IsolationPolicy]


class FailoverPolicy(BaseModel):
    """When secondary brokers help. The values of its parameters are strings."""

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
    unload_scope: str | None = None


def isolation(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/clusters/{cluster}/namespaceIsolationPolicies")

    @router.get("")
    async def all_policies(cluster: ClusterPath) -> dict[str, Any]:
        """By name; 404 when there is none"""
        found = await _policies(context, cluster)
        if not found:
            raise NotFoundError(f"Cluster {cluster} has no isolation policies")
        return {name: _data(policy) for name, policy in sorted(found.items())}

    @router.get("/brokers")
    async def brokers_with_policies(cluster: ClusterPath, request: Request) -> list[dict[str, Any]]:
        """Each broker that runs, with the policies in which it is primary"""
        rules = IsolationRules(IsolationPolicies(policies=await _policies(context, cluster)))
        return [_broker_data(context, rules, name) for name in brokers_of(context, request)]

    @router.get("/brokers/{broker}")
    async def policies_of_broker(cluster: ClusterPath, broker: str, request: Request) -> dict[str, Any]:
        """One broker, by the address of its API"""
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
        """Creates or replaces it. Bundles that it does not allow where they are move within some rounds of load balancing"""
        await _require_own(context, cluster)
        name, policy = decode_once(policyName), _policy(body)
        try:
            compile_policy(name, policy)
        except NotAllowedError as error:
            raise BadRequestError(str(error)) from None
        await _change(context, lambda policies: {**policies, name: policy})

    @router.delete("/{policyName}", status_code=NO_CONTENT)
    async def delete_policy(cluster: ClusterPath, policyName: str) -> None:
        """A policy that does not exist is a success, as in Pulsar"""
        await _require_own(context, cluster)
        name = decode_once(policyName)
        await _change(context, lambda policies: {each: policy for each, policy in policies.items() if each != name})

    return router


async def _require_own(context: AdminContext, cluster: str) -> None:
    """Raises PreconditionError for a cluster that does not exist, as Pulsar does here; there are brokers of one cluster."""
    if cluster != context.cluster:
        raise PreconditionError(f"Cluster {cluster} is not the cluster of this broker, {context.cluster}")


async def _policies(context: AdminContext, cluster: str) -> Policies:
    await _require_own(context, cluster)
    found = await isolation_policies(context.store).get(None)
    return {} if found is None else dict(found.record.policies)


async def _change(context: AdminContext, change: Callable[[Policies], Policies]) -> None:
    """Raises ConflictError, BadRequestError."""
    records = isolation_policies(context.store)
    for _ in range(TRIES):
        found = await records.get(None)
        policies = change({} if found is None else dict(found.record.policies))
        if len(policies) > MAX_POLICIES:
            raise BadRequestError(f"{len(policies)} isolation policies: {MAX_POLICIES} are possible")
        try:
            if found is None:
                await records.create(None, IsolationPolicies(policies=policies))
            else:
                await records.replace(None, IsolationPolicies(policies=policies), found.version)
            return
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            continue
    raise ConflictError("Isolation policies are being changed by many callers at the same time: try again")


def _policy(body: IsolationBody) -> IsolationPolicy:
    """Raises BadRequestError."""
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
    """`name` is the address of the broker's API. The API's description says `primary`, Go's client reads `isPrimary`."""
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
