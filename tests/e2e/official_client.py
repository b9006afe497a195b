"""Short ways to use the official client in tests."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pulsar

TIMEOUT_MS = 30_000
OPERATION_TIMEOUT_S = 30
AT_ONCE_S = 25.0
"""What takes less did not wait for the client's timeout, whatever the machine does besides."""
SAVED_S = 4.0
"""After so long what the broker shows as acknowledged is saved too: every 500 ms, and nothing of it is seen from outside."""
POLL_S = 0.005
EARLIEST = pulsar.InitialPosition.Earliest


@contextmanager
def client_of(url: str, **options: Any) -> Iterator[pulsar.Client]:
    options = {"operation_timeout_seconds": OPERATION_TIMEOUT_S, **options}
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), **options)
    try:
        yield client
    finally:
        client.close()


def publish(client: pulsar.Client, topic: str, payloads: list[bytes], **options: Any) -> list[pulsar.MessageId]:
    """Waits for every receipt."""
    producer = client.create_producer(topic, block_if_queue_full=True, **options)
    receipts: list[pulsar.MessageId | Exception] = []

    def on_receipt(result: Any, message_id: pulsar.MessageId) -> None:
        receipts.append(message_id if result == pulsar.Result.Ok else RuntimeError(str(result)))

    for payload in payloads:
        producer.send_async(payload, on_receipt)
    producer.flush()
    producer.close()
    failures = [receipt for receipt in receipts if isinstance(receipt, Exception)]
    assert not failures, failures
    assert len(receipts) == len(payloads)
    return receipts  # type: ignore[return-value]


def receive(consumer: pulsar.Consumer, count: int, *, acknowledge: bool = True) -> list[pulsar.Message]:
    received = []
    for _ in range(count):
        message = consumer.receive(TIMEOUT_MS)
        if acknowledge:
            consumer.acknowledge(message)
        received.append(message)
    return received


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_MS / 1000) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(POLL_S)


def wait_for_backlog(admin_url: str, topic: str, messages: int, subscription: str = "s") -> None:
    """Until the broker has so many unacknowledged ones left: clients group acknowledgements before they send them."""

    def left() -> int:
        with urllib.request.urlopen(f"{admin_url}/admin/v2/persistent/public/default/{topic}/stats", timeout=60) as answer:
            return int(json.load(answer)["subscriptions"][subscription]["msgBacklog"])

    wait_for(lambda: left() == messages, f"a backlog of {messages}")


def assert_silent(consumer: Any, for_ms: int = 300) -> None:
    try:
        message = consumer.receive(for_ms)
    except pulsar.Timeout:
        return
    raise AssertionError(f"got {message.data()!r} ({message.message_id()})")


def payloads_of(messages: list[pulsar.Message]) -> list[bytes]:
    return [message.data() for message in messages]
