"""Durable cursors: whatever was saved is never delivered again, however many holes, whatever happens around the save."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cepheid_managed_ledger import (
    Cursor,
    CursorExistsError,
    CursorLedgerError,
    ManagedLedger,
    ManagedLedgerClosedError,
    ManagedLedgerConfig,
    ManagedLedgerError,
    ManagedLedgerFencedError,
    ManagedLedgerSettings,
    NoSuchCursorError,
    TooManyCursorsError,
    saved_cursor,
)
from cepheid_managed_ledger.cursor_state import EncodedBatches
from cepheid_metadata import CursorRecord, LedgerState, MemoryStore, Position, StoreUnavailableError, cursor_records, keys
from cepheid_rpc import Status
from tests.managed_ledger.losing_store import LosingStore, SteppingStore, changes
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import SETTINGS, TOPIC, TopicWorld, append, append_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

TINY = SETTINGS.model_copy(update={"cursor_inline_bytes": 100, "cursor_part_bytes": 40})


async def record_of(world: TopicWorld, name: str = "sub") -> CursorRecord:
    found = await cursor_records(MemoryStore(world.tree)).get((TOPIC, name))
    assert found is not None
    return found.record


def recorded_mark_delete(world: TopicWorld, name: str = "sub") -> Position:
    key = keys.cursor_key(TOPIC, name)
    return CursorRecord.decode(world.tree.nodes[key].value, key).mark_delete


def delivered(ledger: ManagedLedger, cursor: Cursor) -> list[Position]:
    """What dispatch would still send."""
    chain = [(ledger_id, ledger.ledgers.entries_of(ledger_id) or 0) for ledger_id in ledger.ledgers.ledger_ids]
    return [
        Position(ledger_id, entry)
        for ledger_id, count in chain
        if count
        for first, last in cursor.unacknowledged_runs(ledger_id, 0, count - 1)
        for entry in range(first, last + 1)
    ]


@pytest.mark.slow
@pytest.mark.deadline(60)
async def test_fifty_thousand_and_one_holes_survive_a_crash() -> None:
    """Scenario 32: apache/pulsar#25540 dropped the holes above a limit."""
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 100_003, group=5_000)
        cursor.acknowledge(positions[1::2])
        assert cursor.ack_set.acked_entries == 50_001
        await cursor.saved()
        record = await record_of(world)
        assert record.state is None
        assert record.cursor_ledger_id is not None
        await broker.crash()

        ledger = await world.broker(seed=2).open()
        cursor = ledger.cursors["sub"]
        assert delivered(ledger, cursor) == positions[0::2]
        assert cursor.backlog_entries == 50_002
        cursor.acknowledge(positions[0::2])
        await cursor.saved()
        record = await record_of(world)
        assert (record.mark_delete, record.cursor_ledger_id) == (positions[-1], None)
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        await assert_nothing_dangles(world)


async def test_half_a_batch_survives_a_crash_and_an_unload() -> None:
    """Scenario 32: apache/pulsar#26475, #26498: partial batches alone were not saved, or not loaded."""
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 3)
        cursor.acknowledge_indexes(positions[0], [0b1010], 4)
        await cursor.saved()
        await broker.crash()

        broker = world.broker(seed=2)
        cursor = (await broker.open()).cursors["sub"]
        assert cursor.unacked_words(positions[0]) == (0b1010,)
        cursor.acknowledge_indexes(positions[1], [0b01], 2)
        await broker.aclose()

        cursor = (await world.broker(seed=3).open()).cursors["sub"]
        assert cursor.unacked_words(positions[0]) == (0b1010,)
        assert cursor.unacked_words(positions[1]) == (0b01,)
        assert cursor.backlog_entries == 3


def counts_in(cursor: Cursor, positions: list[Position]) -> list[int]:
    return [cursor.redelivery_counts_in(ledger_id).get(entry_id, 0) for ledger_id, entry_id in positions]


