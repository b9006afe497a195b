"""A thousand subscriptions on one topic: how long does an entry take to reach all of them?"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks import load
from benchmarks.raw_client import Connection, open_connection, open_publisher
from benchmarks.report import latency_figures, print_line
from benchmarks.server import Server, add_arguments
from cepheid_wire import encode_body, parse_command
from cepheid_wire import pulsar_api_pb2 as pb

CONNECTIONS = 10
PERMITS = 1000
ACK_EVERY = 10


class Subscribers:
    """Many consumers on one connection, each on a subscription of its own, with grouped cumulative acknowledgements."""

    def __init__(self, connection: Connection, arrivals: load.Arrivals) -> None:
        self._connection = connection
        self._received: dict[int, int] = {}
        self._arrivals = arrivals
        connection.on_frames = self._on_frames

    async def subscribe(self, topic: str, consumer_id: int) -> None:
        command = pb.CommandSubscribe(topic=topic, subType=pb.CommandSubscribe.Exclusive, consumer_id=consumer_id)
        command.subscription, command.consumer_name = f"bench-{consumer_id}", "bench"
        await self._connection.ask(command)
        self._received[consumer_id] = consumer_id  # so that not all acknowledge the same entry: clients' timers have phases, too
        self._connection.write(encode_body(pb.CommandFlow(consumer_id=consumer_id, messagePermits=PERMITS)))

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        self._arrivals.on_arrived(len(frames))
        received = self._received
        for command, _ in frames:
            consumer_id = _consumer_id(command)
            received[consumer_id] += 1
            if received[consumer_id] % ACK_EVERY == 0:
                message = parse_command(command).message
                ids = [pb.MessageIdData(ledgerId=message.message_id.ledgerId, entryId=message.message_id.entryId)]
                ack = pb.CommandAck(consumer_id=message.consumer_id, ack_type=pb.CommandAck.Cumulative, message_id=ids)
                flow = pb.CommandFlow(consumer_id=message.consumer_id, messagePermits=ACK_EVERY)
                self._connection.write(encode_body(ack) + encode_body(flow))


def _consumer_id(command: bytes) -> int:
    """A MESSAGE's first field, read by hand: the whole command is parsed only when it is acknowledged."""
    start = 5  # behind the type, tag and length of the body (it is short), and tag 1
    low = command[start]
    return low if low < 128 else low & 127 | command[start + 1] << 7


class FanOut:
    """Deliveries of every entry to every subscription, as one stream: the n-th delivery is due with entry n // subscriptions."""

    def __init__(self, sender: load.PacedSender, subscriptions: int) -> None:
        self._sender = sender
        self._subscriptions = subscriptions
        self.entries = sender.entries * subscriptions

    def due_at(self, index: int) -> float:
        return self._sender.due_at(index // self._subscriptions)


async def fan_out(server: Server, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Latencies, and the server's processor time per delivery in seconds."""
    topic = server.topic("subscriptions")
    producing = await open_connection(server.url, topic)
    publisher = await open_publisher(producing, topic, bytes(arguments.entry_bytes))
    arrivals = load.Arrivals()
    connections = [await open_connection(server.url, topic) for _ in range(CONNECTIONS)]
    subscribers = [Subscribers(connection, arrivals) for connection in connections]
    for number in range(arguments.subscriptions):
        await subscribers[number % CONNECTIONS].subscribe(topic, number)
    warmup_s = 1.0
    sender = load.PacedSender(producing, publisher, arguments.rate, warmup_s + arguments.seconds)
    everything = FanOut(sender, arguments.subscriptions)
    failed = asyncio.gather(producing.failed, *(connection.failed for connection in connections))
    cpu_s = server.cpu_s()
    sender.start()
    while arrivals.count < everything.entries:
        await load.run_unless_failed(failed, 0.05)
        if sender.error is not None:
            raise sender.error
    cpu_s = server.cpu_s() - cpu_s
    for connection in (producing, *connections):
        connection.close()
    await asyncio.gather(failed, return_exceptions=True)
    latencies_s = arrivals.latencies_s(everything, skip=int(arguments.rate * warmup_s) * arguments.subscriptions)
    return latencies_s, cpu_s / everything.entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=100.0, help="entries a second, evenly spaced")
    parser.add_argument("--subscriptions", type=int, default=1000)
    parser.add_argument("--entry-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        latencies_s, cpu_s = load.run(fan_out(server, arguments))
        print_line(
            "many_subscriptions",
            figures={
                **latency_figures(latencies_s),
                "deliveries": len(latencies_s),
                "server_cpu_us_per_delivery": round(1e6 * cpu_s, 2),
            },
            load={
                "entries_per_s": arguments.rate,
                "subscriptions": f"{arguments.subscriptions} Exclusive, a consumer each, on {CONNECTIONS} connections",
                "acknowledgements": f"cumulative, every {ACK_EVERY}",
                "entry_bytes": arguments.entry_bytes,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
