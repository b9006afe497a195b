"""Deduplication over the wire: what is sent again is stored once, through reconnects, failures, unloading and changed policies."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_broker.managed_ledger import ManagedLedger, ManagedLedgerSettings, TooManyAppendsError
from cepheid_broker.persistent_topic import PersistentTopic
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.position import EARLIEST, Position
from cepheid_broker.topic_deduplication import DEDUP_CURSOR, TopicDeduplication
from cepheid_metadata import CursorRecord, keys
from cepheid_wire import ServerError, TopicName, add_checksum, encode_tail, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, message, send_frame
from tests.support import run_async, wait_until

TOPIC = TopicName.parse("t")
NAME = "scripted"  # what scripted_client.message() says in the metadata
ON = TopicPolicies(deduplication=True, dedup_snapshot_entries=10)
REPEATED = (-1, -1)


GIVES_UP_SOON = ManagedLedgerSettings(ledger_failover_timeout_s=0.1)


@asynccontextmanager
async def deduplicating(**settings: Any) -> Any:
    keep = {"retention_time_min": -1, "retention_size_mb": -1}
    policies = {"deduplication": True, "dedup_snapshot_entries": 10, **keep}
    async with BrokerWorld(policies=policies, **settings) as world, await world.client() as client:
        yield world, client


async def connect(client: ScriptedClient, *, epoch: int = 0, producer_id: int = 0) -> int:
    """The last sequence id that the broker says it has."""
    return int((await client.produce_on("t", producer_id, producer_name=NAME, epoch=epoch)).last_sequence_id)


async def reconnect(client: ScriptedClient, epoch: int) -> int:
    """After the broker has closed the producer."""
    for attempt in range(200):
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=attempt, producer_name=NAME, epoch=epoch)
        client.send(ask)
        received = await client.receive()
        assert received is not None
        if isinstance(received.body, pb.CommandProducerSuccess):
            return int(received.body.last_sequence_id)
        assert isinstance(received.body, pb.CommandError), received.body
        await asyncio.sleep(0.02)
    raise AssertionError("never admitted")


async def publish(client: ScriptedClient, *sequence_ids: int) -> list[tuple[int, int]]:
    for sequence_id in sequence_ids:
        client.send_message(sequence_id, b"payload %d" % sequence_id)
    positions = []
    for sequence_id in sequence_ids:
        receipt = await client.expect(pb.CommandSendReceipt)
        assert receipt.sequence_id == sequence_id, "in SEND order"
        positions.append(position_of(receipt))
    return positions


def position_of(receipt: pb.CommandSendReceipt) -> tuple[int, int]:
    ids = receipt.message_id.ledgerId, receipt.message_id.entryId
    return REPEATED if ids == ((1 << 64) - 1,) * 2 else ids


async def stored(world: BrokerWorld) -> list[int]:
    """Sequence ids of everything in the topic."""
    ledger = world.topic("t").ledger
    found: list[int] = []
    position = ledger.next_position(ledger.first_position())
    while ledger.is_valid(position):
        for group in await ledger.read(position, max_entries=1000, max_bytes=1 << 20):
            found += [parse_metadata(payload).sequence_id for payload in group.payloads()]
            position = ledger.next_position(Position(group.ledger_id, group.last_entry_id))
    return found


def deduplication(world: BrokerWorld) -> TopicDeduplication:
    found = world.topic("t").deduplication
    assert found is not None
    return found


class HeldAppends:
    """The topic's ledger takes appends, and does not do them until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledger: ManagedLedger) -> None:
        self._append = ledger.append
        self.held: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ledger, "append", lambda *args: self.held.append(args))

    def let_go(self) -> None:
        held, self.held = self.held, []
        for args in held:
            self._append(*args)

    def refuse(self) -> None:
        held, self.held = self.held, []
        for payloads, on_done, *_ in held:
            on_done(TooManyAppendsError("planted"), len(payloads))


def test_a_repetition_is_answered_in_its_turn_and_not_stored() -> None:
    async def main() -> None:
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

    run_async(main())


def client_window(world: BrokerWorld) -> int:
    return world.broker.statistics().publish_buffer_bytes


def test_a_producer_goes_on_where_its_name_was() -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            await publish(client, 0, 1, 5)
            async with await world.client() as successor:
                await client.close()
                assert await connect(successor) == 5
                assert (await publish(successor, 5, 6))[0] == REPEATED
                assert await stored(world) == [0, 1, 5, 6]

    run_async(main())


