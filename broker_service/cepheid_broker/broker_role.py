"""A broker as a process: opened, serving, registered, in this order, and closed in reverse.

    metadata, cluster ─► bookie directory ─► protocol port ─► admin API ─► registration: it gets bundles
                                                                                 ready ▲
    aclose: bundles released (topics unloaded, cursors saved) ─► ports closed ─► ledger client ─► metadata

Rule 1: it is registered when it can serve, and no longer when it stops serving.
Rule 2: an outage of metadata (SUSPENDED) stops nothing that is open. A lost session drops every topic: see `bundle_ownership`.
Rule 3: a part that fails for good ends the process with its reason; all acknowledged entries are on the bookies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from cepheid_broker.admin import NO_SHARED_PORTS, SharedAdminPorts
from cepheid_broker.balancing import BundleOrders, HttpPeers, LoadBalancer
from cepheid_broker.broker import Broker
from cepheid_broker.ownership import BrokerLiveness, BundleOwnership, OwnerReach, PeerLinks, token_from
from cepheid_broker.serving import Serving
from cepheid_broker.settings import BrokerRoleSettings
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_metadata import MetadataStore, SessionState, broker_records, require_cluster
from cepheid_metadata.patient_open import open_patiently
from cepheid_metadata.process_reports import ProcessReport, broker_process, broker_reports, report
from cepheid_metadata.store import security_of
from cepheid_metadata.upgrade import NEWEST_STORAGE_FORMAT
from cepheid_ports import Ports, Role, host_port

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

log = logging.getLogger(__name__)

MOST_LOOKUP_WAIT_S = 20.0


class BrokerRole(Role):
    """A broker process; `start` once, `aclose` once. Created inside the running loop."""

    def __init__(self, settings: BrokerRoleSettings, ports: Ports, shared_admin: SharedAdminPorts = NO_SHARED_PORTS) -> None:
        super().__init__()
        settings.authorization.check()
        settings.authorization.check_peers(settings.authentication)
        self.settings = settings
        self._shared_admin = shared_admin
        self._ports = ports
        self._serving: Serving
        self._store: MetadataStore
        self._bookies: BookieDirectory
        self._ownership: BundleOwnership

    def __repr__(self) -> str:
        return f"<BrokerRole {self.broker_id if self._phase == 'serving' else self._phase}>"

    @property
    def broker(self) -> Broker:
        return self._serving.broker

    @property
    def broker_id(self) -> str:
        addresses = self.addresses
        return self.settings.broker_id or addresses.get("http") or addresses["https"]

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses for clients and other brokers, by scheme."""
        settings, host = self.settings, self.settings.shown_host
        ports = {}
        if settings.has_plain_ports:
            ports["pulsar"] = settings.advertised_port or self.broker.port
            ports["http"] = settings.advertised_admin_port or self._serving.admin_port
        if settings.tls.enabled:
            ports["pulsar+ssl"] = settings.advertised_tls_port or self.broker.tls_port
            ports["https"] = settings.advertised_tls_admin_port or self._serving.tls_admin_port
        return {scheme: host_port(host, port) for scheme, port in ports.items()}

    @property
    def service_url(self) -> str:
        return _first_url(self.addresses, "pulsar", "pulsar+ssl")

    @property
    def admin_url(self) -> str:
        return _first_url(self.addresses, "http", "https")

    @property
    def ready(self) -> bool:
        """Whether it is serving and registered; an outage of metadata that has not cost the session does not matter to clients."""
        return (
            self._phase == "serving"
            and self._store.session_state is not SessionState.LOST
            and self.broker_id in self._ownership.directory.brokers
        )

    async def _start(self) -> None:
        settings, ports, opened = self.settings, self._ports, self._opened
        self._store = store = await open_patiently(
            settings.metadata,
            ports,
            session_timeout_s=settings.metadata_session_timeout_s,
            wait_s=settings.metadata_wait_s,
            auth_file=settings.metadata_auth_file,
            private=settings.metadata_private,
            tls=settings.tls.own_tls,
        )
        opened.push_async_callback(store.aclose)
        identity = await require_cluster(store)
        self._bookies = bookies = BookieDirectory(store, ports, settings.ledger, tls=settings.tls.own_tls)
        opened.push_async_callback(bookies.aclose)
        await bookies.start()
        self._tell_too_few_bookies()
        # Longer than a dead broker's session, and below the 30 s after which clients give up a lookup.
        own_tls = settings.tls.own_tls
        links = PeerLinks(
            release=version("cepheid"),
            tls=None if own_tls is None else own_tls.followed(),
            has_certificate=own_tls is not None and own_tls.certificate_file is not None,
            token=token_from(settings.authentication.own_token_file),
        )
        liveness = BrokerLiveness(store, links.hold)
        longest_wait_s = min(2 * settings.metadata_session_timeout_s + 4.0, MOST_LOOKUP_WAIT_S)
        reach = OwnerReach(longest_wait_s, sign_at=liveness.sign_at)
        self._ownership = ownership = BundleOwnership(
            store,
            ports,
            release=version("cepheid"),
            patience_s=settings.registration_patience_s,
            reach=reach,
            liveness=liveness,
            on_failed=self._failure.report,
        )
        opened.push_async_callback(ownership.aclose)
        self._serving = serving = Serving(
            settings,
            identity.name,
            store,
            bookies,
            settings.ledger_config,
            ports,
            ownership=ownership,
            families=self._families,
            cluster_id=identity.cluster_id,
            is_ready=lambda: self.ready,
            shared_admin=self._shared_admin,
            on_failed=self._failure.report,
        )
        opened.push_async_callback(serving.aclose)
        bookies.on_new_incarnation = serving.drop_ledger_ids
        bookies.on_back = serving.ledger_client.on_bookie_back
        bookies.on_gone = serving.ledger_client.on_bookie_gone
        serving.listen()
        await serving.start()
        await serving.start_admin()
        await ownership.start(self.broker_id, self.addresses)
        orders = BundleOrders(store, ownership, self.broker.own_load)
        self.broker.balancer = balancer = LoadBalancer(orders, HttpPeers(ownership, self.broker.peers), settings.balance)
        opened.push_async_callback(balancer.aclose)
        balancer.start()
        await self._report()

    async def _report(self) -> None:
        """Report the formats that this process knows, and how it is secured, for commands that change a whole cluster."""
        registered = await broker_records(self._store).get(self.broker_id)
        if registered is None:
            return  # the session was just lost: this broker counts as one that has not reported
        own = ProcessReport(
            process=broker_process(registered.record),
            storage_format=NEWEST_STORAGE_FORMAT,
            security=self._serving.security_facts(self._store),
            zookeeper_tls=security_of(self._store).encrypted or None,
            revocation_lists=self.settings.tls.looks_up_revoked_clients or None,
        )
        await report(broker_reports(self._store), self.broker_id, own)

    def _tell_too_few_bookies(self) -> None:
        """Warn about too few bookies. Not an error: they may start after brokers, and old topics are read without new ledgers."""
        writable, wanted = len(self._bookies.writable()), self.settings.ensemble_size
        if writable < wanted:
            hint = "repair or start bookies, or use a smaller ensemble for brokers: --ensemble-size, --write-quorum, --ack-quorum"
            facts = {"writable": writable, "ensemble_size": wanted, "error": "; ".join(self._bookies.problems())}
            log.warning("broker.too_few_bookies", extra={**facts, "hint": hint})

    def _families(self) -> Iterator[Family]:
        from cepheid_ports.prometheus import gauge

        connected = self._store.session_state is SessionState.CONNECTED
        yield gauge("cepheid_broker_ready", "1: serving and registered.", self.ready)
        yield gauge("cepheid_metadata_connected", "1: the metadata store answers.", connected)


def _first_url(addresses: Mapping[str, str], plain: str, over_tls: str) -> str:
    return f"{plain}://{addresses[plain]}" if plain in addresses else f"{over_tls}://{addresses[over_tls]}"
