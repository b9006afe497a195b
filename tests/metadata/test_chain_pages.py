"""Chains that are too long for one record: how they are cut, and how they are read while they change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_metadata import (
    Chain,
    ChainLedger,
    ChainPage,
    ChainTooLargeError,
    ChainUnsettledError,
    CorruptRecordError,
    MemoryStore,
    MemoryTree,
    OffloadedLedger,
    PageLimits,
    StoredChain,
    Versioned,
    chain_records,
    keys,
    read_chain,
)
from cepheid_metadata.chain_pages import LIMITS, assemble, changes, create_chain, page_deletes, page_keys, pages_of, split
from cepheid_metadata.store import MAX_REQUEST_BYTES, Create, Delete, Put
from cepheid_wire import TopicName

TOPIC = TopicName.parse("persistent://public/default/orders")
KEY = keys.chain_key(TOPIC)
SMALL = PageLimits(record_ledgers=3, page_ledgers=2, plain_ledgers=7, record_bytes=3_000, page_bytes=1_200)


def ledgers(first: int, last: int) -> tuple[ChainLedger, ...]:
    return tuple(ChainLedger(ledger_id=number, entries=7, size_bytes=700, closed_at_ms=9) for number in range(first, last + 1))


def long_chain(count: int) -> Chain:
    return Chain(incarnation="c0ffee", ledgers=(*ledgers(1, count - 1), ChainLedger(ledger_id=count)))


def copy_of(ledger_id: int, url_length: int = 60) -> OffloadedLedger:
    return OffloadedLedger(url=f"s3://b/{ledger_id:0{url_length}d}", started_at_ms=1)


def ids_by_page(stored: StoredChain) -> list[list[int]]:
    return [[ledger.ledger_id for ledger in part.ledgers] for part in (*stored.pages, stored.record)]


async def written(store: MemoryStore, chain: Chain, before: StoredChain | None = None, version: int = 0) -> StoredChain:
    """Write a chain as its keeper does."""
    if before is None:
        before = StoredChain(chain.replace(ledgers=()), chain.replace(ledgers=()))
        await chain_records(store).create(TOPIC, before.record)
    after = split(chain, before, SMALL)
    await store.multi(changes(KEY, version, before, after))
    return after


# How a chain is cut


def test_a_short_chain_is_one_record_in_the_oldest_format() -> None:
    stored = split(long_chain(5_000), None)
    assert stored.pages == ()
    assert stored.record.format == 1
    assert b"pages" not in stored.record.encode()


def test_a_long_chain_keeps_its_newest_ledgers_in_the_record() -> None:
    stored = split(long_chain(8), None, SMALL)
    assert ids_by_page(stored) == [[1, 2], [3, 4], [5, 6, 7, 8]]
    assert stored.record.format == 3


def test_a_chain_with_offloaded_ledgers_moves_to_pages_earlier() -> None:
    chain = long_chain(6)
    assert split(chain, None, SMALL).pages == ()
    assert ids_by_page(split(chain.replace(offloaded={1: copy_of(1)}), None, SMALL)) == [[1, 2], [3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("changed", "pages"),
    [
        (lambda chain: chain.replace(epoch=7), []),  # nothing in a page changes
        (lambda chain: chain.replace(ledgers=chain.ledgers[2:]), []),  # a whole page goes
        (lambda chain: chain.replace(ledgers=chain.ledgers[1:]), [[2]]),  # a part of a page goes
        (lambda chain: chain.replace(offloaded={3: copy_of(3)}), [[3, 4]]),
        (lambda chain: chain.replace(offloaded={8: copy_of(8)}), []),  # in the record
        (lambda chain: chain.replace(messages={3: 12}), []),  # rule 4
        (lambda chain: chain.replace(ledgers=chain.ledgers[:2] + chain.ledgers[3:]), [[4]]),  # one in the middle goes
    ],
)
def test_only_pages_that_change_are_written(changed: object, pages: list[list[int]]) -> None:
    before = split(long_chain(9), None, SMALL)
    after = split(changed(before.chain), before, SMALL)  # type: ignore[operator]
    first, *rest = changes(KEY, 5, before, after)
    assert isinstance(first, Put)
    assert first.expected_version == 5
    created = [ChainPage.decode(op.value, op.key) for op in rest if isinstance(op, Create)]
    assert [[ledger.ledger_id for ledger in page.ledgers] for page in created] == pages
    kept = {ref.number for ref in before.refs} & {ref.number for ref in after.refs}
    deleted = {op.key for op in rest if isinstance(op, Delete)}
    assert deleted == {keys.chain_page_key(KEY, ref.number) for ref in before.refs if ref.number not in kept}
    assert all(ref.number not in kept for ref in after.refs if f"{KEY}/{ref.number}" in {op.key for op in rest})


def test_the_longest_record_of_an_older_release_becomes_pages_in_one_write() -> None:
    chain = long_chain(9_900)
    chain = chain.replace(messages={ledger.ledger_id: 123_456 for ledger in chain.ledgers})
    many = tuple(
        ledger.replace(entries=50_000, size_bytes=1 << 30, closed_at_ms=1_790_000_000_000) for ledger in chain.ledgers[:-1]
    )
    chain = chain.replace(ledgers=(*many, ChainLedger(ledger_id=9_900)))
    assert len(chain.encode()) > MAX_REQUEST_BYTES  # an older release could not write even this
    before = StoredChain(chain, chain)
    ops = changes(KEY, 1, before, split(chain, before))
    assert sum(len(op.key) + len(op.value) for op in ops if isinstance(op, Create | Put)) < MAX_REQUEST_BYTES


def test_a_change_that_no_write_can_carry_is_refused_with_what_fills_it() -> None:
    chain = long_chain(9)
    too_many = chain.replace(object_deletions=tuple(f"s3://b/{number:0200d}" for number in range(6_000)))
    with pytest.raises(ChainTooLargeError, match="6000 objects that wait to be deleted"):
        changes(KEY, 1, StoredChain(chain, chain), split(too_many, None))


def test_rewriting_a_page_whose_ledgers_were_offloaded_makes_several() -> None:
    before = split(long_chain(9), None, SMALL)
    after = split(before.chain.replace(offloaded={1: copy_of(1, 900), 2: copy_of(2, 900)}), before, SMALL)
    assert ids_by_page(after)[:2] == [[1], [2]]


@st.composite
def histories(draw: st.DrawFn) -> list[Chain]:
    """Chains that follow each other as an owner's plans make them."""
    chain, newest = Chain(incarnation="c0ffee"), 0
    found = [chain]
    for _ in range(draw(st.integers(1, 25))):
        match draw(st.sampled_from(["grow", "grow", "grow", "trim", "offload", "leave", "count", "hole"])):
            case "grow":
                step = draw(st.integers(1, 4))
                ended = tuple(one.replace(entries=3) if one.is_open else one for one in chain.ledgers)
                chain = chain.replace(
                    ledgers=(*ended, *ledgers(newest + 1, newest + step - 1), ChainLedger(ledger_id=newest + step))
                )
                newest += step
            case "trim" if len(chain.ledgers) > 1:
                chain = without(chain, range(draw(st.integers(1, len(chain.ledgers) - 1))))
            case "hole" if len(chain.ledgers) > 2:
                chain = without(chain, [draw(st.integers(0, len(chain.ledgers) - 2))])
            case "offload" if len(chain.ledgers) > 1:
                ledger_id = draw(st.sampled_from([one.ledger_id for one in chain.ledgers[:-1]]))
                copy = copy_of(ledger_id, draw(st.sampled_from([30, 400]))).replace(complete=draw(st.booleans()))
                chain = chain.replace(offloaded={**(chain.offloaded or {}), ledger_id: copy})
            case "leave" if complete := [number for number, one in (chain.offloaded or {}).items() if one.complete]:
                ledger_id = draw(st.sampled_from(complete))
                copy = (chain.offloaded or {})[ledger_id].replace(on_bookies=False)
                chain = chain.replace(offloaded={**(chain.offloaded or {}), ledger_id: copy})
            case "count" if len(chain.ledgers) > 1:
                ledger_id = draw(st.sampled_from([one.ledger_id for one in chain.ledgers[:-1]]))
                chain = chain.replace(messages={**(chain.messages or {}), ledger_id: 5})
        found.append(chain)
    return found


