"""What leaves the topics of clients, by retention or with the topic itself: noted when it is committed, so that a history is judged
by all that was stored.

    chain record with fewer ledgers ──► "trimmed" in the topic's history (tests/history/rules_served.py)
          │     without any: deleted ──► "deleted"
          └──► their entries, as they were sent: the audit puts them before those that it reads

Whether every subscription had acknowledged what went, the history says in the end; which ledgers may go at all is asked here (M6),
and that no topic is deleted but by an operator's word (M3).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cepheid_metadata import Chain, Position, RetentionPolicy, keys
from cepheid_wire import TopicName
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.checks.history import History

Place = tuple[int, int]
EVERYTHING, NOTHING = RetentionPolicy(time_limit_min=-1, size_limit_mb=-1), RetentionPolicy(time_limit_min=0, size_limit_mb=0)
_TRIMMING = 0.5
"""Of worlds with clients have topics that keep nothing of what is acknowledged; two of three topics there do."""


class ClientTrims:
    def __init__(self, history: History, notes: ClientNotes, topics: Sequence[TopicName], rng: random.Random) -> None:
        is_trimming = rng.random() < _TRIMMING
        self.retention = {topic: NOTHING if is_trimming and rng.random() < 2 / 3 else EVERYTHING for topic in topics}
        self.deleting: list[TopicName] = []
        """One for each deletion that somebody asked for and has not heard the end of: it may be done at any later moment."""
        self._gone: dict[TopicName, list[int]] = {topic: [] for topic in topics}  # ledgers, in order
        self._history = history
        self._notes = notes
        self._topics = {keys.chain_key(topic): topic for topic in topics}
        self._edges: dict[TopicName, list[tuple[float, Place]]] = {topic: [] for topic in topics}
        history.on_trimmed = self._on_trimmed
        history.on_emptied = self._on_emptied

    def entries(self, topic: TopicName) -> list[tuple[Position, bytes]]:
        """That went, in order. A ledger may end behind the record that gave it up: whoever still wrote to it was told OK."""
        sent, count = self._history.sent, self._history.entries_of
        ledgers = [(ledger_id, sent.get(ledger_id, ())[: count(ledger_id)]) for ledger_id in self._gone[topic]]
        return [
            (Position(ledger_id, number), payload) for ledger_id, payloads in ledgers for number, payload in enumerate(payloads)
        ]

    def edge(self, topic: TopicName, at_s: float | None = None) -> Place:
        """What is before it was gone then, or is now."""
        edges = (edge for when_s, edge in self._edges[topic] if at_s is None or when_s <= at_s)
        return max(edges, default=(-1, -1))

    def _on_trimmed(self, key: str, gone: Sequence[int], kept: Sequence[int]) -> None:
        topic, history = self._topics.get(key), self._history
        if topic is None:
            return
        history.check("M6", self.retention[topic] != EVERYTHING, lambda: f"{topic} is to keep everything, and {gone} go")
        history.check("M6", max(gone) < min(kept), lambda: f"ledgers {gone} of {topic} go, and {kept} stay")
        self._gone[topic] += gone
        edge = kept[0], 0
        self._edges[topic].append((history.now_s, edge))
        self._notes.note("trimmed", topic, position=(*edge, -1))

    def _on_emptied(self, key: str, chain: Chain, gone: Sequence[int]) -> None:
        topic, history = self._topics.get(key), self._history
        if topic is None:
            return
        history.check("M3", topic in self.deleting, lambda: f"{topic} loses all of {gone}, and nobody asked for its deletion")
        history.did("delete a topic")
        self.retention[topic] = NOTHING  # made anew it has no policy of its own, if its record goes as well
        self._gone[topic] += gone
        edge = max(gone, default=-1) + 1, 0  # a topic that never had a ledger has none to lose
        self._edges[topic].append((history.now_s, edge))
        self._notes.note("deleted", topic, position=(*edge, -1), details={"epoch": history.epoch_of(chain)})