@pytest.mark.parametrize("settings", [SETTINGS, TINY])
async def test_redelivery_counts_survive_a_crash_without_any_acknowledgement(settings: ManagedLedgerSettings) -> None:
    async with topic_world(settings=settings) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        for position in (*positions[::7], *positions[::14], positions[0]):
            cursor.count_redelivery(*position)
        counts = counts_in(cursor, positions)
        assert set(counts) == {0, 1, 2, 3}
        saved = ledger._cursors._saved["sub"]
        assert saved.is_dirty
        await wait_until(lambda: not saved.is_dirty)  # nobody asked: the flusher did it
        await broker.crash()

        broker = world.broker(seed=2)
        cursor = (await broker.open()).cursors["sub"]
        assert counts_in(cursor, positions) == counts
        cursor.acknowledge(positions[:10])
        await cursor.saved()
        await broker.crash()

        cursor = (await world.broker(seed=3).open()).cursors["sub"]
        assert counts_in(cursor, positions) == [0] * 10 + counts[10:]
        await cursor.reset(positions[5])
        assert counts_in(cursor, positions) == [0] * 400


@pytest.mark.parametrize("settings", [SETTINGS, TINY])
async def test_sequence_ids_and_the_mark_delete_position_are_saved_as_one(settings: ManagedLedgerSettings) -> None:
    """C6: after a crash anywhere the ids are those of the position."""
    async with topic_world(settings=settings) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("pulsar.dedup", ledger.first_position())
        positions = await append_all(ledger, 30)

        async def move(first: int) -> None:
            for number in range(first, 30):
                cursor.acknowledge_cumulative(positions[number])
                cursor.set_sequence_ids({f"producer-{n}": number for n in range(20)})
                await asyncio.sleep(0)
                if number % 4 == 0:
                    await cursor.saved()

        moving = asyncio.ensure_future(move(1))
        await wait_until(lambda: ledger._cursors._saved["pulsar.dedup"].mark_delete >= positions[2])
        await broker.crash()
        moving.cancel()
        await asyncio.wait([moving])

        broker = world.broker(seed=2)
        cursor = (await broker.open()).cursors["pulsar.dedup"]
        number = positions.index(cursor.mark_delete)
        assert cursor.sequence_ids == {f"producer-{n}": number for n in range(20)}
        cursor.set_sequence_ids({"producer-0": 99})
        await broker.aclose()

        cursor = (await world.broker(seed=3).open()).cursors["pulsar.dedup"]
        assert (cursor.mark_delete, cursor.sequence_ids) == (positions[number], {"producer-0": 99})
        await cursor.reset(positions[0])
        await cursor.saved()
        assert cursor.sequence_ids == {"producer-0": 99}


async def test_acknowledgements_without_response_are_saved_soon() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 10)
        cursor.acknowledge(positions[:4])
        cursor.acknowledge(positions[7:8])
        await wait_until(lambda: recorded_mark_delete(world) == positions[3])
        assert ledger._cursors.rounds == 1
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert delivered(ledger, ledger.cursors["sub"]) == positions[4:7] + positions[8:]


async def test_many_cursors_are_saved_in_few_writes() -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        writes: list[int] = []
        store.lose = lambda ops: writes.append(len(ops))  # type: ignore[func-returns-value]
        ledger = await world.broker(store=store).open()
        cursors = [await ledger.create_cursor(f"sub-{index}", ledger.first_position()) for index in range(50)]
        positions = await append_all(ledger, 3)
        writes.clear()
        for cursor in cursors:
            cursor.acknowledge(positions[1:2])
        await asyncio.gather(*(cursor.saved() for cursor in cursors))
        assert writes == [52], "one write: every cursor, the checks of the chain's version and of its mark"


async def test_large_states_move_to_a_ledger_and_back_and_nothing_is_left_behind() -> None:
    async with topic_world(settings=TINY) as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        other = await ledger.create_cursor("other", ledger.first_position())
        positions = await append_all(ledger, 400)
        seen: set[int | None] = set()
        for start in range(1, 200, 2):
            cursor.acknowledge(positions[start : start + 1])
            await cursor.saved()
            seen.add((await record_of(world)).cursor_ledger_id)
        assert len(seen) == 2, "inline, then one ledger"
        other.acknowledge(positions[1:300:2])
        await other.saved()
        assert (await record_of(world, "other")).cursor_ledger_id in seen
        cursor.acknowledge_cumulative(positions[250])
        await cursor.saved()
        assert (await record_of(world)).cursor_ledger_id is None
        await ledger.delete_cursor("other")
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        await assert_nothing_dangles(world)


