"""A whole cluster in one process: embedded metadata, bookies, ledger client, broker, admin API. Built here, started in order.

    metadata ─► cluster identity, first objects ─► bookies ─► ledger client ─► broker (protocol port) ─► bookie ports, admin API
                                                                                  ready ▲

Rule 0: metadata and the bookies' data belong together. If bookies have data and metadata has no cluster, the start is refused
before anything is written: a new cluster beside the old data would make the mistake harder to undo.
Rule 1: the protocol port opens before gRPC and the web framework are imported, which take longer than everything else.
Rule 2: a part that fails for good ends the process with its reason; a start that fails closes what it had opened, in reverse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from cepheid_bookie import RealDisk
from cepheid_bookie.access import ticket_check
from cepheid_bookie.denials import Denials
from cepheid_bookie.secured_ports import access_of
from cepheid_bookie.settings import BookieServerSettings, StorageSettings
from cepheid_broker.broker import Broker
from cepheid_broker.first_objects import create_first_objects
from cepheid_broker.local_bookies import LocalBookies, bookies_with_data
from cepheid_broker.ownership import BundleOwnership
from cepheid_broker.protocol import service_urls
from cepheid_broker.serving import Serving
from cepheid_broker.settings import BrokerSettings
from cepheid_managed_ledger import ManagedLedgerConfig
from cepheid_metadata import MetadataStore, cluster_identity, found_cluster
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import HOST_PATTERN, CepheidError, Ports, Role, TaskOwner, host_port, make_private
from cepheid_recovery import AutoRecovery, RecoverySettings
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

log = logging.getLogger(__name__)

CLUSTER = "standalone"
_METADATA = "metadata"


class MetadataMissingError(CepheidError):
    """The data directory holds data of bookies, but not the metadata that describes it."""

    hint: ClassVar[str] = (
        "nothing was written: put the metadata directory back, from a copy if need be; to start empty, use another data directory"
    )


class StandaloneSettings(BrokerSettings):
    """A whole cluster in one process."""

    data_dir: Path = Field(
        Path("data"), description="Directory of metadata and of all bookies. It is created when it does not exist."
    )
    bookies: PositiveInt = Field(
        1,
        le=9,
        description="Number of bookies, each with its own directory. With three or more each entry is stored by three and "
        "acknowledged by two (E 3, Qw 3, Qa 2), otherwise by all.",
    )
    bookie_port: NonNegativeInt = Field(
        0,
        le=65535,
        description="gRPC port of the first bookie; the others use the following ports. 0: any free ports, which readers learn "
        "from the admin API.",
    )
    bookie_host: str | None = Field(
        None,
        pattern=HOST_PATTERN,
        description="Address of the bookies' ports, where Spark and other readers past the brokers get stored entries. Unset: "
        "`host`; 127.0.0.1 where clients have to authenticate and `tls.client_ca_file` is not set, because the ports are then not "
        "encrypted.",
    )
    bookie_access: BookieAccessSettings = Field(
        BookieAccessSettings(), description="Which roles may do what at the bookies' ports, where they are encrypted."
    )
    storage: StorageSettings = Field(StorageSettings(), description="Bounds and intervals of each bookie's storage.")
    grpc_server: BookieServerSettings = Field(BookieServerSettings(), description="Bounds of each bookie's gRPC server.")
    recovery: RecoverySettings = Field(RecoverySettings(), description="Automatic repair of ledgers that lack copies.")

    @property
    def bookie_tls(self) -> BookieTlsSettings:
        """TLS of the bookies' ports: that of the broker, where it knows who signs certificates of clients."""
        tls = self.tls
        if not tls.enabled or tls.client_ca_file is None:
            return BookieTlsSettings()
        return BookieTlsSettings(
            certificate_file=tls.certificate_file,
            key_file=tls.key_file,
            client_ca_file=tls.client_ca_file,
            minimum_version=tls.minimum_version,
            crl=tls.crl,
        )

    @property
    def ledger_config(self) -> ManagedLedgerConfig:
        """Quorums for the number of bookies (1/1/1; from three on 3/3/2)."""
        if self.bookies >= 3:
            return ManagedLedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)
        return ManagedLedgerConfig(ensemble_size=self.bookies, write_quorum=self.bookies, ack_quorum=self.bookies)


class BrokerPorts(NamedTuple):
    """Ports of one broker, without TLS. Port 0 lets the system choose."""

    port: int = 0
    admin_port: int = 0


