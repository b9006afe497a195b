"""Ledgers and bookies as metadata knows them, for `cepheid ledgers` and `cepheid bookies`: entries are read from the bookies."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError
from cepheid_metadata import DeletedLedgers, keys
from cepheid_metadata.ledger_views import bookie_views, ledger_page, ledger_view

MAX_LISTED = 1000

LedgerPath = Annotated[int, Path(ge=0, le=keys.MAX_LEDGER_ID)]


def ledgers(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/ledgers")
    async def list_all(
        above: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
        deleted: bool = False,
    ) -> dict[str, Any]:
        """The first `limit` ledgers with larger ids than `above`; `damaged`: those with a record that cannot be read; `next` is the
        `above` of the following page, or null"""
        return await ledger_page(context.store, above=above, limit=limit, deleted=deleted)

    @router.get("/ledgers/{ledger}")
    async def show(ledger: LedgerPath) -> dict[str, Any]:
        """Its record, also while it is deleted and can be brought back"""
        view = await ledger_view(context.store, ledger)
        if view is None:
            raise NotFoundError(f"Ledger {ledger} does not exist, or was deleted for good")
        return view

    @router.post("/ledgers/{ledger}/undelete")
    async def undelete(ledger: LedgerPath) -> dict[str, Any]:
        """Brings it back, closed, with all its entries. It belongs to no topic: `cepheid ledgers read` shows what is in it"""
        back = await DeletedLedgers(context.store).undelete(ledger, context.broker.ports.wall_ms())
        if back is None:
            raise NotFoundError(f"Ledger {ledger} cannot be brought back: it was not deleted, or its time of grace is over")
        return {"ledger": back.model_dump(mode="json")}

    @router.get("/bookies")
    async def list_bookies() -> dict[str, Any]:
        """Those that run (writable, readonly) and those that should (down, damaged), with their addresses by protocol"""
        views = await bookie_views(context.store)
        if (here := context.bookies) is not None:
            # A standalone process registers its bookies once: that one takes no entries now, only it knows.
            read_only = set(here.registered()) - set(here.writable())
            views = [{**view, "state": "readonly"} if view["bookie_id"] in read_only else view for view in views]
        return {"bookies": views}

    return router
