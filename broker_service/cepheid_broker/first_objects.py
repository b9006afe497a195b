"""What every cluster starts with: its own record, tenants `public` and `pulsar`, namespaces `public/default`, `pulsar/system`."""

from __future__ import annotations

from cepheid_metadata import (
    ClusterRecord,
    KeyExistsError,
    MetadataStore,
    NamespaceRecord,
    TenantRecord,
    cluster_records,
    namespace_records,
    tenant_records,
)

FIRST_NAMESPACES = (("public", "default"), ("pulsar", "system"))


async def create_first_objects(store: MetadataStore, cluster: str, *, admin_url: str, service_url: str) -> None:
    """Makes what is missing, at every start; of what is there only the cluster's own addresses are brought up to date."""
    clusters, tenants, namespaces = cluster_records(store), tenant_records(store), namespace_records(store)
    found = await clusters.get(cluster)
    record = ClusterRecord(service_url=admin_url, broker_service_url=service_url)
    if found is None:
        await clusters.create(cluster, record)
    elif (found.record.service_url, found.record.broker_service_url) != (admin_url, service_url):
        await clusters.replace(cluster, found.record.replace(service_url=admin_url, broker_service_url=service_url), found.version)
    for tenant, namespace in FIRST_NAMESPACES:
        try:
            await tenants.create(tenant, TenantRecord(allowed_clusters=(cluster,)))
        except KeyExistsError:
            pass
        try:
            await namespaces.create((tenant, namespace), NamespaceRecord(replication_clusters=(cluster,)))
        except KeyExistsError:
            pass
