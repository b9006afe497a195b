"""Everything that serves topics, in a standalone process as in a broker's own: ledger client, managed ledgers, broker, admin API.

    __init__ (all parts) ─► listen: admin port taken ─► start: id counter checked, protocol port open ─► start_admin
    aclose: broker ─► admin API ─► managed ledgers ─► ledger client

Rule: the protocol port opens before the web framework is imported, which takes longer than everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cepheid_broker.admin import NO_SHARED_PORTS, AdminContext, AdminServer, SharedAdminPorts
from cepheid_broker.broker import Broker
from cepheid_broker.broker_segments import broker_segments
from cepheid_broker.ownership import Ownership, PeerCalls, token_from
from cepheid_broker.revocation_follower import RevocationFollower
from cepheid_broker.settings import BrokerSettings
from cepheid_ledger import BookieConnections, BookieStates, LedgerClient, RackAwarePlacement
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgers, TailCache
from cepheid_metadata import LedgerIds, MetadataStore, SessionState, ledger_records
from cepheid_metadata.process_reports import SecurityFacts
from cepheid_metadata.store import security_of
from cepheid_metadata.ticket_keyring import TicketKeyring
from cepheid_ports import Ports, TaskOwner, rack_distance
from cepheid_recovery import AuditFollower
from cepheid_security import Principal, SecurityConfigurationError, ServerTls
from cepheid_security.audit import open_audit_log
from cepheid_security.authenticator import Authenticator
from cepheid_security.certificate_revocations import FOLLOW_S, RevokedCertificates, revoked_certificates
from cepheid_tiered.bucket import LazyBucket

if TYPE_CHECKING:
    from cepheid_ports.prometheus import Family

log = logging.getLogger(__name__)


class Bookies(BookieConnections, BookieStates, Protocol):
    """Connections to bookies, and their states."""


class Serving:
    """Serves topics; created inside the running loop, on an open store and bookies. Call `aclose` once, even after a failed
    start."""

    def __init__(
        self,
        settings: BrokerSettings,
        cluster: str,
        store: MetadataStore,
        bookies: Bookies,
        ledger_config: ManagedLedgerConfig,
        ports: Ports,
        *,
        ownership: Ownership | None = None,
        families: Callable[[], Iterator[Family]],
        is_ready: Callable[[], bool],
        cluster_id: str = "",
        data_dir: Path | None = None,
        held_ledgers: Callable[[str, int], dict[str, Any] | None] = lambda _bookie, _above: None,
        shared_admin: SharedAdminPorts = NO_SHARED_PORTS,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        opened = self._opened = AsyncExitStack()
        self._settings = settings
        self._bookies, self._store = bookies, store
        self._more_families = families
        self._ledger_ids = LedgerIds(store)
        opened.callback(store.subscribe(self._on_session))
        self.placement = placement = RackAwarePlacement(
            bookies.writable,
            ports.random,
            settings.ledger.quarantine_s,
            settings.ledger.quarantine_max_s,
            bookies.problems,
            racks=bookies.racks,
            free_bytes=bookies.free_bytes,
            strict=settings.ledger.strict_racks,
        )
        self.ledger_client = LedgerClient(
            bookies,
            ledger_records(store),
            self._ledger_ids,
            placement,
            settings.ledger,
            ports,
            distance_of=distance_from(settings.rack, bookies),
        )
        opened.push_async_callback(self.ledger_client.aclose)
        self._audit = AuditFollower(store)
        opened.push_async_callback(self._audit.aclose)
        self._tail_cache = TailCache(settings.tail_cache_bytes)
        self._segments = segments = broker_segments(
            store, settings.tiered, cluster_id, ports, settings.managed_ledger.offload_uploads
        )
        if segments is not None:
            opened.push_async_callback(segments.aclose)
        bucket = None if segments is None else LazyBucket(lambda: ports.new_worker("manifests", 1))
        if bucket is not None:
            opened.push_async_callback(bucket.aclose)
        self.managed_ledgers = ManagedLedgers(
            self.ledger_client, store, self._tail_cache, settings.managed_ledger, ports, bookies=bookies, segments=segments
        )
        opened.push_async_callback(self.managed_ledgers.aclose)
        self._tasks = TaskOwner("serving")
        opened.push_async_callback(self._tasks.aclose)
        audit = open_audit_log(settings.audit, data_dir, settings.authorization.enabled, ports, opened)
        certificates = settings.tls.client_certificates
        tls = _server_tls(settings, certificates)
        # Probes have no certificate: on the admin port, `required` is the matter of the application (CertificateRequired).
        admin_tls = _server_tls(settings, "optional" if certificates == "required" else certificates)
        self._tls = [each for each in (tls, admin_tls) if each is not None]
        self._revoked = None if tls is None else tls.revoked
        self._authenticator = authenticator = self._new_authenticator(ports)
        own_tls = settings.tls.own_tls
        self.broker = Broker(
            settings,
            cluster,
            store,
            self.managed_ledgers,
            ports,
            ledger_config=ledger_config,
            ownership=ownership,
            tls=tls,
            authenticator=authenticator,
            peers=PeerCalls(
                settings.request_timeout_s,
                tls=None if own_tls is None else own_tls.followed(),
                token=token_from(settings.authentication.own_token_file),
            ),
            bucket=bucket,
            audit=audit,
        )
        self._tickets: TicketKeyring | None = None
        if settings.signs_tickets:
            self._tickets = TicketKeyring(store, ports, life_s=settings.read_tickets.life_s)
            opened.push_async_callback(self._tickets.aclose)
        context = AdminContext(
            self.broker,
            settings.admin,
            families=(self._families,),
            is_ready=is_ready,
            bookies=bookies,
            tickets=self._tickets,
            problems=self.problems,
            held_ledgers=held_ledgers,
        )
        self._admin = AdminServer(
            context,
            settings.host,
            settings.admin_port,
            tls_port=settings.tls.admin_port,
            tls=admin_tls,
            has_plain_port=settings.has_plain_ports,
            authenticator=authenticator,
            shared=shared_admin,
            on_failed=on_failed,
        )
        self.broker.admin_port = lambda: self._admin.port
        self.broker.admin_tls_port = lambda: self._admin.tls_port
        opened.push_async_callback(self._admin.aclose)

    def __repr__(self) -> str:
        return f"<Serving {self.broker!r}, {self._admin!r}>"

    @property
    def tickets(self) -> TicketKeyring | None:
        """The keys of read tickets; None: plans have none."""
        return self._tickets

    @property
    def admin_port(self) -> int:
        """Admin port without TLS; 0: not open."""
        return self._admin.port

    @property
    def tls_admin_port(self) -> int:
        """Admin port with TLS; 0: not open."""
        return self._admin.tls_port

    def _new_authenticator(self, ports: Ports) -> Authenticator | None:
        """Raises SecurityConfigurationError."""
        settings, authorization = self._settings.authentication, self._settings.authorization
        if not authorization.enabled and (authorization.super_user_roles or authorization.proxy_roles):
            raise SecurityConfigurationError(
                "authorization is set up, but authorization.enabled is false: every client may do everything"
            )
        authorization.check()
        if not settings.enabled:
            if authorization.enabled:
                raise SecurityConfigurationError(
                    "authorization.enabled needs authentication.methods: without one all clients are alike"
                )
            keys = (*settings.secret_keys, *settings.public_keys, *settings.oidc.issuers)
            if settings.anonymous_role is not None or keys or settings.passwords_file:
                raise SecurityConfigurationError("authentication is set up, but authentication.methods names no method")
            return None
        if "tls" in settings.methods and (not self._settings.tls.enabled or self._settings.tls.client_certificates == "none"):
            raise SecurityConfigurationError(
                "the method tls needs certificates of clients: "
                "set tls.certificate_file, tls.client_ca_file and tls.client_certificates"
            )
        if self._settings.has_plain_ports and self._settings.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning(
                "authentication.without_tls",
                extra={"host": self._settings.host, "hint": "tokens and passwords cross the network in the clear: set up tls"},
            )
        if not authorization.enabled:
            log.warning(
                "authorization.off", extra={"hint": "every client with credentials may do everything: set up authorization"}
            )
        elif not authorization.enforced:
            hint = "what would be denied is logged as authorization.would_deny, and done: `cepheid secure enable` goes on from here"
            log.warning("authorization.not_enforced", extra={"hint": hint})
        worker = ports.new_worker("passwords", 1)
        self._opened.push_async_callback(worker.aclose)

        async def run(check: Callable[[], Principal]) -> Principal:
            return await worker.run(check)

        authenticator = Authenticator(settings, ports.wall_ms, run)
        self._opened.push_async_callback(authenticator.aclose)
        return authenticator

    async def _reload(self, what: str, every_s: float, reloads: Sequence[Callable[[], bool]]) -> None:
        """New files are used for new connections. Files that cannot be used leave the old ones in use, and are named once."""
        named = ""
        while True:
            await asyncio.sleep(every_s)
            try:
                for reload in reloads:
                    if reload():
                        log.info(f"{what}.reloaded")
                named = ""
            except SecurityConfigurationError as error:
                if str(error) != named:
                    log.warning(f"{what}.not_reloaded", extra={"error": str(error), "hint": "the old files stay in use"})
                named = str(error)

    async def _follow_revoked_certificates(self, revoked: RevokedCertificates) -> None:
        """Close the connections of clients whose certificate a new revocation list names."""
        version = revoked.version
        while True:
            await revoked.follow_in_thread(min(self._settings.tls.reload_s, FOLLOW_S))
            if revoked.version != version:  # a handshake may have read it first
                version = revoked.version
                self.broker.end_revoked()

    def problems(self) -> list[str]:
        """Return sentences for people about what is wrong while clients are served."""
        state = self._store.session_state
        away = [] if state is SessionState.CONNECTED else [f"the session with the metadata store is {state.value}"]
        ledgers = _lack_of_copies(self.managed_ledgers.under_replicated().ledgers)
        issuers = [] if self._authenticator is None else self._authenticator.problems()
        keys = [] if self._tickets is None or self._tickets.problem is None else [self._tickets.problem]
        lists = [] if self._revoked is None else self._revoked.problems()
        return [*away, *self._bookies.problems(), *ledgers, *self._audit.problems(), *issuers, *keys, *lists]

    def security_facts(self, store: MetadataStore) -> SecurityFacts:
        """Return how this process is secured."""
        settings, stored = self._settings, security_of(store)
        return SecurityFacts(
            zookeeper_user=stored.user,
            zookeeper_private=stored.private,
            tls=settings.tls.enabled,
            plain=settings.has_plain_ports,
            authentication=settings.authentication.enabled,
            anonymous=settings.authentication.enabled and settings.authentication.anonymous_role is not None,
            authorization=settings.authorization.enabled,
            enforced=settings.authorization.enabled and settings.authorization.enforced,
        )

    def listen(self) -> None:
        """Bind the admin port; requests wait in its backlog. Raises PortInUseError."""
        self._admin.listen()

    def _on_session(self, state: SessionState) -> None:
        """Drop the block of ledger ids with the session: the metadata may have been restored from a backup meanwhile."""
        if state is SessionState.LOST:
            self._ledger_ids.drop_block()

    def drop_ledger_ids(self) -> None:
        """Make all new ledgers use ids that no bookie knows."""
        self._ledger_ids.drop_block()

    async def start(self) -> None:
        """Start serving; return when clients are served. Raises PortInUseError, LedgerIdsRolledBackError and the store's errors."""
        await self._ledger_ids.check()
        if self._tls:
            reloads = [each.reload_if_changed for each in self._tls]
            self._tasks.start(self._reload("tls", self._settings.tls.reload_s, reloads), name="reload-certificates")
        if self._revoked is not None:
            self._tasks.start(self._follow_revoked_certificates(self._revoked), name="revoked-certificates")
        if self._authenticator is not None:
            reload_s = self._settings.authentication.reload_s
            self._tasks.start(self._reload("keys", reload_s, [self._authenticator.reload_if_changed]), name="reload-keys")
            await RevocationFollower(self._store, self._tasks, self._authenticator, self.broker.end_revoked).start()
        if self._tickets is not None:
            await self._tickets.start(rotate_s=self._settings.read_tickets.rotate_s)
            if not self._tickets.are_required:
                hint = "plans have the keys of ledgers until every process runs this release: then cepheid cluster finish-upgrade"
                log.warning("plans.master_keys_shown", extra={"hint": hint})
        await self.broker.start()
        self._opened.push_async_callback(self.broker.aclose)
        self._audit.start()

    async def build_admin(self) -> None:
        """Do the slow part of `start_admin` ahead."""
        await self._admin.build()

    async def start_admin(self) -> None:
        """Return when the admin API answers; large libraries are imported in a thread while clients are served."""
        await self._admin.start()

    async def aclose(self) -> None:
        await self._opened.aclose()

    def _families(self) -> Iterator[Family]:
        """Yield the metrics of parts other than the broker."""
        from cepheid_broker.admin.broker_metrics import (
            admin_server_families,
            audit_families,
            bookie_state_families,
            ensemble_change_families,
            ledger_client_families,
            segment_families,
            tail_cache_families,
            under_replicated_families,
        )

        yield from admin_server_families(self._admin.statistics())
        yield from audit_families(self.broker.audit.figures())
        yield from tail_cache_families(self._tail_cache.statistics())
        yield from ledger_client_families(self.ledger_client.statistics())
        yield from ensemble_change_families(self.ledger_client.ensemble_change_statistics())
        yield from bookie_state_families(self._bookies)
        if self._segments is not None:
            yield from segment_families(self._segments.statistics())
        yield from under_replicated_families(self.managed_ledgers.under_replicated())
        yield from self._audit.families()
        yield from self._more_families()


