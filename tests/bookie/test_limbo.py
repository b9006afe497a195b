"""A bookie that starts on empty disks under its old id: nothing is denied, nothing new is taken, wherever the start was cut."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest

from cepheid_bookie import Bookie, Cookie, GarbageCollector, MetadataCookies, MetadataLedgers
from cepheid_bookie.cookie import Found, decide, is_reborn
from cepheid_bookie.errors import CookieError
from cepheid_bookie.limbo import Limbo
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, StoreUnavailableError, Versioned
from cepheid_ports import Ports
from cepheid_rpc import ExplicitLac, LacRequest, MissingEntries, ReadAnswer, Status
from tests.bookie.bookie_support import IDENTITY, KEY, Machine, add, added, group_of, read_all

OLD, NEW = 7, 2_000  # ids below and above the watermark, which is 1001: one block was taken


class LostBookie:
    """A machine whose bookie held entries and a fence, and lost its disks; and the metadata that remembers it."""

    def __init__(self, seed: int = 0) -> None:
        self.machine = Machine(seed)
        self.store = MemoryStore(MemoryTree())
        self.cookies = FaultyCookies(self.store, {"data": ("/d",)})

    async def live_and_lose(self) -> None:
        assert await LedgerIds(self.store).take() < OLD
        async with await self.start() as bookie:
            await added(bookie, group_of(OLD, 0, 3))
            await bookie.read_lac(LacRequest(OLD + 1, KEY, fence=True))
        self.lose()

    def lose(self) -> None:
        self.machine.disk = self.machine.disk.wiped()
        self.machine.index = MemoryBlockIndex()

    async def start(self, *, accept: bool = False) -> Running:
        machine = self.machine
        machine.index.closed = False
        bookie = await Bookie.open(
            IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=self.cookies, accept_empty_disk=accept
        )
        return Running(bookie)


class LaggingStore(MemoryStore):
    """A follower that shows the past until `sync` is called."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.past: MemoryStore | None = None

    async def get(self, key: str) -> Versioned | None:
        return await (self.past.get(key) if self.past is not None else super().get(key))

    async def sync(self, key: str) -> None:
        self.past = None


class Running:
    def __init__(self, bookie: Bookie) -> None:
        self.bookie = bookie

    async def __aenter__(self) -> Bookie:
        return self.bookie

    async def __aexit__(self, *_: object) -> None:
        await self.bookie.aclose()


class FaultyCookies(MetadataCookies):
    """`fail`: "before" or "after" the change of the record, whose outcome the bookie then does not know."""

    fail = ""

    async def replace(self, recorded: Cookie, cookie: Cookie) -> None:
        if self.fail == "before":
            raise StoreUnavailableError("connection lost", outcome_unknown=True)
        await super().replace(recorded, cookie)
        if self.fail == "after":
            raise StoreUnavailableError("connection lost", outcome_unknown=True)


async def assert_in_limbo(bookie: Bookie) -> None:
    """Every path on which the lost entries 0..2 of OLD, and the lost fence of OLD + 1, could be denied."""
    for ledger_id in (OLD, OLD + 1):
        for fence in (False, True):
            _, missing = await read_all(bookie, ledger_id, 0, 4, fence=fence)
            assert not any(status.certain_no for status in missing.values()), f"{ledger_id}: {missing}"
            answer = await bookie.read_lac(LacRequest(ledger_id, KEY, fence=fence))
            assert not answer.status.certain_no, f"{ledger_id}: {answer}"
        (refused,) = await add(bookie, group_of(ledger_id, 9))
        assert refused.status in (Status.READ_ONLY, Status.FENCED), refused


async def test_nothing_lost_is_denied_and_no_writer_goes_on() -> None:
    lost = LostBookie()
    await lost.live_and_lose()
    with pytest.raises(CookieError, match=r"its data is gone; .*--accept-empty-disk"):
        await lost.start()
    async with await lost.start(accept=True) as bookie:
        assert bookie.cookie.limbo_below == 1_001
        (refused,) = await add(bookie, group_of(OLD, 3))
        assert refused.status is Status.READ_ONLY, "the writer replaces this bookie"
        assert bookie.ledgers() == [], "a refused add leaves no trace"
        _, missing = await read_all(bookie, OLD, 0, 2)
        assert set(missing.values()) == {Status.UNKNOWN}
        assert (await bookie.read_lac(LacRequest(OLD, KEY, fence=True))).status is Status.UNKNOWN
        await assert_in_limbo(bookie)
        assert bookie.statistics().adds_read_only >= 1
        await added(bookie, group_of(NEW, 0))
        _, missing = await read_all(bookie, NEW, 0, 1, fence=True)
        assert missing == {1: Status.NO_ENTRY}, "of what came after, it is certain"
        assert (await bookie.read_lac(LacRequest(NEW + 1, KEY, fence=True))).status is Status.NO_ENTRY


