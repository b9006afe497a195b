"""Open a bookie's storage: locks, identity, replay, checkpoint. A failure here fails the start.

    lock ► cookies ► mark, logs, index ► replay into the cache ► flush everything ► [limbo] ► mark = end of journal ► (caller) serve

Rule 1: the mark moves past the replayed journal before a new segment begins, so that a torn tail never has a successor, which would
make it look like damage.
Rule 2: before replayed entries are written to the entry log, unreferenced logs are deleted: an index that cannot be written makes
every start fail, and each would leave one more log (apache/bookkeeper#4114).
Rule 3: if the end of the journal was lost after it had been synced, the bookie starts in limbo (`limbo.py`). Disks and metadata
record this before the mark moves past that place, so that a start after a crash in between finds the damage again. The mark moves
to a segment of its own, so that the next start does not find it.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from cepheid_bookie.block_index import BlockIndex
from cepheid_bookie.bookie_life import BookieLife, LifeRecords, save_life
from cepheid_bookie.checkpoint import FlushStore
from cepheid_bookie.cookie import (
    BookieIdentity,
    Cookie,
    CookieRecords,
    Found,
    adoptable,
    check_not_swapped,
    decide,
    has_data_files,
    has_journal_files,
    is_left_over,
    is_reborn,
    load_cookie,
    save_cookie,
)
from cepheid_bookie.disk import Disk
from cepheid_bookie.entry_log import EntryLogWriter, dead_logs, list_logs, log_path
from cepheid_bookie.entry_log_scan import LogBlock, scan_log
from cepheid_bookie.errors import CookieError, DiskFullError, JournalCorruptError
from cepheid_bookie.journal_format import ALIGNMENT, NONCE_BYTES, EntriesRecord, SegmentHeader
from cepheid_bookie.journal_mark import FILES as MARK_FILES
from cepheid_bookie.journal_mark import MarkFile
from cepheid_bookie.journal_replay import JournalReplay, ReplayReport, TailDamage
from cepheid_bookie.journal_writer import JournalPosition, create_segment, delete_unused_segments
from cepheid_bookie.ledger_table import LISTED_AT_START, LedgerTable
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.watched_worker import WatchedWorker
from cepheid_bookie.write_cache import WriteCache
from cepheid_ports import Ports, Worker

log = logging.getLogger(__name__)

_DELETED_AT_ONCE = 1000  # ledgers of a decommissioned bookie
_LOOKED_AT = 16
"""Number of blocks of the newest log to look up in the index, which lacks blocks of deleted ledgers."""


class IdentityRecords(CookieRecords, LifeRecords, Protocol):
    """A bookie's records in metadata."""


