"""A broker stops without a word (SIGSTOP): how long until a client that connects now publishes to each of its topics?

A new client starts every half second after the pause, each with a producer and a message for each topic that no earlier one has
published to. A client that is sent to the sleeping broker waits there for its connection, so the first one tells how lookups behave
before the owner is known to be gone.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import pulsar.asyncio

from benchmarks.broker_load import CLIENT, LoadedTopics, Producers
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError

CLIENT_EVERY_S = 0.5
WATCHED_S = 60.0


class Publishing:
    """When each topic took its first message after `began`, by its number."""

    def __init__(self, url: str, topics: dict[int, str]) -> None:
        self._url = url
        self._topics = topics
        self._began = time.monotonic()
        self.published_s: dict[int, float] = {}
        self.first_client_s: dict[int, float] = {}

    async def run(self) -> None:
        """Until every topic has taken a message. Raises ServerFailedError when one does not."""
        clients = []
        attempts: list[asyncio.Task[None]] = []
        try:
            while len(self.published_s) < len(self._topics):
                if time.monotonic() - self._began > WATCHED_S:
                    raise ServerFailedError(f"{len(self._topics) - len(self.published_s)} topics took nothing for {WATCHED_S:g} s")
                client = pulsar.asyncio.Client(self._url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
                clients.append(client)
                left = [number for number in self._topics if number not in self.published_s]
                is_first = len(clients) == 1
                attempts += [asyncio.create_task(self._publish(client, number, is_first=is_first)) for number in left]
                await asyncio.sleep(CLIENT_EVERY_S)
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            for client in clients:
                client.shutdown()

    async def _publish(self, client: pulsar.asyncio.Client, number: int, *, is_first: bool) -> None:
        try:
            producer = await client.create_producer(self._topics[number], batching_enabled=False)
            await producer.send(b"after the pause")
        except pulsar.asyncio.PulsarException:
            return  # a later client tries as well
        now_s = time.monotonic() - self._began
        self.published_s.setdefault(number, now_s)
        if is_first:
            self.first_client_s[number] = now_s


def one_pause(cluster: Cluster, topics: LoadedTopics, rate: float) -> Publishing:
    victim = topics.most_loaded(topics.brokers[0])
    survivor = next(name for name in topics.brokers if name != victim)
    its_own = topics.numbers_of(victim, survivor)
    producers = Producers(topics.url(survivor), topics.names, rate)  # so that the topics are open and written to
    producers.settle()
    producers.close()
    cluster.processes.pause(victim)
    try:
        publishing = Publishing(topics.url(survivor), {number: topics.names[number] for number in its_own})
        asyncio.run(publishing.run())
    finally:
        cluster.processes.resume(victim)
    cluster.wait_until(lambda: all(each.state == "ready" for each in cluster.processes.status()), "all brokers serve again")
    return publishing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=3)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--pauses", type=int, default=5)
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        rounds = []
        for _ in range(arguments.pauses):
            rounds.append(one_pause(cluster, topics, rate=500.0))
            topics.spread()
        published_s = [at_s for one in rounds for at_s in one.published_s.values()]
        first_s = [at_s for one in rounds for at_s in one.first_client_s.values()]
        print_line(
            "takeover_pause",
            figures={
                "published_s_p50": round(percentile(published_s, 0.5), 2),
                "published_s_max": round(max(published_s), 2),
                "first_client_s_p50": round(percentile(first_s, 0.5), 2) if first_s else None,
            },
            load={
                "topics": arguments.topics,
                "pauses": arguments.pauses,
                "topics_of_the_paused": [len(one.published_s) for one in rounds],
                "published_by_the_first_client": len(first_s),
                "new_client_every_s": CLIENT_EVERY_S,
                "client": CLIENT,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
