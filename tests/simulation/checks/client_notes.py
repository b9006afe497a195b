"""What clients ask and hear of publishing, and what brokers say and hear of delivery: one history per topic, for tests/history.

SimProducer ── send, resend, sent ──┐
WireTap, at the broker's end ───────┼──► events of the topic, in the order in which they happened
operators ── moving, moved ─────────┤
ClientTrims ── trimmed, deleted ────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cepheid_wire import TopicName, signed64
from tests.history.events import Event, Position
from tests.simulation.checks.history import History

BEGINNING: Position = (-1, -1, -1)
_MOVES = {"moving": 1, "seeking": 1, "moved": -1, "sought": -1}


class ClientNotes:
    def __init__(self, history: History) -> None:
        self.history = history
        self.events: dict[str, list[Event]] = {}
        """By topic."""
        self.delivered: dict[tuple[str, int, int], bytes] = {}
        """By topic and position: the bytes that consumers got."""
        self._moving: dict[tuple[str, str], int] = {}

    def __repr__(self) -> str:
        return f"<ClientNotes { ({topic: len(events) for topic, events in self.events.items()}) }>"

    def note(self, kind: str, topic: TopicName | str, actor: str = "", **fields: Any) -> None:
        now_s, name = self.history.now_s, str(topic)
        event = Event(kind, now_s, actor, **fields)
        self.events.setdefault(name, []).append(event)
        if (step := _MOVES.get(kind)) is not None:
            place = (name, event.subscription)
            self._moving[place] = self._moving.get(place, 0) + step
        if self.history.trace is not None:
            self.history.note(f"{name.rpartition('/')[2]}: {event}")

    def is_moving(self, topic: str, subscription: str) -> bool:
        """Somebody has asked for a seek, reset, skip or deletion, and has not heard that it is done."""
        return self._moving.get((topic, subscription), 0) > 0

    # Producers

    def send(self, topic: TopicName, actor: str, uid: str, key: str, order: int) -> None:
        self.history.did("publish")
        self.note("send", topic, actor, uid=uid, key=key, sequence_id=order)

    def resend(self, topic: TopicName, actor: str, uids: Iterable[str]) -> None:
        for uid in uids:
            self.note("resend", topic, actor, uid=uid)

    def sent(self, topic: TopicName, actor: str, uid: str, position: Position) -> None:
        self.note("sent", topic, actor, uid=uid, position=position)

    def refused(self, topic: TopicName, actor: str, uid: str, error: str) -> None:
        self.note("sent", topic, actor, uid=uid, error=error)

    # Consumers, as the broker's end of their connection sees them

    def spend_permit(self, actor: str, permits: int) -> None:
        """H14, right before a message is given to it."""
        self.history.check("H14", permits > 0, lambda: f"{actor} is sent a message, and has {permits} permits")

    def received(self, topic: str, actor: str, subscription: str, message: Any, tail: bytes) -> None:
        ident = message.message_id
        place = (topic, ident.ledgerId, ident.entryId)
        first = self.delivered.setdefault(place, tail)
        self.history.check("M9", first == tail, lambda: f"{actor} got other bytes at {place} than somebody before")
        details = {"left": mask_of(message.ack_set)} if message.ack_set else {}
        self.note(
            "received",
            topic,
            actor,
            subscription=subscription,
            position=(ident.ledgerId, ident.entryId, -1),
            redelivery_count=message.redelivery_count,
            details=details,
        )


def mask_of(words: Iterable[int]) -> int:
    """Bit i is 1 for message i of a batch that is not acknowledged."""
    mask = 0
    for index, word in enumerate(words):
        mask |= (word & ((1 << 64) - 1)) << (64 * index)
    return mask


def words_of(mask: int) -> list[int]:
    """The signed 64-bit words with which clients send a mask, without those at the end that are zero."""
    return [signed64(mask >> start & ((1 << 64) - 1)) for start in range(0, mask.bit_length(), 64)]
