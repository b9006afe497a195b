"""The first objects of every cluster: its record, tenants `public` and `pulsar`, namespaces `public/default`, `pulsar/system`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


async def create_first_objects(
    store: MetadataStore, cluster: str, *, admin_urls: Sequence[str] = (), service_urls: Sequence[str] = ()
) -> None:
    """Create what is missing; any number of callers may do so at once.

    The cluster's own addresses, with TLS and without, are updated where they are given. Nothing else that exists is changed.
    """
    addresses = {**_by_scheme("service_url", admin_urls), **_by_scheme("broker_service_url", service_urls)}
    await _address_cluster(cluster_records(store), cluster, addresses)
    tenants, namespaces = tenant_records(store), namespace_records(store)
    for tenant, namespace in FIRST_NAMESPACES:
        with suppress(KeyExistsError):
            await tenants.create(tenant, TenantRecord(allowed_clusters=(cluster,)))
        with suppress(KeyExistsError):
            await namespaces.create((tenant, namespace), NamespaceRecord(replication_clusters=(cluster,)))


def _by_scheme(name: str, urls: Sequence[str]) -> dict[str, str]:
    """Return the fields for these addresses; a scheme without an address is not served. {}: no address is given."""
    if not urls:
        return {}
    secure = [url for url in urls if url.startswith(("https:", "pulsar+ssl:"))]
    plain = [url for url in urls if url not in secure]
    return {name: plain[0] if plain else "", f"{name}_tls": secure[0] if secure else ""}


async def _address_cluster(clusters: Records[str, ClusterRecord], cluster: str, addresses: Mapping[str, str]) -> None:
    while True:
        found = await clusters.get(cluster)
        try:
            if found is None:
                await clusters.create(cluster, ClusterRecord(**addresses))
                return
            known = found.record
            addressed = known.replace(**addresses)
            if addressed != known:
                await clusters.replace(cluster, addressed, found.version)
            return
        except (KeyExistsError, BadVersionError):
            continue  # another process does the same right now