def test_without_the_policy_nothing_is_judged() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            assert await connect(client) == -1
            await publish(client, 0, 1, 1, 0)
            assert await stored(world) == [0, 1, 1, 0]
            assert DEDUP_CURSOR not in world.topic("t").ledger.cursors

    run_async(main())


@pytest.mark.parametrize("published", [3, 10, 47])
def test_it_survives_the_topic_being_unloaded(published: int) -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            await publish(client, *range(published))
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            assert await connect(client, epoch=1) == published - 1
            assert deduplication(world).entries_replayed == 0, "saved when the topic closed"
            assert (await publish(client, published - 1, published))[0] == REPEATED
            assert await stored(world) == list(range(published + 1))

    run_async(main())


def test_sequence_ids_whose_record_is_damaged_are_found_anew_in_the_entries() -> None:
    async def main() -> None:
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

    run_async(main())


def test_what_was_read_again_after_a_failure_is_saved_although_nothing_is_published() -> None:
    """Else it is read at every opening, and its ledgers are held, until somebody publishes."""

    async def main() -> None:
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

    run_async(main())


def test_names_of_any_length_are_told_apart_and_saved() -> None:
    """A message names a producer as it likes, whatever its producer is called: no name may make the cursor impossible to save."""

    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            names = ["n" * 70_000, "n" * 70_001, "n" * 2_048]
            tails = [encode_tail(pb.MessageMetadata(producer_name=name, sequence_id=5, publish_time=1), b"x") for name in names]
            for tail in (*tails, *tails):
                client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=5), tail))
            receipts = [position_of(await client.expect(pb.CommandSendReceipt)) for _ in range(6)]
            assert receipts.count(REPEATED) == 3
            assert REPEATED not in receipts[:3]
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            await connect(client, epoch=1)
            ledger = world.topic("t").ledger
            assert all(len(name) <= 2_048 for name in ledger.cursors[DEDUP_CURSOR].sequence_ids)
            assert deduplication(world).entries_replayed == 0, "saved when the topic closed"
            for tail in tails:
                client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=5), tail))
            assert [position_of(await client.expect(pb.CommandSendReceipt)) for _ in range(3)] == 3 * [REPEATED]

    run_async(main())


@pytest.mark.parametrize("published", [3, 10])
def test_it_survives_a_failed_topic_by_reading_what_is_behind_the_snapshot(published: int) -> None:
    async def main() -> None:
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

    run_async(main())


def test_scenario_30_what_failed_is_stored_when_it_is_sent_again() -> None:
    """Bookies fail, the producer retries: its messages are no duplicates of what was never stored (H3)."""

    async def main() -> None:
        async with deduplicating(refusal_retry_s=0.05, ledgers=GIVES_UP_SOON) as (world, client):
            await connect(client)
            sequence_id = await world.fill_disk(client, 0)
            for later in range(sequence_id, sequence_id + 3):
                client.send_message(later, b"payload %d" % later)
            await client.expect(pb.CommandCloseProducer)
            world.disk.full = False
            await reconnect(client, 1)
            resent = await publish(client, *range(sequence_id, sequence_id + 3))
            unstored = [position for position in resent if position != REPEATED]
            assert await stored(world) == list(range(sequence_id + 3))
            assert len(unstored) <= 3

    run_async(main())


def test_a_refused_append_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger lives on: nothing is read again, so the sequence ids must fall back by themselves."""

    async def main() -> None:
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

    run_async(main())


def test_a_new_incarnation_waits_for_what_the_old_one_has_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            await publish(client, 0)
            appends = HeldAppends(monkeypatch, world.topic("t").ledger)
            client.send_message(1)
            await wait_until(lambda: bool(appends.held))
            client.abort()
            async with await world.client() as successor:
                successor.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME))
                await successor.expect_nothing()
                appends.let_go()
                assert (await successor.expect(pb.CommandProducerSuccess)).last_sequence_id == 1
                monkeypatch.undo()
                assert (await publish(successor, 1, 2))[0] == REPEATED
            assert await stored(world) == [0, 1, 2]

    run_async(main())


def test_a_name_in_use_is_refused_at_once_while_its_holder_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes without a pause has always something under way: the other one would never be answered."""

    async def main() -> None:
        async with deduplicating() as (world, client), await world.client() as other:
            await connect(client)
            appends = HeldAppends(monkeypatch, world.topic("t").ledger)
            client.send_message(0)
            await client.ping()
            ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME)
            other.send(ask)
            await client.expect_nothing()  # it answers the broker's PING
            assert (await other.expect(pb.CommandError)).error == ServerError.PRODUCER_BUSY
            appends.let_go()
            await client.expect(pb.CommandSendReceipt)

    run_async(main())


