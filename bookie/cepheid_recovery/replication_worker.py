"""Copies the missing entries of marked ledgers, and removes the marks.

    marks ──some at a time, most endangered first──► lock ──► record at version w ──► copy ──► one write, only if it is still w:
                                                                                        new ensemble, mark and lock removed

Rules:
1. Copy before claim: a bookie is named in a record only when it has synced every entry that it should hold (R1). The record is
   written only at the version that was read before copying began. Any change of the record meanwhile makes the write fail, also one
   by a bookie that collects surplus copies (see bookie/README.md), and everything is copied again. The same holds for the cookies
   of the targets, and of bookies that get copies in place: one that returned on other disks meanwhile has changed its own.
   A target that is being decommissioned by then is not named either.
2. Only finished fragments are copied: their entries are confirmed, and their number is known. The last fragment of an open ledger
   belongs to its writer. If it still names a lost bookie after `open_ledger_grace_s`, it has no living writer, and is recovered.
3. A mark is removed only at the version that was read, together with the write of the record (R3). What could not be done stays in
   the mark, with the reason.
4. An entry without a valid copy is noted in the mark and in the log; the rest of its fragment moves, and the bookie that may still
   have the entry is remembered (`former`) until it answers that it does not have it.
5. Locks save work. They are not needed for safety: a worker that lost its lock with its session writes without it, and of two
   workers that copied the same ledger the second one fails at rule 1. A worker that does not know whether it got or released a lock
   finds its own name in it, and uses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cepheid_ledger import (
    CopyFailedError,
    CopyReport,
    CopyTask,
    LedgerClient,
    LedgerError,
    Placement,
    Vacancy,
    bookies_replaced,
    entries_of,
    is_finished,
)
from cepheid_ledger.entry_copy import denied_by_both
from cepheid_ledger.verification import Copy
from cepheid_metadata import (
    BadVersionError,
    Check,
    Create,
    Delete,
    EntryRun,
    Found,
    KeyExistsError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    Op,
    RepairLock,
    RepairMark,
    ShortReason,
    audit_record,
    bookie_cookies,
    keys,
    ledger_records,
    list_names,
    list_repair_marks,
    repair_locks,
    repair_marks,
)
from cepheid_metadata.repair_views import merged_runs
from cepheid_ports import Ports, TaskOwner
from cepheid_recovery.cluster_state import LOST_RUN, ClusterState
from cepheid_recovery.repair_plan import FragmentRepair, RepairPlan, plan_repair
from cepheid_recovery.retries import Retries
from cepheid_recovery.settings import RecoverySettings
from cepheid_recovery.shortage import measure

log = logging.getLogger(__name__)

_LISTED = 256
"""Limit of ledgers taken from one listing: other workers make a longer one out of date."""
_LISTED_SHARE = 8
"""Share of the marked ledgers taken from one listing (one in this many), for the same reason; but at least 16."""
_LOCKED_TOGETHER = 8
_ATTEMPTS = 3


@dataclass(slots=True)
class WorkerStatistics:
    """Statistics of a worker. `ledgers` were repaired completely; attempts that left something undone count as `failures`."""

    ledgers: int = 0
    entries: int = 0
    size_bytes: int = 0
    failures: int = 0
    lost_entries: int = 0
    in_work: int = 0


@dataclass(slots=True)
class _Attempt:
    """The result of the work on one ledger, before it is recorded."""

    replaced: dict[tuple[int, str], str] = field(default_factory=dict)
    cookies: dict[str, int] = field(default_factory=dict)  # by bookie that gets copies: the version of its cookie before copying
    left: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[int, int]] = field(default_factory=list)
    former: set[str] = field(default_factory=set)
    denied: frozenset[str] | None = None
    """Bookies that the mark remembers and that certainly have none of the lost entries; None: no entry is lost."""


class ReplicationWorker:
    """Repairs marked ledgers. Call `start` once and `aclose` once. `name` is shown to operators."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        placement: Placement,
        state: ClusterState,
        settings: RecoverySettings,
        ports: Ports,
    ) -> None:
        self._lock_record = RepairLock(worker=f"{name} {ports.random.getrandbits(32):08x}")
        self._locked: set[int] = set()  # ledgers that are queued or in work
        self._name = name
        self._store = store
        self._client = client
        self._placement = placement
        self._state = state
        self._settings = settings
        self._ports = ports
        self._marks = repair_marks(store)
        self._locks = repair_locks(store)
        self._ledgers = ledger_records(store)
        self._audit = audit_record(store)
        self._cookies = bookie_cookies(store)
        self._cookie_versions: dict[str, int] = {}  # read once, and again after a failed write
        self._queue: asyncio.Queue[int] = asyncio.Queue(_LOCKED_TOGETHER)
        self._retries = Retries(settings.retry_s)
        self._open_since: dict[int, tuple[int, dict[str, float]]] = {}
        """By open ledger: since when it is marked, and the bookies that must leave its last fragment, with the time when that was
        first seen. All of it starts over if the mark was removed and created again."""
        self._due = asyncio.Event()
        self._tasks = TaskOwner(f"replication-worker {name}")
        self.statistics = WorkerStatistics()

    def __repr__(self) -> str:
        return f"<ReplicationWorker {self._name}: {self.statistics.in_work} in work, {len(self._retries)} to be tried again>"

    def start(self) -> None:
        self._tasks.start(self._feed(), name="feed")
        for number in range(self._settings.ledgers_at_once):
            self._tasks.start(self._run(), name=f"run {number}")

    async def aclose(self) -> None:
        """End running work. Locks end with the session; nothing else needs cleaning up."""
        await self._tasks.aclose()

    def wake(self) -> None:
        """Check at once: there may be new marks, or bookies that can accept copies."""
        self._due.set()

    def retry_all(self) -> None:
        """Try everything again: a bookie came or changed, so what could not be repaired may be possible now."""
        self._retries.clear()  # also their pauses: the reason for them may be over
        self._due.set()

    # Choosing

    async def _feed(self) -> None:
        while True:
            found = False
            try:
                await self._state.refresh()
                if self._state.off is None:
                    found = await self._take_some()
            except Exception as error:  # a defect must end neither repair nor the bookie in this process
                log.warning("repair.marks_not_read", extra={"error": repr(error)})
            if found:
                continue
            try:
                async with asyncio.timeout(self._settings.poll_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()

    async def _take_some(self) -> bool:
        """Lock and queue ledgers of one listing; return whether there were any."""
        candidates = await self._candidates()
        taken = False
        while candidates:
            await self._state.refresh()  # the queue may have been full for a long time
            if self._state.off is not None:
                return False
            # All workers start with the most endangered ledgers. Those that others have locked are tried last: a failed attempt
            # costs several requests, but a lock may be one of this worker's own whose answer was lost.
            names = await list_names(self._store, keys.REPAIR_LOCKS_KEY)
            locked = {int(name) for name in names if name.isdecimal()}  # others are of checks
            candidates.sort(key=locked.__contains__)
            part, candidates = candidates[:_LOCKED_TOGETHER], candidates[_LOCKED_TOGETHER:]
            mine = await self._lock(part)
            self._locked.update(mine)
            for ledger_id in mine:
                taken = True
                await self._queue.put(ledger_id)
        return taken

    async def _candidates(self) -> list[int]:
        """Return marked ledgers that are due: those with the fewest copies left in the auditor's order, then others at random."""
        now = asyncio.get_running_loop().time()
        listed = {ledger_id async for ledger_id in list_repair_marks(self._store)}
        self._retries.keep(listed)
        self._open_since = {ledger_id: since for ledger_id, since in self._open_since.items() if ledger_id in listed}
        due = self._retries.due(sorted(listed), now)
        if not due:
            return []
        found = await self._audit.get(None)
        urgent = () if found is None else found.record.urgent
        rank = {ledger_id: place for place, ledger_id in enumerate(urgent)}
        self._ports.random.shuffle(due)  # otherwise all workers would ask for the same locks
        return sorted(due, key=lambda ledger_id: rank.get(ledger_id, len(rank)))[: _length_of_list(len(due))]

    async def _lock(self, ledger_ids: Sequence[int]) -> list[int]:
        """Lock these ledgers; return those that no other worker is repairing."""
        if not ledger_ids:
            return []
        try:
            await self._store.multi(
                [self._locks.create_op(ledger_id, self._lock_record, ephemeral=True) for ledger_id in ledger_ids]
            )
            return list(ledger_ids)
        except KeyExistsError:
            if len(ledger_ids) == 1:
                return list(ledger_ids) if await self._is_left_over(ledger_ids[0]) else []
        half = len(ledger_ids) // 2
        return [*await self._lock(ledger_ids[:half]), *await self._lock(ledger_ids[half:])]

    async def _is_left_over(self, ledger_id: int) -> bool:
        """Return whether this worker has the lock and does not use it, because an answer of the metadata store was lost."""
        if ledger_id in self._locked:
            return False
        found = await self._locks.get(ledger_id)
        return found is not None and found.record == self._lock_record and ledger_id not in self._locked

    # Repairing

    async def _run(self) -> None:
        while True:
            ledger_id = await self._queue.get()
            self.statistics.in_work += 1
            try:
                whole = await self._repair(ledger_id)
            except (LedgerError, MetadataError, TimeoutError) as error:
                log.info("repair.failed", extra={"ledger_id": ledger_id, "error": str(error)})
                whole = False
                await self._unlock(ledger_id)
            except Exception:  # a defect, as in `_feed`
                log.exception("repair.failed", extra={"ledger_id": ledger_id})
                whole = False
                await self._unlock(ledger_id)
            finally:
                self.statistics.in_work -= 1
                self._locked.discard(ledger_id)
            if whole:
                self._retries.succeeded(ledger_id)
                self._open_since.pop(ledger_id, None)
            else:
                self.statistics.failures += 1
                self._retries.later(ledger_id, asyncio.get_running_loop().time())

    async def _unlock(self, ledger_id: int) -> None:
        try:
            await self._locks.delete(ledger_id, 0)
        except MetadataError:
            pass  # it ends with the session at the latest

    async def _repair(self, ledger_id: int) -> bool:
        """Return whether the mark is gone. Raises LedgerError, MetadataError, TimeoutError."""
        not_recovered = ""
        for _ in range(_ATTEMPTS):
            mark, ledger = await asyncio.gather(self._marks.get(ledger_id), self._ledgers.get(ledger_id))
            if mark is None:
                await self._unlock(ledger_id)
                return True
            if ledger is None:  # it was deleted meanwhile
                key = self._ledgers.key_of(ledger_id)
                still_away: list[Op] = [
                    Create(key, b""),
                    Delete(key, 0),
                ]  # it may be brought back, and its mark with it is what it lacks
                try:
                    await self._store.multi(
                        [*still_away, self._marks.delete_op(ledger_id, mark.version), self._locks.delete_op(ledger_id, 0)]
                    )
                except KeyExistsError:
                    continue
                return True
            if any(why is ShortReason.DRAINING and name not in self._state.draining for name, why in mark.record.bookies.items()):
                await self._state.refresh()  # the mark may be newer than this process's state
            plan = self._plan(ledger.record, mark.record, await self._lost(mark.record))
            if not not_recovered and self._may_recover(ledger.record, mark.record, plan.open_bookies):
                not_recovered = await self._recover(ledger_id)
                continue
            attempt = await self._carry_out(ledger.record, mark.record, plan, not_recovered)
            try:
                return await self._write(ledger, mark, attempt)
            except (BadVersionError, NoSuchKeyError):
                self._cookie_versions.clear()  # the ledger, its mark or a target changed: rule 1
        raise CopyFailedError(f"ledger {ledger_id} or its mark changed {_ATTEMPTS} times while it was copied", ledger_id=ledger_id)

    async def _lost(self, mark: RepairMark) -> Collection[str]:
        """Return the damaged bookies that the auditor saw lost, or that metadata does not know. Raises MetadataError.

        An audit that does not mention the absence of a bookie may be older than it: the auditor may have ended with the bookie.
        """
        registered, expected = self._state.registered(), self._state.expected()
        away = {name for name, why in mark.bookies.items() if why is ShortReason.DAMAGED and name not in registered}
        found = await self._audit.get(None) if away else None
        if found is None:
            return ()
        return {name for name in away if found.record.runs.get(name) == LOST_RUN or name not in expected}

    def _plan(self, ledger: LedgerMetadata, mark: RepairMark, lost: Collection[str]) -> RepairPlan:
        def choose(ensemble: Sequence[str], excluded: Collection[str], position: int) -> str | None:
            vacancy = Vacancy(ensemble, position, ledger.write_quorum)
            return self._placement.replacement(ensemble, excluded, vacancy=vacancy)

        state = self._state
        return plan_repair(ledger, mark, state.registered(), state.draining, choose, state.racks(), lost=lost)

    def _may_recover(self, ledger: LedgerMetadata, mark: RepairMark, open_bookies: Sequence[str]) -> bool:
        """Return whether an open ledger has named one of these bookies for longer than a living writer would let it.

        A writer that finds no spare bookie keeps the lost one: so that time counts only while there is a spare.
        """
        marked_ms, before = self._open_since.pop(ledger.ledger_id, (mark.since_ms, {}))
        if marked_ms != mark.since_ms:
            before = {}
        if not open_bookies or not self._has_spare(ledger, mark):
            return False
        now = asyncio.get_running_loop().time()
        self._open_since[ledger.ledger_id] = mark.since_ms, {bookie: before.get(bookie, now) for bookie in open_bookies}
        return any(now - before.get(bookie, now) >= self._settings.open_ledger_grace_s for bookie in open_bookies)

    def _has_spare(self, ledger: LedgerMetadata, mark: RepairMark) -> bool:
        """Return whether the writer of an open ledger could find another bookie."""
        excluded = {*mark.bookies, *self._state.draining}
        ensemble = ledger.last_fragment.ensemble
        leaving = next((position for position, bookie in enumerate(ensemble) if bookie in mark.bookies), 0)
        vacancy = Vacancy(ensemble, leaving, ledger.write_quorum)
        return self._placement.replacement(ensemble, excluded, doubtful=False, vacancy=vacancy) is not None

    async def _recover(self, ledger_id: int) -> str:
        """Close a ledger without a writer. Return why that is not possible now, or nothing. Raises MetadataError."""
        try:
            await self._client.recover(ledger_id)
        except (LedgerError, TimeoutError) as error:
            log.warning("repair.not_recovered", extra={"ledger_id": ledger_id, "error": str(error)})
            return f"the ledger is open and names it, and recovery cannot close the ledger now: {error}"
        return ""

    async def _carry_out(self, ledger: LedgerMetadata, mark: RepairMark, plan: RepairPlan, not_recovered: str) -> _Attempt:
        attempt = _Attempt(left=dict(plan.left))
        soon = "the ledger is open and names it: its writer replaces it, or recovery closes the ledger soon"
        if plan.open_bookies and not self._has_spare(ledger, mark):
            soon = "the ledger is open and names it, and no other bookie can take its place: start more bookies"
        attempt.left.update(dict.fromkeys(plan.open_bookies, not_recovered or soon))
        named = frozenset(name for fragment in ledger.fragments for name in fragment.ensemble)
        for run in mark.lost:
            await self._look_for(ledger, mark, run, named - self._state.registered(), attempt)
        for part in plan.fragments:
            try:
                await self._copy(ledger, mark, part, attempt)
            except CopyFailedError as error:
                self._blame(error, part)
                for position in (*part.moves, *part.checks):
                    attempt.left.setdefault(part.fragment.ensemble[position], str(error))
        return attempt

    def _blame(self, error: CopyFailedError, part: FragmentRepair) -> None:
        bookie = error.facts.get("bookie")
        if bookie in part.moves.values():
            self._placement.quarantine(str(bookie))  # the next attempt takes another target

    async def _copy(self, ledger: LedgerMetadata, mark: RepairMark, part: FragmentRepair, attempt: _Attempt) -> None:
        """Bring one fragment's copies to where they belong. Raises CopyFailedError."""
        fragment, turn = part.fragment, self._ports.random.randrange(ledger.ensemble_size)
        away = frozenset(fragment.ensemble[position] for position in part.moves) - self._state.registered()
        for target in (*part.moves.values(), *(fragment.ensemble[position] for position in part.checks)):
            await self._note_cookie(target, attempt)

        async def copy(first: int, last: int, targets: dict[int, str]) -> None:
            task = CopyTask(ledger, fragment, first, last, targets, away=away, former=mark.former)
            report = await self._client.copy_entries(task, turn=turn)
            self._count(report)
            if report.lost:
                attempt.lost += report.lost
                attempt.former |= away | report.unreadable  # a bookie that is away, or can read again, may have them
                attempt.denied = denied_by_both(attempt.denied, report.denied)
            for run in _not_in(report.lost, mark.lost):
                self._tell_lost(ledger, fragment.ensemble, run)

        if part.moves:
            await copy(part.first_entry_id, part.last_entry_id, part.moves)
        for position in part.checks:
            bookie = fragment.ensemble[position]
            if not _is_to_check(mark, bookie, part):
                continue
            for first, last in await self._bad_copies(ledger, mark, part, position, attempt):
                await copy(first, last, {position: bookie})
        for position, target in part.moves.items():
            attempt.replaced[(fragment.first_entry_id, fragment.ensemble[position])] = target

    async def _note_cookie(self, target: str, attempt: _Attempt) -> None:
        """Note the version of the target's cookie. Raises CopyFailedError, MetadataError."""
        if target not in self._cookie_versions:
            found = await self._cookies.get(target)
            if found is None:
                raise CopyFailedError(f"bookie {target} has no cookie in metadata, so it gets no copies", bookie=target)
            self._cookie_versions[target] = found.version
        attempt.cookies.setdefault(target, self._cookie_versions[target])

    async def _bad_copies(
        self, ledger: LedgerMetadata, mark: RepairMark, part: FragmentRepair, position: int, attempt: _Attempt
    ) -> list[tuple[int, int]]:
        """Return the entries of which this position's bookie has no valid copy. Raises CopyFailedError."""
        bookie, first, last = part.fragment.ensemble[position], part.first_entry_id, part.last_entry_id
        if (runs := mark.entries_to_check(bookie)) is not None:
            found = [
                await self._client.runs_not_stored(ledger, position, bookie, max(first, run.first), min(last, run.last))
                for run in runs
                if run.first <= last and run.last >= first
            ]
            return list(chain.from_iterable(found))
        bad = await self._client.runs_not_stored(ledger, position, bookie, first, last)
        if mark.bookies.get(bookie) is not ShortReason.DAMAGED or not ledger.is_closed:
            return bad
        for finding in await self._client.find_bad_copies(ledger):  # a copy may be valid, but different from the others
            if finding.bookie == bookie and finding.ailment is Copy.DIVERGENT and first <= finding.first_entry_id <= last:
                if finding.valid:
                    bad.append((finding.first_entry_id, finding.last_entry_id))
                else:
                    entries = f"{finding.first_entry_id}..{finding.last_entry_id}"
                    attempt.left[bookie] = f"its copies of entries {entries} differ from others, and there is no majority"
        return bad

    async def _look_for(
        self, ledger: LedgerMetadata, mark: RepairMark, run: EntryRun, away: frozenset[str], attempt: _Attempt
    ) -> None:
        """Look for entries that had no valid copy at the last attempt: a bookie may have come back."""
        for fragment in ledger.fragments:
            if not is_finished(ledger, fragment):
                continue
            first, last = entries_of(ledger, fragment)
            first, last = max(first, run.first), min(last, run.last)
            if first > last:
                continue
            targets = {place: bookie for place, bookie in enumerate(fragment.ensemble) if bookie not in away}
            if len(targets) < len(fragment.ensemble):  # until all of them have it, those that hold a copy must keep it
                attempt.lost.append((first, last))
                attempt.denied = frozenset()
            try:
                report = await self._client.copy_entries(CopyTask(ledger, fragment, first, last, targets, away, mark.former))
            except CopyFailedError:
                attempt.lost.append((first, last))
                attempt.denied = frozenset()
            else:
                self._count(report)
                attempt.lost += report.lost
                attempt.former |= report.unreadable
                attempt.denied = denied_by_both(attempt.denied, report.denied)

    def _count(self, report: CopyReport) -> None:
        self.statistics.entries += report.entries
        self.statistics.size_bytes += report.size_bytes

    def _tell_lost(self, ledger: LedgerMetadata, ensemble: Sequence[str], run: tuple[int, int]) -> None:
        self.statistics.lost_entries += run[1] - run[0] + 1
        extra = {"ledger_id": ledger.ledger_id, "first": run[0], "last": run[1], "bookies": list(ensemble)}
        log.error("repair.entries_lost", extra={**extra, "hint": "cepheid ledgers verify shows what each bookie says of them"})

    # Recording the result

    async def _write(self, ledger: Found[LedgerMetadata], mark: Found[RepairMark], attempt: _Attempt) -> bool:
        """Write the result in one step (rules 1 and 3). Return whether the mark is gone. Raises BadVersionError, NoSuchKeyError,
        MetadataError."""
        ledger_id = ledger.record.ledger_id
        if leaving := self._state.draining.intersection(attempt.replaced.values()):
            raise BadVersionError(f"{', '.join(sorted(leaving))} received copies but is being decommissioned")
        ops: list[Op] = []
        record = ledger.record
        if attempt.replaced:
            record = bookies_replaced(record, attempt.replaced)
            ops.append(self._ledgers.replace_op(ledger_id, record, ledger.version))
        else:
            ops.append(Check(self._ledgers.key_of(ledger_id), ledger.version))
        ops += [Check(self._cookies.key_of(target), version) for target, version in sorted(attempt.cookies.items())]
        is_whole = not attempt.left and not attempt.lost
        if is_whole:
            ops.append(self._marks.delete_op(ledger_id, mark.version))
        else:
            ops.append(self._marks.replace_op(ledger_id, self._left_mark(record, mark.record, attempt), mark.version))
        try:
            await self._store.multi([*ops, self._locks.delete_op(ledger_id, 0)])
        except NoSuchKeyError as error:
            if error.op_index != len(ops):
                raise
            await self._store.multi(ops)  # the lock ended with its session: what was copied still counts
        self.statistics.ledgers += is_whole
        return is_whole

    def _left_mark(self, ledger: LedgerMetadata, mark: RepairMark, attempt: _Attempt) -> RepairMark:
        left: dict[str, ShortReason] = {bookie: mark.bookies[bookie] for bookie in attempt.left}
        shortage = measure(ledger, left, self._state.registered())
        lost = merged_runs(attempt.lost)
        problems = [f"{bookie}: {why}" for bookie, why in sorted(attempt.left.items())]
        if lost:
            problems.insert(0, "entries without any valid copy")
        return mark.replace(
            bookies=left,
            copies_left=0 if lost else shortage.copies_left,
            short_entries=shortage.entries,
            short_bytes=shortage.bytes,
            last_copy_entries=shortage.last_copy_entries,
            problem="; ".join(problems),
            lost=tuple(EntryRun(first=first, last=last) for first, last in lost),
            former=tuple(sorted({*mark.former, *attempt.former} - (attempt.denied or frozenset()))) if lost else (),
            damaged={bookie: runs for bookie, runs in (mark.damaged or {}).items() if bookie in left} or None,
        )


def _is_to_check(mark: RepairMark, bookie: str, part: FragmentRepair) -> bool:
    """Return whether the mark wants this bookie's copies of the fragment checked."""
    runs = mark.entries_to_check(bookie)
    return runs is None or any(run.first <= part.last_entry_id and run.last >= part.first_entry_id for run in runs)


def _not_in(runs: Sequence[tuple[int, int]], known: Sequence[EntryRun]) -> list[tuple[int, int]]:
    """Return the parts of `runs` that `known` does not have."""
    parts = list(runs)
    for run in known:
        parts = [
            part
            for first, last in parts
            for part in ((first, min(last, run.first - 1)), (max(first, run.last + 1), last))
            if part[0] <= part[1]
        ]
    return parts


def _length_of_list(due: int) -> int:
    """Return how many of the due ledgers to take before they are listed again."""
    return min(_LISTED, max(2 * _LOCKED_TOGETHER, due // _LISTED_SHARE))
