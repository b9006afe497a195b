"""Deduplication over the wire: what is sent again is stored once, through reconnects, failures and unloading."""

from __future__ import annotations

import pytest

from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR
from cepheid_managed_ledger import ManagedLedgerSettings
from cepheid_metadata import CursorRecord, keys
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.deduplicated_world import (
    NAME,
    REPEATED,
    TOPIC,
    HeldAppends,
    client_window,
    connect,
    deduplicating,
    deduplication,
    position_of,
    publish,
    reconnect,
    stored,
)
from tests.broker.scripted_client import message, send_frame
from tests.support import wait_until

GIVES_UP_SOON = ManagedLedgerSettings(ledger_failover_timeout_s=0.1)


async def test_a_repetition_is_answered_in_its_turn_and_not_stored() -> None:
    async with deduplicating() as (world, client):
        assert await connect(client) == -1
        first = await publish(client, 0, 1, 2)
        assert [entry for _, entry in first] == [0, 1, 2]
        again = await publish(client, 1, 3, 2, 4, 0)
        assert again == [REPEATED, (first[0][0], 3), REPEATED, (first[0][0], 4), REPEATED]
        assert await stored(world) == [0, 1, 2, 3, 4]
        assert deduplication(world).repeated.entries == world.broker.statistics().repeated_entries == 3
        assert world.topic("t").published.entries == 5
        assert client_window(world) == 0


async def test_a_repetition_before_a_damaged_message_waits_for_what_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of nothing but repetitions: what cannot be stored ends it, and an append is under way."""
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0, 1)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_message(2)
        await wait_until(lambda: bool(appends.held))
        client.send_message(1)
        damaged = bytearray(message(3, b"damaged"))
        damaged[-1] ^= 1
        client.send_message(3, tail=bytes(damaged))
        await client.ping()
        await client.expect_nothing(0.05)
        appends.let_go()
        answers = [await client.expect(pb.CommandSendReceipt) for _ in range(2)]
        assert [answer.sequence_id for answer in answers] == [2, 1]
        assert position_of(answers[1]) == REPEATED
        assert (await client.expect(pb.CommandSendError)).sequence_id == 3
        assert await stored(world) == [0, 1, 2]


async def test_a_producer_goes_on_where_its_name_was() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0, 1, 5)
        async with await world.client() as successor:
            await client.close()
            assert await connect(successor) == 5
            assert (await publish(successor, 5, 6))[0] == REPEATED
            assert await stored(world) == [0, 1, 5, 6]


async def test_without_the_policy_nothing_is_judged() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        assert await connect(client) == -1
        await publish(client, 0, 1, 1, 0)
        assert await stored(world) == [0, 1, 1, 0]
        assert DEDUP_CURSOR not in world.topic("t").ledger.cursors


@pytest.mark.parametrize("published", [3, 10, 47])
async def test_it_survives_the_topic_being_unloaded(published: int) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, *range(published))
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=1) == published - 1
        assert deduplication(world).entries_replayed == 0, "saved when the topic closed"
        assert (await publish(client, published - 1, published))[0] == REPEATED
        assert await stored(world) == list(range(published + 1))


async def test_sequence_ids_whose_record_is_damaged_are_found_anew_in_the_entries() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, *range(5))
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        key = keys.cursor_key(TOPIC, DEDUP_CURSOR)
        node = world.tree.nodes[key]
        record = CursorRecord.decode(node.value, key)
        assert record.state is not None
        damaged = record.replace(state=record.state[:-1] + bytes([record.state[-1] ^ 1]))
        world.tree.nodes[key] = node._replace(value=damaged.encode())
        assert await connect(client, epoch=1) == 4
        assert await publish(client, 0, 4) == [REPEATED, REPEATED]
        assert await stored(world) == list(range(5))


async def test_what_was_read_again_after_a_failure_is_saved_although_nothing_is_published() -> None:
    """Else it is read at every opening, and its ledgers are held, until somebody publishes."""
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0, 1, 2)
        await world.fence("t")
        client.send_message(3)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 1) == 2
        assert deduplication(world).entries_replayed == 3
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=2) == 2
        assert deduplication(world).entries_replayed == 0


@pytest.mark.parametrize("published", [3, 10])
async def test_it_survives_a_failed_topic_by_reading_what_is_behind_the_snapshot(published: int) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, *range(published))
        await world.topic("t").ledger.cursors[DEDUP_CURSOR].saved()
        await world.fence("t")
        client.send_message(published)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 1) == published - 1
        assert deduplication(world).entries_replayed == (3 if published == 3 else 0)
        assert (await publish(client, published - 1, published))[0] == REPEATED
        assert await stored(world) == list(range(published + 1))


async def test_scenario_30_what_failed_is_stored_when_it_is_sent_again() -> None:
    """Bookies fail, the producer retries: its messages are no duplicates of what was never stored (H3)."""
    async with deduplicating(refusal_retry_s=0.05, ledgers=GIVES_UP_SOON) as (world, client):
        await connect(client)
        world.fill_disk()
        for later in range(3):
            client.send_message(later, b"payload %d" % later)
        await client.expect(pb.CommandCloseProducer)
        world.disk.full = False
        await reconnect(client, 1)
        resent = await publish(client, *range(3))
        unstored = [position for position in resent if position != REPEATED]
        assert await stored(world) == list(range(3))
        assert len(unstored) <= 3


async def test_a_refused_append_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger lives on: nothing is read again, so the sequence ids must fall back by themselves."""
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0)
        topic = world.topic("t")
        appends = HeldAppends(monkeypatch, topic.ledger)
        client.send_message(1)
        await wait_until(lambda: bool(appends.held))
        client.send_message(2)
        await client.ping()
        appends.refuse()
        await client.expect(pb.CommandCloseProducer)
        monkeypatch.undo()
        assert await connect(client, epoch=1) == 0
        assert world.topic("t") is topic
        assert REPEATED not in await publish(client, 1, 2)
        assert await stored(world) == [0, 1, 2]


