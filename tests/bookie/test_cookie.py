"""Whose directories: the table of decisions, and starts on directories that are not right."""

from __future__ import annotations

import random

import pytest

from cepheid_bookie import Bookie, BookieIdentity, Cookie, MetadataCookies, opening
from cepheid_bookie.cookie import Found, check_not_swapped, decide, is_left_over, load_cookie, save_cookie
from cepheid_bookie.disk import DirectoryInUseError
from cepheid_bookie.errors import BookieError, CookieError, FormatVersionError
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_metadata import (
    DecommissionedBookie,
    DeletedLedger,
    Fragment,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    bookie_cookies,
    bookie_lives,
    decommissioned_bookies,
    deleted_ledger_records,
    ledger_records,
)
from tests.bookie.bookie_support import IDENTITY, Machine, added, group_of, read_all
from tests.simulation.world.sim_disk import SimDisk

MINE = Cookie("bookie-1", "test", "fresh")
OLD = Cookie("bookie-1", "test", "old")
EMPTY, DATA = Found(None, False), Found(None, True)
STAMPED, FULL = Found(OLD, False), Found(OLD, True)


@pytest.mark.parametrize(
    ("data", "journal", "recorded", "asked", "expected"),
    [
        (EMPTY, EMPTY, None, True, (MINE, True)),  # new
        (EMPTY, EMPTY, None, False, (MINE, True)),
        (STAMPED, EMPTY, None, True, (OLD, True)),  # stamping cut short: new and empty
        (STAMPED, STAMPED, None, True, (OLD, True)),  # cut before metadata heard of it
        (STAMPED, EMPTY, None, False, (OLD, True)),
        (FULL, FULL, OLD, True, (OLD, False)),
        (STAMPED, STAMPED, OLD, True, (OLD, False)),
        (FULL, FULL, None, False, (OLD, False)),
    ],
)
def test_starts(data: Found, journal: Found, recorded: Cookie | None, asked: bool, expected: tuple[Cookie, bool]) -> None:
    assert decide(MINE, {"data": data, "journal": journal}, recorded, asked=asked) == expected


@pytest.mark.parametrize(
    ("data", "journal", "recorded", "asked", "reason"),
    [
        (EMPTY, EMPTY, OLD, True, "data, journal is not stamped: its data is gone"),  # a blank disk under a known id
        (FULL, EMPTY, OLD, True, "journal is not stamped: its data is gone"),
        (EMPTY, FULL, OLD, True, "data is not stamped: its data is gone"),
        (FULL, FULL, None, True, "metadata has no cookie of bookie bookie-1, but there is data in data, journal"),
        (DATA, EMPTY, None, True, "there is data in data"),
        (FULL, EMPTY, None, False, "journal of bookie bookie-1 is not stamped"),
        (DATA, DATA, None, False, "is not stamped, but there is data"),
        (FULL, FULL, Cookie("bookie-1", "test", "newer"), True, "metadata knows incarnation newer .* the directories are of old"),
        (FULL, Found(Cookie("bookie-1", "test", "x"), True), OLD, True, "different incarnations .data: old, journal: x"),
        (Found(Cookie("bookie-2", "test", "old"), True), FULL, OLD, True, "data belongs to bookie bookie-2, not to bookie-1"),
        (Found(Cookie("bookie-1", "prod", "old"), True), FULL, OLD, True, "data belongs to cluster 'prod', this is cluster 'test'"),
        (FULL, FULL, Cookie("bookie-1", "prod", "old"), True, "metadata belongs to cluster 'prod'"),
    ],
)
def test_refuses_with_the_exact_reason(data: Found, journal: Found, recorded: Cookie | None, asked: bool, reason: str) -> None:
    with pytest.raises(CookieError, match=reason) as caught:
        decide(MINE, {"data": data, "journal": journal}, recorded, asked=asked)
    assert ";" in str(caught.value), "and what to do"


