"""A million messages in key-based batches to Key_Shared consumers that come and go: is each key's order kept, and how fast is it?

    publisher ──► batches of one key each ──► server ──► 50 consumers: take, acknowledge, leave at random, come back
Order is judged as by rule H10 (docs/invariants.md): first deliveries of a key rise, and nothing of a key goes to a consumer while
another one, still connected, holds an earlier entry of it. Stuck: entries are owed, and nothing arrives for `STUCK_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

from benchmarks import load
from benchmarks.raw_client import Connection, batch_payload, open_connection
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments
from cepheid_wire import encode_body, encode_tail, parse_command, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb

STUCK_S = 20.0
PERMITS = 2000
WINDOW = 200  # entries that wait for their receipt
BEHIND = 2000  # entries published and not acknowledged

Place = tuple[int, int]


@dataclass(slots=True)
class Judge:
    """What has been delivered to whom, over all consumers."""

    held: dict[str, dict[Place, object]] = field(default_factory=dict)
    first_delivered: dict[str, Place] = field(default_factory=dict)
    acknowledged: set[Place] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    deliveries: int = 0
    last_progress: float = field(default_factory=time.perf_counter)

    def on_delivered(self, consumer: object, key: str, place: Place) -> None:
        self.deliveries += 1
        holders = self.held.setdefault(key, {})
        for other_place, holder in holders.items():
            if holder is not consumer and other_place <= place:
                self.violations.append(f"{place} of {key} arrived while another consumer holds {other_place}")
        last = self.first_delivered.get(key)
        if last is None or place > last:
            self.first_delivered[key] = place
        elif place not in holders and place not in self.acknowledged and last > place and not self._was_delivered(place):
            self.violations.append(f"{place} of {key} arrived first behind {last}")
        holders[place] = consumer
        self._delivered.add(place)

    _delivered: set[Place] = field(default_factory=set)

    def _was_delivered(self, place: Place) -> bool:
        return place in self._delivered

    def on_acknowledged(self, key: str, place: Place) -> None:
        self.held[key].pop(place, None)
        self.acknowledged.add(place)
        self.last_progress = time.perf_counter()

    def on_left(self, consumer: object) -> None:
        for holders in self.held.values():
            for place in [place for place, holder in holders.items() if holder is consumer]:
                del holders[place]


class Consumer:
    """One life of a consumer: from SUBSCRIBE to CLOSE_CONSUMER, or to the end of its connection."""

    def __init__(self, connection: Connection, consumer_id: int, judge: Judge, rng: random.Random) -> None:
        self._connection = connection
        self._id = consumer_id
        self._judge = judge
        self._rng = rng
        self._waiting: list[tuple[str, Place, int]] = []
        self._left = False
        connection.on_frames = self._on_frames

    async def subscribe(self, topic: str, name: str) -> None:
        command = pb.CommandSubscribe(topic=topic, subscription="bench", subType=pb.CommandSubscribe.Key_Shared)
        command.consumer_id, command.consumer_name, command.initialPosition = self._id, name, pb.CommandSubscribe.Earliest
        command.keySharedMeta.keySharedMode = pb.KeySharedMode.AUTO_SPLIT
        await self._connection.ask(command)
        self._flow(PERMITS)

    def _flow(self, permits: int) -> None:
        self._connection.write(encode_body(pb.CommandFlow(consumer_id=self._id, messagePermits=permits)))

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        for command, tail in frames:
            message = parse_command(command).message
            if self._left or message.consumer_id != self._id:
                continue
            metadata = parse_metadata(tail)
            place = (message.message_id.ledgerId, message.message_id.entryId)
            self._judge.on_delivered(self, metadata.partition_key, place)
            self._waiting.append((metadata.partition_key, place, metadata.num_messages_in_batch))
        if self._waiting and self._rng.random() < 0.9:  # else it holds them a while
            self.acknowledge()

    def acknowledge(self) -> None:
        if not self._waiting or self._left:
            return
        ids = []
        for key, place, _ in self._waiting:
            self._judge.on_acknowledged(key, place)  # before it is said: the next may arrive at once elsewhere
            ids.append(pb.MessageIdData(ledgerId=place[0], entryId=place[1]))
        self._connection.write(encode_body(pb.CommandAck(consumer_id=self._id, ack_type=pb.CommandAck.Individual, message_id=ids)))
        self._flow(sum(messages for _, _, messages in self._waiting))
        self._waiting.clear()

    async def leave(self) -> None:
        self._left = True
        self._judge.on_left(self)  # before it is said, as above
        await self._connection.ask(pb.CommandCloseConsumer(consumer_id=self._id))


class Churn:
    def __init__(self, server: Server, topic: str, judge: Judge, seed: int) -> None:
        self._server = server
        self._topic = topic
        self._judge = judge
        self._seed = seed
        self.done = False
        self.lives = 0

    async def run(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        connection = await open_connection(self._server.url, self._topic)
        consumer_id = 0
        while not self.done:
            consumer_id += 1
            self.lives += 1
            consumer = Consumer(connection, consumer_id, self._judge, rng)
            await consumer.subscribe(self._topic, f"consumer-{number}")
            ends = time.perf_counter() + rng.uniform(0.05, 0.5)
            while time.perf_counter() < ends and not self.done:
                await asyncio.sleep(0.02)
                consumer.acknowledge()
            if rng.random() < 0.5:
                await consumer.leave()
            else:
                self._judge.on_left(consumer)
                connection.on_frames = None
                connection.close()
                connection = await open_connection(self._server.url, self._topic)
        connection.close()


async def publish(server: Server, topic: str, entries: int, batch: int, message_bytes: int, keys: int, judge: Judge) -> None:
    connection = await open_connection(server.url, topic)
    name = (await connection.ask(pb.CommandProducer(topic=topic, producer_id=1))).producer_name
    payload = batch_payload(batch, message_bytes)
    rng = random.Random(0)
    for number in range(entries):
        metadata = pb.MessageMetadata(producer_name=name, sequence_id=number * batch, publish_time=1)
        metadata.num_messages_in_batch, metadata.partition_key = batch, f"key-{rng.randrange(keys)}"
        tail = encode_tail(metadata, payload)
        send = pb.BaseCommand(type=pb.BaseCommand.SEND)
        send.send.producer_id, send.send.sequence_id, send.send.num_messages = 1, number * batch, batch
        command = send.SerializeToString()
        sizes = (4 + len(command) + len(tail)).to_bytes(4, "big") + len(command).to_bytes(4, "big")
        connection.write(sizes + command + tail)
        while number - connection.receipts > WINDOW or number - len(judge.acknowledged) > BEHIND:
            await load.run_unless_failed(connection.failed, 0.002)
    while connection.receipts < entries:
        await load.run_unless_failed(connection.failed, 0.01)
    connection.close()


async def measure(server: Server, arguments: argparse.Namespace) -> tuple[float, Judge, int, int]:
    topic, entries = server.topic("key-shared"), arguments.messages // arguments.batch
    judge = Judge()
    churn = Churn(server, topic, judge, arguments.seed)
    consumers = [asyncio.create_task(churn.run(number)) for number in range(arguments.consumers)]
    await asyncio.sleep(0.5)
    started = judge.last_progress = time.perf_counter()
    publishing = asyncio.create_task(
        publish(server, topic, entries, arguments.batch, arguments.message_bytes, arguments.keys, judge)
    )
    while len(judge.acknowledged) < entries and time.perf_counter() - judge.last_progress < STUCK_S:
        await asyncio.sleep(0.02)
        for task in (publishing, *consumers):
            if task.done() and task.exception() is not None:
                raise task.exception() or AssertionError
    elapsed = judge.last_progress - started
    churn.done = True
    await asyncio.gather(*consumers)
    publishing.cancel()
    return elapsed, judge, entries - len(judge.acknowledged), churn.lives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--message-bytes", type=int, default=100)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--consumers", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        elapsed, judge, stuck, lives = load.run(measure(server, arguments))
        print_line(
            "key_shared_churn",
            figures={
                "messages_per_s": round((arguments.messages - stuck * arguments.batch) / elapsed),
                "order_violations": len(judge.violations),
                "stuck_entries": stuck,
                "consumer_lives": lives,
                "deliveries": judge.deliveries,
                "examples": judge.violations[:3],
            },
            load={
                "messages": arguments.messages,
                "batch": f"{arguments.batch} messages of {arguments.message_bytes} B of one key of {arguments.keys}",
                "consumers": f"{arguments.consumers}, each 0.05 to 0.5 s at a time, half leave by closing their connection",
                "seed": arguments.seed,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
