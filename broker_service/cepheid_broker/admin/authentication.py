"""Ask for credentials on the admin API: `Authorization: Bearer TOKEN`, or `Basic` with user and password.

Probes are answered to everybody: load balancers have no credentials, and the answers say nothing about data.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from cepheid_broker.admin.cross_site import PROBES
from cepheid_security import AuthenticationError, Credentials

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cepheid_security.audit import AuditLog
    from cepheid_security.authenticator import Authenticator

log = logging.getLogger(__name__)

PRINCIPAL = "cepheid.principal"
"""Key of the request's scope: who asks."""


class AdminAuthentication:
    """Wraps the application. What it lets through has a `Principal` in its scope."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, audit: AuditLog) -> None:
        self._app = app
        self._authenticator = authenticator
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["raw_path"] in PROBES:
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._authenticator.authenticate(_credentials(scope))
        except AuthenticationError as error:
            peer = scope["client"][0] if scope.get("client") else "?"
            call = f"{scope['method']} {scope['path'][:200]}"
            log.warning("authentication.failed", extra={"peer": peer, "call": call, "error": str(error)})
            self._audit.record(None, peer, call, scope["path"], "denied", str(error))
            await _refuse(send, str(error))
            return
        await self._app({**scope, PRINCIPAL: principal}, receive, send)


def _credentials(scope: Scope) -> Credentials:
    """Raises AuthenticationError."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        return Credentials("none")
    if len(given) > 1:
        raise AuthenticationError("the request has several Authorization headers")
    scheme, _, rest = given[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return Credentials("token", rest)
    if scheme.lower() == b"basic":
        try:
            return Credentials("basic", base64.b64decode(rest.strip(), validate=True))
        except (binascii.Error, ValueError):
            raise AuthenticationError("the Authorization header is not Basic with base64") from None
    raise AuthenticationError("the Authorization header is neither Bearer nor Basic")


async def _refuse(send: Send, reason: str) -> None:
    body = json.dumps({"reason": reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b'Bearer realm="cepheid"'),
    ]
    await send({"type": "http.response.start", "status": int(HTTPStatus.UNAUTHORIZED), "headers": headers})
    await send({"type": "http.response.body", "body": body})
