"""Records of one topic: its existence, its chain of ledgers, its cursors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, NonNegativeInt, model_validator

from cepheid_metadata.names import Position
from cepheid_metadata.policy_records import TOPIC_POLICIES, TopicPolicyFields
from cepheid_metadata.record import GrownRecord, Record, RecordPart


class TopicRecord(TopicPolicyFields, GrownRecord):
    """A topic that was created, by a client or an administrator, with its own policies; None: the namespace's hold."""

    NAME: ClassVar[str] = "topic"
    FORMAT: ClassVar[int] = 3
    ADDED: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys((*TOPIC_POLICIES, "max_message_bytes", "deleted"), 2),
        "offload": 3,
    }

    partitions: NonNegativeInt = Field(0, description="0: not partitioned.")
    properties: dict[str, str] = Field(default_factory=dict)
    created_at_ms: NonNegativeInt
    max_message_bytes: NonNegativeInt | None = None
    deleted: bool | None = Field(None, description="A partitioned topic whose deletion has begun: nobody may use it any more.")


class ChainLedger(RecordPart):
    """One ledger of a chain. `entries` None: still open, its end is not known; else the end for every reader."""

    ledger_id: NonNegativeInt
    entries: NonNegativeInt | None = None
    size_bytes: NonNegativeInt = 0
    closed_at_ms: NonNegativeInt = 0

    @property
    def is_open(self) -> bool:
        return self.entries is None


class OffloadedLedger(RecordPart):
    """The copy of one ledger in an object store.

    It is recorded before the upload begins, so that an upload that is cut off can be found and removed. The object counts only when
    `complete` is set: it was uploaded, read back and compared with the ledger.
    """

    url: str = Field(min_length=1, description="URL of the object, which nobody else ever uses: it has a random part.")
    started_at_ms: NonNegativeInt
    complete: bool = False
    completed_at_ms: NonNegativeInt = 0
    object_bytes: NonNegativeInt = Field(0, description="Size of the object.")
    on_bookies: bool = Field(True, description="False: the copies on bookies are deleted, or will be; only the object is read.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.complete and not self.on_bookies:
            raise ValueError("a ledger whose upload is not complete is kept on the bookies")
        return self


class Chain(GrownRecord):
    """A topic's ledgers, oldest first: the list's order is the truth, not the ids'. Only the topic's owner writes it; a
    BadVersionError tells the owner that it is none any more (never re-read and retry)."""

    NAME: ClassVar[str] = "chain"
    FORMAT: ClassVar[int] = 3
    ADDED: ClassVar[Mapping[str, int]] = {"messages": 2, "offloaded": 3, "object_deletions": 3}

    incarnation: str = Field(min_length=1, description="Random per creation: a topic made anew under an old name differs.")
    epoch: NonNegativeInt = Field(0, description="Counts openings: cursors carry it, so that an old owner's saves are told apart.")
    ledgers: tuple[ChainLedger, ...] = ()
    deletions: tuple[NonNegativeInt, ...] = Field((), description="Ledgers that left the list and are still to be deleted.")
    terminated_at: Position | None = Field(None, description="Last position of a terminated topic; entry -1 when empty.")
    properties: dict[str, str] = Field(default_factory=dict)
    messages: dict[NonNegativeInt, NonNegativeInt] | None = Field(
        None, description="How many messages lie in ended ledgers, by ledger id, as far as they were counted."
    )
    offloaded: dict[NonNegativeInt, OffloadedLedger] | None = Field(
        None, description="Copies of ledgers in an object store, by ledger id, including uploads that have only begun."
    )
    object_deletions: tuple[str, ...] | None = Field(None, description="URLs of objects that are still to be deleted.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [ledger.ledger_id for ledger in self.ledgers]
        # A ledger that only its object holds stays in the chain while its copies on the bookies wait to be deleted.
        kept = [ledger_id for ledger_id in ids if self.is_on_bookies(ledger_id)]
        if len(set(ids)) != len(ids) or len({*kept, *self.deletions}) != len(kept) + len(self.deletions):
            raise ValueError("a ledger is in the chain or its deletions twice")
        if strangers := set(self.offloaded or ()).difference(ids):
            raise ValueError(f"ledger {min(strangers)} is offloaded and not in the chain")
        # A successor is recorded only when its predecessor's end is known: no entry is seen twice or missed.
        if any(ledger.is_open for ledger in self.ledgers[:-1]):
            raise ValueError("a ledger before the last has no recorded end")
        return self

    def offload_of(self, ledger_id: int) -> OffloadedLedger | None:
        """The ledger's copy in an object store; None: there is none that counts."""
        found = (self.offloaded or {}).get(ledger_id)
        return found if found is not None and found.complete else None

    def is_on_bookies(self, ledger_id: int) -> bool:
        """Whether bookies keep the ledger. False: it has been offloaded, and its metadata is or will be deleted."""
        found = (self.offloaded or {}).get(ledger_id)
        return found is None or found.on_bookies


class CursorRecord(Record):
    """A durable subscription. State above the mark-delete position is inline when small, else in a cursor ledger."""

    NAME: ClassVar[str] = "cursor"

    chain_incarnation: str
    chain_epoch: NonNegativeInt = Field(0, description="Epoch of the opening that saved this.")
    generation: NonNegativeInt = Field(0, description="Raised by a reset: only then the mark-delete position may go back.")
    mark_delete: Position = Field(description="A hint when there is a cursor ledger, which is newer.")
    state: bytes | None = Field(None, description="Acknowledged above the mark-delete position, in the cursor's own format.")
    cursor_ledger_id: NonNegativeInt | None = None
    properties: dict[str, int] = Field(default_factory=dict, description="Saved with each mark-delete.")
    subscription_properties: dict[str, str] = Field(default_factory=dict)
    created_at_ms: NonNegativeInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.state is not None and self.cursor_ledger_id is not None:
            raise ValueError("state is inline or in a cursor ledger, not both")
        return self
