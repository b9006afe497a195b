"""How fast are applications with the Python client, beside the official one on the same server? 100 B messages, batching on.

Three loads, each with both clients in turn: sends that do not wait, sends awaited by many tasks, and receiving with an
acknowledgement for each message. Rounds are interleaved, so that what else the machine does strikes both clients alike; figures are
medians, and the ratios are medians of the rounds' ratios. The official client has no asyncio interface of its own for awaited
sends: its callbacks set futures.

A fourth load is not batched: messages of 1 KB, each sent when the one before it is stored, in short turns of the clients. The
official client, with its defaults, is awaited as above, and its blocking `send` is timed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import cepheid
from benchmarks import load
from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments


@dataclass(frozen=True, slots=True)
class Cost:
    """Messages a second, and processor time of the client's process a message. The latter depends less on other work."""

    rate_per_s: float
    cpu_us: float


SEND_LIMIT = 30_000
"""Messages on their way, for both clients."""


async def ours(url: str, topic: str, arguments: argparse.Namespace) -> dict[str, Cost]:
    payload = b"x" * arguments.message_bytes
    costs: dict[str, Cost] = {}
    async with cepheid.connect(url) as client:
        consumer = await client.consumer(topic, "s")
        async with client.producer(topic, window_messages=SEND_LIMIT) as producer:

            async def send_all() -> None:
                for _ in range(arguments.messages):
                    try:
                        producer.send_nowait(payload)
                    except cepheid.WindowFullError:
                        await producer.drain()
                        producer.send_nowait(payload)
                await producer.flush()

            async def send(count: int) -> None:
                for _ in range(count):
                    await producer.send(payload)

            costs["send_nowait"] = await _cost(arguments.messages, send_all)
            if arguments.awaited:
                costs["awaited"] = await _cost_of_tasks(arguments, send)

        async def receive_all() -> None:
            for _ in range(arguments.messages):
                consumer.ack_nowait(await consumer.receive())

        costs["consume"] = await _cost(arguments.messages, receive_all)
    return costs


async def theirs(url: str, topic: str, arguments: argparse.Namespace) -> dict[str, Cost]:
    import pulsar

    payload = b"x" * arguments.message_bytes
    costs: dict[str, Cost] = {}
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(topic, batching_enabled=True, max_pending_messages=SEND_LIMIT, block_if_queue_full=True)
    loop = asyncio.get_running_loop()

    async def send_all() -> None:
        for _ in range(arguments.messages):
            producer.send_async(payload, None)
        await loop.run_in_executor(None, producer.flush)

    async def send(count: int) -> None:
        for _ in range(count):
            stored: asyncio.Future[Any] = loop.create_future()
            producer.send_async(
                payload, lambda _, message_id, stored=stored: loop.call_soon_threadsafe(stored.set_result, message_id)
            )
            await stored

    async def receive_all() -> None:
        for _ in range(arguments.messages):
            consumer.acknowledge(consumer.receive())

    costs["send_nowait"] = await _cost(arguments.messages, send_all)
    if arguments.awaited:
        costs["awaited"] = await _cost_of_tasks(arguments, send)
    costs["consume"] = await _cost(arguments.messages, receive_all)
    client.close()
    return costs


def one_at_a_time(url: str, topic: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the time of each message in seconds, by client."""
    import pulsar

    payload = b"x" * 1000
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    official = client.create_producer(f"{topic}-official")
    times: dict[str, list[float]] = {"cepheid": [], "official": [], "official_blocking": []}

    async def send_blocking(_: bytes) -> None:
        official.send(payload)

    async def send() -> None:
        loop = asyncio.get_running_loop()

        async def send_awaited(_: bytes) -> None:
            stored: asyncio.Future[Any] = loop.create_future()
            official.send_async(payload, lambda _, message_id: loop.call_soon_threadsafe(stored.set_result, message_id))
            await stored

        async with cepheid.connect(url) as ours, ours.producer(f"{topic}-cepheid") as producer:
            sends = {"cepheid": producer.send, "official": send_awaited, "official_blocking": send_blocking}
            for turn in range(arguments.single_turns + 1):
                for name, send_one in sends.items():
                    if turn == 1:
                        times[name].clear()  # the first turn warms up
                    for _ in range(arguments.single_messages):
                        started = time.perf_counter()
                        await send_one(payload)
                        times[name].append(time.perf_counter() - started)

    load.run(send())
    client.close()
    return times


async def _cost_of_tasks(arguments: argparse.Namespace, send: Callable[[int], Awaitable[None]]) -> Cost:
    each = max(1, arguments.messages // arguments.tasks)

    async def all_tasks() -> None:
        await asyncio.gather(*(send(each) for _ in range(arguments.tasks)))

    return await _cost(each * arguments.tasks, all_tasks)


async def _cost(messages: int, work: Callable[[], Awaitable[None]]) -> Cost:
    started, used_s = time.perf_counter(), time.process_time()
    await work()
    return Cost(messages / (time.perf_counter() - started), (time.process_time() - used_s) * 1e6 / messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--messages", type=int, default=200_000, help="for each load of a round; receiving takes as many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-awaited", dest="awaited", action="store_false", help="leave out the sends awaited by many tasks")
    parser.add_argument("--message-bytes", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=1_000, help="that await each send")
    parser.add_argument("--single-messages", type=int, default=200, help="sent one at a time in a turn of a client")
    parser.add_argument("--single-turns", type=int, default=10, help="of each client; 0: leave this load out")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        pairs = [
            (
                load.run(ours(server.url, server.topic(f"ours-{number}"), arguments)),
                asyncio.run(theirs(server.url, server.topic(f"theirs-{number}"), arguments)),
            )
            for number in range(arguments.rounds)
        ]
        figures: dict[str, float] = {}
        for what in pairs[0][0]:
            for name, costs in (("cepheid", [our for our, _ in pairs]), ("official", [their for _, their in pairs])):
                figures[f"{name}_{what}_per_s"] = round(statistics.median(cost[what].rate_per_s for cost in costs))
                figures[f"{name}_{what}_cpu_us"] = round(statistics.median(cost[what].cpu_us for cost in costs), 2)
            ratios = [our[what].rate_per_s / their[what].rate_per_s for our, their in pairs]
            figures[f"{what}_ratio"] = round(statistics.median(ratios), 2)
            figures[f"{what}_cpu_ratio"] = round(
                statistics.median(their[what].cpu_us / our[what].cpu_us for our, their in pairs), 2
            )
        if arguments.single_turns:
            times = one_at_a_time(server.url, server.topic("single"), arguments)
            p50_s = {name: percentile(each, 0.5) for name, each in times.items()}
            for name, each in times.items():
                figures[f"{name}_single_ms_p50"] = round(1000 * p50_s[name], 3)
                figures[f"{name}_single_ms_p99"] = round(1000 * percentile(each, 0.99), 3)
            figures["single_p50_ratio"] = round(p50_s["cepheid"] / p50_s["official"], 3)
            figures["single_blocking_p50_ratio"] = round(p50_s["cepheid"] / p50_s["official_blocking"], 3)
        print_line(
            "client_publish",
            figures=figures,
            load={
                "messages": arguments.messages,
                "message_bytes": arguments.message_bytes,
                "tasks": arguments.tasks,
                "rounds": arguments.rounds,
                "single_messages": arguments.single_messages * arguments.single_turns,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
