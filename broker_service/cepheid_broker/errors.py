"""Errors with which the broker refuses, by type. protocol/wire_errors.py and admin/errors.py map them to codes and statuses."""

from __future__ import annotations

from cepheid_ports import CepheidError


class BrokerError(CepheidError):
    """A request that the broker refuses; the connection stays open."""


class ProtocolViolationError(CepheidError):
    """A protocol violation by the peer that leaves nothing to answer: the connection closes."""

    hint = "the client, or a proxy in between, is faulty; the client's version is in the connection.opened log line"


class TopicNotFoundError(BrokerError):
    hint = (
        "create the topic, or allow its creation by use: the broker's setting `topic_creation.allowed`, or the namespace's policy"
    )


class NamespaceNotFoundError(BrokerError):
    hint = "create the namespace first: PUT /admin/v2/namespaces/TENANT/NAMESPACE"


class ServiceNotReadyError(BrokerError):
    """A state that passes (loading, unloading, being reset): the same request succeeds soon."""

    retriable = True
    hint = "clients retry by themselves"


class AuthorizationError(BrokerError):
    """The client is authenticated, but lacks a permission. The text names the rule."""

    hint = "an administrator of the tenant can grant it; `cepheid permissions why` shows which rule decides"


class PermissionsOutOfDateError(ServiceNotReadyError):
    """The permissions that decide could not be read for too long."""

    hint = "bring the metadata store back; clients retry by themselves"


class ProducerBusyError(BrokerError):
    hint = "another producer has this name; leave the name out or choose another one"


class TopicHeldError(ProducerBusyError):
    """The topic is held by an exclusive producer."""

    hint = "wait until the exclusive producer closes, ask with access mode WaitForExclusive, or use another topic"


class ProducerFencedError(BrokerError):
    hint = "access modes Exclusive and ExclusiveWithFencing allow one producer; the one connected last with fencing stays"


class TooManyProducersError(ProducerBusyError):
    hint = "close some producers, or raise the limit: the topic's policy, or the broker's setting connection.max_producers"


class BacklogQuotaHoldError(BrokerError):
    """The backlog quota's policy is to let producers wait; reconnecting ones continue once there is room."""

    hint = "let consumers catch up, delete unused subscriptions, or raise the backlog quota"


class BacklogQuotaExceededError(BrokerError):
    """The backlog quota's policy is to refuse producers."""

    hint = "let consumers catch up, delete unused subscriptions, or raise the backlog quota"


class SubscriptionNotFoundError(BrokerError):
    hint = "create the subscription: PUT /admin/v2/persistent/TENANT/NAMESPACE/TOPIC/subscription/NAME, or let it be created by use"


class ConsumerBusyError(BrokerError):
    hint = "the subscription is in use; close the other consumer, use a Shared subscription or another subscription name"


class ConsumerNotFoundError(BrokerError):
    hint = "the consumer was closed; subscribe again"


class TopicChangedError(BrokerError):
    """A concurrent change of the same topic came first."""

    hint = "look at the topic, and ask again if that is still wanted"


class NotAllowedError(BrokerError):
    """A request that is not served, or breaks a rule; trying again does not help."""


class ConsumerAssignError(BrokerError):
    """Key_Shared: the requested hash ranges or key-shared mode are not available."""

    hint = "choose ranges that no other consumer has, and the same key-shared mode for all consumers of the subscription"


class TooManyError(BrokerError):
    """A limit of producers, consumers or subscriptions is reached."""

    hint = "close some, or raise the limit: a policy, or a setting of the broker (docs/settings.md)"


class InvalidSchemaError(BrokerError):
    """A schema whose definition is not valid for its type."""

    hint = "correct the definition; docs/schemas.md says what each type takes"


class IncompatibleSchemaError(BrokerError):
    """A schema that is incompatible with the topic's, or none where one is required."""

    hint = "change the schema to fit the version named, or the policy schemaCompatibilityStrategy (docs/schemas.md)"


class TooManySchemasError(IncompatibleSchemaError):
    """The topic has reached the limit of schema versions, or of their bytes."""

    hint = "a client may generate a new schema each time; deleting the topic's schema by force makes room (docs/schemas.md)"


class SchemaNotFoundError(BrokerError):
    """The topic has no schema, or not that version."""
