"""Mistakes of a bookie: what it acknowledges, keeps, denies, and believes of its disks when it starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from cepheid_bookie import Bookie, MetadataCookies, entry_reader, journal_replay
from cepheid_bookie.add_answers import AddCompletion
from cepheid_bookie.admission import Admission
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.bookie_life import BookieLife
from cepheid_bookie.checkpoint import Checkpointer, FlushStore
from cepheid_bookie.cookie import Cookie
from cepheid_bookie.damaged_blocks import DamagedBlocks
from cepheid_bookie.entry_log import EntryLogReader
from cepheid_bookie.journal_format import ALIGNMENT, JournalRecord, encode_ledger_to
from cepheid_bookie.journal_mark import START, MarkFile
from cepheid_bookie.journal_replay import JournalReplay
from cepheid_bookie.journal_tail import Tail, judge_tail
from cepheid_bookie.journal_writer import JournalPosition, JournalWriter
from cepheid_bookie.ledger_access import LedgerAccess
from cepheid_bookie.ledger_table import LedgerTable
from cepheid_ledger.ledger_writer import LedgerWriter
from cepheid_metadata import DeletedLedgers, LedgerMetadata, MetadataError, Op
from cepheid_rpc import AddRequest, Buffer, EntryGroup, ReadRequest, Status
from tests.simulation.mutants.registry import mutant, scenario_mutant


class _UnsyncedFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        pass


@mutant("S1", "S2", "S3", "S8")  # S8: the journal is damaged then, and the bookie refuses to start
@contextlib.contextmanager
def acknowledge_before_sync() -> Iterator[None]:
    """The journal answers when the bytes were written, and leaves the sync to the system."""
    roll = JournalWriter._roll

    def roll_unsynced(self: JournalWriter, *args: Any) -> None:
        roll(self, *args)
        self._file = _UnsyncedFile(self._file)

    with mock.patch.object(JournalWriter, "_roll", roll_unsynced):
        yield


@mutant("S3", "S6")
@contextlib.contextmanager
def answer_a_fence_before_it_is_durable() -> Iterator[None]:
    """The fence holds in memory at once; its record is on its way to the journal, and not waited for (BOOKKEEPER-500)."""

    async def fence(self: LedgerAccess, state: Any) -> Status:
        if not state.fenced:
            state.fenced = True
            self._ledgers.mark_dirty(state)
            parts: list[Buffer] = []
            self._journal.append(parts, encode_ledger_to(parts, state.ledger_id, state.record()), lambda outcome: None)
        return Status.OK

    with mock.patch.object(LedgerAccess, "_fence", fence):
        yield


@mutant("L5", "S3", "S4", "S6")
@contextlib.contextmanager
def fence_not_by_reads() -> Iterator[None]:
    """Bookies fence by LAC requests alone, and answer a recovery's read without it: up to Qa - 1 of a window stay unfenced."""
    refuse_read = Bookie._refuse_read

    async def unfenced(self: Bookie, request: ReadRequest) -> Status | None:
        return await refuse_read(self, replace(request, fence=False))

    with mock.patch.object(Bookie, "_refuse_read", unfenced):
        yield


@mutant("S6", "S2", "S3")
@contextlib.contextmanager
def take_the_mark_after_the_flush() -> Iterator[None]:
    """What was journaled during a flush is below the mark, and neither in the log nor in the index."""
    on_flushed = Checkpointer._on_flushed

    def late(self: Checkpointer) -> None:
        self._taken = self._journal.durable
        on_flushed(self)

    with mock.patch.object(Checkpointer, "_on_flushed", late):
        yield


@mutant("S6", "S2", "S3")
@contextlib.contextmanager
def take_an_empty_cache_for_an_empty_checkpoint() -> Iterator[None]:
    """Without entries nothing is flushed, fences and LACs included; the mark moves."""
    flush = FlushStore.flush

    def shortcut(self: FlushStore, half: Any, records: Any) -> None:
        if half.ledgers:
            flush(self, half, records)

    with mock.patch.object(FlushStore, "flush", shortcut):
        yield


