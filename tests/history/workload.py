"""Producers and consumers of Apache Pulsar's official client against any server, at random, each doing what applications do.

    publish and consume while breaking things ──► stop producers ──► drain every subscription ──► read the topic (audit) ──► judge
A random seed decides what is asked for; threads and the network decide the rest. A conductor says how long, and breaks things
meanwhile: by the clock with a `breaker` that restarts the server, or as somebody outside says (told.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar

from tests.history.events import Event, Position
from tests.history.recorder import Recorder

TYPES: dict[str, Any] = {
    "Exclusive": pulsar.ConsumerType.Exclusive,
    "Shared": pulsar.ConsumerType.Shared,
    "Failover": pulsar.ConsumerType.Failover,
    "Key_Shared": pulsar.ConsumerType.KeyShared,
}
SEND_LEAST = 5
STOP_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    url: str
    """Several brokers are separated by commas: pulsar://a:6650,b:6650."""
    topic: str
    seed: int = 0
    seconds: float = 10.0
    producers: int = 2
    subscriptions: tuple[str, ...] = ("Exclusive", "Shared", "Failover", "Key_Shared")
    """A subscription of each type."""
    consumers: int = 3
    keys: int = 10
    messages_per_s: int = 200
    batching: bool = False
    """With batches a part of one is acknowledged alone, and keys travel in batches of their own."""
    fixed_names: bool = True
    """Producers keep their names, as deduplication needs."""
    seeks: bool = False
    breaks: tuple[float, ...] = ()
    """After so many seconds the breaker is called."""
    quiet_s: float = 3.0
    """A drained subscription delivers nothing for so long."""
    patient: bool = False
    """A consumer that cannot be opened or closed now is no failure: another one is opened later."""
    options: dict[str, Any] = field(default_factory=dict)


Conductor = Callable[[Recorder, Sequence[BaseException]], None]
"""Returns when no more shall be published. It is given the notes, and what failed so far."""


def run(plan: Plan, breaker: Callable[[], None] | None = None) -> list[Event]:
    """The history. Raises whatever a client raises that is no failed send."""

    def by_the_clock(recorder: Recorder, _: Sequence[BaseException]) -> None:
        started_s = time.monotonic()
        for at_s in (*plan.breaks, plan.seconds):
            time.sleep(max(0.0, started_s + at_s - time.monotonic()))
            if at_s in plan.breaks and breaker is not None:
                recorder.note("restart")
                breaker()
                recorder.note("restarted")

    return run_conducted(plan, by_the_clock)


def run_conducted(plan: Plan, conduct: Conductor) -> list[Event]:
    """The same, with somebody else who says when it is enough."""
    return _Run(plan, conduct).run()


