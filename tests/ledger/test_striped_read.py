"""Reading striped ledgers (E > Qw): the core against a model, and the driver over bookies that fail."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_ledger import EntryUnavailableError, LedgerReader, NoSuchEntryError
from cepheid_ledger.recovery_state import holds_any, write_set_positions
from cepheid_ledger.replica_read import ReplicaFailure
from cepheid_ledger.striped_read import StripeMerge, _Said
from cepheid_metadata import Fragment, LedgerState
from cepheid_rpc import EntryGroup, Status, encode_group
from tests.ledger.ledger_world import FAST, LedgerWorld, ledger_world, payloads_of

pytestmark = pytest.mark.virtual_time

sizes = st.integers(2, 6).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1)))


def entry(entry_id: int) -> EntryGroup:
    return encode_group(7, entry_id, entry_id - 1, 0, [b"%d" % entry_id])


@given(sizes, st.integers(0, 1 << 40), st.integers(0, 9), st.integers(0, 9), st.data())
def test_the_first_choice_holds_everything_and_avoids_whom_it_can(
    size: tuple[int, int], first: int, count: int, turn: int, data: st.DataObject
) -> None:
    ensemble_size, write_quorum = size
    avoided = data.draw(st.lists(st.integers(0, ensemble_size - 1), max_size=ensemble_size))
    merge = StripeMerge("abcdef"[:ensemble_size], write_quorum, first, first + count)
    chosen = merge.first_choice(turn, avoided)
    assert len(chosen) == len(set(chosen))
    for entry_id in range(first, first + count + 1):
        write_set = write_set_positions(entry_id, ensemble_size, write_quorum)
        assert any(position in chosen for position in write_set)
    for position in chosen:
        if position in avoided:
            assert any(
                set(write_set_positions(e, ensemble_size, write_quorum)) <= set(avoided) for e in range(first, first + count + 1)
            ), "only where nobody else will do"
    if not avoided and turn % write_quorum == 0:
        assert len(chosen) <= -(-ensemble_size // write_quorum), "as few as can be"


def test_turns_spread_readers_over_all_bookies() -> None:
    asked = {p for turn in range(4) for p in StripeMerge("abcd", 2, 0, 100).first_choice(turn, ())}
    assert asked == {0, 1, 2, 3}


def test_of_each_write_set_the_nearest_replica_is_asked() -> None:
    merge = StripeMerge("abcd", 2, 0, 100)
    assert [merge.first_choice(turn, (), [0, 2, 0, 2]) for turn in range(2)] == [[0, 2], [0, 2]]
    assert merge.first_choice(0, (0,), [0, 2, 0, 2]) == [1, 2, 3], "one that failed is avoided although it is near"


@given(sizes, st.integers(0, 50), st.integers(0, 20), st.integers(0, 5))
def test_which_missing_ranges_concern_a_position(size: tuple[int, int], first: int, count: int, position: int) -> None:
    ensemble_size, write_quorum = size
    position %= ensemble_size
    expected = any(position in write_set_positions(e, ensemble_size, write_quorum) for e in range(first, first + count + 1))
    assert holds_any(position, first, first + count, ensemble_size, write_quorum) is expected


@given(sizes, st.data())
def test_what_comes_together_is_the_run_that_somebody_gave(size: tuple[int, int], data: st.DataObject) -> None:
    """Every bookie answers anything; the driver's loop asks until nobody is left. The model: an entry is there if one of its
    write set gave it."""
    ensemble_size, write_quorum = size
    first, last = 3, 3 + data.draw(st.integers(0, 12))
    merge = StripeMerge("abcdef"[:ensemble_size], write_quorum, first, last)
    held = data.draw(st.lists(st.sets(st.integers(first, last)), min_size=ensemble_size, max_size=ensemble_size))
    down = data.draw(st.sets(st.integers(0, ensemble_size - 1)))
    asked = merge.first_choice(data.draw(st.integers(0, 5)), ())
    due = list(asked)
    while due:
        position = due.pop(data.draw(st.integers(0, len(due) - 1)))
        said = _Said(last + 1)
        groups = []
        if position in down:
            said = _Said(first, failure=ReplicaFailure("x", "down"))
        else:
            for entry_id in range(first, last + 1):
                if entry_id in held[position] and position in write_set_positions(entry_id, ensemble_size, write_quorum):
                    groups.append(entry(entry_id))
                else:
                    said.missing.append((entry_id, entry_id, "NO_ENTRY", Status.NO_ENTRY))
        merge.on_said(position, said, groups)
        another = merge.next_choice(asked, impatient=data.draw(st.booleans()))
        if another is not None:
            assert another not in asked
            assert another in write_set_positions(merge.next_entry_id, ensemble_size, write_quorum)
            asked.append(another)
            due.append(another)
    expected = first
    while expected <= last and any(
        p not in down and expected in held[p] for p in write_set_positions(expected, ensemble_size, write_quorum)
    ):
        expected += 1
    ids = [e for group in merge.merged() for e in range(group.first_entry_id, group.last_entry_id + 1)]
    assert ids == list(range(first, expected))
    if not ids:
        assert all(failure.reason != "was not asked" for failure in merge.failures_of_first())


async def striped(world: LedgerWorld, ensemble: str, write_quorum: int, count: int, size: int = 10) -> LedgerReader:
    """A closed ledger whose entries lie where striping puts them; a reader of another process."""
    writer = await world.create_on(ensemble[:write_quorum], ack_quorum=write_quorum)
    found = await world.records.get(writer.ledger_id)
    assert found is not None
    record = found.record.replace(
        ensemble_size=len(ensemble),
        fragments=(Fragment(first_entry_id=0, ensemble=tuple(ensemble)),),
        state=LedgerState.CLOSED,
        last_entry_id=count - 1,
        length_bytes=count * size,
    )
    await world.records.replace(writer.ledger_id, record, found.version)
    whole = encode_group(writer.ledger_id, 0, -1, 0, [(b"%d" % n).ljust(size) for n in range(count)])
    for entry_id in range(count):
        for position in write_set_positions(entry_id, len(ensemble), write_quorum):
            world.cluster[ensemble[position]].hold(whole.slice(entry_id, entry_id))
    return await world.another_client().open_reader(writer.ledger_id)


async def read_all(reader: LedgerReader, count: int, max_bytes: int = 1 << 20) -> tuple[list[bytes], int]:
    """Payloads, and in how many reads."""
    payloads: list[bytes] = []
    reads = 0
    while len(payloads) < count:
        groups = await reader.read(len(payloads), count - 1, max_bytes=max_bytes)
        assert groups[0].first_entry_id == len(payloads)
        payloads += payloads_of(groups)
        reads += 1
    return [payload.strip() for payload in payloads], reads


@pytest.mark.parametrize(("ensemble", "write_quorum"), [("abc", 2), ("abcd", 2), ("abcd", 3), ("abcde", 2), ("abc", 1)])
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
async def test_a_striped_ledger_is_read_in_order(ensemble: str, write_quorum: int, max_bytes: int) -> None:
    async with ledger_world(*"abcde") as world:
        reader = await striped(world, ensemble, write_quorum, 40)
        payloads, reads = await read_all(reader, 40, max_bytes)
        assert payloads == [b"%d" % n for n in range(40)]
        if max_bytes == 1 << 20:
            assert reads == 1
            asked = [bookie for bookie in ensemble if world.cluster[bookie].reads]
            assert len(asked) <= -(-len(ensemble) // write_quorum) + 1


@pytest.mark.parametrize("fault", ["down", "hang", "damaged", "missing", "limbo", "mute", "another's"])
@pytest.mark.parametrize("bad", ["a", "b", "c", "d"])
async def test_what_one_bookie_does_not_give_another_of_the_stripe_gives(fault: str, bad: str) -> None:
    settings = FAST.model_copy(update={"read_timeout_s": 30.0})
    async with ledger_world(*"abcd", settings=settings) as world:
        reader = await striped(world, "abcd", 2, 40)
        bookie = world.cluster[bad]
        if fault == "damaged":
            for entry_id in bookie.ids(reader.ledger_id)[3:]:
                bookie.damage(reader.ledger_id, entry_id)
        elif fault == "missing":
            for entry_id in bookie.ids(reader.ledger_id)[3:]:
                del bookie.entries[reader.ledger_id][entry_id]
        elif fault == "another's":
            for entry_id in bookie.ids(reader.ledger_id)[3:]:
                bookie.entries[reader.ledger_id][entry_id] = encode_group(99, entry_id, -1, 0, [b"of another ledger"])
        else:
            setattr(bookie, fault, True)
            if fault == "limbo":
                bookie.entries.clear()
        payloads, _ = await read_all(reader, 40)
        assert payloads == [b"%d" % n for n in range(40)]
        if bookie.reads:
            bookie.reads.clear()
            assert (await read_all(reader, 40))[1] == 1
            assert bookie.reads == [], "who failed is not asked first again"
        bookie.hang = False


async def test_errors_speak_of_the_write_set_of_the_entry_alone() -> None:
    async with ledger_world(*"abcd") as world:
        reader = await striped(world, "abcd", 2, 8)  # entry 5 is on b and c
        for bookie in "bc":
            del world.cluster[bookie].entries[reader.ledger_id][5]
        world.cluster["a"].down = world.cluster["d"].down = True
        with pytest.raises(NoSuchEntryError, match=r"entry \d+:5 is not on any replica .b: NO_ENTRY, c: NO_ENTRY"):
            await reader.read(5, 5, max_bytes=1)
        world.cluster["c"].down = True
        with pytest.raises(EntryUnavailableError, match="c is down"):
            await reader.read(5, 7, max_bytes=1 << 20)
        world.cluster["a"].down = world.cluster["d"].down = False
        groups = await reader.read(0, 7, max_bytes=1 << 20)
        assert groups[-1].last_entry_id == 4, "what is before the gap is given"


@pytest.mark.parametrize("turns", range(0, 10, 2))
async def test_a_striped_read_cancelled_anywhere_leaves_no_task(turns: int) -> None:
    async with ledger_world(*"abcd") as world:
        reader = await striped(world, "abcd", 2, 8)
        world.cluster["a"].read_delay_s = world.cluster["b"].read_delay_s = 0.01
        before = len(asyncio.all_tasks())
        read = asyncio.create_task(reader.read(0, 7, max_bytes=1 << 20))
        for _ in range(turns):
            await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        assert len(asyncio.all_tasks()) == before
        assert (await read_all(reader, 8))[0] == [b"%d" % n for n in range(8)]
