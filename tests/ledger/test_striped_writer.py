"""Writers of striped ledgers (E > Qw): who gets what, when it is confirmed, and what a newcomer must have."""

from __future__ import annotations

import asyncio
import random

import pytest

from cepheid_ledger import ClosedLedger, LedgerWriteError, LedgerWriter
from cepheid_ledger.recovery_state import write_set_positions
from cepheid_rpc import EntryGroup, Status
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

QUICK = FAST.model_copy(update={"ensemble_retry_s": 0.01})


async def create_striped(world: LedgerWorld, ensemble: str, write_quorum: int, ack_quorum: int) -> LedgerWriter:
    world.placement.next_ensemble = tuple(ensemble)
    return await world.client.create(
        ensemble_size=len(ensemble), write_quorum=write_quorum, ack_quorum=ack_quorum, custom={"topic": "t"}
    )


def expected_at(writer: LedgerWriter, bookie: str, first: int = 0) -> list[int]:
    """By metadata alone."""
    ledger = writer.metadata
    return [
        entry_id
        for entry_id in range(first, writer.last_add_pushed + 1)
        if bookie in ledger.fragment_of(entry_id).ensemble
        and ledger.fragment_of(entry_id).ensemble.index(bookie)
        in write_set_positions(entry_id, ledger.ensemble_size, ledger.write_quorum)
    ]


async def append_many(writer: LedgerWriter, count: int, rng: random.Random) -> list[bytes]:
    groups = [[rng.randbytes(rng.choice([10, 6_000])) for _ in range(rng.randint(1, 9))] for _ in range(count)]
    done = await asyncio.gather(*(append(writer, group) for group in groups))
    return payloads_of(done)


@pytest.mark.parametrize(
    ("ensemble", "write_quorum", "ack_quorum"), [("abcd", 2, 2), ("abcd", 3, 2), ("abcde", 2, 1), ("abc", 2, 2)]
)
async def test_each_bookie_gets_its_share_and_no_more(ensemble: str, write_quorum: int, ack_quorum: int) -> None:
    async with ledger_world(*ensemble, settings=QUICK) as world:
        writer = await create_striped(world, ensemble, write_quorum, ack_quorum)
        written = await append_many(writer, 30, random.Random(1))
        held = {bookie: world.cluster[bookie].ids for bookie in ensemble}
        await wait_until(lambda: all(held[b](writer.ledger_id) == expected_at(writer, b) for b in ensemble))
        end = await writer.close()
        assert end == ClosedLedger(len(written) - 1, sum(map(len, written)))
        reader = await world.another_client().open_reader(writer.ledger_id)
        read: list[EntryGroup] = []
        while (first := read[-1].last_entry_id + 1 if read else 0) <= end.last_entry_id:
            read += await reader.read(first, end.last_entry_id, max_bytes=20_000)
        assert payloads_of(read) == written


@pytest.mark.parametrize("answer_per_request", [False, True])
async def test_a_newcomer_gets_the_share_of_its_place_from_the_fragments_start_on(answer_per_request: bool) -> None:
    async with ledger_world(*"abcde", settings=QUICK) as world:
        for bookie in world.cluster.bookies.values():
            bookie.answer_per_request = answer_per_request
        writer = await create_striped(world, "abcd", 2, 2)
        written = await append_many(writer, 5, random.Random(2))
        world.cluster["c"].refuse = Status.IO_ERROR
        written += await append_many(writer, 20, random.Random(3))
        await wait_until(lambda: len(writer.metadata.fragments) == 2 and not writer._core.is_changing)
        start, ensemble = writer.metadata.last_fragment.first_entry_id, writer.metadata.last_fragment.ensemble
        assert ensemble == ("a", "b", "e", "d")
        await wait_until(lambda: world.cluster["e"].ids(writer.ledger_id) == expected_at(writer, "e", start))
        world.cluster["c"].down = True
        end = await world.another_client().recover(writer.ledger_id)
        assert end.last_entry_id == len(written) - 1
        reader = await world.another_client().open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(start, start, max_bytes=1)) == [written[start]]


async def test_a_dead_bookie_of_two_stops_only_until_it_is_replaced() -> None:
    """Qa = Qw = 2: every entry of its share needs the newcomer."""
    async with ledger_world(*"abcdefgh", settings=QUICK) as world:
        writer = await create_striped(world, "abcdef", 2, 2)
        for bookie in "df":
            world.cluster[bookie].down = True
        written = await append_many(writer, 40, random.Random(4))
        assert writer.last_add_confirmed == len(written) - 1
        assert (set(writer.metadata.last_fragment.ensemble), writer.under_replicated) == (set("abcegh"), ())


async def test_without_a_spare_a_write_set_below_qa_fails_the_ledger() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await create_striped(world, "abcd", 2, 2)
        world.cluster["b"].refuse = Status.IO_ERROR
        with pytest.raises(LedgerWriteError):
            await append_many(writer, 3, random.Random(5))