def without(chain: Chain, places: Sequence[int]) -> Chain:
    gone = {chain.ledgers[place].ledger_id for place in places}
    left = tuple(one for one in chain.ledgers if one.ledger_id not in gone)
    offloaded = {number: one for number, one in (chain.offloaded or {}).items() if number not in gone} or None
    messages = {number: one for number, one in (chain.messages or {}).items() if number not in gone} or None
    return chain.replace(ledgers=left, offloaded=offloaded, messages=messages)


@settings(max_examples=60, deadline=None)
@given(histories())
def test_what_is_stored_is_always_the_chain(history: list[Chain]) -> None:
    tree: dict[str, bytes] = {KEY: history[0].encode()}
    stored = StoredChain(history[0], history[0])
    old_refs = []
    for chain in history[1:]:
        after = split(chain, stored, SMALL)
        for op in changes(KEY, 0, stored, after):
            match op:
                case Put():
                    tree[op.key] = op.value
                case Create():
                    assert op.key not in tree
                    tree[op.key] = op.value
                case Delete():
                    del tree[op.key]
        kept = {ref.number for ref in stored.refs} & {ref.number for ref in after.refs}
        assert all((a == b) for a in stored.refs for b in after.refs if a.number == b.number and a.number in kept)
        record = Chain.decode(tree[KEY], KEY)
        assert sorted(tree) == sorted([KEY, *page_keys(record, KEY)])
        pages = pages_of(record, KEY, [tree.get(key) for key in page_keys(record, KEY)])
        assert pages is not None
        whole = assemble(record, pages, KEY).chain
        assert whole.replace(messages=None) == chain.replace(messages=None)
        assert (whole.messages or {}).items() <= (chain.messages or {}).items()  # rule 4
        assert all(len(page.ledgers) <= SMALL.page_ledgers for page in pages)
        assert all(len(page.encode()) <= SMALL.page_bytes + 200 for page in pages if len(page.ledgers) > 1)
        assert len(record.ledgers) <= SMALL.plain_ledgers
        # A reader that still has an older record finds its pages, or sees that they are not the ones it means (rule 2).
        for refs, copies in old_refs:
            for ref, content in zip(refs, copies, strict=True):
                found = tree.get(keys.chain_page_key(KEY, ref.number))
                if found is not None and ChainPage.decode(found, KEY).ref(ref.number) == ref:
                    assert found == content
        old_refs.append((after.refs, [page.encode() for page in after.pages]))
        stored = after


