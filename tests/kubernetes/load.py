"""Traffic of the official client on one topic, and what it noticed: errors, lost messages, the longest wait.

    python -m tests.kubernetes.load --url pulsar://my-cepheid:6650 --topic persistent://public/default/t --rate 500

It publishes numbered messages and consumes them until its standard input is closed. Then it waits for what is on its way and prints
one line of JSON. Tests run it in the network of the node (`Release.load` in release.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import pulsar

DRAIN_S = 60.0
SEND_TIMEOUT_S = 30.0
"""The default of the client: a message without a receipt for longer is an error."""


class Notes:
    """What the client saw, by message number. Its methods are called by threads of the client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.received: set[int] = set()
        self.duplicates = 0
        self.errors: list[str] = []
        self.first_message_s: float | None = None
        self._began = time.monotonic()
        self._last_receipt = self._last_message = time.monotonic()
        self.longest_receipt_gap_s = self.longest_message_gap_s = 0.0

    def on_receipt(self, number: int, result: pulsar.Result) -> None:
        with self._lock:
            if result != pulsar.Result.Ok:
                self.errors.append(f"message {number}: {result}")
                return
            now = time.monotonic()
            if self.acknowledged:
                self.longest_receipt_gap_s = max(self.longest_receipt_gap_s, now - self._last_receipt)
            self._last_receipt = now
            self.acknowledged.add(number)

    def on_message(self, number: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self.first_message_s is None:
                self.first_message_s = now - self._began
            else:
                self.longest_message_gap_s = max(self.longest_message_gap_s, now - self._last_message)
            self._last_message = now
            self.duplicates += number in self.received
            self.received.add(number)

    def on_error(self, what: str) -> None:
        with self._lock:
            self.errors.append(what)

    def is_complete(self) -> bool:
        with self._lock:
            return len(self.acknowledged) + len(self.errors) >= self.sent and self.acknowledged <= self.received

    def report(self) -> dict[str, object]:
        with self._lock:
            return {
                "sent": self.sent,
                "acknowledged": len(self.acknowledged),
                "received": len(self.received),
                "lost": len(self.acknowledged - self.received),
                "duplicates": self.duplicates,
                "errors": self.errors[:10],
                "error_count": len(self.errors),
                "first_message_s": round(self.first_message_s or 0.0, 2),
                "longest_receipt_gap_s": round(self.longest_receipt_gap_s, 2),
                "longest_message_gap_s": round(self.longest_message_gap_s, 2),
                "seconds": round(time.monotonic() - self._began, 1),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=float, default=500.0, help="messages per second")
    parser.add_argument("--count", type=int, help="end after so many messages, whatever standard input does")
    parser.add_argument("--send-timeout", type=float, default=SEND_TIMEOUT_S, help="seconds (default: %(default)s)")
    parser.add_argument("--token", help="token of the client")
    parser.add_argument("--ca", help="file with the certificate of the CA, for pulsar+ssl")
    options = parser.parse_args()
    security: dict[str, object] = {"authentication": pulsar.AuthenticationToken(options.token)} if options.token else {}
    if options.ca:
        security["tls_trust_certs_file_path"] = options.ca
    stop = threading.Event()
    if options.count is None:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), name="until-stdin-closes", daemon=True).start()
    notes = Notes()
    client = pulsar.Client(options.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, "/dev/stderr"), **security)
    consumer = client.subscribe(options.topic, "load")
    producer = client.create_producer(
        options.topic, send_timeout_millis=int(options.send_timeout * 1000), block_if_queue_full=True, max_pending_messages=50_000
    )
    done = threading.Event()
    consuming = threading.Thread(target=consume, args=(consumer, notes, done), name="consume")
    consuming.start()
    publish(producer, notes, options.rate, options.count, stop)
    deadline = time.monotonic() + DRAIN_S
    while not notes.is_complete() and time.monotonic() < deadline:
        time.sleep(0.05)
    done.set()
    consuming.join()
    print(json.dumps(notes.report()), flush=True)
    client.close()
    return 0


def publish(producer: pulsar.Producer, notes: Notes, rate_per_s: float, count: int | None, stop: threading.Event) -> None:
    began = time.monotonic()
    while not stop.is_set() and (count is None or notes.sent < count):
        due = int((time.monotonic() - began) * rate_per_s) + 1
        for number in range(notes.sent, due if count is None else min(due, count)):
            notes.sent = number + 1
            producer.send_async(str(number).encode(), lambda result, _, number=number: notes.on_receipt(number, result))
        time.sleep(0.005)
    try:
        producer.flush()
    except pulsar.PulsarException as error:
        notes.on_error(f"flush: {error}")


def consume(consumer: pulsar.Consumer, notes: Notes, done: threading.Event) -> None:
    while not done.is_set():
        try:
            message = consumer.receive(timeout_millis=500)
        except pulsar.Timeout:
            continue
        except pulsar.PulsarException as error:
            notes.on_error(f"receive: {error}")
            return
        notes.on_message(int(message.data()))
        consumer.acknowledge(message)


if __name__ == "__main__":
    sys.exit(main())
