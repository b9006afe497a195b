"""Every setting of a bookie: what it is, who would change it."""

from __future__ import annotations

from pydantic import BaseModel, Field

KiB = 1 << 10
MiB = 1 << 20


BOOKIE_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,200}$"


class StorageSettings(BaseModel, frozen=True, extra="forbid"):
    """Bounds, thresholds and intervals of one storage node. Sizes in bytes, times in seconds."""

    journal_segment_bytes: int = Field(
        64 * MiB,
        ge=64 * KiB,
        le=4096 * MiB,
        description="Size of a preallocated journal segment. Larger: fewer files, more disk held back.",
    )
    journal_batch_bytes: int = Field(
        8 * MiB, ge=4 * KiB, le=256 * MiB, description="A group commit takes at most so much of what waits, soft by one group."
    )
    journal_queue_bytes: int = Field(
        64 * MiB,
        ge=64 * KiB,
        description="What may wait for the journal before adds wait outside it. Raise it with the disk's latency.",
    )
    write_cache_bytes: int = Field(
        64 * MiB,
        ge=16 * KiB,
        description="Both halves together. Larger: fewer, larger blocks per ledger when many ledgers are written.",
    )
    waiting_bytes: int = Field(
        32 * MiB,
        ge=4 * KiB,
        description="Adds that may wait for room in write cache or journal; beyond it they are refused as overload.",
    )
    waiting_s: float = Field(4.0, gt=0, le=60, description="Longest wait for room. Below the add timeout of ledger clients (5 s).")

    block_bytes: int = Field(
        1 * MiB,
        ge=4 * KiB,
        le=16 * MiB,
        description="An entry-log block is closed at this size, soft by one entry. One read fetches one block.",
    )
    log_bytes: int = Field(
        256 * MiB, ge=64 * KiB, le=4096 * MiB, description="An entry log is closed at this size. Space returns per log."
    )
    open_logs: int = Field(32, ge=2, le=4096, description="Entry logs kept open for reading.")

    checkpoint_interval_s: float = Field(
        10.0, gt=0, description="Longest time until what the journal holds is also in the entry log."
    )
    checkpoint_journal_bytes: int = Field(
        256 * MiB, ge=64 * KiB, description="Journal written since the last checkpoint that starts the next one: bounds replay."
    )
    retry_s: float = Field(1.0, gt=0, description="Pause before a flush that found the disk full is tried again.")

    reader_threads: int = Field(
        2, ge=1, le=64, description="Threads that read blocks. More only helps disks that like deep queues."
    )
    reading_bytes: int = Field(
        32 * MiB, ge=1 * MiB, description="Catch-up chunks being read from disk at once, all readers together; others queue."
    )
    open_reads: int = Field(256, ge=1, le=65536, description="Range reads in progress; beyond it reads are refused as overload.")

    open_scans: int = Field(
        128,
        ge=1,
        le=65536,
        description="Reads past the brokers in progress, each with a chunk in memory, together 2 MiB for each of so many; "
        "beyond it they are told to come later.",
    )
    scan_threads: int = Field(2, ge=1, le=64, description="Threads that read blocks for scans. Brokers' reads have others.")
    scan_bytes: int = Field(
        16 * MiB,
        ge=1 * MiB,
        description="Chunks of scans being read from disk at once, all by gRPC together; others queue. Past gRPC "
        "each of the scans' threads reads one MiB at a time.",
    )
    scan_retry_s: float = Field(0.5, gt=0, le=60, description="When a refused scan is told to come back.")
    share_logs: bool = Field(
        True,
        description="Scans by processes of the bookie's machine and user get its entry logs, and read them themselves (Linux). "
        "A log holds entries of many topics: where tickets are judged, none is given away.",
    )

    lac_waits: int = Field(
        10_000,
        ge=0,
        description="Readers of open ledgers that may wait here for more entries; beyond it they are refused as overload.",
    )

    loaded_ledgers: int = Field(
        20_000,
        ge=1,
        description="Ledger states kept in memory. Others are loaded from the index at their next use (about 0.5 KB each).",
    )

    min_free_journal_bytes: int = Field(
        128 * MiB, ge=0, description="Below this the journal disk takes no regular adds; fences and recovery go on."
    )
    min_free_data_bytes: int = Field(128 * MiB, ge=0, description="Below this the data disk takes no regular adds.")
    disk_check_interval_s: float = Field(2.0, gt=0, description="How often free space is looked at while adds come in.")

    gc_interval_s: float = Field(
        900.0,
        gt=0,
        description="Between two comparisons with metadata. A deleted ledger's data goes after two of them at the earliest.",
    )
    gc_mass_ledgers: int = Field(20, ge=1, description="Mass absence is judged from so many ledgers on.")
    gc_mass_ratio: float = Field(
        0.5,
        gt=0,
        le=1,
        description="If metadata lacks more than this share of our ledgers, nothing is deleted: it may be the wrong cluster.",
    )
    tombstone_s: float = Field(
        7 * 86400.0, gt=0, description="How long a deleted ledger still refuses its old writer. Longer than a writer can sleep."
    )


class BookieSettings(StorageSettings):
    """The same, with whose it is."""

    bookie_id: str = Field(
        pattern=BOOKIE_ID_PATTERN,
        description="Stable name of this bookie in metadata. Never reuse one for an empty disk.",
    )
    cluster_id: str = Field(
        "", max_length=200, description="Instance id of the cluster; a directory stamped by another one is refused."
    )
