"""What a cursor has not acknowledged, in entries, messages and bytes: always what a model says, whatever was in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_managed_ledger import Cursor, ManagedLedger, ManagedLedgerClosedError
from cepheid_managed_ledger.count_budget import CountBudget
from cepheid_managed_ledger.ledger_counts import Amount, LedgerCounts
from cepheid_metadata import Chain, MemoryStore, Position, chain_records
from cepheid_rpc import EntryGroup
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.managed_ledger.topic_world import ONE_BOOKIE, SETTINGS, TOPIC, TRIM, Broker, TopicWorld, append, topic_world
from tests.support import run_virtual, wait_until

pytestmark = pytest.mark.virtual_time

NOTHING = Amount()


def entry(messages: int, size: int = 10, publish_time_ms: int = 1) -> bytes:
    """As a producer would send it; a single message says nothing of batches."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=publish_time_ms)
    if messages > 1:
        metadata.num_messages_in_batch = messages
        metadata.compression, metadata.uncompressed_size = pb.ZSTD, 100 * messages  # so that they fit, whatever the size
    return encode_tail(metadata, b"x" * size)


async def append_entries(ledger: ManagedLedger, messages: Sequence[int], size: int = 10) -> list[Position]:
    payloads = [entry(count, size + index) for index, count in enumerate(messages)]
    done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
    ledger.append(payloads, lambda outcome, _: done.set_result(outcome), messages)  # type: ignore[arg-type]
    first = await done
    return [Position(first.ledger_id, first.entry_id + index) for index in range(len(payloads))]


# The counts of one ledger


@given(
    first=st.integers(0, 3),
    groups=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=1500), min_size=1, max_size=4),
    ranges=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 6000)), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_any_range_of_a_ledger(first: int, groups: list[list[tuple[int, int]]], ranges: list[tuple[int, int]]) -> None:
    counts = LedgerCounts(first)
    flat = [item for group in groups for item in group]
    for group in groups:
        messages = [count for _, count in group]
        counts.append([size for size, _ in group], None if sum(messages) == len(group) else messages)
    for one, other in ranges:
        start, end = sorted((one % (len(flat) + 1), other % (len(flat) + 1)))
        taken = flat[start:end]
        expected = Amount(len(taken), sum(count for _, count in taken), sum(size for size, _ in taken))
        assert counts.between(first + start, first + end) == expected
        assert counts.of(list(range(first + start, first + end))) == expected


def test_what_is_read_of_earlier_entries_comes_before() -> None:
    counts = LedgerCounts(2)
    counts.append([5, 6], None)
    before = LedgerCounts(0)
    before.append([1, 2], [1, 9])
    counts.prepend(before)
    assert counts.between(0, 4) == Amount(4, 12, 14)
    counts.append([7], None)
    assert counts.between(3, 5) == Amount(2, 2, 13)


# Against a model


@dataclass
class Model:
    """Every entry with its size and the messages of it that are not acknowledged."""

    entries: dict[Position, tuple[int, int]] = field(default_factory=dict)
    unacked: dict[Position, set[int]] = field(default_factory=dict)

    def add(self, positions: Sequence[Position], messages: Sequence[int], size: int) -> None:
        for index, (position, count) in enumerate(zip(positions, messages, strict=True)):
            self.entries[position] = (len(entry(count, size + index)), count)
            self.unacked[position] = set(range(count))

    def ack(self, positions: Sequence[Position]) -> None:
        for position in positions:
            self.unacked.pop(position, None)

    def amount(self) -> Amount:
        sizes = sum(self.entries[position][0] for position in self.unacked)
        return Amount(len(self.unacked), sum(map(len, self.unacked.values())), sizes)


