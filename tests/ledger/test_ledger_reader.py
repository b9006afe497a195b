"""Reading: replicas, damage, what each error means, and never past what is confirmed."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import (
    ClosedLedger,
    EntryBeyondEndError,
    EntryDamagedError,
    EntryUnavailableError,
    LedgerFencedError,
    LedgerLostError,
    LedgerReader,
    LedgerWriter,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from cepheid_ledger.lac_reads import lac_of
from cepheid_ledger.ledger_reader import nearest_from, positions_by_distance
from cepheid_ledger.replica_read import ReplicaFailure, explain
from cepheid_metadata import Fragment, Versioned
from cepheid_rpc import LacAnswer, ReadRequest, Status, encode_group
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def written(world: LedgerWorld, count: int, ensemble: str = "abc", size: int = 1) -> LedgerWriter:
    """A closed ledger of `count` entries, on all of its bookies."""
    writer = await world.create_on(ensemble, ack_quorum=len(ensemble))
    for n in range(count):
        await append(writer, [b"%d" % (n % 10) * size])
    await writer.close()
    return writer


async def reader_starting_at(world: LedgerWorld, writer: LedgerWriter, bookie: str) -> LedgerReader:
    reader = await world.client.open_reader(writer.ledger_id)
    reader._turn = reader.metadata.fragments[0].ensemble.index(bookie)
    return reader


async def test_a_read_is_bounded_by_bytes_but_gives_at_least_one_entry() -> None:
    async with ledger_world() as world:
        writer = await written(world, 5, size=100)
        reader = await world.client.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(1, 4, max_bytes=1)) == [b"1" * 100]
        assert len(payloads_of(await reader.read(0, 4, max_bytes=300))) == 3
        assert len(payloads_of(await reader.read(2, 3, max_bytes=1 << 20))) == 2


@pytest.mark.parametrize("fault", ["damaged", "missing", "down", "hang", "lost-everything"])
async def test_a_bad_replica_is_read_around(fault: str) -> None:
    async with ledger_world() as world:
        writer = await written(world, 3)
        bad = world.cluster["a"]
        if fault == "damaged":
            bad.damage(writer.ledger_id, 0)
        elif fault == "missing":
            del bad.entries[writer.ledger_id][0]
        elif fault == "lost-everything":
            del bad.entries[writer.ledger_id]
        else:
            setattr(bad, fault, True)
        reader = await reader_starting_at(world, writer, "a")
        assert payloads_of(await reader.read(0, 2, max_bytes=1 << 20)) == [b"0", b"1", b"2"]
        bad.reads.clear()
        await reader.read(0, 2, max_bytes=1 << 20)
        assert bad.reads == [], "the replica that answered is asked first next time"


async def test_good_entries_before_a_damaged_one_are_used() -> None:
    async with ledger_world("a") as world:
        writer = await written(world, 3, "a")
        world.cluster["a"].damage(writer.ledger_id, 2)
        reader = await world.client.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(0, 2, max_bytes=1 << 20)) == [b"0", b"1"]
        with pytest.raises(EntryUnavailableError, match="damaged"):
            await reader.read(2, 2, max_bytes=1 << 20)


async def test_a_slow_replica_gets_company() -> None:
    async with ledger_world(settings=FAST.model_copy(update={"read_timeout_s": 30.0})) as world:
        writer = await written(world, 3)
        world.cluster["a"].read_delay_s = 20.0
        reader = await reader_starting_at(world, writer, "a")
        start = asyncio.get_running_loop().time()
        assert len(payloads_of(await reader.read(0, 2, max_bytes=1 << 20))) == 3
        assert 0.04 < asyncio.get_running_loop().time() - start < 5


async def test_readers_move_on_to_the_next_replica_after_a_while() -> None:
    async with ledger_world() as world:
        writer = await written(world, 20, size=1 << 20)
        reader = await world.client.open_reader(writer.ledger_id)
        for entry_id in range(20):
            await reader.read(entry_id, entry_id, max_bytes=1)
        reads = sorted(len(bookie.reads) for bookie in world.cluster.bookies.values())
        assert reads == [0, 4, 16], "16 MB from one replica, then it is the turn of the next"


async def test_the_nearest_replicas_are_read_in_turn_and_the_others_only_when_those_fail() -> None:
    async with ledger_world() as world:
        writer = await written(world, 40, size=1 << 20)
        record, distances = await world.record(writer.ledger_id), {"a": 2, "b": 1, "c": 1}
        reader = LedgerReader(record, world.records, world.cluster.get, writer, FAST, distance_of=distances.__getitem__)
        for entry_id in range(40):
            await reader.read(entry_id, entry_id, max_bytes=1)
        assert [len(world.cluster[bookie].reads) > 0 for bookie in "abc"] == [False, True, True]
        for bookie in "bc":
            world.cluster[bookie].down = True
        assert payloads_of(await reader.read(0, 0, max_bytes=1)) == [b"0" * (1 << 20)]
        asked = {bookie: len(world.cluster[bookie].reads) for bookie in "bc"}
        await reader.read(1, 1, max_bytes=1)
        assert {bookie: len(world.cluster[bookie].reads) for bookie in "bc"} == asked, "the replica that answered is asked first"


@pytest.mark.parametrize(
    ("turn", "distances", "nearest", "order"),
    [
        (1, [0, 0, 0], 1, [1, 2, 0]),
        (4, [0, 0, 0], 1, [1, 2, 0]),
        (0, [2, 1, 0], 2, [2, 1, 0]),
        (2, [1, 2, 2, 1], 3, [3, 0, 1, 2]),
    ],
)
def test_the_order_in_which_replicas_are_asked(turn: int, distances: list[int], nearest: int, order: list[int]) -> None:
    assert nearest_from(turn, distances) == nearest
    assert positions_by_distance(nearest, distances) == order


NO_LEDGER, NO_ENTRY, IO_ERROR, BAD_DIGEST = Status.NO_LEDGER, Status.NO_ENTRY, Status.IO_ERROR, Status.BAD_DIGEST


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([NO_ENTRY, NO_ENTRY, NO_ENTRY], NoSuchEntryError),
        ([NO_ENTRY, NO_LEDGER, NO_ENTRY], NoSuchEntryError),
        ([NO_LEDGER, NO_LEDGER, NO_LEDGER], LedgerLostError),
        ([NO_ENTRY, IO_ERROR, NO_ENTRY], EntryUnavailableError),  # it may be on the one that failed
        ([NO_ENTRY, None, NO_LEDGER], EntryUnavailableError),  # no answer, or a damaged copy
        ([Status.UNKNOWN] * 3, EntryUnavailableError),
        ([BAD_DIGEST, NO_ENTRY, NO_LEDGER], EntryDamagedError),  # each says so of its own disk
        ([BAD_DIGEST] * 3, EntryDamagedError),
        ([BAD_DIGEST, BAD_DIGEST, IO_ERROR], EntryUnavailableError),
        ([BAD_DIGEST, None, NO_ENTRY], EntryUnavailableError),
    ],
)
def test_only_certain_noes_of_all_replicas_mean_no(answers: list[Status | None], error: type[Exception]) -> None:
    failures = [ReplicaFailure(bookie, "why", status) for bookie, status in zip("abc", answers, strict=True)]
    assert type(explain(ReadRequest(1, 5, 9), failures)) is error


async def test_the_errors_come_out_of_real_reads() -> None:
    async with ledger_world() as world:
        writer = await written(world, 3)
        for bookie in world.cluster.bookies.values():
            del bookie.entries[writer.ledger_id][1]
        reader = await world.client.open_reader(writer.ledger_id)
        with pytest.raises(NoSuchEntryError):
            await reader.read(1, 2, max_bytes=1)
        world.cluster["b"].down = True
        with pytest.raises(EntryUnavailableError, match="b is down"):
            await reader.read(1, 2, max_bytes=1)
        world.cluster["b"].down = False
        for bookie in world.cluster.bookies.values():
            del bookie.entries[writer.ledger_id]
        with pytest.raises(LedgerLostError):
            await reader.read(0, 2, max_bytes=1)
        await world.client.delete(writer.ledger_id)
        with pytest.raises(NoSuchLedgerError):
            await reader.read(0, 2, max_bytes=1)


async def test_a_reader_follows_its_own_process_writer_exactly() -> None:
    """Entries above LAC are on the bookies already and must not be given out (L9)."""
    async with ledger_world() as world:
        writer = await world.create()
        reader = await world.client.open_reader(writer.ledger_id)
        await append(writer, [b"0"])
        assert payloads_of(await reader.read(0, 99, max_bytes=1 << 20)) == [b"0"]
        for bookie in "ab":
            world.cluster[bookie].drop_adds = True
        pending = append(writer, [b"1"])
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == [0, 1])
        with pytest.raises(EntryBeyondEndError):
            await reader.read(1, 1, max_bytes=1)
        assert payloads_of(await reader.read(0, 99, max_bytes=1 << 20)) == [b"0"]
        await asyncio.gather(pending, return_exceptions=True)


async def test_it_says_when_all_who_may_know_more_are_silent() -> None:
    async with ledger_world() as world:
        writer = await world.create_on("abc", ack_quorum=2)
        other = world.another_client()
        reader = await other.open_reader(writer.ledger_id)
        await append(writer, [b"0"])
        await reader.read_lac()
        assert (reader.silent, reader.may_miss_entries) == ((), False)
        world.cluster["a"].down = True
        await reader.read_lac()
        assert (reader.silent, reader.may_miss_entries) == (("a",), False), "an entry with two copies is on b or c"
        world.cluster["b"].down = True
        await reader.read_lac()
        assert (reader.silent, reader.may_miss_entries) == (("a", "b"), True)
        world.cluster["a"].down = world.cluster["b"].down = False
        await writer.close()
        await reader.read_lac()
        assert not reader.may_miss_entries
        await other.aclose()


async def test_a_reader_elsewhere_learns_lac_from_bookies_and_the_end_from_metadata() -> None:
    async with ledger_world() as world:
        writer = await world.create_on("abc", ack_quorum=3)
        other = world.another_client()
        reader = await other.open_reader(writer.ledger_id)
        with pytest.raises(EntryBeyondEndError):
            await reader.read(0, 0, max_bytes=1)
        await append(writer, [b"0"])
        await append(writer, [b"1"])
        world.cluster["a"].down = True
        assert await reader.read_lac() == 0, "the LAC in the newest entry"
        assert payloads_of(await reader.read(0, 9, max_bytes=1 << 20)) == [b"0"]
        world.cluster["b"].explicit_lacs[writer.ledger_id] = 1
        assert await reader.read_lac() == 1, "told by the writer while it was idle"
        world.cluster["b"].down = True
        assert await reader.read_lac() == 1, "it never falls"
        world.cluster["a"].down = world.cluster["b"].down = False
        await append(writer, [b"2"])
        await writer.close()
        assert payloads_of(await reader.read(2, 9, max_bytes=1 << 20)) == [b"2"]
        await other.aclose()


async def test_a_read_stops_at_the_end_of_a_fragment() -> None:
    async with ledger_world("a", "b", "c", "d", "e", "f") as world:
        writer = await written(world, 4)
        await change_fragments(world, writer, {0: "abc", 2: "def"})
        for bookie in "def":
            world.cluster[bookie].hold(*world.cluster["a"].entries[writer.ledger_id].values())
        reader = await world.client.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(0, 3, max_bytes=1 << 20)) == [b"0", b"1"]
        for bookie in "abc":
            world.cluster[bookie].down = True
        assert payloads_of(await reader.read(2, 3, max_bytes=1 << 20)) == [b"2", b"3"]


async def test_entries_that_repair_has_moved_are_found() -> None:
    async with ledger_world("a", "d") as world:
        writer = await written(world, 2, "a")
        reader = await world.client.open_reader(writer.ledger_id)
        world.cluster["d"].hold(*world.cluster["a"].entries.pop(writer.ledger_id).values())
        await change_fragments(world, writer, {0: "d"})
        assert payloads_of(await reader.read(0, 1, max_bytes=1 << 20)) == [b"0", b"1"]


async def change_fragments(world: LedgerWorld, writer: LedgerWriter, fragments: dict[int, str]) -> None:
    found = await world.records.get(writer.ledger_id)
    assert found is not None
    changed = tuple(Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in fragments.items())
    await world.records.replace(writer.ledger_id, found.record.replace(fragments=changed), found.version)


@pytest.mark.parametrize("turns", range(8))
async def test_a_read_cancelled_anywhere_leaves_no_task(turns: int) -> None:
    async with ledger_world() as world:
        writer = await written(world, 3)
        world.cluster["a"].read_delay_s = world.cluster["b"].read_delay_s = 0.01
        reader = await world.client.open_reader(writer.ledger_id)
        before = len(asyncio.all_tasks())
        read = asyncio.create_task(reader.read(0, 2, max_bytes=1 << 20))
        for _ in range(turns):
            await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        assert len(asyncio.all_tasks()) == before
        assert len(payloads_of(await reader.read(0, 2, max_bytes=1 << 20))) == 3


class StaleStore(FaultyStore):
    """A follower that shows the past of one key until `sync` is called."""

    past: Versioned | None = None
    syncs = 0

    async def get(self, key: str) -> Versioned | None:
        return self.past if self.past is not None else await super().get(key)

    async def sync(self, key: str) -> None:
        self.syncs += 1
        self.past = None


async def test_a_reader_beside_a_writer_that_failed_hears_of_the_end_that_others_gave_the_ledger() -> None:
    async with ledger_world(*"abc") as world:
        writer = await world.create_on("abc")
        await append(writer, [b"0"])
        reader = await world.client.open_reader(writer.ledger_id)
        world.cluster["a"].hold(encode_group(writer.ledger_id, 1, 0, 1, [b"1"]))  # half written
        assert await world.another_client().recover(writer.ledger_id) == ClosedLedger(1, 2)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"1"])
        assert await reader.read_lac() == 1
        assert payloads_of(await reader.read(1, 1, max_bytes=1)) == [b"1"]


def test_of_a_bookie_that_is_not_sure_no_lac_is_believed() -> None:
    assert lac_of(LacAnswer(Status.OK, 7, 7), 1) == 7
    assert lac_of(LacAnswer(Status.UNKNOWN, 7, 7), 1) == -1


async def test_a_follower_that_lags_does_not_open_a_closed_ledger_again() -> None:
    """L9: the known end of one reader never falls, and no entry that it showed comes to be above it."""
    async with ledger_world(*"abc", store_of=StaleStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"0", b"1"])
        past = await world.store._store.get(world.records.key_of(writer.ledger_id))
        await writer.close()
        reader = await world.another_client().open_reader(writer.ledger_id)
        reader._records = world.records  # the session that comes to lag
        assert reader.known_end == 1
        for bookie in "abc":
            world.cluster[bookie].down = True
        world.store.past = past
        with pytest.raises(EntryUnavailableError):
            await reader.read(1, 1, max_bytes=1)
        assert reader.known_end == 1
        for bookie in "abc":
            world.cluster[bookie].down = False
        assert payloads_of(await reader.read(1, 1, max_bytes=1)) == [b"1"]


async def test_a_no_of_all_replicas_counts_only_under_the_record_in_force() -> None:
    """Repair has moved the ledger and the old bookies have dropped it; the follower that is asked has not heard of it."""
    async with ledger_world("a", "b", "d", "e", store_of=StaleStore) as world:
        writer = await written(world, 2, "ab")
        reader = await world.client.open_reader(writer.ledger_id)
        world.store.past = await world.store._store.get(world.records.key_of(writer.ledger_id))
        past = world.store.past
        world.store.past = None
        for old, new in zip("ab", "de", strict=True):
            world.cluster[new].hold(*world.cluster[old].entries.pop(writer.ledger_id).values())
        await change_fragments(world, writer, {0: "de"})
        world.store.past = past
        assert payloads_of(await reader.read(0, 1, max_bytes=1 << 20)) == [b"0", b"1"]
        assert world.store.syncs == 1
        for bookie in "de":
            del world.cluster[bookie].entries[writer.ledger_id][1]
        with pytest.raises(NoSuchEntryError):
            await reader.read(1, 1, max_bytes=1)


@pytest.mark.parametrize("lost", [True, False])
async def test_without_metadata_nothing_is_denied_for_certain(lost: bool) -> None:
    async with ledger_world("a", "b", store_of=FaultyStore) as world:
        writer = await written(world, 2, "ab")
        reader = await world.client.open_reader(writer.ledger_id)
        for bookie in world.cluster.bookies.values():
            if lost:
                del bookie.entries[writer.ledger_id][1]
            else:
                bookie.down = True
        world.store.unreadable = 100
        with pytest.raises(EntryUnavailableError):
            await reader.read(1, 1, max_bytes=1)


async def test_a_reader_runs_after_a_ledger_that_moves_again_and_again() -> None:
    async with ledger_world(*"abcdef") as world:
        writer = await written(world, 4, "a")
        reader = await world.client.open_reader(writer.ledger_id)
        here = world.cluster["a"].entries.pop(writer.ledger_id)
        moves = iter("bcde")
        original = world.records.get

        async def get_and_move(ledger_id: int) -> object:
            if (there := next(moves, None)) is not None:
                await change_fragments(world, writer, {0: there})
                if there == "e":
                    world.cluster["e"].hold(*here.values())
            return await original(ledger_id)

        reader._records = type("Records", (), {})()  # the reader's view alone moves
        reader._records.get, reader._records.store, reader._records.key_of = (
            get_and_move,
            world.records.store,
            world.records.key_of,
        )
        assert payloads_of(await reader.read(0, 3, max_bytes=1 << 20)) == [b"0", b"1", b"2", b"3"]


async def test_a_reader_of_an_open_ledger_elsewhere_follows_it_to_new_bookies() -> None:
    """With a live writer that replaces a bookie: entries before and behind the change are read from whoever has them."""
    async with ledger_world(*"abcd") as world:
        writer = await world.create_on("abc")
        other = world.another_client()
        reader = await other.open_reader(writer.ledger_id)
        await append(writer, [b"0"])
        world.cluster["b"].down = True
        world.cluster["b"].break_streams()
        await append(writer, [b"1"])
        await wait_until(lambda: "d" in writer.metadata.last_fragment.ensemble, what="another bookie in b's place")
        await append(writer, [b"2"])
        await append(writer, [b"3"])
        assert await reader.read_lac() >= 2
        for bookie in "ac":
            world.cluster[bookie].entries[writer.ledger_id].pop(2)  # what is left of entry 2 is where the change put it
        assert payloads_of(await reader.read(0, 1, max_bytes=1 << 20)) == [b"0", b"1"]
        assert payloads_of(await reader.read(2, 2, max_bytes=1)) == [b"2"]
        await other.aclose()
