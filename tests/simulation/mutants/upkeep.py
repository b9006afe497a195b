"""Mistakes in what goes on beside the answers: checkpoints, space that comes back, counts, versions, sessions, generations."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from cepheid_bookie import Bookie, opening, surplus_copies
from cepheid_bookie.admission import Admission
from cepheid_bookie.checkpoint import Checkpointer, FlushStore
from cepheid_bookie.fail_stop import FailStopWorker
from cepheid_bookie.garbage_collection import GarbageCollector
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.log_collection import LogCollection
from cepheid_bookie.metadata_records import MetadataLedgers
from cepheid_bookie.write_cache import Half
from cepheid_broker.ownership.bundle_tenures import BundleTenures
from cepheid_broker.publishing import unanswered_sends
from cepheid_ledger import LedgerClient, NewLedger
from cepheid_managed_ledger import ManagedLedgerFencedError
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.appender import Appender, AppendHooks
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.managed_ledger import ManagedLedger, State
from cepheid_metadata import (
    BadVersionError,
    Check,
    CursorRecord,
    KeyExistsError,
    LedgerIdCounter,
    LedgerIds,
    LedgerMetadata,
    MemoryStore,
    MemoryTree,
    Op,
    Position,
    Put,
    Records,
    keys,
)
from cepheid_metadata.ledger_ids import FIRST_LEDGER_ID
from cepheid_ports import OnDone
from cepheid_rpc import EntryGroup
from cepheid_wire import encode_send_receipts
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("V6")
@contextlib.contextmanager
def ask_for_a_checkpoint_at_admission() -> Iterator[None]:
    """An add that waits for longer than the interval comes behind the checkpoint that it asked for."""
    add, touch = Admission.add, Checkpointer.touch

    def add_and_touch(self: Admission, *args: Any) -> None:
        add(self, *args)
        touch(self._checkpointer)

    with mock.patch.object(Admission, "add", add_and_touch), mock.patch.object(Checkpointer, "touch"):
        yield


@scenario_mutant
@contextlib.contextmanager
def retry_a_flush_whatever_failed() -> Iterator[None]:
    """Every error counts as a full disk: the flush is tried for ever, and each attempt writes the entry log again
    (apache/bookkeeper#4114).

    Random worlds miss it: a fault has to last, and there all of them end, with more appends behind them.
    """
    retry_or_fail = Checkpointer._retry_or_fail

    def retry(self: Checkpointer, error: BaseException) -> None:
        retry_or_fail(self, OSError(errno.ENOSPC, str(error)) if isinstance(error, OSError) else error)

    def submit(self: FailStopWorker, work: Callable[[], Any], on_done: OnDone) -> None:
        self._worker.submit(work, on_done)  # or a failed sync of collection would stop the bookie

    with mock.patch.object(Checkpointer, "_retry_or_fail", retry), mock.patch.object(FailStopWorker, "submit", submit):
        yield


@scenario_mutant
@contextlib.contextmanager
def leave_the_logs_of_starts_that_failed() -> Iterator[None]:
    """Until one succeeds, and a collection comes round.

    Random worlds miss it: a fault has to last, and there all of them end, with more appends behind them.
    """
    with mock.patch.object(opening, "_delete_dead_logs"):
        yield


@scenario_mutant
@contextlib.contextmanager
def write_the_entry_log_again_for_every_attempt() -> Iterator[None]:
    """A flush that the index refused begins from the beginning (apache/bookkeeper#4114).

    Random worlds miss it: a fault has to last, and there all of them end, with more appends behind them.
    """
    flush = FlushStore.flush

    def from_the_beginning(self: FlushStore, half: Half, records: Mapping[int, LedgerRecord]) -> None:
        self._unindexed = None
        flush(self, half, records)

    with mock.patch.object(FlushStore, "flush", from_the_beginning):
        yield


@scenario_mutant
@contextlib.contextmanager
def forget_what_came_while_a_flush_was_tried_again() -> Iterator[None]:
    """It asked for a checkpoint while the timer of the next attempt was set, and counts on that one.

    Random worlds miss it: a fault has to last, and there all of them end, with more appends behind them.
    """
    start = Checkpointer._start

    def start_once(self: Checkpointer) -> None:
        start(self)
        self._requested = False

    with mock.patch.object(Checkpointer, "_start", start_once):
        yield


@mutant("V6")
@contextlib.contextmanager
def leave_logs_that_nothing_refers_to() -> Iterator[None]:
    """Of deleted ledgers, and of flushes that failed."""

    async def delete_none(self: LogCollection, **options: Any) -> list[int]:
        return []

    with mock.patch.object(LogCollection, "collect", delete_none):
        yield


@mutant("S9")
@contextlib.contextmanager
def collect_logs_by_the_ledgers_in_memory() -> Iterator[None]:
    """A log is dead when none of its ledgers is in use."""

    async def reclaim(self: Bookie, **options: Any) -> list[int]:
        index = self._directories.index
        living = {block.log_id for block in index.blocks() if self._ledgers.get(block.ledger_id) is not None}
        dead = [log_id for log_id in self._logs.closed_logs() if log_id not in living]
        await self.collection._delete(dead, copied_bytes=0)
        return dead

    with mock.patch.object(Bookie, "reclaim", reclaim):
        yield


@mutant("C5", "V7")  # V7: a subscription without backlog waits for nothing
@contextlib.contextmanager
def count_on_what_the_mark_has_passed() -> Iterator[None]:
    """Holes stay in the number of acknowledged entries when the mark-delete position absorbs them."""
    move_to = AckSet._move_to

    def move_and_keep(self: AckSet, mark_delete: Position) -> None:
        before = self._acked_entries
        move_to(self, mark_delete)
        self._acked_entries = before

    with mock.patch.object(AckSet, "_move_to", move_and_keep):
        yield


@mutant("M10")
@contextlib.contextmanager
def terminate_before_appends_are_refused() -> Iterator[None]:
    """The end is recorded first; until then the door is open."""

    async def terminate(self: ManagedLedger) -> Position:
        async with self._terminating:
            if self.chain.terminated_at is None:
                assert self._ending is not None
                await self._ending.terminate()
                self.state = State.TERMINATED
                self.last_confirmed = self._ledgers.last_position
        return self.last_confirmed

    with mock.patch.object(ManagedLedger, "_terminate", terminate):
        yield


@mutant("O2", "M1")
@contextlib.contextmanager
def count_versions_up_after_a_conflict() -> Iterator[None]:
    """Somebody else wrote the chain: it has the next version now."""
    write = ChainKeeper._write

    async def guess(self: ChainKeeper, ops: Sequence[Op], **options: Any) -> None:
        try:
            return await write(self, ops, **options)
        except ManagedLedgerFencedError:
            self.lost = None
            self._version += 1
        return await write(self, [_later(op) if op.key == self._key else op for op in ops])

    with mock.patch.object(ChainKeeper, "_write", guess):
        yield


@mutant("O2")
@contextlib.contextmanager
def delete_whatever_is_there() -> Iterator[None]:
    """The record that was decided on, or what somebody has made of it since."""
    delete = Records.delete

    async def blindly(self: Records[Any, Any], noun: Any, expected_version: int | None) -> None:
        await delete(self, noun, None)

    with mock.patch.object(Records, "delete", blindly):
        yield


def _later(op: Op) -> Op:
    return Put(op.key, op.value, op.expected_version + 1) if isinstance(op, Put) else op


@mutant("O3", "V9", "V5")  # V9, V5: what a session that is over still owns is served and repaired by nobody
@contextlib.contextmanager
def leave_what_a_session_made() -> Iterator[None]:
    """Its end is noted, and its ephemeral keys stay."""

    def end_session(self: MemoryTree, store: MemoryStore, session_id: int) -> None:
        self._sessions.remove(store)

    with mock.patch.object(MemoryTree, "end_session", end_session):
        yield


@scenario_mutant
@contextlib.contextmanager
def ask_any_follower_what_to_collect() -> Iterator[None]:
    """One that lags denies a ledger that a bookie holds by now (BOOKKEEPER-193).

    Random worlds miss it: a bookie's own writes bring its follower up to date before each look, unless its disks are full; then
    it has to lag for longer than two looks are apart.
    """
    # Its counter of ledger ids would give the lag away in a cluster whose first ledger was just created.
    counter = mock.patch.object(MetadataLedgers, "next_ledger_id", mock.AsyncMock(return_value=1 << 40))
    with mock.patch.object(MetadataLedgers, "_sync", mock.AsyncMock()), counter:
        yield


@mutant("S10", "V5")
@contextlib.contextmanager
def collect_what_one_listing_lacks() -> Iterator[None]:
    """No second pass, and no direct read of what it is about to delete."""

    async def collect(self: GarbageCollector, *, surplus: bool = True) -> None:
        await self._ledgers.purge(())
        held = self._bookie.ledgers()
        listed = await self._ledgers.listing()
        await self._bookie.delete_ledgers(sorted(frozenset(held).difference(listed)))
        await self._bookie.reclaim()

    with mock.patch.object(GarbageCollector, "collect", collect):
        yield


@mutant("S10")
@contextlib.contextmanager
def collect_what_one_listing_of_any_follower_lacks() -> Iterator[None]:
    """Both mistakes: all that protects a ledger that was made a moment ago is gone."""
    with ask_any_follower_what_to_collect(), collect_what_one_listing_lacks():
        yield


@mutant("S10")
@contextlib.contextmanager
def drop_copies_that_only_earlier_fragments_name() -> Iterator[None]:
    """The last fragment alone decides which copies of a closed ledger are surplus."""

    def is_surplus(ledger: LedgerMetadata, bookie_id: str) -> bool:
        return ledger.is_closed and bookie_id not in ledger.last_fragment.ensemble

    with mock.patch.object(surplus_copies, "is_surplus", is_surplus):
        yield


@mutant("O4")
@contextlib.contextmanager
def begin_the_epochs_of_a_bundle_again() -> Iterator[None]:
    """Nobody writes down how far they went."""
    history_op = BundleTenures._history_op

    def forgetful(self: BundleTenures, bundle: Any, found: Any, epoch: int) -> Op:
        return history_op(self, bundle, found, 0)

    with mock.patch.object(BundleTenures, "_history_op", forgetful):
        yield


@mutant("C1", "C2", "C4")
@contextlib.contextmanager
def reset_in_the_same_generation() -> Iterator[None]:
    """A reset is a mark-delete position like any other."""
    replace = CursorRecord.replace

    def stay(self: CursorRecord, **changes: Any) -> CursorRecord:
        return replace(self, **{key: value for key, value in changes.items() if key != "generation"})

    with mock.patch.object(CursorRecord, "replace", stay):
        yield


@mutant("C7", "C1", "C2", "H7")
@contextlib.contextmanager
def save_cursors_whoever_owns_the_topic() -> Iterator[None]:
    """A save reads the version that the record has, and does not ask for the chain's."""
    write = ChainKeeper._write

    async def save(self: ChainKeeper, ops: Sequence[Op], **options: Any) -> None:
        saves = [op for op in ops if not isinstance(op, Check)]  # of the chain, and of its mark
        if len(saves) < len(ops) and all(isinstance(op, Put) and op.key.startswith(keys.CURSORS_KEY) for op in saves):
            found = [await self._store.get(op.key) for op in saves]
            ops = [Put(op.key, op.value, at.version) for op, at in zip(saves, found, strict=True) if isinstance(op, Put) and at]
        if ops:
            await write(self, ops, **options)

    with mock.patch.object(ChainKeeper, "_write", save):
        yield


@mutant("L14")
@contextlib.contextmanager
def take_ids_that_somebody_else_took() -> Iterator[None]:
    """A conflict at the counter, and at the record of the ledger, is taken for a lost answer to one's own write."""
    create_record = LedgerClient._create_record

    async def take_block(self: LedgerIds, above: int) -> tuple[int, int]:
        found = await self._counter.get(None)
        first = FIRST_LEDGER_ID if found is None else found.record.next_ledger_id
        counter = LedgerIdCounter(next_ledger_id=first + self._block)
        with contextlib.suppress(BadVersionError, KeyExistsError):
            await (self._counter.create(None, counter) if found is None else self._counter.replace(None, counter, found.version))
        return first, first + self._block

    async def believe(self: LedgerClient, new: NewLedger) -> bool:
        return await create_record(self, new) or await self._records.get(new.record.ledger_id) is not None

    with (
        mock.patch.object(LedgerIds, "_take_block", take_block),
        mock.patch.object(LedgerClient, "_create_record", believe),
    ):
        yield


@mutant("H4")
@contextlib.contextmanager
def answer_the_last_of_a_group_first() -> Iterator[None]:
    """Receipts come from a stack."""

    def reversed_receipts(receipts: Iterable[Any]) -> bytes:
        return encode_send_receipts(list(receipts)[::-1])

    with mock.patch.object(unanswered_sends, "encode_send_receipts", reversed_receipts):
        yield


@mutant("M9", "V7")
@contextlib.contextmanager
def answer_before_it_can_be_read() -> Iterator[None]:
    """The topic's end moves with the next turn of the loop, behind the answers of this one."""
    make = Appender.__init__

    def made(self: Appender, topic: str, writer: Any, window_bytes: int, hooks: AppendHooks) -> None:
        def confirm_later(group: EntryGroup) -> None:
            asyncio.get_running_loop().call_soon(hooks.on_confirmed, group)

        make(self, topic, writer, window_bytes, replace(hooks, on_confirmed=confirm_later))

    with mock.patch.object(Appender, "__init__", made):
        yield
