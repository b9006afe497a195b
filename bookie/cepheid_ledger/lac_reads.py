"""Reads the LAC of an open ledger from its bookies.

    ask  ──► every bookie of the last fragment, once ──► the largest                        current value
    poll ──► every bookie, parked there until its LAC is higher ──► the first that is       long poll, no traffic while idle

A LAC counts if it is in an entry with a valid digest, or was sent by the writer itself (explicit LAC). It may be late, never
ahead: a bookie that does not answer, or is not sure, only makes it less fresh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from dataclasses import dataclass

from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.replica_read import ConnectionOf
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.striping import write_windows
from cepheid_metadata import LedgerMetadata
from cepheid_rpc import (
    NO_ENTRY_ID,
    BookieUnavailableError,
    DigestMismatchError,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    Status,
)


@dataclass(frozen=True, slots=True)
class ToldLac:
    """A LAC from bookies. `silent`: bookies of the last fragment that did not answer, not even that they have none."""

    last_add_confirmed: int
    silent: tuple[str, ...]


async def ask_lac(ledger: LedgerMetadata, connection_of: ConnectionOf, settings: LedgerSettings) -> ToldLac:
    """Return the largest LAC that a bookie of the last fragment returns, -1 if none does."""
    request = LacRequest(ledger.ledger_id, master_key_of(ledger))
    ensemble = ledger.last_fragment.ensemble
    timeout_s = settings.speculative_read_s
    answers = await asyncio.gather(*(_ask_one(bookie, request, connection_of, timeout_s) for bookie in ensemble))
    silent = tuple(
        bookie
        for bookie, answer in zip(ensemble, answers, strict=True)
        if answer is None or not (answer.status is Status.OK or answer.status.certain_no)
    )
    told = max(NO_ENTRY_ID if answer is None else lac_of(answer, ledger.ledger_id) for answer in answers)
    return ToldLac(told, silent)


def may_hide_entries(ledger: LedgerMetadata, silent: Collection[str]) -> bool:
    """Whether so many bookies are silent that they alone may hold an acknowledged entry."""
    ensemble = ledger.last_fragment.ensemble
    windows = write_windows(ledger.ensemble_size, ledger.write_quorum)
    return any(sum(ensemble[place] in silent for place in window) >= ledger.ack_quorum for window in windows)


async def poll_lac(
    ledger: LedgerMetadata, above: int, changed: Awaitable[None], connection_of: ConnectionOf, settings: LedgerSettings
) -> int:
    """Return a LAC above `above`, or -1 once `changed` is done: the ledger's record has changed."""
    loop = asyncio.get_running_loop()
    polls = [
        loop.create_task(_poll_one(bookie, ledger, above, connection_of, settings)) for bookie in ledger.last_fragment.ensemble
    ]
    watching = asyncio.ensure_future(changed)
    try:
        await asyncio.wait([*polls, watching], return_when=asyncio.FIRST_COMPLETED)
        return max((poll.result() for poll in polls if poll.done()), default=NO_ENTRY_ID)
    finally:
        for task in (*polls, watching):
            task.cancel()
        await asyncio.gather(*polls, watching, return_exceptions=True)


def lac_of(answer: LacAnswer, ledger_id: int) -> int:
    """Return the LAC of an answer, as far as it can be trusted."""
    if answer.status is not Status.OK:
        return NO_ENTRY_ID
    group = answer.highest_entry
    if group is None or group.ledger_id != ledger_id or len(group) != 1:
        return answer.explicit_lac
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        return answer.explicit_lac
    return max(answer.explicit_lac, group.header(group.first_entry_id).last_add_confirmed)


async def _poll_one(bookie: str, ledger: LedgerMetadata, above: int, connection_of: ConnectionOf, settings: LedgerSettings) -> int:
    """Poll repeatedly; pause for a bookie that answers at once (fenced, in limbo, full of readers, down)."""
    loop = asyncio.get_running_loop()
    wait_ms = int(settings.long_poll_s * 1000)
    while True:
        asked_at = loop.time()
        request = LacRequest(ledger.ledger_id, master_key_of(ledger), above=above, wait_ms=wait_ms)
        answer = await _ask_one(bookie, request, connection_of, settings.speculative_read_s + wait_ms / 1000)
        if answer is not None and (lac := lac_of(answer, ledger.ledger_id)) > above:
            return lac
        # An older release, or full of readers: every second request to a bookie that allows no waiting asks without it.
        refused = answer is None or answer.status is Status.OVERLOADED
        wait_ms = 0 if refused and wait_ms > 0 else int(settings.long_poll_s * 1000)
        await asyncio.sleep(max(0.0, asked_at + settings.long_poll_pause_s - loop.time()))


async def _ask_one(bookie: str, request: LacRequest, connection_of: ConnectionOf, timeout_s: float) -> LacAnswer | None:
    """Return the answer; None: there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            return await connection_of(bookie).read_lac(request)
    except (BookieUnavailableError, TimeoutError):
        return None
