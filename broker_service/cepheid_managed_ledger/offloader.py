"""Copy a topic's ended ledgers to an object store, and delete their copies on the bookies later.

    record the attempt (its URL) ──► upload ──► read back and compare ──► record it as complete ──► … keep_ms … ──► off the bookies
           │                            └──────────┴──fails──► the URL moves to the queue of objects to delete; retry after a pause
           └──the owner dies before "complete"──► the next owner finds the attempt, and does the same

Rules:
1. The URL is recorded before any byte is written to it. So every object is named by a record: in an attempt, a complete copy,
   or the queue of objects to delete.
2. An upload counts only after it was read back from the store: number of entries, bytes and the checksum over all digests must
   equal those of the entries read from the bookies.
3. Once the write that records "complete" has begun, this opening never deletes the object: the write may have succeeded. If its
   outcome stays unknown, this opening ends, and the next one acts on the record.
4. A ledger leaves the bookies by a write that records this and adds it to the deletion queue. Before that write the object is
   opened once more: if it was deleted or damaged since, the ledger stays on the bookies, with a warning.
5. When the attempt leaves the record while its upload runs (its ledger was trimmed), the upload is stopped. Its object is deleted
   only after it has stopped.
6. A failure never affects the topic: it is kept for statistics, logged, and followed by a pause that doubles. A problem of one
   ledger does not delay the others.
7. Retention waits for a ledger that is due, but not without limit: one whose offload failed is held for `offload_hold_s`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from cepheid_ledger import LedgerClient, LedgerError, check_end
from cepheid_managed_ledger.chain_edits import off_bookies, without_attempts
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import NoObjectStoreError, OffloadOffError, OffloadRunningError
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.object_deletion import ObjectDeletions
from cepheid_managed_ledger.offload_plan import OffloadPlan, due_ledgers, is_before, may_leave_bookies, plan_offload
from cepheid_managed_ledger.offload_pool import OffloadPool
from cepheid_managed_ledger.settings import MIB, ManagedLedgerSettings, OffloadConfig
from cepheid_managed_ledger.statistics import OffloadStatistics
from cepheid_managed_ledger.stored_copies import StoredCopies
from cepheid_metadata import Chain, ChainLedger, OffloadedLedger, Op, Position, StoreUnavailableError
from cepheid_ports import CepheidError, Ports, SteadyClock, TaskOwner
from cepheid_rpc import HEADER_BYTES, EntryGroup
from cepheid_tiered import DamagedSegmentError, SegmentError, SegmentNotWrittenError, SegmentStore, SegmentSummary
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_READ_BYTES = MIB
_READ_ENTRIES = 2_000
"""Entries that are read at once. To verify and count them takes a millisecond of the event loop, however small they are."""
_MAX_PAUSE_S = 300.0
_LEAVE_AT_ONCE = 100
_PATIENCE_S = 300.0
_SLOWEST_BYTES_PER_S = 256 * 1024
"""An upload that is slower than this after `_PATIENCE_S` is given up, since others wait for its turn. If the rate of all uploads is
limited, half of an equal share is the bound if that is less."""
_MOST_SHOWN = 20


class OffloadState(enum.Enum):
    """State of an administrator's last request. The names are those of Pulsar's admin API."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    state: OffloadState = OffloadState.NOT_RUN
    first_unoffloaded: Position | None = None
    """First entry without a copy in an object store."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    """Totals of the entries read from the bookies for an upload."""

    entries: int = 0
    entry_bytes: int = 0
    crc32c: int = 0


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """An upload that was read back and equals the ledger."""

    content: _Content
    object_bytes: int


@dataclass(frozen=True, slots=True)
class _Failed:
    """A ledger whose last attempt in this opening of the topic failed."""

    error: str
    is_final: bool
    """Whether a retry cannot succeed."""
    is_told: bool = False
    """Whether it was logged that retention no longer waits for it."""


class Offloader:
    """Offloads the ledgers of one open topic."""

    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        client: LedgerClient,
        store: SegmentStore | None,
        ledgers: LedgerList,
        copies: StoredCopies,
        deletions: ObjectDeletions,
        pool: OffloadPool,
        config: Callable[[], OffloadConfig],
        settings: ManagedLedgerSettings,
        clock: SteadyClock,
        ports: Ports,
        tasks: TaskOwner,
        shared_tasks: TaskOwner,
    ) -> None:
        self._topic = topic
        self._keeper = keeper
        self._client = client
        self._store = store
        self._ledgers = ledgers
        self._copies = copies
        self._deletions = deletions
        deletions.is_uploading = self._is_uploading
        self._pool = pool
        self._config = config
        self._settings = settings
        self._clock = clock
        self._ports = ports
        self._tasks = tasks
        self._shared_tasks = shared_tasks  # they outlive the topic
        self.on_done: Callable[[], None] = lambda: None
        """Called when a run has ended: more ledgers may now be trimmed, or deleted from the bookies."""
        self._running: asyncio.Task[None] | None = None
        self._upload: asyncio.Task[_Uploaded | Exception] | None = None
        self._uploading: tuple[int, str] | None = None
        self._before: Position | None = None
        self._status = OffloadStatus()
        self._skipped: dict[int, float] = {}  # failed ledgers, and until when (loop time) others come first
        self._failed: dict[int, _Failed] = {}
        self._retry_at = 0.0
        self._failures_in_a_row = 0
        self._last_success_at_ms = self._last_failure_at_ms = self._failing_since_ms = 0
        self._last_error: str | None = None
        self._uploaded_ledgers = self._uploaded_bytes = self._failures = 0
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Offloader of {self._topic}: {'running' if self._running else 'idle'}, {self._uploaded_ledgers} uploaded>"

    # Commands

    def start(self, before: Position) -> None:
        """Begin to offload all ended ledgers whose entries lie before a position; `status` has the outcome.

        Raises OffloadRunningError, OffloadOffError, NoObjectStoreError.
        """
        topic = str(self._topic)
        if self._before is not None:
            raise OffloadRunningError(f"{topic} is being offloaded up to {self._before} already", topic=topic)
        if self._config().url is None:
            raise OffloadOffError(f"offloading is off for {topic}", topic=topic)
        if self._store is None:
            raise self._no_store()
        self._before, self._retry_at = before, 0.0
        self._skipped.clear()
        self._status = OffloadStatus(OffloadState.RUNNING)
        self.tick()

    @property
    def status(self) -> OffloadStatus:
        """State of the last request, with the current first entry without a copy."""
        if self._status.state is OffloadState.NOT_RUN:
            return self._status
        return OffloadStatus(self._status.state, self._first_unoffloaded(), self._status.error)

    def _first_unoffloaded(self) -> Position | None:
        chain = self._keeper.chain
        for ledger_id, entries, _ in self._ledgers.from_ledger(0):
            if entries and chain.offload_of(ledger_id) is None:
                return Position(ledger_id, 0)
        return None

    # Running

    def tick(self) -> None:
        """Start a run if there is something to do and no pause after a failure."""
        if self._stopped or self._running is not None or self._now() < self._retry_at:
            return
        if self._plan().is_idle and self._before is None:
            self._forget_failure()
            return
        self._running = self._tasks.start(self._run(), name="offload")

    @property
    def has_work(self) -> bool:
        """Whether a run is in progress or would begin now."""
        if self._running is not None:
            return True
        return not self._stopped and self._now() >= self._retry_at and not self._plan().is_idle

    @property
    def uploading_ledger_id(self) -> int | None:
        return self._uploading[0] if self._uploading else None

    def held(self) -> Mapping[int, None]:
        """Return the ledgers that must not be trimmed yet because they are due to be offloaded (rule 7)."""
        held: dict[int, None] = {}
        for ledger in self._due():
            if self._is_given_up(ledger):
                self._tell_given_up(ledger)
            else:
                held[ledger.ledger_id] = None
        return held

    def _tell_given_up(self, ledger: ChainLedger) -> None:
        failed = self._failed[ledger.ledger_id]
        if not failed.is_told:
            self._failed[ledger.ledger_id] = replace(failed, is_told=True)
            hint = "raise managed_ledger.offload_hold_s to have retention wait longer"
            fields = {"topic": str(self._topic), "ledger_id": ledger.ledger_id, "error": failed.error, "hint": hint}
            log.warning("offload.retention_not_held", extra=fields)

    def _is_given_up(self, ledger: ChainLedger) -> bool:
        if ledger.ledger_id not in self._failed:
            return False
        due_at_ms = ledger.closed_at_ms + max(0, self._config().after_ms)
        return self._clock.now_ms() - due_at_ms >= 1_000 * self._settings.offload_hold_s

    def on_chain_changed(self) -> None:
        """Stop the upload if its attempt is no longer in the record (rule 5)."""
        if self._uploading is not None and self._upload is not None and not self._is_recorded(*self._uploading):
            self._upload.cancel()

    def stop(self) -> None:
        """Start nothing from now on, and stop a current upload. The next opening handles the objects in the record."""
        self._stopped = True
        for task in (self._running, self._upload):
            if task is not None:
                task.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _due(self) -> list[ChainLedger]:
        return due_ledgers(
            self._keeper.chain,
            last_size_bytes=self._ledgers.last_size_bytes,
            config=self._config(),
            now_ms=self._clock.now_ms(),
            before=self._before,
        )

    def _plan(self) -> OffloadPlan:
        now = self._now()
        plan = plan_offload(
            self._keeper.chain,
            last_size_bytes=self._ledgers.last_size_bytes,
            config=self._config(),
            now_ms=self._clock.now_ms(),
            before=self._before,
            skipped=[ledger_id for ledger_id, until in self._skipped.items() if now < until],
            is_read_from_bookies=self._copies.is_reading_bookies,
        )
        if self._store is not None or plan.upload is None:
            return plan if self._store is not None else OffloadPlan(plan.clear)
        if self._last_error is None:  # logged once: retries cannot succeed
            self._note_failure(self._no_store())
        return OffloadPlan(plan.clear)

    def _no_store(self) -> NoObjectStoreError:
        message = f"{self._topic} is to be offloaded to {self._config().url}, and this broker has no library for object stores"
        return NoObjectStoreError(message, topic=str(self._topic))

    async def _run(self) -> None:
        """Carry out steps until nothing is left to do or one fails."""
        failure: Exception | None = None
        try:
            while not self._stopped and await self._step():
                pass
        except (CepheidError, TimeoutError) as error:
            failure = error
            self._note_failure(error)
        except Exception as error:  # rule 6: including a defect of this code or of a library
            failure = error
            log.error("offload.defect", extra={"topic": str(self._topic), "error": repr(error)}, exc_info=error)
            self._note_failure(error)
        finally:
            self._running = None
        self._end_command(failure)
        self.on_done()

    async def _step(self) -> bool:
        """Carry out the next step of the plan. Return False if there is none."""
        plan = self._plan()
        if plan.clear:
            await self._clear(plan.clear)
            await self._deletions.run()  # delete the object of an interrupted attempt before the next one
        elif plan.leave:
            await self._leave(plan.leave[:_LEAVE_AT_ONCE])
        elif plan.upload is not None:
            await self._offload(plan.upload)
        else:
            return False
        return True

    def _end_command(self, failure: Exception | None) -> None:
        """End an administrator's request, when all ledgers before its position are complete or at the first failure."""
        if self._before is None:
            return
        chain, before = self._keeper.chain, self._before
        left = [
            ledger
            for ledger in chain.ledgers
            if not ledger.is_open and ledger.entries and chain.offload_of(ledger.ledger_id) is None and is_before(ledger, before)
        ]
        self._before = None
        if not left:
            self._status = OffloadStatus(OffloadState.SUCCESS)
            return
        reason = failure or self._last_error or "offloading was stopped; see the statistics of the topic"
        self._status = OffloadStatus(OffloadState.ERROR, error=str(reason))

    # Failures

    def _note_failure(self, error: Exception) -> None:
        now_ms = self._ports.wall_ms()
        self._failures += 1
        self._last_failure_at_ms, self._last_error = now_ms, str(error)
        self._failing_since_ms = self._failing_since_ms or now_ms
        self._retry_at = self._now() + self._pause_s()
        self._failures_in_a_row += 1
        age_ms = self._age_of_oldest(self._due())
        fields = {"topic": str(self._topic), "error": str(error), "failures": self._failures_in_a_row, "oldest_due_age_ms": age_ms}
        log.warning("offload.failed", extra=fields)

    def _pause_s(self) -> float:
        return min(_MAX_PAUSE_S, self._settings.offload_retry_s * (1 << min(self._failures_in_a_row, 16)))

    def _note_success(self) -> None:
        self._last_success_at_ms = self._ports.wall_ms()
        self._failures_in_a_row = self._failing_since_ms = 0
        self._last_error = None

    def _forget_failure(self) -> None:
        """Clear the last failure if its ledger is no longer due, since the policy changed or the ledger left the chain."""
        if self._last_error is not None and not self._due():
            self._skipped = {ledger_id: until for ledger_id, until in self._skipped.items() if self._now() < until}
            if not self._skipped:
                self._failures_in_a_row = self._failing_since_ms = 0
                self._last_error = None

    # Steps

    async def _clear(self, ledger_ids: Sequence[int]) -> None:
        def plan(chain: Chain) -> tuple[Chain, Sequence[Op]]:
            return without_attempts(chain, ledger_ids), ()

        await self._keeper.commit(plan)
        fields = {"topic": str(self._topic), "ledgers": len(ledger_ids), "first": ledger_ids[0]}
        log.info("offload.attempt_cleared", extra=fields)

    async def _leave(self, ledger_ids: Sequence[int]) -> None:
        """Record that ledgers leave the bookies (rule 4). One whose store does not answer stays, without delaying the others."""
        intact = [ledger_id for ledger_id in ledger_ids if await self._is_intact(ledger_id)]
        left: list[int] = []

        def plan(chain: Chain) -> tuple[Chain | None, Sequence[Op]]:
            config, now_ms = self._config(), self._clock.now_ms()
            left[:] = [
                ledger_id
                for ledger_id in intact
                if may_leave_bookies(chain, ledger_id, config, now_ms) and not self._copies.is_reading_bookies(ledger_id)
            ]
            return (off_bookies(chain, left) if left else None), ()

        if intact:
            await self._keeper.commit(plan)
        for ledger_id in left:
            log.info("ledger.left_bookies", extra={"topic": str(self._topic), "ledger_id": ledger_id})
        for ledger_id in ledger_ids:
            if ledger_id not in left:  # it is being read, or its object is not intact
                self._skipped[ledger_id] = max(self._skipped.get(ledger_id, 0.0), self._now() + self._settings.offload_retry_s)
        if left:
            self.on_done()

    async def _is_intact(self, ledger_id: int) -> bool:
        found, entries = self._keeper.chain.offload_of(ledger_id), self._ledgers.entries_of(ledger_id)
        if found is None or entries is None or self._store is None:
            return False
        try:
            await self._store.open(found.url, ledger_id, entries, fresh=True)
        except SegmentError as error:
            self._skipped[ledger_id] = self._now() + (self._pause_s() if error.retriable else _MAX_PAUSE_S)
            self._note_failure(error)
            if error.retriable:
                return False
            fields = {"topic": str(self._topic), "ledger_id": ledger_id, "url": found.url, "error": str(error)}
            log.error(
                "ledger.kept_on_bookies", extra={**fields, "hint": "its object is not what was uploaded: the bookies keep it"}
            )
            return False
        return True

    async def _offload(self, ledger: ChainLedger) -> None:
        store, config = self._store, self._config()
        assert store is not None, "without a store no ledger is planned"
        assert config.url is not None, "without a URL no ledger is due"
        url = store.url_of(config.url, self._topic, ledger.ledger_id)
        async with self._pool.turns:
            began = self._now()
            if not await self._record_attempt(ledger.ledger_id, url):
                return
            outcome = await self._upload_in_turn(store, url, ledger)
        match outcome:
            case _Uploaded():
                if await self._record_complete(ledger.ledger_id, url, outcome.object_bytes):
                    self._note_uploaded(ledger, url, outcome.content, self._now() - began)
                else:
                    self._note_discarded(ledger)
            case None:
                self._note_discarded(ledger)
            case error:
                self._note_failed_ledger(ledger, error)
                await self._clear((ledger.ledger_id,))
                await self._deletions.run()
                if not _concerns_one_ledger(error):
                    raise error
                self._skipped[ledger.ledger_id] = self._now() + self._pause_s()
                self._note_failure(error)

    def _note_failed_ledger(self, ledger: ChainLedger, error: Exception) -> None:
        due = {each.ledger_id for each in self._due()}
        self._failed = {ledger_id: found for ledger_id, found in self._failed.items() if ledger_id in due}
        before = self._failed.get(ledger.ledger_id)
        is_final = not getattr(error, "retriable", True)
        self._failed[ledger.ledger_id] = _Failed(str(error), is_final, before is not None and before.is_told)
        if is_final and (before is None or not before.is_final):
            fields = {"topic": str(self._topic), "ledger_id": ledger.ledger_id, "error": str(error)}
            log.error("offload.ledger_refused", extra={**fields, "hint": getattr(error, "hint", "")})

    async def _record_attempt(self, ledger_id: int, url: str) -> bool:
        """Record an attempt with its URL. Return False if the ledger should no longer be offloaded."""
        recorded = False

        def plan(chain: Chain) -> tuple[Chain | None, Sequence[Op]]:
            nonlocal recorded
            offloaded = chain.offloaded or {}
            ended = any(ledger.ledger_id == ledger_id and not ledger.is_open for ledger in chain.ledgers)
            recorded = ended and ledger_id not in offloaded
            if not recorded:
                return None, ()
            attempt = OffloadedLedger(url=url, started_at_ms=self._clock.stamp_ms())
            return chain.replace(offloaded={**offloaded, ledger_id: attempt}), ()

        await self._keeper.commit(plan)
        return recorded

    async def _upload_in_turn(self, store: SegmentStore, url: str, ledger: ChainLedger) -> _Uploaded | Exception | None:
        """Upload the ledger and verify it. Return the result or an error; None if it was stopped, since the ledger left the chain
        (rule 5)."""
        self._uploading = ledger.ledger_id, url
        if not self._is_recorded(*self._uploading):  # the ledger left the chain while the attempt was recorded
            self._uploading = None
            return None
        upload = self._upload = self._tasks.start(self._upload_quietly(store, url, ledger), name="upload")
        try:
            await asyncio.wait([upload])
        finally:
            if upload.done():
                self._upload = self._uploading = None
        return None if upload.cancelled() else upload.result()

    async def _upload_quietly(self, store: SegmentStore, url: str, ledger: ChainLedger) -> _Uploaded | Exception:
        try:
            async with asyncio.timeout(_PATIENCE_S + ledger.size_bytes / self._slowest_bytes_per_s()):
                return await self._upload_and_verify(store, url, ledger)
        except asyncio.CancelledError:
            if self._keeper.lost is not None:
                # The next owner clears this attempt, perhaps before our last bytes arrive. "Complete" was not recorded, and no
                # other broker can record it for this URL.
                self._shared_tasks.start(self._drop(store, url), name="drop-upload")
            raise
        except TimeoutError:
            return TimeoutError(f"uploading ledger {ledger.ledger_id} took too long and was given up")
        except CepheidError as error:
            return error
        except Exception as error:  # rule 6
            log.error("offload.defect", extra={"topic": str(self._topic), "error": repr(error)}, exc_info=error)
            return error

    def _slowest_bytes_per_s(self) -> float:
        rate = self._settings.offload_bytes_per_s
        return min(_SLOWEST_BYTES_PER_S, rate / (2 * self._settings.offload_uploads)) if rate else _SLOWEST_BYTES_PER_S

    async def _drop(self, store: SegmentStore, url: str) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await store.delete(url)
        except (CepheidError, TimeoutError) as error:
            log.warning("segments.left_behind", extra={"topic": str(self._topic), "url": url, "error": str(error)})

    async def _upload_and_verify(self, store: SegmentStore, url: str, ledger: ChainLedger) -> _Uploaded:
        reading = _Reading(self._client, ledger, self._pool)
        written = await store.write(url, self._topic, ledger.ledger_id, reading.groups())
        found = await store.verify(url, ledger.ledger_id)
        content = reading.content
        if content.entries != ledger.entries or _content_of(found) != content:
            message = (
                f"{url} holds {_content_of(found)}, and ledger {ledger.ledger_id} {content} (recorded: {ledger.entries} entries)"
            )
            raise DamagedSegmentError(message, url=url, ledger_id=ledger.ledger_id)
        return _Uploaded(content, written.object_bytes)

    async def _record_complete(self, ledger_id: int, url: str, object_bytes: int) -> bool:
        """Record the copy as complete. A failure keeps the object (rule 3). Return False if the ledger left the chain: its URL is
        then in the deletion queue."""
        recorded = False
        completed_at_ms = self._clock.stamp_ms()

        def plan(chain: Chain) -> tuple[Chain | None, Sequence[Op]]:
            nonlocal recorded
            offloaded = chain.offloaded or {}
            found = offloaded.get(ledger_id)
            recorded = found is not None and found.url == url
            if found is None or not recorded:
                return None, ()
            complete = found.replace(complete=True, completed_at_ms=completed_at_ms, object_bytes=object_bytes)
            return chain.replace(offloaded={**offloaded, ledger_id: complete}), ()

        pause_s = self._settings.metadata_retry_s
        while True:
            try:
                await self._keeper.commit(plan)
                return recorded
            except StoreUnavailableError:  # nothing was written, and the upload is worth retrying for
                if self._stopped or self._keeper.lost is not None:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)

    def _note_uploaded(self, ledger: ChainLedger, url: str, content: _Content, duration_s: float) -> None:
        self._note_success()
        self._uploaded_ledgers += 1
        self._uploaded_bytes += content.entry_bytes
        self._skipped.pop(ledger.ledger_id, None)
        self._failed.pop(ledger.ledger_id, None)
        fields = {"topic": str(self._topic), "ledger_id": ledger.ledger_id, "entries": content.entries, "url": url}
        log.info("ledger.offloaded", extra={**fields, "bytes": content.entry_bytes, "duration_ms": round(1000 * duration_s)})

    def _note_discarded(self, ledger: ChainLedger) -> None:
        log.info("offload.discarded", extra={"topic": str(self._topic), "ledger_id": ledger.ledger_id})

    def _is_recorded(self, ledger_id: int, url: str) -> bool:
        found = (self._keeper.chain.offloaded or {}).get(ledger_id)
        return found is not None and found.url == url

    def _is_uploading(self, url: str) -> bool:
        return self._uploading is not None and self._uploading[1] == url

    # Statistics

    def _age_of_oldest(self, due: Sequence[ChainLedger]) -> int | None:
        return max(0, self._clock.now_ms() - due[0].closed_at_ms) if due else None

    def statistics(self) -> OffloadStatistics:
        chain, due = self._keeper.chain, self._due()
        complete = [found for found in (chain.offloaded or {}).values() if found.complete]
        copied = [ledger for ledger in chain.ledgers if complete and chain.offload_of(ledger.ledger_id) is not None]
        off = [ledger for ledger in copied if not chain.is_on_bookies(ledger.ledger_id)]
        failed = [(ledger, found) for ledger in due if (found := self._failed.get(ledger.ledger_id)) is not None]
        refused = [(ledger.ledger_id, found.error) for ledger, found in failed if found.is_final]
        return OffloadStatistics(
            ledgers=len(complete),
            size_bytes=sum(ledger.size_bytes for ledger in copied),
            object_bytes=sum(found.object_bytes for found in complete),
            off_bookies_ledgers=len(off),
            off_bookies_bytes=sum(ledger.size_bytes for ledger in off),
            uploading_ledger_id=self.uploading_ledger_id,
            due_ledgers=len(due),
            refused_ledgers=len(refused),
            refused=dict(refused[:_MOST_SHOWN]),
            not_held_ledgers=sum(self._is_given_up(ledger) for ledger, _ in failed),
            oldest_due_age_ms=self._age_of_oldest(due),
            last_success_at_ms=self._last_success_at_ms,
            last_failure_at_ms=self._last_failure_at_ms,
            failing_since_ms=self._failing_since_ms,
            last_error=self._last_error,
            uploaded_ledgers=self._uploaded_ledgers,
            uploaded_bytes=self._uploaded_bytes,
            failures=self._failures,
            waiting_object_deletions=len(self._deletions.waiting),
            object_deletion_error=self._deletions.last_error,
            object_reads=self._copies.object_reads,
            object_read_bytes=self._copies.object_bytes,
            other_copy_reads=self._copies.other_copy_reads,
        )


