"""Writes recovered entries back to their bookies (rule 9 of the README).

    push ──► AddPipeline with the recovery flag ──► whole ensemble ──► wait_below(0): Qa bookies hold every entry

One copy is enough to find an entry, so the ledger may end at or after it only once it has its quorum again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.errors import LedgerError, RecoveryFailedError, WriteBackFailedError
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.placement import Placement
from cepheid_ledger.rack_spread import Vacancy
from cepheid_ledger.unconfirmed import KeptBytes
from cepheid_ledger.writer_state import ChangeEnsemble, WriterState
from cepheid_metadata import Fragment, LedgerMetadata
from cepheid_rpc import EntryGroup, EntryHeader


class WriteBack:
    """Writes entries back, and replaces failed bookies only in memory.

    If the change were published early, the next recovery would ask bookies that never had the entries. `fragments` are written
    in the closing compare-and-set.
    """

    def __init__(
        self, ledger: LedgerMetadata, start: int, channel_of: Callable[[str], BookieChannel], placement: Placement
    ) -> None:
        self.fragments: tuple[Fragment, ...] = ()
        self.last_header: EntryHeader | None = None
        self._placement = placement
        self._failure: LedgerError | None = None
        self._waiter: tuple[int, asyncio.Future[None]] | None = None
        self._make_pipeline: Callable[[], AddPipeline] = lambda: AddPipeline(
            ledger.ledger_id,
            WriterState(ledger.last_fragment.ensemble, ledger.ack_quorum, start - 1, write_quorum=ledger.write_quorum),
            channel_of,
            master_key_of(ledger),
            recovery=True,
            kept_bytes=KeptBytes(0),  # a change is decided in the turn in which it starts
            on_change=self._on_change,
            on_failed=self._on_failed,
            on_missed=lambda _: None,  # repair checks every copy of a ledger after its recovery
        )
        self._pipeline: AddPipeline | None = None  # created with the first entry: most recoveries of idle ledgers have none

    def push(self, group: EntryGroup) -> None:
        if self._failure is not None:
            return
        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        self.last_header = group.header(group.last_entry_id)
        self._pipeline.push(group, self._on_done)

    async def wait_below(self, limit_bytes: int) -> None:
        """Wait until at most `limit_bytes` are unconfirmed. Raises WriteBackFailedError."""
        if self._pipeline is not None and self._pipeline.unconfirmed.size_bytes > limit_bytes:
            self._waiter = limit_bytes, asyncio.get_running_loop().create_future()
            try:
                await self._waiter[1]
            finally:
                self._waiter = None
        if self._failure is not None:
            raise WriteBackFailedError(f"recovered entries cannot be written back: {self._failure}") from self._failure

    def close(self) -> None:
        """End at once, unless `leave` was called."""
        if self._pipeline is not None:
            self._pipeline.fail(RecoveryFailedError("the recovery ended"))

    def leave(self) -> None:
        """End once the quorum holds everything; the other bookies still get what is queued for them."""
        if self._pipeline is not None:
            self._pipeline.leave(RecoveryFailedError("the recovery ended"))

    def _on_done(self, outcome: EntryGroup | LedgerError) -> None:
        assert self._pipeline is not None
        if self._waiter is not None and not self._waiter[1].done():
            limit_bytes, future = self._waiter
            if self._failure is not None or self._pipeline.unconfirmed.size_bytes <= limit_bytes:
                future.set_result(None)

    def _on_failed(self, error: LedgerError) -> None:
        self._failure = error

    def _on_change(self, change: ChangeEnsemble) -> None:
        assert self._pipeline is not None
        for old in change.failed:
            self._placement.quarantine(old)
        state = self._pipeline.state
        begun = self._pipeline.begin_change()
        replaced: dict[str, str] = {}
        for old in begun.failed:
            vacancy = Vacancy.of(old, state.ensemble, replaced, state.write_quorum)
            new = self._placement.replacement(state.unusable, replaced.values(), vacancy=vacancy)
            if new is not None:
                replaced[old] = new
        if not replaced:
            self._pipeline.refuse_change()
            return
        ensemble = tuple(replaced.get(bookie, bookie) for bookie in state.ensemble)
        kept = [fragment for fragment in self.fragments if fragment.first_entry_id < begun.from_entry_id]
        self.fragments = (*kept, Fragment(first_entry_id=begun.from_entry_id, ensemble=ensemble))
        self._pipeline.change_ensemble(replaced)
