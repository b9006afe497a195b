"""How fast are applications with the Python client, beside the official one on the same server? 100 B messages, batching on.

Three loads, each with both clients in turn: sends that do not wait, sends awaited by many tasks, and receiving with an
acknowledgement for each message. The official client has no asyncio interface of its own for that: its callbacks set futures.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import cepheid
from benchmarks import load
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments

SEND_LIMIT = 30_000
"""Messages on their way, for both clients."""


async def ours(url: str, topic: str, arguments: argparse.Namespace) -> dict[str, float]:
    payload = b"x" * arguments.message_bytes
    rates: dict[str, float] = {}
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

            rates["send_nowait"] = await _rate(arguments.messages, send_all)
            rates["awaited"] = await _rate_of_tasks(arguments, send)

        async def receive_all() -> None:
            for _ in range(arguments.messages):
                consumer.ack_nowait(await consumer.receive())

        rates["consume"] = await _rate(arguments.messages, receive_all)
    return rates


async def theirs(url: str, topic: str, arguments: argparse.Namespace) -> dict[str, float]:
    import pulsar

    payload = b"x" * arguments.message_bytes
    rates: dict[str, float] = {}
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

    rates["send_nowait"] = await _rate(arguments.messages, send_all)
    rates["awaited"] = await _rate_of_tasks(arguments, send)
    rates["consume"] = await _rate(arguments.messages, receive_all)
    client.close()
    return rates


async def _rate_of_tasks(arguments: argparse.Namespace, send: Callable[[int], Awaitable[None]]) -> float:
    each = max(1, arguments.messages // arguments.tasks)

    async def all_tasks() -> None:
        await asyncio.gather(*(send(each) for _ in range(arguments.tasks)))

    return await _rate(each * arguments.tasks, all_tasks)


async def _rate(messages: int, work: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await work()
    return messages / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--messages", type=int, default=500_000, help="for each load; receiving takes as many of them")
    parser.add_argument("--message-bytes", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=1_000, help="that await each send")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        measured = {
            "cepheid": load.run(ours(server.url, server.topic("ours"), arguments)),
            "official": asyncio.run(theirs(server.url, server.topic("theirs"), arguments)),
        }
        figures = {f"{who}_{what}_per_s": round(rate) for who, rates in measured.items() for what, rate in rates.items()}
        ratios = {f"{what}_ratio": round(rate / measured["official"][what], 2) for what, rate in measured["cepheid"].items()}
        print_line(
            "client_publish",
            figures={**figures, **ratios},
            load={"messages": arguments.messages, "message_bytes": arguments.message_bytes, "tasks": arguments.tasks},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