@mutant("S7", "S8", "S2", "S3")
@contextlib.contextmanager
def rename_the_mark_without_directory_sync() -> Iterator[None]:
    """Segments are deleted by a mark that power loss takes back."""
    save = MarkFile.save

    def unsynced(self: MarkFile, mark: Any) -> None:
        disk = self._disk
        self._disk = _UnsyncedNames(disk)
        try:
            save(self, mark)
        finally:
            self._disk = disk

    with mock.patch.object(MarkFile, "save", unsynced):
        yield


@scenario_mutant
@contextlib.contextmanager
def save_no_mark_before_the_first_checkpoint() -> Iterator[None]:
    """A bookie that lost its journal before then cannot tell that it had one.

    Random worlds miss it: they lose whole directories, with the cookies in them, and no files of a journal.
    """

    def later(self: JournalWriter, save: Any) -> None:
        self._save_first_mark = None

    with mock.patch.object(JournalWriter, "_mark_start", later):
        yield


@scenario_mutant
@contextlib.contextmanager
def start_over_although_ledgers_name_the_bookie() -> Iterator[None]:
    """It was decommissioned, so its data is of no use any more.

    Random worlds miss it: a bookie has to lose its session for as long as a decommissioning takes, and be given a ledger meanwhile.
    """

    async def is_named(self: MetadataCookies, bookie_id: str) -> bool:
        return False

    with mock.patch.object(MetadataCookies, "is_named", is_named):
        yield


@mutant("S8")
@contextlib.contextmanager
def write_no_zeros_ahead_in_a_recycled_segment() -> Iterator[None]:
    """The end of the journal shows a batch of the segment's earlier life: is that a damaged one?"""

    def nothing(self: JournalWriter, file: Any, batch_bytes: int) -> int:
        return self._size_bytes

    with mock.patch.object(JournalWriter, "_zero_ahead", nothing):
        yield


@mutant("S8")
@contextlib.contextmanager
def believe_old_batches_of_a_recycled_segment() -> Iterator[None]:
    """Any whole batch behind the end proves that the journal went on, whatever life of the segment it is from."""
    batches = JournalReplay._batches

    def of_any_life(file: Any, segment_id: int, nonce: bytes | None, start: int) -> Iterator[tuple[int, int]]:
        yield from batches(file, segment_id, nonce, start)
        for offset in range(start, file.size(), ALIGNMENT):
            magic, found_id = file.pread(4, offset), int.from_bytes(file.pread(8, offset + 8), "little")
            if magic == b"CPB1" and found_id != segment_id:
                yield offset, 1 << 62

    with mock.patch.object(JournalReplay, "_batches", staticmethod(of_any_life)):
        yield


class _UnsyncedNames:
    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_dir(self, path: str) -> None:
        pass


@mutant("S2", "S5", "L5", "L10")
@contextlib.contextmanager
def deny_what_cannot_be_read() -> Iterator[None]:
    """A block that is damaged or that the disk does not give is taken for one that was never written."""
    read_block = entry_reader._read_block

    def deny(logs: Any, block: Any, *, check: bool, fresh: bool) -> Any:
        status, group = read_block(logs, block, check=check, fresh=fresh)
        return (status if group is not None else Status.NO_ENTRY), group

    with mock.patch.object(entry_reader, "_read_block", deny):
        yield


@scenario_mutant
@contextlib.contextmanager
def let_go_of_a_damaged_block_too_soon() -> Iterator[None]:
    """The index loses a damaged block before its entries are in others.

    Random worlds miss it: few of them let entry logs decay, and repair soon copies what is denied.
    """
    act = DamagedBlocks._act

    async def act_and_let_go(self: DamagedBlocks, block: BlockRef, *args: Any, **options: Any) -> None:
        await act(self, block, *args, **options)
        await self._flush_worker.run(lambda: self._remove(block, []))

    with mock.patch.object(DamagedBlocks, "_act", act_and_let_go):
        yield


