"""Known ways to lose data, put into the real code from outside: the simulator must notice each of them.

A mutant is a context in which some method of the product behaves as a plausible mistake would make it. A checker that never
failed proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from cepheid_bookie import Bookie, entry_reader
from cepheid_bookie.checkpoint import Checkpointer, FlushStore
from cepheid_bookie.journal_format import encode_ledger_to
from cepheid_bookie.journal_mark import MarkFile
from cepheid_bookie.journal_writer import JournalWriter
from cepheid_bookie.ledger_access import LedgerAccess
from cepheid_broker.publishing.deduplication import NOTHING, ProducerSequence, SequenceIds
from cepheid_broker.publishing.topic_deduplication import TopicDeduplication
from cepheid_ledger import ClosedLedger, recovery
from cepheid_ledger.recovery_state import RecoveryReads
from cepheid_ledger.writer_state import WriterState
from cepheid_managed_ledger import cursor, rollover, trimmer
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.cursor_state import encode_state
from cepheid_managed_ledger.delivery_counts import DeliveryCounts
from cepheid_metadata import Position, Put
from cepheid_rpc import Buffer, ReadRequest, Status
from tests.simulation.mutants_bookies import (
    BOOKIE_MUTANTS,
    ask_any_follower_for_the_cookie,
    begin_the_versions_again_of_a_ledger_that_came_back,
    look_for_the_last_entry_in_the_last_fragment,
    report_the_end_that_a_recovery_found_itself,
)
from tests.simulation.mutants_bounds import (
    BOUNDS_MUTANTS,
    read_the_tail_from_bookies,
    read_without_a_timeout,
    recover_without_a_timeout,
)
from tests.simulation.mutants_cluster import (
    CLUSTER_MUTANTS,
    count_what_departed_bookies_acknowledged,
    keep_what_is_open_when_the_session_is_lost,
    resend_from_the_lac_at_the_end_of_the_change,
    take_a_change_in_doubt_for_refused,
)
from tests.simulation.mutants_dispatch import (
    DISPATCH_MUTANTS,
    begin_at_the_end_each_time,
    begin_with_the_topic_whatever_is_asked,
    seek_behind_a_time,
)
from tests.simulation.mutants_topics import (
    TOPIC_MUTANTS,
    choose_positions_while_trimming,
    forget_fences_with_what_is_deleted,
    hear_late_answers_of_a_broken_ledger,
    look_for_lost_sequence_ids_behind_the_position_alone,
    trim_by_what_is_not_saved_yet,
    write_by_versions_alone,
)
from tests.simulation.mutants_upkeep import (
    UPKEEP_MUTANTS,
    ask_any_follower_what_to_collect,
    forget_what_came_while_a_flush_was_tried_again,
    leave_the_logs_of_starts_that_failed,
    retry_a_flush_whatever_failed,
    write_the_entry_log_again_for_every_attempt,
)

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


class _UnsyncedFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        pass


@contextlib.contextmanager
def acknowledge_before_sync() -> Iterator[None]:
    """The journal answers when the bytes were written, and leaves the sync to the system."""
    roll = JournalWriter._roll

    def roll_unsynced(self: JournalWriter, *args: Any) -> None:
        roll(self, *args)
        self._file = _UnsyncedFile(self._file)

    with mock.patch.object(JournalWriter, "_roll", roll_unsynced):
        yield


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


@contextlib.contextmanager
def fence_not_by_reads() -> Iterator[None]:
    """Bookies fence by LAC requests alone, and answer a recovery's read without it: up to Qa - 1 of a window stay unfenced."""
    refuse_read = Bookie._refuse_read

    async def unfenced(self: Bookie, request: ReadRequest) -> Status | None:
        return await refuse_read(self, replace(request, fence=False))

    with mock.patch.object(Bookie, "_refuse_read", unfenced):
        yield


@contextlib.contextmanager
def read_for_a_recovery_without_fencing() -> Iterator[None]:
    """The same mistake at the other end: whoever recovers does not ask for the fence."""

    def unfenced(*args: Any, **fields: Any) -> ReadRequest:
        return ReadRequest(*args, **{**fields, "fence": False})

    with mock.patch.object(recovery, "ReadRequest", unfenced):
        yield