# Large chains are not validated item by item at each change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ledgers": (*ledgers(1, 400), *ledgers(5, 5))}, "twice"),
        ({"ledgers": (ChainLedger(ledger_id=0), *ledgers(1, 400))}, "no recorded end"),
        ({"deletions": (7,)}, "twice"),
        ({"offloaded": {999: copy_of(999)}}, "not in the chain"),
        ({"offloaded": {7: "no copy"}}, "offloaded"),
        ({"messages": {7: -1}}, "greater than or equal to 0"),
        ({"ledgers": (*ledgers(1, 400), "no ledger")}, "ledgers"),
        ({"epoch": -1}, "greater than or equal to 0"),
    ],
)
def test_a_change_of_a_large_chain_is_checked(change: dict[str, object], problem: str) -> None:
    chain = Chain(incarnation="c0ffee", ledgers=ledgers(1, 400))
    with pytest.raises(ValueError, match=problem):
        chain.replace(**change)


def test_a_change_of_a_large_chain_finds_its_format() -> None:
    chain = Chain(incarnation="c0ffee", ledgers=ledgers(1, 400))
    assert chain.replace(messages={3: 4}).format == 2
    offloaded = chain.replace(offloaded={3: copy_of(3)})
    assert (offloaded.format, offloaded.replace(offloaded=None).format) == (3, 1)
    assert Chain.decode(offloaded.encode(), KEY) == offloaded


