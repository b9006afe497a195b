"""Observations of the clients: sends, receipts, deliveries and acknowledgements, written by client threads, judged by `checks`."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

MessageKey: TypeAlias = tuple[int, int, int]
"""Ledger id, entry id and batch index of a stored message. If the client resends an event, the copy has another key."""

ACK_GRACE_S = 2.0
"""Age at a kill from which an acknowledgement must survive it. A younger one may not have reached the disk."""


class PublishObservations:
    """Times of sending and receipt of each event, in monotonic seconds; 0 means not yet."""

    def __init__(self, events: int) -> None:
        self.sent_at_s = array("d", bytes(8 * events))
        self.receipt_at_s = array("d", bytes(8 * events))
        self.receipts = 0
        self.errors: list[str] = []

    def on_receipt(self, event_id: int) -> None:
        self.receipt_at_s[event_id] = time.monotonic()
        self.receipts += 1


@dataclass
class DeliveryObservations:
    """Deliveries of one subscription. `delivered` and `acknowledged_at_s` count stored messages, the rest counts events."""

    name: str
    order: list[int] = field(default_factory=list)  # event ids, in the order of delivery
    delivered: dict[MessageKey, int] = field(default_factory=dict)  # message -> number of deliveries
    acknowledged_at_s: dict[MessageKey, float] = field(default_factory=dict)
    forgotten_acks: list[MessageKey] = field(default_factory=list)  # delivered again although acknowledged long before a kill
    distinct_events: set[int] = field(default_factory=set)
    first_seen_at_s: dict[int, float] = field(default_factory=dict)  # event id -> first delivery
    carriers: Counter[str] = field(default_factory=Counter)  # message key -> number of distinct events

    def on_delivery(self, key: MessageKey, event_id: int, killed_at_s: Iterable[float], *, carrier: str) -> None:
        times = self.delivered.get(key, 0)
        self.delivered[key] = times + 1
        self.order.append(event_id)
        if event_id not in self.distinct_events:
            self.distinct_events.add(event_id)
            self.first_seen_at_s[event_id] = time.monotonic()
            self.carriers[carrier] += 1
        acknowledged = self.acknowledged_at_s.get(key)
        if times and acknowledged is not None and any(acknowledged + ACK_GRACE_S <= kill for kill in killed_at_s):
            self.forgotten_acks.append(key)

    def on_acknowledged(self, key: MessageKey) -> None:
        self.acknowledged_at_s.setdefault(key, time.monotonic())

    @property
    def redelivered(self) -> int:
        return sum(times - 1 for times in self.delivered.values())