@contextlib.contextmanager
def save_no_part_of_a_batch() -> Iterator[None]:
    """Part of a batch is acknowledged in memory and does not count as a change (apache/pulsar#26498)."""
    acknowledge_messages = AckSet.acknowledge_messages

    def uncounted(self: AckSet, position: Position, unacked_mask: int, messages: int) -> bool:
        before = self.revision
        accepted = acknowledge_messages(self, position, unacked_mask, messages)
        if not self.is_acknowledged(position):
            self.revision = before
        return accepted

    with mock.patch.object(AckSet, "acknowledge_messages", uncounted):
        yield


@contextlib.contextmanager
def count_a_timeout_as_a_negative() -> Iterator[None]:
    """Whoever does not answer a recovery read does not have the entry."""
    with mock.patch.object(RecoveryReads, "on_unknown", RecoveryReads.on_no):
        yield


@contextlib.contextmanager
def drop_holes_when_saving_a_cursor() -> Iterator[None]:
    """Beyond a few, acknowledged entries above the mark-delete position are left out of what is saved."""

    def encode_few(ack_set: AckSet, *others: Any) -> bytes:
        few = AckSet(ack_set._ledgers, ack_set.mark_delete)
        for ledger_id, entries in ack_set.acked.items():
            few.acknowledge([Position(ledger_id, entry_id) for entry_id in list(entries)[:2]])
        return encode_state(few, *others)

    with mock.patch.object(cursor, "encode_state", encode_few):
        yield


@contextlib.contextmanager
def save_no_delivery_counts() -> Iterator[None]:
    """How often entries were delivered again is forgotten with the process."""

    def encode_without(ack_set: AckSet, counts: DeliveryCounts, sequence_ids: Mapping[str, int]) -> bytes:
        return encode_state(ack_set, DeliveryCounts(), sequence_ids)

    with mock.patch.object(cursor, "encode_state", encode_without):
        yield


@contextlib.contextmanager
def save_sequence_ids_of_another_moment() -> Iterator[None]:
    """The mark-delete position is saved with the sequence ids that the cursor had the time before."""
    before: dict[AckSet, Mapping[str, int]] = {}  # keeps them: an address that is used again would change the course of a seed

    def encode_with_old(ack_set: AckSet, counts: DeliveryCounts, sequence_ids: Mapping[str, int]) -> bytes:
        old = before.get(ack_set, {})
        before[ack_set] = sequence_ids
        return encode_state(ack_set, counts, old)

    with mock.patch.object(cursor, "encode_state", encode_with_old):
        yield


@contextlib.contextmanager
def take_the_mark_after_the_flush() -> Iterator[None]:
    """What was journaled during a flush is below the mark, and neither in the log nor in the index."""
    on_flushed = Checkpointer._on_flushed

    def late(self: Checkpointer) -> None:
        self._taken = self._journal.durable
        on_flushed(self)

    with mock.patch.object(Checkpointer, "_on_flushed", late):
        yield


@contextlib.contextmanager
def take_an_empty_cache_for_an_empty_checkpoint() -> Iterator[None]:
    """Without entries nothing is flushed, fences and LACs included; the mark moves."""
    flush = FlushStore.flush

    def shortcut(self: FlushStore, half: Any, records: Any) -> None:
        if half.ledgers:
            flush(self, half, records)

    with mock.patch.object(FlushStore, "flush", shortcut):
        yield


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


class _UnsyncedNames:
    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_dir(self, path: str) -> None:
        pass


@contextlib.contextmanager
def deny_what_cannot_be_read() -> Iterator[None]:
    """A block that is damaged or that the disk does not give is taken for one that was never written."""
    read_block = entry_reader._read_block

    def deny(logs: Any, block: Any, *, check: bool) -> Any:
        status, group = read_block(logs, block, check=check)
        return (status if group is not None else Status.NO_ENTRY), group

    with mock.patch.object(entry_reader, "_read_block", deny):
        yield


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


@contextlib.contextmanager
def confirm_below_the_ack_quorum() -> Iterator[None]:
    confirm = WriterState._confirm

    def early(self: WriterState) -> Any:
        quorum = self._ack_quorum
        self._ack_quorum = max(1, quorum - 1)
        try:
            return confirm(self)
        finally:
            self._ack_quorum = quorum

    with mock.patch.object(WriterState, "_confirm", early):
        yield


