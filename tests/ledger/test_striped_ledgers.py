"""Striped ledgers (E > Qw) from end to end: written, recovered after any half-written tail, read; decisions per write set."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_ledger import ClosedLedger, LedgerFencedError, LedgerWriter, RecoveryFailedError
from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads, write_set_positions
from cepheid_metadata import Fragment
from cepheid_rpc import EntryGroup, Status, encode_group
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SIZES = [("abcd", 2, 2), ("abcd", 3, 2), ("abcde", 3, 2), ("abc", 2, 2), ("abc", 2, 1), ("abcd", 3, 3)]
every_size = pytest.mark.parametrize(("ensemble", "write_quorum", "ack_quorum"), SIZES)


def copies_of(world: LedgerWorld, ensemble: str, ledger_id: int, entry_id: int) -> list[str]:
    return [bookie for bookie in ensemble if entry_id in world.cluster[bookie].ids(ledger_id)]


async def write(writer: LedgerWriter, *sizes: int) -> list[bytes]:
    """Groups of so many entries; returns the payloads of all, once they are confirmed."""
    pending = [append(writer, [b"%d.%d" % (number, n) for n in range(size)]) for number, size in enumerate(sizes)]
    return payloads_of(await asyncio.gather(*pending))


async def read_all(world: LedgerWorld, ledger_id: int) -> list[bytes]:
    client = world.another_client()
    reader = await client.open_reader(ledger_id)
    payloads: list[bytes] = []
    last = reader.known_end
    while len(payloads) <= last:
        payloads += payloads_of(await reader.read(len(payloads), last, max_bytes=200))
    await client.aclose()
    return payloads


@every_size
async def test_written_recovered_and_read(ensemble: str, write_quorum: int, ack_quorum: int) -> None:
    async with ledger_world(*ensemble) as world:
        writer = await world.create_on(ensemble, ack_quorum, write_quorum)
        expected = await write(writer, 1, 3, 1, 7, 20, 1)
        for entry_id in range(len(expected)):
            holders = [ensemble[p] for p in write_set_positions(entry_id, len(ensemble), write_quorum)]
            found = copies_of(world, ensemble, writer.ledger_id, entry_id)
            assert len(found) >= ack_quorum
            assert set(found) <= set(holders)
        end = await world.another_client().recover(writer.ledger_id)
        assert end == ClosedLedger(len(expected) - 1, sum(map(len, expected)))
        assert await read_all(world, writer.ledger_id) == expected
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"too late"])


@pytest.mark.deadline(10)
@pytest.mark.parametrize("down", ["a", "b", "c", "d"])
async def test_one_bookie_less_loses_nothing_and_delays_nothing(down: str) -> None:
    """E 4, Qw 3, Qa 2: every window of three has two others (V1)."""
    slow = FAST.model_copy(update={"recovery_timeout_s": 30.0, "add_timeout_s": 30.0, "read_timeout_s": 30.0})
    async with ledger_world(*"abcd", settings=slow) as world:
        writer = await world.create_on("abcd", 2, 3)
        expected = await write(writer, 1, 3, 9)
        world.cluster[down].hang = True
        end = await world.another_client(slow).recover(writer.ledger_id)
        assert end.last_entry_id == len(expected) - 1
        world.cluster[down].hang = False
        assert await read_all(world, writer.ledger_id) == expected


@pytest.mark.parametrize(("down", "covered"), [("", True), ("a", True), ("bd", False), ("ab", False), ("abc", False)])
async def test_fencing_covers_every_window(down: str, covered: bool) -> None:
    """E 4, Qw 3, Qa 2: each window needs two answers."""
    async with ledger_world(*"abcd") as world:
        writer = await world.create_on("abcd", 2, 3)
        expected = await write(writer, 5)
        for bookie in down:
            world.cluster[bookie].down = True
        client = world.another_client()
        if covered:
            assert (await client.recover(writer.ledger_id)).last_entry_id == len(expected) - 1
        else:
            with pytest.raises(RecoveryFailedError, match="cannot be fenced"):
                await client.recover(writer.ledger_id)
            assert all(not bookie.reads for bookie in world.cluster.bookies.values()), "nothing is read before (L11)"
        await client.aclose()


@pytest.mark.parametrize("half_written", [[], [0], [1], [0, 1]])
async def test_the_tail_is_decided_by_its_own_write_set(half_written: list[int]) -> None:
    """E 4, Qw 2, Qa 2: entry 5 lies on b and c. One copy there keeps it; noes of a and d say nothing of it."""
    async with ledger_world(*"abcd") as world:
        writer = await world.create_on("abcd", 2, 2)
        await write(writer, *[1] * 5)
        tail = encode_group(writer.ledger_id, 5, 4, 15, [b"x"])
        for index in half_written:
            world.cluster["bc"[index]].hold(tail)
        for bookie in "bc":
            world.cluster[bookie].read_delay_s = 0.05  # the others deny first
        end = await world.another_client().recover(writer.ledger_id)
        if len(half_written) == 2:
            assert end.last_entry_id == 5
        else:
            assert end.last_entry_id in (4, 5)  # one no of two is enough for Qa = Qw; a copy that is seen first keeps it
        if end.last_entry_id == 5:
            assert copies_of(world, "abcd", writer.ledger_id, 5) == ["b", "c"], "held by its quorum before the end"


async def test_a_bookie_that_fails_during_recovery_is_replaced_and_only_its_stripes_move() -> None:
    async with ledger_world(*"abcde") as world:
        writer = await world.create_on("abcd", 2, 2)
        whole = encode_group(writer.ledger_id, 0, -1, 0, [b"x"] * 12)
        for entry_id in range(12):
            for position in write_set_positions(entry_id, 4, 2):
                world.cluster["abcd"[position]].hold(whole.slice(entry_id, entry_id))
        world.cluster["b"].refuse = Status.READ_ONLY
        assert await world.another_client().recover(writer.ledger_id) == ClosedLedger(11, 12)
        record = await world.record(writer.ledger_id)
        assert [fragment.ensemble for fragment in record.fragments] == [("a", "e", "c", "d")]
        assert world.cluster["e"].ids(writer.ledger_id) == [e for e in range(12) if e % 4 in (0, 1)]
        world.cluster["b"].down = True
        assert await read_all(world, writer.ledger_id) == [b"x"] * 12


@pytest.mark.parametrize("down", ["a", "b", "c", "d"])
async def test_the_length_of_an_empty_tail_is_read_from_the_write_set_of_the_last_entry(down: str) -> None:
    """Entry 6 is on c, d and a; whoever else is asked would deny it, and it must exist."""
    async with ledger_world(*"abcdefgh") as world:
        writer = await world.create_on("abcd", 2, 3)
        expected = await write(writer, 3, 4)
        await wait_until(lambda: len(copies_of(world, "abcd", writer.ledger_id, 6)) == 3)
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        fragments = (*found.record.fragments, Fragment(first_entry_id=7, ensemble=tuple("efgh")))
        await world.records.replace(writer.ledger_id, found.record.replace(fragments=fragments), found.version)
        world.cluster[down].down = True
        assert await world.another_client().recover(writer.ledger_id) == ClosedLedger(6, sum(map(len, expected)))
        assert world.cluster["b"].reads == [], "b does not hold the last entry"


def entry(entry_id: int) -> EntryGroup:
    return encode_group(7, entry_id, entry_id - 1, 0, [b"%d" % entry_id])


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_any_answers_are_decided_by_write_sets_alone(data: st.DataObject) -> None:
    """As for E = Qw, with noes counted where the entry belongs."""
    ensemble_size = data.draw(st.integers(2, 5))
    write_quorum = data.draw(st.integers(1, ensemble_size - 1))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    reads = RecoveryReads(ensemble_size, write_quorum, ack_quorum, first_entry_id=0)
    noes: dict[int, set[int]] = {}
    copies: set[int] = set()
    present, end = 0, None
    answers = st.tuples(st.sampled_from("+-?"), st.integers(0, ensemble_size - 1), st.integers(0, 6), st.integers(0, 6))
    for kind, position, first, count in data.draw(st.lists(answers, max_size=25)):
        last = first + count
        if kind == "+":
            reads.on_copies(entry(first))
            copies.add(first)
        elif kind == "-":
            reads.on_no(position, first, last)
            for entry_id in range(first, last + 1):
                noes.setdefault(entry_id, set()).add(position)
        else:
            reads.on_unknown(position, first, last)
        while end is None:
            write_set = set(write_set_positions(present, ensemble_size, write_quorum))
            if present in copies:
                present += 1
            elif len(noes.get(present, set()) & write_set) >= write_quorum - ack_quorum + 1:
                end = present - 1
            else:
                break
        if end is None:
            for p in range(ensemble_size):
                holds = p in write_set_positions(present, ensemble_size, write_quorum)
                assert holds or reads.is_heard(p), "nobody is asked for what it does not hold"
    assert sum(len(group) for group in reads.take_present()) == present
    assert reads.last_entry_id == end


@given(st.data())
def test_covered_means_that_no_write_set_can_reach_qa_any_more(data: st.DataObject) -> None:
    ensemble_size = data.draw(st.integers(1, 6))
    write_quorum = data.draw(st.integers(1, ensemble_size))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    fenced = data.draw(st.sets(st.integers(0, ensemble_size - 1)))
    coverage = FenceCoverage(ensemble_size, write_quorum, ack_quorum)
    for position in range(ensemble_size):
        (coverage.on_fenced if position in fenced else coverage.on_unknown)(position)
    could_ack = [
        sum(p not in fenced for p in write_set_positions(entry_id, ensemble_size, write_quorum))
        for entry_id in range(ensemble_size)
    ]
    assert coverage.is_covered is all(count < ack_quorum for count in could_ack)
    assert coverage.is_impossible is not coverage.is_covered