async def test_a_fence_in_limbo_is_durable_and_what_recovery_brings_is_served() -> None:
    lost = LostBookie()
    await lost.live_and_lose()
    bookie = (await lost.start(accept=True)).bookie
    await bookie.read_lac(LacRequest(OLD, KEY, fence=True))
    await read_all(bookie, OLD + 1, 0, 0, fence=True)
    await added(bookie, group_of(OLD, 1), recovery=True)
    await bookie.write_lac(ExplicitLac(OLD + 2, 4, KEY))
    lost.machine.restart()  # power loss, without a checkpoint
    async with await lost.start() as bookie:
        entries, missing = await read_all(bookie, OLD, 0, 2, fence=True)
        assert (list(entries), missing) == ([1], {0: Status.UNKNOWN, 2: Status.UNKNOWN})
        answer = await bookie.read_lac(LacRequest(OLD, KEY, fence=True))
        assert (answer.status, answer.highest_entry) == (Status.OK, group_of(OLD, 1))
        for ledger_id in (OLD, OLD + 1):
            (refused,) = await add(bookie, group_of(ledger_id, 5))
            assert refused.status is Status.FENCED
        (refused,) = await add(bookie, group_of(OLD + 2, 0))
        assert refused.status is Status.READ_ONLY
        assert (await bookie.read_lac(LacRequest(OLD + 2, KEY))).last_add_confirmed == 4


async def test_restarts_keep_the_limbo_and_a_second_loss_widens_it() -> None:
    lost = LostBookie()
    await lost.live_and_lose()
    async with await lost.start(accept=True) as bookie:
        first = bookie.cookie
    for accept in (False, True):
        async with await lost.start(accept=accept) as bookie:
            assert bookie.cookie == first, "the word of the operator changes nothing for a whole bookie"
            await assert_in_limbo(bookie)
    await LedgerIds(lost.store, block=5_000).take()
    lost.lose()
    async with await lost.start(accept=True) as bookie:
        assert bookie.cookie.limbo_below == 6_001
        assert bookie.cookie.incarnation != first.incarnation


async def test_a_new_bookie_is_not_in_limbo_whatever_the_operator_says() -> None:
    lost = LostBookie()
    await LedgerIds(lost.store).take()
    async with await lost.start(accept=True) as bookie:
        assert bookie.cookie.limbo_below == 0
        await added(bookie, group_of(OLD, 0))


@pytest.mark.parametrize("operation", range(40))
async def test_a_rebirth_cut_anywhere_is_refused_as_blank_or_in_limbo(operation: int) -> None:
    for seed in range(3):
        lost = LostBookie(seed)
        machine = lost.machine
        await lost.live_and_lose()
        machine.crash_at(operation)

        async def open_reborn(lost: LostBookie = lost, **_: object) -> Bookie:
            return (await lost.start(accept=True)).bookie

        machine.open = open_reborn  # type: ignore[method-assign]
        await machine.run_until_crash(assert_in_limbo)
        machine.restart(power_loss=seed != 2)
        try:
            async with await lost.start() as bookie:
                await assert_in_limbo(bookie)
        except CookieError as error:
            reason = str(error)
        else:
            reason = "in limbo"
        assert any(words in reason for words in ("its data is gone", "the directories are of", "in limbo")), reason
        async with await lost.start(accept=True) as bookie:
            assert bookie.cookie.limbo_below == 1_001
            await assert_in_limbo(bookie)


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_unknown_outcome_at_the_record_is_decided_by_the_next_start(fail: str) -> None:
    lost = LostBookie()
    await lost.live_and_lose()
    lost.cookies.fail = fail
    with pytest.raises(StoreUnavailableError):
        await lost.start(accept=True)
    lost.cookies.fail = ""
    if fail == "before":
        with pytest.raises(CookieError, match="metadata knows incarnation"):
            await lost.start()
    else:
        async with await lost.start() as bookie:
            await assert_in_limbo(bookie)
    await LedgerIds(lost.store).take()  # another block, after the attempt
    async with await lost.start(accept=True) as bookie:
        assert bookie.cookie.limbo_below == (2_001 if fail == "before" else 1_001), "the watermark is read at each attempt"
        await assert_in_limbo(bookie)


