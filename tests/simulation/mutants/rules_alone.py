"""For each rule a known mistake that it catches by itself: all other rules are muted, so that none of them can have noticed it.

    python -m tests.simulation.mutants.rules_alone     how many runs each takes; after a change of worlds, try other seeds

A rule that never fails alone may be one that cannot fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from tests.simulation.mutants import first_seeds
from tests.simulation.processes import ProcessEnded, run_jobs
from tests.simulation.scenarios.runner import run
from tests.simulation.seeds import run_seed

MOST_SEEDS = 60

ALONE: Mapping[str, tuple[str, int | str]] = {
    # rule: the mistake, and the seed that is tried first, or the number of a scenario
    "S1": ("acknowledge before sync", 0),
    "S2": ("take a blank bookie for a new one", 2),
    "S3": ("answer a fence before it is durable", 0),
    "S4": ("put adds into the cache behind their answers", 0),
    "S5": ("limbo answers a certain no", 2),
    "S6": ("take the mark after the flush", 0),
    "S7": ("rename the mark without directory sync", 0),
    "S8": ("count lives in metadata first", 0),
    "S9": ("collect logs by the ledgers in memory", 0),
    "S10": ("collect what can be brought back", 0),
    "S11": ("take a blank bookie for a new one", "20"),
    "S12": ("admit adds without a bound", 0),
    "L1": ("insist on an ensemble whoever recovers", 0),
    "L2": ("choose a bookie again that had left", "07"),
    "L3": ("confirm below the ack quorum", 0),
    "L4": ("stamp recovered copies anew", 0),
    "L5": ("count a timeout as a negative", 1),
    "L6": ("recover without waiting for copies", "04d"),
    "L7": ("stamp recovered copies anew", 0),
    "L8": ("report the end that a recovery found itself", "04"),
    "L9": ("stamp recovered copies anew", "04c"),
    "L10": ("read for a recovery without fencing", 0),
    "L11": ("read for a recovery behind the first fence", 0),
    "L12": ("take the length of a ledger from its last fragment", 2),
    "L13": ("drop an empty ledger without fencing it", 0),
    "L14": ("take ids that somebody else took", 0),
    "R1": ("claim before the copies are synced", 1),
    "R2": ("name a bookie of the ensemble again", 1),
    "R3": ("remove a mark whatever its version", "R3"),
    "R4": ("recover an open ledger at once", 1),
    "R5": ("drain a bookie that may have the only copy", "R5b"),
    "M1": ("count versions up after a conflict", 0),
    "M2": ("record an end without closing", 0),
    "M3": ("hear late answers of a broken ledger", "28"),
    "M4": ("append again what recovery found", "27"),
    "M5": ("give up one append and go on", "29"),
    "M6": ("trim without asking the cursors", 5),
    "M7": ("take a lost answer for a refusal", 6),
    "M8": ("look for no orphans", 0),
    "M9": ("answer before it can be read", 1),
    "M10": ("terminate before appends are refused", 1),
    "T1": ("record a copy before it is read back", "35"),
    "T2": ("delete from bookies before that is recorded", "35"),
    "T3": ("forget the object of a failed attempt", "35"),
    "T4": ("read an entry further on from objects", "35b"),
    "O1": ("give bundles away before topics are unloaded", 1),
    "O2": ("delete whatever is there", 0),
    "O3": ("leave what a session made", 2),
    "O4": ("begin the epochs of a bundle again", 1),
    "O5": ("take over without a challenge", "49"),
    "O6": ("leave the record of a bundle that was split", 8),
    "B1": ("move to a broker that is drained", "50"),
    "C1": ("reset in the same generation", 10),
    "C2": ("save no part of a batch", 6),
    "C3": ("trim without asking the cursors", 63),
    "C4": ("keep what was acknowledged during a reset", "33"),
    "C5": ("count on what the mark has passed", 0),
    "C6": ("save sequence ids of another moment", 1),
    "C7": ("save cursors whoever owns the topic", 0),
    "C8": ("save no delivery counts", 1),
    "H1": ("answer what lies above the recovered end", 0),
    "H2": ("append again what recovery found", 0),
    "H3": ("name what was pushed when saving sequence ids", "30"),
    "H4": ("answer the last of a group first", 0),
    "H5": ("acknowledge cumulatively on shared subscriptions", 87),
    "H6": ("acknowledge cumulatively on shared subscriptions", 3),
    "H7": ("say saved before it is", 4),
    "H8": ("take over without going back", 7),
    "H9": ("tell no delivery counts", 0),
    "H10": ("give a key to two consumers", 29),
    "H13": ("seek one off", 10),
    "H14": ("spend no permits", 3),
    "P1": ("use known permissions for ever", "48"),
    "P2": ("close nothing when a record of permissions changes", "48b"),
    "V1": ("look for the last entry in the last fragment", "02b"),
    "V2": ("leave a recovery to whoever began it", 1),
    "V3": ("replace in metadata without sending again", "06c"),
    "V4": ("leave a recovery to whoever began it", 0),
    "V5": ("copy without the recovery flag", "24"),
    "V6": ("ask for a checkpoint at admission", 0),
    "V7": ("permits wake nobody", 0),
    "V8": ("ask any follower for the cookie", "0x465"),
    "V9": ("replace in metadata without sending again", 1),
    "V10": ("refuse topics without a new ledger", 0),
}


def fails_alone(rule: str) -> tuple[str, int]:
    """By which rule the mistake was found out ("": by none), and how many runs that took.

    The seed that catches the mutant while all rules are heard is the second that is tried.
    """
    mutant, where = ALONE[rule]
    if isinstance(where, str):
        return run(where, mutant, only=rule).rule, 1
    seeds = list(dict.fromkeys([where, first_seeds.load().get(mutant, where), *range(MOST_SEEDS)]))
    for number, seed in enumerate(seeds, 1):
        if run_seed(seed, mutant=mutant, only=rule).rule == rule:
            return rule, number
    return "", len(seeds)


def all_alone(cores: int) -> Iterator[tuple[str, str, int]]:
    """Rule, by which it was found out, after how many runs."""
    for rule, answer in run_jobs(fails_alone, list(ALONE), cores=cores):
        if isinstance(answer, ProcessEnded):
            raise answer
        yield rule, *answer


if __name__ == "__main__":
    for rule, by, runs in all_alone(os.cpu_count() or 1):
        mutant, where = ALONE[rule]
        print(f"{rule:4} {'fails' if by == rule else 'NEVER FAILS'} alone with {mutant!r}, {where!r}: {runs} runs", flush=True)
