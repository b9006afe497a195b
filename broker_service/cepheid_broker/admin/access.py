"""Authorization and audit of the admin API, in one place: every call passes here before its body is read.

    AdminAuthentication ──► CallAccess: a Call in the scope ──► router ──► guard: row of the table? allowed? ──► handler
                                 └── before the answer: a line in the audit log, if the call changed something

Rules
1. A call needs what its row in access_table.py says. A call without a row is denied.
2. The guard reads tenant, namespace and topic exactly as the handler does (`noun_reader`).
3. Other brokers make calls on parts of a topic after they authorized the client themselves. They are recognized by their role, and
   name the client's role in a header, for the audit log.
4. Without authorization everything is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fastapi import Request
from fastapi.routing import APIRoute

from cepheid_broker.admin.access_table import ACCESS, Access, audited_path
from cepheid_broker.admin.authentication import PRINCIPAL
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.path_names import NounReader, PathNoun, noun_reader, subscription_in
from cepheid_broker.authorizer import refusal
from cepheid_broker.ownership import ACTING_FOR, ACTING_FOR_HEADER
from cepheid_metadata import TenantRecord, grants_of
from cepheid_ports import CepheidError
from cepheid_security import Decision, Need, Principal, decide
from cepheid_security.audit import MAX_CHANGE_CHARACTERS, Result
from cepheid_wire import NamespaceName, TopicName

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CALL = "cepheid.call"
_ROOM_FOR_MORE = 30  # characters
_DECIDED_IN_ONE_GO = 500  # topics: a few ms of the loop
_ORIGINAL_PRINCIPAL = b"x-original-principal"
"""Header in which a proxy names the role that it acts for, as in Pulsar (docs/reference/behaviours.md §12)."""
SCOPED_NEEDS = frozenset({Need.PRODUCE, Need.CONSUME, Need.PRODUCE_OR_CONSUME, Need.NAMESPACE_READ, Need.TENANT_ADMIN})
"""Needs that concern a tenant, a namespace or a topic."""


@dataclass(slots=True)
class Call:
    """One request, as seen by authorization and the audit log."""

    principal: Principal | None
    peer: str
    operation: str
    """Method and path; the path's template once the route is known."""
    object: str
    """The path, without values that may be secret (`audited_path`); if denied, the topic or namespace."""
    acting_for: str = ""
    """Role of the client for which another broker makes the call."""
    access: Access | None = None
    is_peer: bool = False
    denied: bool = False
    invalid_name: str = ""
    """Why a name in the request is invalid; "" if all are valid."""
    change: str = ""
    """What the call changes, where its path does not say it (`describe_change`)."""

    @property
    def client_role(self) -> str:
        """The role on whose behalf the call is finally made."""
        if self.acting_for or self.principal is None:
            return self.acting_for
        return self.principal.original_role or self.principal.role

    @property
    def is_audited(self) -> bool:
        if self.access is None:
            return False  # it reached no route
        return not self.operation.startswith("GET ") if self.access.audited is None else self.access.audited