@dataclass(frozen=True, slots=True)
class Directories:
    """The disks and the index with a bookie's data. Both disks may be the same."""

    data: Disk
    journal: Disk
    index: BlockIndex

    @property
    def disks(self) -> list[Disk]:
        return [self.data] if self.data is self.journal else [self.data, self.journal]

    def by_name(self, bookie_id: str) -> dict[str, Disk]:
        """Return the disks by a description for messages."""
        data, journal = f"the data directory of {bookie_id}", f"the journal directory of {bookie_id}"
        return {data: self.data} if self.data is self.journal else {data: self.data, journal: self.journal}

    def lock(self) -> None:
        """Lock all disks. On DirectoryInUseError none stays locked."""
        for place, disk in enumerate(self.disks):
            try:
                disk.lock()
            except BaseException:
                for locked in self.disks[:place]:
                    locked.unlock()
                raise

    def unlock(self) -> None:
        for disk in self.disks:
            disk.unlock()

    def close(self) -> None:
        """Close the index and unlock the disks. An error of the index is only logged, since nothing can be done about it."""
        try:
            self.index.close()
        except Exception as error:  # a full disk, for example; synced data is there at the next start
            log.warning("bookie.index_not_closed", extra={"error": str(error)})
        self.unlock()

    def full_disk(self, bookie_id: str, error: OSError) -> DiskFullError:
        """Return the error of a start that found a disk full, with the free space of each disk."""
        free = "; ".join(
            f"{name}{f' ({path})' if (path := getattr(disk, 'root', None)) else ''} has {disk.free_bytes():,} bytes free"
            for name, disk in self.by_name(bookie_id).items()
        )
        return DiskFullError(f"bookie {bookie_id} cannot start, its disk is full: {error}; {free}")

    def prepare(self) -> None:
        """Create the folders and sync them. Blocking."""
        self.data.mkdir("entrylog")
        self.data.sync_dir("")
        self.journal.mkdir("journal")
        self.journal.sync_dir("")


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads by their work: journal syncs, flushes, look-ups that adds wait for (a ledger's record, free space), brokers' reads,
    scans, collection of entry logs, the scrubber. The first three detect reads in their queue."""

    journal: WatchedWorker
    flush: WatchedWorker
    look: WatchedWorker
    read: Worker
    scan: Worker
    compact: Worker
    scrub: Worker

    @classmethod
    def start(cls, name: str, settings: StorageSettings, ports: Ports) -> Workers:
        return cls(
            WatchedWorker(ports.new_worker(f"{name}-journal", 1)),
            WatchedWorker(ports.new_worker(f"{name}-flush", 1)),
            WatchedWorker(ports.new_worker(f"{name}-look", 1)),
            ports.new_worker(f"{name}-read", settings.reader_threads),
            ports.new_worker(f"{name}-scan", settings.scan_threads),
            ports.new_worker(f"{name}-compact", 1),
            ports.new_worker(f"{name}-scrub", 1),
        )

    async def aclose(self) -> None:
        for worker in (self.journal, self.flush, self.look, self.read, self.scan, self.compact, self.scrub):
            await worker.aclose()

    @property
    def waited_behind_reads_s(self) -> float:
        """Seconds that work for adds waited for a thread because of reads queued before it. Expected to stay 0."""
        return sum(worker.waited_behind_reads_s for worker in (self.journal, self.flush, self.look))


@dataclass(frozen=True, slots=True)
class Storage:
    """A bookie's parts after a start: replayed, flushed, with the mark at the journal's end."""

    directories: Directories
    workers: Workers
    cookie: Cookie
    life: BookieLife | None  # None: there is no metadata to compare with
    mark: MarkFile
    cache: WriteCache
    ledgers: LedgerTable
    logs: EntryLogWriter


async def open_storage(
    identity: BookieIdentity,
    settings: StorageSettings,
    directories: Directories,
    cookies: IdentityRecords | None,
    ports: Ports,
    *,
    accept_empty_disk: bool,
    listed_at_start: int,
) -> Storage:
    """Open a bookie's storage. If this raises, no lock and no thread is left, and the index is closed."""
    index = directories.index
    try:
        directories.lock()
    except BaseException:
        index.close()
        raise
    workers = Workers.start(identity.bookie_id, settings, ports)
    run = workers.flush.run
    try:
        await run(lambda: check_not_swapped(directories.data, directories.journal))
        await run(directories.prepare)
        cookie = await check_identity(directories, identity, cookies, ports, workers.flush, accept_empty_disk=accept_empty_disk)
        life = None
        if cookies is not None:
            cookie, life = await begin_life(directories, cookie, cookies, workers.flush, accept_old_copy=accept_empty_disk)
        mark, cache = MarkFile(directories.data), WriteCache(settings.write_cache_bytes)
        ledgers = LedgerTable(index, workers.read, workers.look, cache.last_entry_id, limit=settings.loaded_ledgers)
        logs = await run(lambda: EntryLogWriter(directories.data, block_bytes=settings.block_bytes, log_bytes=settings.log_bytes))
        report = await run(lambda: replay(directories, mark, logs, cache, ledgers, listed_at_start))
        if report.damage is not None:
            cookie = await begin_limbo(directories, cookie, cookies, workers.flush, report.damage)
            await run(lambda: pass_damage(directories, mark, report, new_nonce(ports)))
    except BaseException as error:
        await workers.aclose()
        directories.close()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise directories.full_disk(identity.bookie_id, error) from error
        raise
    facts: dict[str, object] = {"bookie": identity.bookie_id, "replayed_records": report.records}
    if ledgers.all_listed:
        facts["ledgers"] = ledgers.count
    log.info("bookie.opened", extra={**facts, "cut_offset": report.cut_offset, "segment": report.end.segment_id})
    if report.unsized_bytes is not None and report.unsized_bytes < settings.journal_segment_bytes:
        hint = "an older release wrote it, so it is not known whether it was cut off; if so, verify the ledgers of this bookie"
        short = {"segment": report.end.segment_id, "bytes": report.unsized_bytes, "setting_bytes": settings.journal_segment_bytes}
        log.warning("bookie.journal_segment_short", extra={"bookie": identity.bookie_id, **short, "hint": hint})
    return Storage(directories, workers, cookie, life, mark, cache, ledgers, logs)


async def check_identity(
    directories: Directories,
    identity: BookieIdentity,
    records: IdentityRecords | None,
    ports: Ports,
    worker: Worker,
    *,
    accept_empty_disk: bool,
) -> Cookie:
    """Refuse to start on directories that are incomplete or belong to another bookie, and stamp new ones."""
    mine = Cookie(identity.bookie_id, identity.cluster_id, f"{ports.random.getrandbits(128):032x}")
    places = await worker.run(lambda: _find_cookies(directories, mine))
    recorded = await records.load(identity.bookie_id) if records is not None else None
    if records is not None and (known := adoptable(mine, places, recorded)) is not None and await records.is_restored():
        return await _adopt(directories, known, recorded, records, worker)
    gone = await records.decommissioned(identity.bookie_id) if records is not None and recorded is None else None
    if records is not None and gone is not None and is_left_over(mine, places, gone):
        return await _start_over(directories, mine, gone, records, worker)
    if accept_empty_disk and records is not None and recorded is not None and is_reborn(mine, places, recorded):
        return await _give_birth_again(directories, mine, recorded, records, worker)
    cookie, stamp = decide(mine, places, recorded, asked=records is not None)
    if stamp:
        await worker.run(lambda: _stamp(directories, cookie))
        if records is not None:
            await records.create(cookie)
        log.info("bookie.stamped", extra={"bookie": cookie.bookie_id, "incarnation": cookie.incarnation})
    return cookie


async def _give_birth_again(
    directories: Directories, mine: Cookie, recorded: Cookie, records: IdentityRecords, worker: Worker
) -> Cookie:
    """Start as a new incarnation after its disks were lost. The watermark is read now, even if an earlier attempt was interrupted:
    the old disks may have served in between."""
    cookie = mine.reborn(await records.next_ledger_id())
    life = await records.load_life(cookie.bookie_id)

    def stamp() -> None:
        _stamp(directories, cookie)
        for disk in directories.disks:
            save_life(disk, life)  # else the disks would look like an old copy

    await worker.run(stamp)
    await records.replace(recorded, cookie)
    facts = {"bookie": cookie.bookie_id, "incarnation": cookie.incarnation, "lost_incarnation": recorded.incarnation}
    hint = "its data is gone: ledgers that name it are short of a copy and need repair"
    log.warning("bookie.reborn", extra={**facts, "limbo_below": cookie.limbo_below, "hint": hint})
    return cookie


async def _start_over(
    directories: Directories, mine: Cookie, decommissioned: str, records: IdentityRecords, worker: Worker
) -> Cookie:
    """Delete the data of a decommissioned bookie, and stamp the directories as those of a new one.

    Check metadata again for ledgers that depend on it: a bookie that only lost its session and was decommissioned meanwhile may
    have received ledgers after it was found empty.
    """
    if await records.is_named(mine.bookie_id):
        raise CookieError(
            f"bookie {mine.bookie_id} (incarnation {decommissioned}) was decommissioned, but ledgers name it or miss entries that "
            f"it may have, so its data is kept; find them with `cepheid ledgers list --bookie {mine.bookie_id}`, with --deleted "
            "those that can be brought back, and with `cepheid ledgers short`: without any it starts again, empty"
        )

    def start_over() -> None:
        _delete_data(directories)
        _stamp(directories, mine)

    await worker.run(start_over)
    await records.create(mine)
    facts = {"bookie": mine.bookie_id, "incarnation": mine.incarnation, "decommissioned": decommissioned}
    log.warning("bookie.started_over", extra={**facts, "hint": "it was decommissioned, and no ledger needs its old data"})
    return mine


def _delete_data(directories: Directories) -> None:
    """Delete all entries. Stamps stay, so that the start after an interrupted one continues with what is left."""
    index, above = directories.index, -1
    while ledgers := index.ledger_ids(above, _DELETED_AT_ONCE):
        index.delete_ledgers({ledger_id: None for ledger_id, _ in ledgers})
        above = ledgers[-1][0]
    data, journal = directories.data, directories.journal
    for log_id in list_logs(data):
        data.unlink(log_path(log_id))
    data.sync_dir("entrylog")
    for name in MARK_FILES:
        if data.exists(name):
            data.unlink(name)
    data.sync_dir("")
    for name in journal.listdir("journal"):
        journal.unlink(f"journal/{name}")
    journal.sync_dir("journal")


async def _adopt(
    directories: Directories, known: Cookie, recorded: Cookie | None, records: IdentityRecords, worker: Worker
) -> Cookie:
    """Register disks that are not in the backup from which metadata was restored.

    Without a record of this bookie they are its only disks. With a record of another incarnation, either may be older. So these
    disks may lack entries acknowledged on the others, and the bookie does not deny entries of ledgers that exist by now.
    """
    facts = {"bookie": known.bookie_id, "incarnation": known.incarnation}
    if recorded is None:
        await records.create(known)
    else:
        cookie = known.reborn(await records.next_ledger_id())
        await worker.run(lambda: _stamp(directories, cookie))
        await records.replace(recorded, cookie)
        known, facts["backup_incarnation"] = cookie, recorded.incarnation
    hint = "metadata was restored from a backup that does not know these disks"
    log.warning("bookie.adopted", extra={**facts, "limbo_below": known.limbo_below, "hint": hint})
    return known


async def begin_life(
    directories: Directories, cookie: Cookie, records: IdentityRecords, worker: Worker, *, accept_old_copy: bool
) -> tuple[Cookie, BookieLife]:
    """Refuse to start on an old copy of the directories; with the operator's consent, start on it in limbo."""
    life = BookieLife(cookie, directories.by_name(cookie.bookie_id), records, worker)
    behind = await life.old_copies()
    if behind is not None and not accept_old_copy:
        message = f"the directories of bookie {cookie.bookie_id} are an old copy, what it took since then is missing: {behind}"
        what_to_do = "bring back the newest state; if it is lost for good, start with --accept-empty-disk (what is missing is"
        raise CookieError(f"{message}; {what_to_do} answered as unknown, never denied)")
    if behind is not None:
        # before the life is counted, so that the start after a crash in between is refused again
        cookie = await _raise_watermark(directories, cookie, records, worker)
        facts = {"bookie": cookie.bookie_id, "limbo_below": cookie.limbo_below, "error": behind}
        log.warning("bookie.old_copy_accepted", extra={**facts, "hint": "ledgers that name it may be short of copies"})
    await life.count()
    return cookie, life


async def begin_limbo(
    directories: Directories, cookie: Cookie, records: IdentityRecords | None, worker: Worker, damage: TailDamage
) -> Cookie:
    """Record durably that this bookie may have lost entries of ledgers that exist by now."""
    found = f"{damage.file} lost what was synced from offset {damage.offset} on: {damage.proof}"
    if records is None:
        message = f"{found}; without metadata this bookie cannot record that it may have lost acknowledged entries"
        raise JournalCorruptError(message, file=damage.file, offset=damage.offset)
    cookie = await _raise_watermark(directories, cookie, records, worker)
    hint = "check its disk; what it may have lost is answered as unknown, never denied; run `cepheid ledgers verify --all`"
    facts = {"bookie": cookie.bookie_id, "file": damage.file, "offset": damage.offset, "limbo_below": cookie.limbo_below}
    log.warning("bookie.journal_end_lost", extra={**facts, "error": found, "hint": hint})
    return cookie


def new_nonce(ports: Ports) -> bytes:
    """Return random bytes that distinguish a journal segment from all others."""
    return ports.random.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "big")


