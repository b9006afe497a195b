"""The chain record of a topic, as its owner reads and writes it.

    commit(plan) ──mutex──► plan(chain) ──► next chain, or none; further operations ──► one multi ──► version + 1
                                                        └──conflict──► fenced for good

Rules:
1. One mutex for everything that is written for this topic: rollover, trimming, deletion queue, cursors. A cursor is saved
   together with a check of the chain's version, so that an old owner's late save fails instead of overwriting.
   Versions start at 0 again when a topic is deleted and created again. So each chain has a mark, a key that carries its incarnation
   and is created and deleted with it, and every write checks the mark as well: a write by an owner of the earlier chain fails.
   A restore from a backup gives the mark a version that it never had, so that writes by an owner from before fail as well.
2. A conflict means that another opening of the topic has committed: never re-read and retry.
3. The keeper has the whole chain in memory. Of a long chain, a write carries the record and those pages that change
   (`cepheid_metadata.chain_pages`), all in one `multi`: the record's version decides, and pages need no check of their own.
4. A write that has started is finished even if its caller is cancelled: otherwise its outcome would be unknown. While an outage
   leaves that open, an open topic holds the mutex and continues without its records: callers that need them wait, up to a limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cepheid_managed_ledger.conditional_write import CONFLICTS, write
from cepheid_managed_ledger.errors import ManagedLedgerError, ManagedLedgerFailedError, ManagedLedgerFencedError
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.settings import ManagedLedgerSettings
from cepheid_metadata import (
    Chain,
    ChainLedger,
    Check,
    Create,
    Delete,
    MetadataStore,
    Op,
    PageLimits,
    Put,
    SessionLostError,
    StoreClosedError,
    StoredChain,
    StoreUnavailableError,
    chain_records,
    keys,
)
from cepheid_metadata.chain_pages import (
    LIMITS,
    MAX_CHANGE_BYTES,
    changes,
    page_deletes,
    read_stored_chain,
    size_bytes_of,
    split,
)
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_NEAR = 0.8
"""Share of a limit from which a topic reports that it is close to it."""

Plan = Callable[[Chain], tuple[Chain | None, Sequence[Op]]]
"""Takes the present chain; returns the next one (None: unchanged) and what else is written in the same step."""


_ADOPTED = b"adopted"
"""Value of the mark of a chain that an older release created.