@pytest.mark.deadline(60)
async def test_a_cursor_ledger_that_is_full_or_broken_is_replaced() -> None:
    settings = TINY.model_copy(update={"cursor_ledger_max_bytes": 2_000})
    async with topic_world("a", "b", settings=settings) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursors = [await ledger.create_cursor(f"sub-{index}", ledger.first_position()) for index in range(2)]
        positions = await append_all(ledger, 600)
        ledger_ids = set()
        for start in range(1, 600, 2):
            for cursor in cursors:
                cursor.acknowledge(positions[start : start + 1])
                await cursor.saved()
                ledger_ids.add((await record_of(world, cursor.name)).cursor_ledger_id)
        assert len(ledger_ids) > 5
        broken = ledger._cursors._cursor_ledgers.current
        assert broken is not None
        world.cluster[broken.writer.metadata.last_fragment.ensemble[0]].fence(broken.ledger_id)
        cursors[0].acknowledge(positions[2:3])
        await cursors[0].saved()
        assert (await record_of(world, "sub-0")).cursor_ledger_id == (await record_of(world, "sub-1")).cursor_ledger_id
        assert (await record_of(world, "sub-0")).cursor_ledger_id != broken.ledger_id
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert ledger.statistics().cursors_rewound == 0
        assert delivered(ledger, ledger.cursors["sub-0"]) == [positions[0], *positions[4::2]]
        assert delivered(ledger, ledger.cursors["sub-1"]) == positions[0::2]
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        chain = await world.chain()
        named = {(await record_of(world, name)).cursor_ledger_id for name in ("sub-0", "sub-1")}
        records = set(await world.ledger_records())
        assert {*(item.ledger_id for item in chain.ledgers), *named} <= records
        assert records <= {*(item.ledger_id for item in chain.ledgers), *named, *chain.deletions}


async def test_new_ledgers_of_entries_and_of_cursors_have_the_quorums_of_the_moment() -> None:
    settings = TINY.model_copy(update={"cursor_ledger_max_bytes": 2_000, "ledger_max_entries": 100, "ledger_min_age_s": 0.0})
    async with topic_world("a", "b", settings=settings) as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        before = set(await world.ledger_records())
        ledger.config = ManagedLedgerConfig(ensemble_size=2, write_quorum=2, ack_quorum=2)
        positions = await append_all(ledger, 300)
        for position in positions[1::2]:
            cursor.acknowledge([position])
            await cursor.saved()
        await wait_until(lambda: ledger.statistics().rollovers >= 1)
        new = {key: found for key, found in (await world.ledger_records()).items() if key not in before}
        assert {found.custom.get("use") for found in new.values()} == {"cursors", "entries"}
        assert {found.write_quorum for found in new.values()} == {2}


async def test_a_save_that_was_cut_off_does_not_hide_the_one_before() -> None:
    """A snapshot counts only with all of its parts."""
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1:200:2])
        await cursor.saved()
        cursor.acknowledge(positions[201:400:2])
        await cursor.saved()
        ledger_id = (await record_of(world)).cursor_ledger_id
        assert ledger_id is not None
        entries = world.cluster["a"].entries[ledger_id]
        await broker.crash()
        del entries[max(entries)]
        ledger = await world.broker(seed=2).open()
        assert delivered(ledger, ledger.cursors["sub"]) == positions[0:200:2] + positions[200:]
        assert ledger.statistics().cursors_rewound == 0