def test_who_waits_for_its_predecessors_messages_is_told_when_the_topic_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with deduplicating(close_timeout_s=0.2) as (world, client):
            await connect(client)
            topic = world.topic("t")
            appends = HeldAppends(monkeypatch, topic.ledger)
            client.send_message(0)
            await client.ping()
            client.abort()
            async with await world.client() as successor:
                successor.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME))
                await successor.expect_nothing(0.05)
                assert len(topic.admission) == 1
                unloading = asyncio.create_task(world.broker.topics.unload(TOPIC))
                refused = await successor.expect(pb.CommandError)
                assert (refused.request_id, refused.error) == (1, ServerError.SERVICE_NOT_READY)
                appends.let_go()
                await unloading
                assert await connect(successor) == -1

    run_async(main())


def test_who_fences_its_own_name_goes_on_behind_what_it_pushed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        fencing = {"producer_name": NAME, "producer_access_mode": pb.ProducerAccessMode.ExclusiveWithFencing}
        async with deduplicating() as (world, old), await world.client() as new:
            await old.produce_on("t", **fencing)
            appends = HeldAppends(monkeypatch, world.topic("t").ledger)
            old.send_message(0)
            await old.ping()
            new.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, **fencing))
            assert (await old.expect(pb.CommandCloseProducer)).producer_id == 0
            await new.expect_nothing()
            appends.let_go()
            monkeypatch.undo()
            success = await new.expect(pb.CommandProducerSuccess)
            assert (success.last_sequence_id, success.topic_epoch) == (0, 1)
            assert (await publish(new, 0, 1))[0] == REPEATED
            assert await stored(world) == [0, 1]
            await old.expect_nothing(0.05)  # what was pushed aside is not answered

    run_async(main())


def test_names_of_who_is_connected_are_kept_beyond_the_bound() -> None:
    """Told its last sequence id it may send again what was not answered: not yet published is not unused."""

    async def main() -> None:
        async with deduplicating(deduplication={"max_names": 1}) as (world, client), await world.client() as other:
            await connect(client)
            await publish(client, 0, 1, 2)
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            assert await connect(client, epoch=1) == 2
            for producer_id, name in enumerate(("a", "b", "c")):
                await other.produce_on("t", producer_id, producer_name=name)
                metadata = pb.MessageMetadata(producer_name=name, sequence_id=0, publish_time=1)
                other.send_message(0, producer_id=producer_id, tail=encode_tail(metadata, b""))
                await other.expect(pb.CommandSendReceipt)
            deduplication(world).snapshot()
            assert await publish(client, 2) == [REPEATED]

    run_async(main())


def test_a_message_sent_twice_while_it_is_under_way_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
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

    run_async(main())


def test_sent_twice_and_refused_closes_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the failure is not answered as stored."""

    async def main() -> None:
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

    run_async(main())


def test_what_another_producer_has_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two producers write under one name: what the second sends behind must not be stored if the first one fails."""

    async def main() -> None:
        async with deduplicating() as (world, client), await world.client() as other:
            await connect(client)
            await other.produce_on("t", producer_name="another")
            appends = HeldAppends(monkeypatch, world.topic("t").ledger)
            client.send_message(0)
            await client.ping()
            other.send_message(0)  # its metadata has the same name
            other.send_message(1)
            assert (await other.expect(pb.CommandCloseProducer)).producer_id == 0
            appends.let_go()
            monkeypatch.undo()
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
            assert await stored(world) == [0]

    run_async(main())


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
def test_a_batch_is_a_repetition_only_if_all_of_it_is_stored(batches: list[tuple[int, int, int | None]], again: list[bool]) -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            assert await publish_batches(client, *batches) == again
            last = max(
                first + messages - 1 if highest in (None, (1 << 64) - 1) else highest for first, messages, highest in batches
            )
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            assert await connect(client, epoch=1) == last, "where an application goes on"
            assert await publish_batches(client, *batches) == [True] * len(batches)
            await world.fence("t")
            client.send_message(last + 1)
            await client.expect(pb.CommandCloseProducer)
            assert await reconnect(client, 2) == last
            assert await publish_batches(client, *batches) == [True] * len(batches)

    run_async(main())