async def test_with_one_directory_lost_the_bookie_starts_after_the_steps_that_the_refusal_names() -> None:
    store = MemoryStore(MemoryTree())
    cookies = MetadataCookies(store, {"data": ("/d",)})
    machine, journal = Machine(), SimDisk(random.Random(2))

    async def start(data: SimDisk, journal: SimDisk, index: MemoryBlockIndex, *, accept: bool) -> Bookie:
        index.closed = False
        return await Bookie.open(
            IDENTITY,
            machine.settings,
            data,
            index,
            machine.ports(),
            journal_disk=journal,
            cookies=cookies,
            accept_empty_disk=accept,
        )

    bookie = await start(machine.disk, journal, machine.index, accept=False)
    await added(bookie, group_of(7, 0))
    await bookie.aclose()
    way_out = "move the contents of the data directory of bookie-1 away .*start.* with --accept-empty-disk"
    for accept in (False, True):
        with pytest.raises(CookieError, match=way_out):
            await start(machine.disk, journal.wiped(), machine.index, accept=accept)
    await (await start(machine.disk.wiped(), journal.wiped(), MemoryBlockIndex(), accept=True)).aclose()
    await store.aclose()


def test_only_a_stamped_bookie_that_metadata_forgot_is_told_what_to_do_after_a_decommission() -> None:
    def refusal(data: Found, journal: Found) -> str:
        with pytest.raises(CookieError) as caught:
            decide(MINE, {"data": data, "journal": journal}, None, asked=True)
        return str(caught.value)

    way_out = "if the bookie was decommissioned by an older release and comes back, other bookies have its copies: give it empty"
    assert way_out in refusal(FULL, FULL)
    assert way_out not in refusal(DATA, EMPTY)


def test_a_directory_of_another_version_is_refused_by_name() -> None:
    disk = SimDisk(random.Random(1))
    save_cookie(disk, Cookie("bookie-1", "test", "x", format_version=9))
    with pytest.raises(FormatVersionError, match="the data directory has storage format 9, this version reads 1"):
        load_cookie(disk, "the data directory")


@pytest.mark.parametrize("content", ["garbage", Cookie("bookie-1", "test", "x").encode().replace("cluster_id", "clusteb_id")])
def test_an_unreadable_cookie_is_no_missing_one(content: str) -> None:
    disk = SimDisk(random.Random(1))
    disk.open("VERSION", create=True).pwrite(content.encode(), 0)
    with pytest.raises(CookieError, match="cannot be read"):
        load_cookie(disk, "here")


@pytest.mark.parametrize("operation", range(14))
async def test_a_first_start_with_metadata_cut_anywhere_starts(operation: int) -> None:
    store = MemoryStore(MemoryTree())
    cookies = MetadataCookies(store, {"data": ("/d",)})
    machine = Machine(operation)
    machine.crash_at(operation)
    machine_open = machine.open

    async def open_with_cookies(**changes: object) -> Bookie:
        del changes
        return await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=cookies)

    machine.open = open_with_cookies  # type: ignore[method-assign]
    await machine.run_until_crash(lambda bookie: added(bookie, group_of(7, 0)))
    machine.restart()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 1))
    machine.restart()
    async with machine.bookie() as bookie:
        entries, _ = await read_all(bookie, 7, 1, 1)
        assert entries
    machine.open = machine_open  # type: ignore[method-assign]
    await store.aclose()


async def test_a_wiped_disk_under_a_known_id_does_not_start() -> None:
    """Or it would deny what it acknowledged, and take adds that it had refused for a fence."""
    store = MemoryStore(MemoryTree())
    cookies = MetadataCookies(store, {"data": ("/d",)})
    machine = Machine()
    bookie = await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=cookies)
    await added(bookie, group_of(7, 0))
    await bookie.aclose()
    with pytest.raises(CookieError, match="its data is gone"):
        await Bookie.open(IDENTITY, machine.settings, machine.disk.wiped(), MemoryBlockIndex(), machine.ports(), cookies=cookies)
    await store.aclose()


