"""Load reports of brokers, and the one number computed from them.

    load of a bundle = messages/s ÷ 20,000 + bytes/s ÷ 200 MB + open topics ÷ 20,000          published and delivered together
    load of a broker = the sum over its bundles, or the share of one core that its process uses: the larger of the two

So 1.0 is about what fills one core. If the processor share is above the sum (small messages, slow machine), the loads of that
broker's bundles are scaled up in proportion, so that a move counts with the processor time that the bundle takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGES_PER_S = 20_000
BYTES_PER_S = 200_000_000
TOPICS = 20_000


@dataclass(frozen=True, slots=True)
class BundleLoad:
    """The load of one bundle. `bundle` is its full name: tenant/namespace/range."""

    bundle: str
    messages_in_per_s: float = 0.0
    bytes_in_per_s: float = 0.0
    messages_out_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    topics: int = 0
    producers: int = 0
    consumers: int = 0

    @property
    def messages_per_s(self) -> float:
        return self.messages_in_per_s + self.messages_out_per_s

    @property
    def load(self) -> float:
        size_per_s = self.bytes_in_per_s + self.bytes_out_per_s
        return self.messages_per_s / MESSAGES_PER_S + size_per_s / BYTES_PER_S + self.topics / TOPICS


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """The load report of one broker. Rates and `cpu` are averages over its last rate window."""

    broker_id: str
    bundles: tuple[BundleLoad, ...] = ()
    cpu: float = 0.0
    """Share of one core that the process used, 0 to the number of cores."""
    memory_bytes: int = 0
    started_at_ms: int = 0
    reported_at_ms: int = 0

    @property
    def age_s(self) -> float:
        """Seconds that the broker had run when it reported, by its own clock."""
        return (self.reported_at_ms - self.started_at_ms) / 1000

    @property
    def estimate(self) -> float:
        """Sum of the loads of the broker's bundles."""
        return sum(bundle.load for bundle in self.bundles)

    @property
    def load(self) -> float:
        return max(self.cpu, self.estimate)

    @property
    def messages_per_s(self) -> float:
        return sum(bundle.messages_per_s for bundle in self.bundles)

    @property
    def topics(self) -> int:
        return sum(bundle.topics for bundle in self.bundles)


_RATES = {  # the names of LocalBrokerData (docs/reference/shapes.md §7)
    "messages_in_per_s": "msgRateIn",
    "bytes_in_per_s": "msgThroughputIn",
    "messages_out_per_s": "msgRateOut",
    "bytes_out_per_s": "msgThroughputOut",
}
_COUNTS = {"topics": "topics", "producers": "producerCount", "consumers": "consumerCount"}


def local_broker_data(report: BrokerReport) -> dict[str, Any]:
    """Return a report in the shape of Pulsar's `LocalBrokerData`, with members of ours: `brokerId` and `load`.

    `cpu.usage` is in percent of one core, `memory.usage` in megabytes, bandwidths in kbit/s.
    """
    sums = {wire: sum(getattr(bundle, name) for bundle in report.bundles) for name, wire in _RATES.items()}
    stats = {
        bundle.bundle: {
            **{wire: getattr(bundle, name) for name, wire in (_RATES | _COUNTS).items()},
            "cacheSize": 0,
        }
        for bundle in report.bundles
    }
    return {
        "brokerId": report.broker_id,
        "load": report.load,
        "cpu": {"usage": 100 * report.cpu, "limit": 100.0},
        "memory": {"usage": report.memory_bytes / (1 << 20), "limit": 0.0},
        "directMemory": {"usage": 0.0, "limit": 0.0},
        "bandwidthIn": {"usage": sums["msgThroughputIn"] * 8 / 1000, "limit": 0.0},
        "bandwidthOut": {"usage": sums["msgThroughputOut"] * 8 / 1000, "limit": 0.0},
        **sums,
        "startTimestamp": report.started_at_ms,
        "lastUpdate": report.reported_at_ms,
        "lastStats": stats,
        "numTopics": report.topics,
        "numBundles": len(report.bundles),
        "numConsumers": sum(bundle.consumers for bundle in report.bundles),
        "numProducers": sum(bundle.producers for bundle in report.bundles),
        "bundles": list(stats),
        "lastBundleGains": [],
        "lastBundleLosses": [],
    }


def report_from(data: Mapping[str, Any]) -> BrokerReport:
    """Return the report that another broker sent as `local_broker_data`. Raises ValueError for anything else."""
    try:
        bundles = tuple(
            BundleLoad(
                str(name),
                float(stats["msgRateIn"]),
                float(stats["msgThroughputIn"]),
                float(stats["msgRateOut"]),
                float(stats["msgThroughputOut"]),
                int(stats["topics"]),
                int(stats["producerCount"]),
                int(stats["consumerCount"]),
            )
            for name, stats in data["lastStats"].items()
        )
        return BrokerReport(
            str(data["brokerId"]),
            bundles,
            float(data["cpu"]["usage"]) / 100,
            int(float(data["memory"]["usage"]) * (1 << 20)),
            int(data["startTimestamp"]),
            int(data["lastUpdate"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a load report: {error!r}") from None
