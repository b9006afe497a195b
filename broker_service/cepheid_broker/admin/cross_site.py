"""Refuse requests that a web page of another site makes a browser send.

A browser that can reach the admin port sends requests for any page that it shows. Three ways in are closed:

    a form or script of another site      Origin, Sec-Fetch-Site     403
    a form in a browser without both      Content-Type of a form     415    other types need permission, and none is given
    a name that resolves to this broker   Host (DNS rebinding)       403    an address cannot be rebound, so it is accepted

Tools send neither Origin nor Sec-Fetch-Site. Probes are answered under every name, but only with one word if the name is unknown
(health.py).
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Self

from cepheid_ports import RefusalLog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cepheid_broker.settings import BrokerSettings

PROBES = frozenset((b"/health", b"/ready", b"/status.html"))
"""Paths that load balancers and orchestrators request."""

_FORM_TYPES = frozenset(("application/x-www-form-urlencoded", "multipart/form-data", "text/plain"))
"""Content types sent by forms, and by scripts without asking (https://fetch.spec.whatwg.org, CORS-safelisted request-header)."""

_WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS"))
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]*))?")
_ORIGIN = re.compile(r"(https?)://([^/]+)")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served."""

    status: HTTPStatus
    reason: str


@dataclass(frozen=True, slots=True)
class AdminHosts:
    """Names under which this admin port is reached. A name that begins with a dot stands for all names below it."""

    own: frozenset[str]
    allowed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: BrokerSettings) -> Self:
        """Return localhost, the names of the machine, the advertised name, and the names that the operator allows."""
        machine = socket.gethostname()
        own = (settings.host, settings.advertised_host or "", machine, machine.partition(".")[0], "localhost")
        return cls(frozenset(map(_canonical, own)) - {""}, frozenset(map(_canonical, settings.admin_allowed_hosts)))

    def accepts(self, host: str) -> bool:
        """Return whether a request may name this host, given without port."""
        return host in self.own or self.allows(host) or _is_address(host)

    def accepts_header(self, host: str) -> bool:
        """Return whether a request may have this `Host` header. Some load balancers send none; browsers always send it."""
        name, _ = _host_and_port(host)
        return not host or (name is not None and self.accepts(name))

    def allows(self, host: str) -> bool:
        """Return whether the operator listed this host, by its name or with all names of its domain."""
        if host in self.allowed:
            return True
        parts = host.split(".")
        return any(f".{'.'.join(parts[start:])}" in self.allowed for start in range(1, len(parts)))


def refusal_of(method: str, path: bytes, headers: Iterable[tuple[bytes, bytes]], hosts: AdminHosts) -> Refusal | None:
    """Return why a browser could have sent this request for another site's page; None if it could not."""
    found: dict[bytes, list[str]] = {b"host": [], b"origin": [], b"sec-fetch-site": [], b"content-type": []}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1").strip())
    if "cross-site" in found[b"sec-fetch-site"]:
        return Refusal(HTTPStatus.FORBIDDEN, "a page of another site sent this request: use a tool, or open the address yourself")
    if path not in PROBES and (refused := _refused_host(found[b"host"], hosts)) is not None:
        return refused
    host = found[b"host"][0] if found[b"host"] else ""
    for origin in found[b"origin"]:
        if not _is_own(origin, host, hosts):
            return Refusal(
                HTTPStatus.FORBIDDEN,
                f"a page of another site ({origin[:_MAX_SHOWN]}) sent this request: use a tool, or add the host of that page to "
                "admin_allowed_hosts",
            )
    if method not in _WITHOUT_BODY:
        for given in found[b"content-type"]:
            if given.partition(";")[0].strip().lower() in _FORM_TYPES:
                return Refusal(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    f"bodies of type {given[:_MAX_SHOWN]} are not accepted, since web forms can send them: send application/json",
                )
    return None


def _refused_host(given: Sequence[str], hosts: AdminHosts) -> Refusal | None:
    if len(given) > 1:
        return Refusal(HTTPStatus.BAD_REQUEST, f"the request has {len(given)} Host headers: send one")
    if not given or hosts.accepts_header(given[0]):
        return None
    return Refusal(
        HTTPStatus.FORBIDDEN,
        f"{given[0][:_MAX_SHOWN]!r} is not a known name of this broker: use its address or its advertised name, or add the name "
        "to admin_allowed_hosts",
    )


def _is_own(origin: str, host: str, hosts: AdminHosts) -> bool:
    """Return whether pages of this origin may send requests: it is this broker's, or its host is allowed. `null` is neither."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None:
        return False
    default_port = _DEFAULT_PORTS[found[1]]
    name, port = _host_and_port(found[2])
    if name is None:
        return False
    own_name, own_port = _host_and_port(host)
    return hosts.allows(name) or (name, port or default_port) == (own_name, own_port or default_port)


def _host_and_port(authority: str) -> tuple[str | None, str]:
    """Return host and port of `name`, `name:port`, `[address]` or `[address]:port`; the host is None for anything else."""
    found = _AUTHORITY.fullmatch(authority)
    return (None, "") if found is None else (_canonical(found[1].strip("[]")), found[2] or "")


def _canonical(host: str) -> str:
    return host.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class CrossSiteGuard:
    """Answers requests that `refusal_of` refuses, before the application sees them or reads their bodies."""

    def __init__(self, app: ASGIApp, hosts: AdminHosts) -> None:
        self._app = app
        self._hosts = hosts
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = refusal_of(scope["method"], scope["raw_path"], scope["headers"], self._hosts)
        if refused is None:
            await self._app(scope, receive, send)
            return
        client = scope["client"][0] if scope["client"] else ""
        self._refusals.note(
            "admin.cross_site_refused", (client, refused.status), level=logging.WARNING, client=client, error=refused.reason
        )
        await send_reason(send, refused.status, refused.reason)


async def send_reason(send: Send, status: HTTPStatus, reason: str) -> None:
    """Answer with a status and the reason, and close the connection: the rest of the request is not read."""
    body = json.dumps({"reason": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
