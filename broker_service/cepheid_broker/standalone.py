"""A whole cluster in one process: embedded metadata, bookies, ledger client, broker, admin API. Built here, started in order.

    metadata ─► cluster identity, first objects ─► bookies ─► ledger client ─► broker (protocol port) ─► bookie ports, admin API
                                                                                  ready ▲

Rule 1: the protocol port opens before gRPC and the web framework are imported: those take longer than everything else.
Rule 2: a part that fails for good ends the process with its reason; a start that fails closes what it had opened, in reverse.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt, PositiveInt

from cepheid_broker.broker import Broker
from cepheid_broker.first_objects import create_first_objects
from cepheid_broker.local_bookies import LocalBookies
from cepheid_broker.serving import Serving, ServingSettings
from cepheid_managed_ledger import ManagedLedgerConfig
from cepheid_metadata import found_cluster
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports, Role, TaskOwner, host_port

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

log = logging.getLogger(__name__)

CLUSTER = "standalone"


class StandaloneSettings(ServingSettings):
    """Settings of `cepheid standalone`."""

    data_dir: Path = Field(Path("data"), description="Where everything is kept. Made when it does not exist.")
    bookie_port: NonNegativeInt = Field(
        0,
        le=65535,
        description="gRPC port of the first bookie, the others follow. 0: any (readers ask the plan service).",
    )
    bookies: PositiveInt = Field(1, le=9, description="Storage nodes, each with its directory. Three or more: E=3 Qw=3 Qa=2.")

    @property
    def ledger_config(self) -> ManagedLedgerConfig:
        """Quorums by the number of bookies (design: 1/1/1, from three on 3/3/2)."""
        if self.bookies >= 3:
            return ManagedLedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)
        return ManagedLedgerConfig(ensemble_size=self.bookies, write_quorum=self.bookies, ack_quorum=self.bookies)


class Standalone(Role):
    """`start` once, `aclose` once."""

    def __init__(self, settings: StandaloneSettings, ports: Ports) -> None:
        super().__init__()
        self.settings = settings
        self.bookies: LocalBookies
        self._ports = ports
        self._tasks = TaskOwner("standalone", self._failure.report)
        self._serving: Serving

    def __repr__(self) -> str:
        return f"<Standalone {self.settings.data_dir}>"

    @property
    def broker(self) -> Broker:
        return self._serving.broker

    @property
    def service_url(self) -> str:
        return f"pulsar://{host_port(self._shown_host, self.broker.port)}"

    @property
    def admin_url(self) -> str:
        return f"http://{host_port(self._shown_host, self._serving.admin_port)}"

    @property
    def _shown_host(self) -> str:
        return self.settings.advertised_host or self.settings.host

    async def _start(self) -> None:
        """Returns when clients are served; the admin API follows within a second."""
        settings, ports, opened = self.settings, self._ports, self._opened
        store = await RocksStore.open(settings.data_dir / "metadata", ports)
        opened.push_async_callback(store.aclose)
        identity = await found_cluster(store, CLUSTER, ports)
        self.bookies = bookies = await LocalBookies.open(
            settings.data_dir, settings.bookies, identity.cluster_id, store, ports, self._failure.report
        )
        opened.push_async_callback(bookies.aclose)
        self._serving = Serving(
            settings,
            settings.of_broker(CLUSTER),
            store,
            bookies,
            bookies.writable,
            settings.ledger_config,
            ports,
            families=self._families,
            is_ready=lambda: self._phase == "serving",
            on_failed=self._failure.report,
        )
        opened.push_async_callback(self._serving.aclose)
        self._serving.listen()
        # Before the port opens: a client that finds no namespace gives up. And again, in case the system chose the port.
        configured = f"pulsar://{host_port(self._shown_host, settings.port)}"
        await create_first_objects(store, CLUSTER, admin_url=self.admin_url, service_url=configured)
        await self._serving.start()
        await create_first_objects(store, CLUSTER, admin_url=self.admin_url, service_url=self.service_url)
        opened.push_async_callback(self._tasks.aclose)
        self._tasks.start(self._start_network_services(), name="network-services")

    async def _start_network_services(self) -> None:
        """The admin API, then the bookies' ports; large libraries are imported in threads, and clients are served meanwhile."""
        await self._serving.start_admin()
        await self.bookies.serve(self.settings.host, self.settings.bookie_port, self._ports)

    def _families(self) -> Iterator[Family]:
        from cepheid_bookie.bookie_metrics import bookie_families

        for bookie in self.bookies.bookies():
            yield from bookie_families(bookie.settings.bookie_id, bookie.statistics())