async def test_what_is_acknowledged_while_many_parts_of_batches_are_encoded_is_saved_next_and_nothing_is_invented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoding them gives others a turn, who acknowledge more: of parts, of the rest of a batch, and everything up to a batch."""
    async with topic_world() as world:
        broker = world.broker(settings=SETTINGS.model_copy(update={"cursor_flush_s": 600.0}))
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 20_000, group=1_000)
        for position in positions[1:]:
            assert cursor.acknowledge_indexes(position, (0b011,), 3)
        add, slices = EncodedBatches.add, []

        def add_and_acknowledge_more(self: EncodedBatches, *some: object) -> None:
            slices.append(some)
            add(self, *some)  # type: ignore[arg-type]
            if len(slices) == 2:
                cursor.acknowledge_indexes(positions[-1], (0b001,), 3)
                cursor.acknowledge_indexes(positions[-2], (0b100,), 3)
                cursor.acknowledge_cumulative(positions[10_000])

        monkeypatch.setattr(EncodedBatches, "add", add_and_acknowledge_more)
        await cursor.saved()
        assert len(slices) == 4
        assert ledger._cursors._saved["sub"].is_dirty, "what came meanwhile may be missing"
        world.cluster["a"].refuse = Status.READ_ONLY  # no last save to the cursor ledger
        await broker.crash()
        world.cluster["a"].refuse = None
        ledger = await world.broker(seed=2).open()
        restored = ledger.cursors["sub"]
        assert restored.mark_delete == positions[10_000], "of the last moment"
        assert restored.acknowledge([positions[-2]]) == []
        assert [restored.unacked_words(position) for position in positions[-3:]] == [(0b011,), None, (0b011,)]
        assert restored.backlog_entries == 20_000 - 10_001 - 1


async def test_a_lost_cursor_ledger_rewinds_to_the_record_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position(), properties={"team": "blue"})
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[:50])
        cursor.acknowledge(positions[51:200:2])
        await cursor.saved()
        ledger_id = (await record_of(world)).cursor_ledger_id
        assert ledger_id is not None
        await broker.crash()
        await MemoryStore(world.tree).delete(keys.ledger_key(ledger_id), None)
        ledger = await world.broker(seed=2).open()
        assert ledger.cursors["sub"].mark_delete == positions[49]
        assert ledger.cursors["sub"].backlog_entries == 350
        assert ledger.cursors["sub"].properties == {"team": "blue"}
        assert ledger.statistics().cursors_rewound == 1
    assert {"cursor.ledger_lost", "cursor.rewound"} <= {record.message for record in caplog.records}


async def test_an_opening_that_finds_no_cursor_ledger_because_the_next_owner_has_moved_on_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would start the subscription again at the position in a record of the past, and deliver what is saved as acknowledged."""
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1:200:2])
        await cursor.saved()
        ledger_id = (await record_of(world)).cursor_ledger_id
        assert ledger_id is not None
        await broker.crash()

        recover_states = saved_cursor.recover_states

        async def too_late(*args: Any) -> Any:
            monkeypatch.setattr(saved_cursor, "recover_states", recover_states)
            successor = (await world.broker(seed=3).open()).cursors["sub"]
            successor.acknowledge_cumulative(positions[300])
            await successor.saved()
            await wait_until(lambda: keys.ledger_key(ledger_id) not in world.tree.nodes)
            return await recover_states(*args)

        monkeypatch.setattr(saved_cursor, "recover_states", too_late)
        with pytest.raises(ManagedLedgerFencedError, match="sub"):
            await world.broker(seed=2).open()
    assert not {"cursor.ledger_lost", "cursor.rewound"} & {record.message for record in caplog.records}


async def test_a_reset_is_exact_and_outlives_a_crash() -> None:
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[:10] + positions[101:300:2])
        await cursor.saved()
        await cursor.reset(positions[5])
        assert cursor.first_unacknowledged() == positions[5]
        assert cursor.backlog_entries == 395
        assert (await record_of(world)).generation == 1
        await broker.crash()
        broker = world.broker(seed=2)
        ledger = await broker.open()
        cursor = ledger.cursors["sub"]
        assert delivered(ledger, cursor) == positions[5:]
        await cursor.reset(Position(1 << 62, 0))
        assert cursor.backlog_entries == 0
        await cursor.reset(Position(-1, -1))
        assert cursor.backlog_entries == 400


