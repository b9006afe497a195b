"""Records that exist between a restore of metadata and its confirmation by an operator."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeInt

from cepheid_metadata.record import Record


class RestoredMetadata(Record):
    """Metadata that was restored from a backup. While this record exists, bookies delete nothing."""

    NAME: ClassVar[str] = "restored metadata"

    backup_sha256: str = Field(min_length=1, description="Checksum of the backup, which identifies it.")
    backup_created_at_ms: NonNegativeInt = Field(description="Wall clock time when the backup began.")
    restored_at_ms: NonNegativeInt


class BookieReport(Record):
    """What one bookie held when it first started after a restore. The id counter was raised above it before this was written."""

    NAME: ClassVar[str] = "bookie report"

    bookie_id: str = Field(min_length=1)
    incarnation: str = Field(description="Disks that the report is about; empty for a lost bookie.")
    largest_ledger_id: int = Field(ge=-1, description="-1: it held no ledger.")
    ledgers: NonNegativeInt
    reported_at_ms: NonNegativeInt
    lost: bool = Field(False, description="An operator gave up the bookie: its ledgers are unknown.")
