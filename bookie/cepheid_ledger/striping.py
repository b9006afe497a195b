"""Which bookies hold which entries if the ensemble is larger than the write quorum (ledger-protocol: entry arithmetic).

    E = 4, Qw = 3      entry   0      1      2      3      4
                       on      0 1 2    1 2 3  0   2 3  0 1     3  0 1 2      positions in the ensemble

Position p holds entry e if (p - e) mod E < Qw: runs of Qw neighbours in every E ids.
"""

from __future__ import annotations

from cepheid_ledger.recovery_state import write_set_positions


def write_windows(ensemble_size: int, write_quorum: int) -> tuple[tuple[int, ...], ...]:
    """Return the write sets: entry e is on the positions of window e mod E."""
    return tuple(write_set_positions(entry_id, ensemble_size, write_quorum) for entry_id in range(ensemble_size))


def runs_at(position: int, first: int, last: int, ensemble_size: int, write_quorum: int) -> list[tuple[int, int]]:
    """Return the entries of `first..last` (inclusive) that this position holds, as runs of consecutive ids."""
    start = first - (first - (position - write_quorum + 1)) % ensemble_size  # start of the run at or before `first`
    runs: list[tuple[int, int]] = []
    while start <= last and first <= last:
        run_last = start + write_quorum - 1
        if run_last >= first:
            runs.append((max(start, first), min(run_last, last)))
        start += ensemble_size
    return runs
