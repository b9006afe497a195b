"""The cursor ledgers of one topic: the one being written, and those that records of cursors still name.

no ledger ──first large state──► writing ──full, or a write failed──► writing the next one (all states move to it)
a ledger that no record names any more ──► retired: the chain's deletion queue
a new ledger that cannot be written ──► deleted; the pause before the next attempt grows up to MAX_PAUSE_S
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence

from cepheid_ledger import LedgerClient, LedgerError, LedgerWriter
from cepheid_managed_ledger.cursor_ledger import CursorLedger, Snapshot
from cepheid_managed_ledger.errors import CursorLedgerError
from cepheid_managed_ledger.opening import custom_fields, delete_unlinked
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Chain, MetadataError
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0


class CursorLedgers:
    def __init__(
        self,
        topic: TopicName,
        chain: Callable[[], Chain],
        client: LedgerClient,
        config: Callable[[], ManagedLedgerConfig],
        settings: ManagedLedgerSettings,
    ) -> None:
        self._topic = topic
        self._chain = chain
        self._client = client
        self._config = config
        self._settings = settings
        self._current: CursorLedger | None = None
        self._known: dict[int, None] = {}  # ledgers that are not in the deletion queue
        self._is_fresh = False  # nothing is durable in the current one
        self._failures = 0  # of new ledgers, in a row
        self._failed_by: Exception | None = None  # the last failure
        self._not_before = 0.0

    def __repr__(self) -> str:
        return f"<CursorLedgers {list(self._known)}, writing {self._current!r}>"

    @property
    def current(self) -> CursorLedger | None:
        return self._current

    @property
    def needs_new(self) -> bool:
        """Whether the next snapshots need a new ledger, to which the states of all large cursors move."""
        return self._current is None or self._current.size_bytes >= self._settings.cursor_ledger_max_bytes

    def remember(self, ledger_ids: Iterable[int]) -> None:
        """Take the ledgers named by the records found at the opening."""
        self._known.update(dict.fromkeys(ledger_ids))

    async def start_new(self) -> None:
        """Create the next ledger. A full one continues to be used while that fails.

        Raises LedgerError, MetadataError, CursorLedgerError: there is no ledger to write to.
        """
        before = self._current
        try:
            writer = await self._create()
        except (CursorLedgerError, LedgerError, MetadataError, TimeoutError) as error:
            if before is None:
                raise
            log.warning("cursor.ledger_postponed", extra={"topic": str(self._topic), "error": str(error)})
            return
        self._current, self._is_fresh = CursorLedger(writer, self._settings.cursor_part_bytes), True
        self._known[writer.ledger_id] = None
        if before is not None:
            await before.aclose()

    async def _create(self) -> LedgerWriter:
        wait_s = self._not_before - asyncio.get_running_loop().time()
        if wait_s > 0:
            attempt = f"no ledger for cursors could be written; next attempt in {wait_s:.1f} s"
            message = f"{self._topic}: {attempt}: {self._failed_by}"
            raise CursorLedgerError(message, topic=str(self._topic), failures=self._failures)
        config = self._config()
        try:
            return await self._client.create(
                ensemble_size=config.ensemble_size,
                write_quorum=config.write_quorum,
                ack_quorum=config.ack_quorum,
                custom=custom_fields(self._topic, self._chain(), "cursors"),
            )
        except (LedgerError, MetadataError, TimeoutError) as error:
            self._note_failed(error)
            raise

    async def save(self, snapshots: Sequence[Snapshot]) -> None:
        """Write snapshots; they are durable when it returns. Raises LedgerError: `needs_new`; CursorLedgerError: a new one fails
        too."""
        assert self._current is not None, "start_new comes first"
        try:
            await self._current.save(snapshots)
        except LedgerError as error:
            if not self._is_fresh:
                await self.aclose()
                raise
            await self._give_up_fresh(self._current, error)
            message = f"{self._topic}: no ledger for cursors can be written: {error}"
            raise CursorLedgerError(message, topic=str(self._topic), failures=self._failures) from error
        self._is_fresh, self._failures = False, 0

    async def _give_up_fresh(self, current: CursorLedger, error: LedgerError) -> None:
        """Delete a new ledger that certainly no record names."""
        self._current = None
        self._note_failed(error)
        if await delete_unlinked(self._client, current.writer):
            del self._known[current.ledger_id]

    def _note_failed(self, error: Exception) -> None:
        """Set the time of the next attempt. The first retry is immediate: the failure may concern one bookie."""
        self._failed_by = error
        self._failures += 1
        if self._failures > 1:
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 2, 10))
            self._not_before = asyncio.get_running_loop().time() + pause_s

    async def retire(self, named: Container[int]) -> tuple[int, ...]:
        """Return the ledgers that no record names after the write in preparation; `forget` them once it is done."""
        retired = tuple(ledger_id for ledger_id in self._known if ledger_id not in named)
        if self._current is not None and self._current.ledger_id in retired:
            await self.aclose()
        return retired

    def forget(self, ledger_ids: Iterable[int]) -> None:
        """Drop ledgers that are in the deletion queue."""
        for ledger_id in ledger_ids:
            del self._known[ledger_id]

    async def delete_unnamed(self, named: Container[int]) -> None:
        """Delete the present ledger of an owner whose last write certainly failed: no record names it."""
        current = self._current
        if current is not None and current.ledger_id not in named:
            self._current = None
            await delete_unlinked(self._client, current.writer)

    async def aclose(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            await current.aclose()
