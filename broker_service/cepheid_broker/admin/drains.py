"""Brokers that give up their bundles: the calls of operators, and those by which brokers hand bundles over to each other."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from cepheid_broker.admin.brokers import id_of_broker
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.errors import NotAllowedError
from cepheid_broker.ownership import HAND_OVER_PATH, HandOverCall, NotOwnerError, There

CallBody = Annotated[HandOverCall, json_body(HandOverCall)]

log = logging.getLogger(__name__)


def drains(context: AdminContext) -> APIRouter:
    router = APIRouter()

    def require_here(request: Request, broker: str) -> None:
        """Raise NotOwnerError, which redirects the caller, if another broker is meant. Raises PreconditionError."""
        ownership = context.broker.ownership
        name = id_of_broker(context, request, decode_once(broker))
        if name != ownership.broker_id:
            there = There(name, ownership.brokers[name])
            raise NotOwnerError(f"this is broker {ownership.broker_id}, not {name}", there, broker=name)

    def note(what: str, request: Request, **facts: Any) -> None:
        log.warning(what, extra={"asked_by": "" if request.client is None else request.client.host, **facts})

    @router.put("/cepheid/v1/brokers/{broker}/drain")
    async def drain(broker: str, request: Request, force: bool = False) -> dict[str, Any]:
        """Hand all bundles of this broker over to others, and take no more; return the progress. It continues after the call,
        and ends with the broker's process. 412 if no other broker takes bundles, unless `force`: its topics are then closed and
        not served"""
        require_here(request, broker)
        note("admin.drain", request, broker=context.broker.ownership.broker_id, force=force)
        try:
            context.broker.ownership.drain(force=force)
        except NotAllowedError as error:
            raise PreconditionError(str(error)) from None
        return _progress(context)

    @router.get("/cepheid/v1/brokers/{broker}/drain")
    async def drain_status(broker: str, request: Request) -> dict[str, Any]:
        """Return the progress: `drained` once the broker has no bundles left"""
        require_here(request, broker)
        return _progress(context)

    @router.delete("/cepheid/v1/brokers/{broker}/drain", status_code=HTTPStatus.NO_CONTENT)
    async def undrain(broker: str, request: Request) -> Response:
        """Let the broker take bundles again; those that it gave up stay where they are"""
        require_here(request, broker)
        note("admin.undrain", request, broker=context.broker.ownership.broker_id)
        context.broker.ownership.undrain()
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.post(HAND_OVER_PATH)
    async def hand_over(call: CallBody) -> dict[str, list[str]]:
        """Between brokers: open topics that the owner of a bundle has closed; return those that are open"""
        return {"opened": [str(topic) for topic in await context.broker.ownership.on_hand_over(call)]}

    return router


def _progress(context: AdminContext) -> dict[str, Any]:
    ownership = context.broker.ownership
    bundles = ownership.bundles_held
    topics = sum(1 for topic in context.broker.topics.loaded() if not topic.name.local_name.startswith("__health-"))
    return {
        "broker": ownership.broker_id,
        "draining": ownership.draining,
        "drained": ownership.draining and not bundles,
        "bundles": bundles,
        "topics": topics,
    }
