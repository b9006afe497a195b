"""Known mistakes of a storage node, of recovery and of records, as in mutants.py: the simulator must notice each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_bookie import Bookie, MetadataCookies
from cepheid_bookie.add_answers import AddCompletion
from cepheid_bookie.admission import Admission
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.bookie_life import BookieLife
from cepheid_bookie.checkpoint import Checkpointer, FlushStore
from cepheid_bookie.cookie import Cookie
from cepheid_bookie.entry_log import EntryLogReader
from cepheid_bookie.journal_format import JournalRecord
from cepheid_bookie.journal_mark import START
from cepheid_bookie.journal_replay import JournalReplay
from cepheid_bookie.journal_writer import JournalPosition
from cepheid_bookie.ledger_access import LedgerAccess
from cepheid_ledger import ClosedLedger, ensemble_change, recovery
from cepheid_ledger.ledger_writer import LedgerWriter
from cepheid_ledger.recovery import Recovery
from cepheid_ledger.recovery_state import RecoveryReads
from cepheid_ledger.write_back import WriteBack
from cepheid_metadata import DeletedLedgers, LedgerMetadata, LedgerState, MetadataError, Op
from cepheid_rpc import AddRequest, EntryGroup, Status

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


# A storage node


class _Later:
    """A write cache that only notes what it is given."""

    def __init__(self, cache: Any, noted: dict[tuple[int, int, int], EntryGroup]) -> None:
        self._cache = cache
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def add(self, group: EntryGroup) -> None:
        self._noted[group.ledger_id, group.first_entry_id, group.last_entry_id] = group


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


@contextlib.contextmanager
def move_the_mark_although_the_flush_failed() -> Iterator[None]:
    """It is noted as an error; the half is let go of, and the journal with it. (The other side of that, a flush that is tried for
    ever, is "retry a flush whatever failed".)"""

    def go_on(self: Checkpointer, error: BaseException) -> None:
        self.failed_flushes += 1
        self._on_flushed()

    with mock.patch.object(Checkpointer, "_retry_or_fail", go_on):
        yield


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


@contextlib.contextmanager
def start_from_what_power_loss_can_take() -> Iterator[None]:
    """What a crashed process has written is there to be read: why make it durable? (journal_replay.py, rule 3)"""
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


# Recovery


@contextlib.contextmanager
def take_one_denial_for_enough() -> Iterator[None]:
    """What one bookie of the write set certainly never had, it thinks, nobody can have confirmed."""
    make = RecoveryReads.__init__

    def made(self: RecoveryReads, *args: Any) -> None:
        make(self, *args)
        self._noes_needed = 1

    with mock.patch.object(RecoveryReads, "__init__", made):
        yield


@contextlib.contextmanager
def report_the_end_that_a_recovery_found_itself() -> Iterator[None]:
    """Somebody else has closed the ledger meanwhile, elsewhere (apache/bookkeeper#1712)."""
    run, length_through = Recovery.run, Recovery._length_through
    found: dict[Recovery, ClosedLedger] = {}

    async def note(self: Recovery, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        length = await length_through(self, ledger, last_entry_id, write_back)
        found[self] = ClosedLedger(last_entry_id, length)
        return length

    async def insist(self: Recovery) -> ClosedLedger:
        end = await run(self)
        return found.pop(self, end)

    with mock.patch.multiple(Recovery, run=insist, _length_through=note):
        yield


@contextlib.contextmanager
def take_the_length_of_a_ledger_from_its_last_fragment() -> Iterator[None]:
    """Where nothing was written since, there is nothing to read it from: the end is right, and the length 0."""

    async def as_far_as_known(self: Recovery, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        return write_back.last_header.length if write_back.last_header is not None else 0

    with mock.patch.object(Recovery, "_length_through", as_far_as_known):
        yield


@contextlib.contextmanager
def look_for_the_last_entry_in_the_last_fragment() -> Iterator[None]:
    """Nobody of an ensemble that got nothing can tell what is before it, today or ever: recovery fails each time."""
    read_entry = recovery.read_entry

    async def in_the_last(ledger: LedgerMetadata, entry_id: int, *others: Any) -> EntryGroup:
        last = ledger.last_fragment.model_copy(update={"first_entry_id": 0})
        return await read_entry(ledger.model_copy(update={"fragments": (last,)}), entry_id, *others)

    with mock.patch.object(recovery, "read_entry", in_the_last):
        yield


@contextlib.contextmanager
def begin_a_recovery_before_the_last_fragment() -> Iterator[None]:
    """Behind the LAC that it was told. Bookies that joined later know of none yet, and deny all that is before them: recovery walks
    through fragments that it has no business in, and ends in the wrong place or never (apache/bookkeeper#2615)."""
    fence, read_on = Recovery._fence, Recovery._read_on
    told: dict[Recovery, int] = {}

    async def fence_and_note(self: Recovery, ledger: LedgerMetadata) -> int:
        told[self] = await fence(self, ledger)
        return told[self]

    async def read_from_there(self: Recovery, ledger: LedgerMetadata, start: int, write_back: WriteBack) -> int:
        return await read_on(self, ledger, min(start, told.pop(self) + 1), write_back)

    with mock.patch.multiple(Recovery, _fence=fence_and_note, _read_on=read_from_there):
        yield


# Records of ledgers and bookies


@contextlib.contextmanager
def insist_on_an_ensemble_whoever_recovers() -> Iterator[None]:
    """A writer whose change meets another version reads that, and writes its change into it."""
    plan_change = ensemble_change._plan_change

    def insist(ledger: LedgerMetadata, *change: Any) -> LedgerMetadata | None:
        return plan_change(ledger.replace(state=LedgerState.OPEN, last_entry_id=None, length_bytes=None), *change)

    with mock.patch.object(ensemble_change, "_plan_change", insist):
        yield


@contextlib.contextmanager
def begin_the_versions_again_of_a_ledger_that_came_back() -> Iterator[None]:
    """A writer from before holds one that fits (seeds 0x4dd, 0x30f2e, 0x30f4d)."""

    def anew(self: DeletedLedgers, ledger: LedgerMetadata, version: int) -> list[Op]:
        return [self._living.create_op(ledger.ledger_id, ledger)]

    with mock.patch.object(DeletedLedgers, "_return_ops", anew):
        yield


@contextlib.contextmanager
def ask_any_follower_for_the_cookie() -> Iterator[None]:
    """One that lags denies that the bookie exists (seed 0x465)."""
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


@contextlib.contextmanager
def cut_damage_like_a_torn_tail() -> Iterator[None]:
    """Nobody looks whether something was written behind it, which proves that it was synced."""

    def cut(self: JournalReplay, file: Any, header: Any, offset: int, *_: Any, last: bool, clean: bool) -> None:
        if last and not clean:
            self.report.cut_offset = offset

    with mock.patch.object(JournalReplay, "_check_end", cut):
        yield


@contextlib.contextmanager
def keep_explicit_lacs_in_memory() -> Iterator[None]:
    """What an idle writer tells is not journaled, and goes to the index when something else of the ledger does."""

    async def keep(self: LedgerAccess, state: Any, last_add_confirmed: int) -> Status:
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        return Status.OK

    with mock.patch.object(LedgerAccess, "raise_lac", keep):
        yield


@contextlib.contextmanager
def replay_the_segment_of_the_mark_from_its_beginning() -> Iterator[None]:
    """What is in entry log and index is written there once more, which makes no answer wrong."""
    segment = JournalReplay._segment

    def all_of_it(self: JournalReplay, *args: Any, **options: Any) -> Iterator[JournalRecord]:
        self._mark = START
        return segment(self, *args, **options)

    with mock.patch.object(JournalReplay, "_segment", all_of_it):
        yield


@contextlib.contextmanager
def give_up_a_log_whose_read_failed_once() -> Iterator[None]:
    """Whoever failed is not asked again: what lies in that entry log stays unknown, though the disk is well."""
    read_block = EntryLogReader.read_block

    def read_block_once(self: EntryLogReader, block: BlockRef, *, check: bool = True) -> EntryGroup:
        given_up: set[int] = self.__dict__.setdefault("given_up", set())
        if block.log_id in given_up:
            raise OSError(f"log {block.log_id} failed before")
        try:
            return read_block(self, block, check=check)
        except OSError:
            given_up.add(block.log_id)
            raise

    with mock.patch.object(EntryLogReader, "read_block", read_block_once):
        yield


@contextlib.contextmanager
def wait_for_metadata_after_a_silence() -> Iterator[None]:
    """A writer that was idle confirms nothing until metadata told it that the ledger is still its own; and asks once."""

    async def look_up_once(self: LedgerWriter) -> None:
        try:
            async with asyncio.timeout(self._settings.idle_check_timeout_s):
                await self._record.reread()
        except (MetadataError, TimeoutError):
            return
        self._pipeline.release()

    with mock.patch.object(LedgerWriter, "_look_up_state", look_up_once):
        yield


BOOKIE_MUTANTS: Iterable[Mutant] = (
    put_adds_into_the_cache_behind_their_answers,
    take_a_repeated_add_in_spite_of_the_fence,
    move_the_mark_although_the_flush_failed,
    let_checkpoints_overlap,
    take_restored_disks_for_the_present_ones,
    start_from_what_power_loss_can_take,
    take_one_denial_for_enough,
    take_the_length_of_a_ledger_from_its_last_fragment,
    begin_a_recovery_before_the_last_fragment,
    insist_on_an_ensemble_whoever_recovers,
    cut_damage_like_a_torn_tail,
    keep_explicit_lacs_in_memory,
    replay_the_segment_of_the_mark_from_its_beginning,
    give_up_a_log_whose_read_failed_once,
    wait_for_metadata_after_a_silence,
)
