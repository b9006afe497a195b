"""Keyword arguments for opening producers and consumers, with their types and defaults."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from cepheid.compression import Compression, compressor_of
from cepheid.consumer import DeadLetters
from cepheid.encryption import KeyReader, MessageDecryptor, MessageEncryptor, OnDecryptionFailure
from cepheid.errors import UsageError
from cepheid.message_id import EARLIEST, LATEST
from cepheid.routing import KeyHash, Routing
from cepheid.schemas import Schema
from cepheid.topic_consumer import ConsumerOptions, KeyShared, NackBackoff
from cepheid.topic_producer import ProducerOptions, SendWindow

SubscriptionType = Literal["exclusive", "shared", "failover", "key_shared"]
AccessMode = Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"]


class ProducerArguments(TypedDict, total=False):
    """Keyword arguments of `client.producer`."""

    name: str | None
    access: AccessMode
    properties: Mapping[str, str] | None
    batching: bool
    batch_by_key: bool
    batch_messages: int
    batch_bytes: int
    batch_delay_s: float
    compression: Compression
    chunking: bool
    routing: Routing
    key_hash: KeyHash
    window_messages: int
    window_bytes: int
    send_timeout_s: float
    initial_subscription: str | None
    repeatable: bool
    encryption_keys: Sequence[str]
    key_reader: KeyReader | None


class ConsumerArguments(TypedDict, total=False):
    """Keyword arguments of `client.consumer`."""

    type: SubscriptionType
    start: Literal["latest", "earliest"]
    name: str | None
    receiver_queue: int
    priority: int
    properties: Mapping[str, str] | None
    nack_backoff: NackBackoff
    ack_timeout_s: float | None
    key_shared: KeyShared | None
    dead_letters: DeadLetters | None
    retry: bool
    batch_index_acks: bool
    read_compacted: bool
    key_reader: KeyReader | None
    on_decryption_failure: OnDecryptionFailure
    encryption_keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class ProducerPlan:
    """The checked arguments of a producer."""

    schema: Schema[Any]
    options: ProducerOptions
    window: SendWindow
    routing: Routing
    key_hash: KeyHash


def plan_producer(
    schema: Schema[Any],
    *,
    name: str | None = None,
    access: AccessMode = "shared",
    properties: Mapping[str, str] | None = None,
    batching: bool = True,
    batch_by_key: bool = False,
    batch_messages: int = 1000,
    batch_bytes: int = 128 * 1024,
    batch_delay_s: float = 0.01,
    compression: Compression = "none",
    chunking: bool = False,
    routing: Routing = "round_robin",
    key_hash: KeyHash = "java_string",
    window_messages: int = 50_000,
    window_bytes: int = 64 * 1024 * 1024,
    send_timeout_s: float = 30.0,
    initial_subscription: str | None = None,
    repeatable: bool = False,
    encryption_keys: Sequence[str] = (),
    key_reader: KeyReader | None = None,
) -> ProducerPlan:
    """Check the arguments. Raises UsageError, MissingExtraError."""
    if repeatable and (window_messages < 2 * batch_messages or window_bytes < 2 * batch_bytes or batch_by_key):
        # An open batch is never sent for lack of room: there must be room for it beside one that waits for its receipt.
        raise UsageError(
            "repeatable needs a window of two batches at least, and no batch_by_key: got window_messages "
            f"{window_messages:,}, batch_messages {batch_messages:,}, window_bytes {window_bytes:,}, batch_bytes {batch_bytes:,}"
        )
    if batch_messages < 1 or batch_bytes < 1 or batch_delay_s < 0 or send_timeout_s < 0:
        raise UsageError(
            "batch_messages and batch_bytes must be 1 or more, batch_delay_s and send_timeout_s 0 or more, got "
            f"{batch_messages}, {batch_bytes}, {batch_delay_s} and {send_timeout_s}"
        )
    if bool(encryption_keys) != (key_reader is not None):
        raise UsageError("encryption_keys and key_reader are given together: the names of the keys, and what has them")
    code, compress = compressor_of(compression)
    options = ProducerOptions(
        name=name,
        access=access,
        properties=dict(properties or {}),
        schema=schema.describe(),
        batching=batching,
        batch_by_key=batch_by_key,
        batch_messages=batch_messages,
        batch_bytes=batch_bytes,
        batch_delay_s=batch_delay_s,
        compression=code,
        compress=compress,
        chunking=chunking,
        send_timeout_s=send_timeout_s,
        initial_subscription=initial_subscription,
        repeatable=repeatable,
        encryptor=None if key_reader is None else MessageEncryptor(encryption_keys, key_reader),
    )
    return ProducerPlan(schema, options, SendWindow(window_messages, window_bytes), routing, key_hash)


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """The checked arguments of a consumer."""

    options: ConsumerOptions
    dead_letters: DeadLetters | None
    retry: bool
    encryption_keys: Sequence[str] = ()
    """Names of the keys for dead letters and retries; empty: they are not encrypted."""
    key_reader: KeyReader | None = None


def plan_consumer(
    subscription: str,
    schema: Schema[Any],
    *,
    type: SubscriptionType = "exclusive",
    start: Literal["latest", "earliest"] = "latest",
    name: str | None = None,
    receiver_queue: int = 1000,
    priority: int = 0,
    properties: Mapping[str, str] | None = None,
    nack_backoff: NackBackoff | None = None,
    ack_timeout_s: float | None = None,
    key_shared: KeyShared | None = None,
    dead_letters: DeadLetters | None = None,
    retry: bool = False,
    batch_index_acks: bool = True,
    read_compacted: bool = False,
    key_reader: KeyReader | None = None,
    on_decryption_failure: OnDecryptionFailure = "fail",
    encryption_keys: Sequence[str] = (),
) -> ConsumerPlan:
    """Check the arguments. Raises UsageError, MissingExtraError."""
    if start not in ("latest", "earliest"):
        raise UsageError(f"start must be 'latest' or 'earliest', got {start!r}; to begin elsewhere, seek or open a reader")
    options = ConsumerOptions(
        subscription=subscription,
        type=type,
        schema=schema,
        name=name if name is not None else uuid.uuid4().hex[:10],
        start=EARLIEST if start == "earliest" else LATEST,
        receiver_queue=receiver_queue,
        priority=priority,
        properties=dict(properties or {}),
        batch_index_acks=batch_index_acks,
        read_compacted=read_compacted,
        nack_backoff=nack_backoff or NackBackoff(),
        ack_timeout_s=ack_timeout_s,
        key_shared=key_shared or KeyShared(),
        dead_letters_after=None if dead_letters is None else dead_letters.after,
        decryptor=MessageDecryptor(key_reader),
        on_decryption_failure=on_decryption_failure,
    )
    if not options.is_shared and (dead_letters is not None or retry):
        raise UsageError(
            f"dead_letters and retry need type='shared' or 'key_shared', got {type!r}: for the others the broker does not count "
            "deliveries"
        )
    if key_shared is not None and type != "key_shared":
        raise UsageError(f"key_shared needs type='key_shared', got {type!r}")
    publishes = dead_letters is not None or retry
    if publishes and key_reader is not None and not encryption_keys:
        raise UsageError(
            "dead_letters and retry publish what key_reader decrypted: give encryption_keys=[…], the names of the public keys with "
            "which it is encrypted again"
        )
    if encryption_keys:
        if key_reader is None or not publishes:
            raise UsageError(
                "encryption_keys of a consumer are for dead_letters and retry, and need a key_reader that has the keys"
            )
        MessageEncryptor(encryption_keys, key_reader)  # missing keys are reported now, not with the first dead letter
    return ConsumerPlan(options, dead_letters, retry, encryption_keys, key_reader if encryption_keys else None)