def test_batches_by_key_are_told_apart_after_a_crash_between_them() -> None:
    """A snapshot, or what is read behind it, that knew only the highest id would call the second one a repetition."""

    async def main() -> None:
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

    run_async(main())


def test_ids_of_the_command_count_where_those_of_the_metadata_stand_still() -> None:
    async def main() -> None:
        async with deduplicating() as (_, client):
            await connect(client)
            for sequence_id in (0, 1, 2, 1):
                client.send_message(sequence_id, tail=message(0))
            receipts = [position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED for _ in range(4)]
            assert receipts == [False, False, False, True]

    run_async(main())


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


def test_of_a_chunked_message_the_last_chunk_counts() -> None:
    async def main() -> None:
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

    run_async(main())


def test_chunks_under_way_when_the_connection_breaks_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is let in when it is known what arrived of them."""

    async def main() -> None:
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

    run_async(main())


def test_a_snapshot_does_not_pass_a_message_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its chunks would be forgotten in a crash; but one whose rest never comes holds it for a while only."""

    async def main() -> None:
        async with deduplicating() as (world, client), await world.client() as other:
            await connect(client)
            await publish(client, 0)
            assert await publish_chunks(client, 1, 0, 1) == [False, False]
            await other.produce_on("t", producer_name="another")

            def sent_by_another(sequence_id: int) -> bytes:
                return encode_tail(pb.MessageMetadata(producer_name="another", sequence_id=sequence_id, publish_time=1), b"")

            async def publish_others(*sequence_ids: int) -> None:
                for sequence_id in sequence_ids:
                    other.send_message(sequence_id, tail=sent_by_another(sequence_id))
                for _ in sequence_ids:
                    await other.expect(pb.CommandSendReceipt)

            await publish_others(*range(20))
            cursor = world.topic("t").ledger.cursors[DEDUP_CURSOR]
            await deduplication(world).save()
            assert (cursor.mark_delete.entry_id, cursor.sequence_ids) == (0, {NAME: 0, "another": 19})
            await world.fence("t")
            client.send_message(9)
            await client.expect(pb.CommandCloseProducer)
            assert await reconnect(client, 1) == 0
            assert await publish_chunks(client, 1, 0, 1, 2) == [True, True, False]
            cursor = world.topic("t").ledger.cursors[DEDUP_CURSOR]
            await deduplication(world).save()
            assert cursor.mark_delete == world.topic("t").ledger.last_confirmed

            assert await publish_chunks(client, 2, 0) == [False]
            before = cursor.mark_delete
            await deduplication(world).save()
            assert cursor.mark_delete == before
            now = asyncio.get_running_loop().time
            monkeypatch.setattr(deduplication(world), "_now", lambda: now() + 121)
            deduplication(world).on_tick()
            assert cursor.mark_delete == world.topic("t").ledger.last_confirmed, "for so long"
            monkeypatch.undo()
            assert await publish_chunks(client, 3, 0) == [False]
            await other.expect(pb.CommandCloseProducer)
            await other.produce_on("t", producer_name="another", epoch=1)
            await publish_others(*range(20, 140))
            assert cursor.mark_delete.entry_id > 100, "for so many entries"
            assert await publish_chunks(client, 3, 0, 1, 2) == [True, False, False]

    run_async(main())


def test_names_that_begin_with_a_zero_byte_are_names_like_others() -> None:
    """What is saved besides has such names (deduplication.py)."""

    async def main() -> None:
        async with deduplicating() as (world, client):
            await client.produce_on("t", producer_name="\0" + NAME)
            await client.produce_on("t", 1, producer_name=NAME)
            for producer_id, name, first, repeated in ((0, "\0" + NAME, 7, False), (1, NAME, 20, False), (0, "\0" + NAME, 7, True)):
                metadata = pb.MessageMetadata(producer_name=name, sequence_id=first, publish_time=1, num_messages_in_batch=3)
                client.send_message(first, producer_id=producer_id, tail=encode_tail(metadata, b""))
                assert (position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED) == repeated
            await world.broker.topics.unload(TOPIC)
            for _ in range(2):
                await client.expect(pb.CommandCloseProducer)
            assert (await client.produce_on("t", producer_name="\0" + NAME)).last_sequence_id == 9
            assert (await client.produce_on("t", 1, producer_name=NAME)).last_sequence_id == 22

    run_async(main())


