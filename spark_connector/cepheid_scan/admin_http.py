"""The brokers' admin API for readers: JSON over HTTP with the standard library only, from any thread.

    pulsar://host:6650 ──GET──► 307 ──► http://host:8080 ──► 307 ──► the broker that serves the topic
    another address if one does not answer; all of them again, with growing pauses, for `retry_s`

Rules
1. A refusal is an answer: only addresses that cannot be reached, or are temporarily unavailable (502, 503, 504), are retried.
   So is a 404 that is not in a broker's form: a proxy without a broker would make topics and leases look deleted.
2. The target of a redirect is tried first the next time; when it stops answering, the given addresses are used again.
3. The token or password is sent to the given addresses and redirect targets, but is never in an error's text.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from cepheid_decode.errors import AdminRefusedError, BadOptionError, PlanUnavailableError
from cepheid_decode.scan_request import PlanSource
from cepheid_security import ClientTls, SecurityConfigurationError
from cepheid_security.client_environment import NoTokenError
from cepheid_security.oauth2 import TokenRefusedError

_MOST_REDIRECTS = 8
_MOST_IDLE = 16  # kept connections, over all addresses
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_ASK_AGAIN = (502, 503, 504)
_REDIRECTS = (301, 302, 307, 308)
_DEFAULT_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651, "http": 8080, "https": 8443}
_PROTOCOL_PORTS = ("pulsar", "pulsar+ssl")
"""Schemes of protocol ports, which answer HTTP with a redirect to the admin port."""
_OVER_TLS = ("https", "pulsar+ssl")

Origin = tuple[str, str, int]  # scheme, host, port


class _NoAnswerError(Exception):
    """One address did not answer: it, or another one, may be tried again."""


class AdminHttp:
    """HTTP calls to the admin API. `close` once. `timeout_s` limits each answer: a plan may have to open topics."""

    def __init__(self, source: PlanSource, *, timeout_s: float = 60.0) -> None:
        self._origins = origins_of(source)
        self._retry_s = source.retry_s
        self._timeout_s = timeout_s
        self._headers = {"Accept": "application/json"}
        self._secrets = source.secrets
        if isinstance(source.secrets.token, str):
            self._authorization()  # a token that cannot be sent is refused at once
        self._tls = source.tls or ClientTls.from_environment()
        self._context: ssl.SSLContext | None = None  # created when it is first needed
        self._led_to: dict[Origin, Origin] = {}
        self._idle: list[tuple[Origin, HTTPConnection]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<AdminHttp {self.addresses}>"

    @property
    def addresses(self) -> str:
        return ", ".join(f"{scheme}://{host}:{port}" for scheme, host, port in self._origins)

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        asked = {} if query is None else {name: value for name, value in query.items() if value is not None}
        return self.request("GET", f"{path}?{urlencode(asked, doseq=True)}" if asked else path)

    def request(self, method: str, path: str, *, body: Any = None) -> Any:
        """Return the decoded answer, None if it is empty. The request may be executed twice.

        Raises AdminRefusedError; PlanUnavailableError, which names every address and its answer.
        """
        if not path.isascii() or " " in path:
            raise BadOptionError(f"the path {path!r} is not encoded")
        sent = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self._retry_s
        pause_s = _FIRST_PAUSE_S
        while True:
            problems: dict[str, str] = {}
            for origin in self._origins:
                try:
                    return self._ask_following(origin, method, path, sent)
                except _NoAnswerError as error:
                    problems["{}://{}:{}".format(*origin)] = str(error)
            if time.monotonic() + pause_s > deadline:
                said = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
                raise PlanUnavailableError(f"no answer to {method} {path[:200]} within {self._retry_s:g} s: {said}", path=path)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _ask_following(self, origin: Origin, method: str, path: str, sent: bytes | None) -> Any:
        """Send a request, following redirects. Raises _NoAnswerError, AdminRefusedError."""
        at = self._led_to.get(origin, origin)
        try:
            if at[0] in _PROTOCOL_PORTS and method != "GET":
                at = self._admin_behind(origin)
            where, status, text = self._follow(at, method, path, sent)
        except _NoAnswerError:
            if self._led_to.pop(origin, origin) == origin:
                raise
            where, status, text = self._follow(origin, method, path, sent)  # rule 2
        if origin[0] in _PROTOCOL_PORTS and where[0] not in _PROTOCOL_PORTS:
            self._led_to.setdefault(origin, where)
        return _decoded(method, path, status, text)

    def _admin_behind(self, origin: Origin) -> Origin:
        """Return the admin port of a protocol port, which ignores bodies, so that changes are sent only to the admin port."""
        where, _, _ = self._follow(origin, "GET", "/admin/v2/clusters", None)
        self._led_to[origin] = where
        return where

    def _follow(self, origin: Origin, method: str, path: str, sent: bytes | None) -> tuple[Origin, int, bytes]:
        """Return the answer, with the admin port of the broker that was named, which may differ from the last one that answered."""
        named = origin
        for _ in range(_MOST_REDIRECTS):
            status, location, text = self._exchange(origin, method, path, sent)
            if status not in _REDIRECTS or not location:
                return named, status, text
            parts = urlsplit(location)
            target = _target(parts) if parts.netloc else origin
            if origin[0] in _OVER_TLS and target[0] not in _OVER_TLS:  # the token would be sent unencrypted
                raise _NoAnswerError(f"it redirects to {target[1]}:{target[2]} without TLS")
            if named[0] in _PROTOCOL_PORTS:
                named = target
            origin, path = target, parts.path + (f"?{parts.query}" if parts.query else "")
        raise _NoAnswerError(f"{_MOST_REDIRECTS} redirects, the last one to {path[:200]}")

    def _exchange(self, origin: Origin, method: str, path: str, sent: bytes | None) -> tuple[int, str, bytes]:
        """Return status, Location, body. A kept connection that the server has closed meanwhile is not counted as its failure."""
        headers = self._headers if sent is None else {**self._headers, "Content-Type": "application/json"}
        if (authorization := self._authorization()) is not None:
            headers = {**headers, "Authorization": authorization}
        for connection in self._connections(origin):
            fresh = connection.sock is None
            try:
                connection.request(method, path, sent, headers)
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, HTTPException, ValueError) as error:
                connection.close()
                if fresh or not isinstance(error, ConnectionError):
                    raise _NoAnswerError(_why(error)) from None
                continue
            self._keep(origin, connection, answer)
            return answer.status, answer.getheader("Location", ""), text
        raise AssertionError("the last connection is a fresh one")

    def _authorization(self) -> str | None:
        """Return the header for this request: a token may expire during a long read. Raises BadOptionError, _NoAnswerError."""
        try:
            return self._secrets.authorization()
        except (TokenRefusedError, SecurityConfigurationError, NoTokenError) as error:
            raise BadOptionError(str(error)) from None
        except Exception as error:  # the issuer does not answer now, or the caller's function raised
            raise _NoAnswerError(f"no token: {error or type(error).__name__}") from None

    def _connections(self, origin: Origin) -> Iterator[HTTPConnection]:
        """Yield a kept connection if there is one, then a new one."""
        with self._lock:
            place = next((place for place, (kept, _) in enumerate(self._idle) if kept == origin), None)
            found = None if place is None else self._idle.pop(place)[1]
        if found is not None:
            yield found
        scheme, host, port = origin
        if scheme in _OVER_TLS:
            yield HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls_context())
        else:
            yield HTTPConnection(host, port, timeout=self._timeout_s)

    def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises BadOptionError for an unusable file."""
        if self._context is None:
            try:
                self._context = self._tls.context()
            except SecurityConfigurationError as error:
                raise BadOptionError(str(error)) from None
        return self._context

    def _keep(self, origin: Origin, connection: HTTPConnection, answer: HTTPResponse) -> None:
        if answer.will_close:
            connection.close()
            return
        with self._lock:
            self._idle.append((origin, connection))
            surplus = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        if surplus is not None:
            surplus.close()


