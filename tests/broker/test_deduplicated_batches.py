"""Deduplication over the wire of batches and chunks: what counts as stored when only a part is."""

from __future__ import annotations

import pytest

from cepheid_broker.publishing.deduplication import sequence_ids_of
from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.deduplicated_world import (
    NAME,
    REPEATED,
    TOPIC,
    HeldAppends,
    connect,
    deduplicating,
    deduplication,
    position_of,
    publish,
    reconnect,
)
from tests.broker.scripted_client import ScriptedClient, full, message, send_frame


async def publish_batches(client: ScriptedClient, *batches: tuple[int, int, int | None]) -> list[bool]:
    """(first id, messages, highest id as Java says it). Which of them are not stored."""
    results = []
    for first, messages, highest in batches:
        fields = {} if highest is None else {"highest_sequence_id": highest}
        send = pb.CommandSend(producer_id=0, sequence_id=first, num_messages=messages, **fields)
        client.send_bytes(send_frame(send, message(first, b"batch", messages=messages, **fields)))
        receipt = await client.expect(pb.CommandSendReceipt)
        assert receipt.sequence_id == first
        assert receipt.HasField("highest_sequence_id") == (highest is not None)
        results.append(position_of(receipt) == REPEATED)
    return results


@pytest.mark.parametrize(
    ("batches", "again"),
    [
        # Java says the highest id. The last of these has a message that is nowhere else: it is stored rather than lost.
        ([(0, 3, 2), (0, 3, 2), (1, 2, 2), (2, 3, 4)], [False, True, True, False]),
        # C++ does not.
        ([(0, 3, None), (0, 3, None), (3, 2, None)], [False, True, False]),
        # An application that starts over packs them otherwise: 11 to 14 would be lost, and 11 to 19
        ([(0, 10, None), (10, 1, None), (5, 10, None)], [False, False, False]),
        ([(0, 10, None), (10, 1, None), (10, 10, None)], [False, False, False]),
        # Batches by key: (0 1 2 3 5 6 7) (4), of Java and of C++
        ([(0, 7, 7), (4, 1, 4), (0, 7, 7), (4, 1, 4), (8, 1, 8)], [False, False, True, True, False]),
        ([(0, 7, None), (4, 1, None), (0, 7, None), (4, 1, None), (8, 1, None)], [False, False, True, True, False]),
        # -1 is no highest id
        ([(5, 1, (1 << 64) - 1), (5, 1, (1 << 64) - 1), (6, 2, (1 << 64) - 1)], [False, True, False]),
    ],
)
async def test_a_batch_is_a_repetition_only_if_all_of_it_is_stored(
    batches: list[tuple[int, int, int | None]], again: list[bool]
) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        assert await publish_batches(client, *batches) == again
        last = max(first + messages - 1 if highest in (None, (1 << 64) - 1) else highest for first, messages, highest in batches)
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=1) == last, "where an application goes on"
        assert await publish_batches(client, *batches) == [True] * len(batches)
        await world.fence("t")
        client.send_message(last + 1)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 2) == last
        assert await publish_batches(client, *batches) == [True] * len(batches)


async def test_batches_by_key_are_told_apart_after_a_crash_between_them() -> None:
    """A snapshot, or what is read behind it, that knew only the highest id would call the second one a repetition."""
    for saved in (True, False):
        async with deduplicating() as (world, client):
            await connect(client)
            assert await publish_batches(client, (0, 7, 7)) == [False]
            if saved:
                await deduplication(world).save()
            await world.fence("t")
            client.send_message(9)
            await client.expect(pb.CommandCloseProducer)
            assert await reconnect(client, 1) == 7
            assert deduplication(world).entries_replayed == (0 if saved else 1)
            assert await publish_batches(client, (0, 7, 7), (4, 1, 4)) == [True, False]