def test_ids_that_are_none_and_markers_are_stored_as_they_come() -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            for _ in range(2):
                for sequence_id in (0, (1 << 64) - 1):
                    client.send_message(sequence_id)
                client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=0), message(0, marker_type=10)))
            receipts = [await client.expect(pb.CommandSendReceipt) for _ in range(6)]
            assert [position_of(receipt) == REPEATED for receipt in receipts] == [False, False, False, True, False, False]
            assert deduplication(world).last_sequence_id(NAME) == 0

    run_async(main())


def test_names_are_those_of_the_messages_also_when_they_are_no_text() -> None:
    """Replicated messages keep the name of their first producer; what cannot be read as text is still a name."""

    def named(name: bytes, sequence_id: int) -> bytes:
        tail = message(sequence_id)
        assert len(name) == len(NAME)
        return add_checksum(tail[6:].replace(NAME.encode(), name))

    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            odd = b"\xff\xfe234567"
            for name, sequence_id in [(b"scripted", 5), (b"replica_", 2), (odd, 1), (odd, 1), (b"replica_", 2)]:
                client.send_message(sequence_id, tail=named(name, sequence_id))
            results = [position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED for _ in range(5)]
            assert results == [False, False, False, True, True]
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            assert await connect(client, epoch=1) == 5
            client.send_message(1, tail=named(b"\xff\xfe234567", 1))
            assert position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED

    run_async(main())


def test_the_policy_may_change_while_producers_are_connected() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await connect(client)
            await publish(client, 0, 1, 2)
            topic = world.topic("t")
            topic.on_policies(ON)
            await wait_until(lambda: deduplication(world).active)
            assert REPEATED not in await publish(client, 3, 4)
            assert await publish(client, 4) == [REPEATED]
            topic.on_policies(TopicPolicies())
            await wait_until(lambda: not deduplication(world).active)
            assert DEDUP_CURSOR not in topic.ledger.cursors
            assert REPEATED not in await publish(client, 4, 0, 1)
            # Back on: what is known from before would call 2, 3 and 4 duplicates, and they would be lost.
            topic.on_policies(ON)
            await wait_until(lambda: deduplication(world).active)
            assert REPEATED not in await publish(client, 2, 3, 4)
            assert await publish(client, 3) == [REPEATED]

    run_async(main())


def test_a_policy_that_flips_faster_than_the_store_ends_as_it_says_last() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await connect(client)
            topic = world.topic("t")
            for policies in (ON, TopicPolicies(), ON, TopicPolicies(), ON):
                topic.on_policies(policies)
                await asyncio.sleep(0)
            await wait_until(lambda: deduplication(world).active and deduplication(world)._switching is None)
            assert DEDUP_CURSOR in topic.ledger.cursors

    run_async(main())


def test_a_cursor_from_before_is_deleted_when_the_topic_opens_without_the_policy() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await connect(client)
            await publish(client, 0)
            ledger = world.topic("t").ledger
            cursor = await ledger.create_cursor(DEDUP_CURSOR, ledger.last_confirmed)
            cursor.set_sequence_ids({NAME: 100})
            await cursor.saved()
            await world.broker.topics.unload(TOPIC)
            await client.expect(pb.CommandCloseProducer)
            assert await connect(client, epoch=1) == -1
            assert DEDUP_CURSOR not in world.topic("t").ledger.cursors

    run_async(main())


def test_the_internal_cursor_is_nobody_elses() -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            await publish(client, 0)
            topic = world.topic("t")
            assert isinstance(topic, PersistentTopic)
            assert list(topic.subscriptions) == []
            await client.subscribe("t", "mine")
            await world.broker.topics.unload(TOPIC)
            topic = await world.broker.topics.get(TOPIC, may_create=False)
            assert list(topic.subscriptions) == ["mine"]
            with pytest.raises(Exception, match="used by the broker itself"):
                await topic.create_subscription(DEDUP_CURSOR, EARLIEST)

    run_async(main())


