"""Processes that repair: a bookie with automatic repair, and automatic repair alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from cepheid_bookie.bookie_role import BookieRole
from cepheid_bookie.bookie_role_settings import BookieRoleSettings
from cepheid_bookie.health_server import HealthServer, Page
from cepheid_bookie.secured_ports import health_context
from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_metadata import LedgerIds, MetadataStore, SessionState, ledger_records, require_cluster
from cepheid_metadata.patient_open import open_patiently
from cepheid_ports import Ports, Role, host_port
from cepheid_ports.process_metrics import process_families
from cepheid_ports.prometheus import CONTENT_TYPE, Family, encode, gauge
from cepheid_recovery.auto_recovery import AutoRecovery
from cepheid_recovery.caught_up import CaughtUp
from cepheid_recovery.cluster_state import run_name
from cepheid_recovery.settings import RecoverySettings
from cepheid_security import ClientTls
from cepheid_security.peer_settings import PeerTlsSettings

_REFUSAL_RETRY_S = 60.0


async def open_auto_recovery(
    name: str,
    store: MetadataStore,
    ledger_settings: LedgerSettings,
    settings: RecoverySettings,
    ports: Ports,
    opened: AsyncExitStack,
    tls: ClientTls | None,
) -> AutoRecovery:
    """Start automatic repair with its own view of the bookies and its own connections to them; `opened` closes them.

    `tls`: the certificate that it presents to bookies.
    """
    # A bookie under load refuses copies for longer than writers would wait.
    patience_s = max(_REFUSAL_RETRY_S, ledger_settings.refusal_retry_s)
    ledger_settings = ledger_settings.model_copy(update={"refusal_retry_s": patience_s})
    bookies = BookieDirectory(store, ports, ledger_settings, tls=tls)
    opened.push_async_callback(bookies.aclose)
    await bookies.start()
    placement = RackAwarePlacement(
        bookies.writable,
        ports.random,
        ledger_settings.quarantine_s,
        ledger_settings.quarantine_max_s,
        bookies.problems,
        racks=bookies.racks,
        free_bytes=bookies.free_bytes,
        strict=ledger_settings.strict_racks,
    )
    client = LedgerClient(bookies, ledger_records(store), LedgerIds(store), placement, ledger_settings, ports)
    opened.push_async_callback(client.aclose)
    bookies.on_back = client.on_bookie_back
    recovery = AutoRecovery(name, store, client, placement, bookies, settings, ports)
    opened.push_async_callback(recovery.aclose)
    bookies.on_changed = recovery.on_bookies_changed
    recovery.start()
    return recovery


class BookieNodeSettings(BookieRoleSettings, frozen=True):
    """Settings of a storage node as a process, with automatic repair in it."""

    caught_up_timeout_s: PositiveFloat = Field(
        1800.0,
        description="Time after which `/caught-up` answers 200 although ledgers still lack copies, so that a rolling restart goes "
        "on. Longer: a restart waits for repairs that take longer.",
    )
    recovery: RecoverySettings = Field(RecoverySettings(), description="Automatic repair of ledgers that lack copies.")
    ledger: LedgerSettings = Field(LedgerSettings(), description="How repair reads and writes entries.")


class BookieNode(BookieRole):
    """A bookie with automatic repair: `start` once, `aclose` once. Repair starts when the bookie serves, and ends before it."""

    def __init__(self, settings: BookieNodeSettings, ports: Ports, *, accept_empty_disk: bool = False) -> None:
        super().__init__(settings, ports, accept_empty_disk=accept_empty_disk)
        self._node_settings = settings
        self._recovery: AutoRecovery | None = None
        self._caught_up: CaughtUp | None = None
        self._pages["/caught-up"] = self._caught_up_page

    async def _start(self) -> None:
        await super()._start()
        settings = self._node_settings
        if settings.recovery.enabled:
            self._recovery = await open_auto_recovery(
                self.bookie_id,
                self._opened_store,
                settings.ledger,
                settings.recovery,
                self._ports,
                self._opened,
                self._client_tls,
            )
            run = run_name(self._record.incarnation, self._record.process or "")
            self._caught_up = CaughtUp(self._opened_store, self.bookie_id, run, settings.caught_up_timeout_s)
            self._opened.push_async_callback(self._caught_up.aclose)
            self._caught_up.start()

    def _caught_up_page(self) -> Page:
        """Answer 200 when the bookie is ready and has caught up, so that the next one may be restarted."""
        if not self.ready:
            return self._ready_page()
        missing = "" if self._caught_up is None else self._caught_up.missing
        if missing:
            return Page(f"serving, not caught up: {missing}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Page("serving, caught up\n")

    def _families(self) -> Iterator[Family]:
        yield from super()._families()
        if self._recovery is not None:
            yield from self._recovery.families()
            yield from self._recovery.cluster_families()


class AutoRecoverySettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of automatic repair alone, in a process that stores nothing."""

    metadata: str = Field(
        min_length=1, description="Address of the cluster's metadata store: `zk://host:port[,host:port…][/root]`."
    )
    metadata_session_timeout_s: PositiveFloat = Field(
        4.0, le=3600, description="Silence after which the metadata store treats this process as dead."
    )
    metadata_wait_s: PositiveFloat = Field(
        60.0, description="Time for which a start waits for a metadata store that it cannot reach, before it gives up."
    )
    metadata_auth_file: str | None = Field(
        None,
        description="File with the ZooKeeper user of this cluster, as `digest:user:password`. What the cluster creates is then "
        "readable by this user alone. Unset: what the environment variable `CEPHEID_METADATA_AUTH` says.",
    )
    metadata_private: bool = Field(
        True,
        description="Whether what this process creates in ZooKeeper is for the user of `metadata_auth_file` alone. `false` only "
        "while other processes of the cluster still run without that user.",
    )
    name: str | None = Field(
        None, min_length=1, max_length=200, description="Name for people. Unset: the address of its health page."
    )
    http_host: str = Field("127.0.0.1", description="Address on which health checks and metrics are served.")
    http_port: NonNegativeInt = Field(8000, le=65535, description="Port of `/health`, `/ready` and `/metrics`. 0: any free port.")
    recovery: RecoverySettings = Field(RecoverySettings(), description="Automatic repair of ledgers that lack copies.")
    ledger: LedgerSettings = Field(LedgerSettings(), description="How repair reads and writes entries.")
    tls: PeerTlsSettings = Field(PeerTlsSettings(), description="The certificate that bookies are shown.")


class AutoRecoveryRole(Role):
    """Automatic repair alone: `start` once, `aclose` once."""

    def __init__(self, settings: AutoRecoverySettings, ports: Ports) -> None:
        super().__init__()
        self.settings = settings
        self._client_tls = settings.tls.client_tls()
        self._ports = ports
        self._store: MetadataStore | None = None
        self.recovery: AutoRecovery | None = None
        pages = {"/health": self._health_page, "/ready": self._ready_page, "/metrics": self._metrics_page}
        self._health = HealthServer(settings.http_host, settings.http_port, pages, tls=health_context(settings.tls))

    def __repr__(self) -> str:
        return f"<AutoRecoveryRole {self._phase}: {self.recovery!r}>"

    @property
    def http_url(self) -> str:
        return f"{self._health.scheme}://{host_port(self.settings.http_host, self._health.port)}"

    @property
    def name(self) -> str:
        return self.settings.name or f"autorecovery at {host_port(self.settings.http_host, self._health.port)}"

    @property
    def ready(self) -> bool:
        """Return whether it works. An outage of metadata that has not ended the session changes nothing."""
        is_lost = self._store is None or self._store.session_state is SessionState.LOST
        return self._phase == "serving" and not is_lost

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
        await require_cluster(store)
        self.recovery = await open_auto_recovery(
            self.name, store, settings.ledger, settings.recovery, ports, opened, self._client_tls
        )

    def _health_page(self) -> Page:
        return Page(f"{self._phase}\n")

    def _ready_page(self) -> Page:

        session = "none" if self._store is None else self._store.session_state.value
        status = HTTPStatus.OK if self.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Page(f"{self._phase}, metadata session {session}\n", status)

    def _metrics_page(self) -> Page:
        return Page(encode(self._families()), content_type=CONTENT_TYPE)

    def _families(self) -> Iterator[Family]:
        yield from process_families()
        if self._store is not None:
            connected = self._store.session_state is SessionState.CONNECTED
            yield gauge("cepheid_metadata_connected", "1: the metadata store answers.", connected)
        if self.recovery is not None:
            yield from self.recovery.families()
            yield from self.recovery.cluster_families()