class Standalone(Role):
    """A standalone cluster; `start` once, `aclose` once.

    `accept_empty_disk` is an operator's consent for this one start, not a setting: bookies whose disks are lost for good start on
    empty ones.
    """

    def __init__(
        self,
        settings: StandaloneSettings,
        ports: Ports,
        *,
        accept_empty_disk: bool = False,
        new_disk: Callable[[Path], RealDisk] = RealDisk,
        more_brokers: Sequence[BrokerPorts] = (),
    ) -> None:
        """`new_disk` as in `LocalBookies.open`.

        `more_brokers`, for tests of clients: brokers that share metadata and bookies with the first, whose ports are in the
        settings. They divide the bundles among them, and none of them balances load.
        """
        super().__init__()
        self.settings = settings
        self._more_brokers = more_brokers
        self._new_disk = new_disk
        self._accept_empty_disk = accept_empty_disk
        self.bookies: LocalBookies
        self._ports = ports
        self._tasks = TaskOwner("standalone", self._failure.report)
        self._servings: list[Serving] = []
        """The first broker, then the others of this process."""
        self._recovery: AutoRecovery | None = None

    def __repr__(self) -> str:
        return f"<Standalone {self.settings.data_dir}>"

    @property
    def _serving(self) -> Serving:
        return self._servings[0]

    @property
    def broker(self) -> Broker:
        """The first broker."""
        return self._serving.broker

    @property
    def brokers(self) -> list[Broker]:
        return [serving.broker for serving in self._servings]

    @property
    def broker_ports(self) -> list[BrokerPorts]:
        """The ports without TLS of each broker."""
        return [BrokerPorts(serving.broker.port, serving.admin_port) for serving in self._servings]

    @property
    def service_urls(self) -> list[str]:
        """Service URLs of the first broker for its open ports: without TLS, then with TLS."""
        return self._service_urls(self.broker.port, self.broker.tls_port)

    @property
    def service_url(self) -> str:
        """The first service URL, without TLS if that port is open."""
        return self.service_urls[0]

    @property
    def admin_urls(self) -> list[str]:
        """Admin URLs of the first broker for its open ports: without TLS, then with TLS."""
        ports = {"http": self._serving.admin_port, "https": self._serving.tls_admin_port}
        return [f"{scheme}://{host_port(self._shown_host, port)}" for scheme, port in ports.items() if port]

    @property
    def admin_url(self) -> str:
        """The first admin URL, without TLS if that port is open."""
        return self.admin_urls[0]

    @property
    def _shown_host(self) -> str:
        return self.settings.advertised_host or self.settings.host

    @property
    def problems(self) -> list[str]:
        """Sentences for people about what is wrong while it serves."""
        return list(dict.fromkeys(problem for serving in self._servings for problem in serving.problems()))

    def _service_urls(self, port: int, tls_port: int) -> list[str]:
        return list(service_urls(self.settings, port, tls_port, self._shown_host).values())

    async def _start(self) -> None:
        """Start; return when clients are served. The admin API follows within a second."""
        settings, ports, opened = self.settings, self._ports, self._opened
        check_metadata_is_there(settings.data_dir)
        settings.data_dir.mkdir(0o750, parents=True, exist_ok=True)
        make_private(settings.data_dir, ())  # metadata and bookies do so for their own directories
        store = await RocksStore.open(settings.data_dir / _METADATA, ports)
        opened.push_async_callback(store.aclose)
        if await cluster_identity(store).get(None) is None:
            refuse_old_data(settings.data_dir)
        identity = await found_cluster(store, CLUSTER, ports)
        self.bookies = bookies = await LocalBookies.open(
            settings.data_dir,
            settings.bookies,
            settings.storage,
            identity.cluster_id,
            store,
            ports,
            self._failure.report,
            rack=settings.rack,
            accept_empty_disk=self._accept_empty_disk,
            new_disk=self._new_disk,
        )
        opened.push_async_callback(bookies.aclose)
        opened.push_async_callback(self._close_brokers)
        self._new_serving(store, identity.cluster_id, settings, settings.data_dir)
        for number, more in enumerate(self._more_brokers, 2):
            tls = settings.tls.model_copy(update={"port": 0, "admin_port": 0})
            own = settings.model_copy(update={"port": more.port, "admin_port": more.admin_port, "tls": tls})
            self._new_serving(store, identity.cluster_id, own, settings.data_dir / f"broker-{number}")
        bookies.on_gone, bookies.on_back = self._on_bookie_gone, self._on_bookie_back
        for serving in self._servings:
            serving.listen()
        # Before the port opens, as a client that finds no namespace gives up; and again, in case the system chose the port.
        expected = self._service_urls(
            settings.port if settings.has_plain_ports else 0, settings.tls.port if settings.tls.enabled else 0
        )
        await create_first_objects(store, CLUSTER, admin_urls=self.admin_urls, service_urls=expected)
        for serving in self._servings:
            await serving.start()
        for serving in self._servings:
            if isinstance(serving.broker.ownership, BundleOwnership):
                await self._register(serving, serving.broker.ownership)
        await create_first_objects(store, CLUSTER, admin_urls=self.admin_urls, service_urls=self.service_urls)
        self._recovery = AutoRecovery(
            CLUSTER,
            store,
            self._serving.ledger_client,
            self._serving.placement,
            bookies,
            settings.recovery,
            ports,
            on_draining=self._leave_draining,
        )
        opened.push_async_callback(self._recovery.aclose)
        self._recovery.start()
        opened.push_async_callback(self._tasks.aclose)
        self._tasks.start(self._start_network_services(), name="network-services")

    def _new_serving(self, store: MetadataStore, cluster_id: str, settings: StandaloneSettings, data_dir: Path) -> None:
        is_first = not self._servings
        serving = Serving(
            settings,
            CLUSTER,
            store,
            self.bookies,
            settings.ledger_config,
            self._ports,
            ownership=BundleOwnership(store, self._ports, on_failed=self._failure.report) if self._more_brokers else None,
            families=self._families if is_first else lambda: iter(()),
            cluster_id=cluster_id,
            data_dir=data_dir,
            is_ready=lambda: self._phase == "serving",
            held_ledgers=self.bookies.held_ledgers,
            on_failed=self._failure.report,
        )
        self._servings.append(serving)

    async def _close_brokers(self) -> None:
        """Close all at once; none hands topics over to another that also closes."""
        for broker in self.brokers:
            broker.ownership.peers = None
        outcomes = await asyncio.gather(*(serving.aclose() for serving in self._servings), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _register(self, serving: Serving, ownership: BundleOwnership) -> None:
        """Register the broker so that it gets bundles. Its admin port is already bound; requests wait until it answers."""
        ports = {
            "pulsar": serving.broker.port,
            "pulsar+ssl": serving.broker.tls_port,
            "http": serving.admin_port,
            "https": serving.tls_admin_port,
        }
        addresses = {scheme: host_port(self._shown_host, port) for scheme, port in ports.items() if port}
        await ownership.start(addresses.get("http") or addresses["https"], addresses)

    def _leave_draining(self, names: frozenset[str]) -> None:
        self.bookies.set_draining(names)
        for bookie_id in names:
            self._on_bookie_gone(bookie_id)

    def _on_bookie_gone(self, bookie_id: str) -> None:
        for serving in self._servings:
            serving.ledger_client.on_bookie_gone(bookie_id)

    def _on_bookie_back(self, bookie_id: str) -> None:
        for serving in self._servings:
            serving.ledger_client.on_bookie_back(bookie_id)

    async def _start_network_services(self) -> None:
        """Start the admin API, then the bookies' ports; large libraries are imported in threads while clients are served."""
        for serving in self._servings:  # before any answers: FastAPI toggles warnings, for all threads at once
            await serving.build_admin()
        for serving in self._servings:
            await serving.start_admin()
        settings, tls = self.settings, self.settings.bookie_tls
        access = access_of(tls, settings.bookie_access)
        denials = Denials(self._serving.broker.audit)
        if self._serving.tickets is not None:
            tickets = self._serving.tickets
            self.bookies.authorize_reads(ticket_check(tickets.check_upgrading, denials))
            # The broker of this process needs no port.
            access = replace(access, open_without_tls=False, open_reads_without_tls=lambda: not tickets.are_required)
        is_exposed = settings.authentication.enabled and not tls.enabled
        host = settings.bookie_host or ("127.0.0.1" if is_exposed else settings.host)
        await self.bookies.serve(
            host, settings.bookie_port, settings.grpc_server, self._ports, tls=tls, access=access, denials=denials
        )

    def _families(self) -> Iterator[Family]:
        from cepheid_bookie.bookie_metrics import bookie_families

        for bookie in self.bookies.bookies():
            yield from bookie_families(bookie.bookie_id, bookie.statistics())
        if self._recovery is not None:
            yield from self._recovery.families()


def check_metadata_is_there(data_dir: Path) -> None:
    """Check rule 0 without opening the database, which would create one. Raises MetadataMissingError."""
    if not (data_dir / _METADATA / "CURRENT").exists():  # each RocksDB database has this file
        refuse_old_data(data_dir)


def refuse_old_data(data_dir: Path) -> None:
    """Raise MetadataMissingError if bookies have data."""
    if found := bookies_with_data(data_dir):
        message = f"{data_dir / _METADATA} holds no cluster, but there is data of {', '.join(found)} in {data_dir}"
        raise MetadataMissingError(message, path=str(data_dir / _METADATA))
