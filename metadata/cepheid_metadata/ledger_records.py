"""Records of ledgers: the metadata of one ledger, and the counter of their ids."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.record import GrownRecord, Record, RecordPart


class LedgerState(enum.StrEnum):
    """OPEN → CLOSED, or OPEN → IN_RECOVERY → CLOSED. No state follows CLOSED."""

    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


class Fragment(RecordPart):
    """Entries from `first_entry_id` to before the next fragment's are on this ensemble. Its order decides striping."""

    first_entry_id: NonNegativeInt
    ensemble: tuple[str, ...]


class LedgerMetadata(Record):
    """One ledger. Changed only by compare-and-set; after a conflict the caller re-reads it and decides again."""

    NAME: ClassVar[str] = "ledger metadata"

    ledger_id: NonNegativeInt
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    state: LedgerState
    fragments: tuple[Fragment, ...]
    last_entry_id: int | None = Field(None, ge=-1, description="Only if closed; -1: the ledger is empty.")
    length_bytes: int | None = Field(None, ge=0, description="Only if closed: payload bytes of all entries.")
    digest_type: Literal["CRC32C"] = "CRC32C"
    password: bytes = b""
    creation_token: NonNegativeInt = Field(description="Random: identifies our own create if its answer was lost.")
    created_at_ms: NonNegativeInt
    custom: dict[str, str] = Field(default_factory=dict, description="Names the owner (topic, cursor), to find orphans.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            sizes = f"E {self.ensemble_size}, Qw {self.write_quorum}, Qa {self.ack_quorum}"
            raise ValueError(f"{sizes}: E >= Qw >= Qa >= 1 does not hold")
        if not self.fragments or self.fragments[0].first_entry_id != 0:
            raise ValueError("the first fragment does not start at entry 0")
        if any(before.first_entry_id >= after.first_entry_id for before, after in pairwise(self.fragments)):
            raise ValueError("fragments are not strictly increasing")
        for fragment in self.fragments:
            if len(fragment.ensemble) != self.ensemble_size or len(set(fragment.ensemble)) != self.ensemble_size:
                raise ValueError(f"the ensemble of entry {fragment.first_entry_id} is not {self.ensemble_size} distinct bookies")
        self._check_end()
        return self

    def _check_end(self) -> None:
        if not self.is_closed:
            if self.last_entry_id is not None or self.length_bytes is not None:
                raise ValueError(f"a ledger in state {self.state} has no last entry id or length")
        elif self.last_entry_id is None or self.length_bytes is None:
            raise ValueError("a closed ledger needs its last entry id and length")
        # An empty last fragment is legal: the ensemble changed and nothing was confirmed after that.
        elif self.fragments[-1].first_entry_id > self.last_entry_id + 1:
            raise ValueError(f"the last fragment starts after the last entry, {self.last_entry_id}")

    @property
    def is_closed(self) -> bool:
        return self.state is LedgerState.CLOSED

    @property
    def last_fragment(self) -> Fragment:
        return self.fragments[-1]

    def fragment_of(self, entry_id: int) -> Fragment:
        """Return the fragment whose ensemble holds (or would hold) this entry."""
        assert entry_id >= 0, f"not an entry id: {entry_id}"
        index = bisect_right(self.fragments, entry_id, key=lambda fragment: fragment.first_entry_id)
        return self.fragments[index - 1]


class DeletedLedger(GrownRecord):
    """A deleted ledger, with everything needed to restore it: bookies keep its entries while this record exists."""

    NAME: ClassVar[str] = "deleted ledger"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"version": 2}

    ledger: LedgerMetadata
    deleted_at_ms: NonNegativeInt
    purge_after_ms: NonNegativeInt = Field(description="Wall clock time after which it may be forgotten for good.")
    version: NonNegativeInt | None = Field(None, description="Version of the ledger's record when it was deleted.")


class PurgedLedgers(Record):
    """The ledgers of one page that were deleted for good: one bit each, the first in the lowest bit of the first byte."""

    NAME: ClassVar[str] = "purged ledgers"

    bits: bytes


class LedgerIdCounter(GrownRecord):
    """All ids below `next_ledger_id` are given out, in blocks, and never again."""

    NAME: ClassVar[str] = "ledger id counter"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"restored": 2}

    next_ledger_id: PositiveInt
    restored: bool | None = Field(
        None, description="The counter was restored from a backup: bookies may hold ledgers with larger ids (restored_metadata.py)."
    )
