"""Counters of producers, consumers, subscriptions and topics: traffic with its rates, and times of last actions.

Counters only grow. One tick of the broker advances the windows of all rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Traffic of a producer, consumer, subscription or topic: entries, the messages in them, their bytes.

    `into`: a sum that counts all of it as well, and outlives its parts.
    """

    into: Traffic | None = None
    entries: int = 0
    messages: int = 0
    size_bytes: int = 0
    message_rate_per_s: float = 0.0
    byte_rate_per_s: float = 0.0
    _last_messages: int = 0
    _last_bytes: int = 0

    def count(self, entries: int, messages: int, size_bytes: int) -> None:
        traffic: Traffic | None = self
        while traffic is not None:
            traffic.entries += entries
            traffic.messages += messages
            traffic.size_bytes += size_bytes
            traffic = traffic.into

    def on_tick(self, window_s: float) -> None:
        self.message_rate_per_s = (self.messages - self._last_messages) / window_s
        self.byte_rate_per_s = (self.size_bytes - self._last_bytes) / window_s
        self._last_messages, self._last_bytes = self.messages, self.size_bytes

    def figures(self) -> TrafficFigures:
        return TrafficFigures(self.entries, self.messages, self.size_bytes, self.message_rate_per_s, self.byte_rate_per_s)


@dataclass(frozen=True, slots=True)
class BrokerTraffic:
    """Traffic of all topics since the start, including closed and deleted ones, for counters that never fall."""

    published: Traffic = field(default_factory=Traffic)
    delivered: Traffic = field(default_factory=Traffic)
    repeated: Traffic = field(default_factory=Traffic)
    """Messages that producers sent again and deduplication did not store."""

    def on_tick(self, window_s: float) -> None:
        self.published.on_tick(window_s)
        self.delivered.on_tick(window_s)


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """A snapshot of `Traffic`."""

    entries: int
    messages: int
    size_bytes: int
    message_rate_per_s: float
    byte_rate_per_s: float


@dataclass(slots=True)
class Activity:
    """Times of the last actions of a consumer or subscription: wall clock in ms, 0: never. For people; no decision uses them."""

    first_flow_at_ms: int = 0
    last_flow_at_ms: int = 0
    first_sent_at_ms: int = 0
    last_sent_at_ms: int = 0
    last_acked_at_ms: int = 0
    last_expired_at_ms: int = 0
    """Only of subscriptions, as is the next."""
    last_mark_delete_at_ms: int = 0

    def on_flow(self, now_ms: int) -> None:
        self.first_flow_at_ms = self.first_flow_at_ms or now_ms
        self.last_flow_at_ms = now_ms

    def on_sent(self, now_ms: int) -> None:
        self.first_sent_at_ms = self.first_sent_at_ms or now_ms
        self.last_sent_at_ms = now_ms

    def include(self, other: Activity) -> None:
        """Add the actions of a consumer to its subscription's."""
        self.first_flow_at_ms = _first(self.first_flow_at_ms, other.first_flow_at_ms)
        self.last_flow_at_ms = max(self.last_flow_at_ms, other.last_flow_at_ms)
        self.first_sent_at_ms = _first(self.first_sent_at_ms, other.first_sent_at_ms)
        self.last_sent_at_ms = max(self.last_sent_at_ms, other.last_sent_at_ms)
        self.last_acked_at_ms = max(self.last_acked_at_ms, other.last_acked_at_ms)


def _first(one_ms: int, other_ms: int) -> int:
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms
