"""Counters that only grow, and their rates over the last window. One tick of the broker moves all windows on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """What went through a producer, consumer, subscription or topic: entries, the messages in them, their bytes.

    `into`: a sum that counts all of it too, and outlives its parts.
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
    """Of all topics since the start, those that are closed or deleted included: what a counter needs that never falls."""

    published: Traffic = field(default_factory=Traffic)
    delivered: Traffic = field(default_factory=Traffic)
    repeated: Traffic = field(default_factory=Traffic)
    """Sent again by producers, and not stored again: deduplication."""

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
