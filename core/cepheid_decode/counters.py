"""What a task has read, for its log line and for callers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ScanCounters:
    entries: int = 0
    bytes: int = 0
    messages: int = 0  # returned rows
    markers: int = 0  # entries that are not messages of a producer, skipped
    compacted_out: int = 0  # messages of batches that compaction removed, skipped
    bad_records: int = 0  # skipped or returned as null
    lost_entries: int = 0  # trimmed during the read, with failOnDataLoss=false
    retries: int = 0  # ranges requested again, from another replica or later
    damaged: int = 0  # responses of bookies with a wrong digest
    wait_s: float = 0.0  # for bookies
    decode_s: float = 0.0
    by_bookie: dict[str, int] = field(default_factory=dict)  # bytes

    def add(self, other: ScanCounters) -> None:
        for name in self.__slots__:
            if name != "by_bookie":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for bookie, size_bytes in other.by_bookie.items():
            self.by_bookie[bookie] = self.by_bookie.get(bookie, 0) + size_bytes
