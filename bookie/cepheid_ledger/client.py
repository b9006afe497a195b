"""Creates, recovers, reads and deletes ledgers. There is one client per process, with a channel to each bookie.

create ──► LedgerWriter ──close──► closed         recover ──► closed, even if the writer is gone
                                                  open_reader ──► LedgerReader, without recovery
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from cepheid_ledger.bookie_channel import BookieChannel, ChannelStatistics
from cepheid_ledger.change_slots import ChangeSlots, EnsembleChangeStatistics
from cepheid_ledger.departures import Departures
from cepheid_ledger.entry_copy import CopyBudget, CopyReport, CopyTask, Run, copy_entries, runs_not_stored
from cepheid_ledger.errors import (
    EntryUnavailableError,
    InvalidQuorumsError,
    LedgerClientClosedError,
    NoSuchLedgerError,
    RecoveryFailedError,
    TailDamagedError,
)
from cepheid_ledger.idle_writers import IdleWriters
from cepheid_ledger.ledger_reader import LedgerReader
from cepheid_ledger.ledger_writer import ClosedLedger, LedgerWriter
from cepheid_ledger.metadata_loop import LedgerRecords, read_ledger, to_check_always
from cepheid_ledger.placement import Placement
from cepheid_ledger.recovery import FoundEnd, Recovery
from cepheid_ledger.recovery_from_one import RecoveryFromOne, RecoveryPreview
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.verification import Finding, verify_ledger
from cepheid_metadata import (
    UNDELETED,
    BadVersionError,
    Create,
    DeletedLedgers,
    Found,
    Fragment,
    KeyExistsError,
    LedgerIds,
    LedgerMetadata,
    LedgerState,
    NoSuchKeyError,
    StoreUnavailableError,
    repair_views,
)
from cepheid_ports import CepheidError, Ports, SingleFlight, TaskOwner
from cepheid_rpc import BookieConnection

log = logging.getLogger(__name__)

_PASSWORD_BYTES = 16
_TOKEN_BITS = 63
_SETTLE_S = 2.0
_MARKS_AT_ONCE = 64


class BookieConnections(Protocol):
    """The source and owner of connections to bookies."""

    def get(self, bookie_id: str) -> BookieConnection:
        """Return the present connection. Called for each stream and request. Raises BookieUnavailableError for an unknown
        bookie."""


class BookieStates(Protocol):
    """The state of the cluster's bookies, as far as this process knows it."""

    def writable(self) -> Sequence[str]:
        """Return the ids of the bookies that accept new ledgers."""

    def registered(self) -> Collection[str]:
        """Return the ids of the bookies that run, writable or not."""

    def expected(self) -> Collection[str]:
        """Return the ids of the bookies that should run: those with a cookie in metadata, and those that run."""

    def draining(self) -> Collection[str]:
        """Return the ids of the bookies that are being decommissioned. They accept no new ledgers."""

    def racks(self) -> Mapping[str, str]:
        """Return the racks of the bookies, by id, as far as they report them."""

    def free_bytes(self) -> Mapping[str, int]:
        """Return the free space of the bookies' data disks, by id, as far as they report it."""

    def problems(self) -> list[str]:
        """Return a sentence for the operator about each bookie that accepts no new ledgers."""


class NewLedger(NamedTuple):
    """A ledger that exists once `op` is written. Created by `LedgerClient.prepare`."""

    record: LedgerMetadata
    op: Create