def test_snapshots_come_after_so_many_entries_and_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with deduplicating() as (world, client):
            await connect(client)
            cursor = world.topic("t").ledger.cursors[DEDUP_CURSOR]
            await publish(client, *range(9))
            assert cursor.sequence_ids == {}
            await publish(client, 9)
            assert cursor.sequence_ids == {NAME: 9}
            assert cursor.mark_delete.entry_id == 9
            await publish(client, 10)
            assert cursor.sequence_ids == {NAME: 9}
            found = deduplication(world)
            found.on_tick()
            assert cursor.sequence_ids == {NAME: 9}
            monkeypatch.setattr(found, "_now", lambda: asyncio.get_running_loop().time() + 121)
            found.on_tick()
            assert cursor.sequence_ids == {NAME: 10}

    run_async(main())


@pytest.mark.parametrize("how", ["trim", "truncate"])
def test_its_cursor_keeps_nothing_that_is_to_go(how: str) -> None:
    async def main() -> None:
        async with BrokerWorld(policies={"deduplication": True}) as world, await world.client() as client:
            await client.subscribe("t", "s")
            await connect(client)
            await publish(client, 0, 1, 2)
            topic = world.topic("t")
            if how == "trim":
                await topic.subscriptions["s"].clear_backlog()
                await topic.ledger.truncate()  # the ledger is not the last one any more
                await topic.trim()
            else:
                await topic.truncate()
            assert await stored(world) == []
            assert await publish(client, 2) == [REPEATED]

    run_async(main())


def test_names_that_nobody_uses_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with deduplicating(deduplication={"idle_s": 500.0}) as (world, client):
            await connect(client)
            await publish(client, 0)
            found = deduplication(world)
            now = asyncio.get_running_loop().time
            monkeypatch.setattr(found, "_now", lambda: now() + 501)
            found.on_tick()
            assert len(found.sequences) == 1, "it is connected"
            monkeypatch.undo()
            await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=1), pb.CommandSuccess)
            found.on_tick()
            assert len(found.sequences) == 1
            monkeypatch.setattr(found, "_now", lambda: now() + 1001)
            found.on_tick()
            assert len(found.sequences) == 0
            assert world.topic("t").ledger.cursors[DEDUP_CURSOR].sequence_ids == {}

    run_async(main())


def test_a_message_above_the_policys_size_is_refused_and_nothing_overtakes_it() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await connect(client)
            await publish(client, 0)
            world.topic("t").on_policies(TopicPolicies(max_message_bytes=1000))
            client.send_message(1, bytes(100))
            client.send_message(2, bytes(2000))
            client.send_message(3, bytes(100))
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 1
            error = await client.expect(pb.CommandSendError)
            assert (error.sequence_id, error.error) == (2, ServerError.NOT_ALLOWED_ERROR)
            assert "1000" in error.message
            assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
            await connect(client, epoch=1)
            await publish(client, 3)
            assert await stored(world) == [0, 1, 3]

    run_async(main())


def test_a_message_that_asks_for_a_longer_delay_than_the_policy_allows_is_refused() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await connect(client)
            world.topic("t").on_policies(TopicPolicies(max_delay_ms=1000))
            for sequence_id, delay_ms in enumerate((1000, 1001)):
                tail = message(sequence_id, publish_time=10_000, deliver_at_time=10_000 + delay_ms)
                client.send_message(sequence_id, tail=tail)
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
            error = await client.expect(pb.CommandSendError)
            assert (error.sequence_id, error.error) == (1, ServerError.NOT_ALLOWED_ERROR)
            assert "1001 ms" in error.message
            await client.expect(pb.CommandCloseProducer)

    run_async(main())


def test_a_message_that_is_not_encrypted_is_refused_where_the_policy_demands_it() -> None:
    async def main() -> None:
        async with BrokerWorld() as world, await world.client() as client:
            await client.produce_on("t", encrypted=True)
            world.topic("t").on_policies(TopicPolicies(encryption_required=True))
            key = pb.EncryptionKeys(key="k", value=b"v")
            client.send_message(0, tail=message(0, encryption_keys=[key], encryption_algo="a"))
            client.send_message(1)
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
            assert (await client.expect(pb.CommandSendError)).sequence_id == 1
            await client.expect(pb.CommandCloseProducer)

    run_async(main())
