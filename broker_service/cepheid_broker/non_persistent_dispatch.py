"""Who gets an entry of a non-persistent topic: decided at its arrival, once, without I/O.

    plan(entries) ──► per consumer the entries that it gets now; what cannot be taken now is dropped and counted

Nothing waits here, so there is nothing to remember but permits: no cursor, no acknowledgements, no redelivery.

Rules
1. A consumer gets an entry only with a permit and a socket that takes it; permits pay for all messages of an entry, and may go
   below 0 by a batch (protocol.md §13).
2. What one consumer gets comes in the order of `plan`.
3. The choice is that of stored topics: the active consumer of Exclusive and Failover, turns by priority in Shared, the key's hash
   in Key_Shared. When the chosen one cannot take an entry, it is dropped; only in Shared it is the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cepheid_broker.holders import Holder
from cepheid_broker.turns import Turns


@dataclass(slots=True)
class Plan:
    """`taken`: consumer → indexes of the entries that it gets, in order."""

    taken: dict[int, list[int]] = field(default_factory=dict)
    dropped_messages: int = 0


class NonPersistentDispatch:
    """Of one subscription, while consumers of one type are connected."""

    def __init__(self) -> None:
        self._consumers: dict[int, Holder] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {len(self._consumers)} consumers>"

    def on_joined(self, key: int, *, priority: int = 0, name: str = "") -> None:
        self._consumers[key] = Holder(key, name, priority)

    def on_left(self, key: int) -> None:
        self._consumers.pop(key).left = True

    def on_permits(self, key: int, messages: int) -> None:
        self._consumers[key].permits += messages
        self._on_change(self._consumers[key])

    def on_writable(self, key: int, writable: bool) -> None:
        self._consumers[key].writable = writable
        self._on_change(self._consumers[key])

    def permits(self, key: int) -> int:
        return self._consumers[key].permits

    def plan(self, messages: Sequence[int], hashes: Sequence[int]) -> Plan:
        """Entry `i` holds `messages[i]` messages, and its key has `hashes[i]` (empty where hashes do not matter)."""
        plan = Plan()
        for index, cost in enumerate(messages):
            consumer = self._choose(hashes[index] if hashes else 0)
            if consumer is None or not consumer.can_take:
                plan.dropped_messages += cost
                continue
            consumer.permits -= cost
            plan.taken.setdefault(consumer.key, []).append(index)
            self._on_served(consumer)
        return plan

    def _choose(self, key_hash: int) -> Holder | None:
        """The only one."""
        return next(iter(self._consumers.values()), None)

    def _on_change(self, consumer: Holder) -> None:
        """It may take entries again, or not any more."""

    def _on_served(self, consumer: Holder) -> None: ...


class NonPersistentShared(NonPersistentDispatch):
    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def on_joined(self, key: int, *, priority: int = 0, name: str = "") -> None:
        super().on_joined(key, priority=priority, name=name)
        self._turns.add_priority(priority)

    def _choose(self, key_hash: int) -> Holder | None:
        return self._turns.now()

    def _on_change(self, consumer: Holder) -> None:
        self._turns.queue(consumer)

    def _on_served(self, consumer: Holder) -> None:
        self._turns.end(consumer)
