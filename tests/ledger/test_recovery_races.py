"""Recoverers against each other, against the writer, and against their own deaths: random histories, judged by the invariants.

Each history: a writer whose last entries are half written, two or three recoverers in processes of their own that start, die and
find bookies down or silent at random; then everything is healed and somebody recovers. L1, L4, L5, L6, L7, L8, L10, L12, V2.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from cepheid_ledger import (
    ClosedLedger,
    EntryUnavailableError,
    LedgerClient,
    LedgerClosedError,
    LedgerError,
    LedgerFencedError,
    LedgerWriter,
    RecoveryFailedError,
    assert_legal_change,
)
from cepheid_ledger.recovery_state import write_set_positions
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState
from cepheid_rpc import EntryGroup, Status, encode_group
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SIZES = [(3, 3, 2), (2, 2, 2), (3, 3, 3), (2, 2, 1), (4, 3, 2), (4, 2, 2), (3, 2, 1)]
QUICK = FAST.model_copy(
    update={
        "recovery_timeout_s": 0.03,
        "add_timeout_s": 0.05,
        "read_timeout_s": 0.03,
        "speculative_read_s": 0.01,
        "quarantine_s": 0.0,
    }
)


@dataclass
class History:
    """One ledger as its writer left it: `acknowledged` is the last entry that the writer was told of."""

    world: LedgerWorld
    rng: random.Random
    ledger_id: int
    acknowledged: int
    lost: str = ""  # a bookie that lost everything and is in limbo
    ends: list[ClosedLedger] = field(default_factory=list)

    async def record(self) -> LedgerMetadata:
        return await self.world.record(self.ledger_id)


async def half_written(world: LedgerWorld, rng: random.Random, size: int, write_quorum: int, ack_quorum: int) -> History:
    """Confirmed entries on at least Qa of their bookies, then some on any of them. Perhaps in a second, perhaps empty fragment."""
    ensemble = "abcd"[:size]
    writer = await world.create_on(ensemble, ack_quorum, write_quorum)
    acknowledged, pushed = rng.choice([-1, 0, 3]), rng.randrange(4)
    ensembles = [ensemble] * (acknowledged + 1 + pushed)
    if acknowledged >= 0 and rng.random() < 0.4:  # the writer replaced a bookie behind what was confirmed by then
        start = rng.randrange(acknowledged + 2)
        changed = ensemble.replace(rng.choice(ensemble), "e")
        ensembles[start:] = [changed] * (len(ensembles) - start)
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        fragments = tuple(Fragment(first_entry_id=f, ensemble=tuple(e)) for f, e in {0: ensemble, start: changed}.items())
        await world.records.replace(writer.ledger_id, found.record.replace(fragments=fragments), found.version)
    for entry_id, of_entry in enumerate(ensembles):
        lac = min(entry_id - 1, acknowledged) if rng.random() < 0.7 else -1
        entry = encode_group(writer.ledger_id, entry_id, lac, 2 * entry_id, [b"%02d" % entry_id])
        write_set = [of_entry[position] for position in write_set_positions(entry_id, size, write_quorum)]
        least = ack_quorum if entry_id <= acknowledged else 0
        most = write_quorum if entry_id <= acknowledged else ack_quorum if rng.random() < 0.3 else max(ack_quorum - 1, 0)
        for bookie in rng.sample(write_set, rng.randint(least, max(least, most))):
            world.cluster[bookie].hold(entry)
    await writer.aclose()
    history = History(world, rng, writer.ledger_id, acknowledged)
    if ack_quorum > 1 and rng.random() < 0.5:
        history.lost = rng.choice(ensemble)
        world.cluster[history.lost].entries.pop(writer.ledger_id, None)
        world.cluster[history.lost].limbo = True
    return history


async def recover_or_die(history: History, client: LedgerClient) -> None:
    """One attempt of one process, which may end in the middle."""
    rng = history.rng
    await asyncio.sleep(rng.random() * 0.01)
    attempt = asyncio.ensure_future(client.recover(history.ledger_id))
    if rng.random() < 0.5:
        _, pending = await asyncio.wait([attempt], timeout=rng.random() * 0.03)
        for task in pending:
            task.cancel()
    try:
        history.ends.append(await attempt)
    except (asyncio.CancelledError, RecoveryFailedError, EntryUnavailableError):
        pass


async def shake(history: History) -> None:
    """Bookies go and come back while the recoverers work."""
    rng, bookies = history.rng, list(history.world.cluster.bookies.values())
    for bookie in bookies:
        bookie.delay_s, bookie.read_delay_s = rng.random() * 0.002, rng.random() * 0.004
    for _ in range(rng.randrange(6)):
        bookie = rng.choice(bookies)
        fault = rng.choice(["down", "hang", "lac_down", "refuse"])
        setattr(bookie, fault, Status.IO_ERROR if fault == "refuse" else True)
        await asyncio.sleep(rng.random() * 0.01)
        if rng.random() < 0.6:
            setattr(bookie, fault, None if fault == "refuse" else False)
    await asyncio.sleep(0.005)


def heal(history: History) -> None:
    for bookie in history.world.cluster.bookies.values():
        bookie.down = bookie.hang = bookie.lac_down = False
        bookie.refuse = None
        bookie.delay_s = bookie.read_delay_s = 0.0


def check(history: History, record: LedgerMetadata) -> None:
    world, ledger_id = history.world, history.ledger_id
    assert record.state is LedgerState.CLOSED
    end = ClosedLedger(record.last_entry_id or 0, record.length_bytes or 0)
    assert all(known == end for known in history.ends), f"L8: {history.ends}, {end}"
    assert end.last_entry_id >= history.acknowledged, f"L5: {history.acknowledged} was acknowledged, closed at {end}"
    assert end.length == 2 * (end.last_entry_id + 1), "L12"
    for entry_id in range(end.last_entry_id + 1):
        ensemble = record.fragment_of(entry_id).ensemble
        holders = [
            ensemble[position]
            for position in write_set_positions(entry_id, record.ensemble_size, record.write_quorum)
            if entry_id in world.cluster[ensemble[position]].ids(ledger_id)
        ]
        assert len(holders) >= record.ack_quorum - (history.lost in ensemble), (
            f"L6, L10: entry {entry_id} is on {holders} of {ensemble} only"
        )
    for bookie in world.cluster.bookies.values():  # L7: MemoryBookie asserts that one id has one value
        for entry_id, entry in bookie.entries.get(ledger_id, {}).items():
            assert entry.header(entry_id).last_add_confirmed <= min(entry_id - 1, history.acknowledged), "L4"


class WatchedStore(FaultyStore):
    """Notes every version of a ledger's record and checks each step (L1); now and then an answer is lost (scenario 8)."""

    rng: random.Random | None = None

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        before = await self._store.get(key)
        if self.rng is not None and self.rng.random() < 0.15:
            self.lose_answers = 1
        try:
            return await super().put(key, value, expected_version)
        finally:
            after = await self._store.get(key)
            if before is not None and after is not None and key.startswith("/ledgers/0"):
                assert_legal_change(LedgerMetadata.decode(before.value, key), LedgerMetadata.decode(after.value, key))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(12))