OPS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.sampled_from([1, 1, 1, 2, 3, 70]), min_size=1, max_size=6)),
    st.tuples(st.just("ack"), st.lists(st.integers(0, 60), min_size=1, max_size=6)),
    st.tuples(st.just("cumulative"), st.integers(0, 60)),
    st.tuples(st.just("part"), st.tuples(st.integers(0, 60), st.integers(1, 2**70))),
    st.tuples(st.just("reopen"), st.booleans()),
    st.tuples(st.just("forget"), st.none()),
    st.tuples(st.just("read"), st.none()),
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ONE_BOOKIE, TRIM], ids=["kept", "trimmed"])
@given(ops=st.lists(OPS, max_size=25))
@settings(max_examples=100, deadline=None)
def test_a_backlog_is_what_the_model_says(config: object, ops: list[tuple[str, object]]) -> None:
    async def main() -> None:
        small = SETTINGS.model_copy(update={"ledger_max_bytes": 400, "counts_bytes": 4 << 10})
        async with topic_world(settings=small) as world:
            run = _Run(world, config)
            await run.open()
            await run.ledger.create_cursor("s", run.ledger.last_confirmed)
            for name, argument in ops:
                await getattr(run, name)(argument)
                await run.check(reading=name != "append")
            await run.check(reading=True)

    run_virtual(main())


