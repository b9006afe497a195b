"""Every policy that is one value: its paths in the API, and the conversion of its JSON to and from a record's value.

A row defines the routes of both levels (policy_routes.py) and one member of the whole-namespace object, so that a policy cannot be
settable in one place and unknown in another. Backlog quotas, two values behind one path, have a module of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cepheid_broker.admin import offload_values
from cepheid_broker.admin import policy_values as values
from cepheid_broker.admin.errors import BadRequestError, NotAcceptableError, PreconditionError
from cepheid_broker.policies import SchemaCompatibility, TopicPolicies
from cepheid_metadata import AutoTopicCreation, PersistencePolicy, keys, list_names

if TYPE_CHECKING:
    from cepheid_broker.admin.context import AdminContext


def as_it_is(value: Any) -> Any:
    return value


async def nothing_to_check(context: AdminContext, value: Any) -> None:
    """Accept any value that could be decoded."""


IN_FORCE: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOf:
    """A policy's path at one level."""

    word: str
    set_by: str = "POST"
    deletable: bool = True
    unset: Any = None
    """Answer of GET while the policy is not set. None: 204, which clients read as "not set"; IN_FORCE: the broker's own value."""
    decoded_twice: bool = False
    """Whether the topic's name in the path is encoded twice, unlike in all other paths (docs/reference/behaviours.md §3)."""
    removed_at: str | None = None
    """Word of the path for DELETE, if it differs."""
    in_query: str | None = None
    """Query parameter with the value, if there is no body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    field: str
    """Name of the field in the records."""
    title: str
    body: Any
    """Type of the JSON value."""
    namespace: PathOf | None = None
    topic: PathOf | None = None
    member: str | None = None
    """Member of the whole-namespace object."""
    decode: Callable[[Any], Any] = as_it_is
    encode: Callable[[Any], Any] = as_it_is
    in_force: Callable[[TopicPolicies], Any] | None = None
    """None: the field of the same name."""
    check: Callable[[AdminContext, Any], Awaitable[None]] = nothing_to_check
    null_clears: bool = False
    by_field: bool = False
    """Whether the policy in force may combine several levels, so that one level's value is only a part of it."""

    @property
    def has_in_force(self) -> bool:
        """Whether `TopicPolicies` has it: what a namespace decides without its topics has no value in force."""
        return self.in_force is not None or self.field in TopicPolicies.__slots__

    def applied(self, policies: TopicPolicies) -> Any:
        return getattr(policies, self.field) if self.in_force is None else self.in_force(policies)


async def check_bookies(context: AdminContext, policy: PersistencePolicy) -> None:
    """Refuse more copies than bookies: no ledger could be created, and every open topic would stop at its next one."""
    known = await list_names(context.store, keys.BOOKIE_COOKIES_KEY)
    if known and policy.ensemble_size > len(known):
        raise BadRequestError(f"An ensemble of {policy.ensemble_size} needs as many bookies, this cluster has {len(known)}")


async def check_partitions(context: AdminContext, creation: AutoTopicCreation) -> None:
    if (creation.partitions or 0) > context.settings.max_partitions:
        raise NotAcceptableError(f"{creation.partitions} partitions; at most {context.settings.max_partitions} are allowed")


async def check_message_size(context: AdminContext, size_bytes: int) -> None:
    most = context.broker.settings.max_message_bytes
    if size_bytes > most:
        raise PreconditionError(f"{size_bytes} bytes: the broker accepts messages of at most {most}")


COMPATIBILITIES = tuple(kind.value for kind in SchemaCompatibility)


def compatibility(word: str) -> str | None:
    """Return a strategy; None for UNDEFINED, which means "not set"."""
    found = values.one_of(word, COMPATIBILITIES, "strategy")
    return None if found == SchemaCompatibility.UNDEFINED.value else found


def _limit(field: str, title: str, namespace: str, topic: str, member: str) -> PolicyKind:
    return PolicyKind(
        field=field,
        title=f"{title}, 0 = no limit",
        body=values.Int,
        namespace=PathOf(word=namespace),
        topic=PathOf(word=topic),
        member=member,
        decode=values.number,
    )


