"""Statistics of a partitioned topic, combined from its partitions (docs/reference/shapes.md §4, PartitionedTopicStats).

Most numbers are added; averages, limits, times and ages are not: see the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def summed_stats(parts: Mapping[str, dict[str, Any]], metadata: dict[str, Any], *, per_partition: bool) -> dict[str, Any]:
    """Return the sums; publishers are merged by their place in the lists, subscriptions by name."""
    subscriptions: dict[str, list[dict[str, Any]]] = {}
    for part in parts.values():
        for name, subscription in part["subscriptions"].items():
            subscriptions.setdefault(name, []).append(subscription)
    publishers: list[list[dict[str, Any]]] = []
    for part in parts.values():
        for place, publisher in enumerate(part["publishers"]):
            if place == len(publishers):
                publishers.append([])
            publishers[place].append(publisher)
    return {
        **_oldest(list(parts.values())),
        "publishers": [_sum(group) for group in publishers],
        "subscriptions": {name: _sum(group) for name, group in subscriptions.items()},
        "metadata": metadata,
        "partitions": dict(parts) if per_partition else {},
    }


def _oldest(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = _sum(parts)
    total.pop("oldestBacklogMessageSubscriptionName", None)
    oldest = max(parts, key=lambda part: float(part["oldestBacklogMessageAgeSeconds"]), default={})
    if "oldestBacklogMessageSubscriptionName" in oldest:
        total["oldestBacklogMessageSubscriptionName"] = oldest["oldestBacklogMessageSubscriptionName"]
    return total


def _earliest(values: Sequence[Any]) -> Any:
    return min((value for value in values if value), default=0)  # 0: none, or not requested


def _average(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "averageMsgSize": _average,
    "avgMessagesPerEntry": _first,
    "producerId": _first,
    "topicCreationTimeStamp": _first,
    "lastOffloadLedgerId": _first,
    "topicEpoch": max,
    "backlogQuotaLimitSize": _first,  # of each partition; -1 is no limit
    "backlogQuotaLimitTime": _first,
    "oldestBacklogMessageAgeSeconds": max,
    "backlogAgeSeconds": max,
    "earliestMsgPublishTimeInBacklogs": _earliest,
    "earliestMsgPublishTimeInBacklog": _earliest,
    "blockedSubscriptionOnUnackedMsgs": any,
    "blockedConsumerOnUnackedMsgs": any,
    "msgChunkPublished": any,
    "backlogExact": all,
}
_ONLY_WHEN_ALL_KNOW = ("backlogMessages",)


def _sum(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    parts = list(stats)
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        first = values[0]
        if name in _ONLY_WHEN_ALL_KNOW and len(values) < len(parts):
            continue
        if name in _RULES:
            total[name] = _RULES[name](values)
        elif name.endswith(("Timestamp", "TimeStamp")):
            total[name] = max(values)
        elif isinstance(first, bool) or not isinstance(first, int | float | list):
            total[name] = first
        elif isinstance(first, list):
            total[name] = [item for value in values for item in value]
        else:
            total[name] = sum(values)
    return total
