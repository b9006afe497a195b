"""Ensemble changes by a live writer: bookies, metadata and recoverers that get in the way. The decisions: test_writer_state.py."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import (
    ClosedLedger,
    LedgerWriter,
)
from cepheid_rpc import Status
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.support import run_async, wait_until

QUICK = FAST.model_copy(update={"ensemble_retry_s": 0.01, "quarantine_s": 0.0, "quarantine_max_s": 0.0})


def fragments_of(writer: LedgerWriter) -> list[tuple[int, str]]:
    return [(f.first_entry_id, "".join(f.ensemble)) for f in writer.metadata.fragments]


async def check_copies(world: LedgerWorld, writer: LedgerWriter, but: str = "") -> None:
    """Every confirmed entry comes to be on every bookie that metadata names for it, those aside which failed: what they lack
    of earlier fragments is repair's to copy."""
    record = await world.record(writer.ledger_id)

    def complete() -> bool:
        return all(
            entry_id in world.cluster[bookie].entries.get(writer.ledger_id, {})
            for entry_id in range(writer.last_add_confirmed + 1)
            for bookie in record.fragment_of(entry_id).ensemble
            if bookie not in but
        )

    await wait_until(complete, what=f"full copies of {record.fragments}")


def fail(world: LedgerWorld, bookie: str, fault: str) -> None:
    bad = world.cluster[bookie]
    bad.down, bad.hang = fault in ("down", "broken"), fault == "hang"
    bad.refuse = {"io-error": Status.IO_ERROR, "read-only": Status.READ_ONLY}.get(fault)
    bad.drop_adds = fault == "drops-answers"
    if fault == "broken":
        bad.break_streams()


@pytest.mark.parametrize("fault", ["down", "hang", "broken", "io-error", "read-only", "drops-answers"])
def test_a_failed_bookie_is_replaced_and_the_newcomer_gets_what_it_must(fault: str) -> None:
    async def main() -> None:
        async with ledger_world("a", "b", "c", "d", settings=QUICK) as world:
            writer = await world.create_on("abc")
            await append(writer, [b"before"])
            await wait_until(lambda: all(world.cluster[bookie].ids(writer.ledger_id) == [0] for bookie in "abc"))
            fail(world, "b", fault)
            pending = [append(writer, [b"%d" % n]) for n in range(5)]
            await asyncio.gather(*pending)
            await wait_until(lambda: len(writer.metadata.fragments) == 2)
            await append(writer, [b"after"])
            start, ensemble = fragments_of(writer)[1]
            assert (ensemble, writer.under_replicated) == ("adc", ())
            await check_copies(world, writer, but="b")
            assert world.cluster["d"].ids(writer.ledger_id) == list(range(start, 7)), "the start of the fragment and all after"
            world.cluster["b"].hang = False
            assert await writer.close() == ClosedLedger(6, 16)
            assert payloads_of(await (await world.client.open_reader(writer.ledger_id)).read(0, 0, max_bytes=1)) == [b"before"]

    run_async(main())
