"""Records of load balancing: the leader, isolation policies, and settings that were changed while brokers run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeInt

from cepheid_metadata.record import Record, RecordPart


class LeaderRecord(Record):
    """Ephemeral: the broker that balances the load of the cluster."""

    NAME: ClassVar[str] = "leader"

    broker_id: str = Field(min_length=1)
    since_ms: NonNegativeInt


class IsolationPolicy(RecordPart):
    """The brokers that serve some namespaces. All expressions are of RE2 and must match the whole name."""

    namespaces: tuple[str, ...] = Field(min_length=1, description="Expressions for names like tenant/namespace.")
    primary: tuple[str, ...] = Field(min_length=1, description="Expressions for the brokers that serve them.")
    secondary: tuple[str, ...] = Field((), description="Expressions for brokers that serve them if too few primary ones run.")
    min_limit: NonNegativeInt = Field(1, description="Number of primary brokers below which secondary ones are used as well.")
    usage_threshold: int = Field(100, ge=0, le=100, description="Load in percent from which a primary broker is unavailable.")


class IsolationPolicies(Record):
    """All isolation policies of the cluster, by name."""

    NAME: ClassVar[str] = "isolation policies"

    policies: dict[str, IsolationPolicy] = Field(default_factory=dict)


class DynamicSettings(Record):
    """Settings of brokers that were changed while they run, by name. They override files, environment and flags of all brokers."""

    NAME: ClassVar[str] = "dynamic settings"

    values: dict[str, str] = Field(default_factory=dict)
