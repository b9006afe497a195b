"""The two halves against a model: every entry is found, gaps are told, a half goes as a whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cepheid_bookie.write_cache import CachedLedger, WriteCache, cached_size
from tests.bookie.bookie_support import KiB, group_of

runs = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=25)


@given(runs, st.integers(0, 80))
def test_finds_exactly_the_entries_that_were_added_in_any_order(added: list[tuple[int, int]], asked: int) -> None:
    ledger = CachedLedger()
    model: set[int] = set()
    for first, count in added:
        ledger.add(group_of(7, first, count))
        model.update(range(first, first + count))
    group = ledger.find(asked)
    assert (group is not None) == (asked in model)
    if group is not None:
        assert group.first_entry_id <= asked <= group.last_entry_id
    assert ledger.last_entry_id == max(model, default=-1)
    assert ledger.first_from(asked) == min((first for first, _ in added if first > asked), default=None)


@given(runs, runs, st.integers(0, 80))
def test_looks_into_both_halves(old: list[tuple[int, int]], new: list[tuple[int, int]], asked: int) -> None:
    cache = WriteCache(KiB)
    for first, count in old:
        cache.add(group_of(7, first, count))
    half = cache.swap()
    for first, count in new:
        cache.add(group_of(7, first, count))
    old_ids = {i for first, count in old for i in range(first, first + count)}
    new_ids = {i for first, count in new for i in range(first, first + count)}
    assert (cache.find(7, asked) is not None) == (asked in old_ids | new_ids)
    assert cache.last_entry_id(7) == max(old_ids | new_ids, default=-1)
    assert half.used_bytes == sum(cached_size(group_of(7, first, count)) for first, count in old)
    cache.release()
    assert (cache.find(7, asked) is not None) == (asked in new_ids)


def test_a_deleted_ledger_is_hidden_in_both_halves_and_costs_nothing() -> None:
    cache = WriteCache(64 * KiB)
    cache.add(group_of(7, 0, 3))
    cache.add(group_of(8, 0, 3))
    cache.swap()
    cache.add(group_of(7, 3, 3))
    cache.drop(7)
    assert cache.find(7, 1) is None
    assert cache.find(7, 4) is None
    assert cache.find(8, 1) is not None
    assert cache.used_bytes == cached_size(group_of(8, 0, 3))
