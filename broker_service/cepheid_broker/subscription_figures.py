"""What a subscription says of itself at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_broker.activity import Activity
from cepheid_broker.consumer import ConsumerFigures
from cepheid_broker.key_sharing import KeySharing
from cepheid_broker.position import Position
from cepheid_broker.rates import TrafficFigures


@dataclass(frozen=True, slots=True)
class SubscriptionFigures:
    name: str
    durable: bool
    type_name: str
    backlog_entries: int
    backlog_messages: int | None
    """None, here and below: memory does not know (backlog.py)."""
    backlog_bytes: int | None
    oldest_age_s: float | None
    mark_delete: Position
    read_position: Position | None
    delivered: TrafficFigures
    redelivered_messages: int
    acked_entries: int
    expired_entries: int
    expire_rate_per_s: float
    """Entries that were given up by their age (`expire_until`)."""
    unacked_messages: int
    is_blocked: bool
    """By its own limit of unacknowledged messages."""
    delayed_entries: int
    replay_entries: int
    """Waiting to be sent again."""
    key_sharing: KeySharing | None
    """Of a Key_Shared one with consumers."""
    properties: Mapping[str, str]
    activity: Activity
    idle: str
    consumers: tuple[ConsumerFigures, ...]
    storage_reads: int
    cached_reads: int
