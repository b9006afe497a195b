"""The storage nodes of a standalone process: N bookies, each with its own directory, used in-process and served over gRPC.

    data/bookie-1/{journal,logs,index}    data/bookie-2/…         cookies and registrations in metadata

Rule 1: a bookie is registered once it serves in-process; its network address is added when that port is open.
Rule 2: if one fails for good the process ends: a restart replays what is really on disk.
Rule 3: tests stop and start single bookies (`stop`, `start`). Those of a server run as long as their process.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepheid_bookie import (
    Bookie,
    BookieIdentity,
    GarbageCollector,
    MetadataCookies,
    MetadataDamage,
    MetadataLedgers,
    RealDisk,
    StorageSettings,
)
from cepheid_bookie.access import BookieAccess
from cepheid_bookie.denials import Denials
from cepheid_bookie.disk_space import check_disk_size
from cepheid_bookie.held_ledgers import held_ledgers
from cepheid_bookie.metadata_records import journal_format, report_bookie
from cepheid_bookie.scans import AuthorizeRead
from cepheid_bookie.settings import BookieServerSettings
from cepheid_metadata import (
    BookieRegistration,
    MetadataStore,
    available_bookies,
    keys,
    list_names,
)
from cepheid_metadata.upgrade import report_known_format
from cepheid_ports import Ports
from cepheid_rpc import TLS_PROTOCOL, BookieConnection
from cepheid_security.peer_settings import BookieTlsSettings

if TYPE_CHECKING:
    from cepheid_bookie.grpc_server import BookieServer

log = logging.getLogger(__name__)

_ID = "bookie-"


class LocalBookies:
    """The bookies of this process, created by `open`. Implements `BookieConnections` of the ledger client."""

    def __init__(
        self,
        store: MetadataStore,
        ports: Ports,
        rack: str | None,
        open_bookie: Callable[[str], Awaitable[Bookie]],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._rack = rack
        self._store, self._ports = store, ports
        self._open_bookie, self._on_failed = open_bookie, on_failed
        self._registrations = available_bookies(store)
        self._bookies: dict[str, Bookie] = {}
        self._connections: dict[str, BookieConnection] = {}
        self._collectors: dict[str, GarbageCollector] = {}
        self._servers: dict[str, BookieServer] = {}
        self._listening: dict[str, int] = {}
        """Port of each bookie that was served; a bookie that is started again gets the same."""
        self._starts: dict[str, int] = {}
        self._new_server: Callable[[Bookie, int], BookieServer] | None = None
        self._scheme = "grpc"
        self._host = ""
        self._authorize_reads: AuthorizeRead | None = None
        self._expected: list[str] = []
        self._draining: frozenset[str] = frozenset()
        self._changing = asyncio.Lock()
        """Held while bookies are started, served and stopped."""
        self.on_gone: Callable[[str], None] = lambda bookie_id: None
        """Called with the id of a bookie that was stopped."""
        self.on_back: Callable[[str], None] = lambda bookie_id: None
        """Called with the id of a bookie that can take entries again, after a start or once its disk has room."""

    @classmethod
    async def open(
        cls,
        data_dir: Path,
        count: int,
        settings: StorageSettings,
        cluster_id: str,
        store: MetadataStore,
        ports: Ports,
        on_failed: Callable[[BaseException], None],
        *,
        rack: str | None = None,
        accept_empty_disk: bool = False,
        new_disk: Callable[[Path], RealDisk] = RealDisk,
    ) -> LocalBookies:
        """Open bookies 1..`count` below `data_dir` and register them, all in one rack.

        `accept_empty_disk` as in `Bookie.open`, for each of them: those that are intact, or new, start as usual. `new_disk` returns
        the disk of a directory; tests pass one that can be full.
        If one does not open, or on cancellation, those already open are closed.
        """

        async def open_bookie(bookie_id: str) -> Bookie:
            disk = new_disk(data_dir / bookie_id)
            return await _open_bookie(disk, BookieIdentity(bookie_id, cluster_id), settings, store, ports, accept_empty_disk)

        opening = [asyncio.ensure_future(open_bookie(f"{_ID}{number}")) for number in range(1, count + 1)]
        failures: list[BaseException] = []
        try:
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
            failures += [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        except asyncio.CancelledError as error:  # all have ended, some perhaps before the cancellation
            failures.append(error)
        bookies = [each.result() for each in opening if not each.cancelled() and each.exception() is None]
        if failures:
            await asyncio.gather(*(bookie.aclose() for bookie in bookies))
            raise failures[0]
        local = cls(store, ports, rack, open_bookie, on_failed)
        for bookie in bookies:
            local._take(bookie)
        try:
            for bookie in bookies:
                await local._register(bookie)
            local._expected = await list_names(store, keys.BOOKIE_COOKIES_KEY)
        except BaseException:
            await local.aclose()
            raise
        return local

    def _take(self, bookie: Bookie) -> None:
        """Use an open bookie in this process."""
        name = bookie.bookie_id
        bookie.on_failed = self._on_failed
        bookie.on_writable = partial(self._on_writable, name)
        self._bookies[name], self._connections[name] = bookie, bookie.connection()
        self._collectors[name] = GarbageCollector(bookie, MetadataLedgers(self._store, self._ports))
        self._starts[name] = self._starts.get(name, 0) + 1
        if self._authorize_reads is not None:
            bookie.authorize_reads(self._authorize_reads)

    def _on_writable(self, bookie_id: str, writable: bool) -> None:
        if writable:
            self.on_back(bookie_id)

    async def _register(self, bookie: Bookie) -> None:
        self._collectors[bookie.bookie_id].start()
        bookie.start_scrubber(MetadataDamage(self._store, bookie.bookie_id, self._ports))
        await report_known_format(self._store, bookie.bookie_id, "")
        await self._registrations.create(bookie.bookie_id, self._registration(bookie, {}), ephemeral=True)

    async def stop(self, bookie_id: str) -> None:
        """Stop one bookie, which keeps its data, as if its process had ended. Does nothing if it does not run."""
        async with self._changing:
            if bookie_id not in self._bookies:
                return
            bookie = self._bookies.pop(bookie_id)
            server, collector = self._servers.pop(bookie_id, None), self._collectors.pop(bookie_id)
            connection = self._connections.pop(bookie_id)
            self.on_gone(bookie_id)
            if server is not None:
                await server.aclose()
            await collector.aclose()
            await bookie.aclose()  # first: the connection's streams break, so that writers replace the bookie at once
            await connection.aclose()
            await self._registrations.delete(bookie_id, None)

    async def start(self, bookie_id: str) -> None:
        """Start a stopped bookie on its data and at its port. Does nothing if it runs. Raises the errors of opening."""
        async with self._changing:
            if bookie_id in self._bookies:
                return
            bookie = await self._open_bookie(bookie_id)
            self._take(bookie)
            await self._register(bookie)
            if self._new_server is not None:
                await self._serve(bookie, self._listening.get(bookie_id, 0))
        self.on_back(bookie_id)

    def __repr__(self) -> str:
        return f"<LocalBookies {list(self._bookies.values())}>"

    def get(self, bookie_id: str) -> BookieConnection:
        """Return the in-process connection. An id of metadata that is not here means a wrong data directory."""
        connection = self._connections.get(bookie_id)
        if connection is None:
            from cepheid_rpc import BookieUnavailableError

            raise BookieUnavailableError(f"bookie {bookie_id} is not one of {', '.join(self._connections)}", bookie=bookie_id)
        return connection

    def writable(self) -> list[str]:
        """Return the ids of bookies that take new ledgers."""
        return [name for name, bookie in self._bookies.items() if bookie.writable and name not in self._draining]

    def registered(self) -> list[str]:
        """Return the ids of the bookies of this process."""
        return list(self._bookies)

    def expected(self) -> list[str]:
        """Return the ids of bookies that ever ran in this data directory, and whose data ledgers may need."""
        return self._expected

    def incarnation_of(self, bookie_id: str) -> str:
        """Return the name of the bookie's disks; empty when it does not run in this process."""
        bookie = self._bookies.get(bookie_id)
        return "" if bookie is None else bookie.cookie.registered_as

    def draining(self) -> list[str]:
        """Return the ids of the bookies that are being decommissioned."""
        return sorted(self._draining)

    def set_draining(self, names: frozenset[str]) -> None:
        """Set the bookies that are being decommissioned: they get no new ledgers."""
        self._draining = names

    def racks(self) -> Mapping[str, str]:
        """Return the rack of this process for each of its bookies."""
        return {} if self._rack is None else dict.fromkeys(self._bookies, self._rack)

    def free_bytes(self) -> Mapping[str, int]:
        """Return nothing, as all share one disk."""
        return {}

    def process_of(self, bookie_id: str) -> str:
        """Return a name of this run of the bookie within this process."""
        return str(self._starts.get(bookie_id, 0))

    def held_ledgers(self, bookie_id: str, above: int) -> dict[str, Any] | None:
        """Return a page of the ids of ledgers that this bookie holds; None if it does not run in this process."""
        bookie = self._bookies.get(bookie_id)
        return None if bookie is None else held_ledgers(bookie, above)

    def problems(self) -> list[str]:
        """Return a sentence for people about each bookie that takes no new ledgers."""
        left_out = [name for name in self._expected if name not in self._bookies]
        return [
            *(f"{name} is read-only: {reason}" for name, bookie in self._bookies.items() if (reason := bookie.read_only_reason)),
            *(f"{name} is draining: it is being decommissioned" for name in sorted(self._draining)),
            *(f"{name} is stopped" for name in left_out if name in self._starts),
            *(
                f"{name} is not started: the setting `bookies` is {len(self._starts)}"
                for name in left_out
                if name not in self._starts
            ),
        ]

    def bookies(self) -> list[Bookie]:
        return list(self._bookies.values())

    def authorize_reads(self, authorize: AuthorizeRead) -> None:
        """Require tickets, checked by `authorize`, of readers that bypass the brokers."""
        self._authorize_reads = authorize
        for bookie in self._bookies.values():
            bookie.authorize_reads(authorize)

    async def serve(
        self,
        host: str,
        first_port: int,
        settings: BookieServerSettings,
        ports: Ports,
        *,
        tls: BookieTlsSettings,
        access: BookieAccess,
        denials: Denials,
    ) -> None:
        """Open a gRPC port for each bookie, from `first_port` on (0: any free ports), and register the addresses.

        `access`: permissions of callers there. `denials` receives refused calls. Raises SecurityConfigurationError.
        """
        importer = ports.new_worker("grpc-import", 1)
        try:
            await importer.run(lambda: importlib.import_module("cepheid_bookie.grpc_server"))
        finally:
            await importer.aclose()
        from cepheid_bookie.grpc_server import BookieServer
        from cepheid_bookie.scan_server import ScanServer
        from cepheid_bookie.secured_ports import secured_ports

        secured = secured_ports(tls, access)

        def new_server(bookie: Bookie, port: int) -> BookieServer:
            role = secured.access.certificate_role
            scans = ScanServer(bookie, host, 0, ports, tls=secured.scan_context, certificate_role=role, denials=denials)
            return BookieServer(
                bookie,
                host,
                port,
                settings,
                scans=scans,
                credentials=secured.credentials,
                revoked=secured.revoked,
                access=secured.access,
                denials=denials,
            )

        async with self._changing:
            self._new_server, self._host, self._scheme = new_server, host, TLS_PROTOCOL if tls.enabled else "grpc"
            for place, name in enumerate(self._starts):
                self._listening[name] = first_port + place if first_port else 0
                if (bookie := self._bookies.get(name)) is not None:
                    await self._serve(bookie, self._listening[name])

    async def _serve(self, bookie: Bookie, port: int) -> None:
        assert self._new_server is not None
        name = bookie.bookie_id
        server = self._new_server(bookie, port)
        await server.start()
        self._servers[name] = server
        self._listening[name] = server.port
        found = await self._registrations.get(name)
        assert found is not None, f"{name} is registered since it opened"
        addresses = {self._scheme: f"{self._host}:{server.port}"}
        await self._registrations.replace(name, self._registration(bookie, addresses), found.version)

    async def aclose(self) -> None:
        """Stop serving, then sync and close every bookie; the first failure is raised after all were tried."""
        outcomes: list[Any] = []
        for group in (self._servers, self._collectors, self._connections, self._bookies):
            outcomes += await asyncio.gather(*(part.aclose() for part in group.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _registration(self, bookie: Bookie, addresses: dict[str, str]) -> BookieRegistration:
        return BookieRegistration(
            bookie_id=bookie.bookie_id, incarnation=bookie.cookie.registered_as, addresses=addresses, rack=self._rack
        )


async def _open_bookie(
    disk: RealDisk,
    identity: BookieIdentity,
    settings: StorageSettings,
    store: MetadataStore,
    ports: Ports,
    accept_empty_disk: bool,
) -> Bookie:
    from cepheid_bookie.rocks_index import RocksBlockIndex

    settings = settings.model_copy(update={"slow_disk_s": 0.0, "stalled_disk_s": 0.0})  # no other bookie has a better disk
    check_disk_size(disk, disk, settings)
    cookies = MetadataCookies(store, {"data": (str(disk.root),)})
    new_segments = await journal_format(store)
    index = RocksBlockIndex(disk.root / "index")
    bookie = await Bookie.open(
        identity, settings, disk, index, ports, cookies=cookies, accept_empty_disk=accept_empty_disk, journal_format=new_segments
    )
    try:
        await report_bookie(store, bookie, ports)
    except BaseException:
        await bookie.aclose()
        raise
    return bookie


def bookies_with_data(data_dir: Path) -> list[str]:
    """Return the ids of bookies whose directories below `data_dir` are not empty, without writing."""
    found = (path.name for path in data_dir.glob(f"{_ID}[0-9]*") if path.is_dir() and any(path.iterdir()))
    return sorted(found)