@mutant("S2", "S3", "S5")
@contextlib.contextmanager
def deny_ledgers_that_are_not_listed_yet() -> Iterator[None]:
    """A bookie that has just started takes ledgers that it has not listed for ledgers that it never had."""

    def may_know(self: LedgerTable, ledger_id: int) -> bool:
        return ledger_id in self._known

    with mock.patch.object(LedgerTable, "may_know", may_know):
        yield


@scenario_mutant
@contextlib.contextmanager
def give_up_all_of_a_damaged_block() -> Iterator[None]:
    """One flipped bit takes the entries around it with it, though each has its own digest.

    Random worlds miss it: all copies of one entry's block have to decay, which no fault is allowed to bring about.
    """
    with mock.patch.object(entry_reader, "_whole_entries", return_value=()):
        yield


@mutant("S2", "S4", "S5", "IndexError")  # IndexError: it stumbles over what is not there
@contextlib.contextmanager
def read_past_the_half_that_is_flushed() -> Iterator[None]:
    """Entries that left the active half and are not in the index yet are nowhere for a while."""
    from_cache = entry_reader.EntryReader._from_cache

    def active_only(self: entry_reader.EntryReader, *args: Any) -> Any:
        flushing, self._cache.flushing = self._cache.flushing, None
        try:
            return from_cache(self, *args)
        finally:
            self._cache.flushing = flushing

    with mock.patch.object(entry_reader.EntryReader, "_from_cache", active_only):
        yield


class _Later:
    """A write cache that only notes what it is given."""

    def __init__(self, cache: Any, noted: dict[tuple[int, int, int], EntryGroup]) -> None:
        self._cache = cache
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def add(self, group: EntryGroup) -> None:
        self._noted[group.ledger_id, group.first_entry_id, group.last_entry_id] = group


@mutant("S2", "S4", "S5", "S6")
@contextlib.contextmanager
def put_adds_into_the_cache_behind_their_answers() -> Iterator[None]:
    """A thread of its own does it: until then nobody sees them, a fencing read neither."""
    admit, on_batch = Admission._admit, Bookie._on_batch
    noted: dict[tuple[int, int, int], EntryGroup] = {}

    def admit_unseen(self: Admission, request: AddRequest, on_answers: Any) -> None:
        cache, state = self._cache, self._ledgers.get(request.group.ledger_id)
        before = state.last_entry_id if state is not None else -1
        self._cache = _Later(cache, noted)  # type: ignore[assignment]
        try:
            admit(self, request, on_answers)
        finally:
            self._cache = cache
        state = self._ledgers.get(request.group.ledger_id)
        if state is not None:
            state.last_entry_id = before

    def answer_first(self: Bookie, completions: Sequence[Any], error: BaseException | None) -> None:
        def show(_: Any, failure: BaseException | None) -> None:
            for add in completions:
                if type(add) is AddCompletion and add.status is Status.OK:
                    group = noted.pop((add.ledger_id, add.first_entry_id, add.last_entry_id), None)
                    state = self._ledgers.get(add.ledger_id)
                    if group is not None and state is not None:
                        self._cache.add(group)
                        state.last_entry_id = max(state.last_entry_id, add.last_entry_id)

        on_batch(self, completions, error)
        self._workers.read.submit(lambda: None, show)

    with mock.patch.object(Admission, "_admit", admit_unseen), mock.patch.object(Bookie, "_on_batch", answer_first):
        yield


@mutant("S3")
@contextlib.contextmanager
def take_a_repeated_add_in_spite_of_the_fence() -> Iterator[None]:
    """The ledger has that entry already: what harm could it do?"""
    refusal = Admission._refusal

    def forgiving(self: Admission, state: Any, request: AddRequest, end: int) -> Status | None:
        status = refusal(self, state, request, end)
        is_repeated = status is Status.FENCED and not state.deleted and end - 1 <= state.last_entry_id
        return None if is_repeated else status

    with mock.patch.object(Admission, "_refusal", forgiving):
        yield


