"""Automatic repair for operators: ledgers that lack copies, the switch, decommissioning. Bookie processes do the work."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.raw_path import decode_once
from cepheid_ledger import can_separate
from cepheid_metadata import keys, repair_views

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LISTED = 1000


def repair(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    def note(what: str, request: Request, **facts: Any) -> None:
        log.warning(what, extra={"asked_by": "" if request.client is None else request.client.host, **facts})

    @router.get("/repair")
    async def status() -> dict[str, Any]:
        """Return whether repair is on, which process is the auditor, and what its last walk over all ledgers found"""
        return await repair_views.repair_status(context.store)

    @router.get("/repair/short")
    async def short(
        above: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    ) -> dict[str, Any]:
        """Return the first `limit` ledgers with ids above `above` that lack copies; `next`: `above` of the next page, or null"""
        return await repair_views.short_page(context.store, above=above, limit=limit)

    @router.put("/repair/off", status_code=HTTPStatus.NO_CONTENT)
    async def switch_off(request: Request, reason: Annotated[str, Query(max_length=500)] = "") -> Response:
        """Stop repair in the whole cluster, for maintenance; copies in progress are finished"""
        note("admin.repair_off", request, reason=reason)
        await repair_views.switch_off(context.store, context.broker.ports.wall_ms(), reason)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.delete("/repair/off", status_code=HTTPStatus.NO_CONTENT)
    async def switch_on(request: Request) -> Response:
        """Continue repair"""
        note("admin.repair_on", request)
        await repair_views.switch_on(context.store)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post("/repair/ledgers/{ledger}", status_code=HTTPStatus.NO_CONTENT)
    async def check_ledger(
        ledger: Annotated[int, Path(ge=0, le=keys.MAX_LEDGER_ID)], bookie: Annotated[list[str], Query(min_length=1)]
    ) -> Response:
        """Check a ledger's copies on the named bookies, and copy bad ones again from a valid replica"""
        await _asked(repair_views.mark_damaged(context.store, ledger, bookie, context.broker.ports.wall_ms()))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.put("/bookies/{bookie}/decommission")
    async def decommission(bookie: str, request: Request) -> dict[str, Any]:
        """Move all copies of this bookie to others; return the progress. 412 if too few bookies or racks would be left"""
        name = decode_once(bookie)
        note("admin.decommission", request, bookie=name)
        config = context.broker.ledger_config
        strict = None
        if context.broker.settings.ledger.strict_racks:
            suffice = partial(can_separate, size=config.ensemble_size, write_quorum=config.write_quorum)
            strict = repair_views.StrictRacks(config.write_quorum, suffice)
        now_ms = context.broker.ports.wall_ms()
        return await _asked(repair_views.decommission(context.store, name, now_ms, config.ensemble_size, strict))

    @router.get("/bookies/{bookie}/decommission")
    async def decommission_status(bookie: str) -> dict[str, Any]:
        """Return the progress: draining, drained (stop the bookie and discard its disks), or gone"""
        return await _asked(repair_views.decommission_status(context.store, decode_once(bookie)))

    @router.delete("/bookies/{bookie}/decommission", status_code=HTTPStatus.NO_CONTENT)
    async def cancel_decommission(bookie: str, request: Request) -> Response:
        """Let the bookie stay; copies already moved are not moved back"""
        note("admin.cancel_decommission", request, bookie=decode_once(bookie))
        await _asked(repair_views.cancel_decommission(context.store, decode_once(bookie)))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post("/bookies/{bookie}/recover", status_code=HTTPStatus.NO_CONTENT)
    async def recover(bookie: str, request: Request) -> Response:
        """Repair the ledgers of a bookie that is down now, without its grace period. 412 if it runs"""
        name = decode_once(bookie)
        note("admin.recover_bookie", request, bookie=name)
        await _asked(repair_views.request_recovery(context.store, name, context.broker.ports.wall_ms()))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    return router


async def _asked(work: Awaitable[T]) -> T:
    """Await a call of operators. Raises NotFoundError, PreconditionError."""
    try:
        return await work
    except (repair_views.UnknownBookieError, repair_views.UnknownLedgerError) as error:
        raise NotFoundError(str(error)) from None
    except repair_views.RepairRefusedError as error:
        raise PreconditionError(str(error)) from None
