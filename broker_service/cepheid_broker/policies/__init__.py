"""The policies in force for a topic, resolved from its records and its namespace's. README.md has the rules."""

from cepheid_broker.policies.policy_conflicts import CONCERNED, contradiction
from cepheid_broker.policies.policy_follower import PolicyFollower
from cepheid_broker.policies.policy_resolution import broker_policies, ledger_config, resolve
from cepheid_broker.policies.topic_policies import BacklogQuota, InactiveDeletion, QuotaAction, SchemaCompatibility, TopicPolicies

__all__ = [
    "CONCERNED",
    "BacklogQuota",
    "InactiveDeletion",
    "PolicyFollower",
    "QuotaAction",
    "SchemaCompatibility",
    "TopicPolicies",
    "broker_policies",
    "contradiction",
    "ledger_config",
    "resolve",
]
