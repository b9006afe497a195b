"""Turns the results of single groups into answers: one call per stream and journal batch, adjacent ranges joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cepheid_rpc import AddAnswer, Status

OnAnswers = Callable[[Sequence[AddAnswer]], None]


class AddCompletion(NamedTuple):
    """What the journal returns for one group. A status other than OK was decided at admission."""

    on_answers: OnAnswers
    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    status: Status


def deliver(completions: Iterable[AddCompletion], outcome: Status) -> None:
    """Deliver answers in the order of the completions.

    `outcome` applies to admitted groups: OK only once their records are synced.
    """
    streams: dict[OnAnswers, list[list[int]]] = {}
    open_runs: dict[tuple[OnAnswers, int], list[int]] = {}
    for on_answers, ledger_id, first, last, status in completions:
        fate = outcome if status is Status.OK else status
        run = open_runs.get((on_answers, ledger_id))
        if run is not None and run[2] + 1 == first and run[3] == fate:
            run[2] = last
            continue
        run = open_runs[on_answers, ledger_id] = [ledger_id, first, last, fate]
        runs = streams.get(on_answers)
        if runs is None:
            streams[on_answers] = [run]
        else:
            runs.append(run)
    for on_answers, runs in streams.items():
        on_answers([AddAnswer(ledger_id, first, last, Status(fate)) for ledger_id, first, last, fate in runs])
