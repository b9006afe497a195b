"""Views of ledgers and bookies as plain values: the answers of the admin API, and of a tool while no broker runs.

ledger   {"ledger": the record} and, if it is deleted, "deleted_at_ms", "purge_after_ms"
damaged  {"ledger_id", "error"}: a ledger whose record cannot be read
bookie   {"bookie_id", "state", "incarnation", "limbo_below", "addresses": by protocol, "rack", "draining", "ledgers", "bytes",
          "short_ledgers", "short_bytes"}
         state: writable, readonly, down, or damaged: its cookie or registration cannot be read
         draining: null, "draining", or "drained": it is not needed any more
         ledgers to short_bytes: from the auditor's last walk; null before the first
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from cepheid_metadata import keys
from cepheid_metadata.cluster_records import BookieCookie, BookieRegistration
from cepheid_metadata.deleted_ledgers import DeletedLedgers
from cepheid_metadata.errors import CorruptRecordError, NewerFormatError
from cepheid_metadata.ledger_records import DeletedLedger, LedgerMetadata
from cepheid_metadata.listing import list_deleted_ledgers, list_ledgers, list_names
from cepheid_metadata.record import Record
from cepheid_metadata.repair_records import BookieHoldings
from cepheid_metadata.repositories import (
    Found,
    Records,
    audit_record,
    available_bookies,
    bookie_cookies,
    deleted_ledger_records,
    draining_bookies,
    ledger_records,
    readonly_bookies,
)
from cepheid_metadata.store import MetadataStore

log = logging.getLogger(__name__)

_AT_ONCE = 100

View = dict[str, Any]
R = TypeVar("R", bound=Record)


async def ledger_page(store: MetadataStore, *, above: int, limit: int, deleted: bool) -> View:
    """Return the first `limit` ledgers with larger ids than `above`.

    `damaged`: those of them with unreadable records, separately. `next`: the `above` of the following page, None at the end.
    """
    ids = await _first((list_deleted_ledgers if deleted else list_ledgers)(store, above=above), limit)
    ledgers: list[View] = []
    damaged: list[View] = []
    for first in range(0, len(ids), _AT_ONCE):
        part = ids[first : first + _AT_ONCE]
        if deleted:
            gone = await _read_all(deleted_ledger_records(store), part, damaged)
            ledgers += [_deleted_view(record) for record in gone]
        else:
            living = await _read_all(ledger_records(store), part, damaged)
            ledgers += [_view(record) for record in living]
    return {"ledgers": ledgers, "damaged": damaged, "next": ids[-1] if len(ids) == limit else None}


async def _read_all(records: Records[int, R], ids: list[int], damaged: list[View]) -> list[R]:
    """Return the records that still exist; an unreadable one is noted in `damaged`, and does not hide others."""

    async def read(ledger_id: int) -> R | None:
        try:
            found = await records.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            damaged.append({"ledger_id": ledger_id, "error": str(error)})
            return None
        return None if found is None else found.record

    return [record for record in await asyncio.gather(*map(read, ids)) if record is not None]


async def ledger_view(store: MetadataStore, ledger_id: int) -> View | None:
    """Return the view of a ledger; None: it does not exist, or was deleted for good."""
    if (living := await ledger_records(store).get(ledger_id)) is not None:
        return _view(living.record)
    deleted = await DeletedLedgers(store).get(ledger_id)
    return None if deleted is None else _deleted_view(deleted)


def without_password(view: View) -> View:
    """Return a view for users that may see a ledger, but not write to it: bookies accept writes from anyone with its password."""
    return {**view, "ledger": {name: value for name, value in view["ledger"].items() if name != "password"}}


async def bookie_views(store: MetadataStore) -> list[View]:
    """Return the views of all bookies that are registered or have a cookie, by id."""
    names = dict.fromkeys(await list_names(store, keys.BOOKIE_COOKIES_KEY), "down")
    for parent_key, state in ((keys.READONLY_BOOKIES_KEY, "readonly"), (keys.AVAILABLE_BOOKIES_KEY, "writable")):
        names |= dict.fromkeys(await list_names(store, parent_key), state)
    audit = await audit_record(store).get(None)
    holdings = None if audit is None else audit.record.bookies
    return [await _bookie_view(store, name, names[name], holdings) for name in sorted(names)]


async def _bookie_view(store: MetadataStore, name: str, state: str, holdings: Mapping[str, BookieHoldings] | None) -> View:
    """Return the view of a bookie. A damaged record is shown as its state, and does not affect other bookies."""
    cookie: Found[BookieCookie] | None = None
    registered: Found[BookieRegistration] | None = None
    try:
        cookie = await bookie_cookies(store).get(name)
        registered = await (readonly_bookies if state == "readonly" else available_bookies)(store).get(name)
        state = state if registered is not None else "down"
    except (CorruptRecordError, NewerFormatError) as error:
        log.error("record.unreadable", extra={"error": str(error)})
        state = "damaged"
    draining = await draining_bookies(store).get(name)
    held = None if holdings is None else holdings.get(name, BookieHoldings())
    return {
        "bookie_id": name,
        "state": state,
        "incarnation": "" if cookie is None else cookie.record.incarnation,
        "limbo_below": (cookie.record.limbo_below or 0) if cookie is not None else 0,
        "addresses": {} if registered is None else dict(registered.record.addresses),
        "rack": None if registered is None else registered.record.rack,
        "free_bytes": None if registered is None else registered.record.free_bytes,
        "total_bytes": None if registered is None else registered.record.total_bytes,
        "draining": None if draining is None else "draining" if draining.record.drained_at_ms is None else "drained",
        **(dict.fromkeys(BookieHoldings.model_fields) if held is None else held.model_dump()),
    }


async def _first(listed: AsyncIterator[int], limit: int) -> list[int]:
    ids: list[int] = []
    async with aclosing(listed):  # type: ignore[type-var]
        async for ledger_id in listed:
            ids.append(ledger_id)
            if len(ids) == limit:
                break
    return ids


def _view(ledger: LedgerMetadata) -> View:
    return {"ledger": ledger.model_dump(mode="json")}


def _deleted_view(deleted: DeletedLedger) -> View:
    return {**_view(deleted.ledger), "deleted_at_ms": deleted.deleted_at_ms, "purge_after_ms": deleted.purge_after_ms}
