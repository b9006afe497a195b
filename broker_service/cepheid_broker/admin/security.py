"""How the processes of a cluster are secured, for `cepheid secure status` and `cepheid secure enable`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_metadata.process_reports import ProcessReport, running_bookies, running_brokers
from cepheid_metadata.store import security_of
from cepheid_security.certificate_revocations import revoked_certificates


def security(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/security")
    async def show() -> dict[str, Any]:
        """How each broker and bookie that runs is secured, by its own report; null: it has made none, as of an older release. And
        what is wrong where this broker looks"""
        keys = None if context.tickets is None else context.tickets.problem
        plain = security_of(context.store).plain_problem if context.broker.settings.tls.enabled else None
        tls = context.broker.settings.tls
        lists: list[str] = []
        if tls.looks_up_revoked_clients and tls.crl is not None and tls.client_ca_file is not None:
            lists = revoked_certificates(tls.crl, tls.client_ca_file).problems()
        return {
            "brokers": _shown(await running_brokers(context.store)),
            "bookies": _shown(await running_bookies(context.store)),
            "problems": [problem for problem in (keys, plain, *lists) if problem is not None],
        }

    return router


def _shown(reports: Mapping[str, ProcessReport | None]) -> dict[str, dict[str, bool] | None]:
    return {
        name: None
        if said is None
        else {
            **said.security.model_dump(),
            "zookeeper_tls": bool(said.zookeeper_tls),
            "revocation_lists": bool(said.revocation_lists),
        }
        for name, said in reports.items()
    }
