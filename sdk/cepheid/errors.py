"""The errors of the client. All derive from `Error`; the message says what is wrong, and the hint what to do.

Error ┬─ ConnectError            no broker could be reached, or the connection broke
      │    └─ UntrustedBrokerError  the certificate of the broker is not accepted
      ├─ TimedOutError           no answer within the time limit (also a TimeoutError)
      ├─ ClosedError             the client, producer, consumer or reader is closed
      ├─ UsageError              an argument or a call that cannot work (also a ValueError)
      ├─ WindowFullError         `send_nowait` found the producer's window full
      ├─ MessageTooLargeError    the broker does not accept a message of this size
      ├─ SendFailedError         messages that `send_nowait` accepted were not stored
      ├─ UnreadableMessageError  the payload cannot be unpacked or decoded
      ├─ MissingExtraError       a library is not installed (also an ImportError)
      └─ RefusedError            the broker refused; `code` is its ServerError
           ├─ NotFoundError      no such topic or subscription, and the broker does not create it
           ├─ BusyError          the subscription or the producer name is in use
           ├─ FencedError        another producer with exclusive access replaced this one
           ├─ SchemaError        the schema is incompatible with the topic's
           ├─ TerminatedError    the topic accepts no more messages
           ├─ QuotaError         the backlog quota of the topic is reached
           ├─ ConflictError      an admin call: it exists already, or is in use (409)
           ├─ PreconditionError  an admin call: something else must be done before, or a value does not fit (412)
           └─ NotAllowedError    not permitted, or not served by this broker
"""

from __future__ import annotations

from typing import Any, ClassVar

from cepheid_ports import CepheidError
from cepheid_wire import ServerError


class Error(CepheidError):
    """Base class of the client's errors."""


class ConnectError(Error):
    """No broker could be reached, or a connection broke before the answer came."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "check the address and that a broker runs there; the call may be repeated"


class UntrustedBrokerError(ConnectError):
    """The certificate of the broker is not accepted. Opening fails at once; open objects try again."""

    hint: ClassVar[str] = "name the CA that signed the broker's certificate as tls_ca_file, and use a name that the certificate has"


class TimedOutError(Error, TimeoutError):
    """No answer arrived within the time limit. The broker may have executed the request."""

    retriable: ClassVar[bool] = True


class ClosedError(Error):
    """The object was closed, by the application or because its client was closed."""

    hint: ClassVar[str] = "open a new one"


class UsageError(Error, ValueError):
    """An argument, or a combination of calls, that cannot work."""


class WindowFullError(Error):
    """Too many messages wait for their receipts, so `send_nowait` accepts no more."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "await producer.drain(), or raise window_messages or window_bytes"


class MessageTooLargeError(Error):
    """The broker does not accept messages of this size."""

    hint: ClassVar[str] = "open the producer with chunking=True, or raise the broker's max_message_bytes"


class SendFailedError(Error):
    """Messages that `send_nowait` accepted were not stored. `count` is their number, `first` the first failure."""

    def __init__(self, message: str, *, count: int, first: Error) -> None:
        super().__init__(message, count=count)
        self.count = count
        self.first = first


class UnreadableMessageError(Error):
    """A received payload cannot be unpacked or decoded. The message stays unacknowledged."""

    hint: ClassVar[str] = (
        "acknowledge it to skip it, or nack it to get it again; a payload that cannot be unpacked is never a dead letter"
    )


class MissingExtraError(Error, ImportError):
    """A required library is not installed."""


class RefusedError(Error):
    """The broker refused. `code` is its reason in the binary protocol, `status` the HTTP status of an admin call (otherwise 0)."""

    def __init__(self, message: str, *, code: ServerError = ServerError.UNKNOWN_ERROR, status: int = 0, **facts: Any) -> None:
        reason = {"status": status} if status else {"code": code.name}
        super().__init__(message, **reason, **facts)
        self.code = code
        self.status = status


class NotFoundError(RefusedError):
    """There is no such topic or subscription, and the broker does not create it."""

    hint: ClassVar[str] = "check the name, create the topic, or let the broker create topics"


class BusyError(RefusedError):
    """The subscription has another consumer or another type, or the producer name is in use."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "close the other one, use another name, or choose a type that can be shared"


class FencedError(RefusedError):
    """Another producer has exclusive access to the topic. This one is closed for good."""

    hint: ClassVar[str] = "open a new producer if this one should take over"


class SchemaError(RefusedError):
    """The schema is incompatible with that of the topic."""

    hint: ClassVar[str] = "change the type so that both fit, or the topic's compatibility strategy"


class TerminatedError(RefusedError):
    """The topic was terminated and accepts no more messages."""


class QuotaError(RefusedError):
    """The topic's backlog quota is reached."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "let consumers acknowledge, delete unused subscriptions, or raise the quota"


class ConflictError(RefusedError):
    """The object that an admin call would create exists already, or the one that it would change is in use."""


class PreconditionError(RefusedError):
    """An admin call requires something else first, or a name or value in it is invalid. The message says which."""


class NotAllowedError(RefusedError):
    """The broker does not permit this, or does not offer it."""


_BY_CODE: dict[ServerError, type[RefusedError]] = {
    ServerError.AUTHENTICATION_ERROR: NotAllowedError,
    ServerError.AUTHORIZATION_ERROR: NotAllowedError,
    ServerError.CONSUMER_BUSY: BusyError,
    ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR: QuotaError,
    ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION: QuotaError,
    ServerError.TOPIC_NOT_FOUND: NotFoundError,
    ServerError.SUBSCRIPTION_NOT_FOUND: NotFoundError,
    ServerError.TOPIC_TERMINATED_ERROR: TerminatedError,
    ServerError.PRODUCER_BUSY: BusyError,
    ServerError.INVALID_TOPIC_NAME: NotAllowedError,
    ServerError.INCOMPATIBLE_SCHEMA: SchemaError,
    ServerError.CONSUMER_ASSIGN_ERROR: BusyError,
    ServerError.NOT_ALLOWED_ERROR: NotAllowedError,
    ServerError.PRODUCER_FENCED: FencedError,
}
TRANSIENT_CODES = frozenset(
    {
        ServerError.UNKNOWN_ERROR,
        ServerError.METADATA_ERROR,
        ServerError.PERSISTENCE_ERROR,
        ServerError.SERVICE_NOT_READY,
        ServerError.TOO_MANY_REQUESTS,
    }
)
"""Codes after which the same request may succeed later: lookups, producers and consumers retry until their time limit."""


def refused(code: int, message: str, what: str) -> RefusedError:
    """Return the error for the broker's answer `code` and `message` to `what`."""
    try:
        known = ServerError(code)
    except ValueError:
        known = ServerError.UNKNOWN_ERROR
    kind = _BY_CODE.get(known, RefusedError)
    return kind(f"{what} was refused with {known.name}: {message or 'no reason given'}", code=known)


def is_transient(error: Error) -> bool:
    """Return whether the same request may succeed when repeated."""
    if isinstance(error, RefusedError):
        return not error.status and error.code in TRANSIENT_CODES
    return isinstance(error, ConnectError) and not isinstance(error, UntrustedBrokerError)
