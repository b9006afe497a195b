"""The whole-namespace object: conversion between Pulsar's `Policies`, with their mixture of names, and our record.

A request that the record cannot keep is refused (501), as ignoring it would be a wrong success. Values that hold anyway, such as
the defaults that clients fill in, are accepted.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from cepheid_broker.admin.backlog_quotas import QuotaType, quota_fields, quotas_json
from cepheid_broker.admin.bundles import bundles_data
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, NotServedError
from cepheid_broker.admin.offload_thresholds import OLD_MEMBERS, old_members, with_old_members
from cepheid_broker.admin.policy_change import check_consistent
from cepheid_broker.admin.policy_table import POLICIES, PolicyKind
from cepheid_broker.admin.policy_values import BacklogQuotaBody
from cepheid_broker.ownership import MAX_BUNDLES, boundaries, check_may_split
from cepheid_broker.policies import TopicPolicies, resolve
from cepheid_metadata import NamespacePermissions, NamespaceRecord

DEFAULT_BUNDLES = 4
_BOUNDARY = re.compile(r"0x[0-9a-f]{8}")
_LAST_BOUNDARY = "0xffffffff"
ANONYMOUS = "anonymous"  # Pulsar's role of an unauthenticated client

_NOT_SET: dict[str, Any] = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "backlog_quota_map": {},
    "topicDispatchRate": {},
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterDispatchRate": {},
    "clusterSubscribeRate": {},
    "publishMaxMessageRate": {},
    "latency_stats_sample_rate": {},
    "encryption_required": False,
    "subscription_auth_mode": "None",
    "schema_compatibility_strategy": "UNDEFINED",
    "schema_validation_enforced": False,
    "subscription_types_enabled": [],
}
"""Answer of every namespace for policies that are not set (docs/reference/shapes.md §2)."""

_DEFAULTS_OF_CLIENTS: dict[str, Any] = {"schema_auto_update_compatibility_strategy": "Full"}
"""Members that Go's client fills in as well: the broker's own default."""

_MEMBERS: dict[str, tuple[PolicyKind, TypeAdapter[Any]]] = {
    kind.member: (kind, TypeAdapter(kind.body)) for kind in POLICIES if kind.member is not None
}


class BundlesBody(BaseModel):
    boundaries: list[str] | None = None
    numBundles: int | None = None


class NamespaceBody(BaseModel):
    """Members other than policies of the table. Those, and what is not served, are extra members."""

    model_config = ConfigDict(extra="allow")

    bundles: BundlesBody | None = None
    replication_clusters: list[str] | None = None
    backlog_quota_map: dict[QuotaType, BacklogQuotaBody] | None = None
    properties: dict[str, str] | None = None
    deleted: bool = False


async def new_namespace(context: AdminContext, body: NamespaceBody) -> NamespaceRecord:
    """Return a record with defaults for what the body omits. Raises BadRequestError, PreconditionError, NotServedError."""
    extra = body.model_extra or {}
    unserved = sorted(
        name for name, value in extra.items() if name not in (*_MEMBERS, *OLD_MEMBERS) and not _holds_anyway(name, value)
    )
    if unserved:
        raise NotServedError(f"Policies not served yet: {', '.join(unserved)[:500]}")
    fields: dict[str, Any] = {}
    for quota_type, quota in (body.backlog_quota_map or {}).items():
        fields |= await quota_fields(context.store, quota_type, quota)
    for name, value in extra.items():
        if name in _MEMBERS and value is not None and value != _NOT_SET.get(name):
            kind = _MEMBERS[name][0]
            fields[kind.field] = await _decoded(context, name, value)
    if (offload := with_old_members(fields.get("offload"), extra)) is not None:
        fields["offload"] = offload
    record = NamespaceRecord(
        **await _bundles(context, body.bundles or BundlesBody()),
        replication_clusters=tuple(body.replication_clusters or (context.cluster,)),
        properties=body.properties or {},
        **fields,
    )
    check_consistent(fields, resolve(None, record, context.broker.catalog.broker_policies))
    return record


async def _decoded(context: AdminContext, name: str, value: Any) -> Any:
    kind, adapter = _MEMBERS[name]
    try:
        body = adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadRequestError(f"{'.'.join(('body', name, *map(str, first['loc'])))}: {first['msg']}") from None
    decoded = kind.decode(body)
    if decoded is not None:
        await kind.check(context, decoded)
    return decoded


def namespace_object(record: NamespaceRecord, broker: TopicPolicies, permissions: NamespacePermissions) -> dict[str, Any]:
    """Return the whole-namespace object; policies that are not set and have no default value are omitted."""
    found: dict[str, Any] = {
        **_NOT_SET,
        "replication_clusters": list(record.replication_clusters),
        "bundles": bundles_data(record),
        "auth_policies": {
            "namespace_auth": permissions.namespace,
            "destination_auth": permissions.topics,
            "subscription_auth_roles": permissions.subscriptions,
        },
        "subscription_auth_mode": permissions.subscription_auth_mode,
        "deleted": record.deleted,
        "properties": record.properties,
        "backlog_quota_map": quotas_json(record),
        "is_allow_auto_update_schema": broker.schema_auto_update,
    }
    found |= old_members(record.offload)
    for name, (kind, _) in _MEMBERS.items():
        if (value := getattr(record, kind.field)) is not None:
            found[name] = kind.encode(value)
    return found


def namespace_schema() -> dict[str, Any]:
    """Return the JSON schema for the API's description: the table's members besides those of the model."""
    schema = NamespaceBody.model_json_schema()
    schema["properties"].update({name: adapter.json_schema() for name, (_, adapter) in _MEMBERS.items()})
    return schema


def _holds_anyway(name: str, value: Any) -> bool:
    if name == "auth_policies" and isinstance(value, dict) and isinstance(roles := value.get("namespace_auth"), dict):
        # Without users every client is "anonymous" and may do everything: clients' own test suites grant that.
        value = {**value, "namespace_auth": {role: actions for role, actions in roles.items() if role != ANONYMOUS}}
    return _is_empty(value) or value == _NOT_SET.get(name) or value == _DEFAULTS_OF_CLIENTS.get(name)


def _is_empty(value: Any) -> bool:
    """Return whether the value is null, 0, false, "", or a collection of only such."""
    return not value or (isinstance(value, dict) and all(map(_is_empty, value.values())))


async def _bundles(context: AdminContext, bundles: BundlesBody) -> dict[str, Any]:
    """Return the record's fields for a number of equal bundles, or for given boundaries.

    Raises BadRequestError; SplitRefusedError for unequal ranges in a cluster whose upgrade is not finished.
    """
    ends = bundles.boundaries
    count = len(ends) - 1 if ends else (bundles.numBundles or DEFAULT_BUNDLES)
    if not 1 <= count <= MAX_BUNDLES:
        raise BadRequestError(f"{count} bundles: 1 to {MAX_BUNDLES} are possible")
    if not ends or ends == boundaries(count):
        return {"bundles": count}
    starts = tuple(int(end, 16) for end in ends[:-1] if _BOUNDARY.fullmatch(end))
    if len(starts) != count or ends[-1] != _LAST_BOUNDARY or starts[0] != 0 or list(starts) != sorted(set(starts)):
        raise BadRequestError(
            f"Bundles must cover the hashes without a gap: their boundaries ascend from 0x00000000 to {_LAST_BOUNDARY}, "
            f"as in {', '.join(boundaries(count))}"
        )
    await check_may_split(context.store)
    return {"bundles": count, "bundle_starts": starts}
