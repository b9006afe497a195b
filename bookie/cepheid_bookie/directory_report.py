"""Reports on the directories of a stopped bookie: files, ledgers, the location of an entry.

The figures of entry logs come from the index: a block to which the index does not refer is dead, whatever is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.compaction_choice import LogFigures
from cepheid_bookie.disk import DiskFile
from cepheid_bookie.entry_block import decode_block, uncheck_block
from cepheid_bookie.entry_log import LOG_VERSION, log_path
from cepheid_bookie.entry_log_scan import log_header_damage
from cepheid_bookie.errors import BlockCorruptError, BookieError, IndexCorruptError
from cepheid_bookie.journal_format import ALIGNMENT, EntriesRecord, LedgerStateRecord, segment_path
from cepheid_bookie.journal_mark import MarkFile
from cepheid_bookie.journal_scan import FoundRecord, JournalDamage, SegmentScan
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.stopped_bookie import INDEX, NoJournalHereError, StoppedBookie, parse_segment
from cepheid_rpc import DigestMismatchError, EntryGroup, MalformedGroupError

_ROOT_NAMES = ("VERSION", "LIFE", "SCRUB", "LOCK", "mark", "journal", "entrylog", INDEX)


class NoSuchEntryHereError(BookieError):
    """The bookie does not hold this ledger or entry, as far as its files can be read."""

    hint = "`cepheid bookie-shell ledgers` lists what it holds, `cepheid ledgers list` which bookies should hold the ledger"


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """A journal segment. `needed`: a start of the bookie reads it, because the log mark has not passed its end."""

    file: str
    size_bytes: int
    format_version: int | None
    first_sequence: int | None
    last_sequence: int | None
    needed: bool | None
    problem: str


@dataclass(frozen=True, slots=True)
class LogReport:
    """An entry log. `live_bytes` are those of blocks to which the index refers; None without an index."""

    file: str
    log_id: int
    size_bytes: int
    format_version: int | None
    blocks: int | None
    ledgers: int | None
    live_bytes: int | None
    problem: str

    @property
    def live_share(self) -> float | None:
        return None if self.live_bytes is None else self.live_bytes / max(1, self.size_bytes - ALIGNMENT)


@dataclass(frozen=True, slots=True)
class IndexReport:
    file: str
    size_bytes: int
    blocks: int | None
    ledgers: int | None  # that have a record
    deleted: int | None  # those whose tombstone is kept
    problem: str


@dataclass(frozen=True, slots=True)
class MarkReport:
    """The log mark: everything below it in the journal is also in the entry logs and the index."""

    sequence: int | None
    segment_id: int | None
    offset: int | None
    problem: str


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file or folder that a start of the bookie does not read, such as an index that was replaced."""

    file: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FilesReport:
    mark: MarkReport
    journal: list[SegmentReport]
    journal_problem: str
    logs: list[LogReport]
    index: IndexReport
    others: list[OtherFile]


@dataclass(slots=True)
class LedgerUse:
    """The data of one ledger on this bookie. Entries that are in two blocks count twice in `entries`."""

    ledger_id: int
    entries: int = 0
    first_entry_id: int | None = None
    last_entry_id: int | None = None
    log_bytes: int = 0
    journal_bytes: int = 0  # above the log mark: a start of the bookie moves them to an entry log
    logs: list[str] = field(default_factory=list)
    fenced: bool | None = None  # None: there is no record
    deleted_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """The location of a copy of an entry. `problem` is empty if the copy is as its writer sent it."""

    file: str
    offset: int  # of the block, or of the record
    length: int
    first_entry_id: int
    last_entry_id: int
    problem: str
    entry: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeptLog:
    """An entry log and the ledgers for which it is kept: live bytes by ledger id."""

    log_id: int
    file: str
    size_bytes: int
    live_bytes: int
    ledgers: dict[int, int]

    @property
    def live_share(self) -> float:
        return self.live_bytes / max(1, self.size_bytes - ALIGNMENT)


