"""One consumer as its connection knows it; what is sent to it is decided by its subscription's dispatch core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cepheid_broker.activity import Activity
from cepheid_broker.dispatch import HashRange
from cepheid_broker.key_sharing import KeySharing
from cepheid_broker.peer import Peer
from cepheid_broker.rates import Traffic, TrafficFigures
from cepheid_wire import pulsar_api_pb2 as pb

if TYPE_CHECKING:
    from cepheid_broker.subscription import Subscription

log = logging.getLogger(__name__)

ACTIVE_CHANGE_VERSION = 12  # of the protocol; older clients do not know the command


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
    """The one that gets messages, where only one does."""
    hash_ranges: tuple[HashRange, ...]
    """Of key hashes that it gets (Key_Shared)."""
    priority_level: int
    metadata: dict[str, str]


class Consumer:
    """`key` names it in the core: never used again, unlike the client's `consumer_id`."""

    def __init__(
        self,
        subscription: Subscription,
        peer: Peer,
        consumer_id: int,
        key: int,
        *,
        name: str = "",
        priority_level: int = 0,
        metadata: dict[str, str] | None = None,
        connected_at_ms: int = 0,
        epoch: int | None = None,
        key_sharing: KeySharing | None = None,
        on_closed_by_broker: Callable[[Consumer], None],
    ) -> None:
        self.subscription = subscription
        self.peer = peer
        self.consumer_id = consumer_id
        self.key = key
        self.name = name
        self.priority_level = priority_level
        self.metadata = metadata or {}
        self.connected_at_ms = connected_at_ms
        self.key_sharing = key_sharing or KeySharing()
        self.traffic = Traffic()
        self.epoch = epoch
        """Of its requests for redelivery, when the client counts them (protocol.md §16)."""
        self.redelivered_messages = 0
        self.redeliver_rate_per_s = 0.0
        self.acked_entries = 0
        self.acked_messages = 0.0
        self.ack_rate_per_s = 0.0
        self.activity = Activity()
        self._last_counts = (0, 0.0)
        self._knows_end = False
        self.closed = False
        self._on_closed_by_broker = on_closed_by_broker

    def __repr__(self) -> str:
        return f"<Consumer {self.consumer_id} ({self.name!r}) of {self.subscription!r}{', closed' if self.closed else ''}>"

    def detach(self) -> None:
        """The client closed it or went away: what it holds is free at once."""
        if not self.closed:
            self.closed = True
            self.subscription.remove_consumer(self)

    def close_by_broker(self, reason: str) -> None:
        """Tells the client to look the topic up and subscribe again."""
        if not self.closed:
            self.detach()
            extra = {
                "topic": str(self.subscription.topic),
                "subscription": self.subscription.name,
                "consumer": self.name,
                "reason": reason,
            }
            log.info("consumer.closed_by_broker", extra=extra)
            self._on_closed_by_broker(self)

    def announce(self, is_active: bool) -> None:
        """Of a Failover subscription: whether it is the one that gets messages (protocol.md §19)."""
        if self.peer.protocol_version >= ACTIVE_CHANGE_VERSION:
            self.peer.send(pb.CommandActiveConsumerChange(consumer_id=self.consumer_id, is_active=is_active))

    def announce_end(self) -> None:
        """The topic is terminated and everything is acknowledged. Other clients than Java's close the connection when they hear of
        it, reconnect, and close it again, without end (protocol.md §22)."""
        if not self._knows_end and self.peer.client_version.startswith("Pulsar-Java"):
            self._knows_end = True
            self.peer.send(pb.CommandReachedEndOfTopic(consumer_id=self.consumer_id))

    def count_acked(self, entries: int, messages: int | None) -> None:
        """`messages` None: nobody counted them; as many to an entry as this consumer got on average."""
        self.acked_entries += entries
        per_entry = self.traffic.messages / self.traffic.entries if self.traffic.entries else 1.0
        self.acked_messages += entries * per_entry if messages is None else messages

    def on_tick(self, window_s: float) -> None:
        self.traffic.on_tick(window_s)
        redelivered, acked = self._last_counts
        self.redeliver_rate_per_s = (self.redelivered_messages - redelivered) / window_s
        self.ack_rate_per_s = (self.acked_messages - acked) / window_s
        self._last_counts = self.redelivered_messages, self.acked_messages

    def figures(self) -> ConsumerFigures:
        subscription = self.subscription
        return ConsumerFigures(
            self.consumer_id,
            self.name,
            self.peer.address,
            self.peer.client_version,
            self.connected_at_ms,
            self.traffic.figures(),
            self.redelivered_messages,
            self.redeliver_rate_per_s,
            self.acked_entries,
            self.ack_rate_per_s,
            replace(self.activity),
            subscription.permits(self),
            subscription.unacked_messages(self),
            subscription.is_blocked(self),
            subscription.is_active(self),
            subscription.hash_ranges(self),
            self.priority_level,
            self.metadata,
        )
