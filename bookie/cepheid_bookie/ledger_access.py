"""First contact, master key, fence, explicit LAC: everything about a ledger that is not an entry.

Rule 1: a fence is durable before anything is answered, including negative answers and unknown ledgers.
Rule 2: there is no await between a check and the act that relies on it: an add sees the fence, or was admitted before it.
Rule 3: the first caller sets the ledger's master key; any other key is refused from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cepheid_bookie.journal import Journal
from cepheid_bookie.journal_format import encode_ledger_to
from cepheid_bookie.ledger_table import LedgerState, LedgerTable
from cepheid_rpc import MASTER_KEY_BYTES, Buffer, Status

log = logging.getLogger(__name__)


class LedgerAccess:
    """First contact, fences and explicit LACs of ledgers.

    `is_serving` is checked again after every wait; `on_changed` is called for every ledger whose record became durable.
    """

    def __init__(
        self,
        ledgers: LedgerTable,
        journal: Journal,
        is_serving: Callable[[], bool],
        on_changed: Callable[[int], None],
    ) -> None:
        self._ledgers = ledgers
        self._journal = journal
        self._is_serving = is_serving
        self._on_changed = on_changed
        self.fences = 0

    async def contact(
        self, ledger_id: int, master_key: bytes, *, fence: bool = False, create: bool = False
    ) -> tuple[Status, LedgerState | None]:
        """Return the ledger's state after key check and, if asked, durable fence; or None and the reason."""
        while (state := self._ledgers.get(ledger_id)) is None:
            if not self._is_serving():
                return Status.STOPPED, None
            if not 0 <= ledger_id < 1 << 63 or len(master_key) != MASTER_KEY_BYTES:
                return Status.BAD_REQUEST, None
            if self._ledgers.may_know(ledger_id):
                if (status := await self.look_up(ledger_id)) is not None:
                    return status, None
            elif fence or create:
                self._ledgers.create(ledger_id, master_key)
            else:
                return Status.NO_LEDGER, None
        if not self._is_serving():
            return Status.STOPPED, None
        if state.master_key != master_key:
            return Status.UNAUTHORIZED, None
        if fence and (status := await self._fence(state)) is not Status.OK:
            return status, None
        return (Status.NO_LEDGER, None) if state.deleted else (Status.OK, state)

    async def find(self, ledger_id: int) -> tuple[Status, LedgerState | None]:
        """Return the ledger's state for a reader that was not authorized by the master key; or None and the reason."""
        while (state := self._ledgers.get(ledger_id)) is None:
            if not self._is_serving():
                return Status.STOPPED, None
            if not self._ledgers.may_know(ledger_id):
                return Status.NO_LEDGER, None
            if (status := await self.look_up(ledger_id)) is not None:
                return status, None
        if not self._is_serving():
            return Status.STOPPED, None
        return (Status.NO_LEDGER, None) if state.deleted else (Status.OK, state)

    async def look_up(self, ledger_id: int) -> Status | None:
        """Find out whether a ledger that is not listed yet exists. A status other than None: this cannot be determined now."""
        try:
            await asyncio.shield(self._ledgers.load(ledger_id))  # other callers wait for it too
        except Exception as error:  # any error of the database: the ledger is unknown, not absent
            log.error("ledger.load_failed", extra={"ledger_id": ledger_id, "error": repr(error)})
            return Status.IO_ERROR
        return None if self._is_serving() else Status.STOPPED

    async def raise_lac(self, state: LedgerState, last_add_confirmed: int) -> Status:
        """Make the explicit LAC durable; one below the known LAC changes nothing."""
        if last_add_confirmed <= state.explicit_lac and not (state.dirty or state.flushing):
            return Status.OK
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        return await self._save(state)

    async def _fence(self, state: LedgerState) -> Status:
        """Admit no regular add from this step on; return OK once the fence is durable."""
        if not state.fenced:
            state.fenced = True
            self.fences += 1
            log.debug("ledger.fenced", extra={"ledger_id": state.ledger_id, "entry_id": state.last_entry_id})
        return Status.OK if state.fence_durable else await self._save(state)

    async def _save(self, state: LedgerState) -> Status:
        """Journal the ledger's record and wait for the sync; the index follows at the next checkpoint."""
        self._ledgers.mark_dirty(state)
        synced: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        fenced = state.fenced

        def on_synced(outcome: Status) -> None:
            if outcome is Status.OK and fenced:
                state.fence_durable = True
            if not synced.done():  # the caller may have been cancelled; the fence stays
                synced.set_result(outcome)
            self._on_changed(state.ledger_id)

        parts: list[Buffer] = []
        size = encode_ledger_to(parts, state.ledger_id, state.record())
        self._journal.append(parts, size, on_synced)
        return await synced
