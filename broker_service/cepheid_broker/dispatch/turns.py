"""Whose turn it is among the consumers of a Shared subscription: by priority, equal ones in rotation.

Only consumers that can take messages are queued. One that no longer can is dropped when its turn comes, and queued again by the
event that lets it: choosing costs the same for two consumers and for two thousand.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from cepheid_broker.dispatch.holders import Holder


class Turns:
    def __init__(self) -> None:
        self._queues: dict[int, deque[Holder]] = {}  # in rising priority number
        self._consumers: Counter[int] = Counter()  # by priority, whether queued or not

    def __repr__(self) -> str:
        return f"<Turns { ({priority: len(queue) for priority, queue in self._queues.items()}) }>"

    def join(self, consumer: Holder) -> None:
        self._consumers[consumer.priority] += 1
        if consumer.priority not in self._queues:
            self._queues = dict(sorted([*self._queues.items(), (consumer.priority, deque())]))

    def leave(self, consumer: Holder) -> None:
        """Remove the consumer with all its state: clients choose priorities, so an empty queue would leak."""
        if consumer.queued:
            self._queues[consumer.priority].remove(consumer)
            consumer.queued = False
        self._consumers[consumer.priority] -= 1
        if not self._consumers[consumer.priority]:
            del self._queues[consumer.priority], self._consumers[consumer.priority]

    def queue(self, consumer: Holder) -> None:
        """Queue the consumer if it can take messages now."""
        if consumer.can_take and not consumer.queued:
            consumer.queued = True
            self._queues[consumer.priority].append(consumer)

    def now(self) -> Holder | None:
        for queue in self._queues.values():
            while queue:
                if queue[0].can_take:
                    return queue[0]
                queue.popleft().queued = False
        return None

    def is_alone(self, consumer: Holder) -> bool:
        """Return whether no other consumer of its priority is queued."""
        return len(self._queues[consumer.priority]) == 1

    def end(self, consumer: Holder) -> None:
        """End the consumer's turn after it was served."""
        queue = self._queues[consumer.priority]
        if queue and queue[0] is consumer:
            queue.rotate(-1)

    def restart(self, consumers: Iterable[Holder]) -> None:
        """Queue all consumers from the beginning."""
        for queue in self._queues.values():
            queue.clear()
        for consumer in consumers:
            consumer.queued = False
            self.queue(consumer)