class _Reading:
    """Reads the entries of one ledger from the bookies for an upload, and computes their totals."""

    def __init__(self, client: LedgerClient, ledger: ChainLedger, pool: OffloadPool) -> None:
        self._client = client
        self._ledger = ledger
        self._pool = pool
        self.content = _Content()

    async def groups(self) -> AsyncIterator[Sequence[EntryGroup]]:
        """Yield parts of about 1 MiB, from entry 0 to the recorded end. The next part is read while one is being uploaded."""
        ledger_id, entries = self._ledger.ledger_id, self._ledger.entries or 0
        reader = await self._client.open_reader(ledger_id)
        check_end(ledger_id, entries, reader.known_end)

        async def read(first: int, paced_bytes: int) -> list[EntryGroup]:
            await self._pool.pace(paced_bytes)
            return await reader.read(first, min(entries, first + _READ_ENTRIES) - 1, max_bytes=_READ_BYTES)

        first = size_bytes = 0
        reading: asyncio.Future[list[EntryGroup]] | None = None
        try:
            while first < entries:
                groups = await (reading or read(first, size_bytes))
                for group in groups:
                    assert group.first_entry_id == first, f"{reader!r} gave {group!r} where entry {first} was expected"
                    self._count(group)
                    first = group.last_entry_id + 1
                size_bytes = sum(group.size_bytes for group in groups)
                reading = asyncio.ensure_future(read(first, size_bytes)) if first < entries else None
                yield groups
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
                if not reading.cancelled():
                    reading.exception()  # retrieved, so that asyncio does not log it

    def _count(self, group: EntryGroup) -> None:
        view, start, digests = memoryview(group.data), HEADER_BYTES - 4, bytearray()
        for end in group.ends:
            digests += view[start : start + 4]
            start = end + HEADER_BYTES - 4
        before = self.content
        self.content = _Content(
            before.entries + len(group.ends),
            before.entry_bytes + len(view) - HEADER_BYTES * len(group.ends),
            crc32c(digests, before.crc32c),
        )


def _concerns_one_ledger(error: Exception) -> bool:
    """Return whether the error concerns only this ledger: the bookies lack part of it, or it cannot become an object."""
    return isinstance(error, LedgerError | SegmentNotWrittenError) or (isinstance(error, SegmentError) and not error.retriable)


def _content_of(summary: SegmentSummary) -> _Content:
    return _Content(summary.entries, summary.entry_bytes, summary.crc32c)
