"""What a task read, for its one log line and for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ScanCounters:
    entries: int = 0
    bytes: int = 0
    messages: int = 0  # rows given out
    markers: int = 0  # entries that are no message of a producer, left out
    compacted_out: int = 0  # messages of batches that compaction took out, left out
    bad_records: int = 0  # left out or given out as null
    lost_entries: int = 0  # trimmed under the reader, with failOnDataLoss=false
    retries: int = 0  # ranges asked for again, of another replica or later
    damaged: int = 0  # answers of bookies whose digest did not match
    wait_s: float = 0.0  # for bookies
    decode_s: float = 0.0
    by_bookie: dict[str, int] = field(default_factory=dict)  # bytes

    def add(self, other: ScanCounters) -> None:
        for name in self.__slots__:
            if name != "by_bookie":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for bookie, size_bytes in other.by_bookie.items():
            self.by_bookie[bookie] = self.by_bookie.get(bookie, 0) + size_bytes
