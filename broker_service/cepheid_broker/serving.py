"""What serves topics, alike in a standalone process and in a broker's own: ledger client, managed ledgers, broker, admin API.

    __init__ (all parts) ─► listen: admin port taken ─► start: id counter checked, protocol port open ─► start_admin
    aclose: broker ─► admin API ─► managed ledgers ─► ledger client

Rule: the protocol port opens before the web framework is imported: that takes longer than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from cepheid_broker.admin import AdminContext, AdminServer, AdminSettings
from cepheid_broker.broker import Broker
from cepheid_broker.ownership import Ownership
from cepheid_broker.settings import (
    BrokerSettings,
    ConnectionSettings,
    DeduplicationSettings,
    DispatchSettings,
    PolicySettings,
    TopicCreation,
)
from cepheid_ledger import BookieConnections, LedgerClient, LedgerSettings, RandomPlacement
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_metadata import LedgerIds, MetadataStore, ledger_records
from cepheid_ports import HOST_PATTERN, Ports

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

MIB = 1 << 20


class ServingSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings that every process with a broker in it has."""

    host: str = Field("127.0.0.1", description="Address to bind, for clients and admin API. 0.0.0.0: all of them.")
    advertised_host: str | None = Field(
        None, pattern=HOST_PATTERN, description="Address that lookups tell clients. Unset: the bound one."
    )
    port: NonNegativeInt = Field(6650, le=65535, description="Port of the binary protocol. 0: any free one.")
    admin_port: NonNegativeInt = Field(8080, le=65535, description="Port of the admin API and metrics. 0: any free one.")
    tail_cache_bytes: PositiveInt = Field(
        128 * MIB, description="Memory for the newest entries of all topics. Consumers that keep up are served from it."
    )
    topic_creation: bool = Field(True, description="Whether clients create topics by using them.")
    connection: ConnectionSettings = Field(ConnectionSettings(), description="Bounds and patience of each connection.")
    dispatch: DispatchSettings = Field(DispatchSettings(), description="How entries are sent to consumers.")
    deduplication: DeduplicationSettings = Field(
        DeduplicationSettings(), description="Bounds of what is remembered of producers, where a policy turns deduplication on."
    )
    policies: PolicySettings = Field(
        PolicySettings(), description="What holds where neither a topic nor its namespace say anything."
    )
    managed_ledger: ManagedLedgerSettings = Field(ManagedLedgerSettings(), description="Ledgers of a topic, and its cursors.")
    ledger: LedgerSettings = Field(LedgerSettings(), description="Writing, reading and recovering ledgers.")

    def of_broker(self, cluster: str, *, advertised_port: int | None = None) -> BrokerSettings:
        return BrokerSettings(
            cluster=cluster,
            host=self.host,
            port=self.port,
            advertised_host=self.advertised_host,
            advertised_port=advertised_port,
            topic_creation=TopicCreation(allowed=self.topic_creation),
            connection=self.connection,
            dispatch=self.dispatch,
            deduplication=self.deduplication,
            policies=self.policies,
        )


class Serving:
    """Made inside the running loop, on a store and bookies that are there. `aclose` once, also after a start that failed."""

    def __init__(
        self,
        settings: ServingSettings,
        broker_settings: BrokerSettings,
        store: MetadataStore,
        connections: BookieConnections,
        writable: Callable[[], Sequence[str]],
        ledger_config: ManagedLedgerConfig,
        ports: Ports,
        *,
        ownership: Ownership | None = None,
        families: Callable[[], Iterator[Family]],
        is_ready: Callable[[], bool],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        opened = self._opened = AsyncExitStack()
        self._more_families = families
        self._ledger_ids = LedgerIds(store)
        placement = RandomPlacement(writable, ports.random, settings.ledger.quarantine_s, settings.ledger.quarantine_max_s)
        self.ledger_client = LedgerClient(connections, ledger_records(store), self._ledger_ids, placement, settings.ledger, ports)
        opened.push_async_callback(self.ledger_client.aclose)
        self._tail_cache = TailCache(settings.tail_cache_bytes)
        self.managed_ledgers = ManagedLedgers(self.ledger_client, store, self._tail_cache, settings.managed_ledger, ports)
        opened.push_async_callback(self.managed_ledgers.aclose)
        self.broker = Broker(broker_settings, store, self.managed_ledgers, ports, ledger_config=ledger_config, ownership=ownership)
        admin_settings = AdminSettings(host=settings.host, port=settings.admin_port)
        context = AdminContext(self.broker, admin_settings, families=(self._families,), is_ready=is_ready)
        self._admin = AdminServer(context, on_failed=on_failed)
        self.broker.admin_port = lambda: self._admin.port
        opened.push_async_callback(self._admin.aclose)

    def __repr__(self) -> str:
        return f"<Serving {self.broker!r}, {self._admin!r}>"

    @property
    def admin_port(self) -> int:
        return self._admin.port

    def listen(self) -> None:
        """Takes the admin port; requests wait in its backlog. Raises PortInUseError."""
        self._admin.listen()

    def drop_ledger_ids(self) -> None:
        """New ledgers have ids from now on that are new to every bookie."""
        self._ledger_ids.drop_block()

    async def start(self) -> None:
        """Returns when clients are served. Raises PortInUseError, LedgerIdsRolledBackError, and what the store raises."""
        await self._ledger_ids.check()
        await self.broker.start()
        self._opened.push_async_callback(self.broker.aclose)

    async def start_admin(self) -> None:
        """Returns when the admin API answers; large libraries are imported in a thread, and clients are served meanwhile."""
        await self._admin.start()

    async def aclose(self) -> None:
        await self._opened.aclose()

    def _families(self) -> Iterator[Family]:
        """What is counted beside the broker."""
        from cepheid_broker.admin.broker_metrics import ensemble_change_families, ledger_client_families, tail_cache_families

        yield from tail_cache_families(self._tail_cache.statistics())
        yield from ledger_client_families(self.ledger_client.statistics())
        yield from ensemble_change_families(self.ledger_client.ensemble_change_statistics())
        yield from self._more_families()