@mutant("S6", "S2", "S3", "S5")
@contextlib.contextmanager
def move_the_mark_although_the_flush_failed() -> Iterator[None]:
    """It is noted as an error; the half is let go of, and the journal with it. (The other side of that, a flush that is tried for
    ever, is "retry a flush whatever failed".)"""

    def go_on(self: Checkpointer, error: BaseException) -> None:
        self.failed_flushes += 1
        self._on_flushed()

    with mock.patch.object(Checkpointer, "_retry_or_fail", go_on):
        yield


@mutant("S7", "S8")
@contextlib.contextmanager
def let_checkpoints_overlap() -> Iterator[None]:
    """One that is asked for while another runs begins at once, inside of it, and so does the next: the outer one, which began
    first, writes its mark last, when the journal behind it may be gone (apache/bookkeeper#4105)."""
    on_flushed, save_mark = Checkpointer._on_flushed, FlushStore.save_mark
    outer: dict[FlushStore, JournalPosition] = {}
    inner: dict[FlushStore, int] = {}  # how many are to come before its mark

    def begin_the_inner_ones(self: Checkpointer) -> None:
        if self._closed or not self._requested or self._store in outer:
            on_flushed(self)
            return
        outer[self._store], inner[self._store] = self._taken, 2
        self._cache.release()
        self._ledgers.on_flushed()
        self._on_full(False)
        self._on_marked()

    def save_both(self: FlushStore, mark: JournalPosition) -> None:
        save_mark(self, mark)
        if self in outer:
            inner[self] -= 1
            if not inner[self]:
                late = outer.pop(self)
                self._mark.current = late  # nobody compares them
                self._mark.save(late)

    with (
        mock.patch.object(Checkpointer, "_on_flushed", begin_the_inner_ones),
        mock.patch.object(FlushStore, "save_mark", save_both),
    ):
        yield


@mutant("S2", "S3", "S5", "S11")
@contextlib.contextmanager
def take_restored_disks_for_the_present_ones() -> Iterator[None]:
    """Their cookie is right, so they are."""
    old_copies = BookieLife.old_copies

    async def trusting(self: BookieLife) -> str | None:
        await old_copies(self)
        return None

    with mock.patch.object(BookieLife, "old_copies", trusting):
        yield


