"""When a consumer or a subscription last did what: wall clock in ms, 0: never. For people; nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    first_flow_at_ms: int = 0
    last_flow_at_ms: int = 0
    first_sent_at_ms: int = 0
    last_sent_at_ms: int = 0
    last_acked_at_ms: int = 0
    last_expired_at_ms: int = 0
    """Of a subscription, as the next."""
    last_mark_delete_at_ms: int = 0

    def on_flow(self, now_ms: int) -> None:
        self.first_flow_at_ms = self.first_flow_at_ms or now_ms
        self.last_flow_at_ms = now_ms

    def on_sent(self, now_ms: int) -> None:
        self.first_sent_at_ms = self.first_sent_at_ms or now_ms
        self.last_sent_at_ms = now_ms

    def include(self, other: Activity) -> None:
        """What a consumer did, its subscription did."""
        self.first_flow_at_ms = _first(self.first_flow_at_ms, other.first_flow_at_ms)
        self.last_flow_at_ms = max(self.last_flow_at_ms, other.last_flow_at_ms)
        self.first_sent_at_ms = _first(self.first_sent_at_ms, other.first_sent_at_ms)
        self.last_sent_at_ms = max(self.last_sent_at_ms, other.last_sent_at_ms)
        self.last_acked_at_ms = max(self.last_acked_at_ms, other.last_acked_at_ms)


def _first(one_ms: int, other_ms: int) -> int:
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms
