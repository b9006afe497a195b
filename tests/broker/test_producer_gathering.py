"""A producer's groups: what comes while an append is under way travels together, and every answer keeps its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from cepheid_broker.errors import BrokerError, ServiceNotReadyError
from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_broker.publishing.producer import Producer, ProducerState
from cepheid_broker.publishing.unanswered_sends import GATHER_BYTES
from cepheid_broker.traffic import Traffic
from cepheid_metadata import Position
from cepheid_ports.refusal_log import RefusalLog
from cepheid_wire import CommandType, FrameSplitter, SendCommand, parse_command
from tests.broker.scripted_client import message
from tests.support import run_async


class Appends:
    """Topic, peer and owner of one producer: holds appends until the test answers them, notes the frames written."""

    entry_ids_rise = True

    def __init__(self) -> None:
        self.admission = self
        self.policies = TopicPolicies()
        self.deduplication = None
        self.entry_ids_rise = True
        self.groups: list[int] = []  # entries of each append
        self.waiting: list[tuple[int, Callable[[Any, int], None]]] = []
        self.published = Traffic()
        self.chunks = Traffic()
        self.name = "t"
        self.address = self.client_version = ""
        self.window = SimpleNamespace(taken=0, take=self._take, give_back=lambda size: self._take(-size))
        self._splitter = FrameSplitter(1 << 24)
        self.frames: list[tuple[str, int]] = []
        self._stored = 0
        self.settled = 0
        self.closed_by_broker = 0

    def _take(self, size_bytes: int) -> None:
        self.window.taken += size_bytes

    def publish(self, payloads: Sequence[Any], on_done: Callable[[Any, int], None], messages: Sequence[int]) -> None:
        self.groups.append(len(payloads))
        self.waiting.append((len(payloads), on_done))

    def write(self, frames: bytes) -> None:
        for frame in self._splitter.feed(frames):
            body = parse_command(frame.command)
            receipt = frame.type == CommandType.SEND_RECEIPT
            answer = body.send_receipt if receipt else body.send_error
            self.frames.append(("receipt" if receipt else "error", answer.sequence_id))

    def leave(self, _producer: Producer) -> None: ...

    def on_admitted(self, _producer: Producer) -> None: ...

    def on_waiting(self, _producer: Producer) -> None: ...

    def on_refused(self, _producer: Producer, _error: BrokerError) -> None: ...

    def on_closed_by_broker(self, _producer: Producer) -> None:
        self.closed_by_broker += 1

    def answer(self, error: ServiceNotReadyError | None = None) -> None:
        count, on_done = self.waiting.pop(0)
        on_done(error or Position(1, self._stored), count)
        self._stored += count

    def producer(self) -> Producer:
        producer = Producer(self, self, 0, "p", owner=self, refusals=RefusalLog())  # type: ignore[arg-type]
        producer.on_admitted(None)
        return producer


def send(producer: Producer, sequence_id: int, tail: bytes | None = None) -> None:
    tail = message(sequence_id) if tail is None else tail
    producer.take(SendCommand(0, sequence_id, None, None, False, None, None, False), memoryview(tail))
    producer.flush()


def test_what_comes_while_an_append_is_under_way_travels_together() -> None:
    world = Appends()
    producer = world.producer()
    for sequence_id in range(5):
        send(producer, sequence_id)
    assert world.groups == [1]
    assert producer.pending_entries == 5
    world.answer()
    assert world.groups == [1, 4]
    world.answer()
    assert world.frames == [("receipt", sequence_id) for sequence_id in range(5)]
    assert producer.pending_entries == world.window.taken == 0


def test_large_entries_do_not_wait_for_each_other() -> None:
    world = Appends()
    producer = world.producer()
    for sequence_id in range(3):
        send(producer, sequence_id, message(sequence_id, bytes(GATHER_BYTES)))
    assert world.groups == [1, 1, 1]


def test_a_bad_checksum_among_gathered_sends_is_answered_in_its_turn() -> None:
    async def main() -> Appends:
        world = Appends()
        producer = world.producer()
        damaged = bytearray(message(2))
        damaged[-1] ^= 1
        send(producer, 0)
        send(producer, 1)
        send(producer, 2, bytes(damaged))
        send(producer, 3)
        while world.waiting:
            world.answer()
        return world

    assert run_async(main()).frames == [("receipt", 0), ("receipt", 1), ("error", 2), ("receipt", 3)]


async def test_what_waits_behind_an_append_takes_the_window_too() -> None:
    """Thousands of producers of one connection may gather 128 KiB each while the storage is slow."""
    for end in (Producer.detach, Appends.answer):
        world = Appends()
        producer = world.producer()
        send(producer, 0)
        send(producer, 1, message(1, bytes(50_000)))
        assert world.groups == [1]
        assert 50_000 < world.window.taken < 51_000
        damaged = bytearray(message(2))
        damaged[-1] ^= 1
        for _ in range(1000):  # each has an answer, which waits for its turn
            send(producer, 2, bytes(damaged))
        assert world.window.taken > 100_000
        assert producer.traffic.size_bytes == 0
        end(producer if end is Producer.detach else world)
        while world.waiting:
            world.answer()
        assert world.window.taken == 0
        assert producer.traffic.size_bytes == (0 if end is Producer.detach else len(message(0)) + len(message(1, bytes(50_000))))


def test_closing_stores_and_answers_what_was_gathered() -> None:
    world = Appends()
    producer = world.producer()
    send(producer, 0)
    send(producer, 1)

    def on_settled() -> None:
        world.settled += 1

    producer.close_when_settled(on_settled)
    send(producer, 2)  # came too late
    world.answer()
    assert world.settled == 0
    world.answer()
    assert world.settled == 1
    assert world.frames == [("receipt", 0), ("receipt", 1)]


def test_after_a_failed_append_what_was_gathered_is_never_stored() -> None:
    world = Appends()
    producer = world.producer()
    send(producer, 0)
    send(producer, 1)
    world.answer(ServiceNotReadyError("the ledger failed"))
    assert world.groups == [1]
    assert world.frames == []
    assert producer.state is ProducerState.CLOSED
    assert world.closed_by_broker == 1
    assert world.window.taken == 0


def test_what_is_under_way_before_a_refused_append_is_answered_and_nothing_behind_it() -> None:
    """A topic that is terminated, or has too much to store, refuses the later append before the earlier one is done."""
    world = Appends()
    producer = world.producer()
    send(producer, 0)
    for sequence_id in (1, 2):
        send(producer, sequence_id, message(sequence_id, bytes(GATHER_BYTES)))
    send(producer, 3)
    assert world.groups == [1, 1, 1]
    for _ in range(2):
        count, on_done = world.waiting.pop(1)
        on_done(ServiceNotReadyError("refused"), count)
    assert producer.state is ProducerState.CLOSING
    send(producer, 4)
    world.answer()
    assert world.frames == [("receipt", 0)]
    assert world.groups == [1, 1, 1]
    assert producer.state is ProducerState.CLOSED
    assert (world.closed_by_broker, world.window.taken) == (1, 0)


def test_a_stopped_producer_that_is_admitted_late_stays_stopped() -> None:
    """It waited, and a new incarnation is about to take its place."""
    world = Appends()
    producer = world.producer()
    producer.stop()
    producer.on_admitted(1)
    send(producer, 0)
    assert producer.state is ProducerState.CLOSED
    assert world.groups == []
