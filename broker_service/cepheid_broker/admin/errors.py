"""Refusals of admin calls: a status and `{"reason": text}`, which every client of the API reads.

Tools decide by the status, so 404, 409 and 412 must not be confused (docs/reference/behaviours.md §1). This module is the API's
only table of statuses: refusals of the API itself carry theirs, every other error type is in `HTTP_STATUSES`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from cepheid_broker.balancing import OrderRefusedError
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
    PermissionsOutOfDateError,
    ProducerBusyError,
    ProducerFencedError,
    SchemaNotFoundError,
    ServiceNotReadyError,
    SubscriptionNotFoundError,
    TooManyError,
    TooManyProducersError,
    TooManySchemasError,
    TopicChangedError,
    TopicHeldError,
    TopicNotFoundError,
)
from cepheid_broker.ownership import (
    BundleSplitError,
    DestinationRefusedError,
    NotOwnerError,
    PeerSilentError,
    PeerUnreachableError,
    RemoteRefusedError,
    SplitRefusedError,
)
from cepheid_managed_ledger import NoObjectStoreError, OffloadOffError, OffloadRunningError
from cepheid_metadata import (
    BadVersionError,
    InvalidNameError,
    KeyExistsError,
    NotEmptyError,
    PermissionsContendedError,
    PermissionsFullError,
    RestoreNotReportedError,
    RevocationListFullError,
    SessionLostError,
)
from cepheid_metadata.upgrade import UpgradeNotPossibleError
from cepheid_ports import CepheidError
from cepheid_wire import InvalidTopicNameError


class AdminError(CepheidError):
    """A refusal of the API itself, with its HTTP status."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR


class BadRequestError(AdminError):
    status = HTTPStatus.BAD_REQUEST


class NotFoundError(AdminError):
    status = HTTPStatus.NOT_FOUND


class NotAllowedHereError(AdminError):
    """The call makes no sense for this kind of topic, or is switched off."""

    status = HTTPStatus.METHOD_NOT_ALLOWED


class NotAcceptableError(AdminError):
    """A number of partitions that a new topic cannot have."""

    status = HTTPStatus.NOT_ACCEPTABLE


class ConflictError(AdminError):
    """The object exists already, is not empty, or is of the other kind."""

    status = HTTPStatus.CONFLICT


class PreconditionError(AdminError):
    """A bad name, or an unmet precondition."""

    status = HTTPStatus.PRECONDITION_FAILED


class BadNameError(PreconditionError):
    """A name in a path that is not valid for a cluster, tenant, namespace, topic or subscription."""


class BodyTooLargeError(AdminError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    hint = "no body of this API is that large; check what is being sent"


class UnprocessableError(AdminError):
    """A number of partitions that a topic cannot be grown to."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class NotServedError(AdminError):
    """A call of Pulsar's API that this broker does not serve: refused, never a wrong success."""

    status = HTTPStatus.NOT_IMPLEMENTED
    hint = "docs/admin.md lists what is served"


class HealthCheckError(AdminError):
    """A message could not be published and read back."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR


HTTP_STATUSES: dict[type[CepheidError], HTTPStatus] = {
    UpgradeNotPossibleError: HTTPStatus.CONFLICT,
    OrderRefusedError: HTTPStatus.CONFLICT,
    SplitRefusedError: HTTPStatus.PRECONDITION_FAILED,
    DestinationRefusedError: HTTPStatus.PRECONDITION_FAILED,
    BrokerError: HTTPStatus.INTERNAL_SERVER_ERROR,
    TopicNotFoundError: HTTPStatus.NOT_FOUND,
    NamespaceNotFoundError: HTTPStatus.NOT_FOUND,
    ConsumerNotFoundError: HTTPStatus.NOT_FOUND,
    SubscriptionNotFoundError: HTTPStatus.NOT_FOUND,
    AuthorizationError: HTTPStatus.FORBIDDEN,
    ServiceNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
    PermissionsOutOfDateError: HTTPStatus.SERVICE_UNAVAILABLE,
    NotOwnerError: HTTPStatus.SERVICE_UNAVAILABLE,  # if its owner has no admin address; else the caller is redirected (app.py)
    BundleSplitError: HTTPStatus.SERVICE_UNAVAILABLE,
    PeerUnreachableError: HTTPStatus.SERVICE_UNAVAILABLE,
    PeerSilentError: HTTPStatus.SERVICE_UNAVAILABLE,
    RemoteRefusedError: HTTPStatus.BAD_GATEWAY,  # for a status that is not known; else that one
    ProducerBusyError: HTTPStatus.PRECONDITION_FAILED,
    TopicHeldError: HTTPStatus.PRECONDITION_FAILED,
    ConsumerBusyError: HTTPStatus.PRECONDITION_FAILED,
    TooManyError: HTTPStatus.PRECONDITION_FAILED,
    BacklogQuotaExceededError: HTTPStatus.PRECONDITION_FAILED,
    BacklogQuotaHoldError: HTTPStatus.PRECONDITION_FAILED,
    ConsumerAssignError: HTTPStatus.PRECONDITION_FAILED,
    ProducerFencedError: HTTPStatus.PRECONDITION_FAILED,
    TooManyProducersError: HTTPStatus.PRECONDITION_FAILED,
    TopicChangedError: HTTPStatus.CONFLICT,
    NotAllowedError: HTTPStatus.METHOD_NOT_ALLOWED,
    InvalidSchemaError: HTTPStatus.UNPROCESSABLE_ENTITY,
    IncompatibleSchemaError: HTTPStatus.CONFLICT,
    TooManySchemasError: HTTPStatus.CONFLICT,
    SchemaNotFoundError: HTTPStatus.NOT_FOUND,
    InvalidTopicNameError: HTTPStatus.PRECONDITION_FAILED,
    InvalidNameError: HTTPStatus.PRECONDITION_FAILED,
    KeyExistsError: HTTPStatus.CONFLICT,
    BadVersionError: HTTPStatus.CONFLICT,
    NotEmptyError: HTTPStatus.CONFLICT,
    PermissionsContendedError: HTTPStatus.CONFLICT,
    PermissionsFullError: HTTPStatus.PRECONDITION_FAILED,
    SessionLostError: HTTPStatus.SERVICE_UNAVAILABLE,
    OffloadRunningError: HTTPStatus.CONFLICT,
    OffloadOffError: HTTPStatus.PRECONDITION_FAILED,
    NoObjectStoreError: HTTPStatus.PRECONDITION_FAILED,
    RestoreNotReportedError: HTTPStatus.SERVICE_UNAVAILABLE,
    RevocationListFullError: HTTPStatus.PRECONDITION_FAILED,
}


_KNOWN_STATUSES = frozenset(HTTPStatus)


def is_bad_name(error: CepheidError) -> bool:
    """Return whether a request was refused for a name in it, before anything was looked up by that name."""
    return isinstance(error, BadNameError | InvalidTopicNameError | InvalidNameError)


def http_status_of(error: CepheidError) -> HTTPStatus:
    """Return the status of an error; if it is not in the table, 503 if temporary, else 500."""
    if isinstance(error, AdminError):
        return error.status
    if isinstance(error, RemoteRefusedError):
        return HTTPStatus(error.status) if error.status in _KNOWN_STATUSES else HTTP_STATUSES[RemoteRefusedError]
    for kind in type(error).__mro__:
        if kind in HTTP_STATUSES:
            return HTTP_STATUSES[kind]
    return HTTPStatus.SERVICE_UNAVAILABLE if error.retriable else HTTPStatus.INTERNAL_SERVER_ERROR
