"""Contradicting policies, refused when they are set, as one of them would have no effect.

A backlog is too large only if it is larger than what retention keeps anyway; otherwise acknowledged data alone could fill it
(docs/reference/behaviours.md §7). Retention without limit, and no retention, are compatible with every quota.
"""

from __future__ import annotations

from cepheid_broker.policies.topic_policies import TopicPolicies

CONCERNED = frozenset({"retention", "size_quota", "age_quota"})
"""Record fields whose change can cause a contradiction."""


def contradiction(policies: TopicPolicies) -> str | None:
    """Return the contradiction in words, with both numbers; None if there is none."""
    kept_bytes, kept_s = policies.retention.size_bytes, policies.retention.time_ms // 1000
    size, age = policies.size_quota, policies.age_quota
    if size is not None and 0 < kept_bytes <= size.limit:
        return f"retention keeps {kept_bytes} bytes and the backlog quota is {size.limit}: retention must be larger"
    if age is not None and 0 < kept_s <= age.limit:
        return f"retention keeps {kept_s} s and the backlog quota is {age.limit} s: retention must be larger"
    return None