async def test_any_number_of_recoverers_that_die_agree_on_an_end_that_loses_nothing(sizes: tuple[int, int, int], seed: int) -> None:
    rng = random.Random(f"{sizes}/{seed}")
    async with ledger_world(*"abcdefg", settings=QUICK, store_of=WatchedStore) as world:
        history = await half_written(world, rng, *sizes)
        world.store.rng = rng
        clients = [world.client, world.another_client(QUICK, seed=seed), world.another_client(QUICK, seed=seed + 1)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shake(history))
            for client in clients[: rng.choice([2, 3])]:
                tasks.create_task(recover_or_die(history, client))
        heal(history)
        world.store.rng = None
        history.ends.append(await clients[1].recover(history.ledger_id))  # V2: no state needs an operator
        check(history, await history.record())
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize("turns", range(0, 60, 3))
@pytest.mark.parametrize("next_one", ["another", "the same"])
async def test_a_recoverer_that_dies_at_any_step_while_it_replaces_a_bookie(turns: int, next_one: str) -> None:
    """Scenario 3 at every turn: what the dead one replaced in memory is nowhere (L2), and the next one finds every entry."""
    async with ledger_world(*"abcde") as world:
        writer = await world.create_on("abc")
        whole = encode_group(writer.ledger_id, 0, -1, 0, [b"xx"] * 6)
        for bookie in "ab":
            world.cluster[bookie].hold(whole)
        world.cluster["b"].refuse = Status.READ_ONLY
        dying = asyncio.ensure_future(world.client.recover(writer.ledger_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        record = await world.record(writer.ledger_id)
        if not record.is_closed:
            assert [fragment.ensemble for fragment in record.fragments] == [("a", "b", "c")], "published before the end"
        client = world.client if next_one == "the same" else world.another_client()
        assert await client.recover(writer.ledger_id) == ClosedLedger(5, 12)
        history = History(world, random.Random(0), writer.ledger_id, -1)
        check(history, await history.record())
        await writer.aclose()
        await client.aclose()


@pytest.mark.parametrize("turns", range(0, 30, 2))
async def test_a_writer_that_closes_while_it_is_recovered_agrees_or_is_told(turns: int) -> None:
    """Both ends are right; only one is the ledger's (L8). A writer that loses is told so."""
    async with ledger_world(store_of=WatchedStore) as world:
        writer = await world.create()
        await append(writer, [b"xx"])
        pending = append(writer, [b"xx"])
        other = world.another_client()
        closing = asyncio.ensure_future(writer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        end = await other.recover(writer.ledger_id)
        (closed,) = await asyncio.gather(closing, return_exceptions=True)
        (outcome,) = await asyncio.gather(pending, return_exceptions=True)
        assert closed == end or isinstance(closed, LedgerFencedError), closed
        if isinstance(outcome, EntryGroup):
            assert end.last_entry_id == 1, "acknowledged, so it is in"
        else:
            assert isinstance(outcome, LedgerFencedError | LedgerClosedError), outcome
        assert await world.another_client().recover(writer.ledger_id) == end


@pytest.mark.parametrize("by", ["another last fragment", "open again"])
async def test_a_record_that_changed_where_only_recovery_may_change_it_stops_the_recovery(by: str) -> None:
    """L2: what was fenced and read is not what the closing change would be about."""
    async with ledger_world(*"abcd") as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        await writer.aclose()
        for bookie in world.cluster.bookies.values():
            bookie.read_delay_s = 0.5
        patient = FAST.model_copy(update={"recovery_timeout_s": 5.0})
        recovering = asyncio.ensure_future(world.another_client(patient).recover(writer.ledger_id))
        await wait_until(lambda: sum(bool(bookie.lac_requests) for bookie in world.cluster.bookies.values()) >= 2)
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        assert found.record.state is LedgerState.IN_RECOVERY
        if by == "open again":
            changed = found.record.replace(state=LedgerState.OPEN)
        else:
            changed = found.record.replace(fragments=(Fragment(first_entry_id=0, ensemble=("a", "d", "c")),))
        await world.records.replace(writer.ledger_id, changed, found.version)
        with pytest.raises(RecoveryFailedError, match="changed where only recovery may"):
            await recovering
        assert await world.record(writer.ledger_id) == changed


async def test_a_delete_fences_the_writer_first() -> None:
    """Scenario 25: what the old owner still sends to a ledger that is gone is acknowledged by nobody (L13, PR #4462)."""
    async with ledger_world() as world:
        writer = await world.create()
        other = world.another_client()
        reader = await other.open_reader(writer.ledger_id)
        await other.delete(writer.ledger_id)
        assert reader.known_end == -1
        with pytest.raises(LedgerError) as caught:
            await append(writer, [b"too late"])
        assert isinstance(caught.value, LedgerFencedError)
        await other.aclose()


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_what_is_acknowledged_while_a_ledger_is_deleted_was_in_it_before(turns: int) -> None:
    async with ledger_world() as world:
        writer = await world.create()
        other = world.another_client()
        pending = append(writer, [b"xx"])
        for _ in range(turns % 7):
            await asyncio.sleep(0)
        deleting = asyncio.ensure_future(other.delete(writer.ledger_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        late = append(writer, [b"xx"]) if writer.failure is None else pending
        await deleting
        with pytest.raises(LedgerError):
            await append(writer, [b"xx"])
        outcomes = await asyncio.gather(pending, late, return_exceptions=True)
        assert all(isinstance(outcome, EntryGroup | LedgerFencedError) for outcome in outcomes)
        await other.aclose()


async def long_ledger(world: LedgerWorld, count: int, lac: int) -> LedgerWriter:
    writer = await world.create()
    whole = encode_group(writer.ledger_id, 0, -1, 0, [b"x"] * (count - 10))
    tail = encode_group(writer.ledger_id, count - 10, lac, count - 10, [b"x"] * 10)
    for bookie in world.cluster.bookies.values():
        bookie.hold(whole, tail)
    return writer


@pytest.mark.parametrize("count", [100, 20_000])
async def test_recovery_costs_the_same_whatever_the_length(count: int) -> None:
    async with ledger_world() as world:
        writer = await long_ledger(world, count, lac=count - 11)
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(count - 1, count)
        for bookie in world.cluster.bookies.values():
            assert len(bookie.lac_requests) == 1
            assert len(bookie.reads) <= 2
            assert all(read.first_entry_id >= count - 10 for read in bookie.reads)
            assert sum(len(request.group) for request in bookie.add_log) == 10, "what lies above LAC is written back, no more"


@pytest.mark.deadline(10)
@pytest.mark.parametrize("hung", ["a", "b", "c"])
@pytest.mark.parametrize("when", ["fence", "read", "write back"])
async def test_a_bookie_that_falls_silent_during_recovery_does_not_delay_it(hung: str, when: str) -> None:
    """V1: its timeouts are longer than the test may take."""
    slow = FAST.model_copy(update={"recovery_timeout_s": 60.0, "add_timeout_s": 60.0, "read_timeout_s": 60.0})
    async with ledger_world(settings=slow) as world:
        writer = await long_ledger(world, 30, lac=5)
        bookies = world.cluster.bookies
        for bookie in bookies.values():
            bookie.delay_s = 0.01
        recovery = asyncio.ensure_future(world.client.recover(writer.ledger_id))
        if when == "read":
            await wait_until(lambda: sum(len(b.lac_requests) for b in bookies.values()) >= 2)
        elif when == "write back":
            await wait_until(lambda: any(b.add_log or b.streams for b in bookies.values()))
        bookies[hung].hang = True
        assert await recovery == ClosedLedger(29, 30)
        bookies[hung].hang = False
        await writer.aclose()
