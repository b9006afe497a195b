"""Which consumer gets an entry of a non-persistent topic: decided once, when it arrives, without I/O.

    plan(entries) ──► the entries that each consumer gets now; all others are dropped and counted

Entries never wait, so only permits are kept: no cursor, no acknowledgements, no redelivery.

Rules
1. A consumer gets an entry only with a permit and a writable socket; permits pay for all messages of an entry, and may fall below 0
   by a batch (protocol.md §13).
2. A consumer gets its entries in the order of `plan`.
3. Consumers are chosen as for stored topics: the active one of Exclusive and Failover, turns by priority in Shared, the key's hash
   in Key_Shared. An entry that the chosen one cannot take is dropped; in Shared the next one gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cepheid_broker.dispatch.dispatch_kinds import EXCLUSIVE, FAILOVER, KEY_SHARED
from cepheid_broker.dispatch.effects import HashRange
from cepheid_broker.dispatch.holders import Holder
from cepheid_broker.dispatch.key_owners import KeyOwners
from cepheid_broker.dispatch.key_sharing import KeySharing
from cepheid_broker.dispatch.turns import Turns


@dataclass(slots=True)
class Plan:
    """What to send. `taken`: consumer → indexes of the entries that it gets, in order."""

    taken: dict[int, list[int]] = field(default_factory=dict)
    dropped_messages: int = 0


class NonPersistentDispatch:
    """Dispatch of one subscription while consumers of one type are connected; this class is for Exclusive and Failover."""

    by_key: ClassVar[bool] = False
    """Whether `plan` needs the hashes of keys."""

    def __init__(self, partition_index: int = -1) -> None:
        self.consumers: dict[int, Holder] = {}
        self.active: Holder | None = None
        self._partition_index = max(0, partition_index)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {len(self.consumers)} consumers>"

    def on_joined(self, key: int, *, priority: int = 0, name: str = "", ranges: Sequence[HashRange] = ()) -> None:
        self.consumers[key] = Holder(key, name, priority)
        self._choose_active()

    def on_left(self, key: int) -> None:
        self.consumers.pop(key).left = True
        self._choose_active()

    def on_permits(self, key: int, messages: int) -> None:
        self.consumers[key].permits += messages
        self._on_change(self.consumers[key])

    def on_writable(self, key: int, writable: bool) -> None:
        self.consumers[key].writable = writable
        self._on_change(self.consumers[key])

    def plan(self, messages: Sequence[int], hashes: Sequence[int]) -> Plan:
        """Assign entries to consumers. Entry `i` holds `messages[i]` messages, and its key has `hashes[i]` (empty if not
        needed)."""
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

    def _choose_active(self) -> None:
        """Choose the active consumer, as in rule 4 of dispatch_failover.py."""
        best = min((consumer.priority for consumer in self.consumers.values()), default=0)
        candidates = [consumer for consumer in self.consumers.values() if consumer.priority == best]
        candidates.sort(key=lambda consumer: (consumer.name, consumer.key))
        self.active = candidates[self._partition_index % len(candidates)] if candidates else None

    def _choose(self, key_hash: int) -> Holder | None:
        return self.active

    def _on_change(self, consumer: Holder) -> None:
        """Note that the consumer may take entries again, or no longer."""

    def _on_served(self, consumer: Holder) -> None: ...


class NonPersistentShared(NonPersistentDispatch):
    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def on_joined(self, key: int, *, priority: int = 0, name: str = "", ranges: Sequence[HashRange] = ()) -> None:
        super().on_joined(key, priority=priority, name=name)
        self._turns.join(self.consumers[key])

    def on_left(self, key: int) -> None:
        self._turns.leave(self.consumers[key])
        super().on_left(key)

    def _choose(self, key_hash: int) -> Holder | None:
        return self._turns.now()

    def _choose_active(self) -> None:
        """Do nothing: all consumers are active."""

    def _on_change(self, consumer: Holder) -> None:
        self._turns.queue(consumer)

    def _on_served(self, consumer: Holder) -> None:
        self._turns.end(consumer)


class NonPersistentKeyShared(NonPersistentDispatch):
    """Dispatch by key. A key may move at any moment: no earlier entry of it waits here that the new owner could overtake."""

    by_key: ClassVar[bool] = True

    def __init__(self, owners: KeyOwners) -> None:
        super().__init__()
        self._owners = owners

    def on_joined(self, key: int, *, priority: int = 0, name: str = "", ranges: Sequence[HashRange] = ()) -> None:
        super().on_joined(key, priority=priority, name=name)
        self._owners.join(key, ranges or None)

    def on_left(self, key: int) -> None:
        super().on_left(key)
        self._owners.leave(key)

    def _choose(self, key_hash: int) -> Holder | None:
        owner = self._owners.owner(key_hash)
        return None if owner is None else self.consumers[owner]

    def _choose_active(self) -> None:
        """Do nothing: all consumers are active."""


def new_dispatch(kind: int, partition_index: int, sharing: KeySharing) -> NonPersistentDispatch:
    if kind == KEY_SHARED or sharing.sticky:  # an Exclusive reader of some keys is the only owner of any
        return NonPersistentKeyShared(sharing.new_owners())
    return NonPersistentDispatch(partition_index) if kind in (EXCLUSIVE, FAILOVER) else NonPersistentShared()