class LedgerClient:
    def __init__(
        self,
        connections: BookieConnections,
        ledger_records: LedgerRecords,
        ledger_ids: LedgerIds,
        placement: Placement,
        settings: LedgerSettings,
        ports: Ports,
        *,
        distance_of: Callable[[str], int] | None = None,
    ) -> None:
        """`distance_of` returns how far away a bookie is: readers ask the nearest ones first. None: all are equally near."""
        self._connections = connections
        self._distance_of = distance_of
        self._records = ledger_records
        self._ids = ledger_ids
        self._placement = placement
        self._settings = settings
        self._ports = ports
        self._channels: dict[str, BookieChannel] = {}
        self._change_slots = ChangeSlots(settings)
        self._idle_writers = IdleWriters(connections.get, settings)
        self._recovery_slots = asyncio.Semaphore(settings.recoveries)
        self._recoveries: SingleFlight[tuple[int, bool], ClosedLedger] = SingleFlight("recoveries", _closed_error)
        # A reader of a ledger that this process writes gets its LAC from the writer.
        self._writers: weakref.WeakValueDictionary[int, LedgerWriter] = weakref.WeakValueDictionary()
        self._departures = Departures(self._writers, settings.unregistered_bookie_s)
        self._copy_budget = CopyBudget()
        self._marks = TaskOwner("marks of short ledgers")
        self._mark_slots = asyncio.Semaphore(_MARKS_AT_ONCE)
        self._closed = False

    def __repr__(self) -> str:
        return f"<LedgerClient: {list(self._channels.values())}, {self._recoveries!r}>"

    def statistics(self) -> dict[str, ChannelStatistics]:
        """Return the statistics of the channels, by bookie id."""
        return {bookie: channel.statistics() for bookie, channel in self._channels.items()}

    def ensemble_change_statistics(self) -> EnsembleChangeStatistics:
        return self._change_slots.statistics()

    async def create(
        self,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        custom: Mapping[str, str],
        above: int | None = -1,
    ) -> LedgerWriter:
        """Create a ledger with an id above `above`; None: above all earlier ids. Bookies learn of it with the first entry.

        `custom` names the owner, so that a ledger whose creator died before linking it can be found.
        Raises InvalidQuorumsError, NotEnoughBookiesError, and the errors of the metadata store: then there may be an orphan.
        """
        while True:
            new = await self.prepare(
                ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum, custom=custom, above=above
            )
            if await self._create_record(new):
                return self.begin(new)

    async def prepare(
        self,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        custom: Mapping[str, str],
        above: int | None = -1,
    ) -> NewLedger:
        """Plan a ledger as `create` does, for a caller that writes `op` together with the record that names the ledger.

        Once that is written, `begin` returns the writer. KeyExistsError for `op`: the id is taken, prepare another one.
        Raises InvalidQuorumsError, NotEnoughBookiesError, MetadataError.
        """
        self._check_open()
        if not ensemble_size >= write_quorum >= ack_quorum >= 1:
            message = f"E {ensemble_size}, Qw {write_quorum}, Qa {ack_quorum} do not satisfy E >= Qw >= Qa >= 1"
            raise InvalidQuorumsError(message, ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)
        fragments = (Fragment(first_entry_id=0, ensemble=self._placement.new_ensemble(ensemble_size, write_quorum)),)
        random = self._ports.random
        ledger = LedgerMetadata(
            ledger_id=await self._take_id(above),
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            state=LedgerState.OPEN,
            fragments=fragments,
            last_entry_id=None,
            length_bytes=None,
            password=random.randbytes(_PASSWORD_BYTES),
            creation_token=random.getrandbits(_TOKEN_BITS),
            created_at_ms=self._ports.wall_ms(),
            custom=dict(custom),
        )
        return NewLedger(ledger, self._records.create_op(ledger.ledger_id, ledger))

    def begin(self, new: NewLedger) -> LedgerWriter:
        """Return the writer of a prepared ledger. Call it right after `op` was written, before the record can change."""
        self._check_open()
        shared = self._change_slots, self._idle_writers, self._settings
        found = Found(new.record, 0)
        writer = LedgerWriter(found, self._records, self._channel_of, self._placement, *shared, self._on_short)
        self._writers[new.record.ledger_id] = writer
        return writer

    async def recover(self, ledger_id: int, *, despite_damage: bool = False) -> ClosedLedger:
        """Fence the writer and close the ledger at the end that recovery finds; return the end, also if it was closed before.

        Concurrent callers share one recovery. Raises NoSuchLedgerError, RecoveryFailedError, EntryUnavailableError,
        TimeoutError, and the errors of the metadata store: nothing was decided then, call it again. After a TailDamagedError an
        owner that does not need the ledger's entries from the damaged one on may close it before that entry: `despite_damage`.
        """
        self._check_open()
        return await self._recoveries.run((ledger_id, despite_damage), self._recover)

    async def find_end(self, ledger_id: int) -> FoundEnd:
        """Do all of `recover` but the write that closes the record, for a caller that writes `closing` and `checks` together with
        the record that names the end.

        After a conflict on one of them another process has closed the ledger, or moved copies of it: call `recover`. Raises as
        `recover`.
        """
        self._check_open()
        async with self._recovery_slots:
            return await Recovery(ledger_id, *self._shared_with_recoveries()).find_end()

    async def preview_recovery_from(self, ledger_id: int, bookie: str) -> RecoveryPreview:
        """Return what `recover_from` would do. Changes nothing. Raises NoSuchLedgerError, RecoveryFailedError, MetadataError."""
        self._check_open()
        return await RecoveryFromOne(ledger_id, *self._shared_with_recoveries(), bookie=bookie).preview()

    async def recover_from(self, ledger_id: int, bookie: str, *, at_least: int) -> ClosedLedger:
        """Close the ledger as `recover` does, or else as one bookie has it, because an operator decided so.

        What was confirmed above the end is lost. `at_least`: the ledger does not end below this entry. Raises NoSuchLedgerError,
        RecoveryFailedError: nothing was closed, and the other errors of `recover`.
        """
        try:
            return await self.recover(ledger_id)
        except (RecoveryFailedError, EntryUnavailableError, TimeoutError) as error:
            log.info("ledger.recovery_needs_decision", extra={"ledger_id": ledger_id, "error": str(error)})
        async with self._recovery_slots:
            recovery = RecoveryFromOne(ledger_id, *self._shared_with_recoveries(), bookie=bookie, at_least=at_least)
            end = await recovery.run()
        extra = {"ledger_id": ledger_id, "bookie": bookie, "last_entry_id": end.last_entry_id}
        log.warning("ledger.closed_by_one_bookie", extra=extra)
        return end

    def has_healthy_bookies(self, ensemble_size: int, write_quorum: int) -> bool:
        """Return whether a new ledger would get only bookies that have not failed recently."""
        return self._placement.has_healthy(ensemble_size, write_quorum)

    def on_bookie_back(self, bookie_id: str) -> None:
        """Use a bookie that accepts writes again: ledgers that lack copies need not wait for the end of its quarantine."""
        self._placement.forgive(bookie_id)
        self._departures.stay(bookie_id)
        if (channel := self._channels.get(bookie_id)) is not None:
            channel.reopen_now()
        self._change_slots.retry_now()

    def leave_bookie(self, bookie_id: str, reason: str) -> None:
        """Replace this bookie in every open ledger of the process that sends to it, without waiting for an append.

        For bookies that are gone from metadata or draining. A bookie that still answers stays in a ledger that has no healthy
        spare, so that the ledger keeps its quorum. Call it again while the bookie stays gone: ledgers may be new, and so may
        spares.
        """
        self._departures.leave(bookie_id, reason)

    def on_bookie_gone(self, bookie_id: str) -> None:
        """Leave a bookie, as its directory asks: it is not registered any more, is being decommissioned, or has other disks now.

        The directory calls again while that lasts.
        """
        self.leave_bookie(bookie_id, "it is not registered any more, is being decommissioned, or came back with other disks")

    async def open_reader(self, ledger_id: int) -> LedgerReader:
        """Open a reader that needs no recovery: it reads up to LAC while the ledger is open. Raises NoSuchLedgerError."""
        self._check_open()
        found = await read_ledger(self._records, ledger_id)
        writer = self._writers.get(ledger_id)
        return LedgerReader(
            found.record, self._records, self._connections.get, writer, self._settings, distance_of=self._distance_of
        )

    async def copy_entries(self, task: CopyTask, *, turn: int = 0) -> CopyReport:
        """Bring entries of a finished fragment to bookies that lack them. `turn` spreads reads over replicas.

        Raises CopyFailedError.
        """
        self._check_open()
        shared = self._connections.get, self._channel_of, self._settings, self._copy_budget
        return await copy_entries(task, *shared, turn=turn)

    async def runs_not_stored(self, ledger: LedgerMetadata, position: int, bookie: str, first: int, last: int) -> list[Run]:
        """Return the entries of `first..last` that this bookie should hold as `position` of the ensemble, and has no valid copy of.

        Raises CopyFailedError if the bookie does not answer.
        """
        self._check_open()
        return await runs_not_stored(ledger, position, bookie, first, last, self._connections.get, self._settings)

    async def find_bad_copies(self, ledger: LedgerMetadata) -> list[Finding]:
        """Read every copy of a closed ledger, and return those that are missing, corrupt, or contradicted by the majority."""
        self._check_open()
        assert ledger.last_entry_id is not None, f"ledger {ledger.ledger_id} is not closed"
        report = await verify_ledger(ledger, ledger.last_entry_id, self._connections.get, timeout_s=self._settings.read_timeout_s)
        return report.findings

    def open_writer(self, ledger_id: int) -> LedgerWriter | None:
        """Return the writer of a ledger that this process writes, if there is one."""
        return self._writers.get(ledger_id)

    async def metadata_of(self, ledger_id: int) -> LedgerMetadata:
        """Return the ledger's record. Raises NoSuchLedgerError."""
        return (await read_ledger(self._records, ledger_id)).record

    async def delete(self, ledger_id: int, *, spare_undeleted: bool = False) -> None:
        """Delete the ledger, after recovery if it is not closed, so that no writer can add to it. Raises NoSuchLedgerError.

        For `deletion_grace_s` it can be restored by `undelete`. `spare_undeleted`: a restored ledger stays, for callers that repeat
        deletions that may have been done long ago.
        """
        self._check_open()
        found = await read_ledger(self._records, ledger_id)
        deleted, grace_ms = DeletedLedgers(self._records.store), int(self._settings.deletion_grace_s * 1000)
        while True:
            if spare_undeleted and UNDELETED in found.record.custom:
                log.warning("ledger.undeleted_stays", extra={"ledger_id": ledger_id})
                return None
            if not found.record.is_closed:
                await self._end_before_deletion(ledger_id)
                found = await read_ledger(self._records, ledger_id)
            try:
                return await deleted.delete(found, self._ports.wall_ms(), grace_ms)
            except BadVersionError:
                found = await read_ledger(self._records, ledger_id)
            except NoSuchKeyError:
                raise NoSuchLedgerError(f"ledger {ledger_id} was deleted already", ledger_id=ledger_id) from None

    async def end_for_deletion(self, ledger_id: int) -> None:
        """Close the ledger, so that `delete` needs only metadata. A ledger that was deleted or restored is left as it is.

        Raises RecoveryFailedError, CorruptRecordError and the other errors of recovery: it cannot be deleted now.
        """
        self._check_open()
        try:
            ledger = (await read_ledger(self._records, ledger_id)).record
            if not ledger.is_closed and UNDELETED not in ledger.custom:
                await self._end_before_deletion(ledger_id)
        except NoSuchLedgerError:
            pass

    async def _end_before_deletion(self, ledger_id: int) -> None:
        try:
            await self.recover(ledger_id)
        except TailDamagedError:  # a ledger to be deleted need not be whole
            await self.recover(ledger_id, despite_damage=True)

    async def undelete(self, ledger_id: int) -> LedgerMetadata:
        """Restore a deleted ledger, closed, with all its entries; it belongs to no topic. Raises NoSuchLedgerError.

        Repair checks each of its copies once: what was known to be missing was forgotten with the deletion, and bookies may have
        been lost or decommissioned since.
        """
        self._check_open()
        store = self._records.store
        ledger = await DeletedLedgers(store).undelete(
            ledger_id, self._ports.wall_ms(), together=lambda ledger: to_check_always(store, ledger)
        )
        if ledger is None:
            message = f"ledger {ledger_id} cannot be restored: it was not deleted, or its grace period is over"
            raise NoSuchLedgerError(message, ledger_id=ledger_id)
        return ledger

    async def aclose(self) -> None:
        """Fail what is running. Ledgers stay open in metadata: the owners of writers close them.

        Bookies that lag behind get `_SETTLE_S` to take the last entries of closed ledgers. What they lack after that is marked.
        """
        self._closed = True
        self._departures.close()
        await self._recoveries.aclose()
        await asyncio.gather(*(channel.settle(_SETTLE_S) for channel in self._channels.values()))
        for writer in list(self._writers.values()):
            await writer.aclose()
        self._change_slots.close()
        await self._idle_writers.aclose()
        for channel in self._channels.values():
            await channel.aclose()
        try:
            async with asyncio.timeout(self._settings.metadata_timeout_s):
                await self._marks.wait()
        except TimeoutError:  # all of them together: there may be thousands, and metadata may be away
            log.warning("ledger.not_marked", extra={"ledgers": len(self._marks)})
            await self._marks.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _channel_of(self, bookie_id: str) -> BookieChannel:
        channel = self._channels.get(bookie_id)
        if channel is None:
            channel = self._channels[bookie_id] = BookieChannel(bookie_id, self._connections.get, self._settings)
        return channel

    def _on_short(self, ledger_id: int, bookies: Sequence[str]) -> None:
        self._marks.start(self._mark_short(ledger_id, bookies), name=f"ledger {ledger_id}")

    async def _mark_short(self, ledger_id: int, bookies: Sequence[str]) -> None:
        """Mark a ledger for repair that was closed while bookies lacked entries of it."""
        try:
            async with self._mark_slots, asyncio.timeout(self._settings.metadata_timeout_s):
                await repair_views.mark_damaged(self._records.store, ledger_id, bookies, self._ports.wall_ms())
        except (CepheidError, TimeoutError) as error:  # a sample check of repair may find it later
            log.warning("ledger.not_marked", extra={"ledger_id": ledger_id, "bookies": list(bookies), "error": str(error)})

    async def _take_id(self, above: int | None) -> int:
        return await (self._ids.take(newest=True) if above is None else self._ids.take(above=above))

    async def _create_record(self, new: NewLedger) -> bool:
        """Create the record; return False if another process has taken the id."""
        ledger = new.record
        try:
            await self._records.store.create(new.op.key, new.op.value)
            return True
        except KeyExistsError:
            pass
        except StoreUnavailableError as error:
            if not error.outcome_unknown:
                raise
        # Only the token shows whether the record is ours, written by an attempt whose answer was lost.
        found = await self._records.get(ledger.ledger_id)
        return found is not None and found.record.creation_token == ledger.creation_token

    async def _recover(self, key: tuple[int, bool]) -> ClosedLedger:
        ledger_id, despite_damage = key
        recovery = Recovery(ledger_id, *self._shared_with_recoveries(), despite_damage=despite_damage)
        async with self._recovery_slots:
            return await recovery.run()

    def _shared_with_recoveries(
        self,
    ) -> tuple[LedgerRecords, Callable[[str], BookieConnection], Callable[[str], BookieChannel], Placement, LedgerSettings]:
        return self._records, self._connections.get, self._channel_of, self._placement, self._settings


def _closed_error() -> LedgerClientClosedError:
    return LedgerClientClosedError("the ledger client is closed")