class _Kept:
    """A file, or a disk, of which nothing is made durable."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)

    def open(self, path: str) -> _Kept:
        return _Kept(self._kept.open(path))

    def sync(self) -> None:
        pass

    def sync_dir(self, path: str) -> None:
        pass

    def pwrite(self, data: bytes, offset: int) -> None:
        pass


@scenario_mutant
@contextlib.contextmanager
def start_from_what_power_loss_can_take() -> Iterator[None]:
    """What a crashed process has written is there to be read: why make it durable? (journal_replay.py, rule 3)

    Random worlds take hundreds of seeds: a process has to end between the creation of a journal segment and the sync of its name,
    and the next one has to move its mark into this segment before it writes to the journal.
    """
    records = JournalReplay.records

    def as_it_is(self: JournalReplay) -> Iterator[JournalRecord]:
        disk = self._disk
        self._disk = _Kept(disk)  # type: ignore[assignment]
        try:
            yield from records(self)
        finally:
            self._disk = disk

    with mock.patch.object(JournalReplay, "records", as_it_is):
        yield


@scenario_mutant
@contextlib.contextmanager
def begin_the_versions_again_of_a_ledger_that_came_back() -> Iterator[None]:
    """A writer from before holds one that fits (seeds 0x4dd, 0x30f2e, 0x30f4d).

    Random worlds miss it: two processes have to meet in one moment of a third one's write.
    """

    def anew(self: DeletedLedgers, ledger: LedgerMetadata, version: int) -> list[Op]:
        return [self._living.create_op(ledger.ledger_id, ledger)]

    with mock.patch.object(DeletedLedgers, "_return_ops", anew):
        yield


@scenario_mutant
@contextlib.contextmanager
def ask_any_follower_for_the_cookie() -> Iterator[None]:
    """One that lags denies that the bookie exists (seed 0x465).

    Random worlds miss it: two processes have to meet in one moment of a third one's write.
    """
    load = MetadataCookies.load

    async def from_anybody(self: MetadataCookies, bookie_id: str) -> Cookie | None:
        store = self._store
        self._store = mock.Mock(sync=mock.AsyncMock())
        try:
            return await load(self, bookie_id)
        finally:
            self._store = store

    with mock.patch.object(MetadataCookies, "load", from_anybody):
        yield


@mutant("S8")
@contextlib.contextmanager
def cut_damage_like_a_torn_tail() -> Iterator[None]:
    """Nobody looks whether something was written behind it, which proves that it was synced."""

    def cut(self: JournalReplay, file: Any, header: Any, offset: int, *_: Any, last: bool) -> None:
        if last:
            self.report.cut_offset = offset

    with mock.patch.object(JournalReplay, "_check_end", cut):
        yield


@mutant("S2", "S5", "S8")
@contextlib.contextmanager
def take_the_damaged_end_of_a_journal_for_a_torn_one() -> Iterator[None]:
    """As it was: what had been acknowledged is denied, and recovery closes below it."""

    def cut(self: JournalReplay, segment_id: int, offset: int, proof: str) -> None:
        self.report.cut_offset = offset

    with mock.patch.object(JournalReplay, "_report_damage", cut):
        yield


@mutant("S8")
@contextlib.contextmanager
def take_a_torn_batch_for_damage() -> Iterator[None]:
    """After a power loss of all bookies none of them would be sure of what none of them ever answered."""

    def judge(data: bytes, segment: Any, sequence: int) -> Tail:
        tail = judge_tail(data, segment, sequence)
        return Tail.DAMAGED if tail is Tail.TORN else tail

    with mock.patch.object(journal_replay, "judge_tail", judge):
        yield


@mutant("S6")
@contextlib.contextmanager
def keep_explicit_lacs_in_memory() -> Iterator[None]:
    """What an idle writer tells is not journaled, and goes to the index when something else of the ledger does."""

    async def keep(self: LedgerAccess, state: Any, last_add_confirmed: int) -> Status:
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        return Status.OK

    with mock.patch.object(LedgerAccess, "raise_lac", keep):
        yield


@mutant("V8")
@contextlib.contextmanager
def replay_the_segment_of_the_mark_from_its_beginning() -> Iterator[None]:
    """What is in entry log and index is written there once more, which makes no answer wrong."""
    segment = JournalReplay._segment

    def all_of_it(self: JournalReplay, *args: Any, **options: Any) -> Iterator[JournalRecord]:
        self._mark = START
        return segment(self, *args, **options)

    with mock.patch.object(JournalReplay, "_segment", all_of_it):
        yield


@mutant("S8", "V1", "V2", "V4", "V7", "V9")  # V1 to V9: when nobody else can be asked
@contextlib.contextmanager
def give_up_a_log_whose_read_failed_once() -> Iterator[None]:
    """Whoever failed is not asked again: what lies in that entry log stays unknown, though the disk is well."""
    read_block = EntryLogReader.read_block

    def read_block_once(self: EntryLogReader, block: BlockRef, *, check: bool = True, fresh: bool = False) -> EntryGroup:
        given_up: set[int] = self.__dict__.setdefault("given_up", set())
        if block.log_id in given_up:
            raise OSError(f"log {block.log_id} failed before")
        try:
            return read_block(self, block, check=check, fresh=fresh)
        except OSError:
            given_up.add(block.log_id)
            raise

    with mock.patch.object(EntryLogReader, "read_block", read_block_once):
        yield


@scenario_mutant
@contextlib.contextmanager
def wait_for_metadata_after_a_silence() -> Iterator[None]:
    """A writer that was idle confirms nothing until metadata has reported that the ledger is still its own; and asks once.

    Random worlds notice it after 86 seeds in the median, up to 310.
    """

    async def look_up_once(self: LedgerWriter) -> None:
        try:
            async with asyncio.timeout(self._settings.idle_check_timeout_s):
                await self._record.reread()
        except (MetadataError, TimeoutError):
            return
        self._pipeline.release()

    with mock.patch.object(LedgerWriter, "_look_up_state", look_up_once):
        yield
