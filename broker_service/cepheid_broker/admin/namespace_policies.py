"""A namespace's policies: the wire's mixture of names on one side, our record on the other.

What a body asks for and the record cannot keep is refused (501): silence would be a wrong success. What it says that holds anyway,
as the defaults that clients fill in, is taken.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cepheid_broker.admin.bundles import boundaries, bundles_data
from cepheid_broker.admin.errors import BadRequestError, NotServedError, PreconditionError
from cepheid_metadata import AutoTopicCreation, NamespaceRecord, PersistencePolicy, RetentionPolicy

MAX_BUNDLES = 128  # Pulsar's limit for splits (docs/reference/behaviours.md §15)
DEFAULT_BUNDLES = 4

_NOT_SET: dict[str, Any] = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "backlog_quota_map": {},
    "topicDispatchRate": {},
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterDispatchRate": {},
    "clusterSubscribeRate": {},
    "publishMaxMessageRate": {},
    "latency_stats_sample_rate": {},
    "encryption_required": False,
    "subscription_auth_mode": "None",
    "offload_threshold": -1,
    "offload_threshold_in_seconds": -1,
    "schema_compatibility_strategy": "UNDEFINED",
    "schema_validation_enforced": False,
    "subscription_types_enabled": [],
}
"""What every namespace answers for policies that are not set (docs/reference/shapes.md §2)."""

_DEFAULTS_OF_CLIENTS: dict[str, Any] = {
    "schema_compatibility_strategy": "FULL",
    "schema_auto_update_compatibility_strategy": "Full",
    "is_allow_auto_update_schema": True,
}
"""What Go's client fills in besides: the broker's own defaults."""


class _Bundles(BaseModel):
    boundaries: list[str] | None = None
    numBundles: int | None = None


class _Retention(BaseModel):
    retentionTimeInMinutes: int = Field(0, ge=-1)
    retentionSizeInMB: int = Field(0, ge=-1)


class _Persistence(BaseModel):
    bookkeeperEnsemble: int = Field(2, ge=1)
    bookkeeperWriteQuorum: int = Field(2, ge=1)
    bookkeeperAckQuorum: int = Field(2, ge=1)
    managedLedgerMaxMarkDeleteRate: float = Field(0.0, ge=0)


class _TopicCreation(BaseModel):
    allowAutoTopicCreation: bool
    topicType: str | None = None
    defaultNumPartitions: int | None = None


class NamespaceBody(BaseModel):
    """Pulsar's `Policies` as far as it is kept; the rest must say what holds anyway."""

    model_config = ConfigDict(extra="allow")

    bundles: _Bundles | None = None
    replication_clusters: list[str] | None = None
    retention_policies: _Retention | None = None
    persistence: _Persistence | None = None
    autoTopicCreationOverride: _TopicCreation | None = None
    properties: dict[str, str] | None = None
    deleted: bool = False


def new_namespace(body: NamespaceBody, cluster: str) -> NamespaceRecord:
    """With defaults where the body says nothing. Raises BadRequestError, PreconditionError, NotServedError."""
    unserved = sorted(name for name, value in (body.model_extra or {}).items() if not _holds_anyway(name, value))
    if unserved:
        raise NotServedError(f"Policies not served yet: {', '.join(unserved)[:500]}")
    return NamespaceRecord(
        bundles=_bundle_count(body.bundles or _Bundles()),
        replication_clusters=tuple(body.replication_clusters or (cluster,)),
        retention=None if body.retention_policies is None else _retention(body.retention_policies),
        persistence=None if body.persistence is None else _persistence(body.persistence),
        auto_topic_creation=None if body.autoTopicCreationOverride is None else _topic_creation(body.autoTopicCreationOverride),
        properties=body.properties or {},
    )


def policies_of(record: NamespaceRecord) -> dict[str, Any]:
    """The whole-namespace object. What is not set and has no value of its own is left out."""
    policies: dict[str, Any] = {
        **_NOT_SET,
        "replication_clusters": list(record.replication_clusters),
        "bundles": bundles_data(record.bundles),
        "deleted": record.deleted,
        "properties": record.properties,
    }
    if (retention := record.retention) is not None:
        policies["retention_policies"] = {
            "retentionTimeInMinutes": retention.time_limit_min,
            "retentionSizeInMB": retention.size_limit_mb,
        }
    if (persistence := record.persistence) is not None:
        policies["persistence"] = {
            "bookkeeperEnsemble": persistence.ensemble_size,
            "bookkeeperWriteQuorum": persistence.write_quorum,
            "bookkeeperAckQuorum": persistence.ack_quorum,
            "managedLedgerMaxMarkDeleteRate": persistence.max_mark_delete_rate_per_s,
        }
    if (creation := record.auto_topic_creation) is not None:
        override: dict[str, Any] = {"allowAutoTopicCreation": creation.allowed, "topicType": creation.topic_type}
        if creation.partitions is not None:
            override["defaultNumPartitions"] = creation.partitions
        policies["autoTopicCreationOverride"] = override
    return policies


def _holds_anyway(name: str, value: Any) -> bool:
    return _is_empty(value) or value == _NOT_SET.get(name) or value == _DEFAULTS_OF_CLIENTS.get(name)


def _is_empty(value: Any) -> bool:
    """Null, 0, false, "", and collections of nothing but such."""
    return not value or (isinstance(value, dict) and all(map(_is_empty, value.values())))


def _bundle_count(bundles: _Bundles) -> int:
    """Only even splits, given as a count or as their boundaries."""
    ends = bundles.boundaries
    count = len(ends) - 1 if ends else (bundles.numBundles or DEFAULT_BUNDLES)
    if not 1 <= count <= MAX_BUNDLES:
        raise BadRequestError(f"{count} bundles: 1 to {MAX_BUNDLES} are possible")
    if ends and ends != boundaries(count):
        raise BadRequestError(f"Bundles must cover 0x00000000 to 0xffffffff in even steps: {', '.join(boundaries(count))}")
    return count


def _retention(limits: _Retention) -> RetentionPolicy:
    time_min, size_mb = limits.retentionTimeInMinutes, limits.retentionSizeInMB
    if (time_min == 0) != (size_mb == 0):
        raise BadRequestError("Retention needs both limits, or 0 for both; -1 means no limit")
    return RetentionPolicy(time_limit_min=time_min, size_limit_mb=size_mb)


def _persistence(wanted: _Persistence) -> PersistencePolicy:
    sizes = wanted.bookkeeperEnsemble, wanted.bookkeeperWriteQuorum, wanted.bookkeeperAckQuorum
    if not sizes[0] >= sizes[1] >= sizes[2]:
        raise BadRequestError(f"Ensemble {sizes[0]} >= write quorum {sizes[1]} >= ack quorum {sizes[2]} does not hold")
    if sizes[0] != sizes[1]:
        raise NotServedError(f"Striping (ensemble {sizes[0]} above write quorum {sizes[1]}) is not served yet")
    return PersistencePolicy(
        ensemble_size=sizes[0],
        write_quorum=sizes[1],
        ack_quorum=sizes[2],
        max_mark_delete_rate_per_s=wanted.managedLedgerMaxMarkDeleteRate,
    )


def _topic_creation(wanted: _TopicCreation) -> AutoTopicCreation:
    try:
        return AutoTopicCreation.model_validate(
            {
                "allowed": wanted.allowAutoTopicCreation,
                "topic_type": wanted.topicType or "non-partitioned",
                "partitions": wanted.defaultNumPartitions or None,
            }
        )
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise PreconditionError(f"Invalid configuration for autoTopicCreationOverride: {reason}") from None
