"""Which damage is reported to metadata, and what metadata says of it."""

from __future__ import annotations

import pytest

from cepheid_bookie import MetadataDamage
from cepheid_bookie.block_check import Run
from cepheid_bookie.damaged_blocks import Outlook
from cepheid_metadata import (
    EntryRun,
    Fragment,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    RepairMark,
    ShortReason,
    ledger_records,
    repair_marks,
)
from cepheid_ports import Ports


async def store_with(ensembles: dict[int, str], quorum: int, last: int | None = 99) -> MemoryStore:
    """A ledger 7 with these bookies, one letter each, from these entries on; `last` None: it is open."""
    store = MemoryStore(MemoryTree())
    ledger = LedgerMetadata(
        ledger_id=7,
        ensemble_size=len(ensembles[0]),
        write_quorum=quorum,
        ack_quorum=quorum,
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        fragments=tuple(Fragment(first_entry_id=first, ensemble=tuple(names)) for first, names in ensembles.items()),
        last_entry_id=last,
        length_bytes=None if last is None else 1000,
        creation_token=1,
        created_at_ms=0,
        custom={"topic": "orders"},
    )
    await ledger_records(store).create(7, ledger)
    return store


def damage(store: MemoryStore) -> MetadataDamage:
    return MetadataDamage(store, "b", Ports())


@pytest.mark.parametrize(
    ("ensembles", "quorum", "last", "runs", "outlook"),
    [
        ({0: "abc"}, 3, 99, [(20, 20)], Outlook.REPAIR),
        ({0: "abc"}, 3, None, [(20, 20)], Outlook.REPAIR),  # open: the mark waits until it is closed
        ({0: "b"}, 1, 99, [(20, 20)], Outlook.NO_REPLICA),
        ({0: "ade"}, 3, 99, [(20, 20)], Outlook.NOT_NEEDED),  # it was repaired elsewhere
        ({0: "abc", 50: "ade"}, 3, 99, [(49, 49)], Outlook.REPAIR),
        ({0: "abc", 50: "ade"}, 3, 99, [(50, 99)], Outlook.NOT_NEEDED),
        ({0: "ade", 50: "abc"}, 3, 99, [(49, 50)], Outlook.REPAIR),
        ({0: "abc"}, 3, 99, [(100, 120)], Outlook.NOT_NEEDED),  # above the end of the ledger
        ({0: "abc"}, 2, 99, [(0, 0)], Outlook.REPAIR),  # striped: entry 0 is on a and b
        ({0: "abc"}, 2, 99, [(2, 2)], Outlook.NOT_NEEDED),  # on c and a
        ({0: "abc"}, 2, 99, [(2, 2), (4, 4)], Outlook.REPAIR),
    ],
)
async def test_only_copies_that_metadata_counts_on_are_reported(
    ensembles: dict[int, str], quorum: int, last: int | None, runs: list[Run], outlook: Outlook
) -> None:
    store = await store_with(ensembles, quorum, last)
    assert await damage(store).report(7, runs) == (outlook, "orders")
    mark = await repair_marks(store).get(7)
    assert (mark is None) == (outlook is Outlook.NOT_NEEDED)
    if mark is not None:
        assert mark.record.bookies == {"b": ShortReason.DAMAGED}
        assert mark.record.short_entries == sum(last - first + 1 for first, last in runs)


async def test_a_ledger_that_is_gone_needs_no_repair() -> None:
    store = MemoryStore(MemoryTree())
    assert await damage(store).report(7, [(0, 0)]) == (Outlook.NOT_NEEDED, "")


@pytest.mark.parametrize(
    ("reason", "is_renewed"),
    [
        (ShortReason.DAMAGED, False),
        (ShortReason.EMPTY_DISK, False),
        (ShortReason.DRAINING, False),  # all its copies move away
        (ShortReason.PLACEMENT, True),
        (None, True),  # it is marked for another bookie alone
    ],
)
async def test_a_mark_that_makes_a_worker_look_is_not_renewed(reason: ShortReason | None, is_renewed: bool) -> None:
    """That would make the worker start over."""
    store = await store_with({0: "abc"}, 3)
    bookies = {"a": ShortReason.LOST} if reason is None else {"b": reason}
    mark = RepairMark(ledger_id=7, bookies=bookies, copies_left=2, short_entries=1, short_bytes=1, since_ms=0)
    await repair_marks(store).create(7, mark)
    before = await repair_marks(store).get(7)
    await damage(store).report(7, [(20, 20)])
    after = await repair_marks(store).get(7)
    assert (after != before) == is_renewed


async def test_entries_of_which_repair_found_no_copy_have_no_replica() -> None:
    store = await store_with({0: "abc"}, 3)
    lost = (EntryRun(first=20, last=22),)
    mark = RepairMark(
        ledger_id=7, bookies={"b": ShortReason.DAMAGED}, copies_left=0, short_entries=1, short_bytes=1, since_ms=0, lost=lost
    )
    await repair_marks(store).create(7, mark)
    assert (await damage(store).report(7, [(22, 30)])).outlook is Outlook.NO_REPLICA
    assert (await damage(store).report(7, [(23, 30)])).outlook is Outlook.REPAIR
