"""The directory of a real bookie as SIGKILL leaves it: two entry logs or more, a journal with records above the mark, an index."""

from __future__ import annotations

import shutil
from pathlib import Path

from cepheid_bookie import Bookie, MetadataCookies, RealDisk
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_metadata import LedgerIds, MetadataStore
from cepheid_ports import Ports
from cepheid_rpc import LacRequest
from tests.bookie.bookie_support import IDENTITY, KEY, BookieIdentity, KiB, added, group_of, small_settings

FENCED, DELETED = 3, 4
HELD = {1: 150, 2: 10, 5: 40}
"""Entries by ledger. The last 50 of ledger 1 and all of ledger 5 are in the journal alone."""
SIZE = 1000


async def open_bookie(
    directory: Path, store: MetadataStore, identity: BookieIdentity = IDENTITY, journal: Path | None = None
) -> Bookie:
    directories: dict[str, tuple[str, ...]] = {"data": (str(directory),)}
    if journal is not None:
        directories["journal"] = (str(journal),)
    return await Bookie.open(
        identity,
        small_settings(write_cache_bytes=1024 * KiB),
        RealDisk(directory),
        RocksBlockIndex(directory / "index"),
        Ports(),
        journal_disk=None if journal is None else RealDisk(journal),
        cookies=MetadataCookies(store, directories),
    )


async def write_directory(directory: Path, store: MetadataStore, identity: BookieIdentity = IDENTITY) -> Path:
    """Return a copy that was made while the bookie ran."""
    await LedgerIds(store).take()
    bookie = await open_bookie(directory / "running", store, identity)
    try:
        await added(bookie, group_of(1, 0, 100, size=SIZE), group_of(2, 0, 10, size=SIZE), group_of(DELETED, 0, 5, size=SIZE))
        await bookie.checkpoint()
        await bookie.read_lac(LacRequest(FENCED, KEY, fence=True))
        await bookie.delete_ledgers([DELETED])
        await added(bookie, group_of(1, 100, 50, size=SIZE), group_of(5, 0, 40, size=SIZE))
        shutil.copytree(directory / "running", directory / "stopped")
    finally:
        await bookie.aclose()
    return directory / "stopped"
