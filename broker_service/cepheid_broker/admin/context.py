"""The context of the admin routers: the broker's own services and records, and common lookups in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.errors import ConflictError, NotFoundError
from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.settings import AdminSettings
from cepheid_metadata import (
    BadVersionError,
    ClusterRecord,
    Found,
    MetadataStore,
    NamespaceRecord,
    Records,
    TenantRecord,
    TopicRecord,
    cluster_records,
    namespace_records,
    tenant_records,
    topic_records,
)
from cepheid_wire import NamespaceName, TopicName

if TYPE_CHECKING:
    from cepheid_broker.broker import Broker
    from cepheid_ledger import BookieStates
    from cepheid_metadata.ticket_keyring import TicketKeyring
    from cepheid_ports.prometheus import Family


@dataclass(frozen=True, slots=True)
class AdminContext:
    """One broker, with further sources of metrics: the exporter pulls `families`."""

    broker: Broker
    settings: AdminSettings = field(default_factory=AdminSettings)
    families: Sequence[Callable[[], Iterable[Family]]] = ()
    is_ready: Callable[[], bool] = field(default=lambda: True)
    bookies: BookieStates | None = None
    tickets: TicketKeyring | None = None
    """Signs the tickets of readers; None: bookies need none, and plans contain the ledgers' master keys."""
    problems: Callable[[], Sequence[str]] = field(default=tuple)
    """Returns sentences for people about what is wrong while the broker serves."""
    held_ledgers: Callable[[str, int], dict[str, Any] | None] = field(default=lambda _bookie, _above: None)
    """Returns a page of the ledger ids above an id that a bookie of this process holds; None if it does not run here."""

    @property
    def store(self) -> MetadataStore:
        return self.broker.store

    @property
    def cluster(self) -> str:
        return self.broker.cluster

    @property
    def clusters(self) -> Records[str, ClusterRecord]:
        return cluster_records(self.store)

    @property
    def tenants(self) -> Records[str, TenantRecord]:
        return tenant_records(self.store)

    @property
    def namespaces(self) -> Records[tuple[str, str], NamespaceRecord]:
        return namespace_records(self.store)

    @property
    def topics(self) -> Records[TopicName, TopicRecord]:
        return topic_records(self.store)

    async def require_cluster(self, cluster: str) -> Found[ClusterRecord]:
        found = await self.clusters.get(cluster)
        if found is None:
            raise NotFoundError(f"Cluster {cluster} does not exist", cluster=cluster)
        return found

    async def require_tenant(self, tenant: str) -> Found[TenantRecord]:
        found = await self.tenants.get(tenant)
        if found is None:
            raise NotFoundError(f"Tenant {tenant} does not exist", tenant=tenant)
        return found

    async def require_namespace(self, namespace: NamespaceName) -> Found[NamespaceRecord]:
        found = await self.namespaces.get((namespace.tenant, namespace.local_name))
        if found is None:
            raise NamespaceNotFoundError(f"Namespace {namespace} does not exist", namespace=str(namespace))
        return found


async def replace_or_conflict(replacing: Awaitable[int]) -> None:
    """Await the replacement of a record. Raises ConflictError (409) if another caller changed it meanwhile."""
    try:
        await replacing
    except BadVersionError:
        raise ConflictError("Another caller changed it at the same time: read it again and retry") from None