class _Run:
    def __init__(self, world: TopicWorld, config: object) -> None:
        self.world = world
        self.config = config
        self.model = Model()
        self.broker: Broker
        self.ledger: ManagedLedger
        self.appended = 0

    @property
    def cursor(self) -> Cursor:
        return self.ledger.cursors["s"]

    def _pick(self, number: int) -> Position | None:
        positions = list(self.model.entries)
        return positions[-1 - number % len(positions)] if positions else None

    async def open(self) -> None:
        self.broker = self.world.broker()
        self.ledger = await self.broker.open(self.config)  # type: ignore[arg-type]

    async def append(self, messages: list[int]) -> None:
        positions = await append_entries(self.ledger, messages, size=20)
        self.model.add(positions, messages, 20)

    async def ack(self, numbers: list[int]) -> None:
        positions = [position for number in numbers if (position := self._pick(number)) is not None]
        self.cursor.acknowledge(positions)
        self.model.ack(positions)

    async def cumulative(self, number: int) -> None:
        if (position := self._pick(number)) is not None:
            self.cursor.acknowledge_cumulative(position)
            self.model.ack([other for other in list(self.model.unacked) if other <= position])

    async def part(self, argument: tuple[int, int]) -> None:
        number, mask = argument
        position = self._pick(number)
        if position is None or position not in self.model.unacked:
            return
        messages = self.model.entries[position][1]
        words = (mask & (2**64 - 1), mask >> 64)
        assert self.cursor.acknowledge_indexes(position, words, messages)
        left = {index for index in self.model.unacked[position] if mask >> index & 1}
        self.model.unacked[position] = left
        if not left:
            self.model.ack([position])

    async def reopen(self, crash: object) -> None:
        await self.cursor.saved()
        await (self.broker.crash() if crash else self.broker.aclose())
        self.world.brokers.remove(self.broker)
        await self.open()

    async def forget(self, _: object) -> None:
        for ledger_id in list(self.ledger.counts._counts):
            self.ledger.counts._budget.charge(self.ledger.counts, ledger_id, 0)
            self.ledger.counts.forget(ledger_id)

    async def read(self, _: object) -> None:
        await self.ledger.counts.unacknowledged(self.cursor.ack_set)

    def _behind(self, position: Position) -> int:
        return sum(
            size for other, (size, _) in self.model.entries.items() if other > position and other.ledger_id in self.ledger.ledgers
        )

    async def _check_edges(self) -> None:
        total = self.ledger.ledgers.total_bytes
        for limit in (0, 1, total // 3, total - 1, total, 2 * total):
            edge = await self.ledger.counts.position_leaving(max(0, limit))
            assert self._behind(edge) <= max(0, limit)
            if edge.entry_id >= 0 and edge.ledger_id in self.ledger.ledgers:
                assert self._behind(Position(edge.ledger_id, edge.entry_id - 1)) > max(0, limit), "no further than it must"

    async def check(self, *, reading: bool) -> None:
        mark_delete = self.cursor.mark_delete
        assert self.ledger.counts.bytes_after_known(mark_delete) in (None, self._behind(mark_delete))
        known = self.ledger.counts.unacknowledged_known(self.cursor.ack_set)
        assert known in (None, self.model.amount()), "what memory says is exact, or nothing"
        if reading:
            assert await self.ledger.counts.bytes_after(mark_delete) == self._behind(mark_delete)
            await self._check_edges()
            assert await self.ledger.counts.unacknowledged(self.cursor.ack_set) == self.model.amount()


# Single properties


async def test_nothing_is_read_for_what_this_opening_appended() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        positions = await append_entries(ledger, [1, 5, 1, 100])
        cursor.acknowledge([positions[1]])
        known = ledger.counts.unacknowledged_known(cursor.ack_set)
        assert known is not None
        assert (known.entries, known.messages) == (3, 102)
        assert await ledger.counts.unacknowledged(cursor.ack_set) == known
        assert ledger.counts.read_entries == 0


async def test_the_end_of_a_ledger_is_recorded_with_its_messages() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        await append_entries(ledger, [3, 4])
        first_id = ledger.ledgers.last_ledger_id
        await broker.aclose()
        chain: Chain = await world.chain()
        assert chain.messages == {first_id: 7}
        assert not chain.ledgers[-1].is_open, "a ledger that was closed in good order needs no recovery"
        ledger = await world.broker().open()
        cursor = ledger.cursors["s"]
        known = ledger.counts.unacknowledged_known(cursor.ack_set)
        assert known is not None
        assert (known.entries, known.messages) == (2, 7), "without reading anything"


async def test_an_end_behind_what_was_answered_is_not_recorded_with_too_few_messages() -> None:
    """A bookie is too slow for the closing, so the last append fails; it is stored before the ledger ends."""
    async with topic_world(settings=SETTINGS.model_copy(update={"drain_timeout_s": 0.05})) as world:
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("s", ledger.last_confirmed)
        await append_entries(ledger, [3])
        bookie, writer = world.cluster["a"], ledger._appender.writer
        bookie.hang = True
        outcomes: list[object] = []
        ledger.append([entry(4)], lambda outcome, _: outcomes.append(outcome), [4])
        save_cursors = ledger._cursors.aclose

        async def save_while_the_bookie_comes_back() -> None:
            bookie.hang = False
            await wait_until(lambda: writer.last_add_confirmed == 1)
            await save_cursors()

        ledger._cursors.aclose = save_while_the_bookie_comes_back
        await broker.aclose()
        assert [type(outcome) for outcome in outcomes] == [ManagedLedgerClosedError]
        chain: Chain = await world.chain()
        assert chain.ledgers[-1].entries == 2
        assert chain.messages is None, "nobody has counted the second entry"
        ledger = await world.broker().open()
        assert (await ledger.counts.unacknowledged(ledger.cursors["s"].ack_set)).messages == 7


async def test_after_a_crash_a_ledger_is_read_once_and_its_messages_are_recorded() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("s", ledger.last_confirmed)
        await append_entries(ledger, [3, 4, 1])
        first_id = ledger.ledgers.last_ledger_id
        await broker.crash()
        broker = world.broker()
        ledger = await broker.open()
        ack_set = ledger.cursors["s"].ack_set
        assert ledger.counts.unacknowledged_known(ack_set) is None, "memory knows that it does not know"
        assert (await ledger.counts.unacknowledged(ack_set)).messages == 8
        assert (await ledger.counts.unacknowledged(ack_set)).messages == 8
        assert ledger.counts.read_entries == 3
        await broker.aclose()
        assert (await world.chain()).messages == {first_id: 8}


async def test_of_single_messages_only_one_header_is_read() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        positions = await append_entries(ledger, [1] * 50)
        cursor.acknowledge_cumulative(positions[9])
        await broker.aclose()
        ledger = await world.broker().open()
        amount = await ledger.counts.unacknowledged(ledger.cursors["s"].ack_set)
        assert amount == Amount(40, 40, sum(len(entry(1, 10 + index)) for index in range(10, 50)))
        assert ledger.counts.read_entries == 0


async def test_the_budget_makes_who_was_used_longest_ago_forget() -> None:
    limited = SETTINGS.model_copy(update={"counts_bytes": 10_000})
    async with topic_world(settings=limited) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        for _ in range(10):
            await append_entries(ledger, [2] * 500)
            assert broker.ledgers.counts.used_bytes <= 10_000
        known = ledger.counts.unacknowledged_known(cursor.ack_set)
        assert known is not None, "all of the ledger: its totals are enough"
        assert known.messages == 10_000
        cursor.acknowledge_cumulative(Position(ledger.ledgers.last_ledger_id, 99))
        assert ledger.counts.unacknowledged_known(cursor.ack_set) is None
        assert (await ledger.counts.unacknowledged(cursor.ack_set)).messages == 10_000 - 200
        await broker.aclose()
        assert broker.ledgers.counts.used_bytes == 0


async def test_many_holes_are_summed_while_others_have_their_turn() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        for _ in range(40):
            await append_entries(ledger, [2] * 500)
        ledger_id = ledger.ledgers.last_ledger_id
        cursor.acknowledge([Position(ledger_id, entry_id) for entry_id in range(1, 20_000, 2)])
        assert ledger.counts.unacknowledged_known(cursor.ack_set) is None, "it would take too long in one go"
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        amount = await ledger.counts.unacknowledged(cursor.ack_set)
        counting.cancel()
        assert (amount.entries, amount.messages) == (10_000, 20_000)
        assert turns >= 2


async def test_exact_is_exact_for_one_moment_while_everything_moves() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("s", ledger.last_confirmed)
        positions = await append_entries(ledger, [1, 2, 3, 4, 5, 6])
        cursor.acknowledge([positions[3]])
        before = ledger.counts.unacknowledged_known(cursor.ack_set)
        ledger.counts.forget(ledger.ledgers.last_ledger_id)
        read, reading, go_on = ledger.counts._read, asyncio.Event(), asyncio.Event()

        async def slowly(position: Position, max_entries: int, max_bytes: int) -> list[EntryGroup]:
            reading.set()
            await go_on.wait()
            return await read(position, max_entries, max_bytes)

        ledger.counts._read = slowly
        measuring = asyncio.ensure_future(ledger.counts.unacknowledged(cursor.ack_set))
        await reading.wait()
        cursor.acknowledge([positions[4]])
        assert cursor.acknowledge_indexes(positions[5], [1], 6)
        await append_entries(ledger, [7, 8])
        ledger.counts.forget(ledger.ledgers.last_ledger_id)  # what came meanwhile, too
        go_on.set()
        assert await measuring == before
        assert await ledger.counts.unacknowledged(cursor.ack_set) == Amount(
            6,
            1 + 2 + 3 + 1 + 7 + 8,
            sum(len(entry(count, 10 + index)) for index, count in ((0, 1), (1, 2), (2, 3), (5, 6), (0, 7), (1, 8))),
        )


async def test_a_chain_without_counts_is_written_as_before() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        await append(ledger, b"x")
        assert (await world.chain()).format == 1
        await world.brokers[0].aclose()
        assert (await world.chain()).format == 2
        found = await chain_records(MemoryStore(world.tree)).get(TOPIC)
        assert found is not None
        assert found.record.messages is not None


def test_a_budget_counts_what_is_charged() -> None:
    class Owner:
        def __init__(self) -> None:
            self.forgotten: list[int] = []

        def forget(self, ledger_id: int) -> None:
            self.forgotten.append(ledger_id)

    owner, budget = Owner(), CountBudget(100)
    budget.charge(owner, 1, 60)
    budget.charge(owner, 2, 30)
    budget.note_used(owner, 1)
    budget.charge(owner, 3, 30)
    assert owner.forgotten == [2]
    assert budget.used_bytes == 90
    assert NOTHING.plus(Amount(1, 2, 3)).minus(Amount(1, 2, 3)) == NOTHING
