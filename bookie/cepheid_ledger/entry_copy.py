"""Copies entries of a finished fragment to bookies that lack them, byte for byte.

    sources ──1 MiB, verified──► every target's share ──recovery adds──► targets ──synced──► the next 1 MiB

Rules:
1. The caller guarantees that the entries are confirmed: the ledger is closed, or another fragment follows.
2. An entry is taken from any replica whose copy is valid. It is reported as lost if every bookie that should hold it answers that
   it has no valid copy, or is given up (`away`). At least one must report that for certain: if the running ones lost their disks,
   the others hold the only copies, and the copy fails until they are back. It also fails if a bookie cannot answer now. A bookie
   whose disk cannot read the entry, when asked twice, counts as having no valid copy, and is named (`unreadable`): it may be able
   to read it later.
3. `copy_entries` returns when the targets have synced everything. Copies are sent as background adds, which a bookie admits at the
   pace that foreground writes leave. So few of them are sent ahead: `TARGET_BYTES` to one bookie, for all copies of the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.errors import EntryUnavailableError, LedgerError, LedgerLostError, NoSuchEntryError
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.recovery_state import write_set_positions
from cepheid_ledger.replica_read import ConnectionOf, answers_of, read_range, verified_parts
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.striped_read import read_striped
from cepheid_ledger.striping import runs_at
from cepheid_metadata import Fragment, LedgerMetadata
from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    AddRequest,
    BookieUnavailableError,
    EntryGroup,
    ReadRequest,
    Status,
)

TARGET_BYTES = 2 << 20
"""Limit of the bytes in flight to one bookie, unless one chunk is larger. A bookie refuses background adds that wait beyond its own
limit, and several processes copy to it."""

_CERTAINLY_NOT_STORED = (Status.NO_ENTRY, Status.NO_LEDGER, Status.BAD_DIGEST)
_NOT_STORED = (*_CERTAINLY_NOT_STORED, Status.UNKNOWN)
"""Answers of a bookie that has no valid copy. UNKNOWN is the answer of a bookie that lost its disk."""

Run = tuple[int, int]
"""First and last id of consecutive entries, both inclusive."""


class CopyFailedError(LedgerError):
    """Entries could not be copied now: a source or a target failed. Nothing was lost; try again, with another target."""

    retriable = True


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Entries to copy to bookies. `targets`: by position in the ensemble, the bookie that gets this position's share."""

    ledger: LedgerMetadata
    fragment: Fragment
    first_entry_id: int
    last_entry_id: int
    targets: Mapping[int, str]
    away: Collection[str] = ()
    """Bookies of the ensemble that are given up: asked last, and not waited for if they do not answer."""
    former: Collection[str] = ()
    """Bookies that the record named before: asked for entries of which no other valid copy is found."""


@dataclass(slots=True)
class CopyReport:
    """The result of a copy: sums over all targets, and the entries for which no valid copy was found."""

    entries: int = 0
    size_bytes: int = 0
    lost: list[Run] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    """Bookies whose disks could not read one of the lost entries."""
    denied: frozenset[str] | None = None
    """Bookies of `CopyTask.former` that certainly have no valid copy of any lost entry; None: no entry is lost."""