@contextlib.contextmanager
def recover_without_waiting_for_copies() -> Iterator[None]:
    """The ledger is closed as soon as its end is known, whatever holds its last entries."""

    async def do_not_wait(self: recovery.WriteBack, limit_bytes: int) -> None:
        pass

    with mock.patch.object(recovery.WriteBack, "wait_below", do_not_wait):
        yield


@contextlib.contextmanager
def record_an_end_without_closing() -> Iterator[None]:
    """A rollover takes the writer's word for the end of its ledger."""

    async def take_its_word(writer: Any, *_: Any) -> ClosedLedger:
        return ClosedLedger(writer.last_add_confirmed, writer.length)

    with mock.patch.object(rollover, "end_writer", take_its_word):
        yield


@contextlib.contextmanager
def write_the_chain_again_after_a_conflict() -> Iterator[None]:
    """A deposed owner reads the version that is there, and goes on."""
    write = ChainKeeper._write

    async def insist(self: ChainKeeper, ops: Any, **options: Any) -> None:
        found = await self._records.get(self._topic)
        if found is not None:
            self._version = found.version
            ops = [Put(op.key, op.value, found.version) if isinstance(op, Put) and op.key == self._key else op for op in ops]
        await write(self, ops, **options)

    with mock.patch.object(ChainKeeper, "_write", insist):
        yield


@contextlib.contextmanager
def trim_without_asking_the_cursors() -> Iterator[None]:
    plan_trim = trimmer.plan_trim

    def greedy(ledgers: Any, **options: Any) -> int:
        return plan_trim(ledgers, **{**options, "acknowledged_entries": None})

    with mock.patch.object(trimmer, "plan_trim", greedy):
        yield


@contextlib.contextmanager
def name_what_was_pushed_when_saving_sequence_ids() -> Iterator[None]:
    """A snapshot of deduplication has sequence ids whose entries are still under way (apache/pulsar#5218)."""

    def snapshot(self: SequenceIds) -> dict[str, int]:
        return {name: sequence.pushed.ends for name, sequence in self._names.items() if sequence.pushed.ends >= 0}

    with mock.patch.object(SequenceIds, "snapshot", snapshot):
        yield


@contextlib.contextmanager
def believe_the_snapshot_of_sequence_ids_alone() -> Iterator[None]:
    """The entries behind it are not looked at when the topic is opened."""

    async def replay(self: TopicDeduplication, mark_delete: Position) -> None: ...

    with mock.patch.object(TopicDeduplication, "_replay", replay):
        yield


@contextlib.contextmanager
def save_no_chunks_with_sequence_ids() -> Iterator[None]:
    """Of a message that is not whole, those before a snapshot are not known after a crash, and are stored again."""
    snapshot = SequenceIds.snapshot

    def without_chunks(self: SequenceIds) -> dict[str, int]:
        return {name: sequence_id for name, sequence_id in snapshot(self).items() if not name.startswith("\0\0")}

    with mock.patch.object(SequenceIds, "snapshot", without_chunks):
        yield


@contextlib.contextmanager
def let_producers_in_while_chunks_are_under_way() -> Iterator[None]:
    """Nobody waits for the append of chunks that are not the last of their message."""

    def is_settled(self: ProducerSequence) -> bool:
        return all(mark == NOTHING for mark in self._under_way)

    with mock.patch.object(ProducerSequence, "is_settled", property(is_settled)):
        yield


@contextlib.contextmanager
def write_on_to_what_was_collected() -> Iterator[None]:
    """An owner keeps its handle through the loss of its session; bookies have forgotten the ledger, its fence as well, and take
    what it writes for the beginning of another (apache/pulsar#20094)."""
    with keep_what_is_open_when_the_session_is_lost(), forget_fences_with_what_is_deleted():
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        acknowledge_before_sync,
        answer_a_fence_before_it_is_durable,
        fence_not_by_reads,
        read_for_a_recovery_without_fencing,
        drop_holes_when_saving_a_cursor,
        save_no_delivery_counts,
        save_sequence_ids_of_another_moment,
        save_no_part_of_a_batch,
        count_a_timeout_as_a_negative,
        take_the_mark_after_the_flush,
        take_an_empty_cache_for_an_empty_checkpoint,
        rename_the_mark_without_directory_sync,
        deny_what_cannot_be_read,
        read_past_the_half_that_is_flushed,
        confirm_below_the_ack_quorum,
        recover_without_waiting_for_copies,
        record_an_end_without_closing,
        write_the_chain_again_after_a_conflict,
        trim_without_asking_the_cursors,
        name_what_was_pushed_when_saving_sequence_ids,
        believe_the_snapshot_of_sequence_ids_alone,
        save_no_chunks_with_sequence_ids,
        let_producers_in_while_chunks_are_under_way,
        *BOOKIE_MUTANTS,
        *BOUNDS_MUTANTS,
        *CLUSTER_MUTANTS,
        *DISPATCH_MUTANTS,
        *TOPIC_MUTANTS,
        *UPKEEP_MUTANTS,
    )
}

