"""Build this broker's load report from counters that topics keep anyway, summed up for each bundle on request.

tick ──► share of the processor in this window          report ──► open topics, a slice of them in each turn of the loop ──► bundles
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from cepheid_broker.balancing.loads import BrokerReport, BundleLoad
from cepheid_broker.errors import BrokerError
from cepheid_broker.ownership import Bundle, Division, Ownership, bundle_of, topic_hash
from cepheid_broker.topics import Topic
from cepheid_ports import Ports
from cepheid_ports.process_metrics import resident_bytes
from cepheid_wire import NamespaceName

_TOPICS_IN_ONE_GO = 500
"""Number of topics that take about 2 ms of the event loop."""


@dataclass(slots=True)
class _Sums:
    messages_in_per_s: float = 0.0
    bytes_in_per_s: float = 0.0
    messages_out_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    topics: int = 0
    producers: int = 0
    consumers: int = 0

    def add(self, topic: Topic) -> None:
        self.topics += 1
        self.producers += len(topic.producers)
        self.messages_in_per_s += topic.published.message_rate_per_s
        self.bytes_in_per_s += topic.published.byte_rate_per_s
        for subscription in topic.subscriptions.values():
            self.consumers += len(subscription.consumers)
            self.messages_out_per_s += subscription.delivered.message_rate_per_s
            self.bytes_out_per_s += subscription.delivered.byte_rate_per_s

    def load(self, bundle: str) -> BundleLoad:
        return BundleLoad(
            bundle,
            self.messages_in_per_s,
            self.bytes_in_per_s,
            self.messages_out_per_s,
            self.bytes_out_per_s,
            self.topics,
            self.producers,
            self.consumers,
        )


@dataclass(slots=True)
class _Window:
    at_s: float
    cpu_s: float


@dataclass(slots=True)
class OwnLoad:
    """The load of this broker. `loop_cpu_s` returns the processor time of the event loop's thread since its start."""

    ownership: Ownership
    loaded: Callable[[], Iterable[Topic]]
    division_of: Callable[[NamespaceName], Awaitable[Division]]
    ports: Ports
    loop_cpu_s: Callable[[], float] = time.thread_time
    cpu: float = 0.0
    """Share of a core in the last window."""
    _window: _Window | None = None
    _started_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def on_tick(self) -> None:
        """Measure the processor share. Call once in each rate window."""
        now = _Window(asyncio.get_running_loop().time(), self.loop_cpu_s())
        if (before := self._window) is not None and now.at_s > before.at_s:
            self.cpu = max(0.0, (now.cpu_s - before.cpu_s) / (now.at_s - before.at_s))
        self._window = now

    async def report(self) -> BrokerReport:
        """Return the load of this broker, with each bundle that it owns or has open topics of."""
        sums: dict[str, _Sums] = {str(bundle): _Sums() for bundle in self.ownership.owned_bundles() or ()}
        divisions: dict[NamespaceName, Division | None] = {}
        for number, topic in enumerate(self.loaded(), 1):
            namespace = topic.name.namespace
            if namespace not in divisions:
                divisions[namespace] = await self._division(namespace)
            division = divisions[namespace]
            if division is not None:
                sums.setdefault(str(bundle_of(topic.name, division)), _Sums()).add(topic)
            if number % _TOPICS_IN_ONE_GO == 0:
                await asyncio.sleep(0)
        now_ms, age_s = self.ports.wall_ms(), asyncio.get_running_loop().time() - self._started_s
        return BrokerReport(
            self.ownership.broker_id,
            tuple(found.load(name) for name, found in sorted(sums.items())),
            self.cpu,
            resident_bytes(),
            now_ms - int(1000 * age_s),  # computed, since the clock may have been set since the start
            now_ms,
        )

    def topic_loads(self, bundle: Bundle) -> dict[int, float]:
        """Return the loads of the open topics of a bundle, by the hash of their names."""
        found: dict[int, float] = {}
        for topic in self.loaded():
            if bundle.holds(topic.name):
                sums = _Sums()
                sums.add(topic)
                key = topic_hash(topic.name)
                found[key] = found.get(key, 0.0) + sums.load("").load
        return found

    def topic_hashes(self, bundle: Bundle) -> list[int]:
        """Return the hashes of the names of the bundle's open topics."""
        return [topic_hash(topic.name) for topic in self.loaded() if bundle.holds(topic.name)]

    async def _division(self, namespace: NamespaceName) -> Division | None:
        """Return the division, or None if it cannot be read now: the namespace's topics are then left out of this report."""
        try:
            return await self.division_of(namespace)
        except BrokerError:
            return None