class CopyBudget:
    """Limits the bytes in flight to each target. One per process."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def take(self, bookie: str, size_bytes: int) -> None:
        """Wait until these bytes may be sent; first come, first served."""
        if bookie not in self._waiting and self._has_room(bookie, size_bytes):
            self._used[bookie] = self._used.get(bookie, 0) + size_bytes
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(bookie, deque()).append((size_bytes, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(bookie, size_bytes)  # it was granted in this very turn
            raise

    def give(self, bookie: str, size_bytes: int) -> None:
        """Return bytes that were synced, or that are not waited for any more."""
        self._used[bookie] -= size_bytes
        waiting = self._waiting.get(bookie)
        while waiting and (waiting[0][1].done() or self._has_room(bookie, waiting[0][0])):
            size, future = waiting.popleft()
            if not future.done():
                self._used[bookie] += size
                future.set_result(None)
        if not waiting:
            self._waiting.pop(bookie, None)

    def _has_room(self, bookie: str, size_bytes: int) -> bool:
        used = self._used.get(bookie, 0)
        return not used or used + size_bytes <= TARGET_BYTES


async def copy_entries(
    task: CopyTask,
    connection_of: ConnectionOf,
    channel_of: Callable[[str], BookieChannel],
    settings: LedgerSettings,
    budget: CopyBudget,
    *,
    turn: int = 0,
) -> CopyReport:
    """Copy the entries of `task`. `turn` spreads reads over the sources. Raises CopyFailedError."""
    report = CopyReport()
    ledger = task.ledger
    targets = {position: _Target(bookie, channel_of(bookie), ledger, budget) for position, bookie in task.targets.items()}
    source = _Source(task, connection_of, settings, turn)
    try:
        entry_id = task.first_entry_id
        while entry_id <= task.last_entry_id:
            groups = await source.read(entry_id)
            if not groups:
                _note_lost(report, entry_id)
                report.unreadable |= source.unreadable
                report.denied = denied_by_both(report.denied, frozenset(source.denied))
                entry_id += 1
                continue
            first, entry_id = entry_id, groups[-1].last_entry_id + 1
            for position, target in targets.items():
                share = _share(groups, position, first, entry_id - 1, ledger)
                await target.send(share)
                report.entries += sum(map(len, share))
                report.size_bytes += sum(group.size_bytes for group in share)
        for target in targets.values():
            await target.wait_synced()
    finally:
        for target in targets.values():
            target.close()
    return report


async def runs_not_stored(
    ledger: LedgerMetadata, position: int, bookie: str, first: int, last: int, connection_of: ConnectionOf, settings: LedgerSettings
) -> list[Run]:
    """Return the entries of `first..last` that belong to `position` and of which `bookie` has no valid copy.

    Raises CopyFailedError if the bookie does not answer.
    """
    wanted = runs_at(position, first, last, ledger.ensemble_size, ledger.write_quorum)
    bad: list[Run] = []
    for run_first, run_last in wanted if ledger.ensemble_size > ledger.write_quorum else [(first, last)]:
        bad += await _runs_not_stored(ledger.ledger_id, bookie, run_first, run_last, connection_of, settings)
    return bad


async def _runs_not_stored(
    ledger_id: int, bookie: str, first: int, last: int, connection_of: ConnectionOf, settings: LedgerSettings
) -> list[Run]:
    bad: list[Run] = []
    reached = first
    try:
        while reached <= last:
            before = reached
            request = ReadRequest(ledger_id, reached, last, 64 * MAX_MESSAGE_BYTES, from_disk=True)
            async with answers_of(connection_of(bookie), request) as answers:
                while True:
                    async with asyncio.timeout(settings.read_timeout_s):
                        answer = await anext(answers, None)
                    if answer is None:
                        break
                    for group in answer.groups:
                        bad += [
                            (part.first_entry_id, part.last_entry_id)
                            for part, is_valid in verified_parts(group)
                            if not is_valid or part.ledger_id != ledger_id
                        ]
                    for missing in answer.missing:
                        if missing.status not in _NOT_STORED and missing.status is not Status.IO_ERROR:
                            raise CopyFailedError(f"bookie {bookie} cannot say what it has: {missing.status.name}", bookie=bookie)
                        bad.append((max(missing.first_entry_id, first), min(missing.last_entry_id, last)))
                    reached = max(reached, answer.next_entry_id)
            if reached == before:
                raise CopyFailedError(f"bookie {bookie} returned an empty answer", bookie=bookie)
    except (BookieUnavailableError, TimeoutError) as error:
        raise CopyFailedError(
            f"bookie {bookie} cannot say what it has: {str(error) or 'no answer in time'}", bookie=bookie
        ) from error
    return bad


def _share(groups: Sequence[EntryGroup], position: int, first: int, last: int, ledger: LedgerMetadata) -> list[EntryGroup]:
    if ledger.ensemble_size == ledger.write_quorum:
        return list(groups)
    share: list[EntryGroup] = []
    for run_first, run_last in runs_at(position, first, last, ledger.ensemble_size, ledger.write_quorum):
        for group in groups:
            part_first, part_last = max(run_first, group.first_entry_id), min(run_last, group.last_entry_id)
            if part_first <= part_last:
                share.append(group.slice(part_first, part_last))
    return share


def denied_by_both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """Return the bookies that have no valid copy of the lost entries of either part of a copy; None: the part lost nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _note_lost(report: CopyReport, entry_id: int) -> None:
    if report.lost and report.lost[-1][1] == entry_id - 1:
        report.lost[-1] = (report.lost[-1][0], entry_id)
    else:
        report.lost.append((entry_id, entry_id))