def compaction_of(log: KeptLog, settings: StorageSettings) -> str:
    """Return what compaction in a bookie with these settings does with a log."""
    if not log.ledgers:
        return "deleted"
    share = LogFigures(log.log_id, log.size_bytes, log.live_bytes, len(log.ledgers)).share
    if share < settings.compaction_minor_share:
        return "next collection"
    return "next major one" if share < settings.compaction_major_share else "not worth it"


def report_files(bookie: StoppedBookie) -> FilesReport:
    """List all files. What cannot be read has a `problem`."""
    mark = bookie.mark()
    blocks, problem = _known_blocks(bookie)
    by_log: defaultdict[int, list[BlockRef]] = defaultdict(list)
    for block in blocks or ():
        by_log[block.log_id].append(block)
    journal: list[SegmentReport] = []
    journal_problem = ""
    try:
        journal = [_report_segment(bookie, segment_id, mark) for segment_id in bookie.segments()]
    except BookieError as error:
        journal_problem = str(error)
    logs = [_report_log(bookie, log_id, None if problem else by_log[log_id]) for log_id in bookie.logs()]
    index = _report_index(bookie, len(blocks or ()), problem)
    return FilesReport(_report_mark(mark), journal, journal_problem, logs, index, _report_others(bookie))


def report_ledgers(bookie: StoppedBookie) -> list[LedgerUse]:
    """Return every ledger that has entries or a record here, by id. Raises IndexCorruptError, NoJournalHereError."""
    found: dict[int, LedgerUse] = {}

    def use_of(ledger_id: int) -> LedgerUse:
        return found.setdefault(ledger_id, LedgerUse(ledger_id))

    logs: defaultdict[int, set[int]] = defaultdict(set)
    for block in bookie.blocks():
        use = use_of(block.ledger_id)
        use.log_bytes += block.length
        _count(use, block.first_entry_id, block.last_entry_id)
        logs[block.ledger_id].add(block.log_id)
    for ledger_id, log_ids in logs.items():
        found[ledger_id].logs = [f"{log_id:08x}" for log_id in sorted(log_ids)]
    for ledger_id, record in bookie.records():
        use = use_of(ledger_id)
        use.fenced, use.deleted_at_ms = record.fenced, record.deleted_at_ms if record.deleted else None
    for _, item in journal_above_mark(bookie):
        if isinstance(item, FoundRecord) and isinstance(item.record, EntriesRecord):
            use = use_of(item.record.group.ledger_id)
            use.journal_bytes += item.length
            _count(use, item.record.group.first_entry_id, item.record.group.last_entry_id)
        elif isinstance(item, FoundRecord) and isinstance(item.record, LedgerStateRecord):
            use = use_of(item.record.ledger_id)
            use.fenced = bool(use.fenced) or item.record.record.fenced
    return [found[ledger_id] for ledger_id in sorted(found)]


def report_kept_logs(bookie: StoppedBookie, log_id: int | None = None) -> list[KeptLog]:
    """Return why logs are kept: all of them, or one. Raises IndexCorruptError, NoSuchFileHereError."""
    wanted = bookie.logs() if log_id is None else [log_id]
    live: dict[int, defaultdict[int, int]] = {wanted_id: defaultdict(int) for wanted_id in wanted}
    sizes = {wanted_id: _size(bookie.open_log(wanted_id)) for wanted_id in wanted}
    for block in bookie.blocks():
        if block.log_id in live:
            live[block.log_id][block.ledger_id] += block.length
    return [
        KeptLog(kept, log_path(kept), sizes[kept], sum(ledgers.values()), dict(sorted(ledgers.items())))
        for kept, ledgers in live.items()
    ]


