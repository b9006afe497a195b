"""Reads a range of confirmed entries of a striped ledger (E > Qw): no bookie has all of them, so answers are merged by entry id.

    E = 4, Qw = 2      entry       0    1    2    3    4    5
    asked first        b           0    1              4    5        each id is on one of them, and as few as possible are asked
                       d                     2    3
    d fails at 2       c (and a)        1    2                        the next of that entry's write set, for what is missing

Rule 1: the result is a run without a gap from the first entry on; it ends before the first entry that no bookie returned.
Rule 2: only an entry's own write set is asked and trusted for it: others never had it, and their "no" means nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cepheid_ledger.bookie_calls import BookieCalls
from cepheid_ledger.recovery_state import holds_any, write_set_positions
from cepheid_ledger.replica_read import ConnectionOf, ReplicaFailure, answers_of, explain, verified_parts
from cepheid_ledger.settings import LedgerSettings
from cepheid_rpc import BookieUnavailableError, EntryGroup, ReadRequest, Status


@dataclass(frozen=True, slots=True)
class StripedCopies:
    """At least one entry, consecutive from the first requested one; and the positions that failed on the way."""

    groups: list[EntryGroup]
    failed: tuple[int, ...]


@dataclass(slots=True)
class _Said:
    """The answers of one bookie so far. `until`: nothing is known of ids from there on, unless it failed."""

    until: int
    missing: list[tuple[int, int, str, Status | None]] = field(default_factory=list)
    failure: ReplicaFailure | None = None


class StripeMerge:
    """The core: decides which bookie to ask next, and merges the answers."""

    def __init__(self, ensemble: Sequence[str], write_quorum: int, first: int, last: int) -> None:
        self._ensemble = ensemble
        self._write_quorum = write_quorum
        self._last = last
        self._groups: list[EntryGroup] = []
        self._said: dict[int, _Said] = {}
        self.first = first
        self.next_entry_id = first  # the first that no bookie returned

    def first_choice(self, turn: int, avoided: Sequence[int], distances: Sequence[int] = ()) -> list[int]:
        """Return positions that together hold every entry, the nearest ones of each write set by `distances`.

        `turn` spreads readers; `avoided` are used if no other position has the entry.
        """
        chosen: list[int] = []
        for entry_id in range(self.first, min(self._last, self.first + len(self._ensemble) - 1) + 1):
            write_set = self._write_set(entry_id)
            if any(position in chosen for position in write_set):
                continue
            good = [position for position in write_set if position not in avoided] or list(write_set)
            if distances:
                nearest = min(distances[position] for position in good)
                good = [position for position in good if distances[position] == nearest]
            # The last of a window holds most of what follows; a different one for the first, so that the load moves around.
            chosen.append(good[-1 - turn % len(good)] if not chosen else good[-1])
        return chosen

    def next_choice(self, asked: Sequence[int], *, impatient: bool) -> int | None:
        """Return the next position to ask for the first missing entry; None: none is left, or pending answers are enough."""
        if self.is_complete:
            return None
        choice: int | None = None
        for position in self._write_set(self.next_entry_id):
            said = self._said.get(position)
            if said is None and position not in asked:
                choice = position if choice is None else choice
            elif said is None and not impatient:
                return None
            elif said is not None and said.failure is None and said.until <= self.next_entry_id:
                return None  # it reached its size limit before this entry: enough for one read
        return choice

    @property
    def is_complete(self) -> bool:
        return self.next_entry_id > self._last

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(position for position, said in self._said.items() if said.failure is not None or said.missing)

    def on_said(self, position: int, said: _Said, groups: list[EntryGroup]) -> None:
        size, quorum = len(self._ensemble), self._write_quorum
        said.missing = [run for run in said.missing if holds_any(position, run[0], run[1], size, quorum)]
        self._said[position] = said
        self._groups += groups
        self._groups.sort(key=lambda group: group.first_entry_id)
        for group in self._groups:
            if group.first_entry_id <= self.next_entry_id <= group.last_entry_id:
                self.next_entry_id = group.last_entry_id + 1

    def merged(self) -> list[EntryGroup]:
        merged: list[EntryGroup] = []
        entry_id = self.first
        for group in self._groups:
            if group.first_entry_id <= entry_id <= group.last_entry_id:
                merged.append(group.slice(entry_id, group.last_entry_id))
                entry_id = group.last_entry_id + 1
        return merged

    def failures_of_first(self) -> list[ReplicaFailure]:
        """Return why the first entry could not be read, for each bookie of its write set."""
        return [self._failure_at(position, self.first) for position in self._write_set(self.first)]

    def _failure_at(self, position: int, entry_id: int) -> ReplicaFailure:
        bookie, said = self._ensemble[position], self._said.get(position)
        if said is None:
            return ReplicaFailure(bookie, "was not asked")
        for first, last, reason, status in said.missing:
            if first <= entry_id <= last:
                return ReplicaFailure(bookie, reason, status)
        return said.failure or ReplicaFailure(bookie, "an answer without the entry")

    def _write_set(self, entry_id: int) -> tuple[int, ...]:
        return write_set_positions(entry_id, len(self._ensemble), self._write_quorum)


async def read_striped(
    request: ReadRequest,
    ensemble: Sequence[str],
    write_quorum: int,
    connection_of: ConnectionOf,
    settings: LedgerSettings,
    *,
    turn: int = 0,
    avoided: Sequence[int] = (),
    distances: Sequence[int] = (),
) -> StripedCopies:
    """Read a run of entries from the first one on. Raises NoSuchEntryError, LedgerLostError, EntryUnavailableError."""
    merge = StripeMerge(ensemble, write_quorum, request.first_entry_id, request.last_entry_id)
    chosen = merge.first_choice(turn, avoided, distances)
    part = replace(request, max_bytes=max(1, request.max_bytes // len(chosen)))

    async def ask(position: int) -> None:
        merge.on_said(position, *await _read_stripes(ensemble[position], part, connection_of, settings))

    asked: list[int] = []
    async with BookieCalls() as calls:

        def start(position: int) -> None:
            asked.append(position)
            calls.start(position, ask(position))

        for position in chosen:
            start(position)
        while not merge.is_complete and calls:
            in_time = await calls.wait_next(timeout_s=settings.speculative_read_s)
            if (another := merge.next_choice(asked, impatient=not in_time)) is not None:
                start(another)
    groups = merge.merged()
    if not groups:
        raise explain(request, merge.failures_of_first())
    return StripedCopies(groups, merge.failed)


async def _read_stripes(
    bookie: str, request: ReadRequest, connection_of: ConnectionOf, settings: LedgerSettings
) -> tuple[_Said, list[EntryGroup]]:
    """Return all valid entries of the range that this bookie returns, with any gaps."""
    said, groups = _Said(request.first_entry_id), []
    try:
        async with asyncio.timeout(settings.read_timeout_s), answers_of(connection_of(bookie), request) as answers:
            async for answer in answers:
                for group in answer.groups:
                    if group.ledger_id != request.ledger_id or not _inside(group, request):
                        said.failure = ReplicaFailure(bookie, "returned what was not requested")
                        continue
                    for part, is_valid in verified_parts(group):
                        if is_valid:
                            groups.append(part)
                        else:
                            said.missing.append((part.first_entry_id, part.last_entry_id, "damaged", None))
                said.missing += [(run.first_entry_id, run.last_entry_id, run.status.name, run.status) for run in answer.missing]
                said.until = answer.next_entry_id
    except BookieUnavailableError as error:
        said.failure = ReplicaFailure(bookie, str(error))
    except TimeoutError:
        said.failure = ReplicaFailure(bookie, f"no answer within {settings.read_timeout_s:g} s")
    if said.failure is None and said.until <= request.first_entry_id:
        said.failure = ReplicaFailure(bookie, "an empty answer")  # otherwise it would count as having reached its size limit
    return said, groups


def _inside(group: EntryGroup, request: ReadRequest) -> bool:
    return request.first_entry_id <= group.first_entry_id <= group.last_entry_id <= request.last_entry_id
