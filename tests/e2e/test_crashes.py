"""Both clients, the official one and ours, through crashes of the server: nothing acknowledged is lost, and order holds."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pulsar
import pytest

import cepheid
import cepheid.sync
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import (
    EARLIEST,
    SAVED_S,
    TIMEOUT_MS,
    client_of,
    payloads_of,
    publish,
    receive,
    wait_for,
    wait_for_backlog,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bookies", [1, 3])
def test_a_producer_goes_on_through_a_kill_and_nothing_is_lost_or_swapped(tmp_path: Path, bookies: int) -> None:
    count = 4000
    with ProcessCluster(tmp_path / "data", bookies=bookies) as cluster, client_of(cluster.service_url) as client:
        client.subscribe("t", "keeps", initial_position=EARLIEST, receiver_queue_size=1)  # what nobody subscribes to is trimmed
        producer = client.create_producer("t", block_if_queue_full=True, send_timeout_millis=60_000)
        receipts: dict[int, object] = {}
        for n in range(count):
            producer.send_async(b"%d" % n, lambda result, _, n=n: receipts.__setitem__(n, result))
            if n == count // 2:
                wait_for(lambda: len(receipts) > 100, "some receipts")
                cluster.kill()
                cluster.start()
        producer.flush()
        assert set(receipts.values()) == {pulsar.Result.Ok}
        assert len(receipts) == count
        reader = client.create_reader("t", pulsar.MessageId.earliest)
        first_seen: dict[int, None] = {}
        while reader.has_message_available():
            first_seen.setdefault(int(reader.read_next(TIMEOUT_MS).data()))
        assert list(first_seen) == list(range(count)), "first occurrences are in the order of sending, and none is missing"


def test_a_consumer_goes_on_through_a_kill_and_old_acknowledgements_stay(tmp_path: Path) -> None:
    count = 3000
    with ProcessCluster(tmp_path / "data") as cluster, client_of(cluster.service_url) as client:
        publish(client, "t", [b"%d" % n for n in range(count)])
        consumer = client.subscribe("t", "s", initial_position=EARLIEST, consumer_type=pulsar.ConsumerType.Shared)
        before: list[int] = []
        for _ in range(count // 2):
            message = consumer.receive(TIMEOUT_MS)
            consumer.acknowledge(message)
            before.append(int(message.data()))
        wait_for_backlog(cluster.admin_url, "t", count - len(before))
        time.sleep(SAVED_S)
        cluster.kill()
        cluster.start()
        after: list[int] = []
        while len(set(before) | set(after)) < count:
            message = consumer.receive(TIMEOUT_MS)
            consumer.acknowledge(message)
            after.append(int(message.data()))
        assert not set(before) & set(after), "an acknowledgement that was saved was forgotten"


@pytest.mark.parametrize("bookies", [1, 3])
async def test_our_producer_goes_on_through_a_kill_and_nothing_is_lost_or_swapped(tmp_path: Path, bookies: int) -> None:
    count = 4000
    with ProcessCluster(tmp_path / "data", bookies=bookies) as cluster:
        async with cepheid.connect(cluster.service_url) as client, client.producer("t", send_timeout_s=60) as producer:
            await (await client.consumer("t", "keeps", start="earliest", receiver_queue=1)).close()
            sends = []
            for n in range(count):
                sends.append(asyncio.ensure_future(producer.send(b"%d" % n)))
                if n == count // 2:
                    await asyncio.gather(*sends[:100])
                    await asyncio.to_thread(cluster.kill)
                    await asyncio.to_thread(cluster.start)
            assert len(set(await asyncio.gather(*sends))) == count
            first_seen: dict[int, None] = {}
            async with client.reader("t") as reader:
                while await reader.has_message_available():
                    first_seen.setdefault(int((await reader.read(TIMEOUT_MS / 1000)).data))
            assert list(first_seen) == list(range(count)), "first occurrences are in the order of sending, and none is missing"


def test_both_clients_share_a_subscription_through_a_kill(tmp_path: Path) -> None:
    count = 3000
    with (
        ProcessCluster(tmp_path / "data") as cluster,
        client_of(cluster.service_url) as official,
        cepheid.sync.connect(cluster.service_url) as ours,
    ):
        their_consumer = official.subscribe("t", "s", consumer_type=pulsar.ConsumerType.Shared, receiver_queue_size=50)
        with (
            ours.producer("t", batching=False) as producer,
            ours.consumer("t", "s", type="shared", receiver_queue=50) as our_consumer,
        ):
            producer.send_all(b"%d" % n for n in range(count))

            def take(seen: list[int]) -> None:
                """One message by each client."""
                try:
                    message = our_consumer.receive(0.1)
                except cepheid.TimedOutError:
                    pass
                else:
                    our_consumer.ack(message)
                    seen.append(int(message.data))
                try:
                    other = their_consumer.receive(100)
                except pulsar.Timeout:
                    return
                their_consumer.acknowledge(other)
                seen.append(int(other.data()))

            before: list[int] = []
            while len(before) < count // 2:
                take(before)
            wait_for_backlog(cluster.admin_url, "t", count - len(before))
            time.sleep(SAVED_S)
            cluster.kill()
            cluster.start()
            after: list[int] = []
            while len(set(before) | set(after)) < count:
                take(after)
            assert not set(before) & set(after), "an acknowledgement that was saved was forgotten"


def test_a_clean_restart_redelivers_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "data") as cluster, client_of(cluster.service_url) as client:
        publish(client, "t", [b"%d" % n for n in range(100)])
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        receive(consumer, 50)
        wait_for_backlog(cluster.admin_url, "t", 50)
        cluster.stop()
        cluster.start()
        assert payloads_of(receive(consumer, 50)) == [b"%d" % n for n in range(50, 100)]


def test_clients_that_wait_are_served_when_the_server_comes(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "data") as cluster:
        cluster.stop()
        outcome: list[object] = []

        def use() -> None:
            with client_of(cluster.service_url) as client:
                outcome.append(publish(client, "t", [b"x"]))

        waiting = threading.Thread(target=use)
        waiting.start()
        time.sleep(0.5)
        assert not outcome
        cluster.start()
        waiting.join(60)
        assert len(outcome) == 1