def find_entry(bookie: StoppedBookie, ledger_id: int, entry_id: int) -> tuple[list[EntryPlace], list[str]]:
    """Return every copy of an entry, those in the index before those in the journal, and what could not be searched.

    Raises IndexCorruptError or NoJournalHereError if no copy was found and one may be in a part that could not be searched;
    NoSuchEntryHereError.
    """
    places: list[EntryPlace] = []
    problems: list[BookieError] = []
    knows_ledger = False
    try:
        for block in bookie.blocks():
            knows_ledger = knows_ledger or block.ledger_id == ledger_id
            if block.ledger_id == ledger_id and block.first_entry_id <= entry_id <= block.last_entry_id:
                places.append(_place_in_log(bookie, block, entry_id))
    except IndexCorruptError as error:
        problems.append(error)
    try:
        segments = bookie.segments()
    except NoJournalHereError as error:
        segments = []
        problems.append(error)
    for segment_id in segments:
        for item in _scan(bookie, segment_id):
            if isinstance(item, FoundRecord) and isinstance(item.record, EntriesRecord):
                group = item.record.group
                knows_ledger = knows_ledger or group.ledger_id == ledger_id
                if group.ledger_id == ledger_id and group.first_entry_id <= entry_id <= group.last_entry_id:
                    places.append(_place(segment_path(segment_id), item.offset, item.length, group, entry_id))
    if places:
        return places, [str(error) for error in problems]
    if problems:
        raise problems[0]
    record = dict(bookie.records()).get(ledger_id)
    if record is not None and record.deleted:
        raise NoSuchEntryHereError(f"ledger {ledger_id} was deleted on this bookie", ledger_id=ledger_id)
    if not knows_ledger and record is None:
        raise NoSuchEntryHereError(f"this bookie has nothing of ledger {ledger_id}", ledger_id=ledger_id)
    message = f"this bookie has ledger {ledger_id}, but no entry {entry_id} of it"
    raise NoSuchEntryHereError(message, ledger_id=ledger_id, entry_id=entry_id)


def journal_above_mark(bookie: StoppedBookie) -> Iterator[tuple[int, FoundRecord | JournalDamage]]:
    """Yield what a start of the bookie replays, with its segment; the whole journal if there is no readable mark."""
    mark = bookie.mark()
    for segment_id in bookie.segments():
        start = ALIGNMENT
        if isinstance(mark, MarkFile):
            if segment_id < mark.current.segment_id:
                continue
            if segment_id == mark.current.segment_id:
                start = max(mark.current.offset, ALIGNMENT)
        for item in _scan(bookie, segment_id, start):
            yield segment_id, item


def _scan(bookie: StoppedBookie, segment_id: int, start: int = ALIGNMENT) -> Iterator[FoundRecord | JournalDamage]:
    file = bookie.open_segment(segment_id)
    try:
        yield from SegmentScan(file, segment_id).contents(start)
    finally:
        file.close()


def _known_blocks(bookie: StoppedBookie) -> tuple[list[BlockRef] | None, str]:
    """Return the blocks of the index, or what is wrong with it."""
    try:
        return list(bookie.blocks()), ""
    except IndexCorruptError as error:
        return None, str(error.args[0])


def _report_mark(mark: MarkFile | str) -> MarkReport:
    if isinstance(mark, str):
        return MarkReport(None, None, None, mark)
    if not mark.exists:
        return MarkReport(None, None, None, "there is none: the bookie has never written its cache to an entry log")
    return MarkReport(mark.current.sequence, mark.current.segment_id, mark.current.offset, "")


def _report_segment(bookie: StoppedBookie, segment_id: int, mark: MarkFile | str) -> SegmentReport:
    file = bookie.open_segment(segment_id)
    try:
        scan, problems = SegmentScan(file, segment_id), []
        first = None if scan.header is None else scan.header.first_sequence
        last: int | None = None
        for item in scan.contents():
            if isinstance(item, FoundRecord):
                last = item.sequence
                first = item.sequence if first is None else first
            else:
                problems.append(f"{'torn' if item.torn else 'damaged'} at offset {item.offset}: {item.reason}")
        version = None if scan.header is None else scan.header.version
        needed = None if isinstance(mark, str) else segment_id >= mark.current.segment_id
        return SegmentReport(segment_path(segment_id), scan.size_bytes, version, first, last, needed, "; ".join(problems))
    finally:
        file.close()


def _report_log(bookie: StoppedBookie, log_id: int, blocks: list[BlockRef] | None) -> LogReport:
    file = bookie.open_log(log_id)
    try:
        size, damage = file.size(), log_header_damage(file, log_id)
    finally:
        file.close()
    version, problem = (LOG_VERSION, "") if damage is None else (None, damage.reason)
    if blocks is None:
        return LogReport(log_path(log_id), log_id, size, version, None, None, None, problem)
    if beyond := [block for block in blocks if block.offset + block.length > size]:
        lost = f"the log is cut off: {len(beyond)} blocks of the index lie beyond its end"
        problem = "; ".join(filter(None, [problem, lost]))
    ledgers = len({block.ledger_id for block in blocks})
    live_bytes = sum(block.length for block in blocks)
    return LogReport(log_path(log_id), log_id, size, version, len(blocks), ledgers, live_bytes, problem)


