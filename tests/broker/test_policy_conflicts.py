"""Retention against backlog quotas: what goes together and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.policies.policy_conflicts import contradiction
from cepheid_broker.policies.topic_policies import BacklogQuota, QuotaAction, TopicPolicies
from cepheid_managed_ledger import Retention


def quota(limit: int | None) -> BacklogQuota | None:
    return None if limit is None else BacklogQuota(limit, QuotaAction.HOLD)


@pytest.mark.parametrize(
    ("kept_bytes", "quota_bytes", "together"),
    [
        (100, 99, True),
        (100, 100, False),
        (100, 101, False),
        (100, None, True),  # no quota
        (-1, 1 << 60, True),  # everything is kept
        (0, 100, True),  # nothing is kept
    ],
)
def test_sizes(kept_bytes: int, quota_bytes: int | None, together: bool) -> None:
    found = contradiction(TopicPolicies(retention=Retention(-1, kept_bytes), size_quota=quota(quota_bytes)))
    assert (found is None) == together, found


@pytest.mark.parametrize(("kept_s", "quota_s", "together"), [(60, 59, True), (60, 60, False), (-1, 60, True), (0, 60, True)])
def test_ages(kept_s: int, quota_s: int, together: bool) -> None:
    retention = Retention(kept_s if kept_s < 0 else kept_s * 1000, -1)
    found = contradiction(TopicPolicies(retention=retention, age_quota=quota(quota_s)))
    assert (found is None) == together, found


LIMITS = st.none() | st.integers(0, 2**62)


@given(st.integers(-1, 2**62), st.integers(-1, 2**62), LIMITS, LIMITS)
def test_more_retention_and_less_quota_never_bring_a_contradiction(
    time_ms: int, size_bytes: int, size: int | None, age: int | None
) -> None:
    policies = TopicPolicies(retention=Retention(time_ms, size_bytes), size_quota=quota(size), age_quota=quota(age))
    if contradiction(policies) is None:
        less = TopicPolicies(
            retention=Retention(time_ms and -1, size_bytes and -1),
            size_quota=quota(size and size // 2),
            age_quota=quota(age and age // 2),
        )
        assert contradiction(less) is None