def origins_of(source: PlanSource) -> list[Origin]:
    """Return the origins of the admin URL, otherwise of the service URL. Raises BadOptionError."""
    url = source.admin_url or source.service_url
    if not url:
        raise BadOptionError("no cluster is given: set service.url (pulsar://host:6650) or metadata (zk://…)")
    if "@" in url:
        raise BadOptionError("an address must not contain user and password: brokers accept a token")  # shows no password
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _DEFAULT_PORTS:
        raise BadOptionError(f"{url!r} is not an address: it looks like pulsar://host:6650 or http://host:8080", value=url)
    hosts = [host.strip().removeprefix(f"{scheme}://") for host in rest.split(",")]  # users may repeat it before each host
    return [_origin(scheme, host, url) for host in hosts]


def _origin(scheme: str, host: str, text: str) -> Origin:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        port, name = parts.port, parts.hostname or ""
    except ValueError:
        port, name = 0, ""
    if not name or port == 0 or " " in name or parts.path.strip("/") or parts.query or parts.fragment:
        raise BadOptionError(
            f"{text!r} is not an address of a broker: it looks like pulsar://host:6650 or http://host:8080", value=text
        )
    return scheme, name, port or _DEFAULT_PORTS[scheme]


def _target(parts: SplitResult) -> Origin:
    """Return the target of a redirect. Raises _NoAnswerError."""
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise _NoAnswerError(f"a redirect to {parts.geturl()[:200]}") from None
    return parts.scheme, parts.hostname or "", port


def _decoded(method: str, path: str, status: int, text: bytes) -> Any:
    """Return the decoded answer. Raises _NoAnswerError, AdminRefusedError.

    A broker's refusal is `{"reason": text}`; some proxies answer with pages.
    """
    try:
        said, is_json = json.loads(text or b"null"), True
    except ValueError:
        said, is_json = text.decode(errors="replace"), False
    found = said.get("reason") if isinstance(said, dict) else None
    reason = str(found or said or "no reason given")[:500]
    if status in _ASK_AGAIN or (status == 404 and not isinstance(found, str)):
        raise _NoAnswerError(f"status {status}, {reason}")
    if status >= 300:
        raise AdminRefusedError(f"{method} {path.partition('?')[0]}: {status}, {reason}", status=status, reason=reason)
    if not is_json:
        raise _NoAnswerError(f"an answer that is not JSON ({len(text)} bytes): is it the admin API of a broker?")
    return said


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
