"""Values of policies in the format of the admin API (docs/reference/shapes.md §3), converted to and from records.

    body ──decode──► value of a record             value of a record ──encode──► JSON
                                                   TopicPolicies ──in force──► JSON          (`applied=true`)
A value that no record can hold is refused here: 400 if its format is wrong, 412 if its value is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from cepheid_broker.admin.errors import BadRequestError, NotServedError, PreconditionError
from cepheid_broker.policies import BacklogQuota, TopicPolicies
from cepheid_metadata import (
    AutoTopicCreation,
    DelayedDeliveryPolicy,
    InactiveTopicsPolicy,
    PersistencePolicy,
    QuotaPolicy,
    RetentionPolicy,
)

INT_MAX = 2**31 - 1
Int = Annotated[int, Field(ge=-(2**31), le=INT_MAX)]
Long = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

SUBSCRIPTION_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")
DEFAULT_STORAGE_CLASS = "bookkeeper"
DEFAULT_INACTIVE_S = 60

T = TypeVar("T", int, float)


class RetentionBody(BaseModel):
    retentionTimeInMinutes: int = Field(0, ge=-1, le=INT_MAX)
    retentionSizeInMB: int = Field(0, ge=-1, le=2**43 - 1)  # in bytes still a signed 64-bit number


class PersistenceBody(BaseModel):
    bookkeeperEnsemble: int = Field(2, ge=1, le=INT_MAX)
    bookkeeperWriteQuorum: int = Field(2, ge=1, le=INT_MAX)
    bookkeeperAckQuorum: int = Field(2, ge=1, le=INT_MAX)
    managedLedgerMaxMarkDeleteRate: float = Field(0.0, ge=0, allow_inf_nan=False)
    managedLedgerStorageClassName: str | None = None


class BacklogQuotaBody(BaseModel):
    limit: Long | None = Field(None, description="Older name of limitSize.")
    limitSize: Long | None = Field(None, description="Bytes. -1: no limit.")
    limitTime: Int | None = Field(None, description="Seconds. -1: no limit.")
    policy: Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"]


class TopicCreationBody(BaseModel):
    allowAutoTopicCreation: bool
    topicType: str | None = None
    defaultNumPartitions: Int | None = None


class SubscriptionCreationBody(BaseModel):
    allowAutoSubscriptionCreation: bool


class DelayedDeliveryBody(BaseModel):
    active: bool
    tickTime: float | None = Field(None, allow_inf_nan=False, description="Milliseconds; Go's client sends a fraction.")
    maxDeliveryDelayInMillis: Long | None = None
    maxDelayInMillis: Long | None = Field(None, description="Name of maxDeliveryDelayInMillis in Go's client.")


class InactiveTopicsBody(BaseModel):
    deleteWhileInactive: bool
    inactiveTopicDeleteMode: Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"] = (
        "delete_when_no_subscriptions"
    )
    maxInactiveDurationSeconds: Int = DEFAULT_INACTIVE_S


def number(value: T, *, least: int = 0, most: float = float("inf")) -> T:
    if not least <= value <= most:
        raise PreconditionError(f"{value} is out of bounds: " + (f"at least {least}" if value < least else f"at most {most}"))
    return value


def positive(value: int) -> int:
    return number(value, least=1)


def retention(body: RetentionBody) -> RetentionPolicy:
    time_min, size_mb = body.retentionTimeInMinutes, body.retentionSizeInMB
    if (time_min == 0) != (size_mb == 0):
        raise BadRequestError("Retention needs both limits, or 0 for both; -1 means no limit")
    return RetentionPolicy(time_limit_min=time_min, size_limit_mb=size_mb)


def retention_json(policy: RetentionPolicy) -> dict[str, Any]:
    return {"retentionTimeInMinutes": policy.time_limit_min, "retentionSizeInMB": policy.size_limit_mb}


def retention_in_force(policies: TopicPolicies) -> dict[str, Any]:
    time_ms, size_bytes = policies.retention.time_ms, policies.retention.size_bytes
    return {
        "retentionTimeInMinutes": time_ms if time_ms < 0 else time_ms // 60_000,
        "retentionSizeInMB": size_bytes if size_bytes < 0 else size_bytes >> 20,
    }


def persistence(body: PersistenceBody) -> PersistencePolicy:
    sizes = body.bookkeeperEnsemble, body.bookkeeperWriteQuorum, body.bookkeeperAckQuorum
    if not sizes[0] >= sizes[1] >= sizes[2]:
        raise BadRequestError(f"Ensemble {sizes[0]} >= write quorum {sizes[1]} >= ack quorum {sizes[2]} does not hold")
    if body.managedLedgerStorageClassName not in (None, "", DEFAULT_STORAGE_CLASS):
        raise NotServedError(f"There is one storage class here, {DEFAULT_STORAGE_CLASS!r}")
    return PersistencePolicy(
        ensemble_size=sizes[0],
        write_quorum=sizes[1],
        ack_quorum=sizes[2],
        max_mark_delete_rate_per_s=body.managedLedgerMaxMarkDeleteRate,
    )


def persistence_json(policy: PersistencePolicy | TopicPolicies) -> dict[str, Any]:
    return {
        "bookkeeperEnsemble": policy.ensemble_size,
        "bookkeeperWriteQuorum": policy.write_quorum,
        "bookkeeperAckQuorum": policy.ack_quorum,
        "managedLedgerMaxMarkDeleteRate": getattr(policy, "max_mark_delete_rate_per_s", 0.0),
    }


def quota(body: BacklogQuotaBody, *, of_age: bool) -> tuple[QuotaPolicy, int]:
    """Return the quota from the limit of the call's type, and the other limit, which is only shown.

    Clients send both.
    """
    size = body.limitSize if body.limitSize is not None else body.limit
    limit, other = (body.limitTime, size) if of_age else (size, body.limitTime)
    if limit is None:
        raise PreconditionError(f"The quota needs {'limitTime' if of_age else 'limitSize'}")
    return QuotaPolicy(limit=number(limit, least=-1), action=body.policy), -1 if other is None else number(other, least=-1)


def quota_json(policy: QuotaPolicy, *, of_age: bool, other: int | None = None) -> dict[str, Any]:
    """Return the JSON of a quota. `other`: the limit of the other type that was set with it."""
    unused = -1 if other is None else other
    size, time_s = (unused, policy.limit) if of_age else (policy.limit, unused)
    return {"limit": size, "limitSize": size, "limitTime": time_s, "policy": policy.action}


def quota_in_force(found: BacklogQuota | None, *, of_age: bool) -> dict[str, Any]:
    limit, action = (-1, "producer_request_hold") if found is None else (found.limit, found.action.value)
    return quota_json(QuotaPolicy.model_validate({"limit": limit, "action": action}), of_age=of_age)


def topic_creation(body: TopicCreationBody) -> AutoTopicCreation:
    try:
        return AutoTopicCreation.model_validate(
            {
                "allowed": body.allowAutoTopicCreation,
                "topic_type": body.topicType or "non-partitioned",
                "partitions": body.defaultNumPartitions or None,
            }
        )
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise PreconditionError(f"Invalid configuration for autoTopicCreationOverride: {reason}") from None


def topic_creation_json(creation: AutoTopicCreation) -> dict[str, Any]:
    override: dict[str, Any] = {"allowAutoTopicCreation": creation.allowed, "topicType": creation.topic_type}
    if creation.partitions is not None:
        override["defaultNumPartitions"] = creation.partitions
    return override


def subscription_creation(body: SubscriptionCreationBody) -> bool:
    return body.allowAutoSubscriptionCreation


def subscription_creation_json(allowed: bool) -> dict[str, Any]:
    return {"allowAutoSubscriptionCreation": allowed}


def delayed_delivery(body: DelayedDeliveryBody) -> DelayedDeliveryPolicy:
    tick_ms = 1000 if body.tickTime is None else int(number(body.tickTime, most=INT_MAX))
    max_delay_ms = body.maxDeliveryDelayInMillis if body.maxDeliveryDelayInMillis is not None else body.maxDelayInMillis
    return DelayedDeliveryPolicy(active=body.active, tick_ms=tick_ms, max_delay_ms=number(max_delay_ms or 0))


def delayed_delivery_json(policy: DelayedDeliveryPolicy) -> dict[str, Any]:
    return {
        "tickTime": policy.tick_ms,
        "active": policy.active,
        "maxDeliveryDelayInMillis": policy.max_delay_ms,
        "maxDelayInMillis": policy.max_delay_ms,
    }


def delayed_delivery_in_force(policies: TopicPolicies) -> dict[str, Any]:
    found = DelayedDeliveryPolicy(active=policies.delayed_delivery, max_delay_ms=policies.max_delay_ms)
    return delayed_delivery_json(found)


def inactive_topics(body: InactiveTopicsBody) -> InactiveTopicsPolicy:
    return InactiveTopicsPolicy(
        active=body.deleteWhileInactive,
        when=body.inactiveTopicDeleteMode,
        after_s=positive(body.maxInactiveDurationSeconds),
    )


def inactive_topics_json(policy: InactiveTopicsPolicy) -> dict[str, Any]:
    return {
        "inactiveTopicDeleteMode": policy.when,
        "maxInactiveDurationSeconds": policy.after_s,
        "deleteWhileInactive": policy.active,
    }


def inactive_topics_in_force(policies: TopicPolicies) -> dict[str, Any]:
    found = policies.inactive_topics
    when, after_s = ("delete_when_no_subscriptions", DEFAULT_INACTIVE_S) if found is None else (found.when.value, found.after_s)
    return {"inactiveTopicDeleteMode": when, "maxInactiveDurationSeconds": after_s, "deleteWhileInactive": found is not None}


def subscription_types(names: list[str]) -> tuple[str, ...] | None:
    """Return the allowed types; None for an empty list, which means "not set" as in Pulsar."""
    unknown = [name for name in names if name not in SUBSCRIPTION_TYPES]
    if unknown:
        raise PreconditionError(f"{unknown[0][:100]!r} is not a type of subscription: {', '.join(SUBSCRIPTION_TYPES)}")
    return tuple(name for name in SUBSCRIPTION_TYPES if name in names) or None


def subscription_types_in_force(policies: TopicPolicies) -> list[str]:
    return [name for name in SUBSCRIPTION_TYPES if not policies.subscription_types or name in policies.subscription_types]


def one_of(word: str, names: tuple[str, ...], noun: str) -> str:
    if word not in names:
        raise PreconditionError(f"{word[:100]!r} is not a {noun}: {', '.join(names)}")
    return word
