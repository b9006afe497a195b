"""Decides which ledgers of a chain are deleted: a pure core.

    [5: 40 MB, 3 h ago] [6: 40 MB, 2 h] [8: 40 MB, 1 h] [9: 10 MB, being written]        everything acknowledged
    retention 0 min, 0 MB: delete 5 6 8 │ 150 min, no size limit: 5 │ no time limit, 80 MB: 5 (130 - 40 >= 80; then 50 < 80)

Rules:
1. Only a prefix is deleted, never the last ledger: the walk stops at the first ledger that stays.
2. What a durable cursor has not acknowledged stays, whatever the retention says. Without cursors nothing is held.
3. Acknowledged data stays while it is within the time *and* within the size. -1 is no limit; 0 and 0 keep nothing.
4. One snapshot of list, cursors and clock decides: the caller must not await between taking it and this call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cepheid_metadata import ChainLedger


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits up to which acknowledged data is kept. -1: no limit."""

    time_ms: int = 0
    size_bytes: int = 0


def plan_trim(
    ledgers: Sequence[ChainLedger],
    *,
    last_size_bytes: int,
    acknowledged_entries: int | None,
    retention: Retention,
    now_ms: int,
    is_in_use: Callable[[int], bool] = lambda _: False,
) -> int:
    """Return how many ledgers are to be deleted, from the first on.

    `last_size_bytes`: size of the ledger being written, whose record has none yet. `acknowledged_entries`: how many entries from
    the start of the list every durable cursor has acknowledged; None: there is no durable cursor. `is_in_use`: being read right
    now.
    """
    left_bytes = sum(ledger.size_bytes for ledger in ledgers[:-1]) + last_size_bytes
    entries = 0
    for count, ledger in enumerate(ledgers[:-1]):  # rule 1
        entries += ledger.entries or 0
        if acknowledged_entries is not None and entries > acknowledged_entries:  # rule 2
            return count
        left_bytes -= ledger.size_bytes
        too_old = retention.time_ms >= 0 and now_ms - ledger.closed_at_ms > retention.time_ms
        too_much = retention.size_bytes >= 0 and left_bytes >= retention.size_bytes
        if not (too_old or too_much) or is_in_use(ledger.ledger_id):  # rule 3
            return count
    return max(0, len(ledgers) - 1)