class _Source:
    """Valid copies from any bookie of the ensemble; those that are given up, or are targets, are asked last."""

    def __init__(self, task: CopyTask, connection_of: ConnectionOf, settings: LedgerSettings, turn: int) -> None:
        self._task = task
        self._connection_of = connection_of
        self._settings = settings
        self._turn = turn
        self.unreadable: set[str] = set()
        """Bookies whose disks could not read the last entry that was found to have no valid copy."""
        self.denied: set[str] = set()
        """Bookies that the record does not name and that certainly have no valid copy of it."""
        ensemble = task.fragment.ensemble
        turned = [(turn + place) % len(ensemble) for place in range(len(ensemble))]
        self._doubtful = [
            position for position, bookie in enumerate(ensemble) if bookie in task.away or task.targets.get(position) == bookie
        ]
        good = [ensemble[position] for position in turned if position not in self._doubtful]
        self._replicas = [*good, *(ensemble[position] for position in self._doubtful)]

    async def read(self, first: int) -> list[EntryGroup]:
        """Return a run of entries from `first` on, about 1 MiB; empty: that entry has no valid copy.

        Raises CopyFailedError.
        """
        task = self._task
        request = ReadRequest(task.ledger.ledger_id, first, task.last_entry_id, MAX_MESSAGE_BYTES)
        try:
            if task.ledger.write_quorum == task.ledger.ensemble_size:
                return (await read_range(request, self._replicas, self._connection_of, self._settings)).groups
            stripes = await read_striped(
                request,
                task.fragment.ensemble,
                task.ledger.write_quorum,
                self._connection_of,
                self._settings,
                turn=self._turn,
                avoided=self._doubtful,
            )
            return stripes.groups
        except (EntryUnavailableError, NoSuchEntryError, LedgerLostError) as error:
            return await self._read_one(first, error)

    async def _read_one(self, entry_id: int, why: LedgerError) -> list[EntryGroup]:
        """Ask every bookie of the entry's write set for this entry alone, to find out whether it is lost or only unavailable.

        Other bookies may have it too: those that the record named before.
        """
        task, ledger = self._task, self._task.ledger
        ensemble = task.fragment.ensemble
        positions = write_set_positions(entry_id, ledger.ensemble_size, ledger.write_quorum)
        named = [ensemble[position] for position in positions]
        away: list[str] = []
        says_no = False
        self.unreadable, self.denied = set(), set()
        for bookie in dict.fromkeys((*named, *task.former, *task.targets.values())):  # a target may have been named before
            request = ReadRequest(ledger.ledger_id, entry_id, entry_id, MAX_MESSAGE_BYTES)
            try:
                answer = await self._ask(bookie, request)
                # A digest may be bad on the disk or in transit, but hardly in transit twice. A read may fail once.
                if answer in (Status.BAD_DIGEST, Status.IO_ERROR):
                    answer = await self._ask(bookie, request)
            except (BookieUnavailableError, TimeoutError):
                answer = None
            if isinstance(answer, EntryGroup):
                return [answer]
            if answer is Status.IO_ERROR:
                self.unreadable.add(bookie)
                continue
            if bookie not in named:
                if answer in _CERTAINLY_NOT_STORED:
                    self.denied.add(bookie)
                continue
            says_no = says_no or answer in _CERTAINLY_NOT_STORED
            if answer not in _NOT_STORED:
                if bookie not in task.away:
                    raise CopyFailedError(str(why), ledger_id=ledger.ledger_id, entry_id=entry_id) from why
                away.append(bookie)
        if away and not says_no:
            names = " or ".join(away)
            message = f"entry {ledger.ledger_id}:{entry_id} can only be on {names}, not running: bring back {names}"
            raise CopyFailedError(message, ledger_id=ledger.ledger_id, entry_id=entry_id) from why
        return []

    async def _ask(self, bookie: str, request: ReadRequest) -> EntryGroup | Status | None:
        """Return the requested entry if it is valid, else the bookie's status for it. Raises BookieUnavailableError."""
        status: Status | None = None
        async with asyncio.timeout(self._settings.read_timeout_s), answers_of(self._connection_of(bookie), request) as answers:
            async for answer in answers:
                for group in answer.groups:
                    for part, is_valid in verified_parts(group):
                        if is_valid and (part.ledger_id, part.first_entry_id) == (request.ledger_id, request.first_entry_id):
                            return part
                    status = Status.BAD_DIGEST
                for missing in answer.missing:
                    status = missing.status
        return status


