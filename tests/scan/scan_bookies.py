"""Real bookies with real gRPC ports in a loop of their own thread, for readers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings, entry_reader
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_bookie.scan_server import ScanServer
from cepheid_bookie.secured_ports import access_of, secured_ports
from cepheid_bookie.settings import BookieServerSettings
from cepheid_decode import Fragment, Piece
from cepheid_ports import Ports
from cepheid_rpc import TLS_MARK, EntryGroup, encode_group
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings
from tests.bookie.bookie_support import added
from tests.support import free_port

T = TypeVar("T")

LEDGER = 7
TOPIC = "persistent://public/default/scanned"


class ScanBookies:
    """`stored`: blocks go to readers as they lie on disk, past gRPC, as bookies of a cluster do it; the smallest too.

    `tls`: that of their ports.
    """

    def __init__(
        self,
        directory: Path,
        bookie_ids: Sequence[str],
        *,
        stored: bool = True,
        tls: BookieTlsSettings = BookieTlsSettings(),  # noqa: B008 - frozen
        **settings: Any,
    ) -> None:
        self._tls = tls
        self._directory = directory
        self._stored = stored
        self._small_runs = mock.patch.object(entry_reader, "_RUN_BYTES", 1)
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bookies")
        self._indexes = {bookie_id: MemoryBlockIndex() for bookie_id in bookie_ids}
        self._servers: dict[str, BookieServer] = {}
        self.bookies: dict[str, Bookie] = {}
        mark = TLS_MARK if tls.enabled else ""
        self.addresses = {bookie_id: f"{mark}127.0.0.1:{free_port()}" for bookie_id in bookie_ids}

    def __enter__(self) -> Self:
        self._small_runs.start()
        self._thread.start()
        for bookie_id in self.addresses:
            self.start(bookie_id)
        return self

    def __exit__(self, *_: object) -> None:
        for bookie_id in list(self._servers):
            self.stop(bookie_id)
        for bookie in self.bookies.values():
            self.call(bookie.aclose())
        self._small_runs.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def start(self, bookie_id: str) -> None:
        """At the same address as before, with the same entries."""
        self.call(self._start(bookie_id))

    def stop(self, bookie_id: str) -> None:
        """Its port goes, and every call to it breaks. What it stored is there again after `start`."""
        self.call(self._servers.pop(bookie_id).aclose())

    async def _start(self, bookie_id: str) -> None:
        if bookie_id not in self.bookies:
            values = {"min_free_journal_bytes": 0, "min_free_data_bytes": 0, **self._settings}
            identity, disk = BookieIdentity(bookie_id), RealDisk(self._directory / bookie_id)
            self.bookies[bookie_id] = await Bookie.open(
                identity, StorageSettings(**values), disk, self._indexes[bookie_id], Ports()
            )
        port = int(self.addresses[bookie_id].rpartition(":")[2])
        settings = BookieServerSettings(stop_grace_s=0.01)
        bookie = self.bookies[bookie_id]
        ports = secured_ports(self._tls, access_of(self._tls, BookieAccessSettings()))
        scans = ScanServer(bookie, "127.0.0.1", 0, Ports(), tls=ports.scan_context) if self._stored else None
        server = self._servers[bookie_id] = BookieServer(
            bookie, "127.0.0.1", port, settings, scans=scans, credentials=ports.credentials, access=ports.access
        )
        await server.start()

    def add(self, group: EntryGroup, *bookie_ids: str) -> None:
        """As from a writer that already checked the digests: a damaged group is taken as it is."""
        for bookie_id in bookie_ids or self.addresses:
            self.call(added(self.bookies[bookie_id], group))

    def checkpoint(self) -> None:
        """From now on entries come from blocks, not from the write cache."""
        for bookie in self.bookies.values():
            self.call(bookie.checkpoint())

    def delete(self, ledger_id: int, *bookie_ids: str) -> None:
        for bookie_id in bookie_ids:
            self.call(self.bookies[bookie_id].delete_ledgers([ledger_id]))


def groups_of(count: int, *, size: int = 1000, per_group: int = 10, first: int = 0) -> list[EntryGroup]:
    return [
        encode_group(
            LEDGER,
            start,
            -1,
            start * size,
            [payload(entry_id, size) for entry_id in range(start, min(start + per_group, first + count))],
        )
        for start in range(first, first + count, per_group)
    ]


def payload(entry_id: int, size: int = 1000) -> bytes:
    return f"{entry_id}.".encode().ljust(size, b"~")


def damaged(group: EntryGroup, entry_id: int) -> EntryGroup:
    """A bit of that entry's payload is another."""
    data = bytearray(group.data)
    data[group.ends[entry_id - group.first_entry_id] - 1] ^= 1
    return EntryGroup(group.ledger_id, group.first_entry_id, group.ends, bytes(data))


def piece_of(
    first: int, last: int, *fragments: tuple[int, Sequence[str]], write_quorum: int | None = None, ledger_id: int = LEDGER
) -> Piece:
    placed = tuple(Fragment(start, tuple(ensemble)) for start, ensemble in fragments)
    size = len(placed[0].ensemble)
    return Piece(TOPIC, -1, ledger_id, first, last, size, write_quorum or size, placed)
