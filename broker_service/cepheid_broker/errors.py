"""What the broker refuses, by type. protocol/wire_errors.py and admin/errors.py give each type its code and its status."""

from __future__ import annotations

from cepheid_ports import CepheidError


class BrokerError(CepheidError):
    """A request that the broker refuses; the connection lives."""


class ProtocolViolationError(CepheidError):
    """The peer broke a rule of the protocol in a way that leaves nothing to answer: the connection closes."""

    hint = "the client or a proxy in between misbehaves; its version is in the connection.opened log line"


class TopicNotFoundError(BrokerError):
    hint = (
        "create the topic, or allow its creation by use: the broker's setting `topic_creation.allowed`, or the namespace's policy"
    )


class NamespaceNotFoundError(BrokerError):
    hint = "create the namespace first: PUT /admin/v2/namespaces/TENANT/NAMESPACE"


class ServiceNotReadyError(BrokerError):
    """Loading, unloading, being reset: the same request succeeds soon."""

    retriable = True
    hint = "clients retry by themselves"


class AuthorizationError(BrokerError):
    """The client is known, and has no permission. The text says by which rule."""

    hint = "an administrator of the tenant can grant it; `cepheid permissions why` shows which rule decides"


class PermissionsOutOfDateError(ServiceNotReadyError):
    """The permissions that decide could not be read for too long."""

    hint = "bring the metadata store back; clients retry by themselves"


class ProducerBusyError(BrokerError):
    hint = "another producer has this name; leave the name out or choose another one"


class TopicHeldError(ProducerBusyError):
    """By an exclusive producer."""

    hint = "wait until the exclusive producer closes, ask with access mode WaitForExclusive, or use another topic"


class ProducerFencedError(BrokerError):
    hint = "access modes Exclusive and ExclusiveWithFencing allow one producer; the one connected last with fencing stays"


class TooManyProducersError(ProducerBusyError):
    hint = "close some producers, or raise the limit: the topic's policy, or the broker's setting connection.max_producers"


class BacklogQuotaHoldError(BrokerError):
    """The policy is to let producers wait; those that were connected come back when there is room."""

    hint = "let consumers catch up, delete subscriptions that nobody reads, or raise the backlog quota"


class BacklogQuotaExceededError(BrokerError):
    """The policy is to refuse."""

    hint = "let consumers catch up, delete subscriptions that nobody reads, or raise the backlog quota"


class SubscriptionNotFoundError(BrokerError):
    hint = "create the subscription: PUT /admin/v2/persistent/TENANT/NAMESPACE/TOPIC/subscription/NAME, or let it be created by use"


class ConsumerBusyError(BrokerError):
    hint = "the subscription is in use; close the other consumer, use a Shared subscription or another subscription name"


class ConsumerNotFoundError(BrokerError):
    hint = "the consumer was closed; subscribe again"


class TopicChangedError(BrokerError):
    """Two changes of one topic at the same time: this one came second."""

    hint = "look at the topic, and ask again if that is still wanted"


class NotAllowedError(BrokerError):
    """Not served, or against the rules; trying again does not help."""


class ConsumerAssignError(BrokerError):
    """Key_Shared: the asked hash ranges, or the way of sharing, cannot be had."""

    hint = "choose ranges that nobody has, and the same key-shared mode for all consumers of the subscription"


class TooManyError(BrokerError):
    """A bound on producers, consumers or subscriptions is reached."""

    hint = "close some, or raise the limit: a policy, or a setting of the broker (docs/settings.md)"


class InvalidSchemaError(BrokerError):
    """A schema whose definition is not what its type asks for."""

    hint = "correct the definition; docs/schemas.md says what each type takes"


class IncompatibleSchemaError(BrokerError):
    """A schema that does not go with the topic's, or none where there must be one."""

    hint = "change the schema so that it goes with the version named, or the policy schemaCompatibilityStrategy (docs/schemas.md)"


class TooManySchemasError(IncompatibleSchemaError):
    """The topic has as many versions, or bytes of them, as are possible."""

    hint = "clients that make up a schema each time are at fault; deleting the topic's schema by force makes room (docs/schemas.md)"


class SchemaNotFoundError(BrokerError):
    """No schema, or no such version."""
