"""Progress of a cluster's upgrade, and finishing it, for `cepheid cluster finish-upgrade`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.context import AdminContext
from cepheid_metadata.upgrade import finish_upgrade, upgrade_state

log = logging.getLogger(__name__)


def upgrade(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/upgrade")
    async def show() -> dict[str, Any]:
        """Return the storage format that bookies write, the newest that this release knows, and brokers and bookies that do not
        know it"""
        return asdict(await upgrade_state(context.store))

    @router.post("/upgrade/finish")
    async def finish(request: Request) -> dict[str, Any]:
        """Let bookies write the newest format from their next start on. 409 while a process of an older release runs. Afterwards
        there is no way back to an older release"""
        before = await finish_upgrade(context.store)
        asker = "" if request.client is None else request.client.host
        log.warning("admin.upgrade_finished", extra={"before": before.storage_format, "now": before.newest, "asked_by": asker})
        return asdict(before)

    return router
