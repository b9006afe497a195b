"""A storage node as a process: it opens, serves and registers, in this order; it stops in the reverse order.

    health page ─► metadata, cluster ─► directories, replay ─► gRPC port ─► registration ─► garbage collection
                            after a restore of metadata: report ▲                ready ▲
Rule 1: it is registered only while it can answer.
Rule 2: a full bookie, or one with a slow disk, is registered as read-only; its data can be read, fenced and recovered as before.
One whose disk hangs is not registered, so that its data is repaired elsewhere if that lasts.
Rule 3: an outage of metadata stops nothing: admission does not need it. After a lost session the bookie registers again.
Rule 4: a permanent failure ends the process with its reason; a restart replays what is really on the disk.
Rule 5: free space is reported in the registration where a setting asks for it, but only when it has changed by more than a
twentieth of the disk: every broker reads the registrations of all bookies.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from cepheid_bookie.access import ticket_check
from cepheid_bookie.bookie import Bookie
from cepheid_bookie.bookie_metrics import bookie_families, denial_families
from cepheid_bookie.bookie_role_settings import BookieRoleSettings
from cepheid_bookie.cookie import BookieIdentity
from cepheid_bookie.denials import Caller, Denials
from cepheid_bookie.disk import RealDisk
from cepheid_bookie.disk_space import check_disk_size
from cepheid_bookie.errors import DirectoryUnusableError, LedgersNotListedError
from cepheid_bookie.garbage_collection import GarbageCollector
from cepheid_bookie.health_server import HealthServer, Page, Request
from cepheid_bookie.held_ledgers import held_ledgers
from cepheid_bookie.metadata_records import (
    MetadataCookies,
    MetadataDamage,
    MetadataLedgers,
    journal_format,
    report_bookie,
)
from cepheid_bookie.scans import AuthorizeRead, accept_every_ticket
from cepheid_bookie.secured_ports import access_of, health_context, secured_ports
from cepheid_metadata import (
    BookieRegistration,
    MetadataStore,
    Registration,
    SessionState,
    available_bookies,
    readonly_bookies,
    require_cluster,
)
from cepheid_metadata.patient_open import open_patiently
from cepheid_metadata.process_reports import ProcessReport, SecurityFacts, bookie_reports, report
from cepheid_metadata.store import security_of
from cepheid_metadata.ticket_keyring import TicketKeyring
from cepheid_metadata.upgrade import NEWEST_STORAGE_FORMAT, report_known_format
from cepheid_ports import Ports, Role, TaskOwner, host_port
from cepheid_ports.process_metrics import process_families
from cepheid_ports.prometheus import CONTENT_TYPE, Family, encode, gauge
from cepheid_rpc import TLS_PROTOCOL
from cepheid_security.audit import open_audit_log

if TYPE_CHECKING:
    from cepheid_bookie.grpc_server import BookieServer

log = logging.getLogger(__name__)

SESSIONS_OF_PATIENCE = 2  # how long to wait for another process's registration, in session timeouts
_WRITABLE, _READONLY = 0, 1  # places of registrations
_SPACE_INTERVAL_S = 60.0
_SPACE_PARTS = 20  # a change of free space by more than this part of the disk is reported


class BookieRole(Role):
    """A bookie process: `start` once, `aclose` once. Create it inside the running loop.

    `accept_empty_disk` is an operator's confirmation for this one start, not a setting, which would also accept every later loss.
    """

    def __init__(
        self,
        settings: BookieRoleSettings,
        ports: Ports,
        *,
        accept_empty_disk: bool = False,
        authorize_read: AuthorizeRead = accept_every_ticket,
    ) -> None:
        super().__init__()
        self._authorize_read = authorize_read
        self.settings = settings
        self._client_tls = settings.tls.client_tls()  # a half-configured TLS stops the start here
        self._accept_empty_disk = accept_empty_disk
        self.bookie_id = settings.name
        self.bookie: Bookie
        self._ports = ports
        self._store: MetadataStore | None = None
        self._registration: Registration[BookieRegistration] | None = None
        self._tasks = TaskOwner(f"bookie {self.bookie_id}", self._failure.report)
        self._pages = {"/health": self._health_page, "/ready": self._ready_page, "/metrics": self._metrics_page}
        self._queried_pages = {"/ledgers": self._ledgers_page}
        self._port_access = access_of(settings.tls, settings.access)
        self._denials = Denials()
        self._health = HealthServer(
            settings.http_host or settings.host,
            settings.http_port,
            self._pages,
            self._queried_pages,
            guard=self._refused_page,
            tls=health_context(settings.tls),
            certificate_role=self._port_access.certificate_role,
            on_refused=self._on_health_handshake_refused,
        )
        self._record: BookieRegistration
        self._server: BookieServer

    def __repr__(self) -> str:
        return f"<BookieRole {self.bookie_id}: {self._phase}, {self._registration!r}>"

    @property
    def address(self) -> str:
        """The address at which brokers reach the bookie."""
        return host_port(self.settings.shown_host, self.settings.advertised_port or self._server.port)

    @property
    def addresses(self) -> dict[str, str]:
        """Its addresses, by protocol: gRPC without TLS, with TLS, and the health page."""
        tls, grpc = self.settings.tls, {}
        if not tls.enabled:
            grpc["grpc"] = self.address
        else:
            grpc[TLS_PROTOCOL] = self.address
            if tls.has_plain_port:
                assert self._server.plain_port is not None, "the server was given a port without TLS"
                grpc["grpc"] = host_port(self.settings.shown_host, self._server.plain_port)
            if tls.port is not None:  # the advertised address is that of clients without TLS, as before
                grpc[TLS_PROTOCOL] = host_port(self.settings.shown_host, self._server.port)
                grpc["grpc"] = host_port(
                    self.settings.shown_host, self.settings.advertised_port or self._server.plain_port or self.settings.port
                )
        return {**grpc, self._health.scheme: host_port(self.settings.shown_http_host, self._health.port)}

    @property
    def http_url(self) -> str:
        return f"{self._health.scheme}://{host_port(self.settings.shown_http_host, self._health.port)}"

    @property
    def ready(self) -> bool:
        """Whether it serves and is registered. An outage of metadata that has not ended the session changes nothing."""
        serves = self._phase == "serving" and self.bookie.failure is None
        return serves and self._registration is not None and self._registration.registered

    @property
    def read_only_reason(self) -> str:
        """Why the bookie accepts no new entries; empty while it does, or has not opened yet."""
        return self.bookie.read_only_reason if self._phase == "serving" else ""

    async def _start(self) -> None:
        settings, ports, opened = self.settings, self._ports, self._opened
        await self._health.start()
        opened.push_async_callback(self._health.aclose)
        self._store = store = await open_patiently(
            settings.metadata,
            ports,
            session_timeout_s=settings.metadata_session_timeout_s,
            wait_s=settings.metadata_wait_s,
            auth_file=settings.metadata_auth_file,
            private=settings.metadata_private,
            tls=self._client_tls,
        )
        opened.push_async_callback(store.aclose)
        identity = await require_cluster(store)
        importing = asyncio.ensure_future(self._import_grpc())  # takes as long as a replay, so both run at once
        try:
            self.bookie = await self._open_bookie(store, identity.cluster_id)
            opened.push_async_callback(self.bookie.aclose)
            self.bookie.on_failed = self._failure.report
            self._denials.audit = open_audit_log(settings.audit, settings.data_dir, settings.tls.enabled, ports, opened)
            self.bookie.authorize_reads(await self._ticket_check(store))
        finally:
            await importing
        await report_bookie(store, self.bookie, ports)
        await self._serve()
        self._record = record = self._new_record()
        await report_known_format(store, self.bookie_id, record.process or "")
        await report(bookie_reports(store), self.bookie_id, self._report_of(record.process or ""))
        self._registration = self._new_registration(store, record)
        opened.push_async_callback(self._registration.aclose)  # closed first, so that no more clients are sent here
        self.bookie.on_writable = self._on_writable
        await self._registration.start(_WRITABLE if self.bookie.writable else _READONLY)
        self._on_writable(self.bookie.writable)
        if settings.report_free_space:
            opened.push_async_callback(self._tasks.aclose)
            self._tasks.start(self._report_free_space(self._registration, record), name="report free space")

    async def _ticket_check(self, store: MetadataStore) -> AuthorizeRead:
        """Return the check of scans' tickets: tickets are required if only ports with TLS are open."""
        tls = self.settings.tls
        if not tls.enabled or tls.has_plain_port:
            return self._authorize_read
        keyring = TicketKeyring(store, self._ports)
        self._opened.push_async_callback(keyring.aclose)
        await keyring.start()
        return ticket_check(keyring.check, self._denials)

    async def _open_bookie(self, store: MetadataStore, cluster_id: str) -> Bookie:
        from cepheid_bookie.rocks_index import RocksBlockIndex

        settings = self.settings
        data_dir, journal_dir = settings.data_dir, settings.journal_dir
        if journal_dir is not None and journal_dir.resolve() == data_dir.resolve():
            journal_dir = None  # same as unset
        directories: dict[str, tuple[str, ...]] = {"data": (str(data_dir),)}
        if journal_dir is not None:
            directories["journal"] = (str(journal_dir),)
        for setting, (directory,) in directories.items():
            try:
                RealDisk(Path(directory)).mkdir("")
            except OSError as error:
                raise DirectoryUnusableError(f"{directory} cannot be the {setting} directory: {error}") from None
        data = RealDisk(data_dir)
        journal = RealDisk(journal_dir) if journal_dir is not None else None
        check_disk_size(journal or data, data, settings.storage)
        new_segments = await journal_format(store)
        return await Bookie.open(
            BookieIdentity(self.bookie_id, cluster_id),
            settings.storage,
            data,
            RocksBlockIndex(data_dir / "index"),
            self._ports,
            journal_disk=journal,
            cookies=MetadataCookies(store, directories),
            accept_empty_disk=self._accept_empty_disk,
            journal_format=new_segments,
        )

    async def _import_grpc(self) -> None:
        importer = self._ports.new_worker("grpc-import", 1)
        try:
            await importer.run(lambda: importlib.import_module("cepheid_bookie.grpc_server"))
        finally:
            await importer.aclose()

    async def _serve(self) -> None:
        from cepheid_bookie.grpc_server import BookieServer
        from cepheid_bookie.scan_server import ScanServer

        collector = GarbageCollector(self.bookie, MetadataLedgers(self._opened_store, self._ports))
        collector.start()
        self.bookie.start_scrubber(MetadataDamage(self._opened_store, self.bookie_id, self._ports))
        self._opened.push_async_callback(collector.aclose)
        settings = self.settings
        ports = secured_ports(settings.tls, self._port_access)
        scans = ScanServer(
            self.bookie,
            settings.host,
            settings.scan_port,
            self._ports,
            tls=ports.scan_context,
            certificate_role=self._port_access.certificate_role,
            denials=self._denials,
        )
        self._server = BookieServer(
            self.bookie,
            settings.host,
            settings.port if settings.tls.port is None else settings.tls.port,
            settings.grpc_server,
            scans=scans,
            credentials=ports.credentials,
            revoked=ports.revoked,
            plain_port=settings.tls.plain_port if settings.tls.port is None else settings.port,
            access=ports.access,
            denials=self._denials,
            wall_ms=self._ports.wall_ms,
        )
        await self._server.start()
        self._opened.push_async_callback(self._server.aclose)
        if settings.tls.has_plain_port:
            name = "plain_port" if settings.tls.port is None else "port"
            hint = f"everybody may read and write there; remove tls.{name} when all brokers have certificates"
            log.warning("bookie.plain_port_open", extra={"port": self._server.plain_port, "hint": hint})

    @property
    def _opened_store(self) -> MetadataStore:
        assert self._store is not None, "the store is opened first"
        return self._store

    def _new_record(self) -> BookieRegistration:
        record = BookieRegistration(
            bookie_id=self.bookie_id,
            incarnation=self.bookie.cookie.registered_as,
            addresses=self.addresses,
            rack=self.settings.rack,
            process=f"{self._ports.random.getrandbits(64):016x}",
        )
        if self.settings.report_free_space:
            total_bytes = RealDisk(self.settings.data_dir).size_bytes()
            record = record.replace(free_bytes=self.bookie.look_at_free_space(), total_bytes=total_bytes)
        return record

    def _report_of(self, process: str) -> ProcessReport:
        tls, stored = self.settings.tls, security_of(self._opened_store)
        security = SecurityFacts(
            zookeeper_user=stored.user,
            zookeeper_private=stored.private,
            tls=tls.enabled,
            plain=tls.has_plain_port,
            authentication=tls.enabled and not tls.has_plain_port,
            authorization=tls.enabled and not tls.has_plain_port,
            enforced=tls.enabled and not tls.has_plain_port,
        )
        return ProcessReport(
            process=process,
            storage_format=NEWEST_STORAGE_FORMAT,
            security=security,
            zookeeper_tls=stored.encrypted or None,
            revocation_lists=(tls.enabled and tls.crl is not None) or None,
        )

    def _new_registration(self, store: MetadataStore, record: BookieRegistration) -> Registration[BookieRegistration]:
        def is_past(found: BookieRegistration) -> bool:
            """Return whether the process that wrote this has ended:

            this one holds its directory's lock or listens at its address.
            """
            # If two ports are used, one of them may be any free port, which differs from start to start.
            own = [(name, record.addresses[name]) for name in ("grpc", TLS_PROTOCOL) if name in record.addresses]
            return found.incarnation == record.incarnation and any(found.addresses.get(name) == place for name, place in own)

        return Registration(
            store,
            self.bookie_id,
            (available_bookies(store), readonly_bookies(store)),
            record,
            is_past=is_past,
            patience_s=SESSIONS_OF_PATIENCE * self.settings.metadata_session_timeout_s,
            on_failed=self._failure.report,
        )

    async def _report_free_space(self, registration: Registration[BookieRegistration], record: BookieRegistration) -> None:
        """Keep the reported free space accurate within 5 % of the disk (rule 5)."""
        while True:
            await asyncio.sleep(_SPACE_INTERVAL_S)
            free_bytes = self.bookie.look_at_free_space()
            if is_worth_reporting(record, free_bytes):
                record = record.replace(free_bytes=free_bytes)
                registration.update(record)

    def _on_writable(self, writable: bool) -> None:
        if self._registration is not None:
            readonly = None if self.bookie.is_unfit else _READONLY
            self._registration.move(_WRITABLE if writable else readonly)

    # pages

    def _refused_page(self, request: Request) -> Page | None:
        """Refuse the list of ledgers to roles that may not read. Probes and metrics are open to every client of the port."""
        is_encrypted = self._health.scheme == "https"
        if self._port_access.refusal(request.path, request.role, is_encrypted=is_encrypted) is None:
            return None
        reason = "the ids of ledgers are for the roles in access.cluster_roles and access.reader_roles, by certificate"
        self._denials.role(Caller(request.role, request.peer, f"GET {request.path}"), "", reason)
        return Page(f"role {request.role!r}: {reason}\n", HTTPStatus.FORBIDDEN)

    def _on_health_handshake_refused(self, peer: str, reason: str) -> None:
        self._denials.handshake(peer, f"health port {self._health.port}", reason, logged=True)

    def _health_page(self) -> Page:
        """Return the health page. It denies health only where a restart helps."""
        if self._phase != "starting" and self.bookie.failure is not None:
            return Page(f"failed: {self.bookie.failure}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        reason = f", {self.read_only_reason}" if self._phase == "serving" and self.bookie.is_unfit else ""
        return Page(f"{self._phase}{reason}\n")  # a restart does not help if the disk hangs

    def _ready_page(self) -> Page:
        session = "none" if self._store is None else self._store.session_state.value
        registered = self._registration is not None and self._registration.registered
        text = f"{self._phase}, metadata session {session}, {'registered' if registered else 'not registered'}"
        text += f", read-only: {reason}" if (reason := self.read_only_reason) else ""
        if self._phase == "serving" and (warning := self.bookie.space_warning):
            text += f", warning: {warning}"
        return Page(f"{text}\n", HTTPStatus.OK if self.ready else HTTPStatus.SERVICE_UNAVAILABLE)

    def _ledgers_page(self, query: Mapping[str, str]) -> Page:
        """Return the ids of the ledgers held here above the parameter `above`, as JSON."""
        if self._phase == "starting":
            return Page("the bookie is starting; ask again\n", HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            above = int(query.get("above", "-1"))
        except ValueError:
            return Page(f"above is not a number, got {query['above'][:100]!r}\n", HTTPStatus.BAD_REQUEST)
        try:
            return Page(json.dumps(held_ledgers(self.bookie, above)), content_type="application/json")
        except LedgersNotListedError as error:
            return Page(f"{error}; {error.hint}\n", HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics_page(self) -> Page:
        return Page(encode(self._families()), content_type=CONTENT_TYPE)

    def _families(self) -> Iterator[Family]:
        yield from process_families()
        yield from denial_families(self._denials)
        yield gauge("cepheid_bookie_ready", "1: serving and registered.", self.ready, bookie=self.bookie_id)
        if self._store is not None:
            connected = self._store.session_state is SessionState.CONNECTED
            yield gauge("cepheid_metadata_connected", "1: the metadata store answers.", connected)
        if self._phase != "starting":
            yield from bookie_families(self.bookie_id, self.bookie.statistics())


def is_worth_reporting(reported: BookieRegistration, free_bytes: int) -> bool:
    """Return whether free space has changed by more than 5 % of the disk since it was reported."""
    assert reported.free_bytes is not None, "a bookie that reports its free space did so when it registered"
    return _SPACE_PARTS * abs(free_bytes - reported.free_bytes) > (reported.total_bytes or 0)
