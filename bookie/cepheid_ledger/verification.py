"""Reads, checks and compares every replica of every entry of a ledger.

    window of ids ──► every bookie of the fragment: which of its copies are valid, and their digests ──► Findings

Rules:
1. No replica decides alone: a copy is judged by its own digest, and valid copies by each other. If they differ, those that the
   majority contradicts are divergent; without a majority all are.
2. Missing is a certain no. Unreadable is what a bookie cannot report now; it says nothing about the entry.
3. Memory: five bytes per replica and entry of one window, and the chunk that is being read.
"""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from cepheid_ledger.recovery_state import write_set_positions
from cepheid_ledger.replica_read import answers_of
from cepheid_ledger.settings import MIB
from cepheid_metadata import LedgerMetadata
from cepheid_rpc import (
    BookieConnection,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    MalformedGroupError,
    ReadRequest,
    Status,
)

ConnectionOf = Callable[[str], BookieConnection]

WINDOW_ENTRIES = 100_000
_REQUEST_BYTES = 64 * MIB


class Copy(enum.IntEnum):
    """The state of one replica of one entry."""

    UNREADABLE = 0
    VALID = 1
    MISSING = 2
    CORRUPT = 3
    DIVERGENT = 4
    NOT_HERE = 5  # striped to other bookies


@dataclass(frozen=True, slots=True)
class Finding:
    """Entries `first..last` (inclusive) at one bookie, all with the same defect. `valid`: the smallest number of valid copies that
    one of them has elsewhere; 0: no bookie returned a valid copy."""

    bookie: str
    first_entry_id: int
    last_entry_id: int
    ailment: Copy
    reason: str
    valid: int


@dataclass(slots=True)
class LedgerReport:
    """The findings in one ledger. Copies are entries times replicas: wanted = valid + bad + unknown.

    `last_entry_id`: the last entry that was checked; for an open ledger its LAC.
    `copies_bad`: missing, corrupt or divergent for certain. `copies_unknown`: their bookie could not report.
    `lost_entries`: entries that certainly have no valid copy. `unknown_entries`: no valid copy was seen, but a bookie that could
    not report may have one.
    `end_unknown_for`: bookies of an open ledger that returned no LAC, if entries after `last_entry_id` may exist only there.
    """

    ledger_id: int
    state: str
    last_entry_id: int
    ack_quorum: int
    copies_wanted: int = 0
    copies_valid: int = 0
    copies_bad: int = 0
    copies_unknown: int = 0
    lost_entries: int = 0
    unknown_entries: int = 0
    end_unknown_for: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.findings and not self.end_unknown_for

    @property
    def is_bad(self) -> bool:
        """Whether something is certainly wrong, whatever the bookies that could not report have."""
        return self.copies_bad > 0


async def verify_ledger(
    ledger: LedgerMetadata, last_entry_id: int, connection_of: ConnectionOf, *, timeout_s: float = 10.0
) -> LedgerReport:
    """Check entries 0..`last_entry_id`. Failures of bookies are reported, never raised."""
    report = LedgerReport(ledger.ledger_id, ledger.state, last_entry_id, ledger.ack_quorum)
    for first, last, ensemble in _windows(ledger, last_entry_id):
        replicas = [_Replica(bookie, first, last) for bookie in ensemble]
        for position, replica in enumerate(replicas):
            replica.leave_out_others(position, ledger)
        async with asyncio.TaskGroup() as tasks:
            for replica in replicas:
                tasks.create_task(replica.read(ledger.ledger_id, connection_of, timeout_s))
        _judge(replicas, report)
    return report


def _windows(ledger: LedgerMetadata, last_entry_id: int) -> Iterator[tuple[int, int, Sequence[str]]]:
    starts = [fragment.first_entry_id for fragment in ledger.fragments[1:]]
    for fragment, end in zip(ledger.fragments, [*starts, last_entry_id + 1], strict=True):
        end = min(end, last_entry_id + 1)
        for first in range(fragment.first_entry_id, end, WINDOW_ENTRIES):
            yield first, min(first + WINDOW_ENTRIES, end) - 1, fragment.ensemble