def chunks(sequence_id: int, *indexes: int, attempt: int = 0) -> bytes:
    """Of a message of three."""
    send = pb.CommandSend(producer_id=0, sequence_id=sequence_id, is_chunk=True)
    fields = {"uuid": f"u{sequence_id}", "num_chunks_from_msg": 3, "total_chunk_msg_size": 15}
    return b"".join(
        send_frame(send, message(sequence_id, b"chunk", publish_time=attempt, chunk_id=index, **fields)) for index in indexes
    )


async def publish_chunks(client: ScriptedClient, sequence_id: int, *indexes: int, attempt: int = 0) -> list[bool]:
    """Which of them are not stored."""
    client.send_bytes(chunks(sequence_id, *indexes, attempt=attempt))
    return [position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED for _ in indexes]


@pytest.mark.slow
async def test_of_a_chunked_message_the_last_chunk_counts() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        assert await publish_chunks(client, 0, 0, 1, 2) == [False, False, False]
        assert await publish_chunks(client, 0, 0, 1, 2) == [True, True, True]
        assert await publish_chunks(client, 1, 0, 1) == [False, False]
        await world.fence("t")
        client.send_message(9)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 1) == 0, "message 1 is not whole"
        assert await publish_chunks(client, 1, 0, 1, 2) == [True, True, False], "consumers of the C++ library would drop it"
        assert (await publish(client, 1, 2))[0] == REPEATED
        # A connection that was lost; then the application starts over, with another message
        assert await publish_chunks(client, 3, 0, 1) == [False, False]
        async with await world.client() as again:
            assert await connect(again, epoch=2) == 2
            assert await publish_chunks(again, 3, 0) == [True]
            assert await publish_chunks(again, 3, 0, 1, 2, attempt=1) == [False, False, False]
            assert await publish_chunks(again, 3, 0, 1, 2, attempt=1) == [True, True, True]


async def test_chunks_under_way_when_the_connection_breaks_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is let in when it is known what arrived of them."""
    async with deduplicating() as (world, client), await world.client() as successor:
        await connect(client)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_bytes(chunks(0, 0, 1))
        await client.ping()
        client.abort()
        successor.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME))
        await successor.expect_nothing()
        appends.let_go()
        monkeypatch.undo()
        assert (await successor.expect(pb.CommandProducerSuccess)).last_sequence_id == -1
        assert await publish_chunks(successor, 0, 0, 1, 2) == [True, True, False]


async def test_a_snapshot_knows_the_chunks_of_a_message_that_is_not_whole() -> None:
    """However much is stored behind them until its producer comes back: they hold no position."""
    async with deduplicating() as (world, client), await world.client() as other:
        await connect(client)
        await publish(client, 0)
        assert await publish_chunks(client, 1, 0, 1) == [False, False]
        await other.produce_on("t", producer_name="another")
        for sequence_id in range(140):
            tail = encode_tail(pb.MessageMetadata(producer_name="another", sequence_id=sequence_id, publish_time=1), b"")
            other.send_message(sequence_id, tail=tail)
        for _ in range(140):
            await other.expect(pb.CommandSendReceipt)
        await deduplication(world).save()
        ledger = world.topic("t").ledger
        assert ledger.cursors[DEDUP_CURSOR].mark_delete == ledger.last_confirmed
        await world.fence("t")
        client.send_message(9)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 1) == 0
        assert deduplication(world).entries_replayed == 0
        assert sequence_ids_of(world.topic("t").ledger.cursors[DEDUP_CURSOR].sequence_ids) == {NAME: 0, "another": 139}
        assert await publish_chunks(client, 1, 0, 1, 2) == [True, True, False]


async def test_chunks_that_are_truncated_are_new_when_they_are_sent_again() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        assert await publish_chunks(client, 0, 0, 1) == [False, False]
        await deduplication(world).save()
        await world.topic("t").truncate()
        await world.fence("t")
        client.send_message(9)
        await client.expect(pb.CommandCloseProducer)
        assert await reconnect(client, 1) == -1
        assert await publish_chunks(client, 0, 0, 1, 2) == [False, False, False]
