"""The admin API of brokers for readers: JSON over HTTP on the standard library alone, from any thread.

    pulsar://host:6650 ──GET──► 307 ──► http://host:8080 ──► 307 ──► the broker that serves the topic
    another address when one does not answer; all of them again, later and later, for `retry_s`

Rules
1. A refusal is an answer: only who cannot be reached, or says that it cannot say now (502, 503, 504), is asked again. So is
   who says 404 in words that are no broker's: a proxy that has no way to one would make topics and leases look gone.
2. Where a redirect led once is asked first the next time; when it stops answering the given addresses count again.
3. The token or password goes to the given addresses and where they redirect, never into an error's text.
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
"""They answer HTTP with a redirect to the admin port."""
_OVER_TLS = ("https", "pulsar+ssl")

Origin = tuple[str, str, int]  # scheme, host, port


class _NoAnswerError(Exception):
    """Of one address: it may be tried again, or another one."""


class AdminHttp:
    """`close` once. `timeout_s` bounds each answer: a plan may have to open topics."""

    def __init__(self, source: PlanSource, *, timeout_s: float = 60.0) -> None:
        self._origins = origins_of(source)
        self._retry_s = source.retry_s
        self._timeout_s = timeout_s
        self._headers = {"Accept": "application/json"}
        self._secrets = source.secrets
        if isinstance(source.secrets.token, str):
            self._authorization()  # a token that cannot be sent is refused at once
        self._tls = source.tls or ClientTls.from_environment()
        self._context: ssl.SSLContext | None = None  # made when it is needed first
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
        """Return the decoded answer, None when it is empty. The request may be done twice.

        Raises AdminRefusedError; PlanUnavailableError, which names every address and what it said.
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
        """Raises _NoAnswerError, AdminRefusedError."""
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
        """Of a protocol port. It looks at no body, so what changes something is sent to the admin port alone."""
        where, _, _ = self._follow(origin, "GET", "/admin/v2/clusters", None)
        self._led_to[origin] = where
        return where

    def _follow(self, origin: Origin, method: str, path: str, sent: bytes | None) -> tuple[Origin, int, bytes]:
        """With the admin port of the broker that was named, which may not be the one that answered in the end."""
        named = origin
        for _ in range(_MOST_REDIRECTS):
            status, location, text = self._exchange(origin, method, path, sent)
            if status not in _REDIRECTS or not location:
                return named, status, text
            parts = urlsplit(location)
            target = _target(parts) if parts.netloc else origin
            if origin[0] in _OVER_TLS and target[0] not in _OVER_TLS:  # the token would cross the network in the clear
                raise _NoAnswerError(f"it redirects to {target[1]}:{target[2]} without TLS")
            if named[0] in _PROTOCOL_PORTS:
                named = target
            origin, path = target, parts.path + (f"?{parts.query}" if parts.query else "")
        raise _NoAnswerError(f"{_MOST_REDIRECTS} redirects, the last one to {path[:200]}")

    def _exchange(self, origin: Origin, method: str, path: str, sent: bytes | None) -> tuple[int, str, bytes]:
        """Status, Location, body. A kept connection that the server has closed meanwhile is no problem of the server."""
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
        except Exception as error:  # the issuer does not answer at this moment, or the caller's function raised
            raise _NoAnswerError(f"no token: {error or type(error).__name__}") from None

    def _connections(self, origin: Origin) -> Iterator[HTTPConnection]:
        """A kept one if there is one, then a fresh one."""
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
        """Raises BadOptionError: a file that is named cannot be used."""
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
    """Of the admin URL, else of the service URL. Raises BadOptionError."""
    url = source.admin_url or source.service_url
    if not url:
        raise BadOptionError("nobody to ask where the history lies: name service.url (pulsar://host:6650) or metadata (zk://…)")
    if "@" in url:
        raise BadOptionError("an address has no user and password: brokers take a token")  # nor does this one get into the text
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _DEFAULT_PORTS:
        raise BadOptionError(f"{url!r} is no address: it looks like pulsar://host:6650 or http://host:8080", value=url)
    hosts = [host.strip().removeprefix(f"{scheme}://") for host in rest.split(",")]  # people write it before each
    return [_origin(scheme, host, url) for host in hosts]


def _origin(scheme: str, host: str, text: str) -> Origin:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        port, name = parts.port, parts.hostname or ""
    except ValueError:
        port, name = 0, ""
    if not name or port == 0 or " " in name or parts.path.strip("/") or parts.query or parts.fragment:
        raise BadOptionError(
            f"{text!r} is no address of a broker: it looks like pulsar://host:6650 or http://host:8080", value=text
        )
    return scheme, name, port or _DEFAULT_PORTS[scheme]


def _target(parts: SplitResult) -> Origin:
    """Of a redirect. Raises _NoAnswerError."""
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise _NoAnswerError(f"a redirect to {parts.geturl()[:200]}") from None
    return parts.scheme, parts.hostname or "", port


def _decoded(method: str, path: str, status: int, text: bytes) -> Any:
    """Raises _NoAnswerError, AdminRefusedError. A broker's refusal is `{"reason": text}`; some proxies answer with pages."""
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
        raise _NoAnswerError(f"an answer that is no JSON ({len(text)} bytes): is it the admin API of a broker?")
    return said


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