SCENARIO_MUTANTS: dict[str, Mutant] = {
    "resend from the LAC at the end of the change": resend_from_the_lac_at_the_end_of_the_change,
    "ask any follower for the cookie": ask_any_follower_for_the_cookie,
    "begin the versions again of a ledger that came back": begin_the_versions_again_of_a_ledger_that_came_back,
    "report the end that a recovery found itself": report_the_end_that_a_recovery_found_itself,
    "look for the last entry in the last fragment": look_for_the_last_entry_in_the_last_fragment,
    "count what departed bookies acknowledged": count_what_departed_bookies_acknowledged,
    "take a change in doubt for refused": take_a_change_in_doubt_for_refused,
    "retry a flush whatever failed": retry_a_flush_whatever_failed,
    "look for lost sequence ids behind the position alone": look_for_lost_sequence_ids_behind_the_position_alone,
    "forget what came while a flush was tried again": forget_what_came_while_a_flush_was_tried_again,
    "leave the logs of starts that failed": leave_the_logs_of_starts_that_failed,
    "write the entry log again for every attempt": write_the_entry_log_again_for_every_attempt,
    "ask any follower what to collect": ask_any_follower_what_to_collect,
    "hear late answers of a broken ledger": hear_late_answers_of_a_broken_ledger,
    "choose positions while trimming": choose_positions_while_trimming,
    "trim by what is not saved yet": trim_by_what_is_not_saved_yet,
    "keep what is open when the session is lost": keep_what_is_open_when_the_session_is_lost,
    "write on to what was collected": write_on_to_what_was_collected,
    "recover without a timeout": recover_without_a_timeout,
    "read without a timeout": read_without_a_timeout,
    "read the tail from bookies": read_the_tail_from_bookies,
    "seek behind a time": seek_behind_a_time,
    "begin at the end each time": begin_at_the_end_each_time,
    "begin with the topic whatever is asked": begin_with_the_topic_whatever_is_asked,
    "write by versions alone": write_by_versions_alone,
}
"""Mistakes for scenarios alone. Random worlds do not catch them, or take hundreds of seeds, because

- "resend from the LAC": no answer is wrong in whatever world
- "ask any follower for the cookie", "begin the versions again", "report the end": two processes have to meet in one moment of a
  third one's write
- "take a change in doubt": a leader has to be elected for longer than a change may take, just when there is one, and its writer's
  connection has to outlast that (40 to 200 seeds)
- "hear late answers": they have to come between one ledger and the next
- "count what departed bookies acknowledged": a change has to be decided between two answers, and a third one has to be later
- "write on to what was collected": in most worlds one half of it is caught before the other is needed
- "keep what is open": a session has to be lost, nobody to take over, and somebody to write (100 to 300 seeds)
- "ask any follower what to collect": a bookie's own writes bring its follower up to date before each look, unless its disks are
  full; then it has to lag for longer than two looks are apart
- "write by versions alone": an owner that was deposed and has not heard of it has to meet a chain that has been written as often as
  the one that it knows, and write to it
- "choose positions": a subscription has to be made in the moment in which a trim is recorded
- "trim by what is not saved yet": a trim has to come in the tenth of a second in which acknowledgements wait to be saved
- "look for the last entry": everybody of an ensemble has to be replaced, and to get nothing
- "look for lost sequence ids": nobody deletes a ledger of a topic that removes duplicates
- "seek behind a time", "begin at the end", "begin with the topic": no client of a world seeks a time or subscribes at the end
- "retry a flush", "leave the logs", "write the entry log again", "forget what came": a fault has to last, and in worlds all of them
  end, with more appends behind them
- "recover without a timeout", "read without a timeout": somebody has to be silent for ever, and in worlds everybody speaks again
- "read the tail from bookies": bookies answer in the end, and in worlds a read may be in order: who keeps up is hard to say
"""