async def test_a_directory_in_use_or_of_another_bookie_is_refused_and_left_as_it_is() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        with pytest.raises(DirectoryInUseError):
            await machine.open()
        machine.index.closed = False
        await added(bookie, group_of(7, 0))
    with pytest.raises(CookieError, match="belongs to bookie bookie-1, not to bookie-2"):
        await machine.open(BookieIdentity("bookie-2", "test"))
    with pytest.raises(CookieError, match="belongs to cluster 'test'"):
        await machine.open(BookieIdentity("bookie-1", "elsewhere"))
    async with machine.bookie() as bookie:  # the refusals released the lock and changed nothing
        entries, _ = await read_all(bookie, 7, 0, 0)
        assert entries


def test_every_refusal_of_a_start_says_what_to_do() -> None:
    for error_type in BookieError.__subclasses__():
        if error_type is not CookieError:  # whose messages end with it
            assert error_type.hint, error_type


async def decommissioned(store: MemoryStore, incarnation: str) -> None:
    """Do what the auditor does with a bookie that was emptied and has ended."""
    await bookie_cookies(store).delete("bookie-1", None)
    await bookie_lives(store).delete("bookie-1", None)
    record = DecommissionedBookie(bookie_id="bookie-1", incarnation=incarnation, at_ms=1)
    await decommissioned_bookies(store).create("bookie-1", record)


async def open_known(machine: Machine, store: MemoryStore) -> Bookie:
    cookies = MetadataCookies(store, {"data": ("/d",)})
    return await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=cookies)


async def full_machine(store: MemoryStore) -> tuple[Machine, str]:
    """Return a machine whose bookie has entries in its journal, entry log and index, and the incarnation of the bookie."""
    machine = Machine()
    bookie = await open_known(machine, store)
    await added(bookie, group_of(7, 0, 500, size=100), group_of(8, 0))
    incarnation = bookie.cookie.incarnation
    await bookie.aclose()
    return machine, incarnation


async def test_a_decommissioned_bookie_starts_empty_on_its_old_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_DELETED_AT_ONCE", 1)
    store = MemoryStore(MemoryTree())
    machine, incarnation = await full_machine(store)
    await decommissioned(store, incarnation)
    bookie = await open_known(machine, store)
    assert bookie.cookie.incarnation != incarnation
    assert list(machine.index.records()) == []
    await added(bookie, group_of(7, 1))  # a ledger that it had before
    entries, _ = await read_all(bookie, 7, 0, 1)
    assert list(entries) == [1]
    await bookie.aclose()
    assert await decommissioned_bookies(store).get("bookie-1") is None
    await (await open_known(machine, store)).aclose()  # and is a bookie like others
    await store.aclose()


@pytest.mark.parametrize("operation", range(40))
async def test_a_start_that_is_cut_while_it_empties_old_directories_can_be_repeated(operation: int) -> None:
    store = MemoryStore(MemoryTree())
    machine, incarnation = await full_machine(store)
    await decommissioned(store, incarnation)
    machine.crash_at(operation)
    machine.open = lambda *_, **__: open_known(machine, store)  # type: ignore[method-assign,assignment]
    await machine.run_until_crash(lambda bookie: added(bookie, group_of(8, 0)))
    machine.restart()
    bookie = await open_known(machine, store)
    assert bookie.cookie.incarnation != incarnation
    assert [ledger_id for ledger_id, _ in machine.index.records() if ledger_id == 7] == []
    await bookie.aclose()
    await store.aclose()


