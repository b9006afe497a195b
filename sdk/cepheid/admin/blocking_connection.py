"""Blocking HTTP for admin calls, on the standard library: a connection for each call."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any

from cepheid.admin.exchange import (
    MAX_REDIRECTS,
    Answer,
    Ask,
    Place,
    StoredMessage,
    ask,
    check_status,
    head_of,
    no_answer,
    redirected,
    value_of,
)
from cepheid.errors import ClosedError, ConnectError, TimedOutError

if TYPE_CHECKING:
    from cepheid.credentials import Security

_PIECE_BYTES = 1 << 20


class BlockingCalls:
    """Makes the calls of one `Admin`. Each has its own connection, so several threads may make calls."""

    def __init__(self, places: tuple[Place, ...], security: Security, *, request_timeout_s: float) -> None:
        self._places = places
        self._security = security
        self._timeout_s = request_timeout_s
        self._tls: ssl.SSLContext | None = None
        self.is_closed = False

    def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Return the decoded answer. Raises RefusedError and its subclasses, ConnectError, TimedOutError, ClosedError."""
        return value_of(self._answer(ask(method, path, query, body)))

    def message(self, method: str, path: str, query: Mapping[str, Any] | None = None) -> StoredMessage:
        """Return a stored message. Raises the errors of `call`."""
        answer = self._answer(ask(method, path, query))
        return StoredMessage(answer.content, answer.headers)

    def pieces(self, method: str, path: str, query: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """Yield the body in pieces as they arrive, each within the time limit. Raises the errors of `call`, also between pieces."""
        wanted = ask(method, path, query)
        place, connection, response, headers = self._exchange(wanted)
        try:
            if response.status >= 300:
                check_status(wanted, Answer(response.status, headers, response.read()))
            while piece := response.read1(_PIECE_BYTES):
                yield piece
            if response.length:
                raise EOFError(f"{response.length} bytes are missing")
        except (OSError, HTTPException, EOFError) as error:
            raise ConnectError(f"the answer of {place} broke off: {error!r}") from None
        finally:
            connection.close()

    def _answer(self, wanted: Ask) -> Answer:
        place, connection, response, headers = self._exchange(wanted)
        try:
            answer = Answer(response.status, headers, response.read())
        except TimeoutError:
            raise self._timed_out(wanted, place) from None
        except (OSError, HTTPException) as error:
            raise ConnectError(f"the answer of {place} broke off: {error!r}") from None
        finally:
            connection.close()
        check_status(wanted, answer)
        return answer

    def _exchange(self, wanted: Ask) -> tuple[Place, HTTPConnection, HTTPResponse, dict[str, str]]:
        """Send a request, following redirects, and return the answer before its body is read."""
        if self.is_closed:
            raise ClosedError("the admin client is closed")
        authorization = self._security.authorization_now()
        place, connection = self._connect_any()
        for left in reversed(range(MAX_REDIRECTS + 1)):
            try:
                headers = head_of(wanted, place, authorization)
                connection.request(wanted.method, wanted.target, body=wanted.body, headers=headers)
                response = connection.getresponse()
            except TimeoutError:
                connection.close()
                raise self._timed_out(wanted, place) from None
            except (OSError, HTTPException) as error:
                connection.close()
                raise no_answer(place, error) from None
            answered = {name.lower(): value for name, value in response.getheaders()}
            try:
                elsewhere = redirected(wanted, place, response.status, answered)
            except ConnectError:
                connection.close()
                raise
            if elsewhere is None:
                return place, connection, response, answered
            connection.close()
            wanted, place = elsewhere
            if left:
                connection = self._connect(place)
        raise ConnectError(f"{wanted.method} {wanted.target} was redirected {MAX_REDIRECTS} times, last to {place}")

    def _connect_any(self) -> tuple[Place, HTTPConnection]:
        """Connect to the first address that accepts the connection."""
        for place in self._places[:-1]:
            try:
                return place, self._connect(place)
            except (ConnectError, TimedOutError):
                continue
        return self._places[-1], self._connect(self._places[-1])

    def _connect(self, place: Place) -> HTTPConnection:
        connection: HTTPConnection
        if place.over_tls:
            if self._tls is None:
                self._tls = self._security.tls_context()
            connection = HTTPSConnection(place.host, place.port, timeout=self._timeout_s, context=self._tls)
        else:
            connection = HTTPConnection(place.host, place.port, timeout=self._timeout_s)
        try:
            connection.connect()
        except TimeoutError:
            raise TimedOutError(f"{place} took no connection within {self._timeout_s} s") from None
        except OSError as error:
            raise no_answer(place, error) from None
        return connection

    def _timed_out(self, wanted: Ask, place: Place) -> TimedOutError:
        return TimedOutError(f"{place} did not answer {wanted.method} {wanted.target} within {self._timeout_s} s")
