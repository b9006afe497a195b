"""Automatic repair for operators: what is short of copies, the switch, decommissioning. The work is done by bookie processes."""

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
        """Whether repair is on, which process is the auditor, and what its last walk over all ledgers found"""
        return await repair_views.repair_status(context.store)

    @router.get("/repair/short")
    async def short(
        above: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    ) -> dict[str, Any]:
        """The first `limit` ledgers with larger ids than `above` that lack copies; `next` is the `above` of the following page, or
        null"""
        return await repair_views.short_page(context.store, above=above, limit=limit)

    @router.put("/repair/off", status_code=HTTPStatus.NO_CONTENT)
    async def switch_off(request: Request, reason: Annotated[str, Query(max_length=500)] = "") -> Response:
        """Stops repair in the whole cluster, for maintenance. What is being copied is finished"""
        note("admin.repair_off", request, reason=reason)
        await repair_views.switch_off(context.store, context.broker.ports.wall_ms(), reason)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.delete("/repair/off", status_code=HTTPStatus.NO_CONTENT)
    async def switch_on(request: Request) -> Response:
        """Continues repair"""
        note("admin.repair_on", request)
        await repair_views.switch_on(context.store)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post("/repair/ledgers/{ledger}", status_code=HTTPStatus.NO_CONTENT)
    async def check_ledger(
        ledger: Annotated[int, Path(ge=0, le=keys.MAX_LEDGER_ID)], bookie: Annotated[list[str], Query(min_length=1)]
    ) -> Response:
        """Has the copies of a ledger on the named bookies checked, and copied again from a valid replica where they are bad"""
        await _asked(repair_views.mark_damaged(context.store, ledger, bookie, context.broker.ports.wall_ms()))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.put("/bookies/{bookie}/decommission")
    async def decommission(bookie: str, request: Request) -> dict[str, Any]:
        """Moves all copies of this bookie to others; answers how far that is. 412 when too few bookies or racks would be left"""
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
        """How far it is: draining, drained (stop it and throw its disks away), or gone"""
        return await _asked(repair_views.decommission_status(context.store, decode_once(bookie)))

    @router.delete("/bookies/{bookie}/decommission", status_code=HTTPStatus.NO_CONTENT)
    async def cancel_decommission(bookie: str, request: Request) -> Response:
        """Lets the bookie stay. What was moved is not moved back"""
        note("admin.cancel_decommission", request, bookie=decode_once(bookie))
        await _asked(repair_views.cancel_decommission(context.store, decode_once(bookie)))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post("/bookies/{bookie}/recover", status_code=HTTPStatus.NO_CONTENT)
    async def recover(bookie: str, request: Request) -> Response:
        """Repairs the ledgers of a bookie that is down now, without its grace period. 412 when it runs"""
        name = decode_once(bookie)
        note("admin.recover_bookie", request, bookie=name)
        await _asked(repair_views.request_recovery(context.store, name, context.broker.ports.wall_ms()))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    return router


async def _asked(work: Awaitable[T]) -> T:
    """Raises NotFoundError, PreconditionError."""
    try:
        return await work
    except (repair_views.UnknownBookieError, repair_views.UnknownLedgerError) as error:
        raise NotFoundError(str(error)) from None
    except repair_views.RepairRefusedError as error:
        raise PreconditionError(str(error)) from None
