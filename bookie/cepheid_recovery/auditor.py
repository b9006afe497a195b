"""Finds ledgers that lack copies, and marks them. One process of the cluster is the auditor.

    election ──► every poll: which are registered? ──► lost for longer than the grace period, draining, back ──► walk over ledgers
                                                                                    │
    each record: bookies that lack copies ──► mark, by compare-and-set ◄────────────┘ ──► figures of the cluster: the audit record

Rules:
1. A bookie is lost when it has been unregistered for `grace_s`, while this process was connected to metadata all that time. So
   neither a rolling restart nor an outage of metadata loses one.
2. A mark only says what should be checked: workers check again, and a wrong mark costs one check. So two auditors do no harm.
3. A walk reads each record once, at most `walk_ledgers_per_s`, and keeps about 200 bytes for each marked ledger.
4. Copies that a bookie may lack without being lost are found by reading, at most `checks_per_s`, newest ledgers first. The last
   entries of fragments in which it may have missed them are read when it is back, and once after a ledger was closed: its writer
   may have had no other bookie for one that accepted nothing any more. Of all other copies a sample is read in each regular walk. A
   restart that is faster than the end of a session is noticed too, also by the next auditor if the first one ends with the bookie.
5. While repair is switched off, nothing is marked. Each walk still counts the ledgers that lack copies, and drops those that do
   not.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest

from cepheid_ledger import LedgerClient, LedgerError, entries_of, is_finished, placement_shortfall
from cepheid_metadata import (
    Audit,
    AuditorRecord,
    BadVersionError,
    BookieHoldings,
    CorruptRecordError,
    Election,
    Found,
    KeyExistsError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    NewerFormatError,
    NoSuchKeyError,
    RepairMark,
    SessionState,
    ShortFigures,
    ShortReason,
    StoreUnavailableError,
    audit_record,
    auditor_record,
    bookie_cookies,
    keys,
    ledger_records,
    list_ledgers,
    list_names,
    list_repair_marks,
    repair_marks,
    repair_requests,
)
from cepheid_metadata.repair_views import damaged_entries, merged_reasons
from cepheid_ports import Ports, TaskOwner
from cepheid_recovery.cluster_state import LOST_RUN, ClusterState, without_lost
from cepheid_recovery.decommissions import Decommissions
from cepheid_recovery.retries import CopyChecks, CopyToRead
from cepheid_recovery.settings import RecoverySettings
from cepheid_recovery.shortage import (
    BookiesSeen,
    Shortage,
    add_holdings,
    find_shortage,
    measure,
    needed_fragments,
    new_mark,
    renewed_mark,
)

log = logging.getLogger(__name__)

_SLICE = 100
_MARKED_TOGETHER = 50
_URGENT = 1_000
_RATE_WINDOW_S = 60.0
_CHECK_RETURNED_AFTER_S = 5.0
"""Pause before the copies of a returned bookie are read: it may still get what was queued for it."""
_MAX_CHECKS = 50_000
"""Ledgers whose copies wait to be read. Those beyond the limit are found by samples, or when a bookie is back."""
_MARKS_READ = 100
"""Marks that are read again at each poll, in turn: workers note in them what they could not do."""


@dataclass(slots=True)
class AuditorStatistics:
    is_auditor: bool = False
    walks: int = 0
    walked_ledgers: int = 0
    marked_ledgers: int = 0
    checked_copies: int = 0
    bad_copies: int = 0


@dataclass(slots=True)
class _Marked:
    copies_left: int
    bytes: int
    last_copy_entries: int
    lost_entries: int
    bookies: dict[str, ShortReason]
    former: tuple[str, ...]

    @property
    def lacks_copies(self) -> bool:
        """Whether it lacks any copy: a ledger whose copies only should move to other racks does not."""
        return self.lost_entries > 0 or any(why is not ShortReason.PLACEMENT for why in self.bookies.values())


@dataclass(slots=True)
class _Walk:
    """The findings of one walk so far."""

    seen: BookiesSeen
    returned: frozenset[str]
    samples: bool
    began: float  # loop time
    ledgers: int = 0
    unreadable: int = 0
    largest_ensemble: int = 0
    badly_placed: int = 0
    holdings: dict[str, BookieHoldings] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    new: list[tuple[LedgerMetadata, Shortage]] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)  # ledgers that lack copies and are not marked, because repair is off


class Auditor:
    """Elects and runs the auditor in one process. Call `start` once and `aclose` once."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        state: ClusterState,
        settings: RecoverySettings,
        ports: Ports,
        *,
        on_marked: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._store = store
        self._client = client
        self._state = state
        self._settings = settings
        self._ports = ports
        self._on_marked = on_marked
        self._ledgers = ledger_records(store)
        self._marks = repair_marks(store)
        self._cookies = bookie_cookies(store)
        self._requests = repair_requests(store)
        self._election = Election(auditor_record(store), lambda: AuditorRecord(name=self._name, since_ms=self._ports.wall_ms()))
        self._audits = audit_record(store)
        self._tasks = TaskOwner(f"auditor {name}")
        self._due = asyncio.Event()
        self._has_checks = asyncio.Event()
        self._deposed = asyncio.Event()
        self._unsubscribe = store.subscribe(self._on_session)
        self.statistics = AuditorStatistics()
        self.audit: Audit | None = None
        """The result of the last complete walk, with the figures of the last poll; None before the first."""
        self._forget()

    def __repr__(self) -> str:
        return f"<Auditor {self._name}: {self.statistics}>"

    def start(self) -> None:
        self._tasks.start(self._run(), name="audit")
        self._tasks.start(self._check_copies(), name="check copies")

    async def aclose(self) -> None:
        self._unsubscribe()
        await self._tasks.aclose()

    def retry_all(self) -> None:
        """Check at once: bookies changed. Those that did not answer may answer now."""
        self._checks.end_pauses()
        self._due.set()

    def _forget(self) -> None:
        """Start without anything from an earlier time as the auditor, above all without timers of bookies (rule 1)."""
        self._lost_since: dict[str, float] = {}
        self._looked_at = 0.0  # when the bookies were last looked at
        self._away_from: float | None = None  # since when metadata has not answered
        self._expected: frozenset[str] = frozenset()  # the bookies that metadata knew then
        self._decommissions = Decommissions(self._store, self._state, self._settings, self._ports)
        self._requested: frozenset[str] = frozenset()  # bookies to be recovered at once, as of the last poll
        self._back: dict[str, float] = {}  # bookies whose copies are checked, with the time when they came back
        self._runs: dict[str, str] = {}  # of each bookie, the run in which it was last registered
        self._acted_on: frozenset[tuple[str, str]] = frozenset()  # what the last walk counted as lost, draining or emptied
        self._disks: dict[str, str] = {}  # names of the disks of bookies that lost their data
        self._emptied_walked: dict[str, str] = {}  # those that the last walk knew
        self._next_walk = 0.0
        self._counted_short: frozenset[str] = frozenset()  # bookies with missing copies in the figures of the last walk
        self._recount = False  # whether all copies of one of them have been made since
        self._recount_from = 0.0  # recounts take half of the time at most
        self._marked: dict[int, _Marked] = {}
        self._reasons: dict[tuple[tuple[str, ShortReason], ...], dict[str, ShortReason]] = {}  # thousands of marks share a few
        self._rates: deque[tuple[float, int]] = deque()
        self._checks = CopyChecks(_MAX_CHECKS, self._settings.retry_s)
        self._closed: set[int] = set()  # ledgers that were closed at the last walk: their last entries are or were read
        self._was_off = False  # repair was off at the last poll or since: what was not marked then needs another walk
        self._read_again = -1  # the last of the marks that are read in turn
        self._is_saved = False  # whether metadata has the present `audit`

    # Election

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.SUSPENDED and self._away_from is None:
            self._away_from = asyncio.get_running_loop().time()
        if state is SessionState.LOST:
            self._deposed.set()
        self._due.set()

    async def _run(self) -> None:
        while True:
            try:
                if await self._is_elected():
                    await self._serve()
            except MetadataError as error:
                log.info("auditor.metadata_away", extra={"error": str(error)})
            except Exception:  # a defect must end neither repair nor the bookie in this process
                log.exception("auditor.failed")
            finally:
                self.statistics.is_auditor = False
            await self._wait(self._settings.poll_s)

    async def _is_elected(self) -> bool:
        """Become the auditor if there is none. Raises MetadataError."""
        if not self._settings.enabled:
            return False
        if not await self._election.stand():
            return False
        log.info("auditor.elected", extra={"auditor": self._name})
        return True

    async def _serve(self) -> None:
        """Audit until the session is lost or another process is the auditor. Raises MetadataError only for a closed store."""
        self._deposed.clear()
        self._forget()
        self.statistics.is_auditor = True
        try:
            found = await self._audits.get(None)
        except CorruptRecordError:  # it is logged, and written again after the first walk
            found = None
        self.audit = None if found is None else found.record
        self._runs = {} if self.audit is None else without_lost(self.audit.runs)
        while not self._deposed.is_set():
            try:
                if not await self._election.holds():
                    return
                await self._poll()
            except MetadataError as error:
                log.info("auditor.metadata_away", extra={"error": str(error)})
                if isinstance(error, StoreUnavailableError) and self._away_from is None:
                    self._away_from = self._looked_at
                if self._store.session_state is SessionState.LOST:
                    return
            await self._wait(self._settings.poll_s)

    async def _wait(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._due.wait()
        except TimeoutError:
            pass
        self._due.clear()

    # Every poll

    async def _poll(self) -> None:
        """Check the bookies, walk if due, and update the figures. Raises MetadataError."""
        await self._state.refresh()
        seen = await self._look_at_bookies()
        now = asyncio.get_running_loop().time()
        acts = frozenset(
            [(bookie, "draining") for bookie in seen.draining]
            + [(bookie, f"emptied, now {self._disks[bookie]}") for bookie in seen.emptied]
            + [(bookie, "lost") for bookie in self._state.expected() if seen.shortage_of(bookie, 0) is ShortReason.LOST]
        )
        returned = frozenset(bookie for bookie, since in self._back.items() if now - since >= _CHECK_RETURNED_AFTER_S)
        self._acted_on &= acts
        if self._was_off and self._state.off is None:
            self._next_walk = 0.0
        self._was_off = self._state.off is not None
        is_regular = now >= self._next_walk
        if is_regular or acts - self._acted_on or returned or (self._recount and now >= self._recount_from):
            walked = await self._walk(seen, returned, samples=is_regular)
            if walked is not None:
                self._acted_on = acts
                ended = asyncio.get_running_loop().time()
                self._recount_from = ended + (ended - now)
                if is_regular:
                    self._next_walk = max(self._next_walk, now + self._settings.walk_interval_s)
                for bookie in returned:
                    self._back.pop(bookie, None)
                if not (walked.unreadable or self._was_off):  # otherwise a bookie may lack copies that no mark names
                    self._emptied_walked = {bookie: self._disks[bookie] for bookie in seen.emptied}
                if not self._was_off:  # otherwise some ledgers were only counted
                    await self._finish_requests(seen)
                unreadable = walked.unreadable
                await self._decommissions.on_walked(seen.draining, walked.holdings, began=walked.began, unreadable=unreadable)
        self._checks.retry(asyncio.get_running_loop().time())
        if self._checks:
            self._has_checks.set()
        await self._update_figures(seen)
        await self._finish_decommissions(seen)
        await self._note_refilled(seen)

    async def _look_at_bookies(self) -> BookiesSeen:
        """Update the timers and return the state of the bookies. Raises MetadataError."""
        self._requested = requested = frozenset(await list_names(self._store, keys.REPAIR_REQUESTS_KEY))
        now = asyncio.get_running_loop().time()  # nothing is awaited from here to the end of `waiting`: an outage pauses timers
        self._pause_timers(now)
        registered = self._state.registered()
        for bookie in sorted(registered):
            since = self._lost_since.pop(bookie, None)
            run = self._state.run_of(bookie)
            if since is not None or self._runs.get(bookie, run) != run:
                self._back[bookie] = now
            self._runs[bookie] = run
        self._expected = expected = frozenset(self._state.expected())
        self._runs = {bookie: run for bookie, run in self._runs.items() if bookie in expected}
        for bookie in expected:
            if bookie not in registered:
                self._lost_since.setdefault(bookie, now)
                self._back.pop(bookie, None)
        self._decommissions.look()
        grace_s = self._settings.grace_s
        waiting = frozenset(
            bookie for bookie, since in self._lost_since.items() if now - since < grace_s and bookie not in requested
        )
        # Copies of a draining bookie move. If it stays after all, those that it lost are copied to it again.
        emptied = await self._emptied(registered - self._state.draining)
        self._emptied_walked = {bookie: disks for bookie, disks in self._emptied_walked.items() if bookie in emptied}
        return BookiesSeen(registered, waiting, self._state.draining, emptied)

    def _pause_timers(self, now: float) -> None:
        """Leave the time without metadata out of the grace periods that have not run out (rule 1)."""
        if (away_from := self._away_from) is not None:
            for bookie, since in self._lost_since.items():
                if away_from - since < self._settings.grace_s:
                    self._lost_since[bookie] = since + now - max(away_from, since)
        self._looked_at, self._away_from = now, None

    async def _emptied(self, registered: Iterable[str]) -> dict[str, int]:
        """Return the bookies that lost their disk and were not refilled since, with the id below which they lost everything."""
        emptied: dict[str, int] = {}
        for bookie in sorted(registered):
            try:
                found = await self._cookies.get(bookie)
            except (CorruptRecordError, NewerFormatError):
                continue  # it is logged where bookies are listed
            below = 0 if found is None else found.record.limbo_below or 0
            if found is None or not below:
                continue
            self._disks[bookie] = disks = f"{found.record.incarnation}.{below}"  # no two losses leave the same name
            if self.audit is None or self.audit.refilled.get(bookie) != disks:
                emptied[bookie] = below
        return emptied

    # Walking

    async def _walk(self, seen: BookiesSeen, returned: frozenset[str], *, samples: bool) -> _Walk | None:
        """Read every ledger's record; None: the walk was cut short. Raises MetadataError."""
        marked = {ledger_id async for ledger_id in list_repair_marks(self._store)}
        loop = asyncio.get_running_loop()
        began = loop.time()
        walk = _Walk(seen, returned, samples, began)
        log.info("audit.walk_begins", extra={"marked": len(marked), "returned": sorted(returned)})
        part: list[int] = []
        async with aclosing(list_ledgers(self._store)) as listed:  # type: ignore[type-var]
            async for ledger_id in listed:
                part.append(ledger_id)
                if len(part) == _SLICE:
                    await self._walk_slice(walk, part, marked)
                    part = []
                    ahead_s = walk.ledgers / self._settings.walk_ledgers_per_s - (loop.time() - began)
                    if ahead_s > 0:
                        await asyncio.sleep(ahead_s)
                    if self._deposed.is_set():
                        return None
        await self._walk_slice(walk, part, marked)
        await self._create_marks(walk)
        if self._state.off is not None:
            self._marked = {one: figures for one, figures in self._marked.items() if one in walk.counted or one in marked}
        self._closed = walk.closed
        # Without each record it is not known what a bookie lacks: walks would mark the same ledgers again and again.
        short = (bookie for bookie, one in walk.holdings.items() if one.short_ledgers)
        self._counted_short = frozenset() if walk.unreadable else frozenset(short)
        self.statistics.walks += 1
        self.statistics.walked_ledgers += walk.ledgers
        self.audit = Audit(
            finished_at_ms=self._ports.wall_ms(),
            ledgers=walk.ledgers,
            short=ShortFigures(),
            bookies=walk.holdings,
            unreadable_records=walk.unreadable,
            largest_ensemble=walk.largest_ensemble,
            badly_placed=walk.badly_placed,
            refilled={} if self.audit is None else self.audit.refilled,
            runs={} if self.audit is None else self.audit.runs,
        )
        self._is_saved = False
        log.info("audit.walk_ended", extra={"ledgers": walk.ledgers, "short": len(self._marked)})
        return walk

    async def _walk_slice(self, walk: _Walk, ledger_ids: Sequence[int], marked: set[int]) -> None:
        for found in await asyncio.gather(*map(self._read, ledger_ids)):
            if isinstance(found, Exception):
                walk.unreadable += 1
            elif found is not None:
                await self._judge(walk, found.record, is_marked=found.record.ledger_id in marked)
        walk.ledgers += len(ledger_ids)

    async def _read(self, ledger_id: int) -> Found[LedgerMetadata] | Exception | None:
        try:
            return await self._ledgers.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            log.error("ledger.record_unreadable", extra={"ledger_id": ledger_id, "error": str(error)})
            return error

    async def _judge(self, walk: _Walk, ledger: LedgerMetadata, *, is_marked: bool) -> None:
        walk.largest_ensemble = max(walk.largest_ensemble, ledger.ensemble_size)
        shortage = find_shortage(ledger, walk.seen)
        add_holdings(walk.holdings, ledger, shortage)
        if copies := self._copies_to_read(walk, ledger):
            self._checks.add(ledger.ledger_id, copies)
        if shortage is None and (shortage := self._find_bad_placement(walk, ledger)) is None:
            return
        if self._state.off is not None:
            self._was_off = True  # it may be on again by the next poll
            walk.counted.add(ledger.ledger_id)
            before = self._marked.get(ledger.ledger_id)
            self._note(ledger.ledger_id, new_mark(ledger.ledger_id, shortage, 0))
            self._marked[ledger.ledger_id].lost_entries = 0 if before is None else before.lost_entries
        elif is_marked:
            await self._renew(ledger, shortage)
        else:
            walk.new.append((ledger, shortage))
            if len(walk.new) >= _MARKED_TOGETHER:
                await self._create_marks(walk)

    def _find_bad_placement(self, walk: _Walk, ledger: LedgerMetadata) -> Shortage | None:
        """Count a ledger that could be spread over more racks; return what should move, for as many as a walk may mark."""
        racks = self._state.racks()
        if not racks:
            return None
        moves = {
            move.bookie: ShortReason.PLACEMENT
            for fragment in needed_fragments(ledger)
            if is_finished(ledger, fragment)
            for move in placement_shortfall(fragment.ensemble, ledger.write_quorum, racks, self._state.writable())
        }
        if not moves:
            return None
        walk.badly_placed += 1
        is_due = walk.samples and walk.badly_placed <= self._settings.placement_ledgers_per_walk
        return measure(ledger, moves, walk.seen.registered) if is_due else None

    async def _create_marks(self, walk: _Walk) -> None:
        """Create several marks in one write, or one by one if another auditor created some of them."""
        found, walk.new = walk.new, []
        if not found:
            return
        marks = [new_mark(ledger.ledger_id, shortage, self._ports.wall_ms()) for ledger, shortage in found]
        try:
            await self._store.multi([self._marks.create_op(mark.ledger_id, mark) for mark in marks])
        except KeyExistsError:
            for ledger, shortage in found:
                await self._renew(ledger, shortage)
        else:
            for mark in marks:
                self._note(mark.ledger_id, mark)
        self.statistics.marked_ledgers += len(marks)
        self._on_marked()

    async def _renew(self, ledger: LedgerMetadata, shortage: Shortage) -> None:
        """Add to a mark that probably exists. Every change raises its version, so that no worker removes what it does not know."""
        while True:
            try:
                found = await self._marks.get(ledger.ledger_id)
            except CorruptRecordError:  # it is logged; the walk knows what belongs there
                await self._marks.delete(ledger.ledger_id, None)
                continue
            except NewerFormatError:
                return  # workers of that release repair it
            try:
                if found is None:  # a worker removed it at this moment
                    mark = new_mark(ledger.ledger_id, shortage, self._ports.wall_ms())
                    await self._marks.create(ledger.ledger_id, mark)
                else:
                    mark = found.record
                    merged = merged_reasons(mark.bookies, shortage.bookies)
                    # Damage outweighs that its bookie is lost or draining: it changes what a worker does.
                    if merged == mark.bookies and not any(merged[name] is ShortReason.DAMAGED for name in shortage.bookies):
                        break
                    mark = renewed_mark(mark, measure(ledger, merged, self._state.registered()))
                    await self._marks.replace(ledger.ledger_id, mark, found.version)
            except (KeyExistsError, BadVersionError, NoSuchKeyError):
                continue  # it changed meanwhile; the finding must not be lost: no later walk may look for it again
            self._on_marked()
            break
        self._note(ledger.ledger_id, mark)

    def _note(self, ledger_id: int, mark: RepairMark) -> None:
        figures = mark.copies_left, mark.short_bytes, mark.last_copy_entries, mark.lost_entries
        reasons = self._reasons.setdefault(tuple(mark.bookies.items()), mark.bookies)
        self._marked[ledger_id] = _Marked(*figures, reasons, mark.former)

    # Reading copies

    def _copies_to_read(self, walk: _Walk, ledger: LedgerMetadata) -> list[CopyToRead]:
        """Return copies that may be missing although their bookie runs (rule 4)."""
        size, quorum = ledger.ensemble_size, ledger.write_quorum
        wanted: list[CopyToRead] = []
        suspects: Collection[str] = walk.returned
        if ledger.is_closed:
            walk.closed.add(ledger.ledger_id)
            if ledger.ledger_id not in self._closed:
                suspects = walk.seen.registered
        for fragment, following in zip_longest(ledger.fragments, ledger.fragments[1:]):
            if not is_finished(ledger, fragment):
                continue
            for position, bookie in enumerate(fragment.ensemble):
                if bookie in suspects and (following is None or bookie not in following.ensemble):
                    _, last = entries_of(ledger, fragment)
                    entry_id = next(last - back for back in range(size) if (position - (last - back)) % size < quorum)
                    if entry_id >= fragment.first_entry_id:
                        wanted.append(CopyToRead(position, entry_id, bookie))
        if walk.samples and ledger.last_entry_id is not None and ledger.last_entry_id >= 0:
            rng = self._ports.random
            if rng.random() < self._settings.checks_per_s / self._settings.walk_ledgers_per_s:
                entry_id = rng.randint(0, ledger.last_entry_id)
                position = (entry_id + rng.randrange(quorum)) % size
                wanted.append(CopyToRead(position, entry_id, ledger.fragment_of(entry_id).ensemble[position]))
        return wanted

    async def _check_copies(self) -> None:
        while True:
            await self._has_checks.wait()
            if not self._checks or not self.statistics.is_auditor or self._state.off is not None:
                self._has_checks.clear()  # until the next poll
                continue
            checks = self._checks
            ledger_id, copies = checks.begin()
            left: Sequence[CopyToRead] = copies
            await asyncio.sleep(len(copies) / self._settings.checks_per_s)
            try:
                left = await self._check_ledger(ledger_id, copies)
            except Exception as error:
                log.info("audit.copies_not_checked", extra={"ledger_id": ledger_id, "error": str(error)})
            checks.end(left, asyncio.get_running_loop().time())

    async def _check_ledger(self, ledger_id: int, copies: Iterable[CopyToRead]) -> list[CopyToRead]:
        """Read copies, and mark the ledger for the bookies that do not have them. Return those whose bookies do not answer. Raises
        MetadataError."""
        found = await self._ledgers.get(ledger_id)
        if found is None:
            return []
        ledger = found.record
        bad: dict[str, ShortReason] = {}
        left: list[CopyToRead] = []
        for position, entry_id, bookie in copies:
            if ledger.fragment_of(entry_id).ensemble[position] != bookie:
                continue  # another bookie has its place now
            try:
                is_bad = bool(await self._client.runs_not_stored(ledger, position, bookie, entry_id, entry_id))
            except LedgerError as error:  # the other copies are read all the same
                log.info("audit.copies_not_checked", extra={"ledger_id": ledger_id, "error": str(error)})
                left.append(CopyToRead(position, entry_id, bookie))
                continue
            self.statistics.checked_copies += 1
            if is_bad:
                self.statistics.bad_copies += 1
                log.warning("audit.copy_missing", extra={"ledger_id": ledger_id, "entry_id": entry_id, "bookie": bookie})
                bad[bookie] = ShortReason.DAMAGED
        if bad:
            await mark_ledger(self._store, ledger, bad, self._state.registered(), self._ports)
            self._on_marked()
        return left

    # Figures

    async def _update_figures(self, seen: BookiesSeen) -> None:
        """Subtract what was repaired since the last poll, and save the figures if they changed."""
        if self.audit is None:
            return
        unchecked = self._back.keys() | self._checks.bookies()  # before marks are listed: a check marks before it ends
        listed = [ledger_id async for ledger_id in list_repair_marks(self._store)]
        await self._read_marks(listed)
        living = set(listed)
        self._marked = {ledger_id: one for ledger_id, one in self._marked.items() if ledger_id in living or self._state.off}
        short = [one for one in self._marked.values() if one.lacks_copies]
        marked = {
            bookie for reasons in {id(one.bookies): one.bookies for one in self._marked.values()}.values() for bookie in reasons
        }
        are_read = living <= self._marked.keys()
        self._recount = are_read and self._state.off is None and not self._counted_short <= marked
        now, short_bytes = asyncio.get_running_loop().time(), sum(one.bytes for one in short)
        self._rates.append((now, short_bytes))
        while self._rates[0][0] < now - _RATE_WINDOW_S:
            self._rates.popleft()
        since, before = self._rates[0]
        rate = int((before - short_bytes) / (now - since)) if now > since and before > short_bytes else 0
        urgent = sorted((one.copies_left, ledger_id) for ledger_id, one in self._marked.items() if one.lacks_copies)
        lost = self._expected - seen.registered - seen.waiting
        checked = without_lost(self.audit.runs)
        audit = self.audit.replace(
            short=ShortFigures(
                ledgers=len(short),
                bytes=short_bytes,
                last_copy_entries=sum(one.last_copy_entries for one in short),
                lost_entries=sum(one.lost_entries for one in short),
            ),
            waiting=tuple(sorted(seen.waiting)),
            bytes_per_s=rate,
            urgent=tuple(ledger_id for _, ledger_id in urgent[:_URGENT]),
            runs={bookie: checked.get(bookie, "") if bookie in unchecked else run for bookie, run in self._runs.items()}
            | dict.fromkeys(sorted(lost), LOST_RUN),
        )
        if audit != self.audit or not self._is_saved:
            self.audit = audit
            await self._save_audit()

    async def _read_marks(self, listed: list[int]) -> None:
        """Read marks that others created, and some of the known ones again."""
        unknown = [ledger_id for ledger_id in listed if ledger_id not in self._marked]
        place = bisect_right(listed, self._read_again)
        again = [*listed[place:], *listed[:place]]
        part = list(dict.fromkeys([*unknown, *again]))[:_MARKS_READ]
        if part:
            self._read_again = part[-1]
        for ledger_id, found in zip(part, await asyncio.gather(*map(self._mark_of, part)), strict=True):
            if found is not None:
                self._note(ledger_id, found.record)

    async def _mark_of(self, ledger_id: int) -> Found[RepairMark] | None:
        """Return a ledger's mark, if it has one that can be read. Raises MetadataError."""
        try:
            return await self._marks.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            log.error("repair.mark_unreadable", extra={"ledger_id": ledger_id, "error": str(error)})
            return None

    async def _save_audit(self) -> None:
        assert self.audit is not None
        self._is_saved = False
        found = await self._store.get(keys.AUDIT_KEY)  # not decoded: it may be damaged
        try:
            if found is None:
                await self._audits.create(None, self.audit)
            else:
                await self._audits.replace(None, self.audit, found.version)
        except (KeyExistsError, BadVersionError):
            return  # another auditor: the next poll detects that
        self._is_saved = True

    # Operators' requests

    async def _finish_requests(self, seen: BookiesSeen) -> None:
        """Finish the requests from before the walk: their ledgers are marked now, or the bookie runs. Later ones wait for the next
        walk."""
        runs = seen.registered & self._state.registered()
        for bookie in sorted(self._requested):
            if bookie in runs or bookie not in seen.waiting | seen.registered:
                self._lost_since[bookie] = -self._settings.grace_s
                try:
                    await self._requests.delete(bookie, None)
                except NoSuchKeyError:
                    pass
                if bookie in runs:
                    self._lost_since.pop(bookie, None)

    async def _finish_decommissions(self, seen: BookiesSeen) -> None:
        """Forget bookies that were drained and have ended. If nothing needs a draining bookie any more, walk again."""
        if not seen.draining:
            return
        unreadable = self.audit is not None and self.audit.unreadable_records
        if unreadable or self._state.off is not None:
            needed = seen.draining
        else:
            needed = frozenset(bookie for one in self._marked.values() for bookie in (*one.bookies, *one.former))
        finished = await self._decommissions.finish(seen, needed)
        if finished.needs_walk:
            self._next_walk = 0.0
        for bookie in finished.forgotten:
            self._lost_since.pop(bookie, None)

    async def _note_refilled(self, seen: BookiesSeen) -> None:
        """Note bookies that lost their disk and have everything again: after a walk no mark names them for that reason."""
        for bookie, disks in self._emptied_walked.items():
            waits = any(one.bookies.get(bookie) is ShortReason.EMPTY_DISK for one in self._marked.values())
            if self.audit is not None and not waits and bookie in seen.emptied and self._state.off is None:
                self.audit = self.audit.replace(refilled={**self.audit.refilled, bookie: disks})
                await self._save_audit()
                log.info("bookie.refilled", extra={"bookie": bookie, "disks": disks})


async def mark_ledger(
    store: MetadataStore, ledger: LedgerMetadata, reasons: Mapping[str, ShortReason], registered: Collection[str], ports: Ports
) -> None:
    """Mark one ledger for repair, or add to its mark. Raises MetadataError."""
    marks = repair_marks(store)
    while True:
        found = await marks.get(ledger.ledger_id)
        merged = merged_reasons({} if found is None else found.record.bookies, reasons)
        shortage = measure(ledger, merged, registered)
        try:
            if found is None:
                await marks.create(ledger.ledger_id, new_mark(ledger.ledger_id, shortage, ports.wall_ms()))
            else:  # also if nothing is new: a worker that is about to remove the mark must check again
                found_bad = [bookie for bookie, why in reasons.items() if why is ShortReason.DAMAGED]
                mark = renewed_mark(found.record, shortage).replace(damaged=damaged_entries(found.record, found_bad, ()))
                await marks.replace(ledger.ledger_id, mark, found.version)
            return
        except (KeyExistsError, BadVersionError, NoSuchKeyError):
            continue
