"""An asyncio client for Cepheid and Apache Pulsar. docs/python.md is the guide.

async with cepheid.connect("pulsar://localhost:6650") as client:
    async with client.producer("greetings") as producer:
        await producer.send(b"hello")
"""

from cepheid.client import Client, connect
from cepheid.consumer import Consumer, DeadLetters
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
    UsageError,
    WindowFullError,
)
from cepheid.message import Message
from cepheid.message_id import EARLIEST, LATEST, MessageId
from cepheid.producer import Producer
from cepheid.reader import Reader
from cepheid.record_types import Float32, Int32
from cepheid.schemas import AvroSchema, BytesSchema, JsonSchema, Schema, StringSchema, TopicSchema
from cepheid.topic_consumer import NackBackoff
from cepheid_security.oauth2 import ClientCredentials

__all__ = [
    "EARLIEST",
    "LATEST",
    "AvroSchema",
    "BusyError",
    "BytesSchema",
    "Client",
    "ClientCredentials",
    "ClosedError",
    "ConflictError",
    "ConnectError",
    "Consumer",
    "DeadLetters",
    "Error",
    "FencedError",
    "Float32",
    "Int32",
    "JsonSchema",
    "Message",
    "MessageId",
    "MessageTooLargeError",
    "MissingExtraError",
    "NackBackoff",
    "NotAllowedError",
    "NotFoundError",
    "PreconditionError",
    "Producer",
    "QuotaError",
    "Reader",
    "RefusedError",
    "Schema",
    "SchemaError",
    "SendFailedError",
    "StringSchema",
    "TerminatedError",
    "TimedOutError",
    "TopicSchema",
    "UnreadableMessageError",
    "UsageError",
    "WindowFullError",
    "connect",
]
