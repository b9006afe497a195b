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


async def create_first_objects(store: MetadataStore, cluster: str, *, admin_url: str = "", service_url: str = "") -> None:
    """Makes what is missing, any number of callers at once; of what is there only the cluster's own addresses, where they are
    given, are brought up to date."""
    clusters, tenants, namespaces = cluster_records(store), tenant_records(store), namespace_records(store)
    record = ClusterRecord(service_url=admin_url, broker_service_url=service_url)
    if (found := await clusters.get(cluster)) is None:
        try:
            await clusters.create(cluster, record)
        except KeyExistsError:
            found = await clusters.get(cluster)
    if found is not None:
        addressed = found.record.replace(
            service_url=admin_url or found.record.service_url, broker_service_url=service_url or found.record.broker_service_url
        )
        if addressed != found.record:
            await clusters.replace(cluster, addressed, found.version)
    for tenant, namespace in FIRST_NAMESPACES:
        try:
            await tenants.create(tenant, TenantRecord(allowed_clusters=(cluster,)))
        except KeyExistsError:
            pass
        try:
            await namespaces.create((tenant, namespace), NamespaceRecord(replication_clusters=(cluster,)))
        except KeyExistsError:
            pass
