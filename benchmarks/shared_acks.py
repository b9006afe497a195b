"""How many entries a second does a Shared subscription deliver and take acknowledgements for, each by itself?

publisher ──window, never more than BEHIND ahead──► server ──► 10 consumers, each acknowledges every entry by its own id
"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks import load
from benchmarks.raw_client import Connection, Publisher, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments
from cepheid_wire import encode_body, parse_command
from cepheid_wire import pulsar_api_pb2 as pb

BEHIND = 5000
"""Entries published and not acknowledged yet: consumers always have something to take, and never fall out of the tail."""


class Acknowledger:
    """A consumer that acknowledges every entry individually: the ids of one received piece travel together, as clients do."""

    def __init__(self, connection: Connection, permits: int) -> None:
        self._connection = connection
        self._permits = permits
        self._to_return = 0
        self.acknowledged = 0
        self.redelivered = 0
        connection.on_frames = self._on_frames

    def flow(self, permits: int) -> None:
        self._connection.write(encode_body(pb.CommandFlow(consumer_id=1, messagePermits=permits)))

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        messages = [parse_command(command).message for command, _ in frames]
        self.redelivered += sum(message.redelivery_count > 0 for message in messages)
        ids = [pb.MessageIdData(ledgerId=message.message_id.ledgerId, entryId=message.message_id.entryId) for message in messages]
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=ids)
        self._connection.write(encode_body(ack))
        self.acknowledged += len(ids)
        self._to_return += len(ids)
        if self._to_return >= self._permits // 2:
            self.flow(self._to_return)
            self._to_return = 0


class Publishing:
    """Keeps `window` entries on their way, and stops while consumers are too far behind."""

    def __init__(self, connection: Connection, publisher: Publisher, consumers: list[Acknowledger], window: int) -> None:
        self._connection = connection
        self._publisher = publisher
        self._consumers = consumers
        self._window = window

    async def run(self) -> None:
        while True:
            acknowledged = sum(consumer.acknowledged for consumer in self._consumers)
            room = min(
                self._window - (self._publisher.sent - self._connection.receipts), BEHIND - (self._publisher.sent - acknowledged)
            )
            if room > 0:
                self._publisher.send(room)
            await asyncio.sleep(0.001)


async def deliver(server: Server, arguments: argparse.Namespace) -> tuple[load.Measured, int]:
    topic = server.topic("shared-acks")
    producing = await open_connection(server.url, topic)
    publisher = await open_publisher(producing, topic, bytes(arguments.entry_bytes))
    consumers = []
    connections = [producing]
    for number in range(arguments.consumers):
        connection = await open_connection(server.url, topic)
        connections.append(connection)
        command = pb.CommandSubscribe(topic=topic, subscription="bench", subType=pb.CommandSubscribe.Shared, consumer_id=1)
        command.consumer_name = f"bench-{number}"
        command.initialPosition = pb.CommandSubscribe.Earliest
        await connection.ask(command)
        consumers.append(Acknowledger(connection, 1000))
    for consumer in consumers:
        consumer.flow(1000)
    failed = asyncio.gather(*(connection.failed for connection in connections))
    publishing = asyncio.create_task(Publishing(producing, publisher, consumers, 1000).run())
    measured = await load.measure(
        server,
        lambda: sum(consumer.acknowledged for consumer in consumers),
        warmup_s=1.0,
        seconds=arguments.seconds,
        failed=failed,
    )
    publishing.cancel()
    for connection in connections:
        connection.close()
    await asyncio.gather(failed, publishing, return_exceptions=True)
    return measured, sum(consumer.redelivered for consumer in consumers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--consumers", type=int, default=10)
    parser.add_argument("--entry-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        measured, redelivered = load.run(deliver(server, arguments))
        print_line(
            "shared_acks",
            figures={"entries_per_s": round(measured.rate_per_s), "redelivered": redelivered, **measured.cores()},
            load={
                "entry_bytes": arguments.entry_bytes,
                "consumers": f"{arguments.consumers} Shared on connections of their own, 1000 permits each",
                "acknowledgements": "individual, those of one received piece in one command",
                "producer": f"1, unbatched, at most {BEHIND} ahead of the acknowledgements",
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
