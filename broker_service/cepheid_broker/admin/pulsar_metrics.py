"""Metrics under the names that Pulsar dashboards query, and the broker's own metrics of backlogs.

Labels are bounded: one series per namespace for the first `MAX_NAMESPACES` of them, and per subscription only for the
`MAX_SUBSCRIPTIONS` with the largest backlogs. Others are counted in `…_left_out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING

from cepheid_broker.topics import PersistentTopic
from cepheid_ports.prometheus import Family, Sample, counter, gauge

if TYPE_CHECKING:
    from cepheid_broker.broker import Broker
    from cepheid_broker.topics import Topic

MAX_NAMESPACES = 1_000
MAX_SUBSCRIPTIONS = 200


@dataclass(slots=True)
class _Sums:
    """Sums over the open topics of one namespace."""

    topics: int = 0
    subscriptions: int = 0
    producers: int = 0
    consumers: int = 0
    rate_in: float = 0.0
    rate_out: float = 0.0
    throughput_in: float = 0.0
    throughput_out: float = 0.0
    storage_bytes: int = 0
    backlog_bytes: int = 0
    backlog_entries: int = 0
    expire_rate: float = 0.0

    def add(self, topic: Topic) -> None:
        subscriptions = topic.subscriptions.values()
        self.topics += 1
        self.subscriptions += len(subscriptions)
        self.producers += len(topic.producers)
        self.consumers += sum(len(subscription.consumers) for subscription in subscriptions)
        self.rate_in += topic.published.message_rate_per_s
        self.throughput_in += topic.published.byte_rate_per_s
        self.rate_out += sum(subscription.delivered.message_rate_per_s for subscription in subscriptions)
        self.throughput_out += sum(subscription.delivered.byte_rate_per_s for subscription in subscriptions)
        self.expire_rate += sum(subscription.expire_rate_per_s for subscription in subscriptions)
        if isinstance(topic, PersistentTopic):
            self._add_stored(topic)

    def _add_stored(self, topic: PersistentTopic) -> None:
        ledgers = topic.ledger.ledgers
        self.storage_bytes += ledgers.total_bytes
        cursors = [subscription.cursor for subscription in topic.subscriptions.values() if subscription.durable]
        self.backlog_entries += sum(cursor.backlog_entries for cursor in cursors)
        if cursors:
            slowest = min((cursor.mark_delete for cursor in cursors), key=ledgers.rank)
            known = topic.ledger.counts.bytes_after_known(slowest)
            self.backlog_bytes += sum(size for _, _, size in ledgers.from_ledger(slowest.ledger_id)) if known is None else known


_BY_NAMESPACE = (
    ("pulsar_topics_count", "topics", "Open topics."),
    ("pulsar_subscriptions_count", "subscriptions", "Subscriptions of open topics."),
    ("pulsar_producers_count", "producers", "Connected producers."),
    ("pulsar_consumers_count", "consumers", "Connected consumers."),
    ("pulsar_rate_in", "rate_in", "Messages published per second."),
    ("pulsar_rate_out", "rate_out", "Messages delivered per second."),
    ("pulsar_throughput_in", "throughput_in", "Bytes published per second."),
    ("pulsar_throughput_out", "throughput_out", "Bytes delivered per second."),
    ("pulsar_storage_size", "storage_bytes", "Bytes stored."),
    (
        "pulsar_storage_backlog_size",
        "backlog_bytes",
        "Bytes kept for each topic's slowest subscription.",
    ),
    ("pulsar_msg_backlog", "backlog_entries", "Unacknowledged entries, summed over subscriptions."),
    ("pulsar_subscription_msg_rate_expired", "expire_rate", "Entries per second given up by age or quota."),
)


def pulsar_families(broker: Broker) -> Iterator[Family]:
    topics = list(broker.topics.loaded())
    by_namespace: dict[str, _Sums] = {}
    left_out = 0
    for topic in topics:
        namespace = str(topic.name.namespace)
        if namespace not in by_namespace and len(by_namespace) >= MAX_NAMESPACES:
            left_out += 1
        else:
            by_namespace.setdefault(namespace, _Sums()).add(topic)
    cluster = broker.cluster
    for name, field, text in _BY_NAMESPACE:
        found = by_namespace.items()
        samples = [Sample(getattr(sums, field), {"cluster": cluster, "namespace": namespace}) for namespace, sums in found]
        yield Family(name, "gauge", text, samples)
    yield gauge("cepheid_broker_metrics_topics_left_out", "Topics of namespaces without series of their own.", left_out)
    yield from _largest_backlogs(cluster, topics)


def _largest_backlogs(cluster: str, topics: Iterable[Topic]) -> Iterator[Family]:
    backlogs = [
        (entries, str(topic.name), subscription.name)
        for topic in topics
        if isinstance(topic, PersistentTopic)
        for subscription in topic.subscriptions.values()
        if subscription.durable and (entries := subscription.cursor.backlog_entries)
    ]
    shown = nlargest(MAX_SUBSCRIPTIONS, backlogs)
    samples = [Sample(entries, {"cluster": cluster, "topic": topic, "subscription": name}) for entries, topic, name in shown]
    yield Family("pulsar_subscription_back_log", "gauge", "Unacknowledged entries of the largest backlogs.", samples)
    text = "Subscriptions with a backlog but no series of their own."
    yield gauge("cepheid_broker_metrics_subscriptions_left_out", text, len(backlogs) - len(shown))


def backlog_families(broker: Broker) -> Iterator[Family]:
    checks, counts = broker.backlog_checks, broker.managed_ledgers.counts
    yield counter("cepheid_broker_expired_entries_total", "Entries that expired by their time to live.", checks.expired_entries)
    yield counter("cepheid_broker_evicted_entries_total", "Entries skipped because of a backlog quota.", checks.evicted_entries)
    yield counter("cepheid_broker_backlog_check_failures_total", "Checks of a topic's backlog that failed.", checks.failures)
    blocked = sum(topic.publish_blocked is not None for topic in broker.topics.loaded())
    yield gauge("cepheid_broker_topics_above_quota", "Topics that accept no messages as their backlog is above quota.", blocked)
    lacking = sum(topic.lacking is not None for topic in broker.managed_ledgers.opened.values())
    text = "Topics that accept no messages as too few bookies are writable for a ledger."
    yield gauge("cepheid_broker_topics_without_open_ledger", text, lacking)
    near = sum(topic.near_limit is not None for topic in broker.managed_ledgers.opened.values())
    yield gauge("cepheid_broker_topics_near_limit", "Topics near a limit of their metadata, such as 100,000 ledgers.", near)
    yield gauge("cepheid_broker_entry_counts_bytes", "Memory for sizes and message counts of entries.", counts.used_bytes)