async def test_a_reset_into_a_batch_leaves_out_its_earlier_messages_and_outlives_a_crash() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 6)
        cursor.acknowledge_cumulative(positions[4])
        await cursor.reset(positions[2], (0b1100,))
        assert cursor.first_unacknowledged() == positions[2]
        assert cursor.unacked_words(positions[2]) == (0b1100,)
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        cursor = ledger.cursors["sub"]
        assert cursor.unacked_words(positions[2]) == (0b1100,)
        assert delivered(ledger, cursor) == positions[2:]
        await cursor.reset(Position(1 << 62, 0), (0b1100,))
        assert cursor.backlog_entries == 0


async def test_a_cursor_moves_on_without_acknowledgements_and_never_back() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 10)
        cursor.acknowledge([positions[1], positions[3]])
        cursor.count_redelivery(*positions[2])
        third = cursor.nth_unacknowledged(3)
        assert third == positions[4]
        assert cursor.advance_to(third) == 3
        assert cursor.advance_to(positions[2]) == 0
        assert cursor.mark_delete == positions[4]
        assert not cursor.redelivery_counts_in(positions[2].ledger_id)
        assert cursor.advance_to(Position(1 << 62, 5)) == 5
        assert cursor.mark_delete == positions[-1]
        assert cursor.refused_acks == 0
        await cursor.saved()
        await broker.crash()
        assert (await world.broker(seed=2).open()).cursors["sub"].backlog_entries == 0


async def test_properties_are_durable_and_leave_the_position_alone() -> None:
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position(), properties={"team": "a"})
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1::2])
        saving = asyncio.ensure_future(cursor.saved())
        await cursor.set_properties({"team": "b", "ü": ""})
        await saving
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        cursor = ledger.cursors["sub"]
        assert cursor.properties == {"team": "b", "ü": ""}
        assert delivered(ledger, cursor) == positions[::2]
        await ledger.delete_cursor("sub")
        with pytest.raises(NoSuchCursorError):
            await cursor.set_properties({})


async def test_acknowledgements_around_a_reset_are_before_it_or_void() -> None:
    """Scenario 33: apache/pulsar#26304: a reset that was queued got lost behind an acknowledgement."""
    for delay in range(12):
        async with topic_world() as world:
            broker = world.broker(store=SteppingStore(world.tree))
            ledger = await broker.open()
            cursor = await ledger.create_cursor("sub", ledger.first_position())
            positions = await append_all(ledger, 10)
            cursor.acknowledge(positions[:8])
            saving = asyncio.ensure_future(cursor.saved())
            resetting = asyncio.ensure_future(cursor.reset(positions[2]))
            for _ in range(delay):
                await asyncio.sleep(0)
            cursor.acknowledge(positions[8:9])
            await asyncio.gather(saving, resetting)
            await cursor.saved()
            memory = delivered(ledger, cursor)
            assert memory[0] == positions[2]
            assert memory in (positions[2:], positions[2:8] + positions[9:])
            await broker.crash()
            ledger = await world.broker(seed=2).open()
            assert delivered(ledger, ledger.cursors["sub"]) == memory


async def test_an_old_owner_confirms_what_it_had_saved_and_nothing_newer() -> None:
    """It has nothing to write for a repetition, and asks nobody; what is new has to be written, and there it is found out."""
    async with topic_world() as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 10)
        cursor.acknowledge(positions[:5])
        await cursor.saved()
        successor = await world.broker(seed=2).open()
        await successor.cursors["sub"].reset(positions[2])
        assert cursor.acknowledge(positions[3:5]) == []
        await cursor.saved()
        for acknowledge in (
            lambda: cursor.acknowledge_indexes(positions[7], (0b10,), 2),
            lambda: cursor.acknowledge(positions[8:9]),
            lambda: cursor.acknowledge_cumulative(positions[6]),
        ):
            acknowledge()
            with pytest.raises(ManagedLedgerError):
                await cursor.saved()
        assert delivered(successor, successor.cursors["sub"]) == positions[2:]
        again = await world.broker(seed=3).open()
        assert delivered(again, again.cursors["sub"]) == positions[2:]


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_save_whose_answer_got_lost(lost: str) -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 10)
        store.lose = lambda ops: lost if changes(ops, "cursors") and store.lost < 2 else None
        cursor.acknowledge(positions[1:3])
        await cursor.saved()
        assert store.lost == (1 if lost == "answer" else 2)
        cursor.acknowledge(positions[5:6])
        await cursor.saved()
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert delivered(ledger, ledger.cursors["sub"]) == [positions[0], *positions[3:5], *positions[6:]]


