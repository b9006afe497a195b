from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_managed_ledger.ended_totals import EndedTotals
from cepheid_managed_ledger.ledger_counts import Amount

pytestmark = pytest.mark.slow

figures = st.tuples(st.integers(0, 9), st.none() | st.integers(0, 99), st.integers(0, 999))


@given(st.dictionaries(st.integers(0, 12), figures), st.integers(-1, 13))
def test_sums_are_those_of_the_ledgers_behind(ledgers: dict[int, tuple[int, int | None, int]], asked: int) -> None:
    totals = EndedTotals((ledger_id, *ledgers[ledger_id]) for ledger_id in sorted(ledgers))
    behind = [ledger_id for ledger_id in sorted(ledgers) if ledger_id > asked]
    entries, messages, sizes = (sum(ledgers[ledger_id][column] or 0 for ledger_id in behind) for column in range(3))
    assert totals.behind(asked) == Amount(entries, messages, sizes)
    assert totals.uncounted_behind(asked) == [ledger_id for ledger_id in behind if ledgers[ledger_id][1] is None]
    found = ledgers.get(asked, (0, 0, 0))
    assert totals.of(asked) == Amount(found[0], found[1] or 0, found[2])
