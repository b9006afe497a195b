"""Backlog quotas of namespaces and topics: two policies, of size and of age, behind one path and its `backlogQuotaType`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Query
from pydantic import TypeAdapter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.policy_level import Level, namespace_level, refuse_global, topic_level
from cepheid_broker.admin.policy_values import BacklogQuotaBody, quota, quota_in_force, quota_json
from cepheid_broker.policies import TopicPolicies
from cepheid_metadata import MetadataStore, NamespaceRecord, TopicRecord
from cepheid_metadata.upgrade import read_storage_format

NO_CONTENT = 204

QuotaType = Literal["destination_storage", "message_age"]
FIELDS: Mapping[QuotaType, str] = {"destination_storage": "size_quota", "message_age": "age_quota"}
OTHER_LIMITS_SINCE = 3
"""Storage format of the cluster since which records keep the limit of the other type."""
_OTHER_LIMITS: Mapping[QuotaType, str] = {"destination_storage": "size_quota_time_s", "message_age": "age_quota_size_bytes"}

_body = json_body(BacklogQuotaBody)
_type: Any = Query("destination_storage", alias="backlogQuotaType")


def namespace_backlog_quotas(context: AdminContext) -> APIRouter:
    return _routes(context, "/admin/v2/namespaces/{tenant}/{namespace}", namespace_level(context))


def topic_backlog_quotas(context: AdminContext) -> APIRouter:
    return _routes(context, "/admin/v2/persistent/{tenant}/{namespace}/{topic}", topic_level(context))


async def quota_fields(store: MetadataStore, kind: QuotaType, body: BacklogQuotaBody) -> dict[str, Any]:
    """Return the fields of a record that hold this quota.

    Its other limit, which is only shown, is dropped until the cluster's upgrade is finished: older releases cannot read it.
    """
    policy, other = quota(body, of_age=kind == "message_age")
    is_kept = other >= 0 and await read_storage_format(store) >= OTHER_LIMITS_SINCE
    return {FIELDS[kind]: policy, _OTHER_LIMITS[kind]: other if is_kept else None}


def quotas_json(record: NamespaceRecord | TopicRecord) -> dict[str, Any]:
    """Return the quotas that are set, by type."""
    found = {kind: getattr(record, field) for kind, field in FIELDS.items()}
    return {
        kind: quota_json(policy, of_age=kind == "message_age", other=getattr(record, _OTHER_LIMITS[kind]))
        for kind, policy in found.items()
        if policy is not None
    }


def _quotas_in_force(policies: TopicPolicies) -> dict[str, Any]:
    return {
        "destination_storage": quota_in_force(policies.size_quota, of_age=False),
        "message_age": quota_in_force(policies.age_quota, of_age=True),
    }


def _routes(context: AdminContext, prefix: str, level: Level) -> APIRouter:
    router = APIRouter(prefix=prefix)

    @router.get("/backlogQuotaMap")
    async def read(noun: Any = level.noun, is_global: bool = level.is_global, applied: bool = False) -> dict[str, Any]:
        """Return quotas by type; `{}` if none is set"""
        found = {} if is_global else quotas_json(await level.record(noun))
        return {**_quotas_in_force(await level.in_force(noun)), **found} if applied and not is_global else found

    content = {"application/json": {"schema": TypeAdapter(BacklogQuotaBody).json_schema()}}

    @router.post("/backlogQuota", status_code=NO_CONTENT, openapi_extra={"requestBody": {"content": content}})
    async def write(
        noun: Any = level.noun,
        is_global: bool = level.is_global,
        kind: QuotaType = _type,
        body: BacklogQuotaBody = _body,
    ) -> None:
        """Set one quota, of size or age; the limit of the other type is shown without effect. 412 unless retention is larger"""
        refuse_global(is_global)
        await level.change(noun, await quota_fields(context.store, kind, body))

    @router.delete("/backlogQuota", status_code=NO_CONTENT)
    async def remove(noun: Any = level.noun, is_global: bool = level.is_global, kind: QuotaType = _type) -> None:
        refuse_global(is_global)
        await level.change(noun, {FIELDS[kind]: None, _OTHER_LIMITS[kind]: None})

    return router