async def test_garbage_collection_goes_on_in_limbo() -> None:
    lost = LostBookie()
    await lost.live_and_lose()
    async with await lost.start(accept=True) as bookie:
        await added(bookie, group_of(OLD, 0), recovery=True)
        await LedgerIds(lost.store, block=5_000).take()  # NEW was given out
        await added(bookie, group_of(NEW, 0))
        collector = GarbageCollector(bookie, MetadataLedgers(lost.store, Ports()))
        await collector.collect()
        assert (await collector.collect()).deleted == (OLD, NEW)
        assert bookie.ledgers() == []
        await assert_in_limbo(bookie)


def test_each_loss_has_a_name_of_its_own() -> None:
    """Also when no ledger id was given out in between: an auditor refills the bookie after each."""
    once = Cookie("b", "c", "disks").reborn(1_001)
    twice = once.reborn(1_001)
    assert once.registered_as != twice.registered_as
    assert twice.limbo_below >= once.limbo_below


FIRST, SECOND = Cookie("b", "c", "first"), Cookie("b", "c", "second").reborn(9)
BLANK, HOLDS = Found(None, False), Found(None, True)


@pytest.mark.parametrize(
    ("places", "reborn"),
    [
        ((BLANK, BLANK), True),
        ((Found(SECOND, False), BLANK), True),  # cut short: once more, with a new watermark
        ((Found(SECOND, False), Found(SECOND, False)), True),
        ((Found(FIRST, False), BLANK), True),  # its journal is gone, and it never had data
        ((Found(FIRST, True), Found(FIRST, True)), False),  # whole
    ],
)
def test_what_is_reborn(places: tuple[Found, Found], reborn: bool) -> None:
    assert is_reborn(FIRST, dict(zip("dj", places, strict=True)), FIRST) is reborn


@pytest.mark.parametrize("places", [(Found(FIRST, True), BLANK), (BLANK, HOLDS), (Found(SECOND, True), Found(SECOND, False))])
def test_what_is_left_of_a_bookie_is_never_overwritten(places: tuple[Found, Found]) -> None:
    with pytest.raises(CookieError, match=r"not whole, but there is data in .*; bring back .* move the contents of"):
        is_reborn(FIRST, dict(zip("dj", places, strict=True)), FIRST)
    with pytest.raises(CookieError, match="belongs to cluster"):
        is_reborn(replace(FIRST, cluster_id="elsewhere"), dict(zip("dj", places, strict=True)), FIRST)


def test_the_higher_watermark_of_directory_and_metadata_holds() -> None:
    places = {"d": Found(replace(SECOND, limbo_below=5), True)}
    assert decide(SECOND, places, SECOND, asked=True)[0].limbo_below == 9


def test_only_noes_below_the_watermark_change() -> None:
    limbo = Limbo(10)
    assert [limbo.sure(9, status) for status in (Status.NO_ENTRY, Status.NO_LEDGER)] == [Status.UNKNOWN] * 2
    assert limbo.sure(10, Status.NO_LEDGER) is Status.NO_LEDGER
    for status in Status:
        assert status.certain_no or limbo.sure(9, status) is status
    answer = ReadAnswer((), (MissingEntries(0, 3, Status.NO_ENTRY), MissingEntries(4, 4, Status.IO_ERROR)), 5)
    assert [run.status for run in limbo.chunk(9, answer).missing] == [Status.UNKNOWN, Status.IO_ERROR]
    assert limbo.chunk(10, answer) is answer


async def test_two_machines_reborn_under_one_id_at_once() -> None:
    """The loser of the record's compare-and-set does not serve."""
    lost = LostBookie()
    await lost.live_and_lose()
    other = LostBookie(1)
    other.store, other.cookies = lost.store, lost.cookies
    outcomes = await asyncio.gather(lost.start(accept=True), other.start(accept=True), return_exceptions=True)
    served = [outcome for outcome in outcomes if isinstance(outcome, Running)]
    assert len(served) == 1, outcomes
    for running in served:
        await running.bookie.aclose()


async def test_a_follower_that_lags_neither_lowers_the_watermark_nor_denies_the_bookie() -> None:
    lost = LostBookie()
    tree = MemoryTree()
    lost.store = store = LaggingStore(tree)
    lost.cookies = FaultyCookies(store, {"data": ("/d",)})
    past = MemoryStore(copy.deepcopy(tree))
    await lost.live_and_lose()
    store.past = past
    assert await lost.cookies.next_ledger_id() == 1_001
    store.past = past
    assert await lost.cookies.load(IDENTITY.bookie_id) is not None