class CallAccess:
    """Gives each request its `Call`, and records it in the audit log when it is answered."""

    def __init__(self, app: ASGIApp, context: AdminContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"].decode("ascii", errors="replace").partition("?")[0]
        client = scope.get("client")
        peer = f"{client[0]}:{client[1]}" if client else ""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        shown = audited_path(method, path)
        call = Call(scope.get(PRINCIPAL), peer, f"{method} {shown}", shown)
        if self._context.broker.authorizer is not None:
            _name_roles(call, scope["headers"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._record(call, message["status"])  # first: a client that has the answer finds the line in the log
            await send(message)

        token = ACTING_FOR.set(call.client_role)
        try:
            await self._app({**scope, _CALL: call}, receive, watched)
        finally:
            ACTING_FOR.reset(token)

    def _record(self, call: Call, status: int) -> None:
        if call.denied:
            return  # recorded already
        if call.invalid_name and self._context.broker.authorizer is not None:
            _audit(self._context, call, "invalid", call.invalid_name)  # even for a call that only reads
            return
        if status == HTTPStatus.TEMPORARY_REDIRECT or not call.is_audited:
            return  # nothing was done here, or nothing was changed
        failed = status >= HTTPStatus.BAD_REQUEST
        _audit(self._context, call, "failed" if failed else "done", f"status {status}" if failed else "")


def _name_roles(call: Call, headers: Iterable[tuple[bytes, bytes]]) -> None:
    originals: list[str] = []
    for name, value in headers:
        if name == _ORIGINAL_PRINCIPAL:
            originals.append(value.decode(errors="replace").strip())
        elif name == ACTING_FOR_HEADER:
            call.acting_for = unquote(value.decode("ascii", errors="replace"))
    # Several headers form one list (RFC 9110 §5.3), which is not a role: a proxy that forwards a client's own header is refused.
    if (original := ", ".join(filter(None, originals))) and call.principal is not None:
        call.principal = replace(call.principal, original_role=original)


def _audit(context: AdminContext, call: Call, result: Result, detail: str) -> None:
    original = call.acting_for or (call.principal.original_role if call.principal is not None else None) or ""
    context.broker.audit.record(
        call.principal, call.peer, call.operation, call.object, result, detail, original_role=original, change=call.change
    )


def guard(context: AdminContext, routes: Iterable[APIRoute]) -> Callable[[Request], Any]:
    """Return the dependency of all routes that raises AuthorizationError for a call that is not allowed."""
    readers: dict[tuple[str, str], NounReader | None] = {}
    for route in routes:
        for method in route.methods or ():
            readers[method, route.path] = noun_reader(route.dependant)

    async def check(request: Request) -> None:
        call = call_of(request)
        template = getattr(request.scope.get("route"), "path", "")
        row = request.method, template
        call.operation, call.access = f"{request.method} {template}", ACCESS.get(row)
        if context.broker.authorizer is None:
            return
        if call.access is None:
            raise _denied(context, call, Decision(False, "the table of permissions has no row for this call (access_table.py)"))
        if call.access.need is Need.NOBODY_IN_PARTICULAR:
            return
        if (revoked := context.broker.why_revoked(call.principal)) is not None:  # or the role that a proxy speaks for
            raise _denied(context, call, Decision(False, revoked))
        await _check_peer(context, call)
        if call.is_peer and call.access.by_peers:
            return
        reader = readers.get(row)
        need = call.access.need
        noun = await reader(request) if reader is not None and need in SCOPED_NEEDS else None
        has_subscription = need is Need.CONSUME and "{sub}" in template
        await require(context, request, need, noun, subscription=await subscription_in(request) if has_subscription else None)

    return check


async def _check_peer(context: AdminContext, call: Call) -> None:
    """Set whether the caller is another broker. Raises AuthorizationError if it only claims to be one."""
    authorizer = context.broker.authorizer
    assert authorizer is not None
    decision = await authorizer.judge(call.principal, Need.CLUSTER_PEER)
    call.is_peer = decision.allowed
    if call.acting_for and not call.is_peer and authorizer.enforced:
        rule = f"the request names a client for which it is made, which only brokers may: {decision.rule}"
        raise _denied(context, call, Decision(False, rule))


def call_of(request: Request) -> Call:
    found: Call = request.scope[_CALL]
    return found


def describe_change(request: Request, parts: Iterable[str]) -> None:
    """Note for the audit log what this call changes, where its path does not say it: names and actions, never secrets."""
    listed = list(parts)
    size = count = 0
    for part in listed:
        size += len(part) + 2
        if size > MAX_CHANGE_CHARACTERS - _ROOM_FOR_MORE:
            break
        count += 1
    more = len(listed) - count
    call_of(request).change = ", ".join(listed[:count] + ([f"and {more} more"] if more else []))


async def require(
    context: AdminContext, request: Request, need: Need, noun: PathNoun | None = None, *, subscription: str | None = None
) -> None:
    """Raise an error, and record it, if the caller lacks the permission on a tenant, a namespace or a topic.

    Raises AuthorizationError, PermissionsOutOfDateError; MetadataError if permissions cannot be read.
    """
    call = call_of(request)
    if context.broker.authorizer is None or (call.is_peer and call.access is not None and call.access.by_peers):
        return
    decision = await _decide(context, call.principal, need, noun, subscription)
    if not decision.allowed:
        raise _denied(context, call, decision, noun)


async def may(context: AdminContext, request: Request, need: Need, noun: PathNoun | None = None) -> bool:
    """Return whether the caller has the permission, for answers that omit what it may not see."""
    if context.broker.authorizer is None:
        return True
    return (await _decide(context, call_of(request).principal, need, noun, None, is_request=False)).allowed


def administered_tenants(context: AdminContext, request: Request, tenants: Mapping[str, TenantRecord]) -> list[str]:
    """Return the tenants that the caller administers: all of them for a super-user."""
    authorizer, principal = context.broker.authorizer, call_of(request).principal
    if authorizer is None or not authorizer.enforced:
        return list(tenants)
    # Decided by the records just read: asking the authorizer would make it watch every tenant.
    return [
        tenant
        for tenant, record in tenants.items()
        if decide(authorizer.roles, grants_of(record, None), principal, Need.TENANT_ADMIN).allowed
    ]


async def visible_topics(
    context: AdminContext,
    request: Request,
    namespace: NamespaceName,
    topics: Sequence[TopicName],
    need: Need = Need.PRODUCE_OR_CONSUME,
) -> list[TopicName]:
    """Return the topics of the namespace that the caller may use."""
    if await may(context, request, need, namespace):
        return list(topics)
    found: list[TopicName] = []
    for number, topic in enumerate(topics, 1):
        if await may(context, request, need, topic):
            found.append(topic)
        if number % _DECIDED_IN_ONE_GO == 0:
            await asyncio.sleep(0)
    return found


def _denied(context: AdminContext, call: Call, decision: Decision, noun: PathNoun | None = None) -> CepheidError:
    """Record the denial and return the error for it."""
    call.denied = True
    if isinstance(noun, NamespaceName | TopicName):
        call.object = str(noun)
    _audit(context, call, "denied", decision.rule)
    return refusal(decision, f"{call.operation}{'' if noun is None else f' on {noun}'}")


async def _decide(
    context: AdminContext,
    principal: Principal | None,
    need: Need,
    noun: PathNoun | None,
    subscription: str | None,
    *,
    is_request: bool = True,
) -> Decision:
    authorizer = context.broker.authorizer
    assert authorizer is not None
    if isinstance(noun, TopicName):
        return await authorizer.check(principal, need, topic=noun, subscription=subscription, is_request=is_request)
    if isinstance(noun, NamespaceName):
        return await authorizer.check(principal, need, namespace=noun, is_request=is_request)
    return await authorizer.check(principal, need, tenant=noun, is_request=is_request)