async def test_while_the_store_is_away_acknowledgements_wait_and_are_saved_afterwards() -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 4)
        multi = store.multi

        async def away(ops):  # type: ignore[no-untyped-def]
            raise StoreUnavailableError("the store is away")

        store.multi = away  # type: ignore[method-assign]
        cursor.acknowledge(positions[:2])
        with pytest.raises(StoreUnavailableError):
            await cursor.saved()
        cursor.acknowledge(positions[3:])
        store.multi = multi  # type: ignore[method-assign]
        await wait_until(lambda: recorded_mark_delete(world) == positions[1])
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert delivered(ledger, ledger.cursors["sub"]) == positions[2:3]


async def test_names_and_numbers_of_cursors_are_guarded() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"max_cursors": 2})) as world:
        ledger = await world.broker(store=SteppingStore(world.tree)).open()
        outcomes = await asyncio.gather(
            *(ledger.create_cursor("sub", ledger.first_position()) for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [Cursor, CursorExistsError, CursorExistsError]
        await ledger.create_cursor("second", ledger.first_position())
        with pytest.raises(TooManyCursorsError):
            await ledger.create_cursor("third", ledger.first_position())
        cursor = ledger.cursors["second"]
        await ledger.delete_cursor("second")
        with pytest.raises(NoSuchCursorError):
            await ledger.delete_cursor("second")
        with pytest.raises(NoSuchCursorError):
            await cursor.saved()
        await append(ledger, b"x")
        cursor.acknowledge([ledger.last_confirmed])
        again = await ledger.create_cursor("second", ledger.first_position())
        assert again.backlog_entries == 1
        await ledger.aclose()
        with pytest.raises(ManagedLedgerClosedError):
            await again.reset(Position(0, 0))


async def test_a_cursor_of_an_earlier_topic_of_this_name_is_not_taken_over() -> None:
    async with topic_world() as world:
        records = cursor_records(MemoryStore(world.tree))
        stale = CursorRecord(chain_incarnation="other", mark_delete=Position(3, 3), created_at_ms=0)
        await records.create((TOPIC, "sub"), stale)
        ledger = await world.broker().open()
        assert ledger.cursors == {}
        await ledger.create_cursor("sub", ledger.first_position())
        assert (await record_of(world)).chain_incarnation == (await world.chain()).incarnation


async def test_cancelled_calls_leave_memory_and_record_alike() -> None:
    for turns in range(12):
        async with topic_world() as world:
            ledger = await world.broker(store=SteppingStore(world.tree)).open()
            await append_all(ledger, 3)
            for call in (
                lambda ledger=ledger: ledger.create_cursor("sub", ledger.first_position()),
                lambda ledger=ledger: ledger.cursors["sub"].reset(Position(1 << 62, 0)),
                lambda ledger=ledger: ledger.delete_cursor("sub"),
            ):
                task = asyncio.ensure_future(call())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                for _ in range(20):
                    await asyncio.sleep(0)
                found = await cursor_records(MemoryStore(world.tree)).get((TOPIC, "sub"))
                assert (found is not None) == ("sub" in ledger.cursors)
                if found is None:
                    break
                assert found.record.mark_delete == ledger.cursors["sub"].mark_delete


@pytest.mark.deadline(60)
@pytest.mark.parametrize("seed", range(12))
async def test_saved_acknowledgements_survive_whatever_happens(seed: int) -> None:
    """Random acknowledgements, saves, rollovers, crashes and unloads; C1-C3 and C5 after each opening."""
    rng = random.Random(seed)
    settings = TINY.model_copy(update={"ledger_max_entries": rng.choice([7, 30, 1_000])})
    async with topic_world(settings=settings) as world:
        positions: list[Position] = []
        ever_acked: set[Position] = set()
        saved: set[Position] = set()
        for life in range(6):
            store = LosingStore(world.tree)
            store.lose = lambda _: rng.choice([None, None, None, None, "answer", "request"])
            broker = world.broker(store=store, seed=life + 10)
            ledger = await broker.open()
            if life == 0:
                await ledger.create_cursor("sub", ledger.first_position())
            cursor = ledger.cursors["sub"]
            acked = set(positions) - set(delivered(ledger, cursor))
            assert saved <= acked <= ever_acked, "what was saved is there, and nothing that nobody acknowledged"
            for _ in range(rng.randint(1, 25)):
                match rng.randint(0, 5):
                    case 0 | 1:
                        positions += await append_all(ledger, rng.randint(1, 20))
                    case 2 if positions:
                        some = rng.sample(positions, min(len(positions), rng.randint(1, 12)))
                        cursor.acknowledge(some)
                        acked |= set(some)
                    case 3 if positions and rng.random() < 0.2:
                        upto = rng.choice(positions)
                        cursor.acknowledge_cumulative(upto)
                        acked |= {position for position in positions if position <= upto}
                    case 4:
                        await cursor.saved()
                        saved = set(acked)
                assert cursor.backlog_entries == len(delivered(ledger, cursor))
            ever_acked |= acked
            if rng.random() < 0.5:
                await broker.crash()
            else:
                await broker.aclose()
                saved = set(acked)
        ledger = await world.broker(seed=99).open()
        assert saved <= set(positions) - set(delivered(ledger, ledger.cursors["sub"]))
        records = await world.ledger_records()
        assert all(records[item.ledger_id].state is LedgerState.CLOSED for item in ledger.chain.ledgers[:-1])


async def test_a_cursor_ledger_that_cannot_be_written_fails_the_save_and_not_the_topic() -> None:
    async with topic_world(settings=TINY) as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1:399:2])
        world.cluster["a"].refuse = Status.READ_ONLY
        with pytest.raises(Exception, match="ledger"):
            await cursor.saved()
        world.cluster["a"].refuse = None
        await cursor.saved()
        assert (await record_of(world)).cursor_ledger_id is not None


