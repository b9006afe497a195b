"""Calls of Pulsar's API that are not served, with reasons: for the 501 that a caller gets, and for docs/admin.md.

The first match counts. A call that is neither served nor listed gets the reason at the end.
"""

from __future__ import annotations

import re

_TOPIC = r"/admin/v2/(non-)?persistent/[^/]+/[^/]+/[^/]+"
_NAMESPACE = r"/admin/v2/namespaces/[^/]+/[^/]+"
_NO_CLUSTERS = "there is one cluster: no replication"
_NO_RATES = "rates are not limited yet"
_NO_SCAN = "`cepheid tiered verify` and `cepheid tiered sweep` compare an object store with the topics"
_NO_FUNCTIONS = "functions, connectors and packages do not exist"

_REASONS: tuple[tuple[str, str], ...] = (
    (rf"({_TOPIC}|{_NAMESPACE})/(compaction|compactionThreshold)", "compaction does not exist yet"),
    (rf"({_TOPIC}|{_NAMESPACE})/(replication|replicateSubscriptionState|allowedClusters|shadowTopics)", _NO_CLUSTERS),
    (rf"{_TOPIC}/subscription/[^/]+/replicatedSubscriptionStatus", _NO_CLUSTERS),
    (rf"({_TOPIC}|{_NAMESPACE})/(\w*[dD]ispatchRate|publishRate|subscribeRate)", _NO_RATES),
    (rf"{_TOPIC}/[^/]+/dispatchRate", _NO_RATES),
    (rf"({_TOPIC}|{_NAMESPACE})/(entryFilters|resourceGroup|resourcegroup)(/.*)?", "filters and resource groups do not exist"),
    (rf"({_TOPIC}|{_NAMESPACE})/(sub\w*ExpirationTime)", "subscriptions do not expire yet"),
    (rf"{_NAMESPACE}/(properties|property/.*)", "properties of a namespace are set when it is created"),
    (rf"{_NAMESPACE}/schemaAutoUpdateCompatibilityStrategy", "the older word for schemaCompatibilityStrategy"),
    (rf"{_NAMESPACE}/scanOffloadedLedgers", _NO_SCAN),
    (r"/admin/v2/schemas/.*/metadata", "schemas and their versions contain all metadata"),
    (r"/admin/v2/non-persistent/[^/]+/[^/]+/[^/]+", "lists take the bundle as a parameter: ?bundle="),
    (r"/admin/v2/non-persistent/[^/]+/[^/]+/[^/]+/truncate", "nothing is stored: there is nothing to drop"),
    (rf"{_TOPIC}/getMessageIdByIndex", "entries have no broker metadata, so no index"),
    (rf"{_TOPIC}/backlog", "the statistics of a topic open it; there is no offline estimate"),
    (r"/admin/v2/namespaces/.*(antiAffinity|bookieAffinity).*", "bundles and bookies have no groups yet"),
    (r"/admin/v2/bookies/racks-info/.*", "a rack is a setting of the bookie itself: start it with --rack"),
    (r"/admin/v2/clusters/[^/]+/(migrate|peers|failureDomains).*", _NO_CLUSTERS),
    (r"/admin/v2/brokers/shutdown", "a process is stopped by a signal"),
    (rf"{_NAMESPACE}/allowedTopicPropertyKeysForMetrics", "properties of topics are not labels of metrics"),
    (rf"({_TOPIC}|{_NAMESPACE})/dispatcherPauseOnAckStatePersistent", "dispatch never waits until acknowledgements are saved"),
    (r"/admin/v2/broker-stats/.*", "the figures are in /metrics and in the statistics of topics"),
    (r"/admin/v2/(resourcegroups|resource-quotas).*", "resource groups and quotas do not exist"),
    (r"/admin/v3/transactions/.*", "transactions do not exist"),
    (r"/admin/v3/.*", _NO_FUNCTIONS),
    (r"/lookup/v2/destination/.*", "names with a cluster in them are older than this API"),
    (r"/topics/.*", "messages are published and consumed over the binary protocol"),
)  # fmt: skip

_COMPILED = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS)

_STORED_ONLY: tuple[tuple[str, int, str], ...] = (
    (r"/terminate(/partitions)?", 406, "it has no end"),
    (r"/properties", 406, "it has no properties"),
    (r"/truncate", 412, "there is nothing to drop"),
    (r"/subscription/[^/]+", 400, "a subscription lasts while it is used"),
)
"""Pulsar's answers for a non-persistent topic that are not 405 (docs/reference/behaviours.md §5)."""


def unserved(path: str) -> str | None:
    """Return why a path is not served; None if no reason is known: it is not a call of Pulsar's API, or is served."""
    return next((reason for pattern, reason in _COMPILED if pattern.fullmatch(path)), None)


def non_persistent_refusal(path_below_topic: str) -> tuple[int, str]:
    """Return status and reason for a call on a non-persistent topic that needs stored entries."""
    for pattern, status, reason in _STORED_ONLY:
        if re.fullmatch(pattern, path_below_topic):
            return status, reason
    return 405, "nothing is stored"