def pass_damage(directories: Directories, mark: MarkFile, report: ReplayReport, nonce: bytes) -> None:
    """Move the mark past a damaged journal end, to a new segment. The damaged one stays until the older mark is past it as well.
    Blocking."""
    header = SegmentHeader(report.last_segment_id + 1, report.end.sequence, nonce, size_bytes=ALIGNMENT)
    create_segment(directories.journal, header).close()
    mark.save(JournalPosition(header.first_sequence, header.segment_id, ALIGNMENT))


async def _raise_watermark(directories: Directories, cookie: Cookie, records: IdentityRecords, worker: Worker) -> Cookie:
    reborn = cookie.reborn(await records.next_ledger_id())
    await worker.run(lambda: _stamp(directories, reborn))
    await records.replace(cookie, reborn)
    return reborn


def _find_cookies(directories: Directories, mine: Cookie) -> dict[str, Found]:
    data, journal, index = directories.data, directories.journal, directories.index
    data_name, journal_name = f"the data directory of {mine.bookie_id}", f"the journal directory of {mine.bookie_id}"
    in_data, in_journal = load_cookie(data, data_name), load_cookie(journal, journal_name)
    stamp = index.stamp()
    in_index = None if stamp is None else Cookie(mine.bookie_id, mine.cluster_id, stamp.decode("utf-8", "replace"))
    return {
        data_name: Found(in_data, has_data_files(data)),
        journal_name: Found(in_journal, has_journal_files(journal)),
        f"the block index of {mine.bookie_id}": Found(in_index, next(index.records(), None) is not None),
    }


