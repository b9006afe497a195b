"""How far the upgrade of a cluster is, and its end, for `cepheid cluster finish-upgrade`."""

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
        """The storage format that bookies write, the newest that this release knows, and the brokers and bookies that do not know
        that one"""
        return asdict(await upgrade_state(context.store))

    @router.post("/upgrade/finish")
    async def finish(request: Request) -> dict[str, Any]:
        """Lets bookies write the newest format from their next start on. Refused (409) while one of an older release runs. There is
        no way back to an older release afterwards"""
        before = await finish_upgrade(context.store)
        asker = "" if request.client is None else request.client.host
        log.warning("admin.upgrade_finished", extra={"before": before.storage_format, "now": before.newest, "asked_by": asker})
        return asdict(before)

    return router
