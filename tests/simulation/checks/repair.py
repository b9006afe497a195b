"""Checks of automatic repair: what a worker writes (R1, R2), which marks vanish (R3), which ledgers it recovers (R4),
which bookies are not needed any more (R5), and what is left to do in the end (V5).

A worker is known by its process (`History.repairers`). What a bookie holds is asked of its answers and of its disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from cepheid_ledger import entries_of, is_finished
from cepheid_metadata import (
    Check,
    Create,
    Delete,
    DrainingBookie,
    Fragment,
    LedgerMetadata,
    LedgerState,
    Op,
    Put,
    RepairMark,
    ShortReason,
    keys,
)
from tests.simulation.checks.history import History, write_set_of

VIEW_S = 30.0
"""How old a worker's view of the bookies may be: it was paused, its watch came late, metadata was away."""
_ATTEMPT_S = 10.0
"""A worker that calls an entry lost asked for it no longer ago. What was copied since, by itself too, it need not know."""


class RepairChecks:
    """Sees every committed write: `begin` before its ledgers are looked at, `end` after that."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._removed: list[RepairMark] = []
        self._before: dict[int, RepairMark] = {}  # marks as they were before this write
        self._draining_since: dict[str, float] = {}
        self._given_up: dict[str, str] = {}  # bookies whose disks this write calls needless, with what it says

    def begin(self, ops: Sequence[Op], process: str) -> None:
        history = self._history
        self._removed, self._before, self._given_up = [], {}, {}
        for op in ops:
            if process in history.repairers and isinstance(op, Put) and op.key.startswith(f"{keys.LEDGERS_KEY}/"):
                self._check_distinct(op, process)
            if op.key.startswith(f"{keys.DRAINING_BOOKIES_KEY}/") and not isinstance(op, Check):
                ends_s = history.now_s if isinstance(op, Delete) else math.inf
                history.drained_until[op.key.rpartition("/")[2]] = ends_s
                if isinstance(op, Create):
                    self._draining_since[op.key.rpartition("/")[2]] = history.now_s
                if isinstance(op, Put) and DrainingBookie.decode(op.value, op.key).drained_at_ms is not None:
                    self._given_up[op.key.rpartition("/")[2]] = "calls it drained"
            if op.key.startswith(f"{keys.BOOKIE_COOKIES_KEY}/"):
                self._on_cookie(op)
                if isinstance(op, Delete) and process in history.repairers:
                    self._given_up[op.key.rpartition("/")[2]] = "forgets it"
            if not op.key.startswith(f"{keys.REPAIR_MARKS_KEY}/"):
                continue
            if isinstance(op, Create | Put):
                mark = RepairMark.decode(op.value, op.key)
                self._note(mark.ledger_id, mark)
            elif isinstance(op, Delete):
                ledger_id = int(op.key.removeprefix(f"{keys.REPAIR_MARKS_KEY}/").removeprefix("high/").replace("/", ""))
                if ledger_id in history.marks:
                    self._removed.append(history.marks[ledger_id])
                    self._note(ledger_id, None)

    def end(self, process: str) -> None:
        for mark in self._removed:
            self._check_removed(mark, process)
        for bookie, what in self._given_up.items():
            self._check_given_up(bookie, f"{process} {what}")

    def _check_given_up(self, bookie: str, what: str) -> None:
        """R5: an operator may discard the disks of this bookie now."""
        history = self._history
        remembering = [ledger_id for ledger_id, mark in history.marks.items() if bookie in mark.former]
        history.check("R5", not remembering, lambda: f"{bookie} may have what ledgers {remembering} lack, and {what}")
        deleted = [history.deleted[each] for each in history.restorable if each in history.deleted]
        last = [each.ledger_id for each in deleted if self._has_last_copies(bookie, each)]
        history.check("R5", not last, lambda: f"only {bookie} has ledgers {last}, which can be brought back, and {what}")
        alone = [
            (record.ledger_id, entry_id)
            for record in history.ledgers.values()
            for entry_id in entries_in(record)
            if self._is_only_holder(bookie, record, entry_id)
        ]
        history.check("R5", not alone, lambda: f"only {bookie} has {alone}, and {what}; {history.story(alone[0][0])}")

    def _has_last_copies(self, bookie: str, record: LedgerMetadata) -> bool:
        """Whether an entry of the ledger has no other bookie that runs and stays. The auditor's view may be a moment old."""
        history = self._history

        def stays(other: str) -> bool:
            since_s = self._draining_since.get(other, math.inf)
            is_leaving = history.drained_until.get(other) == math.inf and history.now_s - since_s >= VIEW_S
            return not is_leaving and history.was_registered_within(other, VIEW_S)

        return any(
            bookie in holders and not any(stays(other) for other in holders if other != bookie)
            for entry_id in entries_in(record)
            if (holders := write_set_of(record, entry_id))
        )

    def _is_only_holder(self, bookie: str, record: LedgerMetadata, entry_id: int) -> bool:
        history, ledger_id = self._history, record.ledger_id
        return history.has_told(bookie, ledger_id, entry_id) and not any(
            history.has(other, ledger_id, entry_id) and history.is_readable(other, ledger_id, entry_id)
            for other in write_set_of(record, entry_id)
            if other != bookie
        )

    def _on_cookie(self, op: Op) -> None:
        name = op.key.rpartition("/")[2]
        if isinstance(op, Create | Put):
            self._history.cookies[name] = op.value
        elif isinstance(op, Delete):
            self._history.on_forgotten(name)

    def _note(self, ledger_id: int, mark: RepairMark | None) -> None:
        history = self._history
        if ledger_id in history.marks:
            self._before[ledger_id] = history.marks.pop(ledger_id)
        since = history.marked_since.pop(ledger_id, {})
        if mark is not None:
            history.marks[ledger_id] = mark
            history.marked_since[ledger_id] = {bookie: since.get(bookie, history.now_s) for bookie in mark.bookies}

    def check_claim(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        """A worker names other bookies: each has what it has to hold, in a fragment of which all is known."""
        history, ledger_id = self._history, after.ledger_id
        history.did("repair a ledger")
        for old, new in zip(before.fragments, after.fragments, strict=True):
            changed = [place for place, bookie in enumerate(old.ensemble) if new.ensemble[place] != bookie]
            if not changed:
                continue
            finished = is_finished(before, old)
            history.check("R1", finished, lambda old=old: f"{process} edits the open {old}; {history.story(ledger_id)}")
            for place in changed if finished else ():
                target = new.ensemble[place]
                history.check(
                    "R2",
                    target not in old.ensemble,
                    lambda old=old, target=target: f"{process} names {target} for another of {old}; {history.story(ledger_id)}",
                )
                for entry_id in entries_at(before, old, place):
                    self._check_held(before, after, entry_id, target, process)

    def _check_held(self, before: LedgerMetadata, after: LedgerMetadata, entry_id: int, target: str, process: str) -> None:
        """What N lost with its disk, the auditor finds (V5). An entry that the mark calls lost has to stay within reach."""
        history, ledger_id = self._history, after.ledger_id
        facts = history.bookie(target)
        lost_with_disk = ledger_id <= facts.forgotten_through and entry_id in facts.ok.get(ledger_id, ())
        if history.has_told(target, ledger_id, entry_id) or lost_with_disk:
            history.check("R1", True, "")
            return
        mark, earlier = history.marks.get(ledger_id), self._before.get(ledger_id)
        named = write_set_of(after, entry_id)
        holding = [*write_set_of(before, entry_id), *(() if earlier is None else earlier.former)]
        remembered = [*named, *(() if mark is None else mark.former)]
        forgotten = [each for each in holding if history.has_told(each, ledger_id, entry_id) and each not in remembered]
        told = mark is not None and any(run.first <= entry_id <= run.last for run in mark.lost)
        history.check(
            "R1",
            told and not forgotten,
            lambda: (
                f"{process} names {target} for {ledger_id}:{entry_id}, which it lacks; its mark is {mark}, and {forgotten} have it "
                f"and are forgotten; {history.story(ledger_id)}"
            ),
        )
        given_up = [
            each
            for each in named
            if history.has_told(each, ledger_id, entry_id)
            and history.is_readable(each, ledger_id, entry_id)
            and history.now_s - history.bookie(each).copied_at.get((ledger_id, entry_id), -VIEW_S) > _ATTEMPT_S
        ]
        history.check(
            "R1",
            not given_up,
            lambda: f"{process} calls {ledger_id}:{entry_id} lost, and {given_up} have it; {history.story(ledger_id)}",
        )

    def _check_distinct(self, op: Put, process: str) -> None:
        """Looked for in the bytes: no record with a bookie twice can be read."""
        fragments = json.loads(op.value).get("fragments", ())
        twice = [each for each in fragments if len(set(each["ensemble"])) < len(each["ensemble"])]
        self._history.check("R2", not twice, lambda: f"{process} names a bookie twice: {twice} in {op.key}")

    def _check_removed(self, mark: RepairMark, process: str) -> None:
        """R3: each bookie of it has left, or is there with what it has to hold; or the ledger is gone."""
        history, ledger_id = self._history, mark.ledger_id
        record = history.ledgers.get(ledger_id)
        left = [] if record is None else [bookie for bookie in mark.bookies if not self._is_settled(record, bookie, mark)]
        history.check("R3", not left, lambda: f"{process} removes the {mark}, and {left} lack copies; {history.story(ledger_id)}")
        lost = (
            []
            if record is None
            else [e for run in mark.lost for e in range(run.first, run.last + 1) if not self._is_held(record, e)]
        )
        history.check(
            "R3", not lost, lambda: f"{process} removes the {mark}, and nobody named has {lost}; {history.story(ledger_id)}"
        )

    def _is_settled(self, record: LedgerMetadata, bookie: str, mark: RepairMark) -> bool:
        if not any(bookie in fragment.ensemble for fragment in needed(record)):
            return True
        if not self._history.was_registered_within(bookie, VIEW_S):
            return False
        if mark.bookies[bookie] not in (ShortReason.EMPTY_DISK, ShortReason.DAMAGED):
            return True  # it came back with what it has
        # Its copies were checked before their disks were lost. When it is found gone, or comes back empty, it is marked again.
        is_lost = self._history.lost_disks_while_registered(bookie)
        return is_lost or not lacking(self._history, record, bookie)

    def _is_held(self, record: LedgerMetadata, entry_id: int) -> bool:
        return any(
            self._history.has(bookie, record.ledger_id, entry_id)
            or (record.ledger_id <= self._history.bookie(bookie).forgotten_through)
            for bookie in write_set_of(record, entry_id)
        )


def check_recovery(history: History, ledger_id: int, process: str, grace_s: float) -> None:
    """R4: a worker begins to recover a ledger. Only a bookie that its last fragment must do without is a reason, after a while."""
    record = history.ledgers.get(ledger_id)
    if record is None or record.state is not LedgerState.OPEN:
        history.check("R4", True, "")
        return
    since = history.marked_since.get(ledger_id, {})
    due = [
        bookie
        for bookie in record.last_fragment.ensemble
        if bookie in since and history.now_s - since[bookie] >= grace_s and _must_leave(history, ledger_id, bookie)
    ]
    history.check(
        "R4",
        bool(due),
        lambda: f"{process} recovers an open ledger, its mark is {history.marks.get(ledger_id)}; {history.story(ledger_id)}",
    )


def _must_leave(history: History, ledger_id: int, bookie: str) -> bool:
    is_draining = history.now_s - history.drained_until.get(bookie, -VIEW_S) < VIEW_S
    return is_draining or history.was_away_within(bookie, VIEW_S) or ledger_id <= history.bookie(bookie).forgotten_through


def needed(record: LedgerMetadata) -> list[Fragment]:
    """Fragments whose bookies matter: those with entries, and the open one."""
    return [
        fragment
        for fragment in record.fragments
        if not is_finished(record, fragment) or (ends := entries_of(record, fragment))[0] <= ends[1]
    ]


def entries_at(record: LedgerMetadata, fragment: Fragment, place: int) -> Iterator[int]:
    """Entries of a finished fragment whose copies belong to that place in the ensemble. Said once more, as in history.py."""
    first, last = entries_of(record, fragment)
    size = len(fragment.ensemble)
    return (entry_id for entry_id in range(first, last + 1) if (place - entry_id) % size < record.write_quorum)


def entries_in(record: LedgerMetadata) -> Iterator[int]:
    """Entries of finished fragments."""
    for fragment in needed(record):
        if is_finished(record, fragment):
            first, last = entries_of(record, fragment)
            yield from range(first, last + 1)


def lacking(history: History, record: LedgerMetadata, bookie: str) -> list[int]:
    """Entries of finished fragments that the bookie should hold, and does not, while some bookie has them."""
    ledger_id = record.ledger_id
    return [
        entry_id
        for fragment in needed(record)
        if is_finished(record, fragment) and bookie in fragment.ensemble
        for entry_id in entries_at(record, fragment, fragment.ensemble.index(bookie))
        if not history.has(bookie, ledger_id, entry_id)
        and any(history.has(other, ledger_id, entry_id) for other in write_set_of(record, entry_id))
    ]


def not_whole(history: History, record: LedgerMetadata, gone: Sequence[str]) -> list[str]:
    """Bookies that the record names for copies that they do not have: they are gone, lost their disks, or missed them (V5)."""
    named = {bookie: None for fragment in needed(record) for bookie in fragment.ensemble}
    return [bookie for bookie in named if bookie in gone or lacking(history, record, bookie)]
