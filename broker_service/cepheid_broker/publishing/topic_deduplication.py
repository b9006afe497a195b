"""Deduplication of one topic: `SequenceIds`, kept across unloading and crashes in an internal durable cursor.

    opening: cursor `pulsar.dedup` ──► sequence ids up to its mark-delete position ──► the entries after it are read ──► active
    now and then, and when the topic closes: mark-delete position := last confirmed entry, with the sequence ids as of that entry

Rules
1. Position and sequence ids are taken in one step, after every confirmed entry was reported to its producer, and saved in one
   write: after a crash the entries after the position complete them. They include stored chunks of incomplete messages, which do
   not hold the position back, as the rest may never come.
2. The policy may change at any time. Turned on, it applies to what is published from then on. Turned off, the cursor is deleted
   before entries are accepted unjudged: sequence ids from before a gap would make new messages duplicates.
3. Saving costs in proportion to the names, so it happens at most once in as many entries, and for new claims at most once a tick.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.publishing.deduplication import (
    MAX_SEQUENCE_ID,
    NO_NAMES,
    NOTHING_PERSISTED,
    Chunk,
    Mark,
    NameClaim,
    SequenceIds,
    mark_of_batch,
)
from cepheid_broker.settings import DeduplicationSettings
from cepheid_broker.traffic import BrokerTraffic, Traffic
from cepheid_metadata import Position
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import BadTailError, messages_in, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedger

log = logging.getLogger(__name__)

DEDUP_CURSOR = "pulsar.dedup"
_REPLAY_READ_BYTES = 1 << 20
_NAME_CHARACTERS = 2048  # as many as PRODUCER allows
OWNER_PROPERTY, MEMORY_PROPERTY, CONTENT_PROPERTY = "cepheid-name-owner", "cepheid-name-memory-s", "cepheid-name-content"
_MOST_CLAIM_CHARACTERS = 200
_MOST_MEMORY_S = 366 * 86400


def is_recorded(metadata: pb.MessageMetadata) -> bool:
    """Return whether the entry's id is recorded; not for a marker, or a chunk that is not the last of its message."""
    return not (metadata.HasField("marker_type") or metadata.chunk_id + 1 < metadata.num_chunks_from_msg)


def chunk_of(metadata: pb.MessageMetadata) -> Chunk:
    return Chunk(metadata.sequence_id, metadata.chunk_id, metadata.publish_time, metadata.total_chunk_msg_size)


def producer_name_of(metadata: pb.MessageMetadata) -> str:
    name: str | bytes = metadata.producer_name  # protobuf returns bytes for text that is not UTF-8
    return name_key(name if isinstance(name, str) else name.decode(errors="backslashreplace"))


def name_key(name: str) -> str:
    """Return the name's key in memory, of bounded length: messages may name any producer, and a name is kept for hours."""
    if len(name) <= _NAME_CHARACTERS and not name.startswith(NO_NAMES):
        return name
    return f"{name.lstrip(''.join(NO_NAMES))[:64]}… sha256 {sha256(name.encode()).hexdigest()}"


def claim_of(properties: Mapping[str, str]) -> NameClaim | None:
    """Return what a producer claims by its properties (docs/producers.md). Raises NotAllowedError."""
    owner, text = properties.get(OWNER_PROPERTY), properties.get(MEMORY_PROPERTY, "0")
    if owner is None:
        return None
    if not 0 < len(owner) <= _MOST_CLAIM_CHARACTERS:
        raise NotAllowedError(f"{OWNER_PROPERTY} must have 1 to {_MOST_CLAIM_CHARACTERS} characters, got {len(owner)}")
    if not (text.isascii() and text.isdigit() and int(text[:12]) <= _MOST_MEMORY_S):
        raise NotAllowedError(f"{MEMORY_PROPERTY} must be whole seconds from 0 to {_MOST_MEMORY_S:,}, got {text[:40]!r}")
    if (content := properties.get(CONTENT_PROPERTY)) is None:
        return NameClaim(owner, int(text))
    first_id, slash, told = content.partition("/")
    if not (slash and first_id.isascii() and first_id.isdigit() and len(first_id) < 20 and len(told) <= _MOST_CLAIM_CHARACTERS):
        raise NotAllowedError(f"{CONTENT_PROPERTY} must be a sequence id, / and a short text, got {content[:40]!r}")
    return NameClaim(owner, int(text), int(first_id), told)