def _delete_dead_logs(directories: Directories) -> None:
    """Delete unreferenced logs, before this process creates its own. A failed start leaves the newest log: only if that may be
    unreferenced is the whole index read, since the duration of a start must not depend on the size of the index."""
    try:
        log_ids = list_logs(directories.data)
        if not log_ids or _is_used(directories, log_ids[-1]):
            return
        dead = dead_logs(directories.data, directories.index)
    except Exception as error:  # any error of the database: a bookie also starts with a partly readable index
        log.warning(
            "bookie.index_not_read", extra={"error": repr(error), "hint": "logs of starts that failed stay until a collection"}
        )
        return
    for log_id in dead:
        directories.data.unlink(log_path(log_id))


def _is_used(directories: Directories, log_id: int) -> bool:
    """Return whether the index has one of the log's first blocks. If False, it may still have later ones."""
    file = directories.data.open(log_path(log_id))
    try:
        found = islice(scan_log(file, log_id), _LOOKED_AT)
        return any(isinstance(block, LogBlock) and block.intact and directories.index.contains(block.ref) for block in found)
    finally:
        file.close()


def _stamp(directories: Directories, cookie: Cookie) -> None:
    for disk in directories.disks:
        save_cookie(disk, cookie)
    directories.index.put_stamp(cookie.incarnation.encode())