def _server_tls(settings: BrokerSettings, client_certificates: Literal["none", "optional", "required"]) -> ServerTls | None:
    """Raises SecurityConfigurationError."""
    tls = settings.tls
    if tls.crl is not None and client_certificates == "none" and tls.ca_file is None:
        raise SecurityConfigurationError(
            "tls.crl is set, and no certificates are looked up in it: set tls.client_ca_file with tls.client_certificates, or "
            "tls.ca_file"
        )
    if (tls.certificate_file is None) != (tls.key_file is None):
        raise SecurityConfigurationError("tls.certificate_file and tls.key_file are set together, or neither of them")
    if tls.certificate_file is None or tls.key_file is None:
        return None
    if tls.crl is not None and tls.ca_file is not None:
        revoked_certificates(tls.crl, tls.ca_file)  # so that lists of the CAs of servers are not reported as those of unknown CAs
    return ServerTls(
        tls.certificate_file,
        tls.key_file,
        client_ca_file=tls.client_ca_file,
        client_certificates=client_certificates,
        minimum_version=tls.minimum_version,
        crl=tls.crl if client_certificates != "none" else None,
    )


def distance_from(rack: str | None, bookies: BookieStates) -> Callable[[str], int] | None:
    """Return a function for the distance of a bookie from this process; None if the process has no rack."""
    if rack is None:
        return None
    return lambda bookie_id: rack_distance(rack, bookies.racks().get(bookie_id))


def _lack_of_copies(ledgers: int) -> list[str]:
    if not ledgers:
        return []
    lack = "1 ledger of topics that are open here lacks" if ledgers == 1 else f"{ledgers} ledgers of topics that are open here lack"
    return [f"{lack} a copy: bring the bookies back; `cepheid ledgers verify --all` names the ledgers"]