class _Replica:
    """The copies of entries `first..last` at one bookie."""

    def __init__(self, bookie: str, first: int, last: int) -> None:
        self.bookie = bookie
        self.first, self.last = first, last
        self.copies = bytearray(last - first + 1)
        self.digests = array("I", bytes(4 * len(self.copies)))
        self.reasons: dict[int, str] = {}  # by index of the first copy that it explains

    def leave_out_others(self, position: int, ledger: LedgerMetadata) -> None:
        if ledger.ensemble_size > ledger.write_quorum:
            for index in range(len(self.copies)):
                if position not in write_set_positions(self.first + index, ledger.ensemble_size, ledger.write_quorum):
                    self.copies[index] = Copy.NOT_HERE

    async def read(self, ledger_id: int, connection_of: ConnectionOf, timeout_s: float) -> None:
        """Read the copies. Those that cannot be read stay unreadable, with the reason at the first of them."""
        reached = self.first
        try:
            while reached <= self.last:
                request = ReadRequest(ledger_id, reached, self.last, _REQUEST_BYTES, from_disk=True)
                before = reached
                async with answers_of(connection_of(self.bookie), request) as answers:
                    while True:
                        async with asyncio.timeout(timeout_s):
                            answer = await anext(answers, None)
                        if answer is None:
                            break
                        for group in answer.groups:
                            self._take(group, ledger_id)
                        for missing in answer.missing:
                            self._take_missing(missing.first_entry_id, missing.last_entry_id, missing.status)
                        reached = max(reached, answer.next_entry_id)
                if reached == before:
                    self._explain(reached, "it answered nothing")
                    return
        except (BookieUnavailableError, MalformedGroupError) as error:
            self._explain(reached, str(error))
        except TimeoutError:
            self._explain(reached, f"no answer within {timeout_s:g} s")

    def _take(self, group: EntryGroup, ledger_id: int) -> None:
        if group.ledger_id != ledger_id or group.first_entry_id < self.first or group.last_entry_id > self.last:
            self._explain(self.first, f"it answered {group!r}, which it was not asked")
            return
        try:
            group.verify()
        except (DigestMismatchError, MalformedGroupError) as error:
            if len(group) > 1:
                for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                    self._take(group.slice(entry_id, entry_id), ledger_id)
            else:
                self._mark(group.first_entry_id, Copy.CORRUPT, str(error))
            return
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            index = entry_id - self.first
            if self.copies[index] != Copy.NOT_HERE:
                self.copies[index] = Copy.VALID
                self.digests[index] = group.header(entry_id).digest

    def _take_missing(self, first: int, last: int, status: Status) -> None:
        copy = Copy.MISSING if status.certain_no else Copy.CORRUPT if status is Status.BAD_DIGEST else Copy.UNREADABLE
        for entry_id in range(max(first, self.first), min(last, self.last) + 1):
            self._mark(entry_id, copy, status.name)

    def _mark(self, entry_id: int, copy: Copy, reason: str) -> None:
        index = entry_id - self.first
        if self.copies[index] != Copy.NOT_HERE:
            self.copies[index] = copy
            self._explain(entry_id, reason)

    def _explain(self, entry_id: int, reason: str) -> None:
        self.reasons.setdefault(entry_id - self.first, reason)


def _judge(replicas: Sequence[_Replica], report: LedgerReport) -> None:
    first, count = replicas[0].first, len(replicas[0].copies)
    here = [count - replica.copies.count(Copy.NOT_HERE) for replica in replicas]
    report.copies_wanted += sum(here)
    if all(replica.copies.count(Copy.VALID) == count for replica in replicas) and all(
        replica.digests == replicas[0].digests for replica in replicas
    ):
        report.copies_valid += sum(here)
        return
    valid_of = bytearray(count)
    for index in range(count):
        holders = [replica for replica in replicas if replica.copies[index] == Copy.VALID]
        if len({replica.digests[index] for replica in holders}) > 1:
            holders = _mark_divergent(holders, index)
        valid_of[index] = len(holders)
        if not holders:
            copies = [replica.copies[index] for replica in replicas]
            # Copies that contradict each other do so whatever an unavailable bookie has.
            is_unknown = Copy.UNREADABLE in copies and Copy.DIVERGENT not in copies
            report.unknown_entries += is_unknown
            report.lost_entries += not is_unknown
    valid, unknown = (sum(replica.copies.count(copy) for replica in replicas) for copy in (Copy.VALID, Copy.UNREADABLE))
    report.copies_valid += valid
    report.copies_unknown += unknown
    report.copies_bad += sum(here) - valid - unknown
    for replica in replicas:
        report.findings += _findings_at(replica, valid_of, first)


def _mark_divergent(holders: Sequence[_Replica], index: int) -> list[_Replica]:
    """Return the majority of those that agree, after marking all others; empty if there is no majority."""
    counts = Counter(replica.digests[index] for replica in holders)
    digest, count = counts.most_common(1)[0]
    majority = digest if 2 * count > len(holders) else None
    for replica in holders:
        if replica.digests[index] != majority:
            replica.copies[index] = Copy.DIVERGENT
            replica.reasons[index] = f"valid, but different from other copies (digest {replica.digests[index]:#010x})"
    return [replica for replica in holders if replica.digests[index] == majority]


def _findings_at(replica: _Replica, valid_of: bytearray, first: int) -> Iterator[Finding]:
    """Return one finding for each run of entries with the same defect."""
    reason = ""

    def kind(index: int) -> tuple[int, bool]:
        """A divergent copy that the majority contradicts can be repaired, another one cannot."""
        return replica.copies[index], replica.copies[index] == Copy.DIVERGENT and valid_of[index] > 0

    for (ailment, _), run in groupby(range(len(replica.copies)), key=kind):
        indexes = list(run)
        if ailment in (Copy.VALID, Copy.NOT_HERE):
            continue
        reason = next((replica.reasons[index] for index in indexes if index in replica.reasons), reason)
        fewest = min(valid_of[index] for index in indexes)
        yield Finding(replica.bookie, first + indexes[0], first + indexes[-1], Copy(ailment), reason, fewest)
