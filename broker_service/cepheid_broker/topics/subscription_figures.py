"""Snapshots of a subscription and its consumers, for statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_broker.dispatch import HashRange, KeySharing
from cepheid_broker.traffic import Activity, TrafficFigures
from cepheid_metadata import Position


@dataclass(frozen=True, slots=True)
class ConsumerFigures:
    consumer_id: int
    name: str
    address: str
    client_version: str
    connected_at_ms: int
    traffic: TrafficFigures
    redelivered_messages: int
    redeliver_rate_per_s: float
    acked_entries: int
    ack_rate_per_s: float
    activity: Activity
    permits: int
    unacked_messages: int
    is_blocked: bool
    is_active: bool
    """Whether it is the active consumer, where only one receives messages."""
    hash_ranges: tuple[HashRange, ...]
    """Key hashes that it receives (Key_Shared)."""
    priority_level: int
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class SubscriptionFigures:
    name: str
    durable: bool
    type_name: str
    backlog_entries: int
    backlog_messages: int | None
    """None, here and below: not known in memory (backlog.py)."""
    backlog_bytes: int | None
    oldest_age_s: float | None
    mark_delete: Position
    read_position: Position | None
    delivered: TrafficFigures
    redelivered_messages: int
    acked_entries: int
    expired_entries: int
    """Entries skipped because of their age (`expire_until`)."""
    expire_rate_per_s: float
    unacked_messages: int
    is_blocked: bool
    """Whether its own limit of unacknowledged messages blocks it."""
    delayed_entries: int
    replay_entries: int
    """Entries waiting to be redelivered."""
    key_sharing: KeySharing | None
    """Set for a Key_Shared subscription with consumers."""
    properties: Mapping[str, str]
    activity: Activity
    idle: str
    consumers: tuple[ConsumerFigures, ...]
    storage_reads: int
    cached_reads: int
