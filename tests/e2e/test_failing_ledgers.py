"""The ledger that a topic writes breaks under a publishing official client: it waits a little longer, and hears of nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pulsar
import pytest

from cepheid_testkit import StandaloneCluster
from cepheid_wire import TopicName
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of

pytestmark = pytest.mark.slow

TOPIC = TopicName.parse("persistent://public/default/breaking")
FAILOVERS = 6
MOST = 300_000


def publish_and_receive(url: str, enough: threading.Event) -> tuple[list[object], list[int]]:
    """Until it is enough."""
    results: list[object] = []
    with client_of(url) as client:
        consumer = client.subscribe(str(TOPIC), "s", initial_position=EARLIEST)
        producer = client.create_producer(
            str(TOPIC), block_if_queue_full=True, max_pending_messages=300, batching_enabled=True, batching_max_messages=20
        )
        sent = 0
        while not enough.is_set() and sent < MOST:
            producer.send_async(b"%d" % sent, lambda result, _: results.append(result))
            sent += 1
        producer.flush()
        received = []
        for _ in range(sent):
            message = consumer.receive(TIMEOUT_MS)
            consumer.acknowledge(message)
            received.append(int(message.data()))
        assert_silent(consumer)
    return results, received


async def break_ledgers(cluster: StandaloneCluster) -> None:
    """In turn: every bookie cuts its connections, so that none of them has answered; somebody else recovers the ledger."""
    standalone: Any = cluster.standalone
    while (topic := standalone.broker.topics.find(TOPIC)) is None or not topic.published.entries:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    turn = 0
    while topic.ledger.statistics().failovers < FAILOVERS:
        ledger = topic.ledger
        before = ledger.statistics().failovers
        if turn % 2:
            for connection in standalone.bookies._connections.values():
                for stream in list(connection._streams):
                    stream.on_broken("cut its connections")
        else:
            await standalone._serving.ledger_client.recover(ledger.ledgers.last_ledger_id)
        turn += 1
        for _ in range(50):
            if ledger.statistics().failovers > before:
                break
            await asyncio.sleep(0.01)


async def test_a_publishing_client_sees_no_error_and_a_consumer_no_duplicate() -> None:
    async with StandaloneCluster(bookies=4) as cluster:
        url = cluster.service_url
        enough = threading.Event()
        breaking = asyncio.ensure_future(break_ledgers(cluster))
        breaking.add_done_callback(lambda _: enough.set())
        results, received = await cluster.blocking(lambda: publish_and_receive(url, enough))
        await breaking
        assert results == [pulsar.Result.Ok] * len(results)
        assert received == list(range(len(results)))