POLICIES: tuple[PolicyKind, ...] = (
    PolicyKind(
        field="retention",
        title="retention of acknowledged data",
        body=values.RetentionBody,
        namespace=PathOf(word="retention"),
        topic=PathOf(word="retention"),
        member="retention_policies",
        decode=values.retention,
        encode=values.retention_json,
        in_force=values.retention_in_force,
    ),
    PolicyKind(
        field="persistence",
        title="bookies per ledger, from the next ledger on; the rate of mark-deletes is kept, saves are grouped anyway",
        body=values.PersistenceBody,
        namespace=PathOf(word="persistence"),
        topic=PathOf(word="persistence"),
        member="persistence",
        decode=values.persistence,
        encode=values.persistence_json,
        in_force=values.persistence_json,
        check=check_bookies,
    ),
    PolicyKind(
        field="message_ttl_s",
        title="message TTL in seconds, 0 = off",
        body=values.Int,
        namespace=PathOf(word="messageTTL"),
        topic=PathOf(word="messageTTL", in_query="messageTTL"),
        member="message_ttl_in_seconds",
        decode=values.number,
    ),
    PolicyKind(
        field="deduplication",
        title="deduplication of what producers send again",
        body=bool,
        namespace=PathOf(word="deduplication"),
        topic=PathOf(word="deduplicationEnabled"),
        member="deduplicationEnabled",
    ),
    PolicyKind(
        field="dedup_snapshot_s",
        title="seconds between snapshots for deduplication",
        body=values.Int,
        namespace=PathOf(word="deduplicationSnapshotInterval", deletable=False),
        topic=PathOf(word="deduplicationSnapshotInterval"),
        member="deduplicationSnapshotIntervalSeconds",
        decode=values.positive,
        null_clears=True,
    ),
    PolicyKind(
        field="auto_topic_creation",
        title="what happens when a client uses a topic that does not exist",
        body=values.TopicCreationBody,
        namespace=PathOf(word="autoTopicCreation"),
        member="autoTopicCreationOverride",
        decode=values.topic_creation,
        encode=values.topic_creation_json,
        check=check_partitions,
    ),
    PolicyKind(
        field="auto_subscription_creation",
        title="whether consumers create their subscriptions",
        body=values.SubscriptionCreationBody,
        namespace=PathOf(word="autoSubscriptionCreation"),
        topic=PathOf(word="autoSubscriptionCreation", decoded_twice=True),
        member="autoSubscriptionCreationOverride",
        decode=values.subscription_creation,
        encode=values.subscription_creation_json,
        in_force=lambda policies: values.subscription_creation_json(policies.auto_subscription_creation),
    ),
    PolicyKind(
        field="delayed_delivery",
        title="whether and how long messages may ask to be delivered later",
        body=values.DelayedDeliveryBody,
        namespace=PathOf(word="delayedDelivery"),
        topic=PathOf(word="delayedDelivery"),
        member="delayed_delivery_policies",
        decode=values.delayed_delivery,
        encode=values.delayed_delivery_json,
        in_force=values.delayed_delivery_in_force,
    ),
    PolicyKind(
        field="inactive_topics",
        title="deletion of unused topics",
        body=values.InactiveTopicsBody,
        namespace=PathOf(word="inactiveTopicPolicies"),
        topic=PathOf(word="inactiveTopicPolicies"),
        member="inactive_topic_policies",
        decode=values.inactive_topics,
        encode=values.inactive_topics_json,
        in_force=values.inactive_topics_in_force,
    ),
    PolicyKind(
        field="encryption_required",
        title="whether producers must encrypt",
        body=bool,  # Go's client sends the string "true", which is accepted as well
        namespace=PathOf(word="encryptionRequired", deletable=False, unset=False),
        member="encryption_required",
    ),
    PolicyKind(
        field="schema_compatibility",
        title="how a new version of a schema must be compatible with earlier ones",
        body=str,
        namespace=PathOf(word="schemaCompatibilityStrategy", set_by="PUT", deletable=False, unset="UNDEFINED"),
        topic=PathOf(word="schemaCompatibilityStrategy", set_by="PUT"),
        member="schema_compatibility_strategy",
        decode=compatibility,
        in_force=lambda policies: policies.schema_compatibility.value,
    ),
    PolicyKind(
        field="schema_auto_update",
        title="whether producers add versions of schemas",
        body=bool,
        namespace=PathOf(word="isAllowAutoUpdateSchema", deletable=False, unset=IN_FORCE),
        member="is_allow_auto_update_schema",
    ),
    PolicyKind(
        field="schema_validation_enforced",
        title="whether producers without schema are refused on topics that have one",
        body=bool,
        namespace=PathOf(word="schemaValidationEnforced", deletable=False, unset=False),
        topic=PathOf(word="schemaValidationEnforced", unset=False),
        member="schema_validation_enforced",
    ),
    PolicyKind(
        field="subscription_types",
        title="kinds of subscription that consumers may use, empty = all",
        body=list[str],
        namespace=PathOf(word="subscriptionTypesEnabled", unset=[]),
        topic=PathOf(word="subscriptionTypesEnabled"),
        member="subscription_types_enabled",
        decode=values.subscription_types,
        encode=list,
        in_force=values.subscription_types_in_force,
    ),
    _limit("max_producers", "producers of a topic", "maxProducersPerTopic", "maxProducers", "max_producers_per_topic"),
    _limit("max_consumers", "consumers of a topic", "maxConsumersPerTopic", "maxConsumers", "max_consumers_per_topic"),
    _limit(
        "max_consumers_per_subscription",
        "consumers of a subscription",
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        "max_consumers_per_subscription",
    ),
    _limit(
        "max_subscriptions",
        "subscriptions of a topic",
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
        "max_subscriptions_per_topic",
    ),
    _limit(
        "max_unacked_per_consumer",
        "unacknowledged messages of a consumer",
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
        "max_unacked_messages_per_consumer",
    ),
    _limit(
        "max_unacked_per_subscription",
        "unacknowledged messages of a subscription",
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
        "max_unacked_messages_per_subscription",
    ),
    PolicyKind(
        field="max_topics",
        title="topics of a namespace, 0 = no limit",
        body=values.Int,
        namespace=PathOf(word="maxTopicsPerNamespace", unset=0),
        member="max_topics_per_namespace",
        decode=values.number,
    ),
    PolicyKind(
        field="max_message_bytes",
        title="largest message of a topic, 0 = the broker's limit",
        body=values.Int,
        topic=PathOf(word="maxMessageSize"),
        decode=values.number,
        check=check_message_size,
    ),
    PolicyKind(
        field="offload",
        title="when ended ledgers are copied to an object store, and which; a field that is absent is the level's above",
        body=offload_values.OffloadPoliciesBody,
        namespace=PathOf(word="offloadPolicies", removed_at="removeOffloadPolicies"),
        topic=PathOf(word="offloadPolicies"),
        member="offload_policies",
        decode=offload_values.offload_policy,
        encode=offload_values.offload_policy_json,
        in_force=offload_values.offload_in_force,
        check=offload_values.check_offload_possible,
        by_field=True,
    ),
)
