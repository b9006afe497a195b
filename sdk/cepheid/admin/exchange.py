"""Requests and answers of admin calls, without I/O, which `connection.py` and `blocking_connection.py` do.

    path, query, body ──► Ask ──HTTP──► Answer ──► value, or an error of `cepheid.errors`
                           └── 307: the same Ask at the broker that serves the topic

Names in a path are percent-encoded, subscriptions and topics of schemas twice (docs/admin.md, rule 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, urlencode, urlsplit

from cepheid.errors import ConflictError, ConnectError, NotAllowedError, NotFoundError, PreconditionError, RefusedError, UsageError
from cepheid_wire import PATH_STEPS, InvalidTopicNameError, NamespaceName, TopicName

if TYPE_CHECKING:
    from cepheid.message_id import MessageId

DEFAULT_URL = "http://127.0.0.1:8080"
MAX_REDIRECTS = 5
_PORTS = {"http": 8080, "https": 8443}
_BY_STATUS: dict[int, type[RefusedError]] = {
    HTTPStatus.UNAUTHORIZED: NotAllowedError,
    HTTPStatus.FORBIDDEN: NotAllowedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.METHOD_NOT_ALLOWED: NotAllowedError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.PRECONDITION_FAILED: PreconditionError,
    HTTPStatus.NOT_IMPLEMENTED: NotAllowedError,
}


_TOPIC_PATHS = (
    "/admin/v2/persistent/",
    "/admin/v2/non-persistent/",
    "/admin/v2/schemas/",
    "/lookup/v2/topic/",
    "/cepheid/v1/topics/",
)


class UnknownNameError(NotFoundError):
    """An object that an admin call names does not exist: a bookie, a ledger, a namespace, anything but a topic.

    The message tells which.
    """

    hint: ClassVar[str] = "check the name"


@dataclass(frozen=True, slots=True)
class Place:
    """The address of an admin API."""

    host: str
    port: int
    over_tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.over_tls else 'http'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `target` is path and query as sent."""

    method: str
    target: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """An entry of a topic. `headers` has its attributes, by the names of the API (`x-pulsar-message-id`, …)."""

    payload: bytes
    headers: Mapping[str, str]


def parse_admin_url(url: str) -> tuple[Place, ...]:
    """Return the addresses of an admin URL: http://HOST[:PORT][,HOST[:PORT]…], or https://. Raises UsageError."""
    scheme, separator, rest = url.partition("://")
    if scheme not in _PORTS or not separator:
        raise UsageError(f"{url!r} is not an admin address: it begins with http:// or https://, as {DEFAULT_URL}")
    places = []
    for part in rest.rstrip("/").split(","):
        try:
            split = urlsplit(f"//{part}")
            host, port = split.hostname, split.port
        except ValueError as error:
            raise UsageError(f"{url!r} is not an admin address: {error}; it looks like {DEFAULT_URL}") from None
        if not host or split.path or split.query or split.username is not None:
            raise UsageError(f"{url!r} is not an admin address: {part!r} is not HOST or HOST:PORT; it looks like {DEFAULT_URL}")
        places.append(Place(host, _PORTS[scheme] if port is None else port, scheme == "https"))
    return tuple(places)


