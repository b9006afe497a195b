"""Changes a ledger's metadata by compare-and-set until the outcome is known.

    known ──plan──► put ──► done
      ▲               ├── bad version ──► re-read ─┐
      └───────────────┴── outcome unknown ─────────┘      a plan that finds its own change in place returns None

Rules:
1. A plan decides again for every value it gets ("does this still need my change?"), so that repeating is harmless.
2. A record that is to be created with the change is left out if it exists already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from cepheid_ledger.errors import NoSuchLedgerError
from cepheid_ledger.settings import LedgerSettings
from cepheid_metadata import (
    BadVersionError,
    Create,
    Found,
    KeyExistsError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    Records,
    StoreUnavailableError,
    UncheckedLedger,
    unchecked_ledgers,
)

LedgerRecords: TypeAlias = Records[int, LedgerMetadata]
FoundLedger: TypeAlias = Found[LedgerMetadata]
Plan: TypeAlias = Callable[[LedgerMetadata], LedgerMetadata | None]


async def read_ledger(records: LedgerRecords, ledger_id: int) -> FoundLedger:
    """Return the ledger's record. Raises NoSuchLedgerError."""
    found = await records.get(ledger_id)
    if found is None:
        raise NoSuchLedgerError(f"ledger {ledger_id} has no metadata", ledger_id=ledger_id)
    return found


def to_check(store: MetadataStore, ledger: LedgerMetadata) -> list[Create]:
    """Return what to write with the end of a ledger, so that repair checks each copy of it once.

    For a ledger of which some bookies may lack copies, and it is unknown which. Nothing needs to be written if no entry can lack
    one: all bookies of its write set have acknowledged it.
    """
    return [] if ledger.write_quorum == ledger.ack_quorum else to_check_always(store, ledger)


def to_check_always(store: MetadataStore, ledger: LedgerMetadata) -> list[Create]:
    """Return what `to_check` returns, also if the ack quorum was the whole write set: bookies may have been lost since."""
    if ledger.last_entry_id is not None and ledger.last_entry_id < 0:
        return []
    return [unchecked_ledgers(store).create_op(ledger.ledger_id, UncheckedLedger(ledger_id=ledger.ledger_id))]


async def change_ledger(
    records: LedgerRecords, known: FoundLedger, plan: Plan, settings: LedgerSettings, *, together: Sequence[Create] = ()
) -> FoundLedger:
    """Return the record that is finally in place. `together` are created in the same write (rule 2).

    Raises what `plan` raises, NoSuchLedgerError, TimeoutError, MetadataError.

    After TimeoutError, StoreClosedError, and an error with `outcome_unknown`, the change may be in force, or may still come
    into force.
    """
    doubtful_version: int | None = None  # an attempt on this version has an unknown outcome; on another it is decided
    async with asyncio.timeout(settings.metadata_timeout_s):
        while True:
            changed = plan(known.record)
            if changed is None:
                return known
            ledger_id = changed.ledger_id
            try:
                try:
                    if not together:
                        return Found(changed, await records.replace(ledger_id, changed, known.version))
                    await records.store.multi([records.replace_op(ledger_id, changed, known.version), *together])
                    return Found(changed, known.version + 1)
                except KeyExistsError:
                    together = ()
                except BadVersionError:  # the attempt in doubt may have changed it: undecided until the record is read
                    known = await read_ledger(records, ledger_id)
                except NoSuchKeyError:
                    raise NoSuchLedgerError(f"ledger {ledger_id} was deleted", ledger_id=ledger_id) from None
                except StoreUnavailableError as error:
                    if not error.outcome_unknown:
                        raise
                    doubtful_version = known.version
                    known = await _reread(records, ledger_id, settings)
            except MetadataError as error:
                if doubtful_version != known.version:
                    raise
                message = f"ledger {ledger_id} may have been changed: an attempt got no answer, and then: {error}"
                raise StoreUnavailableError(message, outcome_unknown=True, ledger_id=ledger_id) from error


async def _reread(records: LedgerRecords, ledger_id: int, settings: LedgerSettings) -> FoundLedger:
    """Retry within the caller's time: a change of unknown outcome must be looked up."""
    while True:
        await asyncio.sleep(settings.metadata_retry_s)
        try:
            return await read_ledger(records, ledger_id)
        except StoreUnavailableError:
            continue
