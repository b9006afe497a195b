"""A durable cursor with its record and the extent to which it is saved; recovered from the records when a topic is opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_ledger import LedgerClient, LedgerLostError, NoSuchLedgerError
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor import Cursor, CursorHome
from cepheid_managed_ledger.cursor_ledger import RecoveredStates, Snapshot, recover_states
from cepheid_managed_ledger.cursor_state import CursorState, decode_state
from cepheid_managed_ledger.errors import CursorStateDamagedError, ManagedLedgerFencedError
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import CursorRecord, Found, MetadataStore, Position, cursor_records, keys, list_cursors
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_RECORDS_AT_ONCE = 256
NOT_SAVED = -1
"""A revision that no cursor has."""


class SavedCursor:
    __slots__ = ("cursor", "mark_delete", "record", "revision", "version")

    def __init__(self, cursor: Cursor, record: CursorRecord, version: int) -> None:
        self.cursor = cursor
        self.record = record
        self.version = version
        self.revision = cursor.revision  # the revision that is saved
        self.mark_delete = cursor.ack_set.mark_delete  # as saved: trimming relies on it

    def __repr__(self) -> str:
        return f"<SavedCursor {self.cursor.name} at {self.mark_delete}{', dirty' if self.is_dirty else ''}>"

    @property
    def is_dirty(self) -> bool:
        return self.revision != self.cursor.revision


@dataclass(frozen=True, slots=True)
class CursorSave:
    """One cursor in a round of saving: with all changes of a revision, marked as saved only up to it."""

    saved: SavedCursor
    revision: int
    mark_delete: Position
    state: bytes

    @classmethod
    async def of(cls, saved: SavedCursor) -> CursorSave:
        return cls(saved, *await saved.cursor.encoded())

    @property
    def name(self) -> str:
        return self.saved.cursor.name

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.name, self.saved.record.generation, self.state)

    def is_large(self, inline_bytes: int) -> bool:
        # Half the limit on the way back, so that a cursor near the limit does not alternate.
        return len(self.state) > (inline_bytes if self.saved.record.cursor_ledger_id is None else inline_bytes // 2)

    def record(self, chain_epoch: int, cursor_ledger_id: int | None) -> CursorRecord | None:
        """Return the next record; None: it is unchanged, and the newer snapshot is where it points to."""
        before = self.saved.record
        if cursor_ledger_id is not None and before.cursor_ledger_id == cursor_ledger_id:
            return None
        # Not validated: all values are our own, and a topic with a thousand subscriptions creates two thousand of them a second.
        changes = {
            "mark_delete": self.mark_delete,
            "chain_epoch": chain_epoch,
            "state": self.state if cursor_ledger_id is None else None,
            "cursor_ledger_id": cursor_ledger_id,
        }
        return before.model_copy(update=changes)

    def note_saved(self) -> None:
        self.saved.revision = self.revision
        self.saved.mark_delete = self.mark_delete


class RecoveredCursors:
    """The result of `recover_cursors`."""

    __slots__ = ("beyond", "rewound", "saved", "stale")

    def __init__(self) -> None:
        self.saved: dict[str, SavedCursor] = {}
        self.beyond: list[SavedCursor] = []
        """Cursors that claimed entries which the topic does not have. Save them before the first append: otherwise entries written
        there later would count as acknowledged."""
        self.stale: dict[str, int] = {}
        """Versions of records that belong to an earlier topic of this name, and are to be deleted."""
        self.rewound = 0
        """Cursors whose newest state is lost, or may be: they start again from an older one, or from the last position in their
        record."""


async def recover_cursors(
    topic: TopicName, incarnation: str, store: MetadataStore, client: LedgerClient, ledgers: LedgerList, home: CursorHome
) -> RecoveredCursors:
    """Recover the cursors of a chain that was taken over: from then on only a still later opening can save them.

    Raises ManagedLedgerFencedError if there is one, and errors that are worth another attempt.
    """
    recovered = RecoveredCursors()
    for name, found in (await _read_records(topic, store)).items():
        if found.record.chain_incarnation != incarnation:
            recovered.stale[name] = found.version
            continue
        cursor = Cursor(name, AckSet(ledgers, found.record.mark_delete), ledgers, home, found.record.subscription_properties)
        recovered.saved[name] = SavedCursor(cursor, found.record, found.version)
    in_ledgers: dict[int, dict[str, SavedCursor]] = {}
    for name, saved in recovered.saved.items():
        record = saved.record
        if record.cursor_ledger_id is not None:
            in_ledgers.setdefault(record.cursor_ledger_id, {})[name] = saved
        else:
            _restore(topic, saved, _inline_state(record), ledgers, recovered)
    for ledger_id, cursors in in_ledgers.items():
        in_ledger = await _ledger_states(topic, store, client, ledger_id, cursors)
        if in_ledger.lost_entries:
            recovered.rewound += len(in_ledger.states)
        for name, saved in cursors.items():
            _restore(topic, saved, in_ledger.states.get(name), ledgers, recovered)
    return recovered


async def _read_records(topic: TopicName, store: MetadataStore) -> dict[str, Found[CursorRecord]]:
    records = cursor_records(store)
    names = await list_cursors(store, topic)
    found: dict[str, Found[CursorRecord]] = {}
    for start in range(0, len(names), _RECORDS_AT_ONCE):
        some = names[start : start + _RECORDS_AT_ONCE]
        answers = await asyncio.gather(*(records.get((topic, name)) for name in some))
        found.update((name, answer) for name, answer in zip(some, answers, strict=True) if answer is not None)
    return found


async def _check_newest(topic: TopicName, store: MetadataStore, cursors: Mapping[str, SavedCursor]) -> None:
    """Raise ManagedLedgerFencedError if a later owner has saved the cursors since their records were read.

    It may be the reason why the ledger with their states is gone. Continuing from the old records would redeliver what that owner
    has saved as acknowledged.
    """
    records = cursor_records(store)
    for name, saved in cursors.items():
        await store.sync(keys.cursor_key(topic, name))
        found = await records.get((topic, name))
        if found is None or found.version != saved.version:
            message = f"{topic} was opened by another broker, which saved or deleted subscription {name}"
            raise ManagedLedgerFencedError(message, topic=str(topic), subscription=name)


def _inline_state(record: CursorRecord) -> CursorState | None:
    if record.state is None:
        return CursorState(record.mark_delete)
    try:
        return decode_state(record.state)
    except CursorStateDamagedError:
        return None


async def _ledger_states(
    topic: TopicName, store: MetadataStore, client: LedgerClient, ledger_id: int, cursors: Mapping[str, SavedCursor]
) -> RecoveredStates:
    fields = {"topic": str(topic), "ledger_id": ledger_id, "hint": CursorStateDamagedError.hint}
    try:
        found = await recover_states(client, ledger_id, {name: saved.record.generation for name, saved in cursors.items()})
    except (NoSuchLedgerError, LedgerLostError) as error:
        await _check_newest(topic, store, cursors)
        log.error("cursor.ledger_lost", extra={**fields, "error": str(error)})
        return RecoveredStates({}, 0)
    if found.lost_entries:
        counts = {"subscriptions": len(cursors), "older_states": len(found.states)}
        log.error("cursor.ledger_damaged", extra={**fields, "lost_entries": found.lost_entries, **counts})
    return found


def _restore(
    topic: TopicName, saved: SavedCursor, state: CursorState | None, ledgers: LedgerList, recovered: RecoveredCursors
) -> None:
    cursor = saved.cursor
    if state is None:
        recovered.rewound += 1
        cursor.is_rewound = True
        state = CursorState(saved.record.mark_delete)
        fields = {"topic": str(topic), "subscription": cursor.name, "position": str(state.mark_delete)}
        log.error("cursor.rewound", extra={**fields, "hint": CursorStateDamagedError.hint})
    furthest = state.furthest
    if beyond := _is_beyond(ledgers, furthest):
        fields = {"topic": str(topic), "subscription": cursor.name, "position": str(furthest)}
        log.error("cursor.above_the_end", extra={**fields, "last": str(ledgers.last_position)})
        if state.sequence_ids:  # they describe entries that are lost: they are determined again from all existing entries
            state = CursorState(ledgers.first_position)
        recovered.beyond.append(saved)
    cursor.restore(state)
    saved.revision = cursor.revision
    saved.mark_delete = cursor.mark_delete
    if beyond:  # like a reset: the position may move back, and earlier snapshots do not count
        saved.record = saved.record.replace(generation=saved.record.generation + 1)
        saved.revision = NOT_SAVED


def _is_beyond(ledgers: LedgerList, position: Position) -> bool:
    """Whether the topic lacks that entry: a record was restored from an old backup, or entries are lost."""
    entries = ledgers.entries_of(position.ledger_id)
    return position.entry_id >= entries if entries is not None else position.ledger_id > ledgers.last_ledger_id
