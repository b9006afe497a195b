"""The protocol's error code for each error: the only table of them.

Codes are chosen by what official clients do with them, not by name: a temporary error becomes SERVICE_NOT_READY, which they retry;
others become a code that fails at once (protocol of Apache Pulsar, `ServerError`; cepheid_wire.ServerError has the list). An
invalid name is NOT_ALLOWED_ERROR, as C++ clients retry INVALID_TOPIC_NAME until their timeout and then say "Timeout".
"""

from __future__ import annotations

import logging

from cepheid_broker.errors import (
    AuthorizationError,
    BacklogQuotaExceededError,
    BacklogQuotaHoldError,
    BrokerError,
    ConsumerAssignError,
    ConsumerBusyError,
    ConsumerNotFoundError,
    IncompatibleSchemaError,
    InvalidSchemaError,
    NamespaceNotFoundError,
    NotAllowedError,
    ProducerBusyError,
    ProducerFencedError,
    SchemaNotFoundError,
    ServiceNotReadyError,
    SubscriptionNotFoundError,
    TooManyError,
    TooManyProducersError,
    TopicChangedError,
    TopicHeldError,
    TopicNotFoundError,
)
from cepheid_broker.ownership import NotOwnerError, PeerUnreachableError, RemoteRefusedError
from cepheid_ledger import LedgerError
from cepheid_managed_ledger import ManagedLedgerDeletedError, ManagedLedgerError, TooManyCursorsError, TopicTerminatedError
from cepheid_metadata import MetadataError, RestoreNotReportedError, SessionLostError
from cepheid_ports import CepheidError
from cepheid_tiered import SegmentError
from cepheid_wire import ChecksumMismatchError, InvalidTopicNameError, ServerError

log = logging.getLogger(__name__)

SERVER_ERRORS: dict[type[CepheidError], ServerError] = {
    BrokerError: ServerError.UNKNOWN_ERROR,
    TopicNotFoundError: ServerError.TOPIC_NOT_FOUND,
    NamespaceNotFoundError: ServerError.TOPIC_NOT_FOUND,
    ServiceNotReadyError: ServerError.SERVICE_NOT_READY,
    AuthorizationError: ServerError.AUTHORIZATION_ERROR,
    NotOwnerError: ServerError.SERVICE_NOT_READY,  # clients look the topic up again
    PeerUnreachableError: ServerError.SERVICE_NOT_READY,
    RemoteRefusedError: ServerError.UNKNOWN_ERROR,
    ProducerBusyError: ServerError.PRODUCER_BUSY,
    TooManyProducersError: ServerError.PRODUCER_BUSY,
    TopicHeldError: ServerError.PRODUCER_BUSY,
    ProducerFencedError: ServerError.PRODUCER_FENCED,
    BacklogQuotaHoldError: ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR,
    BacklogQuotaExceededError: ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION,
    # Not SUBSCRIPTION_NOT_FOUND: C++ clients would ask again until their timeout, and then report "Timeout".
    SubscriptionNotFoundError: ServerError.NOT_ALLOWED_ERROR,
    ConsumerBusyError: ServerError.CONSUMER_BUSY,
    ConsumerAssignError: ServerError.CONSUMER_ASSIGN_ERROR,
    ConsumerNotFoundError: ServerError.METADATA_ERROR,  # seek, unsubscribe and getLastMessageId (protocol.md §17, §18)
    TopicChangedError: ServerError.METADATA_ERROR,
    NotAllowedError: ServerError.NOT_ALLOWED_ERROR,
    TooManyError: ServerError.CONSUMER_BUSY,
    InvalidSchemaError: ServerError.INCOMPATIBLE_SCHEMA,  # no code fits better, and it fails at once
    IncompatibleSchemaError: ServerError.INCOMPATIBLE_SCHEMA,
    SchemaNotFoundError: ServerError.TOPIC_NOT_FOUND,  # clients read it as "has no schema" (protocol.md §20)
    InvalidTopicNameError: ServerError.NOT_ALLOWED_ERROR,
    ChecksumMismatchError: ServerError.CHECKSUM_ERROR,
    MetadataError: ServerError.METADATA_ERROR,
    SessionLostError: ServerError.SERVICE_NOT_READY,  # until there is a new session, or another broker serves the topic
    RestoreNotReportedError: ServerError.SERVICE_NOT_READY,
    ManagedLedgerError: ServerError.PERSISTENCE_ERROR,
    LedgerError: ServerError.PERSISTENCE_ERROR,
    SegmentError: ServerError.PERSISTENCE_ERROR,
    TopicTerminatedError: ServerError.TOPIC_TERMINATED_ERROR,
    ManagedLedgerDeletedError: ServerError.TOPIC_NOT_FOUND,
    TooManyCursorsError: ServerError.CONSUMER_BUSY,
}


def server_error_of(error: BaseException) -> ServerError:
    """Return the code of an error. An unexpected exception is a bug: UNKNOWN_ERROR, with a traceback in the log."""
    if isinstance(error, TimeoutError):
        return ServerError.SERVICE_NOT_READY
    if isinstance(error, CepheidError):
        for kind in type(error).__mro__:
            if kind in SERVER_ERRORS:
                # Temporary metadata and storage errors are answered like a topic that is being loaded.
                return ServerError.SERVICE_NOT_READY if error.retriable else SERVER_ERRORS[kind]
    log.error("request.failed", extra={"error": repr(error)}, exc_info=error)
    return ServerError.UNKNOWN_ERROR


def error_text(error: BaseException) -> str:
    """Return the text for the client's user; for an unexpected exception only its type."""
    if isinstance(error, CepheidError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "the request took too long; clients retry by themselves"
    return f"internal error ({type(error).__name__}); the broker's log has the details"