def ask(method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Ask:
    """Return the request of a call. Values None in `query` are left out; a list repeats the parameter."""
    given = {name: _query_value(value) for name, value in (query or {}).items() if value is not None}
    target = f"{path}?{urlencode(given, doseq=True)}" if given else path
    return Ask(method, target, None if body is None else json.dumps(body).encode())


def _query_value(value: Any) -> Any:
    if isinstance(value, bool):
        return json.dumps(value)
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


def head_of(ask: Ask, place: Place, authorization: str | None) -> dict[str, str]:
    """Return the headers of a request."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    headers = {"Host": f"{host}:{place.port}", "Accept": "application/json", "Connection": "close"}
    if authorization is not None:
        headers["Authorization"] = authorization
    if ask.body is not None:
        headers["Content-Type"] = "application/json"
    if ask.body is not None or ask.method in ("PUT", "POST"):
        headers["Content-Length"] = str(len(ask.body or b""))
    return headers


def redirected(ask: Ask, place: Place, status: int, headers: Mapping[str, str]) -> tuple[Ask, Place] | None:
    """Return the same call at another broker if this one redirects to it. Raises ConnectError."""
    if status != HTTPStatus.TEMPORARY_REDIRECT or "location" not in headers:
        return None
    parts = urlsplit(headers["location"])
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConnectError(f"{place} redirects {ask.method} {ask.target} to {headers['location']!r}, which is not an admin address")
    if place.over_tls and parts.scheme != "https":  # the credentials would be sent unencrypted
        raise ConnectError(
            f"{place} redirects this call to {parts.netloc} without TLS: let that broker advertise its https address"
        )
    there = Place(parts.hostname, parts.port or _PORTS[parts.scheme], parts.scheme == "https")
    return Ask(ask.method, f"{parts.path}?{parts.query}" if parts.query else parts.path, ask.body), there


def check_status(ask: Ask, answer: Answer) -> None:
    """Raise the error of a refusal, with the server's reason; RefusedError for a status without its own class."""
    if answer.status < HTTPStatus.MULTIPLE_CHOICES:
        return
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = "no reason given"
    reason = _reason(answer.content) or phrase
    kind = _BY_STATUS.get(answer.status, RefusedError)
    if kind is NotFoundError and not ask.target.startswith(_TOPIC_PATHS):
        kind = UnknownNameError
    raise kind(f"{reason} ({ask.method} {ask.target}: {answer.status})", status=answer.status)


def value_of(answer: Answer) -> Any:
    """Return JSON decoded, text as str, other content as bytes, no content as None."""
    if not answer.content:
        return None
    kind = answer.headers.get("content-type", "")
    if "json" in kind:
        return json.loads(answer.content)
    return answer.content.decode(errors="replace") if kind.startswith("text/") else answer.content


def _reason(content: bytes) -> str:
    try:
        found = json.loads(content)
    except ValueError:
        return content.decode(errors="replace").strip()
    return str(found.get("reason", "")) if isinstance(found, dict) else str(found)


def no_answer(place: Place, error: BaseException) -> ConnectError:
    return ConnectError(f"no admin API answers at {place}: {error or type(error).__name__}")


def segment(name: object) -> str:
    """Return a name as one segment of a path, whatever it contains.

    Raises UsageError for `.` and `..`: even quoted they count as steps of the path, to another call.
    """
    if str(name) in PATH_STEPS:
        raise UsageError(f"{str(name)!r} cannot be a name in a path: choose another one")
    return quote(str(name), safe="")


def twice(name: str) -> str:
    """Return a name as a path segment that the broker decodes twice."""
    return segment(segment(name))


def namespace_path(namespace: str) -> str:
    """Return TENANT/NAMESPACE. Raises UsageError."""
    try:
        name = NamespaceName.parse(namespace)
    except InvalidTopicNameError as error:
        raise UsageError(str(error)) from None
    return f"{segment(name.tenant)}/{segment(name.local_name)}"


def topic_path(topic: str) -> str:
    """Return DOMAIN/TENANT/NAMESPACE/TOPIC of a short or full name. Raises UsageError."""
    name = _parsed(topic)
    return f"{name.domain}/{namespace_path(str(name.namespace))}/{segment(name.local_name)}"


def schema_path(topic: str) -> str:
    """Return TENANT/NAMESPACE/TOPIC as needed by calls about schemas: both domains share a schema. Raises UsageError."""
    name = _parsed(topic)
    return f"{namespace_path(str(name.namespace))}/{twice(name.local_name)}"


def _parsed(topic: str) -> TopicName:
    try:
        return TopicName.parse(topic)
    except InvalidTopicNameError as error:
        raise UsageError(str(error)) from None


def message_place(message_id: MessageId | Mapping[str, Any] | None) -> Any:
    """Return a message id in the API's form; unchanged if it has that form already."""
    if message_id is None or isinstance(message_id, Mapping):
        return message_id
    place = {"ledgerId": message_id.ledger_id, "entryId": message_id.entry_id, "partitionIndex": message_id.partition}
    return place if message_id.batch_index < 0 else {**place, "batchIndex": message_id.batch_index}
