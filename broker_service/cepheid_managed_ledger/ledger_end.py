"""Closes a topic's ledger at a known end, which a successor, or the end of the topic, needs first.

writer.close ──► closed at what was answered
    └──fenced, failed──► recover ──► closed where recovery says
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cepheid_ledger import ClosedLedger, LedgerClient, LedgerError, LedgerWriter
from cepheid_managed_ledger.errors import ManagedLedgerError
from cepheid_managed_ledger.settings import ManagedLedgerSettings
from cepheid_metadata import ChainLedger
from cepheid_ports import CepheidError

MAX_PAUSE_S = 1.0


async def end_writer(
    writer: LedgerWriter, client: LedgerClient, settings: ManagedLedgerSettings, insists: Callable[[], bool]
) -> ClosedLedger:
    """Close a ledger whose appends are all answered; return its end.

    Retries while `insists` returns True: an outage of the store or of bookies should not force the topic to be opened again.
    Raises LedgerError, MetadataError, TimeoutError.
    """
    pause_s = settings.metadata_retry_s
    while True:
        try:
            try:
                return await writer.close()
            except LedgerError:  # the writer cannot close it: recovery finds out where it ends
                await writer.aclose()
                return await client.recover(writer.ledger_id)
        except (CepheidError, TimeoutError) as error:
            if not insists() or not is_worth_another_attempt(error):
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, pause_s * 2)


def is_worth_another_attempt(error: Exception) -> bool:
    """Whether to retry recovering, closing, creating or recording a ledger: nothing was decided, and a retry may succeed.

    An error with which a managed ledger failed is final.
    """
    if isinstance(error, ManagedLedgerError):
        return False
    return isinstance(error, TimeoutError) or (isinstance(error, CepheidError) and error.retriable)


def with_end(ledgers: Sequence[ChainLedger], ledger_id: int, end: ClosedLedger, now_ms: int) -> tuple[ChainLedger, ...]:
    """Return the list with the end of its last ledger, which must be this one."""
    ended = [ledger.ledger_id for ledger in ledgers[-1:]]  # empty if the topic never had a ledger
    assert ended == [ledger_id], f"{end} of ledger {ledger_id} is not the end of {ledgers[-1:]}"
    last = ChainLedger(ledger_id=ledger_id, entries=end.last_entry_id + 1, size_bytes=end.length, closed_at_ms=now_ms)
    return (*ledgers[:-1], last)
