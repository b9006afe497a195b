"""Builds a new block index from the entry logs of a stopped bookie when the old one is lost or damaged.

    check cookies ─► scan all logs into `index.rebuilt` ─► watermark on the disks, then in metadata ─► index ► index.damaged-N
                                                                                                       index.rebuilt ► index

Blocks name their ledger and entries, so the logs locate each entry. They do not have everything that the index had:

    fences, explicit LACs   lost, except what the journal has above the mark
    master keys             from metadata, and from the journal for entries that it still has
    deletions               lost: a deleted ledger exists again until garbage collection finds that metadata does not have it
    entries in bad blocks   lost

Rule 1: what may be lost is never denied. So the bookie starts in limbo (`limbo.py`) for every ledger id allocated so far:
entries that it does not find are unknown, and only recovery and repair may add entries to these ledgers. Auditors see the
higher watermark in the registration, as after a lost disk, and have the copies checked.
Rule 2: every ledger found is fenced: it may have been fenced before, and a forgotten fence lets an old writer continue. Limbo
refuses regular adds to these ledgers anyway.
Rule 3: keys come from metadata, as recovery and repair take them from there; for ledgers that metadata does not have, from the
journal. A ledger in neither gets a key of zeros: no client can have its key, which is derived from its record in metadata.
Rule 4: the watermark is durable before the new index gets its name. A crash before that leaves a bookie in limbo with its old
index, a crash between the two renames one without an index, which refuses to start. In both cases, repeat the command.
Rule 5: blocks that only a search found (`entry_log_scan.py`, rule 2) are left out unless the operator accepts them: a client may
have planted them. What is left out is unknown here, and repair copies it from other bookies.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.cookie import Cookie, save_cookie
from cepheid_bookie.entry_log import log_path
from cepheid_bookie.entry_log_scan import LogBlock, scan_log
from cepheid_bookie.errors import BookieError, CookieError
from cepheid_bookie.journal_format import EntriesRecord
from cepheid_bookie.journal_scan import FoundRecord, SegmentScan
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.opening import IdentityRecords
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_bookie.stopped_bookie import INDEX, StoppedBookie
from cepheid_ports import CepheidError
from cepheid_rpc import MASTER_KEY_BYTES

_NEW = "index.rebuilt"
_OLD = "index.damaged-"
_BATCH = 4096  # blocks per write to the new index


class RebuildFailedError(BookieError):
    """The new index could not be written. The old one is unchanged."""

    hint: ClassVar[str] = "free space on the data disk, or look at it, and repeat the command"


@dataclass(slots=True)
class RebuildReport:
    """What the rebuild found. `problems`: places in logs that could not be read, by file and offset."""

    logs: int = 0
    blocks: int = 0
    damaged_blocks: int = 0  # among `blocks`: some of their entries are intact
    searched_blocks: int = 0  # rule 5: found, but left out unless accepted
    ledgers: int = 0
    ledgers_without_key: list[int] = field(default_factory=list)
    unindexed_logs: list[str] = field(default_factory=list)  # they have bytes, but no block that could be indexed
    largest_ledger_id: int = -1
    problems: list[str] = field(default_factory=list)
    limbo_below: int = 0
    old_index: str | None = None


class IndexRebuild:
    """The steps of the rebuild, in the order of the methods. `bookie` was opened for changes and stays open meanwhile."""

    def __init__(self, bookie: StoppedBookie) -> None:
        self._bookie = bookie
        self._disk = bookie.writable_disks[0]
        self.report = RebuildReport()

    def cookie(self) -> Cookie:
        """Return the cookie of the directories. Raises CookieError if it is missing, damaged, or not the same everywhere."""
        found: dict[str, Cookie] = {}
        for where, cookie in self._bookie.cookies().items():
            if not isinstance(cookie, Cookie):
                reason = "has no cookie" if cookie is None else f"has no readable cookie: {cookie}"
                raise CookieError(
                    f"{where} {reason}; bring back its file VERSION from a copy, an index alone is not enough to start"
                )
            found[where] = cookie
        if len({(cookie.bookie_id, cookie.cluster_id, cookie.incarnation) for cookie in found.values()}) > 1:
            listing = ", ".join(f"{where}: {cookie.bookie_id} {cookie.incarnation}" for where, cookie in found.items())
            raise CookieError(f"the directories do not belong together ({listing}); name the journal of this very bookie")
        return next(iter(found.values()))

    async def check(self, records: IdentityRecords) -> None:
        """Raise CookieError unless metadata knows these directories."""
        cookie, recorded = self.cookie(), await records.load(self.cookie().bookie_id)
        if recorded is None:
            raise CookieError(f"metadata has no cookie of bookie {cookie.bookie_id}; check that --metadata is that of its cluster")
        if (recorded.cluster_id, recorded.incarnation) != (cookie.cluster_id, cookie.incarnation):
            raise CookieError(
                f"metadata knows incarnation {recorded.incarnation} of bookie {cookie.bookie_id} in cluster "
                f"{recorded.cluster_id!r}, the directories are of {cookie.incarnation} in cluster {cookie.cluster_id!r}; "
                "check --metadata and --data"
            )

    def build(self, keys: Mapping[int, bytes], *, accept_searched: bool = False) -> RebuildReport:
        """Write the new index beside the old one, reading every byte of the logs. Raises RebuildFailedError, or OSError."""
        cookie, path = self.cookie(), self._bookie.data_dir / _NEW
        shutil.rmtree(path, ignore_errors=True)
        found = self._journal_keys() | dict(keys)
        index: RocksBlockIndex | None = None
        try:
            index = RocksBlockIndex(path)
            ledgers = self._index_logs(index, accept_searched=accept_searched)
            self._write_records(index, ledgers, found)
            self.report.largest_ledger_id = max(ledgers | found.keys(), default=-1)
            index.put_stamp(cookie.incarnation.encode())
            index.sync()
        except (CepheidError, OSError):
            raise
        except Exception as error:  # the database has no class of its own for a full disk
            raise RebuildFailedError(f"the new index {path} cannot be written: {error}", path=str(path)) from error
        finally:
            if index is not None:
                index.close()
        return self.report

    def discard(self) -> None:
        """Remove the new index."""
        shutil.rmtree(self._bookie.data_dir / _NEW, ignore_errors=True)

    async def begin_limbo(self, records: IdentityRecords, take_ledger_id: Callable[[], Awaitable[int]]) -> None:
        """Make the watermark durable on the disks, then in metadata (rules 1 and 4).

        It is higher than that of an earlier loss: auditors tell losses apart by it. If no ledger id was allocated since then,
        `take_ledger_id` is called to raise the counter in metadata; the id is not used.
        """
        await self.check(records)
        cookie = self.cookie()
        recorded = await records.load(cookie.bookie_id)
        assert recorded is not None, "checked above"
        earlier = max(cookie.limbo_below, recorded.limbo_below)
        if await records.next_ledger_id() <= earlier:
            await take_ledger_id()
        given_out = max(await records.next_ledger_id(), self.report.largest_ledger_id + 1)
        limbo = cookie.reborn(max(given_out, earlier))
        for disk in self._bookie.writable_disks:
            save_cookie(disk, limbo)
        await records.replace(recorded, limbo)
        self.report.limbo_below = limbo.limbo_below

    def swap(self) -> None:
        """Give the new index its final name. The old one is kept as `index.damaged-N`."""
        disk = self._disk
        if disk.exists(INDEX):
            number = next(n for n in range(1, 1 << 20) if not disk.exists(f"{_OLD}{n}"))
            disk.rename(INDEX, f"{_OLD}{number}")
            disk.sync_dir("")
            self.report.old_index = f"{_OLD}{number}"
        disk.sync_dir(_NEW)
        disk.rename(_NEW, INDEX)
        disk.sync_dir("")

    def _journal_keys(self) -> dict[int, bytes]:
        """Return the master keys that the journal still has. The first one of each ledger counts, as when it arrived."""
        keys: dict[int, bytes] = {}
        for segment_id in self._bookie.segments():
            file = self._bookie.open_segment(segment_id)
            try:
                for item in SegmentScan(file, segment_id).contents():
                    if isinstance(item, FoundRecord):
                        if isinstance(item.record, EntriesRecord):
                            keys.setdefault(item.record.group.ledger_id, item.record.master_key)
                        else:
                            keys.setdefault(item.record.ledger_id, item.record.record.master_key)
            finally:
                file.close()
        return keys

    def _index_logs(self, index: RocksBlockIndex, *, accept_searched: bool) -> set[int]:
        """Index every block in the order of the logs. Return the ids of the ledgers in them."""
        ledgers: set[int] = set()
        for log_id in self._bookie.logs():
            self.report.logs += 1
            pending: list[BlockRef] = []
            before, has_damage = self.report.blocks, False
            file = self._bookie.open_log(log_id)
            try:
                for item in scan_log(file, log_id):
                    has_damage = has_damage or not isinstance(item, LogBlock) or item.searched
                    if not isinstance(item, LogBlock):
                        self.report.problems.append(
                            f"{log_path(log_id)} at offset {item.offset} ({item.end - item.offset} bytes): {item.reason}"
                        )
                        continue
                    self.report.searched_blocks += item.searched
                    if item.searched and not accept_searched:
                        continue
                    if not item.intact:
                        self.report.damaged_blocks += 1
                        self.report.problems.append(f"{log_path(log_id)} at offset {item.ref.offset}: {_words(item)}")
                    pending.append(item.ref)
                    ledgers.add(item.ref.ledger_id)
                    if len(pending) == _BATCH:
                        self._write(index, pending)
                        pending = []
            finally:
                file.close()
            self._write(index, pending)
            if has_damage and self.report.blocks == before:
                self.report.unindexed_logs.append(log_path(log_id))
        return ledgers

    def _write(self, index: RocksBlockIndex, blocks: list[BlockRef]) -> None:
        self.report.blocks += len(blocks)
        if blocks:
            index.write(blocks, {})

    def _write_records(self, index: RocksBlockIndex, ledgers: set[int], keys: Mapping[int, bytes]) -> None:
        """Write the ledgers' records: fenced, with their master keys (rules 2 and 3)."""
        ordered = sorted(ledgers)
        self.report.ledgers = len(ordered)
        self.report.ledgers_without_key = [ledger_id for ledger_id in ordered if ledger_id not in keys]
        blank = bytes(MASTER_KEY_BYTES)
        for start in range(0, len(ordered), _BATCH):
            part = ordered[start : start + _BATCH]
            index.write([], {ledger_id: LedgerRecord(keys.get(ledger_id, blank), fenced=True) for ledger_id in part})


def _words(block: LogBlock) -> str:
    ref = block.ref
    return f"block {ref.ledger_id}:{ref.first_entry_id}..{ref.last_entry_id} is damaged, some of its entries are intact"
