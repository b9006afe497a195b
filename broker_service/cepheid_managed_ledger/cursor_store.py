"""Saves a topic's durable cursors.

    dirty cursors ──round──► encode ──┬── small: state inline in the cursor's record ──────────────┬──► one multi with a check
                                      └── large: snapshot in the topic's cursor ledger ──► record ─┘    of the chain's version
                                                                     only if it names another ledger than before

Rules:
1. A round saves the whole of everything that is dirty when it starts; a caller that waits joins the next round. Only one round runs
   at a time. If no cursor ledger can be written, the round saves the cursors that need none.
2. A saved state is replaced, never patched: the newest durable one counts.
3. A record names a cursor ledger only after the cursor's state is durable there. A ledger that no record names any more enters the
   chain's deletion queue in the same write that removed the last name.
4. A reset raises the generation and is durable before it is visible; acknowledgements received meanwhile are void.
5. Positions for cursors and ledgers to trim are chosen under one lock: a new cursor never points into a ledger being removed.
6. The previous owner is shut out before anything is read: the chain was taken over (its saves check the chain's version), and
   recovery closes the cursor ledger that it may be writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from cepheid_ledger import LedgerClient, LedgerError
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.conditional_write import MAX_PAUSE_S
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_flusher import CursorFlusher
from cepheid_managed_ledger.cursor_ledgers import CursorLedgers
from cepheid_managed_ledger.cursor_state import encode_state
from cepheid_managed_ledger.errors import (
    CursorExistsError,
    ManagedLedgerClosedError,
    ManagedLedgerFencedError,
    NoSuchCursorError,
    TooManyCursorsError,
)
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.saved_cursor import CursorSave, SavedCursor, recover_cursors
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Chain, CursorRecord, MetadataStore, Op, Position, StoreUnavailableError, cursor_records
from cepheid_ports import CepheidError, Ports, TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

T = TypeVar("T")

_WRITE_BYTES = 128 << 10  # records in one multi: about 500, encoded in 5 ms; a request is limited to 1 MB
_CURSORS_IN_ONE_GO = 50  # processed in less than a millisecond, then other tasks run


class CursorStore:
    def __init__(
        self,
        topic: TopicName,
        store: MetadataStore,
        keeper: ChainKeeper,
        client: LedgerClient,
        ledgers: LedgerList,
        flusher: CursorFlusher,
        config: Callable[[], ManagedLedgerConfig],
        settings: ManagedLedgerSettings,
        ports: Ports,
        positions: asyncio.Lock,
        on_saved: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._topic = topic
        self._store = store
        self._records = cursor_records(store)
        self._keeper = keeper
        self._client = client
        self._ledgers = ledgers
        self._flusher = flusher
        self._settings = settings
        self._ports = ports
        self._positions = positions
        self._on_saved = on_saved
        self._on_error = on_error
        self._tasks = TaskOwner(f"cursors {topic}", on_error)
        self._saved: dict[str, SavedCursor] = {}
        self._dirty: dict[str, SavedCursor] = {}
        self._cursor_ledgers = CursorLedgers(topic, lambda: keeper.chain, client, config, settings)
        self._writing = asyncio.Lock()
        self._next_round: asyncio.Future[None] | None = None
        self._running = False
        self._closed = False
        self.on_created: Callable[[Cursor], None] = lambda _: None
        self.on_deleted: Callable[[Cursor], None] = lambda _: None
        self.on_reset: Callable[[Cursor], None] = lambda _: None
        """Called when a reset is done, also if its caller has given up because the store was unavailable."""
        self.failure: Exception | None = None
        """Why the last round of saves failed; None: it saved everything."""
        self.rounds = 0
        self.rewound = 0

    def __repr__(self) -> str:
        return f"<CursorStore {self._topic}: {len(self._saved)} cursors, {len(self._dirty)} dirty, {self._cursor_ledgers!r}>"

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def cursors(self) -> Iterable[Cursor]:
        return [saved.cursor for saved in self._saved.values()]

    @property
    def by_name(self) -> Mapping[str, Cursor]:
        return {name: saved.cursor for name, saved in self._saved.items()}

    @property
    def ledger_ids(self) -> Mapping[str, int]:
        """The cursor ledger of each cursor whose state is in one."""
        found = {name: saved.record.cursor_ledger_id for name, saved in self._saved.items()}
        return {name: ledger_id for name, ledger_id in found.items() if ledger_id is not None}

    @property
    def saved_mark_deletes(self) -> list[Position]:
        """The durable mark-delete positions, which trimming relies on."""
        return [saved.mark_delete for saved in self._saved.values()]

    async def recover(self) -> None:
        """Load the cursors and delete records of an earlier incarnation, after the previous owner is shut out (rule 6)."""
        incarnation = self._keeper.chain.incarnation
        recovered = await recover_cursors(self._topic, incarnation, self._store, self._client, self._ledgers, self)
        self._saved, self.rewound = recovered.saved, recovered.rewound
        self._cursor_ledgers.remember(self._named_ledgers({}))
        try:
            if recovered.beyond:
                await self._save(recovered.beyond)
            if recovered.stale:
                stale = [self._records.delete_op((self._topic, name), version) for name, version in recovered.stale.items()]
                await self._keeper.commit(lambda _: (None, stale))
        except BaseException:  # the opening fails or is cancelled: no one else closes what this started
            await self._cursor_ledgers.aclose()
            raise

    # Called by cursors

    def on_changed(self, cursor: Cursor) -> None:
        saved = self._saved.get(cursor.name)
        if saved is not None and cursor.name not in self._dirty and not self._closed:
            self._dirty[cursor.name] = saved
            self._flusher.note(self)

    async def wait_saved(self, cursor: Cursor) -> None:
        saved = self._saved.get(cursor.name)
        if saved is None or saved.cursor is not cursor:
            raise NoSuchCursorError(f"{self._topic} has no cursor {cursor.name} any more", cursor=cursor.name)
        if saved.is_dirty:
            generation, revision = saved.record.generation, cursor.revision
            try:
                await self._save_in_time(saved)
            except Exception:
                if saved.record.generation == generation and saved.revision < revision:
                    raise  # otherwise another cursor's save failed: this one is saved, or was reset

    async def _save_in_time(self, saved: SavedCursor) -> None:
        """Save a cursor that a client waits for. A short outage of the metadata store costs the client time, not an error."""
        pause_s = self._settings.metadata_retry_s
        try:
            async with asyncio.timeout(self._settings.metadata_timeout_s):
                while True:
                    self._dirty[saved.cursor.name] = saved
                    try:
                        return await self._join_round()
                    except StoreUnavailableError:
                        await asyncio.sleep(pause_s)
                        pause_s = min(MAX_PAUSE_S, pause_s * 2)
        except TimeoutError:
            raise self._not_in_time("acknowledgements") from None

    def _not_in_time(self, what: str) -> StoreUnavailableError:
        waited = f"{self._topic}: {what} could not be saved within {self._settings.metadata_timeout_s} s, and may be yet"
        message = f"{waited}; the metadata store is away, or the bookies that large states of cursors go to"
        return StoreUnavailableError(message, outcome_unknown=True, topic=str(self._topic))

    async def reset(self, cursor: Cursor, position: Position, unacked_words: Sequence[int]) -> None:
        await self._alone("reset-cursor", partial(self._reset, cursor.name, position, unacked_words), positions=True)

    async def set_properties(self, cursor: Cursor, properties: Mapping[str, str]) -> None:
        await self._alone("set-properties", partial(self._set_properties, cursor.name, properties))

    # Called by the managed ledger

    async def create(self, name: str, mark_delete: Position, properties: Mapping[str, str]) -> Cursor:
        return await self._alone("create-cursor", partial(self._create, name, mark_delete, properties), positions=True)

    async def delete(self, name: str) -> None:
        await self._alone("delete-cursor", partial(self._delete, name))

    async def save_all(self) -> None:
        """Save everything that is dirty. Raises the errors of the stores."""
        if self._dirty:
            await self._join_round()

    async def save_dirty(self) -> None:
        """Save everything that is dirty, for the flusher."""
        try:
            await self.save_all()
        except Exception as error:  # defects were reported to `on_error`; other topics are saved in the same pass
            log.warning("cursor.save_failed", extra={"topic": str(self._topic), "error": str(error)})

    async def aclose(self) -> None:
        """Save what is dirty if that is still possible, and close the cursor ledger."""
        if self._closed:
            return
        self._closed = True
        self._flusher.forget(self)
        if self._next_round is not None:
            await asyncio.wait([self._next_round])
        async with self._writing:  # after everything that was started
            if self._dirty and (error := await self._round()) is not None:
                log.warning("cursor.save_failed", extra={"topic": str(self._topic), "error": str(error)})
        await self._tasks.aclose()
        if isinstance(self._keeper.lost, ManagedLedgerFencedError):
            await self._cursor_ledgers.delete_unnamed(self._named_ledgers({}))
        await self._cursor_ledgers.aclose()

    # Rounds

    async def _join_round(self) -> None:
        self._check_open()
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().create_future()
            if not self._running:
                self._running = True
                self._tasks.start(self._run_rounds(), name="rounds")
        await asyncio.shield(self._next_round)

    def _check_open(self) -> None:
        if self._closed:
            raise ManagedLedgerClosedError(f"{self._topic} is closed", topic=str(self._topic))

    async def _run_rounds(self) -> None:
        try:
            while (joined := self._next_round) is not None:
                async with self._writing:
                    self._next_round = None
                    outcome = await self._round()
                if outcome is None:
                    joined.set_result(None)
                else:
                    joined.set_exception(outcome)
                    joined.exception()  # no caller waits for a round of the flusher
        finally:
            self._running = False

    async def _round(self) -> Exception | None:
        dirty, self._dirty = self._dirty, {}
        self.rounds += 1
        try:
            await self._save([saved for name, saved in dirty.items() if self._saved.get(name) is saved and saved.is_dirty])
        except Exception as error:
            self._dirty = {**dirty, **self._dirty}
            if self._dirty and not self._closed and self._keeper.lost is None:
                self._flusher.note(self)  # its callers may not ask again, and the flusher may already have run
            if not isinstance(error, CepheidError | TimeoutError):
                self._on_error(error)  # a defect: saving must not stop unnoticed
            self.failure = error
            return error
        self.failure = None
        if dirty:
            self._on_saved()
        return None

    async def _alone(self, name: str, work: Callable[[], Coroutine[Any, Any, T]], *, positions: bool = False) -> T:
        """Run `work` between rounds and to its end. `positions`: also not while a trim decides."""
        self._check_open()

        async def alone() -> T:
            async with self._positions if positions else contextlib.nullcontext(), self._writing:
                return await work()

        try:
            async with asyncio.timeout(self._settings.metadata_timeout_s):
                return await finish(self._tasks, alone(), name=name)
        except TimeoutError:
            raise self._not_in_time(name) from None

    async def _save(self, dirty: Sequence[SavedCursor]) -> None:
        saves = await self._capture(dirty)
        large = [save for save in saves if self._is_large(save)]
        # First those that need no ledger: they are saved even while no ledger can be written.
        await self._save_records([save for save in saves if not self._is_large(save)])
        if large:
            await self._save_records(await self._save_large(large))

    async def _save_records(self, saves: Sequence[CursorSave]) -> None:
        changes: list[tuple[CursorSave, CursorRecord]] = []
        for number, save in enumerate(saves, 1):
            if number % _CURSORS_IN_ONE_GO == 0:
                await asyncio.sleep(0)
            ledger = self._cursor_ledgers.current if self._is_large(save) else None
            record = save.record(self._keeper.chain.epoch, None if ledger is None else ledger.ledger_id)
            if record is None:
                save.note_saved()
            else:
                changes.append((save, record))
        await self._write_records(changes)

    async def _capture(self, cursors: Iterable[SavedCursor]) -> list[CursorSave]:
        saves: list[CursorSave] = []
        for number, saved in enumerate(cursors, 1):
            saves.append(await CursorSave.of(saved))
            if number % _CURSORS_IN_ONE_GO == 0:
                await asyncio.sleep(0)
        return saves

    def _is_large(self, save: CursorSave) -> bool:
        return save.is_large(self._settings.cursor_inline_bytes)

    async def _save_large(self, saves: list[CursorSave]) -> list[CursorSave]:
        """Write snapshots of the large cursors.

        Returns all cursors whose records may change: a new cursor ledger also takes over the cursors of the one before it.
        """
        while True:
            if self._cursor_ledgers.needs_new:
                names = {save.name for save in saves}
                others = [saved for name, saved in self._saved.items() if name not in names]
                saves += await self._capture(saved for saved in others if saved.record.cursor_ledger_id is not None)
                await self._cursor_ledgers.start_new()
            try:
                await self._cursor_ledgers.save([save.snapshot for save in saves if self._is_large(save)])
            except LedgerError:
                continue  # with a new one, if there was one before
            return saves

    async def _write_records(self, changes: Sequence[tuple[CursorSave, CursorRecord]]) -> None:
        start = 0
        while start < len(changes):
            ops: list[Op] = []
            size_bytes, end = 0, start
            while end < len(changes) and size_bytes < _WRITE_BYTES:
                save, record = changes[end]
                op = self._records.replace_op((self._topic, save.name), record, save.saved.version)
                ops.append(op)
                size_bytes += len(op.value)
                end += 1
                if end % _CURSORS_IN_ONE_GO == 0:
                    await asyncio.sleep(0)
            await self._commit(ops, {save.name: record for save, record in changes[start:end]}, retire=end == len(changes))
            for save, record in changes[start:end]:
                save.saved.record = record
                save.saved.version += 1
                save.note_saved()
            start = end

    async def _commit(self, ops: Sequence[Op], changed: Mapping[str, CursorRecord | None], *, retire: bool = True) -> None:
        """Write records, and queue cursor ledgers without a name for deletion (rule 3). `changed`: new records; None: deleted."""
        retired = await self._cursor_ledgers.retire(self._named_ledgers(changed)) if retire else ()

        def plan(chain: Chain) -> tuple[Chain | None, Sequence[Op]]:
            return chain.replace(deletions=chain.deletions + retired) if retired else None, ops

        await self._keeper.commit(plan)
        self._cursor_ledgers.forget(retired)

    def _named_ledgers(self, changed: Mapping[str, CursorRecord | None]) -> dict[int, None]:
        records = {name: saved.record for name, saved in self._saved.items()} | dict(changed)
        return {
            record.cursor_ledger_id: None
            for record in records.values()
            if record is not None and record.cursor_ledger_id is not None
        }

    # Operations that run alone

    async def _create(self, name: str, mark_delete: Position, properties: Mapping[str, str]) -> Cursor:
        if name in self._saved:
            raise CursorExistsError(f"{self._topic} has a cursor {name} already", cursor=name)
        if len(self._saved) >= self._settings.max_cursors:
            message = f"{self._topic} has {len(self._saved)} cursors, the limit is {self._settings.max_cursors}"
            raise TooManyCursorsError(message, cursors=len(self._saved))
        chain = self._keeper.chain
        ack_set = AckSet(self._ledgers, self._ledgers.normalise(mark_delete))
        record = CursorRecord(
            chain_incarnation=chain.incarnation,
            chain_epoch=chain.epoch,
            mark_delete=ack_set.mark_delete,
            subscription_properties=dict(properties),
            created_at_ms=self._ports.wall_ms(),
        )
        await self._keeper.commit(lambda _: (None, [self._records.create_op((self._topic, name), record)]))
        cursor = Cursor(name, ack_set, self._ledgers, self, dict(properties))
        self._saved[name] = SavedCursor(cursor, record, 0)
        self._leave_the_empty_chain(cursor)
        self.on_created(cursor)
        return cursor

    async def _delete(self, name: str) -> None:
        saved = self._known(name)
        await self._commit([self._records.delete_op((self._topic, name), saved.version)], {name: None})
        del self._saved[name]
        self._dirty.pop(name, None)
        self.on_deleted(saved.cursor)
        self._on_saved()  # the cursor may have kept ledgers from being trimmed

    def _known(self, name: str) -> SavedCursor:
        saved = self._saved.get(name)
        if saved is None:
            raise NoSuchCursorError(f"{self._topic} has no cursor {name}", cursor=name)
        return saved

    async def _reset(self, name: str, position: Position, unacked_words: Sequence[int]) -> None:
        saved = self._known(name)
        ack_set = AckSet.starting_at(self._ledgers, position, unacked_words)
        sequence_ids = saved.cursor.sequence_ids
        record = saved.record.replace(
            mark_delete=ack_set.mark_delete,
            state=encode_state(ack_set, sequence_ids=sequence_ids),
            cursor_ledger_id=None,
            generation=saved.record.generation + 1,
            chain_epoch=self._keeper.chain.epoch,
        )
        await self._commit([self._records.replace_op((self._topic, name), record, saved.version)], {name: record})
        saved.record, saved.version = record, saved.version + 1
        saved.cursor.restart(ack_set)
        saved.revision, saved.mark_delete = saved.cursor.revision, ack_set.mark_delete
        self._dirty.pop(name, None)
        self._leave_the_empty_chain(saved.cursor)
        self.on_reset(saved.cursor)
        if saved.cursor.sequence_ids is not sequence_ids:  # set meanwhile: the record written does not have them
            saved.cursor.set_sequence_ids(saved.cursor.sequence_ids)
        self._on_saved()

    def _leave_the_empty_chain(self, cursor: Cursor) -> None:
        """Move the cursor to the topic's first ledger if that was created while the record was written, as for all other
        cursors."""
        cursor.leave_trimmed(self._ledgers.first_position)

    async def _set_properties(self, name: str, properties: Mapping[str, str]) -> None:
        saved = self._known(name)
        record = saved.record.replace(subscription_properties=dict(properties), chain_epoch=self._keeper.chain.epoch)
        await self._commit([self._records.replace_op((self._topic, name), record, saved.version)], {name: record})
        saved.record, saved.version = record, saved.version + 1
        saved.cursor.properties = dict(properties)
