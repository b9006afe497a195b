"""What every cluster starts with: its own record, tenants `public` and `pulsar`, namespaces `public/default`, `pulsar/system`."""

from __future__ import annotations

from contextlib import suppress

from cepheid_metadata import (
    BadVersionError,
    ClusterRecord,
    KeyExistsError,
    MetadataStore,
    NamespaceRecord,
    Records,
    TenantRecord,
    cluster_records,
    namespace_records,
    tenant_records,
)

FIRST_NAMESPACES = (("public", "default"), ("pulsar", "system"))


async def create_first_objects(store: MetadataStore, cluster: str, *, admin_url: str = "", service_url: str = "") -> None:
    """Makes what is missing, any number of callers at once; of what is there only the cluster's own addresses, where they are
    given, are brought up to date."""
    await _address_cluster(cluster_records(store), cluster, admin_url, service_url)
    tenants, namespaces = tenant_records(store), namespace_records(store)
    for tenant, namespace in FIRST_NAMESPACES:
        with suppress(KeyExistsError):
            await tenants.create(tenant, TenantRecord(allowed_clusters=(cluster,)))
        with suppress(KeyExistsError):
            await namespaces.create((tenant, namespace), NamespaceRecord(replication_clusters=(cluster,)))


async def _address_cluster(clusters: Records[str, ClusterRecord], cluster: str, admin_url: str, service_url: str) -> None:
    while True:
        found = await clusters.get(cluster)
        try:
            if found is None:
                await clusters.create(cluster, ClusterRecord(service_url=admin_url, broker_service_url=service_url))
                return
            known = found.record
            addressed = known.replace(
                service_url=admin_url or known.service_url, broker_service_url=service_url or known.broker_service_url
            )
            if addressed != known:
                await clusters.replace(cluster, addressed, found.version)
            return
        except (KeyExistsError, BadVersionError):
            continue  # another process does the same at this moment
