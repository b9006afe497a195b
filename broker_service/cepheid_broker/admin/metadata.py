"""Backup of metadata, and an operator's calls after a restore. The restore itself needs a stopped cluster."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.raw_path import decode_once
from cepheid_metadata import RestoreNotReportedError, keys
from cepheid_metadata.backup import MetadataBackup
from cepheid_metadata.restored_metadata import (
    BookieNotMissingError,
    NothingRestoredError,
    confirm_restore,
    give_up_bookies,
    restored_view,
)

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 10


def metadata(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/metadata/backup")
    async def backup() -> StreamingResponse:
        """Return all metadata as lines of JSON, read while the cluster runs; complete if the last line has `end`"""
        chunks = _chunks(MetadataBackup(context.store, context.broker.ports).lines())
        first = await anext(chunks)  # an error before the first byte is answered as an error

        async def rest() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        return StreamingResponse(rest(), media_type="application/x-ndjson")

    @router.get("/metadata/restored")
    async def restored() -> dict[str, Any]:
        """Return the restore that waits for confirmation, or null; what bookies reported since, and bookies that did not report"""
        return await restored_view(context.store)

    @router.post("/metadata/confirm", status_code=HTTPStatus.NO_CONTENT)
    async def confirm(request: Request) -> Response:
        """Allow bookies to delete ledgers that the restored metadata lacks. 412 while a bookie did not report"""
        asker = "" if request.client is None else request.client.host
        log.warning("admin.confirm_restore", extra={"asked_by": asker})
        try:
            await confirm_restore(context.store)
        except (NothingRestoredError, RestoreNotReportedError) as error:
            raise PreconditionError(str(error)) from None
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post("/metadata/without/{bookie}", status_code=HTTPStatus.NO_CONTENT)
    async def without(bookie: str, request: Request) -> Response:
        """After a restore: give up a bookie that is lost for good, so that ledgers are created without its report. 412 if it is
        not missing"""
        name, asker = decode_once(bookie), "" if request.client is None else request.client.host
        log.warning("admin.without_bookie", extra={"bookie": name, "asked_by": asker})
        try:
            await give_up_bookies(context.store, [name], context.broker.ports.wall_ms())
        except (NothingRestoredError, BookieNotMissingError) as error:
            raise PreconditionError(str(error)) from None
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.get("/bookies/{bookie}/ledgers")
    async def held(bookie: str, above: Annotated[int, Query(ge=-1, le=keys.MAX_LEDGER_ID)] = -1) -> dict[str, Any]:
        """Return ids of ledgers above `above` that a bookie of this process holds; a bookie process serves them as `/ledgers`
        itself"""
        name = decode_once(bookie)
        if (page := context.held_ledgers(name, above)) is None:
            raise NotFoundError(f"Bookie {name[:200]!r} does not run in this process; its own HTTP port serves /ledgers")
        return page

    return router


async def _chunks(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines joined to larger chunks: each chunk costs a turn of the loop and a write."""
    gathered = bytearray()
    async for line in lines:
        gathered += line
        if len(gathered) >= _CHUNK_BYTES:
            yield bytes(gathered)
            gathered.clear()
    yield bytes(gathered)
