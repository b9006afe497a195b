"""The error codes of the protocol and when to send them.

What an official client does with a code matters more than its name (protocol.md §24). C++, Python and Node:
  fail   the application gets an exception at once
  retry  the client tries again with backoff until its operation timeout; the application then gets Timeout
A first SUBSCRIBE is special: with a code that "retries", the consumer waits until that timeout (protocol.md §12.4), so delay the
reply until it can succeed, or close the connection. Therefore: temporary → SERVICE_NOT_READY, for producers and lookups only;
permanent → one that fails.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from cepheid_wire import pulsar_api_pb2 as pb


class ServerError(IntEnum):
    """ServerError of PulsarApi.proto."""

    UNKNOWN_ERROR = 0  # retry; if no other code fits: a bug in the broker
    METADATA_ERROR = 1  # retry; an invalid seek, rejected unsubscribe, encryption required
    PERSISTENCE_ERROR = 2  # retry; storage failed
    AUTHENTICATION_ERROR = 3  # fail; invalid credentials. Before CONNECTED, clients show it as Timeout
    AUTHORIZATION_ERROR = 4  # fail; not permitted
    CONSUMER_BUSY = 5  # fail; another exclusive consumer, another subscription type, too many consumers
    SERVICE_NOT_READY = 6  # retry; loading, unloading, fenced. Never as the reply to a first SUBSCRIBE
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR = 7  # fail; backlog quota with the policy to hold producers
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION = 8  # fail; backlog quota with the policy to throw
    CHECKSUM_ERROR = 9  # in SEND_ERROR: only that message fails. With any other code there, the client closes its connection
    UNSUPPORTED_VERSION_ERROR = 10  # retry; the client is too old for a feature
    TOPIC_NOT_FOUND = 11  # fail; the topic does not exist and may not be created
    SUBSCRIPTION_NOT_FOUND = 12  # retry, so avoid it; the subscription does not exist and may not be created
    CONSUMER_NOT_FOUND = 13  # retry; statistics of an unknown consumer
    TOO_MANY_REQUESTS = 14  # fail; lookups throttled. C++ also closes its connection
    TOPIC_TERMINATED_ERROR = 15  # fail; the topic accepts no more messages
    PRODUCER_BUSY = 16  # fail; the producer name is in use. C++ shows InvalidConfiguration
    INVALID_TOPIC_NAME = 17  # retry, so use NOT_ALLOWED_ERROR for names that a user mistyped
    INCOMPATIBLE_SCHEMA = 18  # fail; the schema is not compatible
    CONSUMER_ASSIGN_ERROR = 19  # fail; sticky hash ranges overlap
    TRANSACTION_COORDINATOR_NOT_FOUND = 20  # retry
    INVALID_TXN_STATUS = 21  # retry
    NOT_ALLOWED_ERROR = 22  # fail; a feature that is off or not supported, an invalid request
    TRANSACTION_CONFLICT = 23  # retry
    TRANSACTION_NOT_FOUND = 24  # retry
    PRODUCER_FENCED = 25  # PRODUCER: fail, the producer is closed. Lookups: retry

    @property
    def as_protobuf(self) -> pb.ServerError:
        """The same number, for a field of a protobuf command: protobuf uses int, type checkers expect its own enum."""
        return cast("pb.ServerError", self)
