"""Known ways to lose data, put into the real code from outside: the simulator must notice each of them.

A mutant is a context in which some method of the product behaves as a plausible mistake would make it. A checker that never
failed proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cepheid_bookie.journal_writer import JournalWriter
from cepheid_bookie.ledger_access import LedgerAccess
from cepheid_broker.managed_ledger import cursor_store
from cepheid_broker.managed_ledger.ack_set import AckSet
from cepheid_broker.managed_ledger.cursor_state import encode_state
from cepheid_ledger import recovery
from cepheid_ledger.recovery_state import RecoveryReads
from cepheid_metadata import Position
from cepheid_rpc import ReadRequest, Status

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
    """The fence holds in memory at once; its record is queued, and not waited for."""

    async def fence(self: LedgerAccess, state: Any) -> Status:
        if not state.fenced:
            state.fenced = True
            self._ledgers.mark_dirty(state)
            self._checkpointer.touch()
        return Status.OK

    with mock.patch.object(LedgerAccess, "_fence", fence):
        yield


@contextlib.contextmanager
def fence_not_by_reads() -> Iterator[None]:
    """Recovery fences by its LAC requests alone: up to Qa - 1 bookies of a window stay unfenced."""

    def unfenced(*args: Any, **fields: Any) -> ReadRequest:
        return ReadRequest(*args, **{**fields, "fence": False})

    with mock.patch.object(recovery, "ReadRequest", unfenced):
        yield


@contextlib.contextmanager
def count_a_timeout_as_a_negative() -> Iterator[None]:
    """Whoever does not answer a recovery read does not have the entry."""
    with mock.patch.object(RecoveryReads, "on_unknown", RecoveryReads.on_no):
        yield


@contextlib.contextmanager
def drop_holes_when_saving_a_cursor() -> Iterator[None]:
    """Beyond a few, acknowledged entries above the mark-delete position are left out of what is saved."""

    def encode_few(ack_set: AckSet) -> bytes:
        few = AckSet(ack_set._ledgers, ack_set.mark_delete)
        for ledger_id, entries in ack_set.acked.items():
            few.acknowledge([Position(ledger_id, entry_id) for entry_id in list(entries)[:2]])
        return encode_state(few)

    with mock.patch.object(cursor_store, "encode_state", encode_few):
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        acknowledge_before_sync,
        answer_a_fence_before_it_is_durable,
        fence_not_by_reads,
        drop_holes_when_saving_a_cursor,
        count_a_timeout_as_a_negative,
    )
}
