"""The addresses of a cluster's bookies, as current as watches of their registrations allow, and a connection to each.

    start ──► watch the bookies available, readonly and draining ──► read all ──► known     a watch that fired: the same again
    get(id) ──► known address ──► the connection to it; another address or process than before: a new one, the old one is abandoned

Rule 1: a bookie whose registration vanished keeps its last address: it may be cut off from metadata and still serve its entries.
Rule 2: an outage of metadata changes nothing; the last known state stays, and metadata is read again until it answers.
Rule 3: only registered bookies get new ledgers, and only those registered as available that are not being decommissioned.
Rule 4: if our own session was lost, those of the bookies probably were too: for `SETTLE_S` after the next session began, a bookie
that was writable counts as writable although it is not registered again yet.
Rule 5: a connection remembers a failure for a second, and refuses requests meanwhile. A bookie that was restarted gets a new one,
or it would fail for the first ledger that it is chosen for; except a connection that carries a stream, which found the new
process itself or is about to break.
Rule 6: a registration that cannot be read shows only that its bookie runs, and does not affect others. It may be of a newer
release: an upgraded bookie must not look lost to processes that are not upgraded yet.
Rule 7: a bookie that reports its free space changes its registration in place, which no watch of a parent shows. So all are read
again every `REFRESH_S` while one of them reports it.
Rule 8: a bookie is gone when every look at metadata for `unregistered_bookie_s` found it unregistered. Time during which metadata
was unavailable, or in which rule 4 holds, does not count: the time starts again after it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from cepheid_ledger.settings import LedgerSettings
from cepheid_metadata import (
    MetadataError,
    MetadataStore,
    SessionState,
    StoreClosedError,
    Watch,
    available_bookies,
    keys,
    list_names,
    list_records,
    readonly_bookies,
)
from cepheid_ports import Ports, TaskOwner
from cepheid_rpc import TLS_MARK, BookieConnection, BookieUnavailableError, bookie_address
from cepheid_security import ClientTls

log = logging.getLogger(__name__)

RETRY_S = 0.5
SETTLE_S = 3.0
REFRESH_S = 60.0
_TLS_SETTINGS = "tls.certificate_file, tls.key_file and tls.ca_file"


class OpenedConnection(BookieConnection, Protocol):
    """A connection that can be abandoned: its streams break, as if the bookie had failed."""

    @property
    def is_outdated(self) -> bool:
        """Whether it uses a certificate that was replaced since."""

    @property
    def is_adding(self) -> bool:
        """Whether it carries a stream of adds."""

    async def abandon(self, reason: str) -> None: ...


Connect = Callable[[str, str], OpenedConnection]
"""Opens a connection from (bookie id, address)."""


@dataclass(frozen=True, slots=True)
class KnownBookie:
    """What the directory knows about a bookie.

    `registered`: False if it is only known from before. `process`: random, of one run. `rack` and `free_bytes`: None if the bookie
    does not report them. `draining`: it is being decommissioned, and therefore not writable.
    """

    bookie_id: str
    address: str
    incarnation: str
    registered: bool
    writable: bool
    process: str | None = None
    rack: str | None = None
    free_bytes: int | None = None
    draining: bool = False


class BookieDirectory:
    """The directory of bookies; implements `BookieConnections` of the ledger client. Call `start` once and `aclose` once."""

    def __init__(
        self,
        store: MetadataStore,
        ports: Ports,
        settings: LedgerSettings | None = None,
        *,
        connect: Connect | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """`tls`: the certificate to present to bookies. None: only bookies without TLS can be reached."""
        self._tls = tls
        self._store = store
        self._ports = ports
        self._settings = settings or LedgerSettings()
        self._connect = connect
        self._known: dict[str, KnownBookie] = {}
        self._racks: dict[str, str] = {}
        self._free_bytes: dict[str, int] = {}
        self._cookies: list[str] = []
        self._unreadable: list[str] = []  # bookies whose registrations this release cannot read
        self._draining: list[str] = []
        self._connections: dict[str, tuple[KnownBookie, OpenedConnection]] = {}
        self._tasks = TaskOwner("bookie-directory")
        self._due = asyncio.Event()
        self._watches: list[Watch] = []
        self._unsubscribe = store.subscribe(self._on_session)
        self._read_at = 0.0  # loop time of the last look
        self._session_lost = False
        self._settled: asyncio.TimerHandle | None = None
        self._gone_at: dict[str, float] = {}  # by bookie that is not registered: loop time at which to report it as gone (again)
        self._gone_timer: asyncio.TimerHandle | None = None
        self.on_new_incarnation: Callable[[], None] = lambda: None
        """Called for a bookie with disks that were never seen before, before any caller learns of it."""
        self.on_back: Callable[[str], None] = lambda bookie_id: None
        """Called for a bookie that accepts writes and did not before, or that is another process, after `writable` has it."""
        self.on_changed: Callable[[], None] = lambda: None
        """Called when registrations changed, after `registered` and `writable` have the change."""
        self.on_gone: Callable[[str], None] = lambda bookie_id: None
        """Called with the id of a bookie that is gone (rule 8), and again after each `unregistered_bookie_s` while it is gone.

        Also called for a bookie that is being decommissioned, from the start on, and once for one that has other disks now.
        """

    def __repr__(self) -> str:
        return f"<BookieDirectory: {len(self.writable())} writable of {len(self._known)}, {len(self._connections)} connected>"

    async def start(self) -> None:
        """Read the present registrations and start to follow them. Raises the errors of the store."""
        if self._connect is None:
            self._connect = await self._load_grpc()
        await self._read()
        self._tasks.start(self._follow(), name="follow")

    def get(self, bookie_id: str) -> BookieConnection:
        """Return the present connection. Raises BookieUnavailableError if no bookie ever registered under that id."""
        bookie = self._known.get(bookie_id)
        if bookie is None:
            if asyncio.get_running_loop().time() - self._read_at > RETRY_S:  # a caller in a loop must not list each time
                self._due.set()  # it may have registered since the last look
            message = f"bookie {bookie_id} is not registered; known are {', '.join(self._known) or 'none'}"
            raise BookieUnavailableError(message, bookie=bookie_id)
        before, connection = self._connections.get(bookie_id, (bookie, None))
        if connection is not None and (why := _why_replaced(before, bookie, connection)):
            self._tasks.start(connection.abandon(why), name=f"abandon {bookie_id}")
            connection = None
        if connection is None:
            assert self._connect is not None, f"{self!r} was not started"
            if self._tls is None and bookie.address.startswith(TLS_MARK):
                message = f"bookie {bookie_id} accepts only TLS, and this process has no certificate: set {_TLS_SETTINGS}"
                raise BookieUnavailableError(message, bookie=bookie_id)
            connection = self._connect(bookie_id, bookie.address)
            self._connections[bookie_id] = bookie, connection
        return connection

    def writable(self) -> list[str]:
        """Return the ids of the bookies that accept new ledgers."""
        has_tls = self._tls is not None
        return [
            name for name, bookie in self._known.items() if bookie.writable and (has_tls or not bookie.address.startswith(TLS_MARK))
        ]

    def registered(self) -> list[str]:
        """Return the ids of the bookies that run, writable or not, also of those that this release cannot reach (rule 6)."""
        return sorted({*self._unreadable, *(name for name, bookie in self._known.items() if bookie.registered)})

    def draining(self) -> list[str]:
        """Return the ids of the bookies that are being decommissioned, also of those that do not run."""
        return self._draining

    def racks(self) -> Mapping[str, str]:
        """Return the racks of the bookies, by id. A bookie that is gone keeps its last rack."""
        return self._racks

    def free_bytes(self) -> Mapping[str, int]:
        """Return the free space of the data disks of those bookies that report it."""
        return self._free_bytes

    def expected(self) -> list[str]:
        """Return the ids of the bookies that should run: those with a cookie in metadata, and those that run. Survives restarts."""
        return sorted({*self._cookies, *self.registered()})

    def incarnation_of(self, bookie_id: str) -> str:
        """Return the name of the disks with which this bookie registered last; empty if it never did."""
        bookie = self._known.get(bookie_id)
        return "" if bookie is None else bookie.incarnation

    def process_of(self, bookie_id: str) -> str:
        """Return the name of the process that last registered as this bookie; it changes with each restart.

        It is empty if the bookie never registered, or runs a release that does not report it.
        """
        bookie = self._known.get(bookie_id)
        return "" if bookie is None else bookie.process or ""

    def problems(self) -> list[str]:
        """Return a sentence for the operator about each bookie that accepts no new ledgers."""
        states = dict.fromkeys(self.expected(), "not registered: start it, or check its log")
        states |= dict.fromkeys(self.registered(), "read-only: its disk is full; /ready and its log name the disk")
        for name in set(self._unreadable).difference(self._known):
            states[name] = "not reachable: its registration is damaged, or of a newer release"
        if self._tls is None:
            for name in (name for name, bookie in self._known.items() if bookie.address.startswith(TLS_MARK)):
                states[name] = f"not reachable: it accepts only TLS, and this process has no certificate; set {_TLS_SETTINGS}"
        writable, registered = set(self.writable()), set(self.registered())
        for name in self._draining:
            if name in states:
                how = "it gets no new ledgers" if name in registered else "it is not registered"
                states[name] = f"draining: it is being decommissioned, and {how}"
        return [f"{name} is {state}" for name, state in states.items() if name not in writable]

    def known(self) -> Mapping[str, KnownBookie]:
        """Return the bookies by id; those that were registered once are kept."""
        return self._known

    async def aclose(self) -> None:
        self._unsubscribe()
        for timer in (self._settled, self._gone_timer):
            if timer is not None:
                timer.cancel()
        for watch in self._watches:
            watch.cancel()
        await self._tasks.aclose()
        connections, self._connections = self._connections, {}
        for _, connection in connections.values():
            await connection.aclose()

    async def _load_grpc(self) -> Connect:
        """Import the gRPC library in a thread: it takes a good part of a second."""
        importer = self._ports.new_worker("grpc-import", 1)
        try:
            await importer.run(lambda: importlib.import_module("cepheid_ledger.grpc_connection"))
        finally:
            await importer.aclose()
        from cepheid_ledger.grpc_connection import GrpcConnection

        return lambda bookie_id, address: GrpcConnection(bookie_id, address, self._settings, tls=self._tls)

    def _on_session(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            self._gone_at.clear()  # rule 8; the next look starts the time again
        if state is SessionState.LOST:
            self._session_lost = True
        elif state is SessionState.CONNECTED:
            if self._session_lost:
                self._session_lost = False
                if self._settled is not None:
                    self._settled.cancel()
                self._settled = asyncio.get_running_loop().call_later(SETTLE_S, self._on_settled)
            self._due.set()

    def _on_settled(self) -> None:
        self._settled = None
        self._due.set()

    async def _follow(self) -> None:
        while True:
            await self._wait_until_due()
            self._due.clear()
            try:
                await self._read()
            except StoreClosedError:
                return
            except MetadataError as error:
                log.warning("bookies.not_read", extra={"error": str(error), "retry_s": RETRY_S})
                try:
                    async with asyncio.timeout(RETRY_S):  # or until the session is back
                        await self._due.wait()
                except TimeoutError:
                    self._due.set()

    async def _wait_until_due(self) -> None:
        """Wait until a watch fires; no longer than `REFRESH_S` if free space is reported (rule 7)."""
        try:
            async with asyncio.timeout(REFRESH_S if self._free_bytes else None):
                await self._due.wait()
        except TimeoutError:
            pass

    async def _read(self) -> None:
        """Read both listings and all their records: a bookie that moved has the same name."""
        self._read_at = asyncio.get_running_loop().time()
        for watch in self._watches:
            watch.cancel()
        self._watches = []
        for key in (keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY, keys.DRAINING_BOOKIES_KEY):
            watch = await self._store.watch_children(key)
            watch.call_when_settled(self._due.set)
            self._watches.append(watch)
        store = self._store
        readonly, unreadable = await list_records(store, keys.READONLY_BOOKIES_KEY, readonly_bookies(store))
        # Read last, and it wins: a bookie that changes its state is in both for a moment.
        available, more = await list_records(store, keys.AVAILABLE_BOOKIES_KEY, available_bookies(store))
        self._cookies = await list_names(store, keys.BOOKIE_COOKIES_KEY)
        draining = await list_names(store, keys.DRAINING_BOOKIES_KEY)
        self._unreadable = [*unreadable, *more]
        kept = self._known if self._settled is not None else dict.fromkeys(self._unreadable)  # rule 6
        known = {name: bookie if name in kept else _gone(bookie) for name, bookie in self._known.items()}
        for registrations, writable in ((readonly, False), (available, True)):
            for name, record in registrations.items():
                if (address := bookie_address(record.addresses, prefer_tls=self._tls is not None)) is not None:
                    known[name] = KnownBookie(
                        name, address, record.incarnation, True, writable, record.process, record.rack, record.free_bytes
                    )
        known = {name: _with_draining(bookie, is_draining=name in draining) for name, bookie in known.items()}
        self._tell_changes(known)
        if any(bookie.registered and self._is_new(bookie) for bookie in known.values()):
            self.on_new_incarnation()
        back = [bookie.bookie_id for bookie in known.values() if self._is_back(bookie)]
        emptied = [name for name, bookie in known.items() if bookie.registered and name in self._known and self._is_new(bookie)]
        before, was_draining = self._known, self._draining
        self._known, self._draining = dict(sorted(known.items())), draining
        known = self._known
        self._free_bytes = {name: bookie.free_bytes for name, bookie in known.items() if bookie.free_bytes is not None}
        self._racks = {name: bookie.rack for name, bookie in known.items() if bookie.rack is not None}
        self._count_gone()
        for bookie_id in back:
            self.on_back(bookie_id)
        for bookie_id in emptied:  # in this order, because `on_back` of a bookie with unchanged disks ends what `on_gone` began
            self.on_gone(bookie_id)
        if before != self._known or was_draining != draining:
            self.on_changed()

    def _count_gone(self) -> None:
        """After a look at metadata, start the time of rule 8 for bookies that are not registered, and end it for the others."""
        if self._settled is not None or self._store.session_state is not SessionState.CONNECTED:
            self._gone_at.clear()
            return
        now = asyncio.get_running_loop().time()
        absent = [name for name, bookie in self._known.items() if not bookie.registered]
        gone_at = dict.fromkeys(absent, now + self._settings.unregistered_bookie_s) | dict.fromkeys(self._draining, now)
        self._gone_at = {name: self._gone_at.get(name, at) for name, at in gone_at.items()}
        self._arm_gone()

    def _arm_gone(self) -> None:
        if self._gone_at and self._gone_timer is None:
            self._gone_timer = asyncio.get_running_loop().call_at(min(self._gone_at.values()), self._report_gone)

    def _report_gone(self) -> None:
        self._gone_timer = None
        now = asyncio.get_running_loop().time()
        for name in [name for name, gone_at in self._gone_at.items() if gone_at <= now]:
            self._gone_at[name] = now + self._settings.unregistered_bookie_s
            self.on_gone(name)
        self._arm_gone()

    def _is_new(self, bookie: KnownBookie) -> bool:
        before = self._known.get(bookie.bookie_id)
        return before is None or before.incarnation != bookie.incarnation

    def _is_back(self, bookie: KnownBookie) -> bool:
        before = self._known.get(bookie.bookie_id)
        return bookie.writable and (before is None or not before.writable or before.process != bookie.process)

    def _tell_changes(self, known: Mapping[str, KnownBookie]) -> None:
        for name, bookie in known.items():
            before = self._known.get(name)
            if before is None or replace(before, free_bytes=bookie.free_bytes) != bookie:
                state = "writable" if bookie.writable else "readonly" if bookie.registered else "gone"
                if bookie.registered and bookie.draining:
                    state = "draining"
                log.info("bookie.known", extra={"bookie": name, "address": bookie.address, "state": state})


def _why_replaced(before: KnownBookie, now: KnownBookie, connection: OpenedConnection) -> str:
    """Return why the connection is replaced; empty: it stays."""
    if before.address != now.address:
        return f"bookie {now.bookie_id} moved from {before.address} to {now.address}"
    if connection.is_outdated and not connection.is_adding:
        return f"the certificate for bookie {now.bookie_id} was replaced"
    if before.process != now.process and not connection.is_adding:
        return f"bookie {now.bookie_id} was restarted"
    return ""


def _gone(bookie: KnownBookie) -> KnownBookie:
    return replace(bookie, registered=False, writable=False)


def _with_draining(bookie: KnownBookie, *, is_draining: bool) -> KnownBookie:
    if bookie.draining == is_draining:
        return bookie
    return replace(bookie, draining=is_draining, writable=bookie.writable and not is_draining)
