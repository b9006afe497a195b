"""Recovered entries on their way back: the writer's core, with changes that stay in memory until the ledger is closed."""

from __future__ import annotations

import pytest

from cepheid_ledger import RecoveryFailedError
from cepheid_ledger.recovery_state import write_set_positions
from cepheid_ledger.write_back import WriteBack
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState
from cepheid_rpc import EntryGroup, Status, encode_group
from tests.ledger.ledger_world import FAST, LedgerWorld, ledger_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

LEDGER_ID = 7


def ledger(ensemble: str, write_quorum: int, ack_quorum: int, first: int = 5) -> LedgerMetadata:
    fragments = [Fragment(first_entry_id=first, ensemble=tuple(ensemble))]
    if first:
        fragments.insert(0, Fragment(first_entry_id=0, ensemble=tuple(reversed(ensemble))))
    return LedgerMetadata(
        ledger_id=LEDGER_ID,
        ensemble_size=len(ensemble),
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        state=LedgerState.IN_RECOVERY,
        fragments=tuple(fragments),
        creation_token=1,
        created_at_ms=0,
    )


def new_write_back(world: LedgerWorld, record: LedgerMetadata, start: int = 5) -> WriteBack:
    return WriteBack(record, start, world.client._channel_of, world.placement)


def entries(first: int, last: int) -> EntryGroup:
    return encode_group(LEDGER_ID, first, 4, 10, [b"%d" % n for n in range(first, last + 1)])


def fragments_of(write_back: WriteBack) -> list[tuple[int, str]]:
    return [(fragment.first_entry_id, "".join(fragment.ensemble)) for fragment in write_back.fragments]


async def hold(world: LedgerWorld, bookies: str, ids: list[int]) -> None:
    await wait_until(lambda: all(world.cluster[bookie].ids(LEDGER_ID) == ids for bookie in bookies), what=f"{ids} on {bookies}")


async def test_fenced_bookies_take_them_byte_for_byte() -> None:
    async with ledger_world() as world:
        for bookie in world.cluster.bookies.values():
            bookie.fence(LEDGER_ID)
        write_back, group = new_write_back(world, ledger("abc", 3, 2)), entries(5, 7)
        write_back.push(group)
        await write_back.wait_below(0)
        write_back.leave()
        await hold(world, "abc", [5, 6, 7])
        assert world.cluster["a"].entries[LEDGER_ID][6] == group.slice(6, 6)
        assert write_back.fragments == ()


async def test_failed_bookies_are_replaced_in_memory_and_their_successors_get_all_that_is_undecided() -> None:
    async with ledger_world(*"abcdef", settings=FAST) as world:
        write_back = new_write_back(world, ledger("abc", 3, 2))
        write_back.push(entries(5, 6))
        await write_back.wait_below(0)
        await hold(world, "abc", [5, 6])
        world.cluster["b"].refuse = world.cluster["c"].refuse = Status.IO_ERROR
        write_back.push(entries(7, 8))
        await write_back.wait_below(0)
        assert len(write_back.fragments) == 1, "the second change begins where the first did, and replaces it"
        first, ensemble = fragments_of(write_back)[0]
        newcomers = ensemble[1:]
        assert (first, ensemble[0]) == (7, "a")
        assert set(newcomers) < set("def")
        await hold(world, newcomers, [7, 8])
        assert await world.records.get(LEDGER_ID) is None, "metadata hears nothing of it"
        write_back.leave()


async def test_a_recovery_replaces_a_bookie_by_one_in_a_rack_without_another_copy() -> None:
    racks = dict(zip("abcdefghi", "123121214", strict=True))
    async with ledger_world(*racks, settings=FAST, racks=racks) as world:
        world.cluster["c"].down = True
        write_back = new_write_back(world, ledger("abc", 3, 2))
        write_back.push(entries(5, 5))
        await write_back.wait_below(0)
        await wait_until(lambda: len(write_back.fragments) == 1)
        assert fragments_of(write_back)[0][1] == "abi"
        write_back.leave()


async def test_a_change_behind_confirmed_entries_is_a_further_fragment() -> None:
    async with ledger_world(*"abcde", settings=FAST) as world:
        write_back = new_write_back(world, ledger("abc", 3, 2))
        for number, (bookie, first) in enumerate((("b", 5), ("c", 7))):
            world.cluster[bookie].refuse = Status.IO_ERROR
            write_back.push(entries(first, first + 1))
            await write_back.wait_below(0)
            await wait_until(lambda n=number: len(write_back.fragments) > n)  # type: ignore[misc]
        starts = [fragment.first_entry_id for fragment in write_back.fragments]
        assert starts == sorted(set(starts))
        assert all(5 <= start <= 9 for start in starts)
        ensembles = [set(fragment.ensemble) for fragment in write_back.fragments]
        assert "b" not in ensembles[0]
        assert ensembles[-1] == {"a", "d", "e"}
        write_back.close()


async def test_without_a_quorum_the_recovery_fails_and_says_why() -> None:
    async with ledger_world(settings=FAST) as world:
        write_back = new_write_back(world, ledger("abc", 3, 2))
        world.cluster["b"].refuse = world.cluster["c"].refuse = Status.IO_ERROR
        write_back.push(entries(5, 6))
        with pytest.raises(RecoveryFailedError, match="IO_ERROR"):
            await write_back.wait_below(0)
        write_back.close()
        assert all(channel.lanes == 0 for channel in world.client.statistics().values())


async def test_a_striped_ledger_s_entries_go_to_their_write_sets() -> None:
    async with ledger_world(*"abcde", settings=FAST) as world:
        record = ledger("abcd", 2, 2)
        write_back = new_write_back(world, record)
        world.cluster["c"].refuse = Status.IO_ERROR
        write_back.push(entries(5, 12))
        await write_back.wait_below(0)
        write_back.leave()
        fragments = [*record.fragments, *write_back.fragments]

        def named(bookie: str, entry_id: int) -> bool:
            ensemble = [f for f in fragments if f.first_entry_id <= entry_id][-1].ensemble
            return bookie in ensemble and ensemble.index(bookie) in write_set_positions(entry_id, 4, 2)

        for bookie in "abde":
            await hold(world, bookie, [entry_id for entry_id in range(5, 13) if named(bookie, entry_id)])


async def test_giving_up_leaves_nothing_behind() -> None:
    async with ledger_world(settings=FAST) as world:
        for bookie in world.cluster.bookies.values():
            bookie.hang = True
        write_back = new_write_back(world, ledger("abc", 3, 2))
        write_back.push(entries(5, 6))
        write_back.close()
        assert all(channel.lanes == channel.waiting_bytes == 0 for channel in world.client.statistics().values())


async def test_a_bookie_that_fails_is_in_quarantine_for_everybody() -> None:
    async with ledger_world(*"abcd") as world:
        world.cluster["b"].refuse = Status.IO_ERROR
        write_back = new_write_back(world, ledger("abc", 3, 3))
        write_back.push(entries(5, 5))
        await write_back.wait_below(0)
        write_back.leave()
        assert world.placement.quarantined() == ["b"]
