"""Records of one topic: its existence, its chain of ledgers, its cursors."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.names import Position
from cepheid_metadata.policy_records import OTHER_QUOTA_LIMITS, TOPIC_POLICIES, OtherQuotaLimits, TopicPolicyFields
from cepheid_metadata.record import GrownRecord, Record, RecordPart


class TopicRecord(TopicPolicyFields, OtherQuotaLimits, GrownRecord):
    """A topic that was created, by a client or an administrator, with its own policies; None: the namespace's policies apply."""

    NAME: ClassVar[str] = "topic"
    FORMAT: ClassVar[int] = 4
    ADDED: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys((*TOPIC_POLICIES, "max_message_bytes", "deleted"), 2),
        "offload": 3,
        **dict.fromkeys(OTHER_QUOTA_LIMITS, 4),
    }

    partitions: NonNegativeInt = Field(0, description="0: not partitioned.")
    properties: dict[str, str] = Field(default_factory=dict)
    created_at_ms: NonNegativeInt
    max_message_bytes: NonNegativeInt | None = None
    deleted: bool | None = Field(None, description="Deletion of the partitioned topic has begun: it cannot be used any more.")


class ChainLedger(RecordPart):
    """One ledger of a chain. `entries` None: it is open, and its end is not known; otherwise the end for every reader."""

    ledger_id: NonNegativeInt
    entries: NonNegativeInt | None = None
    size_bytes: NonNegativeInt = 0
    closed_at_ms: NonNegativeInt = 0

    @property
    def is_open(self) -> bool:
        return self.entries is None


class OffloadedLedger(RecordPart):
    """The copy of one ledger in an object store.

    It is recorded before the upload starts, so that an interrupted upload can be found and removed. The object counts only if
    `complete` is set: it was uploaded, read back and compared with the ledger.
    """

    url: str = Field(min_length=1, description="URL of the object, which is unique: it has a random part.")
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


class ChainPageRef(RecordPart):
    """What a chain's record stores about one of its pages. A page that does not match this is not the intended one."""

    number: NonNegativeInt = Field(description="Last segment of the page's key.")
    first_ledger_id: NonNegativeInt
    last_ledger_id: NonNegativeInt
    ledgers: PositiveInt