def replay(
    directories: Directories,
    mark: MarkFile,
    logs: EntryLogWriter,
    cache: WriteCache,
    ledgers: LedgerTable,
    listed_at_start: int = LISTED_AT_START,
) -> ReplayReport:
    """Write all journal records to entry log and index, and move the mark past them unless the end is damaged. Blocking."""
    mark.load()
    delete_unused_segments(directories.journal)
    ledgers.begin_listing(listed_at_start)
    store = FlushStore(logs, directories.index, mark, directories.journal)
    journal = JournalReplay(directories.journal, mark.current)

    def flush() -> None:
        if not logs.written_bytes:
            _delete_dead_logs(directories)  # rule 2
        half, records = cache.swap(), ledgers.take_dirty()
        try:
            store.flush(half, records)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            for log_id in dead_logs(directories.data, directories.index):  # a compaction may have been interrupted
                if not logs.is_needed(log_id):
                    directories.data.unlink(log_path(log_id))
            store.flush(half, records)
        cache.release()
        ledgers.on_flushed()

    for record in journal.records():
        if isinstance(record, EntriesRecord):
            state = ledgers.get_or_load_now(record.group.ledger_id, record.master_key)
            if state.deleted:
                continue
            cache.add(record.group)
            state.last_entry_id = max(state.last_entry_id, record.group.last_entry_id)
            if cache.half_full:  # the mark stays; it moves only at the end of the journal
                flush()
        else:
            state = ledgers.get_or_load_now(record.ledger_id, record.record.master_key)
            merged = state.record().merge(record.record)
            if merged != state.record():
                state.fenced, state.explicit_lac = merged.fenced, merged.explicit_lac
                ledgers.mark_dirty(state)
            state.fence_durable = state.fenced
    if cache.active.ledgers or ledgers.has_dirty:
        flush()
    if journal.report.end != mark.current and journal.report.damage is None:  # rule 3
        store.save_mark(journal.report.end)
    return journal.report