async def test_cursors_without_many_holes_are_saved_while_no_cursor_ledger_can_be_written() -> None:
    """With full disks consumers go on, and what they acknowledge frees the disks: one subscription's holes stop no other."""
    async with topic_world(settings=TINY) as world:
        ledger = await world.broker().open()
        holey = await ledger.create_cursor("holey", ledger.first_position())
        other = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        world.cluster["a"].refuse = Status.READ_ONLY
        holey.acknowledge(positions[1:399:2])
        other.acknowledge_cumulative(positions[5])
        saves = await asyncio.gather(holey.saved(), other.saved(), return_exceptions=True)
        assert isinstance(saves[0], CursorLedgerError)
        assert saves[1] is None
        assert recorded_mark_delete(world) == positions[5]
        other.acknowledge_cumulative(positions[6])
        await wait_until(lambda: recorded_mark_delete(world) == positions[6], what="the flusher")


async def test_a_cursor_that_cannot_be_saved_holds_no_more_than_it_must() -> None:
    settings = TINY.model_copy(update={"ledger_max_entries": 100, "cursor_inline_bytes": 40})
    async with topic_world(settings=settings) as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 150)
        await wait_until(lambda: len(ledger.chain.ledgers) == 2)
        positions += await append_all(ledger, 50)
        cursor.acknowledge_cumulative(positions[160])
        await cursor.saved()
        world.cluster["a"].refuse = Status.READ_ONLY
        cursor.acknowledge(positions[161:199:2])
        with pytest.raises(CursorLedgerError):
            await cursor.saved()
        ledger.config = ManagedLedgerConfig()
        assert await ledger.trim() == 1, "which frees the disk"
        world.cluster["a"].refuse = None
