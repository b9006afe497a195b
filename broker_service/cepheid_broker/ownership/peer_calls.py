"""Call another broker's admin API, for work on topics that it serves.

    call ──► connect ──► request ──► answer ──► 307? repeat at the address it names ──► JSON, or RemoteRefusedError

Each call opens a connection: calls are rare (administration), and brokers start and stop. Calls have a timeout, answers a bound.
A call on behalf of a client names the client's role, for the audit log of the other broker.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from cepheid_broker.errors import BrokerError, ServiceNotReadyError
from cepheid_broker.ownership.ownership import There
from cepheid_wire import TopicName

ACTING_FOR: ContextVar[str] = ContextVar("acting_for", default="")
"""Role of the client whose request is being served, or "". Tasks that work on the request inherit it."""
ACTING_FOR_HEADER = b"x-cepheid-acting-for"
"""Header with that role, percent-encoded. Only other brokers may send it."""

_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 4
_READ_BYTES = 1 << 16


def token_from(path: str | None) -> Callable[[], str]:
    """Return a function that reads this broker's token, or "" without a file. It reads the file at each call, since an expiring
    token is replaced there. The function raises OSError."""
    return lambda: "" if path is None else Path(path).read_text(encoding="ascii").strip()


class RemoteRefusedError(BrokerError):
    """The broker that serves the topic refuses the call. `status` is its HTTP status; the message has its reason."""

    hint = "the reason is the other broker's; its log has more"

    def __init__(self, message: str, *, status: int, **facts: Any) -> None:
        super().__init__(message, status=status, **facts)
        self.status = status


class PeerUnreachableError(ServiceNotReadyError):
    hint = "the broker that serves the topic does not answer; if it is gone another takes over when its session ends: ask again"


class PeerSilentError(PeerUnreachableError):
    """The call was sent and not answered: whether the other broker carried it out is unknown."""


class PeerCalls:
    """Calls of one broker to others.

    `tls` returns the context of the next call; None: other brokers are called without TLS. `token` returns the token that this
    broker authenticates with, or "".
    """

    def __init__(
        self, timeout_s: float, *, tls: Callable[[], ssl.SSLContext] | None = None, token: Callable[[], str] = lambda: ""
    ) -> None:
        self.made = 0
        self.failed = 0
        self._timeout_s = timeout_s
        self._tls = tls
        self._token = token

    def __repr__(self) -> str:
        return f"<PeerCalls {self.made} made, {self.failed} failed>"

    async def call(self, there: There, method: str, target: str, body: bytes = b"") -> Any:
        """Return the answer's JSON, or None if it is empty. Raises RemoteRefusedError, PeerUnreachableError, PeerSilentError."""
        address = there.admin_url(over_tls=self._tls is not None) or ""
        self.made += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                status, content = await self._follow(address, method, target, body)
            if status < HTTPStatus.MULTIPLE_CHOICES:
                return json.loads(content) if content else None
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            self.failed += 1
            message = f"broker {there.broker_id} at {address} does not answer {method} {target}: {str(error) or 'timeout'}"
            kind = PeerSilentError if isinstance(error, (TimeoutError, EOFError)) else PeerUnreachableError
            raise kind(message, broker=there.broker_id) from error
        self.failed += 1
        message = f"broker {there.broker_id} answers {method} {target} with {status}: {_reason(content)}"
        raise RemoteRefusedError(message, status=status, broker=there.broker_id)

    async def _follow(self, url: str, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        """Follow redirects and return the last status and content. Raises what `_ask` raises."""
        for _ in range(_MAX_REDIRECTS):
            status, location, content = await self._ask(url, method, target, body)
            if status != HTTPStatus.TEMPORARY_REDIRECT:
                return status, content
            parts = urlsplit(location)  # the bundle has just moved
            if url.startswith("https:") and parts.scheme != "https":
                raise OSError(f"{url} sends this call to {parts.netloc} without TLS")
            url, target = f"{parts.scheme}://{parts.netloc}", f"{parts.path}?{parts.query}" if parts.query else parts.path
        raise OSError(f"{_MAX_REDIRECTS} redirects, the last one to {url}: brokers do not agree yet who serves it")

    async def _ask(self, url: str, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """Send one request and return status, `Location` and content. Raises OSError, EOFError, ValueError."""
        scheme, _, address = url.partition("://")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise OSError(f"{url!r} is no address of an admin API")
        if scheme == "https" and self._tls is None:
            raise OSError(f"{url} needs TLS, and this broker has no CA for it: set tls.ca_file")
        token = self._token()
        if token and self._tls is not None and scheme != "https":
            raise OSError(f"{url} has no TLS, and this broker shows its token only over TLS")
        tls = self._tls() if scheme == "https" and self._tls is not None else None
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls)
        try:
            head = [f"{method} {target} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(body)}", "Connection: close"]
            if token:
                head.append(f"Authorization: Bearer {token}")
            if role := ACTING_FOR.get():
                head.append(f"{ACTING_FOR_HEADER.decode()}: {quote(role, safe='')}")
            if body:
                head.append("Content-Type: application/json")
            writer.write("\r\n".join([*head, "", ""]).encode("ascii") + body)
            return await _read_answer(reader)
        except BaseException:
            writer.transport.abort()  # a connection with TLS would wait for the other side to close it
            raise
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass


def topic_path(topic: TopicName) -> str:
    """Return the path of the topic in the admin API."""
    namespace = topic.namespace
    names = (quote(name, safe="") for name in (namespace.tenant, namespace.local_name, topic.local_name))
    return f"/admin/v2/{topic.domain}/{'/'.join(names)}"


class _Answer:
    """The answer as parsed so far. httptools calls the methods by these names."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.location = ""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"location":
            self.location = value.decode("ascii", errors="replace")

    def on_body(self, body: bytes) -> None:
        self.content += body

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    from httptools import HttpParserError, HttpResponseParser

    answer = _Answer()
    parser = HttpResponseParser(answer)
    while not answer.complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            raise EOFError("it closed the connection in the middle of its answer")
        try:
            parser.feed_data(data)
        except HttpParserError as error:
            raise EOFError(f"what it answers is no HTTP: {error}") from None
        if len(answer.content) > _MAX_ANSWER_BYTES:
            raise EOFError(f"its answer has more than {_MAX_ANSWER_BYTES} bytes")
    return parser.get_status_code(), answer.location, bytes(answer.content)


def _reason(content: bytes) -> str:
    try:
        found = json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace").strip()
    return str(found.get("reason", ""))[:2000] if isinstance(found, dict) else str(found)[:2000]