def _report_index(bookie: StoppedBookie, blocks: int, problem: str) -> IndexReport:
    path = bookie.data_dir / INDEX
    size = _directory_bytes(path)
    if problem:
        return IndexReport(INDEX, size, None, None, None, problem)
    try:
        records = [record for _, record in bookie.records()]
    except IndexCorruptError as error:
        return IndexReport(INDEX, size, blocks, None, None, str(error.args[0]))
    return IndexReport(INDEX, size, blocks, len(records), sum(record.deleted for record in records), "")


def _report_others(bookie: StoppedBookie) -> list[OtherFile]:
    """Return what lies beside the entry logs and segments, and everything at the root that is not a file of a bookie."""
    root = bookie.data_dir
    known = {log_path(log_id) for log_id in bookie.logs()}
    found = [name for name in _names(root / "entrylog", "entrylog/") if name not in known]
    journal_root = bookie.journal_dir or root
    strange = [name for name in _names(journal_root / "journal") if parse_segment(name) is None]
    others = [OtherFile(f"journal/{name}", (journal_root / "journal" / name).stat().st_size) for name in strange]
    found += [name for name in _names(root) if name.split(".")[0] not in _ROOT_NAMES or name.startswith(f"{INDEX}.")]
    return others + [OtherFile(name, _directory_bytes(root / name) or (root / name).stat().st_size) for name in found]


def _names(directory: Path, prefix: str = "") -> list[str]:
    return sorted(f"{prefix}{path.name}" for path in directory.iterdir()) if directory.is_dir() else []


def _directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0


def _count(use: LedgerUse, first: int, last: int) -> None:
    use.entries += last - first + 1
    use.first_entry_id = first if use.first_entry_id is None else min(first, use.first_entry_id)
    use.last_entry_id = last if use.last_entry_id is None else max(last, use.last_entry_id)


def _place_in_log(bookie: StoppedBookie, block: BlockRef, entry_id: int) -> EntryPlace:
    """Return the copy in a block of the index, also one that cannot be read."""
    place = (log_path(block.log_id), block.offset, block.length)
    bounds = (block.first_entry_id, block.last_entry_id)
    try:
        file = bookie.open_log(block.log_id)
    except BookieError:
        return EntryPlace(*place, *bounds, "this log is missing")
    try:
        data = file.pread(block.length, block.offset)
    except OSError as error:
        return EntryPlace(*place, *bounds, f"the log cannot be read: {error}")
    finally:
        file.close()
    damage = ""
    try:
        group = decode_block(data)
    except BlockCorruptError:
        damage = "the checksum of the block does not match"
        try:
            group = uncheck_block(data)
        except BlockCorruptError as error:
            return EntryPlace(*place, *bounds, f"the block is damaged: {error.args[0]}")
    if (group.ledger_id, group.first_entry_id, group.last_entry_id) != block[:3]:
        return EntryPlace(*place, *bounds, f"the log has {group!r} there: the index or the log is damaged")
    found = _place(place[0], block.offset, block.length, group, entry_id)
    if damage and not found.problem:
        damage = f"{damage}, but this entry is intact"
        return EntryPlace(*place, *bounds, damage, found.entry)
    return found


def _place(file: str, offset: int, length: int, group: EntryGroup, entry_id: int) -> EntryPlace:
    problem, entry = "", None
    try:
        group.slice(entry_id, entry_id).verify()
        entry = bytes(group.entry(entry_id))
    except (DigestMismatchError, MalformedGroupError) as error:
        problem = str(error.args[0])
    return EntryPlace(file, offset, length, group.first_entry_id, group.last_entry_id, problem, entry)


def _size(file: DiskFile) -> int:
    try:
        return file.size()
    finally:
        file.close()
