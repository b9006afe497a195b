"""A hundred thousand holes in one subscription's acknowledgements: how long does saving them take, and finding them after SIGKILL?

Every second entry is acknowledged. Saved: from the last acknowledgement, which asks for an answer, until it comes. Recovered: from
the moment the new process listens to the first delivery. Every entry that was acknowledged must stay away, every other one come.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request

from benchmarks import load
from benchmarks.raw_client import Connection, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments
from cepheid_wire import encode_body, parse_command
from cepheid_wire import pulsar_api_pb2 as pb

PART = 1000  # ids in one command, as clients send at most

Place = tuple[int, int]


async def subscribe(connection: Connection, topic: str) -> None:
    command = pb.CommandSubscribe(topic=topic, subscription="holes", subType=pb.CommandSubscribe.Shared, consumer_id=1)
    command.initialPosition = pb.CommandSubscribe.Earliest
    await connection.ask(command)


async def receive(connection: Connection, entries: int, places: list[Place]) -> None:
    """So many entries; asks for them as it goes."""

    def on_frames(frames: list[tuple[bytes, bytes]]) -> None:
        for command, _ in frames:
            message_id = parse_command(command).message.message_id
            places.append((message_id.ledgerId, message_id.entryId))

    connection.on_frames = on_frames
    connection.write(encode_body(pb.CommandFlow(consumer_id=1, messagePermits=entries)))
    deadline = time.perf_counter() + 60
    while len(places) < entries and time.perf_counter() < deadline:
        await load.run_unless_failed(connection.failed, 0.001)


def acknowledge(connection: Connection, places: list[Place]) -> None:
    ids = [pb.MessageIdData(ledgerId=ledger_id, entryId=entry_id) for ledger_id, entry_id in places]
    connection.write(encode_body(pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=ids)))


def allow_unacknowledged(server: Server) -> None:
    """One consumer holds them all: without limits."""
    assert server.admin_url is not None
    server.metric("none")  # the admin API opens a moment after the protocol's port
    for limit in ("maxUnackedMessagesPerConsumer", "maxUnackedMessagesPerSubscription"):
        url = f"{server.admin_url}/admin/v2/namespaces/public/default/{limit}"
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data=b"0", headers=headers, method="POST"), timeout=10):
            pass


async def make_holes(server: Server, topic: str, holes: int) -> tuple[float, list[Place], list[Place]]:
    connection = await open_connection(server.url, topic)
    await subscribe(connection, topic)
    publisher = await open_publisher(connection, topic, b"x")
    await load.publish_all(connection, publisher, 2 * holes, 1000)
    places: list[Place] = []
    await receive(connection, 2 * holes, places)
    places.sort()
    acked, kept = places[1::2], places[0::2]
    for start in range(0, len(acked) - 1, PART):
        acknowledge(connection, acked[start : start + PART])
    last = pb.MessageIdData(ledgerId=acked[-1][0], entryId=acked[-1][1])
    started = time.perf_counter()
    await connection.ask(pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=[last]))
    saved_s = time.perf_counter() - started
    connection.close()
    return saved_s, acked, kept


async def first_delivery(server: Server, topic: str, started: float) -> tuple[float, Connection, list[Place]]:
    connection = await open_connection(server.url, topic)
    await subscribe(connection, topic)
    places: list[Place] = []
    await receive(connection, 1, places)
    return time.perf_counter() - started, connection, places


async def deliver_rest(server: Server, topic: str, started: float, expected: int) -> tuple[float, list[Place]]:
    recovered_s, connection, places = await first_delivery(server, topic, started)
    await receive(connection, expected, places)
    await asyncio.sleep(0.5)  # what should have stayed away would arrive now
    connection.close()
    return recovered_s, places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--holes", type=int, default=100_000)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("this question needs a server of its own: it is killed")
    with Server(arguments) as server:
        topic = server.topic("ack-holes")
        allow_unacknowledged(server)
        saved_s, acked, kept = load.run(make_holes(server, topic, arguments.holes))
        server.kill()
        process_started = time.perf_counter()
        server.start()
        started = time.perf_counter()
        recovered_s, places = load.run(deliver_rest(server, topic, started, len(kept)))
        print_line(
            "ack_holes",
            figures={
                "saved_s": round(saved_s, 3),
                "recovered_s": round(recovered_s, 3),
                "process_start_s": round(started - process_started, 3),
                "acknowledged_again": len(set(places) & set(acked)),
                "missing": len(set(kept) - set(places)),
            },
            load={"holes": len(acked), "entries": len(acked) + len(kept), "acknowledgements": f"individual, {PART} ids a command"},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