class _Target:
    """One bookie that gets copies, with the chunks that it has not synced yet. Implements `LaneListener`."""

    def __init__(self, bookie: str, channel: BookieChannel, ledger: LedgerMetadata, budget: CopyBudget) -> None:
        self._bookie = bookie
        self._channel = channel
        self._master_key = master_key_of(ledger)
        self._budget = budget
        self._chunks: deque[tuple[int, int]] = deque()  # last entry and bytes of each that is not synced yet
        self._failure: str | None = None
        self._synced = asyncio.Event()
        self._lane = channel.open_lane(ledger.ledger_id, self)

    async def send(self, groups: Sequence[EntryGroup]) -> None:
        """Send a chunk once there is room for it. Raises CopyFailedError."""
        if not groups:
            return
        size_bytes = sum(group.size_bytes for group in groups)
        await self._budget.take(self._bookie, size_bytes)
        self._chunks.append((groups[-1].last_entry_id, size_bytes))
        self._check()
        for group in groups:
            self._channel.send(self._lane, AddRequest(group, self._master_key, recovery=True, background=True))

    async def wait_synced(self) -> None:
        """Wait until the bookie has synced everything that was sent. Raises CopyFailedError."""
        while self._chunks and self._failure is None:
            self._synced.clear()
            await self._synced.wait()
        self._check()

    def close(self) -> None:
        self._channel.close_lane(self._lane)
        self._give_back()

    def _give_back(self) -> None:
        while self._chunks:
            self._budget.give(self._bookie, self._chunks.popleft()[1])

    def _check(self) -> None:
        if self._failure is not None:
            raise CopyFailedError(f"bookie {self._bookie} did not accept copies: {self._failure}", bookie=self._bookie)

    # LaneListener

    def on_added(self, bookie_id: str, last_entry_id: int) -> None:
        while self._chunks and self._chunks[0][0] <= last_entry_id:
            self._budget.give(self._bookie, self._chunks.popleft()[1])
        if not self._chunks:
            self._synced.set()

    def on_add_failed(self, bookie_id: str, reason: str) -> None:
        self._failure = reason
        self._give_back()  # the next chunk may wait for these bytes in `send`
        self._synced.set()

    def on_refused_for_good(self, bookie_id: str, status: Status) -> None:
        self.on_add_failed(bookie_id, f"answered {status.name}")

    def can_do_without(self, bookie_id: str) -> bool:
        return False
