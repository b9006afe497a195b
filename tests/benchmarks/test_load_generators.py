"""The load generators against a scripted server: what they send is what a broker expects, and what they count is what came."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks import load
from benchmarks.__main__ import find_misses
from benchmarks.raw_client import RefusedError, batch_payload, open_connection, open_counter, open_publisher
from benchmarks.report import latency_figures, percentile
from benchmarks.server import Server, add_arguments
from cepheid_wire import count_messages, decode_batch, split_tail, verify_tail
from tests.benchmarks.scripted_server import ScriptedServer
from tests.support import wait_until

TOPIC = "persistent://public/default/t"


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedServer, str]]:
    server = ScriptedServer()
    url = await server.start()
    try:
        yield server, url
    finally:
        await server.aclose()


async def test_a_prebuilt_entry_is_a_valid_batch_with_its_own_sequence_id() -> None:
    async with scripted() as (server, url):
        connection = await open_connection(url, TOPIC)
        publisher = await open_publisher(connection, TOPIC, batch_payload(1000, 100), num_messages=1000)
        await load.publish_all(connection, publisher, 300, window=7)
        assert connection.receipts == 300
        assert server.sequence_ids == list(range(1 << 28, (1 << 28) + 300))
        tail = bytes(server.tails[-1])
        verify_tail(tail)
        assert count_messages(tail) == 1000
        messages = list(decode_batch(split_tail(tail)[1], 1000))
        assert {len(body) for _, body in messages} == {100}
        connection.close()


async def test_a_window_keeps_the_load_up_until_the_measurement_ends() -> None:
    async with scripted() as (server, url):
        server.keep = False
        connection = await open_connection(url, TOPIC)
        publisher = await open_publisher(connection, TOPIC, bytes(1000))
        load.keep_window(connection, publisher, 100)
        external = Server(_arguments(["--url", url]))
        measured = await load.measure(external, lambda: connection.receipts, warmup_s=0.1, seconds=0.3, failed=connection.failed)
        assert 0 <= publisher.sent - connection.receipts <= 100
        assert measured.entries > 1000
        assert measured.seconds >= 0.3
        connection.close()


async def test_a_paced_sender_sends_evenly_and_latency_counts_from_when_an_entry_was_due() -> None:
    async with scripted() as (server, url):
        connection = await open_connection(url, TOPIC)
        publisher = await open_publisher(connection, TOPIC, bytes(1000))
        sender = load.PacedSender(connection, publisher, rate_per_s=1000, seconds=0.3)
        arrivals = load.Arrivals()
        connection.on_receipts = arrivals.on_arrived
        await load.run_paced(sender, arrivals, connection.failed, limit_s=10)
        latencies_s = arrivals.latencies_s(sender, skip=100)
        assert len(latencies_s) == 200
        assert min(latencies_s) > 0
        assert server.sequence_ids == list(range(1 << 28, (1 << 28) + 300))
        connection.close()


async def test_a_counter_returns_permits_and_acknowledges_what_it_counted() -> None:
    async with scripted() as (server, url):
        producing, consuming = await open_connection(url, TOPIC), await open_connection(url, TOPIC)
        publisher = await open_publisher(producing, TOPIC, bytes(70_000))
        await load.publish_all(producing, publisher, 500, window=50)
        await open_counter(consuming, TOPIC, "s", earliest=True, permits=100, ack_every=100)
        await wait_until(lambda: consuming.messages == 500)
        await wait_until(lambda: sum(server.permits) > 500)
        assert consuming.message_bytes > 500 * 70_000
        ids = [ack.message_id[0].entryId for ack in server.acknowledged]
        assert ids
        assert ids == sorted(ids)
        assert max(ids) < 500
        producing.close()
        consuming.close()


async def test_refusals_end_a_measurement() -> None:
    async with scripted() as (server, url):
        connection = await open_connection(url, TOPIC)
        with pytest.raises(RefusedError, match="busy"):
            await open_counter(connection, TOPIC, "refused", earliest=True)
        publisher = await open_publisher(connection, TOPIC, b"x")
        server.refuse_sends = True
        with pytest.raises(RefusedError, match="SEND_ERROR"):
            await load.publish_all(connection, publisher, 10, window=1)
        connection.close()


async def test_a_ping_is_answered() -> None:
    async with scripted() as (server, url):
        connection = await open_connection(url)
        server.ping()
        await wait_until(lambda: server.connections[0].pongs == 1)
        connection.close()


async def test_a_server_that_hangs_up_ends_a_measurement() -> None:
    async with scripted() as (server, url):
        connection = await open_connection(url)
        server.connections[0].transport.abort()
        with pytest.raises(RefusedError, match="closed the connection"):
            await asyncio.wait_for(connection.failed, 5)


@pytest.mark.parametrize(
    ("line", "misses"),
    [
        ({"rate": 10, "p99": 4.9, "reads": 0}, []),
        ({"rate": 9.9, "p99": 4.9, "reads": 0}, ["rate is 9.9, to reach: at least 10"]),
        ({"rate": 10, "p99": 5.0, "reads": 1}, ["p99 is 5.0, to reach: below 5.0", "reads is 1, to reach: equals 0"]),
        ({"rate": 10, "reads": 0}, ["no figure p99"]),
    ],
)
def test_a_missed_figure_is_named(line: dict[str, float], misses: list[str]) -> None:
    bars = {"rate": {"at_least": 10}, "p99": {"below": 5.0}, "reads": {"equals": 0}}
    assert find_misses(line, bars) == misses


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 51.0, 100.0, 100.0]
    assert latency_figures([0.001, 0.002])["latency_ms_max"] == 2.0


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)