class TopicDeduplication:
    def __init__(
        self,
        topic: str,
        ledger: ManagedLedger,
        policies: Callable[[], TopicPolicies],
        settings: DeduplicationSettings,
        tasks: TaskOwner,
        totals: BrokerTraffic,
    ) -> None:
        self.active = False
        self.sequences = SequenceIds()
        self.repeated = Traffic(totals.repeated)
        """Repetitions that were not stored again."""
        self.entries_replayed = 0
        self._topic = topic
        self._ledger = ledger
        self._policies = policies
        self._settings = settings
        self._tasks = tasks
        self._switching: asyncio.Task[None] | None = None
        self._settling: dict[str, Callable[[], None]] = {}  # one producer at a time has a name
        self._entries_since_snapshot = 0
        self._snapshot_at = 0.0
        self._has_new_claims = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<TopicDeduplication of {self._topic} {'on' if self.active else 'off'}, {self.sequences!r}>"

    async def open(self) -> None:
        """Load or build the state before producers connect. Raises the errors of cursors and reading, which make the topic
        unavailable."""
        cursor = self._ledger.cursors.get(DEDUP_CURSOR)
        if cursor is not None and self._policies().deduplication:
            self.sequences.restore(cursor.sequence_ids, self._now())
            # A cursor that lost its sequence ids is rebuilt from all existing entries.
            await self._replay(self._ledger.first_position() if cursor.is_rewound else cursor.mark_delete)
            self._entries_since_snapshot = self.entries_replayed  # saved soon, so that the next opening does not read them again
            self._activate()
        else:
            await self._switch()

    async def _replay(self, mark_delete: Position) -> None:
        ledger = self._ledger
        position = ledger.next_position(mark_delete)
        while ledger.is_valid(position):
            for group in await ledger.read(position, max_entries=1 << 20, max_bytes=_REPLAY_READ_BYTES):
                for payload in group.payloads():
                    self._note_stored(payload)
                self.entries_replayed += len(group)
                position = ledger.next_position(Position(group.ledger_id, group.last_entry_id))

    def _note_stored(self, payload: memoryview) -> None:
        try:
            metadata = parse_metadata(payload)
            messages = messages_in(metadata, len(payload))
        except BadTailError as error:  # checked before it was stored; if it happens, its sequence id is unknown
            log.error("dedup.unreadable_entry", extra={"topic": self._topic, "error": str(error)})
            return
        first = metadata.sequence_id
        mark = Mark(first, first) if messages == 1 else mark_of_batch(first, messages, metadata.highest_sequence_id)
        if mark.ends > MAX_SEQUENCE_ID:
            return
        if is_recorded(metadata):
            self.sequences.note_stored(producer_name_of(metadata), mark, self._now())
        elif not metadata.HasField("marker_type"):
            self.sequences.note_stored_chunk(producer_name_of(metadata), chunk_of(metadata), self._now())

    # Publishing

    def last_sequence_id(self, name: str) -> int:
        """Return the id after which a client of this name continues, for PRODUCER_SUCCESS."""
        return self.sequences.last_sequence_id(name_key(name)) if self.active else NOTHING_PERSISTED

    def check_claim(self, name: str, claim: NameClaim) -> None:
        """Check a claim to a name. Raises NotAllowedError (no deduplication, or an earlier claim); ServiceNotReadyError (not
        yet)."""
        if not self._policies().deduplication:
            raise NotAllowedError(
                f"producer {name!r} needs deduplication, which is off for topic {self._topic}: turn it on for the topic or its "
                "namespace (cepheid namespaces set TENANT/NAMESPACE dedup on)",
                topic=self._topic,
            )
        if not self.active:
            raise ServiceNotReadyError(f"deduplication of topic {self._topic} is being turned on", topic=self._topic)
        if (reason := self.sequences.why_refused(name_key(name), claim)) is not None:
            raise NotAllowedError(f"producer {name!r} of topic {self._topic}: {reason}", topic=self._topic)

    def set_claim(self, name: str, claim: NameClaim) -> None:
        """Record the claim of the producer that now uses the name."""
        if self.active and self.sequences.set_claim(name_key(name), claim, self._now()):
            self._has_new_claims = True

    def when_settled(self, name: str, on_settled: Callable[[], None]) -> None:
        """Call `on_settled`, perhaps at once, when no append under this name is pending: then what is persisted is what is stored.

        For the one producer that has the name now: otherwise its client would continue, or resend, while the result of the
        incarnation before is unknown.
        """
        key = name_key(name)
        if self.sequences.is_settled(key):
            on_settled()
        else:
            self._settling[key] = on_settled

    def on_answered(self, entries: int, name: str | None) -> None:
        """Note that a group was appended or failed, after its sequence was updated."""
        self._entries_since_snapshot += entries
        if name in self._settling and self.sequences.is_settled(name):
            self._settling.pop(name)()

    # Saving

    def on_appended(self) -> None:
        """Save if it is time; called once per group, after its producer was answered (rule 1)."""
        if self.active and self._entries_since_snapshot >= self._entries_between_snapshots:
            self.snapshot()

    @property
    def _entries_between_snapshots(self) -> int:
        """Entries between two saves (rule 3)."""
        return max(self._policies().dedup_snapshot_entries, len(self.sequences))

    def on_tick(self) -> None:
        if self.active:
            now = self._now()
            if now - self._snapshot_at >= self._policies().dedup_snapshot_s or self._has_new_claims:
                self.snapshot()  # a claim is in no entry, so it cannot be found after a crash
        self.on_policies()

    def snapshot(self, *, everything_goes: bool = False) -> None:
        """Save within `cursor_flush_s`, or when the ledger closes. `everything_goes`: all entries are about to be deleted."""
        now = self._now()
        forgotten = self.sequences.forget_idle(now, self._settings.idle_s, self._settings.max_names)
        if everything_goes:
            forgotten += self.sequences.forget_chunks()
        self._snapshot_at = now
        cursor = self._ledger.cursors.get(DEDUP_CURSOR)  # None: it is being deleted
        if cursor is not None and (self._entries_since_snapshot or forgotten or self._has_new_claims):
            cursor.advance_to(self._ledger.last_confirmed)
            cursor.set_sequence_ids(self.sequences.snapshot())
            self._entries_since_snapshot = 0
            self._has_new_claims = False

    async def save(self, *, everything_goes: bool = False) -> None:
        """Save at once, so that its cursor retains as little as possible. Raises the errors of saving cursors."""
        if self.active and (cursor := self._ledger.cursors.get(DEDUP_CURSOR)) is not None:
            self.snapshot(everything_goes=everything_goes)
            await cursor.saved()

    def close(self) -> None:
        """Take a last snapshot; everything published is answered, and the ledger saves its cursors when it closes."""
        if self.active and not self._closed:
            self.snapshot()
        self._closed = True

    # The policy

    def on_policies(self) -> None:
        if self._policies().deduplication != self.active and self._switching is None and not self._closed:
            self._switching = self._tasks.start(self._switch_quietly(), name=f"dedup {self._topic}")

    async def _switch_quietly(self) -> None:
        try:
            await self._switch()
        except (CepheidError, TimeoutError) as error:  # the next tick tries again
            log.warning("dedup.switch_failed", extra={"topic": self._topic, "error": str(error)})
        finally:
            self._switching = None

    async def _switch(self) -> None:
        """Switch until the state matches the policy, which may change meanwhile (rule 2)."""
        while (wanted := self._policies().deduplication) != self.active or (not wanted and DEDUP_CURSOR in self._ledger.cursors):
            if wanted:
                if DEDUP_CURSOR not in self._ledger.cursors:
                    await self._ledger.create_cursor(DEDUP_CURSOR, self._ledger.last_confirmed)
                self._activate()
            else:
                await self._ledger.delete_cursor(DEDUP_CURSOR)
                self.active = False
                self.sequences.clear()
            log.info("dedup.switched", extra={"topic": self._topic, "on": self.active})

    def _activate(self) -> None:
        self.active = True
        self._snapshot_at = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