When the chain is deleted the mark stays, written once more: an owner that read the chain before it had a mark cannot create the
mark again, and an owner that checks the version as adopted fails.
"""


class ChainKeeper:
    def __init__(
        self,
        store: MetadataStore,
        topic: TopicName,
        tasks: TaskOwner,
        settings: ManagedLedgerSettings,
        on_lost: Callable[[ManagedLedgerError], None],
        limits: PageLimits = LIMITS,
    ) -> None:
        self._store = store
        self._records = chain_records(store)
        self._key = self._records.key_of(topic)
        self._topic = topic
        self._tasks = tasks
        self._settings = settings
        self._on_lost = on_lost
        self._limits = limits
        self._chain: Chain | None = None
        self._stored: StoredChain | None = None
        self._version = -1
        self._has_mark = self._mark_stays = False
        self._mark_version = 0
        self._gone: dict[int, None] = {}
        self._mutex = asyncio.Lock()
        self.lost: ManagedLedgerError | None = None
        self.near_limit: str | None = None
        """The limit that the chain's records are close to, with numbers; None: none."""
        self.is_patient = False
        """Whether a write of unknown outcome waits for the store while the session may live, not only for `metadata_timeout_s`."""
        self.on_ledgers: Callable[[Sequence[ChainLedger]], None] = lambda _: None
        """Called with the committed ledgers in the same step, so that a caller's list of them is always current."""
        self.annotate: Callable[[Chain], Chain] = lambda chain: chain
        """Adds to a chain that is about to be written what else is known about its ledgers."""
        self.check: Callable[[], None] = lambda: None
        """Called in the step in which a write starts; raises if this broker may not write to the topic any more."""

    def __repr__(self) -> str:
        return f"<ChainKeeper {self._topic} version {self._version}{' lost' if self.lost else ''}>"

    @property
    def chain(self) -> Chain:
        assert self._chain is not None, f"{self._topic} has no chain yet"
        return self._chain

    async def load(self) -> Chain | None:
        """Return the chain; None: there is none. Raises MetadataError."""
        while (found := await read_stored_chain(self._store, self._topic)) is not None:
            stored, version = found
            mark = await self._store.get(keys.incarnation_key(stored.chain.incarnation))
            if mark is None or mark.version:  # the chain is of an older release, was restored, or was deleted since it was read
                again = await self._records.get(self._topic)
                if again is None or again.record.incarnation != stored.chain.incarnation:
                    continue
            self._chain, self._stored, self._version = stored.chain, stored, version
            self._has_mark, self._mark_stays = mark is not None, mark is None or mark.value == _ADOPTED
            self._mark_version = 0 if mark is None else mark.version
            break
        return self._chain

    @property
    def page_keys(self) -> list[str]:
        """The keys of the pages that the record names."""
        assert self._stored is not None, f"{self._topic} has no chain yet"
        return [keys.chain_page_key(self._key, ref.number) for ref in self._stored.refs]

    @property
    def has_most_ledgers(self) -> bool:
        """Whether the chain has as many ledgers as a chain may have."""
        return len(self.chain.ledgers) >= self._limits.most_ledgers

    @property
    def is_new(self) -> bool:
        """Whether there was no record, and none was created."""
        return self._chain is None

    async def begin(self, chain: Chain) -> None:
        """Create the record that `load` did not find. Raises as `commit` does."""

        async def begin() -> None:
            async with self._mutex:
                mark = Create(keys.incarnation_key(chain.incarnation), str(self._topic).encode())
                # Not retried in doubt: another broker may have deleted it by then, and a new record would start its versions again.
                await self._write([self._records.create_op(self._topic, chain), mark], repeats=False)
                self._chain, self._stored, self._version, self._has_mark = chain, StoredChain(chain, chain), 0, True

        await finish(self._tasks, begin(), name="begin-chain")

    async def take_over(self, chain: Chain, ledgers: Sequence[Op] = ()) -> None:
        """Commit the chain of an opening, unless another process has committed since `load` or `begin`. Raises as `commit` does.

        `ledgers`: writes to the records of ledgers that are closed or created with this commit, which others may have changed.
        Raises one of CONFLICTS for those: nothing was written, and the chain is unchanged. Do not cancel it (rule 4).
        """
        async with self._mutex:
            await self._replace(chain, ledgers, shared=len(ledgers))

    async def commit(self, plan: Plan) -> None:
        """Write the chain that `plan` returns, with its operations.

        Raises ManagedLedgerFencedError; ManagedLedgerFailedError if the outcome stays unknown, which also ends this opening;
        StoreUnavailableError and other MetadataErrors: nothing was written.
        """

        async def commit() -> None:
            async with self._mutex:
                chain, ops = plan(self._swept())
                if chain is not None and chain != self._chain:
                    await self._replace(self.annotate(chain), ops)
                elif ops:
                    await self._write([Check(self._key, self._version), *ops, self._check_mark()])

        await finish(self._tasks, commit(), name="commit")

    async def verify(self) -> None:
        """Check that no other opening has taken the topic over. Raises as `commit` does."""
        await self.commit(lambda _: (None, (Check(self._key, self._version),)))

    def note_deleted(self, ledger_id: int) -> None:
        """Note that a ledger of the deletion queue is deleted; the next write removes it from the queue."""
        self._gone[ledger_id] = None

    def waiting_deletions(self) -> list[int]:
        """Return the ledgers of the deletion queue that are not deleted yet."""
        return [ledger_id for ledger_id in self.chain.deletions if ledger_id not in self._gone]

    async def delete(self) -> None:
        """Delete the record itself, which ends the topic's chain."""

        async def delete() -> None:
            async with self._mutex:
                # The mark comes first: it decides about a write in doubt, and the chain may have been created again by then.
                key, version = self._mark_key, self._mark_version
                mark: Op = Put(key, _ADOPTED, version) if self._mark_stays else Delete(key, version)
                assert self._stored is not None, f"{self._topic} has no chain to delete"
                pages = page_deletes(self._key, self._stored)  # in the same write: a key with children cannot be deleted
                await self._write([mark, *pages, self._records.delete_op(self._topic, self._version)])

        await finish(self._tasks, delete(), name="delete-chain")

    def _swept(self) -> Chain:
        if not self._gone:
            return self.chain
        return self.chain.replace(deletions=tuple(self.waiting_deletions()))

    async def _replace(self, chain: Chain, ops: Sequence[Op], *, shared: int = 0) -> None:
        assert self._stored is not None, f"{self._topic} has no chain to change"
        stored = split(chain, self._stored, self._limits)
        change = changes(self._key, self._version, self._stored, stored)
        # The record's Put comes first: it decides about a write in doubt, and tells a fenced owner so before anything else.
        await self._write([*change, self._check_mark(), *ops], shared=shared)
        self._chain, self._stored, self._version, self._has_mark = chain, stored, self._version + 1, True
        self._look_at_limits(size_bytes_of(change))
        self.on_ledgers(chain.ledgers)
        self._gone = {ledger_id: None for ledger_id in self._gone if ledger_id in chain.deletions}

    def _look_at_limits(self, written_bytes: int) -> None:
        before, count, most = self.near_limit, len(self.chain.ledgers), self._limits.most_ledgers
        self.near_limit = None
        if count >= _NEAR * most:
            self.near_limit = f"it has {count:,} ledgers; at {most:,} appends stay in the last ledger although it is full"
        elif written_bytes >= _NEAR * MAX_CHANGE_BYTES:
            waiting = f"{len(self.chain.deletions)} ledgers and {len(self.chain.object_deletions or ())} objects wait to be deleted"
            self.near_limit = f"a change of its ledgers took {written_bytes:,} bytes of at most {MAX_CHANGE_BYTES:,}; {waiting}"
        if self.near_limit is not None and before is None:
            hint = (
                "shorten its retention, raise managed_ledger.ledger_max_bytes and ledger_max_age_s, or find why nothing is deleted"
            )
            log.warning("chain.near_limit", extra={"topic": str(self._topic), "error": self.near_limit, "hint": hint})

    @property
    def _mark_key(self) -> str:
        return keys.incarnation_key(self.chain.incarnation)

    def _check_mark(self) -> Op:
        return Check(self._mark_key, self._mark_version) if self._has_mark else Create(self._mark_key, _ADOPTED)

    async def _write(self, ops: Sequence[Op], *, repeats: bool = True, shared: int = 0) -> None:
        """Write `ops`. `shared`: the number of operations at the end that write to records shared with others."""
        if self.lost is not None:
            raise self.lost
        self.check()
        try:
            await write(self._store, ops, self._settings, lambda: self.is_patient, repeats=repeats)
        except CONFLICTS as error:
            if error.op_index is not None and error.op_index >= len(ops) - shared:
                raise
            message = f"{self._topic} was opened by another broker: {error}"
            self._lose(ManagedLedgerFencedError(message, topic=str(self._topic)), error)
        except StoreUnavailableError as error:
            if not error.outcome_unknown:
                raise
            message = f"{self._topic}: the outcome of a write to its records is unknown"
            self._lose(ManagedLedgerFailedError(message, topic=str(self._topic)), error)
        except (SessionLostError, StoreClosedError) as error:  # the outcome can no longer be found out
            message = f"{self._topic}: the session with the metadata store ended"
            self._lose(ManagedLedgerFailedError(message, topic=str(self._topic)), error)

    def _lose(self, lost: ManagedLedgerError, cause: Exception) -> None:
        lost.__cause__ = cause
        self.lost = lost
        self._on_lost(lost)
        raise lost
