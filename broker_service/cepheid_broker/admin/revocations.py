"""Revoked tokens, for `cepheid tokens revoke`. Tokens themselves are never sent: a digest names them (`TokenIdentity`)."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, NonNegativeInt

from cepheid_broker.admin.access import describe_change
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import BadRequestError, NotFoundError
from cepheid_broker.admin.json_body import json_body
from cepheid_metadata import Revocation
from cepheid_metadata.revocations import cancel_revocation, list_revocations, revoke

log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 40  # of a digest or an id

Kind = Literal["digest", "id", "role"]
_CLOCKS_APART_MS = 60_000
"""How far a caller's clock may be ahead of this broker's."""


class NewRevocation(BaseModel, extra="forbid"):
    """What a caller revokes: one token by its digest or its id, or the tokens of a role that were issued up to a time."""

    kind: Kind
    value: str = Field(min_length=1, max_length=1000)
    issued_up_to_ms: NonNegativeInt | None = None
    until_ms: NonNegativeInt | None = None
    reason: str = Field("", max_length=200)


def revocations(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1/revocations")

    @router.get("")
    async def listed() -> list[dict[str, Any]]:
        """Revoked tokens whose expiry is not over, the oldest revocation first. Tokens are named by digest, id or role"""
        return [entry.model_dump() for entry in await list_revocations(context.store)]

    @router.post("", status_code=HTTPStatus.NO_CONTENT)
    async def add(request: Request, given: Annotated[NewRevocation, json_body(NewRevocation)]) -> Response:
        """Revokes a token, or those of a role: within a second its connections are closed and its calls refused. 412 when the
        list is full"""
        if (given.kind == "role") != (given.issued_up_to_ms is not None):
            raise BadRequestError("issued_up_to_ms is given exactly when the tokens of a role are revoked")
        describe_change(request, [_shown(given.kind, given.value)])
        now_ms = context.broker.ports.wall_ms()
        if given.issued_up_to_ms is not None and given.issued_up_to_ms > now_ms + _CLOCKS_APART_MS:
            raise BadRequestError("issued_up_to_ms is in the future: it would revoke tokens that are not made yet")
        revocation = Revocation(revoked_at_ms=now_ms, **given.model_dump())
        await revoke(context.store, revocation, now_ms)
        asker = "" if request.client is None else request.client.host
        log.warning("admin.revoked", extra={"what": given.kind, "value": given.value, "reason": given.reason, "asked_by": asker})
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @router.delete("", status_code=HTTPStatus.NO_CONTENT)
    async def cancel(request: Request, kind: Kind, value: Annotated[str, Query(min_length=1, max_length=1000)]) -> Response:
        """Takes a revocation back: the token holds again. 404 when there is none"""
        describe_change(request, [_shown(kind, value)])
        if not await cancel_revocation(context.store, kind, value, context.broker.ports.wall_ms()):
            raise NotFoundError(f"no revocation of the {kind} {value[:200]!r} is in the list")
        asker = "" if request.client is None else request.client.host
        log.warning("admin.revocation_cancelled", extra={"what": kind, "value": value, "asked_by": asker})
        return Response(status_code=HTTPStatus.NO_CONTENT)

    return router


def _shown(kind: Kind, value: str) -> str:
    """Return what is revoked, for the audit log. Cut, so that a whole token that was sent by mistake does not get there."""
    return f"{kind} {value[:200] if kind == 'role' else value[:_SHOWN_CHARACTERS]}"
