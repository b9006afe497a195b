"""Clusters and tenants: records that are read, created, replaced as a whole (never merged) and deleted."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from cepheid_broker.admin.access import administered_tenants, describe_change, may
from cepheid_broker.admin.context import AdminContext, replace_or_conflict
from cepheid_broker.admin.errors import BadRequestError, ConflictError, NotAllowedHereError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import ClusterPath, TenantPath
from cepheid_metadata import ClusterRecord, KeyExistsError, TenantRecord, keys, list_names, list_namespaces, list_tenants
from cepheid_security import Need

NO_CONTENT = 204


class ClusterData(BaseModel):
    """A cluster in the API's names. What this broker does not use (proxies, TLS of clients) is accepted and not kept."""

    model_config = ConfigDict(populate_by_name=True, extra="ignore")

    service_url: str | None = Field(None, alias="serviceUrl")
    service_url_tls: str | None = Field(None, alias="serviceUrlTls")
    broker_service_url: str | None = Field(None, alias="brokerServiceUrl")
    broker_service_url_tls: str | None = Field(None, alias="brokerServiceUrlTls")


class TenantInfo(BaseModel):
    """A tenant in the API's names. Go's client sends null for an empty list."""

    model_config = ConfigDict(populate_by_name=True, extra="ignore")

    admin_roles: list[str] | None = Field(None, alias="adminRoles")
    allowed_clusters: list[str] | None = Field(None, alias="allowedClusters")


ClusterBody = Annotated[ClusterData, json_body(ClusterData)]
TenantBody = Annotated[TenantInfo, json_body(TenantInfo)]


def clusters(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/clusters")

    @router.get("")
    async def list_clusters() -> list[str]:
        return await list_names(context.store, keys.CLUSTERS_KEY)

    @router.get("/{cluster}", response_model_exclude_none=True)
    async def get_cluster(cluster: ClusterPath) -> ClusterData:
        record = (await context.require_cluster(cluster)).record
        return ClusterData(**{name: getattr(record, name) or None for name in ClusterData.model_fields})

    @router.put("/{cluster}", response_class=Response)
    async def create_cluster(cluster: ClusterPath, data: ClusterBody) -> Response:
        """Create a cluster; answers 200, as in Pulsar"""
        try:
            await context.clusters.create(cluster, _cluster_record(data))
        except KeyExistsError:
            raise ConflictError(f"Cluster {cluster} already exists", cluster=cluster) from None
        return Response()

    @router.post("/{cluster}", response_class=Response)
    async def replace_cluster(cluster: ClusterPath, data: ClusterBody) -> Response:
        """Replace a cluster; answers 200, as in Pulsar"""
        version = (await context.require_cluster(cluster)).version
        await replace_or_conflict(context.clusters.replace(cluster, _cluster_record(data), version))
        return Response()

    @router.delete("/{cluster}", status_code=NO_CONTENT)
    async def delete_cluster(cluster: ClusterPath) -> None:
        version = (await context.require_cluster(cluster)).version
        for tenant in await list_tenants(context.store):
            found = await context.tenants.get(tenant)
            if found is not None and cluster in found.record.allowed_clusters:
                raise PreconditionError(f"Cluster {cluster} is still used by tenant {tenant}", cluster=cluster)
        await context.clusters.delete(cluster, version)

    return router


def tenants(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/tenants")

    @router.get("")
    async def all_tenants(request: Request) -> list[str]:
        """Return all tenants for a super-user, else those that the role administers"""
        tenants = await list_tenants(context.store)
        if await may(context, request, Need.SUPER_USER):
            return tenants
        found = {tenant: await context.tenants.get(tenant) for tenant in tenants}
        return administered_tenants(context, request, {tenant: each.record for tenant, each in found.items() if each is not None})

    @router.get("/{tenant}")
    async def get_tenant(tenant: TenantPath) -> dict[str, list[str]]:
        record = (await context.require_tenant(tenant)).record
        return {"adminRoles": list(record.admin_roles), "allowedClusters": list(record.allowed_clusters)}

    @router.put("/{tenant}", status_code=NO_CONTENT)
    async def create_tenant(request: Request, tenant: TenantPath, info: TenantBody) -> None:
        _describe(request, info)
        record = await _tenant_record(context, info)
        try:
            await context.tenants.create(tenant, record)
        except KeyExistsError:
            raise ConflictError(f"Tenant {tenant} already exists", tenant=tenant) from None

    @router.post("/{tenant}", status_code=NO_CONTENT)
    async def replace_tenant(request: Request, tenant: TenantPath, info: TenantBody) -> None:
        """Replace a tenant as a whole, without merging"""
        _describe(request, info)
        version = (await context.require_tenant(tenant)).version
        record = await _tenant_record(context, info)
        for namespace in await list_namespaces(context.store, tenant):
            found = await context.namespaces.get((tenant, namespace))
            missing = [] if found is None else sorted({*found.record.replication_clusters} - {*record.allowed_clusters})
            if missing:
                raise PreconditionError(f"Namespace {tenant}/{namespace} still uses cluster {missing[0]}", tenant=tenant)
        await replace_or_conflict(context.tenants.replace(tenant, record, version))

    @router.delete("/{tenant}", status_code=NO_CONTENT)
    async def delete_tenant(tenant: TenantPath, force: bool = False) -> None:
        if force:
            raise NotAllowedHereError("This broker does not allow deleting a tenant by force")
        version = (await context.require_tenant(tenant)).version
        if await list_namespaces(context.store, tenant):
            raise ConflictError(f"Tenant {tenant} still has namespaces", tenant=tenant)
        await context.tenants.delete(tenant, version)

    return router


def _cluster_record(data: ClusterData) -> ClusterRecord:
    for name, schemes in (("service_url", ("http", "https")), ("broker_service_url", ("pulsar", "pulsar+ssl"))):
        for url in (getattr(data, name), getattr(data, f"{name}_tls")):
            if url and (urlsplit(url).scheme not in schemes or not urlsplit(url).hostname):
                raise BadRequestError(f"{url!r} is not a {name}: {schemes[0]}://host:port is expected")
    return ClusterRecord(**{name: value or "" for name, value in data.model_dump().items()})


def _describe(request: Request, info: TenantInfo) -> None:
    clusters = " ".join(info.allowed_clusters or ())
    describe_change(request, [*(f"admin {role}" for role in info.admin_roles or ()), f"clusters {clusters}"])


async def _tenant_record(context: AdminContext, info: TenantInfo) -> TenantRecord:
    allowed = info.allowed_clusters or []
    if not allowed or any(not cluster.strip() for cluster in allowed):
        raise PreconditionError("A tenant needs at least one cluster, and no blank ones")
    for cluster in allowed:
        if not await context.clusters.exists(cluster):
            raise PreconditionError(f"Cluster {cluster} does not exist", cluster=cluster)
    return TenantRecord(admin_roles=tuple(info.admin_roles or ()), allowed_clusters=tuple(allowed))