class _Run:
    def __init__(self, plan: Plan, conduct: Conductor) -> None:
        self._plan = plan
        self._conduct = conduct
        self._recorder = Recorder()
        self._stop_producing = threading.Event()
        self._stop_consuming = threading.Event()
        self._failures: list[BaseException] = []
        self._client = pulsar.Client(
            plan.url, operation_timeout_seconds=30, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), io_threads=2
        )

    def run(self) -> list[Event]:
        plan = self._plan
        for kind in plan.subscriptions:  # before the first message: each owes the whole topic
            self._subscribe(kind, "first").close()
        threads = [self._thread(self._produce, index) for index in range(plan.producers)]
        consumers = []
        for kind in plan.subscriptions:
            count = 1 if kind == "Exclusive" else plan.consumers
            consumers += [self._thread(self._consume, kind, index) for index in range(count)]
        self._conduct(self._recorder, self._failures)
        self._stop_producing.set()
        self._join(threads)
        self._stop_consuming.set()
        self._join(consumers)
        self._join([self._thread(self._drain, kind) for kind in plan.subscriptions])
        self._audit()
        self._client.close()
        if self._failures:
            raise self._failures[0]
        return self._recorder.events

    def _thread(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as failure:
                self._failures.append(failure)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(STOP_WAIT_S)
            if thread.is_alive():
                raise AssertionError(f"a client did not end within {STOP_WAIT_S} s: {self._failures}")

    # Producers

    def _produce(self, index: int) -> None:
        plan, note, rng = self._plan, self._recorder.note, random.Random(f"{self._plan.seed}/producer/{index}")
        name = f"producer-{index}"
        extra = {"producer_name": name} if plan.fixed_names else {}
        batching = {"batching_enabled": True, "batching_type": pulsar.BatchingType.KeyBased} if plan.batching else {}
        producer = self._client.create_producer(
            plan.topic, block_if_queue_full=True, send_timeout_millis=0, **extra, **batching, **plan.options
        )
        number = 0
        pause_s = plan.producers / plan.messages_per_s
        while not self._stop_producing.is_set() or number < SEND_LEAST:
            uid, key = f"{name}/{number}", f"key-{rng.randrange(plan.keys)}"
            note("send", name, uid=uid, key=key, sequence_id=number)
            producer.send_async(uid.encode(), self._on_receipt(name, uid), partition_key=key, sequence_id=number)
            number += 1
            time.sleep(rng.random() * 2 * pause_s)
        producer.flush()
        producer.close()

    def _on_receipt(self, name: str, uid: str) -> Callable[[Any, Any], None]:
        def on_receipt(result: Any, message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                self._recorder.note("sent", name, uid=uid, position=_position(message_id))
            else:
                self._recorder.note("sent", name, uid=uid, error=str(result))

        return on_receipt

    # Consumers

    def _subscribe(self, kind: str, name: str, receiver_queue_size: int = 1000) -> pulsar.Consumer:
        return self._client.subscribe(
            self._plan.topic,
            f"sub-{kind}",
            TYPES[kind],
            consumer_name=name,
            initial_position=pulsar.InitialPosition.Earliest,
            negative_ack_redelivery_delay_ms=100,
            receiver_queue_size=receiver_queue_size,
            batch_index_ack_enabled=True,
            start_message_id_inclusive=True,
        )

    def _consume(self, kind: str, index: int) -> None:
        rng, life = random.Random(f"{self._plan.seed}/{kind}/{index}"), 0
        while not self._stop_consuming.is_set():
            life += 1
            try:
                self._one_life(kind, f"{kind}-{index}-{life}", rng)
            except pulsar.PulsarException:
                if not self._plan.patient:
                    raise
            time.sleep(rng.random() * 0.2)

    def _one_life(self, kind: str, name: str, rng: random.Random) -> None:
        note, subscription = self._recorder.note, f"sub-{kind}"
        note("open", name, subscription=subscription, type=kind)
        try:
            consumer = self._subscribe(kind, name, rng.choice([1, 10, 1000]))
        except pulsar.PulsarException:
            note("close", name, subscription=subscription)
            raise
        note("opened", name, subscription=subscription)
        ends_s = time.monotonic() + rng.uniform(0.5, 4.0)
        # On an ordered subscription everything comes again with each: few, so that acknowledged ones are seen to stay away.
        nacks = 0.15 if kind in ("Shared", "Key_Shared") else 0.02
        while time.monotonic() < ends_s and not self._stop_consuming.is_set():
            message = _receive(consumer, 200)
            if message is None:
                continue
            self._note_received(name, subscription, message)
            self._decide(kind, name, consumer, message, nacks, rng)
        note("close", name, subscription=subscription)  # before it is done: what it holds may go to others at once
        consumer.close()

    def _decide(
        self, kind: str, name: str, consumer: pulsar.Consumer, message: pulsar.Message, nacks: float, rng: random.Random
    ) -> None:
        subscription, position = f"sub-{kind}", _position(message.message_id())
        ordered = kind in ("Exclusive", "Failover")
        choice = rng.random()
        if self._plan.seeks and kind == "Exclusive" and choice < 0.005:
            self._seek(name, subscription, consumer, message)
        elif choice < 0.7:
            cumulative = ordered and choice < 0.1
            self._recorder.note("ack", name, subscription=subscription, position=position, cumulative=cumulative)
            try:
                (consumer.acknowledge_cumulative if cumulative else consumer.acknowledge)(message)
            except pulsar.PulsarException:
                pass  # it is unknown whether it arrived; the note says that it was said
        elif choice < 0.7 + nacks:
            self._recorder.note("nack", name, subscription=subscription, position=position)
            consumer.negative_acknowledge(message)

    def _seek(self, name: str, subscription: str, consumer: pulsar.Consumer, message: pulsar.Message) -> None:
        consumer.seek(message.message_id())
        ledger_id, entry_id, batch_index = _position(message.message_id())
        self._recorder.note("sought", name, subscription=subscription, position=(ledger_id, entry_id, batch_index))

    def _drain(self, kind: str) -> None:
        """One consumer takes and acknowledges everything that is left."""
        name, subscription = f"{kind}-last", f"sub-{kind}"
        self._recorder.note("open", name, subscription=subscription, type=kind)
        consumer = self._subscribe(kind, name)
        self._recorder.note("opened", name, subscription=subscription)
        quiet_since_s = time.monotonic()
        while time.monotonic() - quiet_since_s < self._plan.quiet_s:
            message = _receive(consumer, 200)
            if message is not None:
                self._note_received(name, subscription, message)
                self._recorder.note("ack", name, subscription=subscription, position=_position(message.message_id()))
                consumer.acknowledge(message)
                quiet_since_s = time.monotonic()
        self._recorder.note("close", name, subscription=subscription)
        consumer.close()

    def _note_received(self, name: str, subscription: str, message: pulsar.Message) -> None:
        self._recorder.note(
            "received",
            name,
            subscription=subscription,
            uid=message.data().decode(),
            key=message.partition_key(),
            position=_position(message.message_id()),
            redelivery_count=message.redelivery_count(),
        )

    def _audit(self) -> None:
        reader = self._client.create_reader(self._plan.topic, pulsar.MessageId.earliest)
        while reader.has_message_available():
            message = reader.read_next(10_000)
            uid, key = message.data().decode(), message.partition_key()
            self._recorder.note("audit", uid=uid, key=key, position=_position(message.message_id()))
        reader.close()


def _receive(consumer: pulsar.Consumer, timeout_ms: int) -> pulsar.Message | None:
    try:
        return consumer.receive(timeout_ms)
    except pulsar.Timeout:
        return None


def _position(message_id: Any) -> Position:
    return (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
