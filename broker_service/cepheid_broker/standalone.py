"""A whole cluster in one process: embedded metadata, bookies, ledger client, broker, admin API. Built here, started in order.

    metadata ─► cluster identity, first objects ─► bookies ─► ledger client ─► broker (protocol port) ─► bookie ports, admin API
                                                                                  ready ▲

Rule 1: the protocol port opens before gRPC and the web framework are imported: those take longer than everything else.
Rule 2: a part that fails for good ends the process with its reason; a start that fails closes what it had opened, in reverse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from cepheid_broker.admin import AdminContext, AdminServer, AdminSettings
from cepheid_broker.broker import Broker
from cepheid_broker.first_objects import create_first_objects
from cepheid_broker.local_bookies import LocalBookies
from cepheid_broker.managed_ledger import ManagedLedgerConfig, ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_broker.settings import (
    BrokerSettings,
    ConnectionSettings,
    DeduplicationSettings,
    DispatchSettings,
    PolicySettings,
    TopicCreation,
)
from cepheid_ledger import LedgerClient, LedgerSettings, RandomPlacement
from cepheid_metadata import ClusterIdentity, LedgerIds, cluster_identity, ledger_records
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import CepheidError, Ports, TaskOwner

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

log = logging.getLogger(__name__)

MIB = 1 << 20
CLUSTER = "standalone"


class StandaloneFailedError(CepheidError):
    """A part of the process failed in a way that only a restart can mend."""

    hint: ClassVar[str] = "start it again: what was acknowledged is on disk"


class StandaloneSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of `cepheid standalone`."""

    data_dir: Path = Field(Path("data"), description="Where everything is kept. Made when it does not exist.")
    host: str = Field("127.0.0.1", description="Address to bind, for clients, admin API and bookies.")
    advertised_host: str | None = Field(None, description="Address that lookups tell clients. Unset: the bound one.")
    port: NonNegativeInt = Field(6650, le=65535, description="Port of the binary protocol. 0: any free one.")
    admin_port: NonNegativeInt = Field(8080, le=65535, description="Port of the admin API and metrics. 0: any free one.")
    bookie_port: NonNegativeInt = Field(
        0,
        le=65535,
        description="gRPC port of the first bookie, the others follow. 0: any (readers ask the plan service).",
    )
    bookies: PositiveInt = Field(1, le=9, description="Storage nodes, each with its directory. Three or more: E=3 Qw=3 Qa=2.")
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

    @property
    def ledger_config(self) -> ManagedLedgerConfig:
        """Quorums by the number of bookies (design: 1/1/1, from three on 3/3/2)."""
        if self.bookies >= 3:
            return ManagedLedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)
        return ManagedLedgerConfig(ensemble_size=self.bookies, write_quorum=self.bookies, ack_quorum=self.bookies)


