"""A topic whose chain is in pages: opened, grown, trimmed and deleted, with crashes, lost answers and other owners in between."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cepheid_managed_ledger import ManagedLedger, ManagedLedgerFencedError, chain_deletion
from cepheid_metadata import (
    Chain,
    ChainTooLargeError,
    Delete,
    MemoryStore,
    MemoryTree,
    Op,
    OpResult,
    PageLimits,
    Put,
    chain_records,
    keys,
    read_chain,
)
from cepheid_metadata.chain_pages import page_keys
from tests.managed_ledger.losing_store import LosingStore
from tests.managed_ledger.topic_world import (
    ONE_BOOKIE,
    SETTINGS,
    TOPIC,
    TRIM,
    MortalStore,
    TopicWorld,
    append,
    append_all,
    read_all,
    topic_world,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

PAGES = PageLimits(record_ledgers=3, page_ledgers=2, plain_ledgers=5)
LEDGERS = SETTINGS.model_copy(update={"ledger_max_entries": 1})
KEY = keys.chain_key(TOPIC)


async def grow(ledger: ManagedLedger, ledgers: int) -> None:
    """Append until the topic has so many more ledgers."""
    for _ in range(ledgers):
        before = len(ledger.chain.ledgers)
        await append(ledger, b"x")
        await wait_until(lambda before=before: len(ledger.chain.ledgers) > before)  # type: ignore[misc]


async def pages_of(world: TopicWorld) -> list[str]:
    """The keys of all pages; each is named by the record, and the whole is a chain."""
    store = MemoryStore(world.tree)
    found = await chain_records(store).get(TOPIC)
    assert found is not None
    named = page_keys(found.record, KEY)
    assert sorted(f"{KEY}/{name}" for name in await store.children(KEY)) == sorted(named)
    await read_chain(store, TOPIC)
    return named


async def test_a_topic_goes_on_over_pages() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        broker = world.broker()
        ledger = await broker.open()
        await grow(ledger, 12)
        assert len(await pages_of(world)) == 4
        assert (await world.chain()).replace(messages=None) == ledger.chain.replace(messages=None)
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        await append(ledger, b"y")
        assert await read_all(ledger) == [*[b"x"] * 12, b"y"]


async def test_a_topic_of_an_older_release_moves_to_pages_when_it_grows() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PageLimits(plain_ledgers=1_000)) as world:
        broker = world.broker()
        await grow(await broker.open(), 12)
        assert await pages_of(world) == []
        assert b"pages" not in world.tree.nodes[KEY].value
        await broker.crash()
        world.page_limits = PAGES
        ledger = await world.broker(seed=2).open()
        assert len(await pages_of(world)) == 4
        assert await read_all(ledger) == [b"x"] * 12


async def test_trimming_drops_pages_and_the_chain_becomes_one_record_again() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        ledger = await world.broker().open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        await grow(ledger, 12)
        first, last = ledger.ledgers.at_rank(3), ledger.last_confirmed
        ledger.config = TRIM
        cursor.acknowledge_cumulative(first)
        await cursor.saved()
        await wait_until(lambda: len(ledger.chain.ledgers) == 10)
        await ledger.trim()
        assert len(await pages_of(world)) == 3
        cursor.acknowledge_cumulative(last)
        await cursor.saved()
        await wait_until(lambda: len(ledger.chain.ledgers) == 1)
        await wait_until(lambda: not ledger._keeper.waiting_deletions())
        assert await pages_of(world) == []
        await grow(ledger, 1)
        assert (await chain_records(MemoryStore(world.tree)).get(TOPIC)).record.format < 3  # type: ignore[union-attr]


def moves_ledgers(ops: Sequence[Op]) -> bool:
    return any(op.key.startswith(f"{KEY}/") for op in ops)


@pytest.mark.parametrize("fate", ["answer", "request"])
async def test_a_write_of_pages_whose_answer_is_lost_is_looked_up(fate: str) -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        store = LosingStore(world.tree)
        store.lose = lambda ops: fate if moves_ledgers(ops) and store.lost < 3 else None
        ledger = await world.broker(store=store).open()
        await grow(ledger, 12)
        assert store.lost == 3
        assert ledger.is_usable
        assert len(await pages_of(world)) == 4


class Dying(MortalStore):
    """Its process dies at the write that `dies` names, before or after it is applied."""

    def __init__(self, tree: MemoryTree, dies: str, *, applied: bool) -> None:
        super().__init__(tree)
        self._dies, self._applied = dies, applied

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        moves = moves_ledgers(ops) if self._dies == "pages" else any(isinstance(op, Delete) and op.key == KEY for op in ops)
        if not moves:
            return await super().multi(ops)
        if self._applied:
            await super().multi(ops)
        self.dead = True
        self._check_session()
        raise AssertionError


@pytest.mark.parametrize("applied", [False, True])
async def test_a_crash_at_a_write_of_pages_leaves_a_whole_chain(applied: bool) -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        store = Dying(world.tree, "pages", applied=applied)
        broker = world.broker(store=store)
        ledger = await broker.open()
        told = await append_all(ledger, 5)
        for _ in range(30):
            if store.dead:
                break
            told += await append_all(ledger, 1)
            await wait_until(lambda: store.dead or not ledger._upkeep.is_rolling)
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert len(await read_all(ledger)) >= len(told)
        await grow(ledger, 7)
        assert await pages_of(world)


async def test_an_old_owner_writes_no_page() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        old = await world.broker().open()
        await grow(old, 8)
        new = await world.broker(seed=2).open()
        await grow(new, 5)
        before = {key: node.value for key, node in world.tree.nodes.items() if key.startswith(KEY)}

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            return chain.replace(ledgers=chain.ledgers[1:], deletions=(chain.ledgers[0].ledger_id,)), ()

        with pytest.raises(ManagedLedgerFencedError):
            await old._keeper.commit(plan)
        assert {key: node.value for key, node in world.tree.nodes.items() if key.startswith(KEY)} == before


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_deleted_topic_leaves_no_page(loaded: bool) -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        broker = world.broker()
        ledger = await broker.open()
        await grow(ledger, 12)
        if not loaded:
            await broker.crash()
            broker = world.broker(seed=2)
        await broker.ledgers.delete(TOPIC)
        assert not [key for key in world.tree.nodes if key.startswith(KEY)]
        assert await world.ledger_records() == {}


@pytest.mark.parametrize("dies_at", [None, 1, 2, 3])
async def test_a_long_chain_is_deleted_in_steps(monkeypatch: pytest.MonkeyPatch, dies_at: int | None) -> None:
    monkeypatch.setattr(chain_deletion, "_LEAVE_AT_ONCE", 4)
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        await grow(ledger, 12)
        lengths: list[int] = []

        def note(ops: Sequence[Op]) -> None:
            for op in ops:
                if isinstance(op, Put) and op.key == KEY:
                    lengths.append(len(Chain.decode(op.value, KEY).deletions))
                    store.dead = len(lengths) - 1 == dies_at

        store.lose = note  # type: ignore[assignment]
        with contextlib.nullcontext() if dies_at is None else pytest.raises(Exception, match=r"crashed|session"):
            await broker.ledgers.delete(TOPIC)
        assert max(lengths) <= 4
        if dies_at is not None:
            await broker.crash()
            broker = world.broker(seed=2)
            await broker.ledgers.delete(TOPIC)
        assert not [key for key in world.tree.nodes if key.startswith(KEY)]
        assert await world.ledger_records() == {}


async def test_a_chain_that_still_has_pages_is_deleted_with_them_in_one_write() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        ledger = await world.broker().open()
        await grow(ledger, 12)
        await ledger._keeper.delete()
        assert not [key for key in world.tree.nodes if key.startswith(KEY)]


@pytest.mark.parametrize("applied", [False, True])
async def test_a_deletion_that_is_cut_off_is_finished_and_the_topic_made_anew(applied: bool) -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        store = Dying(world.tree, "deletion", applied=applied)
        broker = world.broker(store=store)
        ledger = await broker.open()
        await grow(ledger, 12)
        last = ledger.last_confirmed
        with pytest.raises(Exception, match=r"crashed|session"):
            await broker.ledgers.delete(TOPIC)
        await broker.crash()
        broker = world.broker(seed=2)
        await broker.ledgers.delete(TOPIC)
        anew = await broker.open()
        assert await append(anew, b"new") > last
        await grow(anew, 8)
        assert len(await pages_of(world)) == 2


async def test_an_owner_of_before_writes_nothing_to_a_topic_made_anew_with_pages() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        old = await world.broker().open()
        await grow(old, 9)
        other = world.broker(seed=2)
        await other.ledgers.delete(TOPIC)
        anew = await other.open(ONE_BOOKIE)
        while world.tree.nodes[KEY].version < old._keeper._version:  # the chain made anew comes to the version that `old` knows
            await grow(anew, 1)
        before = {key: node.value for key, node in world.tree.nodes.items() if key.startswith(KEY)}
        with pytest.raises(ManagedLedgerFencedError):
            await old._keeper.commit(lambda chain: (chain.replace(ledgers=chain.ledgers[1:]), ()))
        assert {key: node.value for key, node in world.tree.nodes.items() if key.startswith(KEY)} == before


async def test_only_what_changed_is_written() -> None:
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        store = MortalStore(world.tree)
        ledger = await world.broker(store=store).open()
        await grow(ledger, 12)
        writes: list[Sequence[Op]] = []
        multi = store.multi

        async def note(ops: Sequence[Op]) -> list[OpResult]:
            writes.append(ops)
            return await multi(ops)

        store.multi = note  # type: ignore[method-assign]
        await ledger.save_topic_epoch(4)
        (ops,) = writes
        assert [op.key for op in ops if isinstance(op, Put)] == [KEY]
        assert not moves_ledgers(ops)


async def test_a_topic_says_that_it_comes_near_a_limit_and_goes_on_without_new_ledgers(caplog: pytest.LogCaptureFixture) -> None:
    async with topic_world(settings=LEDGERS, page_limits=replace(PAGES, most_ledgers=10)) as world:
        ledger = await world.broker().open()
        await grow(ledger, 6)
        assert ledger.near_limit is None
        await grow(ledger, 1)
        assert ledger.near_limit is not None
        assert "8 ledgers; at 10 appends stay in the last ledger" in ledger.near_limit
        await grow(ledger, 2)
        assert [record.message for record in caplog.records].count("chain.near_limit") == 1
        await append_all(ledger, 5)
        assert not ledger._upkeep.is_rolling
        assert len(ledger.chain.ledgers) == 10
        assert ledger.is_usable


async def test_a_topic_says_that_what_waits_for_deletion_fills_its_record() -> None:
    async with topic_world(settings=LEDGERS) as world:
        ledger = await world.broker().open()
        urls = tuple(f"s3://bucket/{number:0200d}" for number in range(4_200))
        await ledger._keeper.commit(lambda chain: (chain.replace(object_deletions=urls), ()))
        assert "4200 objects wait to be deleted" in (ledger.near_limit or "")
        more = (*urls, *(f"{url}-" for url in urls))
        with pytest.raises(ChainTooLargeError, match="8400 objects"):
            await ledger._keeper.commit(lambda chain: (chain.replace(object_deletions=more), ()))
        assert ledger.is_usable
        await ledger._keeper.commit(lambda chain: (chain.replace(object_deletions=None), ()))
        assert ledger.near_limit is None


async def test_pages_that_no_record_names_do_not_keep_a_topic_from_being_deleted() -> None:
    """A restore that was cut off may have left them, and written one of them twice."""
    async with topic_world(settings=LEDGERS, page_limits=PAGES) as world:
        broker = world.broker()
        await grow(await broker.open(ONE_BOOKIE), 8)
        for number in (70, 71):
            await broker.store.create(keys.chain_page_key(KEY, number), b"of a restore")
        await broker.store.put(keys.chain_page_key(KEY, 71), b"of another", 0)
        await broker.ledgers.delete(TOPIC)
        assert not await broker.store.exists(KEY)
