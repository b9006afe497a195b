"""Policies that contradict each other: told when they are set, since in force one of them would be void.

A backlog counts as too much only when it is larger than what retention keeps anyway; else acknowledged data alone could fill it
(docs/reference/behaviours.md §7). Retention without limit, and none at all, go with every quota.
"""

from __future__ import annotations

from cepheid_broker.policies.topic_policies import TopicPolicies

CONCERNED = frozenset({"retention", "size_quota", "age_quota"})
"""Fields of records whose change can bring a contradiction."""


def contradiction(policies: TopicPolicies) -> str | None:
    """In words, with both numbers; None: they go together."""
    kept_bytes, kept_s = policies.retention.size_bytes, policies.retention.time_ms // 1000
    size, age = policies.size_quota, policies.age_quota
    if size is not None and 0 < kept_bytes <= size.limit:
        return f"retention keeps {kept_bytes} bytes and the backlog quota is {size.limit}: retention must be larger"
    if age is not None and 0 < kept_s <= age.limit:
        return f"retention keeps {kept_s} s and the backlog quota is {age.limit} s: retention must be larger"
    return None