class Standalone:
    """`start` once, `aclose` once."""

    def __init__(self, settings: StandaloneSettings, ports: Ports) -> None:
        self.settings = settings
        self.bookies: LocalBookies
        self.broker: Broker
        self._ports = ports
        self._opened = AsyncExitStack()
        self._tasks = TaskOwner("standalone", self._on_failed)
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._ready = False
        self._admin: AdminServer

    def __repr__(self) -> str:
        return f"<Standalone {self.settings.data_dir}>"

    @property
    def service_url(self) -> str:
        return f"pulsar://{self._shown_host}:{self.broker.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self._shown_host}:{self._admin.port}"

    async def start(self) -> None:
        """Returns when clients are served; the admin API follows within a second. Raises CepheidError, having closed everything."""
        try:
            await self._start_serving()
        except BaseException:
            await self._opened.aclose()
            raise
        self._tasks.start(self._start_network_services(), name="network-services")

    async def wait_until_stopped(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; raises StandaloneFailedError when a part failed for good."""
        stopping = asyncio.ensure_future(stop.wait())
        waiting: list[asyncio.Future[Any]] = [stopping, self._failed]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._failed.done():
            raise StandaloneFailedError(str(self._failed.result())) from self._failed.result()

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self._opened.aclose()

    @property
    def _shown_host(self) -> str:
        return self.settings.advertised_host or self.settings.host

    async def _start_serving(self) -> None:
        settings, ports, opened = self.settings, self._ports, self._opened
        store = await RocksStore.open(settings.data_dir / "metadata", ports)
        opened.push_async_callback(store.aclose)
        cluster_id = await _identify_cluster(store, ports)
        self.bookies = await LocalBookies.open(settings.data_dir, settings.bookies, cluster_id, store, ports, self._on_failed)
        opened.push_async_callback(self.bookies.aclose)
        ledger_ids = LedgerIds(store)
        await ledger_ids.check()
        placement = RandomPlacement(self.bookies.writable, ports.random, settings.ledger.quarantine_s)
        self._ledger_client = client = LedgerClient(
            self.bookies, ledger_records(store), ledger_ids, placement, settings.ledger, ports
        )
        opened.push_async_callback(client.aclose)
        self._tail_cache = TailCache(settings.tail_cache_bytes)
        managed_ledgers = ManagedLedgers(client, store, self._tail_cache, settings.managed_ledger, ports)
        opened.push_async_callback(managed_ledgers.aclose)
        broker_settings = BrokerSettings(
            cluster=CLUSTER,
            host=settings.host,
            port=settings.port,
            advertised_host=settings.advertised_host,
            topic_creation=TopicCreation(allowed=settings.topic_creation),
            connection=settings.connection,
            dispatch=settings.dispatch,
            deduplication=settings.deduplication,
            policies=settings.policies,
        )
        self.broker = Broker(broker_settings, store, managed_ledgers, ports, ledger_config=settings.ledger_config)
        admin_settings = AdminSettings(host=settings.host, port=settings.admin_port)
        context = AdminContext(self.broker, admin_settings, families=(self._families,), is_ready=lambda: self._ready)
        self._admin = AdminServer(context, on_failed=self._on_failed)
        self._admin.listen()
        opened.push_async_callback(self._admin.aclose)
        # Before the port opens: a client that finds no namespace gives up. And again, in case the system chose the port.
        configured = f"pulsar://{self._shown_host}:{settings.port}"
        await create_first_objects(store, CLUSTER, admin_url=self.admin_url, service_url=configured)
        await self.broker.start()
        opened.push_async_callback(self.broker.aclose)
        await create_first_objects(store, CLUSTER, admin_url=self.admin_url, service_url=self.service_url)
        self._ready = True

    async def _start_network_services(self) -> None:
        """The admin API, then the bookies' ports; large libraries are imported in threads, and clients are served meanwhile."""
        await self._admin.start()
        await self.bookies.serve(self.settings.host, self.settings.bookie_port, self._ports)

    def _families(self) -> Iterator[Family]:
        """What is counted beside the broker."""
        from cepheid_bookie.bookie_metrics import bookie_families
        from cepheid_broker.admin.broker_metrics import ledger_client_families, tail_cache_families

        yield from tail_cache_families(self._tail_cache.statistics())
        yield from ledger_client_families(self._ledger_client.statistics())
        for bookie in self.bookies.bookies():
            yield from bookie_families(bookie.settings.bookie_id, bookie.statistics())

    def _on_failed(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(error)


async def _identify_cluster(store: RocksStore, ports: Ports) -> str:
    """The cluster's random id, made at the first start."""
    records = cluster_identity(store)
    found = await records.get(None)
    if found is not None:
        return found.record.cluster_id
    identity = ClusterIdentity(cluster_id=f"{ports.random.getrandbits(64):016x}", name=CLUSTER, created_at_ms=ports.wall_ms())
    await records.create(None, identity)
    return identity.cluster_id
