"""Require credentials on the admin API: `Authorization: Bearer TOKEN`, `Basic` with user and password, or a client certificate.

A request with an Authorization header is judged by that alone: whoever shows a token means the role of the token.

Probes are answered for every caller, since load balancers have no credentials. `/ready` shows details only to authenticated ones.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from cepheid_broker.admin.access_table import audited_path
from cepheid_broker.admin.cross_site import PROBES
from cepheid_ports import RefusalLog, without_details
from cepheid_security import AuthenticationError, Credentials, certificate_expires_at_ms, certificate_names
from cepheid_security.failed_attempts import FailedAttempts

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cepheid_security.audit import AuditLog
    from cepheid_security.authenticator import Authenticator
    from cepheid_security.tls import CertificateRule

log = logging.getLogger(__name__)

_PROBE_WITH_DETAILS = b"/ready"
"""Path that is answered for every caller, with more details for those with valid credentials."""

PRINCIPAL = "cepheid.principal"
"""Key of the request's scope: the caller's principal."""
STRANGER = "cepheid.stranger"
"""Key of the request's scope: True if this port requires credentials and the request was allowed without any."""
CERTIFICATE = "cepheid.certificate"
"""Key of the request's scope: the client's verified certificate as returned by `getpeercert`; {} without one."""


class AdminAuthentication:
    """Wraps the application. Requests that it passes on have a `Principal` in their scope, or are marked as unauthenticated."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, audit: AuditLog, certificate_role: CertificateRule = "common_name"
    ) -> None:
        self._app = app
        self._certificate_role: CertificateRule = certificate_role
        self._authenticator = authenticator
        self._refusals = RefusalLog()
        self._failed_attempts = FailedAttempts()
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"]
        if path in PROBES and (path != _PROBE_WITH_DETAILS or not self._shows_credentials(scope)):
            await self._app({**scope, STRANGER: True}, receive, send)
            return
        try:
            principal = await self._authenticator.authenticate(replace(self._credentials(scope), peer=_address_of(scope)))
        except AuthenticationError as error:
            await self._note(scope, error)  # even for a probe, so that passwords cannot be guessed unnoticed there
            if path in PROBES:
                await self._app({**scope, STRANGER: True}, receive, send)
            else:
                await _refuse(send, str(error), HTTPStatus.SERVICE_UNAVAILABLE if error.retriable else HTTPStatus.UNAUTHORIZED)
            return
        await self._app({**scope, PRINCIPAL: principal}, receive, send)

    def _shows_credentials(self, scope: Scope) -> bool:
        return _has_authorization(scope) or (
            self._authenticator.accepts_certificates and bool(certificate_names(scope.get(CERTIFICATE), self._certificate_role))
        )

    def _credentials(self, scope: Scope) -> Credentials:
        """Raises AuthenticationError."""
        shown = _credentials(scope)
        if shown.method == "none" and self._authenticator.accepts_certificates:
            names = certificate_names(scope.get(CERTIFICATE), self._certificate_role)
            if names:
                expires_at_ms = certificate_expires_at_ms(scope.get(CERTIFICATE))
                return Credentials("tls", certificate_names=names, certificate_expires_at_ms=expires_at_ms)
        return shown

    async def _note(self, scope: Scope, error: AuthenticationError) -> None:
        """Log and audit a failure, and delay the answer if this address has often sent wrong credentials."""
        peer = _address_of(scope)
        call, path = _shown_call(scope)
        self._refusals.note(
            "authentication.unavailable" if error.retriable else "authentication.failed",
            (peer, without_details(str(error))),
            level=logging.WARNING,
            peer=peer,
            call=call,
            error=str(error),
        )
        if error.retriable:
            return
        self._audit.record(None, peer, call, path, "denied", str(error))
        if _has_authorization(scope):
            delay_s = self._failed_attempts.note(peer, asyncio.get_running_loop().time())
            await asyncio.sleep(delay_s)


def _has_authorization(scope: Scope) -> bool:
    return any(name == b"authorization" for name, _ in scope["headers"])


def _address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "?"


def _shown_call(scope: Scope) -> tuple[str, str]:
    """Return a call for the audit log, and its path, without values that callers may not want in a log."""
    method: str = scope["method"]
    path = scope["raw_path"].decode("ascii", errors="replace").partition("?")[0]
    shown = audited_path("GET" if method == "HEAD" else method, path)
    return f"{method} {shown[:200]}", shown


class CertificateRequired:
    """Wraps the application if `tls.client_certificates` is `required`: only probes are served without a certificate.

    The TLS layer of this port only requests one, since it would otherwise refuse probes as well.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["type"] == "http" and scope["scheme"] == "https" and scope["raw_path"] not in PROBES
        if is_asked and not scope.get(CERTIFICATE):
            reason = "this port asks for a client certificate (tls.client_certificates), and the client showed none"
            call, path = _shown_call(scope)
            self._audit.record(None, _address_of(scope), call, path, "denied", reason)
            await _refuse(send, reason)
            return
        await self._app(scope, receive, send)


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


async def _refuse(send: Send, reason: str, status: HTTPStatus = HTTPStatus.UNAUTHORIZED) -> None:
    body = json.dumps({"reason": reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b'Bearer realm="cepheid"'))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