class ChainPage(Record):
    """Older ledgers of a chain that its record has no room for (chain_pages.py). A page is never changed."""

    NAME: ClassVar[str] = "chain page"

    incarnation: str = Field(min_length=1, description="Incarnation of the chain that the page belongs to.")
    ledgers: tuple[ChainLedger, ...] = Field(min_length=1)
    messages: dict[NonNegativeInt, NonNegativeInt] | None = Field(None, description="As in the chain's record, of these ledgers.")
    offloaded: dict[NonNegativeInt, OffloadedLedger] | None = Field(None, description="As in the chain's record, of these ledgers.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(ledger.is_open for ledger in self.ledgers):
            raise ValueError("a ledger of a page has no recorded end")
        if strangers := set(self.offloaded or ()).difference(ledger.ledger_id for ledger in self.ledgers):
            raise ValueError(f"ledger {min(strangers)} is offloaded and not in the page")
        return self

    def ref(self, number: int) -> ChainPageRef:
        """Return what the chain's record stores about this page under this number."""
        first, last = self.ledgers[0].ledger_id, self.ledgers[-1].ledger_id
        return ChainPageRef(number=number, first_ledger_id=first, last_ledger_id=last, ledgers=len(self.ledgers))


class Chain(GrownRecord):
    """A topic's ledgers, oldest first: the order of the list counts, not that of the ids. Only the topic's owner writes it; a
    BadVersionError tells the owner that it has been replaced (never re-read and retry).

    A record with `pages` holds only the newest ledgers. `read_chain` returns the whole chain, whose `pages` is None.
    """

    NAME: ClassVar[str] = "chain"
    FORMAT: ClassVar[int] = 3
    ADDED: ClassVar[Mapping[str, int]] = {"messages": 2, "offloaded": 3, "object_deletions": 3, "pages": 3}

    incarnation: str = Field(min_length=1, description="Random for each creation: differs for a topic that was created again.")
    epoch: NonNegativeInt = Field(0, description="Number of openings. Cursors carry it, to identify saves by an old owner.")
    ledgers: tuple[ChainLedger, ...] = ()
    deletions: tuple[NonNegativeInt, ...] = Field((), description="Ledgers that left the list and are still to be deleted.")
    terminated_at: Position | None = Field(None, description="Last position of a terminated topic; entry -1 when empty.")
    properties: dict[str, str] = Field(default_factory=dict)
    messages: dict[NonNegativeInt, NonNegativeInt] | None = Field(
        None, description="Messages in closed ledgers, by ledger id, as far as they were counted."
    )
    offloaded: dict[NonNegativeInt, OffloadedLedger] | None = Field(
        None, description="Copies of ledgers in an object store, by ledger id, including uploads that have only begun."
    )
    object_deletions: tuple[str, ...] | None = Field(None, description="URLs of objects that are still to be deleted.")
    pages: tuple[ChainPageRef, ...] | None = Field(None, description="Where the ledgers before `ledgers` are, oldest first.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_ledgers()
        return self

    def _check_ledgers(self) -> None:
        # A chain may have 100,000 ledgers and is checked at every change: no bytecode per ledger.
        there, waiting = set(map(_LEDGER_ID, self.ledgers)), set(self.deletions)
        offloaded = self.offloaded or {}
        # A ledger that only its object holds stays in the chain while its copies on the bookies wait to be deleted.
        both = [ledger_id for ledger_id in self.deletions if ledger_id in there and self.is_on_bookies(ledger_id)]
        if len(there) != len(self.ledgers) or len(waiting) != len(self.deletions) or both:
            raise ValueError("a ledger is in the chain or its deletions twice")
        if not offloaded.keys() <= there:
            raise ValueError(f"ledger {min(offloaded.keys() - there)} is offloaded and not in the chain")
        # A successor is recorded only when its predecessor's end is known: no entry is seen twice or missed.
        if None in map(_ENTRIES, self.ledgers[:-1]):
            raise ValueError("a ledger before the last has no recorded end")
        if self.pages is not None and (not self.ledgers or len({page.number for page in self.pages}) != len(self.pages)):
            raise ValueError("a chain with pages has no ledger in its record, or a page twice")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed, validated as a whole.

        Fields with an item per ledger are not validated item by item again if they hold validated items already, as all plans do:
        for 20,000 ledgers that would take 30 ms of the broker's loop at every change.
        """
        large = {name: changes.get(name, getattr(self, name)) for name in _PER_LEDGER}
        if len(large["ledgers"]) < _LARGE_CHAIN or not self._are_validated(**large):
            return super().replace(**changes)
        small = super().replace(**{**changes, "ledgers": (), "messages": None, "offloaded": None, "pages": None})
        # No other code has it yet: this is equivalent to passing the fields to its constructor.
        small.__dict__.update(large, pages=changes.get("pages", self.pages))
        small._find_format()
        try:
            small._check_ledgers()
        except ValueError:
            return super().replace(**changes)  # raises the error with pydantic's text
        return small

    def _are_validated(self, ledgers: Any, messages: Any, offloaded: Any) -> bool:
        """Whether these are values that a chain may have, item by item. False: they may be, but need full validation."""
        return (
            type(ledgers) is tuple
            and set(map(type, ledgers)) <= {ChainLedger}
            and (messages is None or messages is self.messages or _are_counts(messages))
            and (offloaded is None or offloaded is self.offloaded or _is_by_ledger(offloaded, OffloadedLedger))
        )

    def offload_of(self, ledger_id: int) -> OffloadedLedger | None:
        """Return the ledger's copy in an object store; None: there is no complete one."""
        found = (self.offloaded or {}).get(ledger_id)
        return found if found is not None and found.complete else None

    def is_on_bookies(self, ledger_id: int) -> bool:
        """Whether bookies keep the ledger. False: it is offloaded, and its metadata is deleted or will be."""
        found = (self.offloaded or {}).get(ledger_id)
        return found is None or found.on_bookies


_LARGE_CHAIN = 200
_PER_LEDGER = ("ledgers", "messages", "offloaded")
_LEDGER_ID, _ENTRIES = attrgetter("ledger_id"), attrgetter("entries")


def _are_counts(values: Any) -> bool:
    return _is_by_ledger(values, int) and min(values.values(), default=0) >= 0


def _is_by_ledger(values: Any, value_type: type) -> bool:
    if type(values) is not dict:
        return False
    return set(map(type, values)) <= {int} and set(map(type, values.values())) <= {value_type} and min(values, default=0) >= 0


class CursorRecord(Record):
    """A durable subscription. State above the mark-delete position is inline if small, else in a cursor ledger."""

    NAME: ClassVar[str] = "cursor"

    chain_incarnation: str
    chain_epoch: NonNegativeInt = Field(0, description="Epoch of the opening that saved the record.")
    generation: NonNegativeInt = Field(0, description="Raised by a reset. Only then the mark-delete position may move back.")
    mark_delete: Position = Field(description="Only a hint if there is a cursor ledger, which is newer.")
    state: bytes | None = Field(None, description="Acknowledgements above the mark-delete position, in the cursor's own format.")
    cursor_ledger_id: NonNegativeInt | None = None
    properties: dict[str, int] = Field(default_factory=dict, description="Saved with each mark-delete.")
    subscription_properties: dict[str, str] = Field(default_factory=dict)
    created_at_ms: NonNegativeInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.state is not None and self.cursor_ledger_id is not None:
            raise ValueError("state is inline or in a cursor ledger, not both")
        return self
