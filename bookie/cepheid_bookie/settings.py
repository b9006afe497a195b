"""Settings of a bookie's storage and of its gRPC server: bounds are in the type, the meaning is in the description."""

from __future__ import annotations

from pydantic import BaseModel, Field, PositiveInt

KiB = 1 << 10
MiB = 1 << 20


class StorageSettings(BaseModel, frozen=True, extra="forbid"):
    """Bounds, thresholds and intervals of one storage node."""

    journal_segment_bytes: int = Field(
        64 * MiB,
        ge=64 * KiB,
        le=4096 * MiB,
        description="Size of a journal file, allocated before it is written. Larger: fewer files, more disk space reserved.",
    )
    journal_spare_segments: int = Field(
        0,
        ge=0,
        le=64,
        description="Journal files that are kept to be written again instead of being deleted, so that syncs of small batches "
        "need not write the file system's metadata. Each takes `storage.journal_segment_bytes`. They are deleted while the disk is "
        "low on space, and at a start. 0: none.",
    )
    journal_batch_bytes: int = Field(
        8 * MiB,
        ge=4 * KiB,
        le=256 * MiB,
        description="Most bytes that one write and sync of the journal takes from its queue. It may be exceeded by one group.",
    )
    journal_queue_bytes: int = Field(
        64 * MiB,
        ge=64 * KiB,
        description="Bytes that may be queued for the journal before further adds wait for admission. Raise it for a disk with "
        "slow syncs and a high throughput.",
    )
    write_cache_bytes: int = Field(
        64 * MiB,
        ge=16 * KiB,
        description="Memory for entries that are not in the entry log yet. Raise it when many ledgers are written at once: each "
        "then gets fewer and larger blocks.",
    )
    waiting_bytes: int = Field(
        32 * MiB,
        ge=4 * KiB,
        description="Bytes of adds that may wait for room in the write cache or the journal queue. Beyond it adds are refused as "
        "overload.",
    )
    waiting_s: float = Field(
        4.0,
        gt=0,
        le=60,
        description="Longest wait of an add for room. Keep it below `ledger.add_timeout_s` of the brokers, so that a bookie that "
        "is only overloaded answers before they treat it as failed.",
    )

    background_floor_bytes_s: int = Field(
        2 * MiB,
        ge=64 * KiB,
        description="Bytes per second of copies made by repair that are admitted however slow other adds become. Above it the "
        "bookie measures how long other adds wait for the journal, and admits what does not disturb them. Higher: repair ends "
        "sooner on a busy disk, and publishing is slower meanwhile.",
    )
    background_waiting_bytes: int = Field(
        6 * MiB,
        ge=4 * KiB,
        description="Bytes of copies made by repair that may wait until they are admitted. Beyond it they are refused as "
        "overload and sent again. Keep it below what `storage.background_floor_bytes_s` admits within `storage.waiting_s`.",
    )

    block_bytes: int = Field(
        1 * MiB,
        ge=4 * KiB,
        le=16 * MiB,
        description="Size at which a block of the entry log is closed; it may be exceeded by one entry. A read from disk fetches "
        "whole blocks. Larger: better for reading history in sequence, worse for reading single entries.",
    )
    log_bytes: int = Field(
        256 * MiB,
        ge=16 * KiB,
        le=4096 * MiB,
        description="Size at which an entry log file is closed. Disk space is freed one file at a time, so smaller files free it "
        "sooner.",
    )
    open_logs: int = Field(32, ge=2, le=4096, description="Entry log files kept open for reading.")

    checkpoint_interval_s: float = Field(
        10.0,
        gt=0,
        description="Longest time until an entry in the journal is in the entry log too. Longer: larger blocks, and more to "
        "replay after a crash.",
    )
    checkpoint_journal_bytes: int = Field(
        256 * MiB,
        ge=64 * KiB,
        description="Bytes written to the journal since the last checkpoint that start the next one. It bounds what a start has "
        "to replay.",
    )
    retry_s: float = Field(1.0, gt=0, description="Pause before a flush that failed because the disk was full is tried again.")

    reader_threads: int = Field(
        2, ge=1, le=64, description="Threads that read blocks for brokers. Raise it for disks that serve many requests at once."
    )
    reading_bytes: int = Field(
        32 * MiB,
        ge=1 * MiB,
        description="Bytes that all reads of brokers together may be fetching from disk at once; further reads queue.",
    )
    open_reads: int = Field(
        256, ge=1, le=65536, description="Range reads of brokers in progress. Beyond it reads are refused as overload."
    )

    read_ahead_bytes: int = Field(
        16 * MiB,
        ge=0,
        description="Memory for blocks of which a broker has read a part and will read the rest, and for the blocks that follow. "
        "Raise it, by 3 MiB each, for more consumers that catch up at once. 0: nothing is kept or read ahead.",
    )
    read_wait_s: float = Field(
        3.0,
        gt=0,
        le=60,
        description="Longest time until a read of a broker gets its turn at the disk. After it the read is refused as overload, "
        "and the broker asks another replica. Keep it below `ledger.read_timeout_s` of the brokers: a bookie would otherwise "
        "read for brokers that do not wait any more. Reads of a recovery do not queue.",
    )

    open_scans: int = Field(
        128,
        ge=1,
        le=65536,
        description="Reads past the brokers (Spark, `cepheid read`) in progress, each with one chunk in memory: up to 2 MiB for "
        "each. Beyond it readers are told to come back after `storage.scan_retry_s`.",
    )
    scan_threads: int = Field(
        2, ge=1, le=64, description="Threads that read blocks for scans. They are separate from `storage.reader_threads`."
    )
    scan_bytes: int = Field(
        16 * MiB,
        ge=1 * MiB,
        description="Bytes that all scans over gRPC together may be fetching from disk at once; further ones queue. On the scan "
        "port each of the `storage.scan_threads` reads 1 MiB at a time instead.",
    )
    scan_retry_s: float = Field(0.5, gt=0, le=60, description="Time after which a refused scan is told to come back.")
    share_logs: bool = Field(
        True,
        description="Whether scans by processes of the same machine and user are handed the entry log files to read them "
        "themselves (Linux). It makes them faster. A file holds entries of many topics; set it to false where such processes may "
        "not see all of them.",
    )

    lac_waits: int = Field(
        10_000,
        ge=0,
        description="Readers of open ledgers that may wait at this bookie for further entries. Beyond it they are refused as "
        "overload, and ask again after a pause.",
    )

    loaded_ledgers: int = Field(
        20_000,
        ge=1,
        description="Ledger states kept in memory, about 0.5 KB each. Others are loaded from the index when they are next used. "
        "Raise it when more ledgers than this are written or read at a time.",
    )

    min_free_journal_bytes: int = Field(
        128 * MiB,
        ge=0,
        description="Free space on the journal disk below which the bookie becomes read-only. Fencing and recovery still work "
        "then.",
    )
    min_free_data_bytes: int = Field(
        320 * MiB,
        ge=0,
        description="Free space on the data disk below which the bookie becomes read-only. Compaction frees a full disk with it: "
        "keep it at `storage.compaction_major_share` of `storage.log_bytes`, `storage.write_cache_bytes`, "
        "`storage.compaction_reserve_bytes`, and with the journal on the same disk `storage.journal_segment_bytes`, together.",
    )
    space_margin_bytes: int = Field(
        64 * MiB,
        ge=0,
        description="Free space above `storage.min_free_journal_bytes` and `storage.min_free_data_bytes` with which a read-only "
        "bookie becomes writable again. Keep it at `storage.journal_segment_bytes` or more, so that the next journal file does not "
        "make it read-only at once.",
    )
    warn_free_journal_bytes: int = Field(
        512 * MiB, ge=0, description="Free space on the journal disk below which the bookie warns in its log and at `/ready`."
    )
    warn_free_data_bytes: int = Field(
        1024 * MiB, ge=0, description="Free space on the data disk below which the bookie warns in its log and at `/ready`."
    )
    slow_disk_s: float = Field(
        2.0,
        ge=0,
        description="Time for one write and sync of the journal above which the disk counts as slow; a flush of the data may take "
        "five times that. If all writes are slow for `storage.slow_disk_for_s`, the bookie becomes read-only, so that writers use "
        "other bookies. 0: never. Bookies of `cepheid standalone` ignore it.",
    )
    slow_disk_for_s: float = Field(
        30.0,
        gt=0,
        description="Time for which all writes must be slow before the bookie becomes read-only, and quick before it is writable "
        "again.",
    )
    stalled_disk_s: float = Field(
        20.0,
        ge=0,
        description="Time after which a write that has not finished means that the disk hangs: the bookie leaves the list of "
        "bookies until the write finishes, so that its ledgers are repaired elsewhere. 0: never. Bookies of `cepheid standalone` "
        "ignore it.",
    )
    disk_check_interval_s: float = Field(
        2.0,
        gt=0,
        description="Interval between checks of free space, and between writes that probe a slow disk.",
    )

    gc_interval_s: float = Field(
        300.0,
        gt=0,
        description="Interval between two comparisons with metadata. Data of a deleted ledger is removed when two in a row did "
        "not find it. Shorter: disk space returns sooner, metadata is listed more often.",
    )
    gc_confirm_s: float = Field(
        60.0,
        gt=0,
        description="Time after which a comparison that first missed a ledger is followed by the one that removes its data, if "
        "`storage.gc_interval_s` is longer.",
    )
    gc_full_interval_s: float = Field(
        30.0,
        gt=0,
        description="Interval between two comparisons while the data disk is full, if `storage.gc_interval_s` is longer. The first "
        "is made as soon as the disk is full.",
    )
    shorten_undelete_on_full_disk: bool = Field(
        False,
        description="Whether a bookie with a full data disk gives up deleted ledgers before their time of grace "
        "(`ledger.deletion_grace_s`) is over, as many as it needs to become writable. They cannot be brought back then.",
    )
    gc_mass_ledgers: int = Field(
        20, ge=1, description="Number of ledgers on this bookie from which the check of `storage.gc_mass_ratio` applies."
    )
    gc_mass_ratio: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of this bookie's ledgers that may be missing from metadata at once although metadata does not "
        "remember that they were deleted. If more are missing, nothing is deleted until `cepheid bookies confirm-missing`: it may "
        "be the wrong metadata.",
    )
    gc_surplus_ledgers: int = Field(
        350,
        ge=1,
        description="Ledgers of this bookie whose metadata records are read every `storage.gc_interval_s`, in rotation, to find "
        "surplus copies: "
        "closed ledgers that were repaired on other bookies and no longer name this one. Larger: their disk space returns sooner, "
        "metadata is read more often.",
    )
    compaction_minor_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Live share of an entry log file below which each collection copies its live blocks to a new file and deletes "
        "it. 0: none.",
    )
    compaction_major_share: float = Field(
        0.6,
        ge=0,
        le=1,
        description="The same, once per `storage.compaction_major_interval_s`, and at once while the data disk has less than twice "
        "`storage.min_free_data_bytes` free or less than half of all entry log bytes are live. Higher: less space is used, and "
        "more is copied for it. 0: none.",
    )
    compaction_major_interval_s: float = Field(
        3600.0, gt=0, description="Interval between two collections that use `storage.compaction_major_share`."
    )
    compaction_bytes_s: int = Field(
        64 * MiB,
        ge=64 * KiB,
        description="Most bytes per second that compaction copies. While adds arrive it copies fewer if they would wait longer for "
        "the journal, but never fewer than `storage.background_floor_bytes_s`. While the data disk is full it copies as fast as it "
        "can.",
    )
    compaction_reserve_bytes: int = Field(
        16 * MiB,
        ge=0,
        description="Free space on the data disk that compaction leaves. It may use the rest of `storage.min_free_data_bytes`, so "
        "that it can free a full disk. Keep it large enough for the block index.",
    )
    scrub_period_s: float = Field(
        7 * 86400.0,
        ge=0,
        description="Time in which every block of the entry logs is read once and compared with its checksum, so that a damaged "
        "one is repaired from another bookie before a reader needs it. 0: blocks are not read for this purpose.",
    )
    scrub_bytes_s: int = Field(
        8 * MiB,
        ge=64 * KiB,
        description="Most bytes per second that are read for `storage.scrub_period_s`. With more data than fits, a pass takes "
        "longer than the period. Raise it for bookies with more than 4 TB.",
    )
    tombstone_s: float = Field(
        7 * 86400.0,
        gt=0,
        description="Time for which a deleted ledger still refuses entries from an old writer. Keep it longer than a broker can "
        "be suspended.",
    )


class BookieServerSettings(BaseModel, frozen=True, extra="forbid"):
    """The gRPC server of one bookie."""

    stream_in_flight_bytes: PositiveInt = Field(
        32 * MiB,
        description="Unanswered bytes of one broker's adds at which the bookie stops reading from it. It may be exceeded by one "
        "message. Raise it for brokers with a high throughput over a long distance.",
    )
    stop_grace_s: float = Field(
        5.0, gt=0, le=60, description="Longest time that a stop waits for adds that were admitted and reads in progress."
    )
    max_connections: PositiveInt = Field(
        4096,
        description="Connections that the gRPC port holds; a port without TLS beside it holds as many again. Never more than half "
        "of the files that the process may have open. Beyond it connections are closed at once. A broker needs a few, a Spark "
        "executor one.",
    )
    handshake_timeout_s: float = Field(
        10.0,
        gt=0,
        le=120,
        description="Time within which a client of the gRPC port has ended the TLS handshake and begun to speak HTTP/2.",
    )
