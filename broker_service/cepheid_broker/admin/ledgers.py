"""Ledgers and bookies from metadata, for `cepheid ledgers` and `cepheid bookies`; entries are read from the bookies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request

from cepheid_broker.admin.access import describe_change, may
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError
from cepheid_ledger import NoSuchLedgerError
from cepheid_metadata import CorruptRecordError, DeletedLedgers, NewerFormatError, chain_records, keys
from cepheid_metadata.ledger_views import bookie_views, ledger_page, ledger_view, without_password
from cepheid_security import Need
from cepheid_wire import InvalidTopicNameError, TopicName

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LISTED = 1000

LedgerPath = Annotated[int, Path(ge=0, le=keys.MAX_LEDGER_ID)]


def ledgers(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/ledgers")
    async def list_all(
        request: Request,
        above: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
        deleted: bool = False,
    ) -> dict[str, Any]:
        """Return the first `limit` ledgers with ids above `above`; `damaged`: those with an unreadable record; `next`: `above`
        of the next page, or null. Roles other than super-users see the ledgers of topics that they may consume, without
        passwords, and `incomplete` instead of damaged ones"""
        page = await ledger_page(context.store, above=above, limit=limit, deleted=deleted)
        if await may(context, request, Need.SUPER_USER):
            return page
        readable = _ReadableLedgers(context, request)
        views = [without_password(view) for view in page["ledgers"] if await readable.has(view)]
        return {"ledgers": views, "damaged": [], "incomplete": bool(page["damaged"]), "next": page["next"]}

    @router.get("/ledgers/{ledger}")
    async def show(ledger: LedgerPath, request: Request) -> dict[str, Any]:
        """Return the ledger's record, even if it is deleted but can be restored. Roles as in the list of ledgers"""
        view = await ledger_view(context.store, ledger)
        if view is not None and await may(context, request, Need.SUPER_USER):
            return view  # with the password, with which `cepheid ledgers` reads the bookies
        if view is None or not await _ReadableLedgers(context, request).has(view):
            raise NotFoundError(f"Ledger {ledger} does not exist, or was deleted for good")
        return without_password(view)

    @router.post("/ledgers/{ledger}/undelete")
    async def undelete(ledger: LedgerPath) -> dict[str, Any]:
        """Restore a deleted ledger, closed, with all its entries. It belongs to no topic: `cepheid ledgers read` shows its
        contents"""
        back = await DeletedLedgers(context.store).undelete(ledger, context.broker.ports.wall_ms())
        if back is None:
            raise NotFoundError(f"Ledger {ledger} cannot be brought back: it was not deleted, or its time of grace is over")
        return without_password({"ledger": back.model_dump(mode="json")})

    @router.post("/ledgers/{ledger}/purge")
    async def purge(ledger: LedgerPath, request: Request) -> dict[str, Any]:
        """Give up a deleted ledger before its grace period is over: bookies delete its entries. It cannot be restored"""
        asker = "" if request.client is None else request.client.host
        log.warning("admin.ledger_purged", extra={"ledger_id": ledger, "asked_by": asker})
        if not await DeletedLedgers(context.store).give_up(ledger):
            raise NotFoundError(f"Ledger {ledger} cannot be purged: it was not deleted, or its time of grace is over")
        return {"ledger_id": ledger}

    @router.get("/ledgers/{ledger}/recover_from/{bookie}")
    async def preview_recovery(ledger: LedgerPath, bookie: str) -> dict[str, Any]:
        """Return what closing it with this bookie alone would keep, and what its bookies answer now. Changes nothing"""
        return asdict(await _known(ledger, context.broker.managed_ledgers.client.preview_recovery_from(ledger, bookie)))

    @router.post("/ledgers/{ledger}/recover_from/{bookie}")
    async def recover_from(
        ledger: LedgerPath,
        bookie: str,
        request: Request,
        last_entry: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)],
    ) -> dict[str, Any]:
        """Fence and close it, with this bookie alone if there is no other way; entries that others acknowledged above its end
        are lost. `last_entry`: from the preview; it is not closed below that"""
        describe_change(request, [f"last_entry {last_entry}"])
        client = context.broker.managed_ledgers.client
        asker = "" if request.client is None else request.client.host
        extra = {"ledger_id": ledger, "bookie": bookie, "last_entry": last_entry, "asked_by": asker}
        log.warning("admin.recover_from", extra=extra)
        end = await _known(ledger, client.recover_from(ledger, bookie, at_least=last_entry))
        return {"ledger_id": ledger, "last_entry_id": end.last_entry_id, "length_bytes": end.length}

    @router.get("/bookies")
    async def list_bookies() -> dict[str, Any]:
        """Return bookies that run (writable, readonly) and that should (down, damaged), with their addresses by protocol"""
        views = await bookie_views(context.store)
        if (here := context.bookies) is not None:
            # A standalone process registers its bookies once, so only it knows which takes no entries now.
            read_only = set(here.registered()) - set(here.writable()) - set(here.draining())
            views = [{**view, "state": "readonly"} if view["bookie_id"] in read_only else view for view in views]
        return {"bookies": views}

    return router


class _ReadableLedgers:
    """The ledgers that the caller of a request may see: those of existing topics that it may consume.

    A deleted topic and a later one of the same name differ in their incarnation. A grant applies only to the later one.
    """

    def __init__(self, context: AdminContext, request: Request) -> None:
        self._context = context
        self._request = request
        self._incarnations: dict[str, str | None] = {}  # by topic; None: missing, or not readable for the caller

    async def has(self, view: dict[str, Any]) -> bool:
        custom = view["ledger"]["custom"]
        topic, incarnation = custom.get("topic"), custom.get("incarnation")
        if topic is None or incarnation is None:
            return False
        if topic not in self._incarnations:
            self._incarnations[topic] = await self._readable_incarnation(topic)
        return bool(incarnation == self._incarnations[topic])

    async def _readable_incarnation(self, topic: str) -> str | None:
        try:
            name = TopicName.parse(topic)
        except InvalidTopicNameError:
            return None
        if not await may(self._context, self._request, Need.CONSUME, name):
            return None
        try:
            found = await chain_records(self._context.store).get(name)
        except (CorruptRecordError, NewerFormatError):
            return None  # the topic cannot be read either
        return None if found is None else found.record.incarnation


async def _known(ledger_id: int, work: Awaitable[T]) -> T:
    """Await work on a ledger. Raises NotFoundError if the ledger does not exist."""
    try:
        return await work
    except NoSuchLedgerError:
        raise NotFoundError(f"Ledger {ledger_id} does not exist, or was deleted") from None
