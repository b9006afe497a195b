"""The measured figures of the demo, as rows of its first table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from examples.report import percentile


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """Measurements. Rates and latencies exclude the time in which the server was down."""

    events: int
    bytes_published: int
    publish_s: float
    audit_s: float
    publish_latencies_s: Sequence[float]
    end_to_end_s: Sequence[float]
    resent_duplicates: int
    redelivered: Mapping[str, int]
    start_times_s: Sequence[float]
    outages_s: Sequence[float]
    server_memory_bytes: int

    def rows(self) -> list[tuple[str, str]]:
        megabytes = self.bytes_published / 1e6
        return [
            ("events", f"{self.events:,}"),
            ("payload", f"{megabytes:.1f} MB"),
            ("published", f"{self.events / self.publish_s:,.0f} messages/s, {megabytes / self.publish_s:.1f} MB/s"),
            ("consumed at full speed by one consumer", f"{self.events / self.audit_s:,.0f} messages/s"),
            ("publish latency p50 / p99", _milliseconds(self.publish_latencies_s)),
            ("end-to-end latency p50 / p99", _milliseconds(self.end_to_end_s)),
            ("duplicates that the client sent after a crash", f"{self.resent_duplicates:,}"),
            ("redelivered after the kills", ", ".join(f"{name} {count:,}" for name, count in self.redelivered.items())),
            ("server start to first publish", _seconds(self.start_times_s)),
            ("kill to next publish", _seconds(self.outages_s)),
            ("highest memory of the server", f"{self.server_memory_bytes / 1e6:.0f} MB"),
        ]


def _milliseconds(values_s: Sequence[float]) -> str:
    return f"{percentile(values_s, 0.5) * 1e3:.1f} / {percentile(values_s, 0.99) * 1e3:.1f} ms"


def _seconds(values_s: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f} s" for value in values_s)