@pytest.mark.parametrize("deleted", [False, True])
async def test_directories_of_a_decommissioned_bookie_stay_while_a_ledger_names_it(deleted: bool) -> None:
    """It was forgotten while it had only lost its session, went on, and was given a ledger. Deleted ones can be brought back."""
    store = MemoryStore(MemoryTree())
    machine, incarnation = await full_machine(store)
    await decommissioned(store, incarnation)
    ledger = LedgerMetadata(
        ledger_id=7, ensemble_size=1, write_quorum=1, ack_quorum=1, state=LedgerState.OPEN, creation_token=1, created_at_ms=1,
        fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1",)),),
    )  # fmt: skip
    if deleted:
        await deleted_ledger_records(store).create(7, DeletedLedger(ledger=ledger, deleted_at_ms=1, purge_after_ms=2))
    else:
        await ledger_records(store).create(7, ledger)
    with pytest.raises(CookieError, match="was decommissioned, but ledgers name it"):
        await open_known(machine, store)
    machine.index.closed = False
    assert [ledger_id for ledger_id, _ in machine.index.records()] == [7, 8]
    await store.aclose()


OTHER = Found(Cookie("bookie-1", "test", "other"), True)


@pytest.mark.parametrize(
    ("data", "journal", "index", "left_over"),
    [
        (FULL, FULL, FULL, True),
        (STAMPED, STAMPED, STAMPED, True),
        (STAMPED, FULL, EMPTY, True),
        (Found(MINE, False), STAMPED, STAMPED, True),  # emptied, and stamped in part
        (Found(MINE, False), Found(MINE, False), Found(MINE, False), False),  # all of it: a new bookie
        (FULL, OTHER, FULL, False),
        (FULL, DATA, FULL, False),
        (FULL, FULL, OTHER, False),
        (EMPTY, EMPTY, EMPTY, False),
        (OTHER, OTHER, OTHER, False),
    ],
)
def test_only_data_of_the_decommissioned_incarnation_may_be_deleted(
    data: Found, journal: Found, index: Found, left_over: bool
) -> None:
    assert is_left_over(MINE, {"data": data, "journal": journal, "index": index}, "old") is left_over


def test_directories_of_another_bookie_are_not_left_over() -> None:
    other = Found(Cookie("bookie-2", "test", "old"), True)
    with pytest.raises(CookieError, match="belongs to bookie bookie-2"):
        is_left_over(MINE, {"data": FULL, "journal": other, "index": FULL}, "old")


SEGMENT, LOG, MARK = "journal/0000000000000001.journal", "entrylog/00000001.log", "mark.0"


def directory(*files: str, stamped: bool = True) -> SimDisk:
    disk = SimDisk(random.Random(1))
    disk.mkdir("journal")
    disk.mkdir("entrylog")
    if stamped:
        save_cookie(disk, OLD)
    for path in files:
        disk.open(path, create=True).close()
    return disk


@pytest.mark.parametrize(
    ("data", "journal"),
    [
        (directory(SEGMENT), directory(LOG, MARK)),
        (directory(SEGMENT), directory()),
        (directory(), directory(LOG)),
        (directory(), directory(MARK)),
    ],
)
def test_exchanged_directories_are_refused(data: SimDisk, journal: SimDisk) -> None:
    with pytest.raises(CookieError, match="the two directories are swapped"):
        check_not_swapped(data, journal)


@pytest.mark.parametrize(
    ("data", "journal"),
    [
        (directory(LOG, MARK), directory(SEGMENT)),
        (directory(), directory()),
        (directory(SEGMENT, LOG), directory(LOG)),  # that of a bookie that had one disk
        (directory(SEGMENT), directory(LOG, SEGMENT)),
        (directory(SEGMENT, stamped=False), directory(LOG)),  # cookies decide about these
        (directory(SEGMENT), directory(LOG, stamped=False)),
    ],
)
def test_directories_that_may_not_be_exchanged_are_left_to_other_checks(data: SimDisk, journal: SimDisk) -> None:
    check_not_swapped(data, journal)


def test_a_single_directory_is_not_exchanged() -> None:
    only = directory(SEGMENT)
    check_not_swapped(only, only)
