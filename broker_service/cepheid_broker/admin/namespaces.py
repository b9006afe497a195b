"""Namespaces: create, list, read, delete, unload, and list the topics in them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.access import require, visible_topics
from cepheid_broker.admin.bundle_calls import unload_all
from cepheid_broker.admin.bundles import bundles_data
from cepheid_broker.admin.context import AdminContext, replace_or_conflict
from cepheid_broker.admin.errors import ConflictError, NotAllowedHereError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.namespace_object import NamespaceBody, namespace_object, namespace_schema, new_namespace
from cepheid_broker.admin.path_names import NamespacePath, TenantPath
from cepheid_broker.admin.permissions import read_permissions
from cepheid_broker.admin.policy_change import TRIES, contended
from cepheid_broker.admin.topic_lists import is_shown, topics_in
from cepheid_metadata import (
    BadVersionError,
    KeyExistsError,
    NamespaceRecord,
    NoSuchKeyError,
    delete_permissions_ops,
    list_namespaces,
    list_topics,
)
from cepheid_security import Need
from cepheid_wire import NON_PERSISTENT, PERSISTENT, NamespaceName

NO_CONTENT = 204
_MODES = {"PERSISTENT": (PERSISTENT,), "NON_PERSISTENT": (NON_PERSISTENT,), "ALL": (PERSISTENT, NON_PERSISTENT)}

_POLICIES_BODY = {"requestBody": {"content": {"application/json": {"schema": namespace_schema()}}}}

PoliciesBody = Annotated[NamespaceBody | None, json_body(NamespaceBody | None)]


def namespaces(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces")

    @router.get("/{tenant}")
    async def namespaces_of_tenant(tenant: TenantPath) -> list[str]:
        await context.require_tenant(tenant)
        return [f"{tenant}/{namespace}" for namespace in await list_namespaces(context.store, tenant)]

    @router.get("/{tenant}/{namespace}")
    async def get_policies(namespace: NamespacePath) -> dict[str, Any]:
        """Return all policies"""
        record = (await context.require_namespace(namespace)).record
        granted = await read_permissions(context, namespace)
        return namespace_object(record, context.broker.catalog.broker_policies, granted)

    @router.put("/{tenant}/{namespace}", status_code=NO_CONTENT, openapi_extra=_POLICIES_BODY)
    async def create_namespace(namespace: NamespacePath, policies: PoliciesBody, request: Request) -> None:
        """Create a namespace; an offload policy in the body needs a super-user, as in its own call"""
        await context.require_tenant(namespace.tenant)
        record = await new_namespace(context, policies or NamespaceBody())
        if record.offload is not None:
            await require(context, request, Need.SUPER_USER)
        for cluster in record.replication_clusters:
            await context.require_cluster(cluster)
        await _create(context, namespace, record)

    @router.delete("/{tenant}/{namespace}", status_code=NO_CONTENT)
    async def delete_namespace(namespace: NamespacePath, force: bool = False) -> None:
        """Delete an empty namespace"""
        if force:
            raise NotAllowedHereError("This broker does not allow deleting a namespace by force")
        await _delete(context, namespace)

    @router.get("/{tenant}/{namespace}/topics")
    async def topics_of_namespace(
        namespace: NamespacePath,
        request: Request,
        mode: str = "PERSISTENT",
        includeSystemTopic: bool = False,
    ) -> list[str]:
        """Return the topics that the role may use; `mode` is PERSISTENT, NON_PERSISTENT or ALL"""
        if mode not in _MODES:
            raise PreconditionError(f"mode {mode!r} is not one of {', '.join(_MODES)}")
        topics = [topic for domain in _MODES[mode] for topic in await topics_in(context, namespace, domain)]
        return [
            str(topic) for topic in await visible_topics(context, request, namespace, topics) if is_shown(topic, includeSystemTopic)
        ]

    @router.get("/{tenant}/{namespace}/bundles")
    async def get_bundles(namespace: NamespacePath) -> dict[str, Any]:
        return bundles_data((await context.require_namespace(namespace)).record)

    @router.put("/{tenant}/{namespace}/unload", status_code=NO_CONTENT)
    async def unload_namespace(namespace: NamespacePath) -> None:
        """Unload every open topic of the namespace, at all brokers"""
        await unload_all(context, namespace)

    return router


async def _create(context: AdminContext, namespace: NamespaceName, record: NamespaceRecord) -> None:
    """Create it together with a write of its tenant: a concurrent change of the tenant then finds it changed, and checks again."""
    noun = (namespace.tenant, namespace.local_name)
    create = context.namespaces.create_op(noun, record)
    for _ in range(TRIES):
        tenant = await context.require_tenant(namespace.tenant)
        touch = context.tenants.replace_op(namespace.tenant, tenant.record, tenant.version)
        try:
            await context.store.multi([touch, create, *await delete_permissions_ops(context.store, *noun)])
            return
        except (BadVersionError, NoSuchKeyError):
            continue
        except KeyExistsError:
            raise ConflictError(f"Namespace {namespace} already exists", namespace=str(namespace)) from None
    raise contended(namespace)


async def _delete(context: AdminContext, namespace: NamespaceName) -> None:
    """Delete a namespace. It is marked first, so that no topic is created in it while it is checked."""
    found = await context.require_namespace(namespace)
    if len(found.record.replication_clusters) > 1:
        raise PreconditionError(f"Namespace {namespace} is replicated to other clusters", namespace=str(namespace))
    noun = (namespace.tenant, namespace.local_name)
    version = found.version
    if not found.record.deleted:
        version = await context.namespaces.replace(noun, found.record.replace(deleted=True), version)
    topics = [
        topic
        for domain in (PERSISTENT, NON_PERSISTENT)
        for topic in await list_topics(context.store, namespace.tenant, namespace.local_name, domain)
    ]
    if topics:
        await replace_or_conflict(context.namespaces.replace(noun, found.record.replace(deleted=False), version))
        raise ConflictError(f"Namespace {namespace} still has {len(topics)} topics, one is {topics[0]}", namespace=str(namespace))
    await context.broker.schemas.on_namespace_deleting(namespace)
    await context.store.multi([context.namespaces.delete_op(noun, version), *await delete_permissions_ops(context.store, *noun)])