# Reading


async def test_a_whole_chain_is_read() -> None:
    store = MemoryStore(MemoryTree())
    assert await read_chain(store, TOPIC) is None
    stored = await written(store, long_chain(9))
    found = await read_chain(store, TOPIC)
    assert found == (stored.chain, 1)
    assert found.record.pages is None


class ChangingStore(MemoryStore):
    """Changes the chain after its record was read, `times` times."""

    def __init__(self, tree: MemoryTree, stored: StoredChain, times: int) -> None:
        super().__init__(tree)
        self._stored, self._version, self._left = stored, 1, times

    async def get(self, key: str) -> Versioned | None:
        found = await super().get(key)
        if key == KEY and self._left:
            self._left -= 1
            chain = self._stored.chain
            offloaded = {ledger.ledger_id: copy_of(ledger.ledger_id, 30 + self._left % 2) for ledger in chain.ledgers[:-1]}
            self._stored = await written(self, chain.replace(offloaded=offloaded), self._stored, self._version)
            self._version += 1
        return found


async def test_a_chain_that_changes_while_it_is_read_is_read_again() -> None:
    tree = MemoryTree()
    stored = await written(MemoryStore(tree), long_chain(9))
    store = ChangingStore(tree, stored, 5)
    found = await read_chain(store, TOPIC)
    assert found is not None
    assert found.record == store._stored.chain


async def test_a_chain_that_changes_all_the_time_is_an_error_worth_another_attempt() -> None:
    tree = MemoryTree()
    stored = await written(MemoryStore(tree), long_chain(9))
    with pytest.raises(ChainUnsettledError) as raised:
        await read_chain(ChangingStore(tree, stored, 1_000), TOPIC)
    assert raised.value.retriable


async def test_a_page_that_is_lost_is_damage() -> None:
    store = MemoryStore(MemoryTree())
    stored = await written(store, long_chain(9))
    await store.delete(keys.chain_page_key(KEY, stored.refs[1].number), 0)
    with pytest.raises(CorruptRecordError, match="names pages 0, 1"):
        await read_chain(store, TOPIC)


@pytest.mark.parametrize("change", [{"incarnation": "another"}, {"ledgers": ledgers(1, 1)}, {"ledgers": ledgers(2, 3)}])
async def test_a_page_of_another_moment_does_not_count(change: dict[str, object]) -> None:
    store = MemoryStore(MemoryTree())
    stored = await written(store, long_chain(9))
    await store.put(keys.chain_page_key(KEY, 0), stored.pages[0].replace(**change).encode(), 0)
    with pytest.raises(CorruptRecordError):
        await read_chain(store, TOPIC)


@pytest.mark.parametrize("count", [1, 3, 9, 40])
async def test_a_long_chain_is_created_in_steps(count: int) -> None:
    store = MemoryStore(MemoryTree())
    copies = {number: copy_of(number, 300) for number in range(1, count)}
    chain = long_chain(count).replace(offloaded=copies or None, deletions=(77,), properties={"a": "b"})
    version = await create_chain(store, TOPIC, chain, SMALL)
    assert await read_chain(store, TOPIC) == (chain, version)


async def test_pages_are_deleted_with_their_record() -> None:
    store = MemoryStore(MemoryTree())
    stored = await written(store, long_chain(9))
    await store.multi([*page_deletes(KEY, stored), Delete(KEY, 1)])
    assert await read_chain(store, TOPIC) is None


@pytest.mark.slow
def test_a_hundred_thousand_ledgers_fit() -> None:
    chain = Chain(incarnation="c0ffee", ledgers=ledgers(1, 100_000))
    chain = chain.replace(offloaded={ledger.ledger_id: copy_of(ledger.ledger_id, 150) for ledger in chain.ledgers})
    stored = split(chain, None)
    assert len(stored.record.encode()) <= LIMITS.record_bytes + 100 * len(stored.pages)
    assert max(len(page.encode()) for page in stored.pages) <= LIMITS.page_bytes
