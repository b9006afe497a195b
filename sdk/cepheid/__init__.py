"""An asyncio client for Cepheid and Apache Pulsar. docs/python.md is the guide.

async with cepheid.connect("pulsar://localhost:6650") as client:
    async with client.producer("greetings") as producer:
        await producer.send(b"hello")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cepheid.client import Client, connect
    from cepheid.consumer import Consumer, DeadLetters
    from cepheid.encryption import EncryptedPayload, KeyFiles, KeyReader
    from cepheid.errors import (
        BusyError,
        ClosedError,
        ConflictError,
        ConnectError,
        Error,
        FencedError,
        MessageTooLargeError,
        MissingExtraError,
        NotAllowedError,
        NotFoundError,
        PreconditionError,
        QuotaError,
        RefusedError,
        SchemaError,
        SendFailedError,
        TerminatedError,
        TimedOutError,
        UnreadableMessageError,
        UntrustedBrokerError,
        UsageError,
        WindowFullError,
    )
    from cepheid.interceptors import Interceptor
    from cepheid.message import Message
    from cepheid.message_id import EARLIEST, LATEST, MessageId
    from cepheid.producer import Producer
    from cepheid.reader import Reader
    from cepheid.record_types import Float32, Int32
    from cepheid.schemas import (
        AutoSchema,
        AvroSchema,
        BytesSchema,
        JsonSchema,
        KeyValueSchema,
        PrimitiveSchema,
        ProtobufSchema,
        Schema,
        StringSchema,
        TopicSchema,
    )
    from cepheid.table_view import Change, TableView
    from cepheid.topic_consumer import KeyShared, NackBackoff
    from cepheid_security.oauth2 import ClientCredentials

__all__ = [
    "EARLIEST",
    "LATEST",
    "AutoSchema",
    "AvroSchema",
    "BusyError",
    "BytesSchema",
    "Change",
    "Client",
    "ClientCredentials",
    "ClosedError",
    "ConflictError",
    "ConnectError",
    "Consumer",
    "DeadLetters",
    "EncryptedPayload",
    "Error",
    "FencedError",
    "Float32",
    "Int32",
    "Interceptor",
    "JsonSchema",
    "KeyFiles",
    "KeyReader",
    "KeyShared",
    "KeyValueSchema",
    "Message",
    "MessageId",
    "MessageTooLargeError",
    "MissingExtraError",
    "NackBackoff",
    "NotAllowedError",
    "NotFoundError",
    "PreconditionError",
    "PrimitiveSchema",
    "Producer",
    "ProtobufSchema",
    "QuotaError",
    "Reader",
    "RefusedError",
    "Schema",
    "SchemaError",
    "SendFailedError",
    "StringSchema",
    "TableView",
    "TerminatedError",
    "TimedOutError",
    "TopicSchema",
    "UnreadableMessageError",
    "UntrustedBrokerError",
    "UsageError",
    "WindowFullError",
    "connect",
]

_HOMES = {
    "cepheid.client": ("Client", "connect"),
    "cepheid.consumer": ("Consumer", "DeadLetters"),
    "cepheid.encryption": ("EncryptedPayload", "KeyFiles", "KeyReader"),
    "cepheid.errors": (
        "BusyError",
        "ClosedError",
        "ConflictError",
        "ConnectError",
        "Error",
        "FencedError",
        "MessageTooLargeError",
        "MissingExtraError",
        "NotAllowedError",
        "NotFoundError",
        "PreconditionError",
        "QuotaError",
        "RefusedError",
        "SchemaError",
        "SendFailedError",
        "TerminatedError",
        "TimedOutError",
        "UnreadableMessageError",
        "UntrustedBrokerError",
        "UsageError",
        "WindowFullError",
    ),
    "cepheid.interceptors": ("Interceptor",),
    "cepheid.message": ("Message",),
    "cepheid.message_id": ("EARLIEST", "LATEST", "MessageId"),
    "cepheid.producer": ("Producer",),
    "cepheid.reader": ("Reader",),
    "cepheid.record_types": ("Float32", "Int32"),
    "cepheid.schemas": (
        "AutoSchema",
        "AvroSchema",
        "BytesSchema",
        "JsonSchema",
        "KeyValueSchema",
        "PrimitiveSchema",
        "ProtobufSchema",
        "Schema",
        "StringSchema",
        "TopicSchema",
    ),
    "cepheid.table_view": ("Change", "TableView"),
    "cepheid.topic_consumer": ("KeyShared", "NackBackoff"),
    "cepheid_security.oauth2": ("ClientCredentials",),
}
"""Names exported by each module; a test compares them with the imports above."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name on first use: `import cepheid` costs a few milliseconds, and an admin script does not load the client."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
