"""Where readers of a chain stop."""

from __future__ import annotations

import pytest

from cepheid_ledger import LedgerLostError, check_end, readable_end


@pytest.mark.parametrize(
    ("recorded_entries", "last_add_confirmed", "end"),
    [
        (120, 119, 119),
        (3, 4, 2),  # recovery kept more than the chain knows of: it was written again to the next ledger
        (0, -1, -1),
        (0, 0, -1),
        (None, 40, 40),  # being written
        (None, -1, -1),
    ],
)
def test_the_chains_record_is_the_end(recorded_entries: int | None, last_add_confirmed: int, end: int) -> None:
    assert readable_end(recorded_entries, last_add_confirmed) == end
    assert check_end(9, recorded_entries, last_add_confirmed) == end


def test_a_ledger_shorter_than_recorded_is_a_loss_and_never_a_short_read() -> None:
    with pytest.raises(LedgerLostError, match="records 120 entries of ledger 9, which is closed at entry 100"):
        check_end(9, 120, 100)