async def test_a_message_sent_twice_while_it_is_under_way_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        for sequence_id in (0, 0, 1, 0, 1):
            client.send_message(sequence_id)
            await client.ping()
        appends.let_go()
        monkeypatch.undo()
        receipts = [await client.expect(pb.CommandSendReceipt) for _ in range(5)]
        assert [receipt.sequence_id for receipt in receipts] == [0, 0, 1, 0, 1]
        assert [position_of(receipt) == REPEATED for receipt in receipts] == [False, True, False, True, True]
        assert await stored(world) == [0, 1]
        assert client_window(world) == 0


async def test_sent_twice_and_refused_closes_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the failure is not answered as stored."""
    async with deduplicating() as (world, client):
        await connect(client)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        for sequence_id in (0, 0):
            client.send_message(sequence_id)
            await client.ping()
        appends.refuse()
        monkeypatch.undo()
        await client.expect(pb.CommandCloseProducer)
        await connect(client, epoch=1)
        first, second = await publish(client, 0, 0)
        assert (first != REPEATED, second) == (True, REPEATED)
        assert await stored(world) == [0]


async def test_ids_of_the_command_count_where_those_of_the_metadata_stand_still() -> None:
    async with deduplicating() as (_, client):
        await connect(client)
        for sequence_id in (0, 1, 2, 1):
            client.send_message(sequence_id, tail=message(0))
        receipts = [position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED for _ in range(4)]
        assert receipts == [False, False, False, True]


async def test_ids_that_are_none_and_markers_are_stored_as_they_come() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        for _ in range(2):
            for sequence_id in (0, (1 << 64) - 1):
                client.send_message(sequence_id)
            client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=0), message(0, marker_type=10)))
        receipts = [await client.expect(pb.CommandSendReceipt) for _ in range(6)]
        assert [position_of(receipt) == REPEATED for receipt in receipts] == [False, False, False, True, False, False]
        assert deduplication(world).last_sequence_id(NAME) == 0
