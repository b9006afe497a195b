"""The admin REST API for command lines: one blocking call per request, on the standard library alone.

A redirect to another broker (307) is followed. A status of 300 and more becomes an `AdminError` that names call, status and the
server's reason; no answer becomes an `AdminUnreachableError` that names the address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from cepheid_cli.client_security import own_tls, own_token
from cepheid_ports import CepheidError
from cepheid_wire import NamespaceName, TopicName, check_tenant

DEFAULT_URL = "http://127.0.0.1:8080"
_MAX_REDIRECTS = 5
_PIECE_BYTES = 1 << 20


class AdminError(CepheidError):
    """The server refused; its own reason says what to do. `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int, **facts: Any) -> None:
        super().__init__(message, status=status, **facts)
        self.status = status


class AdminUnreachableError(CepheidError):
    """Nobody answers there, or it is no admin API."""

    retriable = True
    hint = "start a server, or name its admin address with --admin-url"


class AdminClient:
    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = 60.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        token = own_token()
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("a scheme or a host is missing")
            self._connection = self._connect(parts)
        except ValueError as error:
            raise AdminUnreachableError(f"{url!r} is no admin address: {error}; it looks like {DEFAULT_URL}", url=url) from None

    def __repr__(self) -> str:
        return f"<AdminClient {self.url}>"

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, query)

    def put(self, path: str, body: Any = None, **query: Any) -> Any:
        return self.call("PUT", path, query, body)

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return self.call("POST", path, query, body)

    def delete(self, path: str, **query: Any) -> Any:
        return self.call("DELETE", path, query)

    def call(self, method: str, path: str, query: Mapping[str, Any], body: Any = None) -> Any:
        """The decoded JSON of the answer; None when there is none, bytes when it is something else."""
        return self.call_raw(method, path, query, body)[0]

    def call_raw(self, method: str, path: str, query: Mapping[str, Any], body: Any = None) -> tuple[Any, Mapping[str, str]]:
        """The same with the answer's headers (names in lower case)."""
        given = {name: _query_value(value) for name, value in query.items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        headers = {"Accept": "application/json", **self._authorization}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        url, connection = self.url, self._connection
        for _ in range(_MAX_REDIRECTS):
            status, content, answered = _ask(url, connection, method, target, data, headers)
            if status != HTTPStatus.TEMPORARY_REDIRECT or "location" not in answered:
                break
            # Another broker serves that topic: the same call there, body and all.
            parts = urlsplit(answered["location"])
            if url.startswith("https:") and parts.scheme != "https":  # the token would cross the network in the clear
                raise AdminUnreachableError(f"{url} sends this call to {parts.netloc} without TLS", url=url)
            url, connection = f"{parts.scheme}://{parts.netloc}", self._connect(parts)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            reason = _reason(content) or HTTPStatus(status).phrase
            raise AdminError(f"{reason} ({method} {target}: {status})", status=status)
        return _decoded(content, answered.get("content-type", "")), answered

    def download(self, path: str) -> Iterator[bytes]:
        """Return the body of an answer in pieces, as they arrive. Raises AdminError; AdminUnreachableError, in the middle too."""
        try:
            self._connection.request("GET", path, headers=self._authorization)
            response = self._connection.getresponse()
            if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                reason = _reason(response.read()) or HTTPStatus(response.status).phrase
                raise AdminError(f"{reason} (GET {path}: {response.status})", status=response.status)
            while piece := response.read1(_PIECE_BYTES):
                yield piece
        except (OSError, HTTPException) as error:
            raise AdminUnreachableError(f"the answer of {self.url} broke off: {error!r}", url=self.url) from None
        finally:
            self._connection.close()

    def _connect(self, parts: SplitResult) -> HTTPConnection:
        if parts.scheme == "https":
            return HTTPSConnection(parts.hostname or "", parts.port or 8443, timeout=self._timeout_s, context=own_tls())
        return HTTPConnection(parts.hostname or "", parts.port, timeout=self._timeout_s)


def _ask(
    url: str, connection: HTTPConnection, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
) -> tuple[int, bytes, dict[str, str]]:
    """Status, content, headers with names in lower case. Raises AdminUnreachableError."""
    try:
        connection.request(method, target, body=data, headers=dict(headers))
        response = connection.getresponse()
        content = response.read()
    except (OSError, HTTPException) as error:
        raise AdminUnreachableError(f"no admin API answers at {url}: {error}", url=url) from None
    finally:
        connection.close()  # nobody has to: a command makes a call or two
    return response.status, content, {name.lower(): value for name, value in response.getheaders()}


def topic_path(topic: str) -> str:
    """`/admin/v2/DOMAIN/TENANT/NAMESPACE/TOPIC` of a short or full name."""
    name = TopicName.parse(topic)
    namespace = name.namespace
    return f"/admin/v2/{name.domain}/{quoted(namespace.tenant)}/{quoted(namespace.local_name)}/{quoted(name.local_name)}"


def topic_parts(admin: AdminClient, topic: str) -> list[str]:
    """The partitions of a partitioned topic, else the topic itself. Raises AdminError with 404 when there is none."""
    name = TopicName.parse(topic)
    try:
        partitions = int(admin.get(f"{topic_path(topic)}/partitions", checkAllowAutoCreation=False)["partitions"])
    except AdminError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise AdminError(f"topic {topic} does not exist", status=error.status) from None
        raise
    return [str(name.partition(index)) for index in range(partitions)] or [str(name)]


def tenant_path(tenant: str) -> str:
    """`/admin/v2/tenants/TENANT`. Raises InvalidTopicNameError."""
    return f"/admin/v2/tenants/{quoted(check_tenant(tenant))}"


def namespace_path(namespace: str) -> str:
    name = NamespaceName.parse(namespace)
    return f"/admin/v2/namespaces/{quoted(name.tenant)}/{quoted(name.local_name)}"


def subscription_path(topic: str, subscription: str) -> str:
    return f"{topic_path(topic)}/subscription/{quoted(quoted(subscription))}"  # decoded twice (docs/admin.md, rule 2)


def quoted(name: str) -> str:
    """One segment of a path, whatever it contains."""
    return quote(name, safe="")


def _query_value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _decoded(content: bytes, content_type: str) -> Any:
    if not content:
        return None
    if "json" in content_type:
        return json.loads(content)
    return content


def _reason(content: bytes) -> str:
    try:
        found = json.loads(content)
    except ValueError:
        return content.decode(errors="replace").strip()
    return str(found.get("reason", "")) if isinstance(found, dict) else str(found)
