"""Records of automatic repair: marks, the auditor's findings, the switch, and bookies that are being decommissioned."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeInt

from cepheid_metadata.record import GrownRecord, Record, RecordPart


class ShortReason(enum.StrEnum):
    """Why a bookie counts as lacking copies that it should have according to a ledger's record."""

    LOST = "lost"  # it is not registered, and the grace period is over
    DRAINING = "draining"  # it is being decommissioned
    EMPTY_DISK = "empty disk"  # it lost its disks, or the end of its journal, and cannot deny entries of older ledgers
    DAMAGED = "damaged"  # a check found copies missing, corrupt or divergent
    PLACEMENT = "placement"  # the copy is valid, but another rack would be a better place for it


class EntryRun(RecordPart):
    """Entries `first..last`, both inclusive."""

    first: NonNegativeInt
    last: NonNegativeInt


class RepairMark(GrownRecord):
    """A ledger that lacks copies. It is removed when every fragment is complete again, or the ledger is deleted.

    Every change raises its version, so that a worker cannot remove a mark that was renewed while it worked. Format 2 may contain
    damaged entries. It is written only in clusters whose storage format is 2: older releases cannot read it.
    """

    NAME: ClassVar[str] = "repair mark"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"damaged": 2}

    ledger_id: NonNegativeInt
    bookies: dict[str, ShortReason] = Field(description="Bookies that lack copies of this ledger, and why.")
    copies_left: int = Field(ge=0, description="Fewest copies that one of its entries is believed to have left.")
    short_entries: NonNegativeInt = Field(description="Copies of entries that are missing; of an open ledger as far as known.")
    short_bytes: NonNegativeInt = Field(description="Estimated payload bytes of these copies.")
    last_copy_entries: NonNegativeInt = Field(0, description="Entries with at most one copy left.")
    since_ms: NonNegativeInt = Field(description="Wall clock time when the first copy was found missing.")
    problem: str = Field("", description="Why it could not be repaired so far; empty: it was not tried, or is being repaired.")
    lost: tuple[EntryRun, ...] = Field((), description="Entries for which the last attempt found no valid copy.")
    former: tuple[str, ...] = Field(
        (), description="Bookies that its record no longer names and that may have the lost entries: they keep their copies."
    )

    damaged: dict[str, tuple[EntryRun, ...]] | None = Field(
        None,
        description="By damaged bookie, the entries to check. All its entries are checked if it is not named here.",
    )

    @property
    def lost_entries(self) -> int:
        return sum(run.last - run.first + 1 for run in self.lost)

    def entries_to_check(self, bookie: str) -> tuple[EntryRun, ...] | None:
        """Return the entries whose copies on this bookie are checked; None: all of them."""
        if self.bookies.get(bookie) is not ShortReason.DAMAGED or self.damaged is None:
            return None
        return self.damaged.get(bookie)


class UncheckedLedger(Record):
    """A closed ledger of which some bookies may lack copies, and it is unknown which: only its writer knew.

    It is created in the write that closes the ledger, and removed when all copies were checked. It is not a mark: until then
    nothing is known to be missing.
    """

    NAME: ClassVar[str] = "unchecked ledger"

    ledger_id: NonNegativeInt


class ShortFigures(RecordPart):
    """Figures about ledgers that lack copies. `last_copy_entries`: entries with a single copy left."""

    ledgers: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    last_copy_entries: NonNegativeInt = 0
    lost_entries: NonNegativeInt = 0


class BookieHoldings(RecordPart):
    """What one bookie holds according to the records of ledgers, and how much of it is missing."""

    ledgers: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    short_ledgers: NonNegativeInt = 0
    short_bytes: NonNegativeInt = 0


class Audit(Record):
    """The result of the last complete walk over all ledgers. It survives restarts of every process."""

    NAME: ClassVar[str] = "audit"

    finished_at_ms: NonNegativeInt
    ledgers: NonNegativeInt
    short: ShortFigures
    bookies: dict[str, BookieHoldings]
    largest_ensemble: NonNegativeInt = Field(0, description="Largest ensemble size of any ledger.")
    badly_placed: NonNegativeInt = Field(0, description="Ledgers that could be spread over more racks.")
    unreadable_records: NonNegativeInt = Field(0, description="Ledgers whose record is damaged or of a newer format.")
    waiting: tuple[str, ...] = Field((), description="Bookies that are not registered, and whose grace period is not over.")
    bytes_per_s: NonNegativeInt = Field(0, description="Rate at which short bytes decreased lately.")
    refilled: dict[str, str] = Field(
        default_factory=dict,
        description="Bookies that lost their disk and have all copies again, with the name of their disks.",
    )
    runs: dict[str, str] = Field(
        default_factory=dict,
        description="For each bookie, the run after whose start its copies were checked. A new run must be checked again. `lost`: "
        "the bookie is not registered, and its grace period is over.",
    )
    urgent: tuple[int, ...] = Field((), description="Ledgers with the fewest copies left, at most 1,000, to be repaired first.")


class AuditorRecord(Record):
    """Ephemeral: the process that is the auditor."""

    NAME: ClassVar[str] = "auditor"

    name: str
    since_ms: NonNegativeInt


class RepairLock(Record):
    """Ephemeral: the worker that repairs a ledger."""

    NAME: ClassVar[str] = "repair lock"

    worker: str


class RepairSwitch(Record):
    """While this record exists, nothing is marked for repair or copied."""

    NAME: ClassVar[str] = "repair switch"

    off_since_ms: NonNegativeInt
    reason: str = ""


class DrainingBookie(Record):
    """A bookie that is being decommissioned: it gets no new ledgers, and its copies move to others."""

    NAME: ClassVar[str] = "draining bookie"

    bookie_id: str = Field(min_length=1)
    since_ms: NonNegativeInt
    ledgers_at_start: NonNegativeInt | None = Field(None, description="Ledgers with this bookie when the first walk ended.")
    drained_at_ms: NonNegativeInt | None = Field(None, description="When a complete walk found no ledger with this bookie.")


class MissingLedgers(Record):
    """Ledgers that a bookie holds and metadata lacks: so many that the bookie keeps them until an operator confirms."""

    NAME: ClassVar[str] = "missing ledgers"

    bookie_id: str = Field(min_length=1)
    held: NonNegativeInt = Field(description="Ledgers that the bookie holds.")
    missing: NonNegativeInt = Field(description="Those of them that metadata lacks, and does not remember as deleted.")
    first: NonNegativeInt = Field(description="Smallest id of the missing ledgers.")
    last: NonNegativeInt = Field(description="Largest id of the missing ledgers.")
    since_ms: NonNegativeInt = Field(description="Wall clock time when the bookie first missed them.")
    confirmed: bool = Field(False, description="An operator confirmed that these were really deleted.")

    def covers(self, ledger_ids: Collection[int]) -> bool:
        """Return whether these are no more ledgers than the operator was shown."""
        return len(ledger_ids) <= self.missing and self.first <= min(ledger_ids) and max(ledger_ids) <= self.last


class RepairRequest(Record):
    """An operator's request to repair this bookie's ledgers without waiting for the grace period."""

    NAME: ClassVar[str] = "repair request"

    bookie_id: str = Field(min_length=1)
    since_ms: NonNegativeInt
