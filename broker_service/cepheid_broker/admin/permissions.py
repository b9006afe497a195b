"""Permissions in the API: grants on namespaces, topics and subscriptions, and the rule that decides for a role.

While authorization is off nothing can be granted (501, as in Pulsar), as it would have no effect. Reading returns what is recorded,
and revoking always works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from cepheid_broker.admin.access import call_of, describe_change, require
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotServedError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import NamespacePath, TopicPath
from cepheid_broker.errors import NamespaceNotFoundError, TopicNotFoundError
from cepheid_metadata import NamespacePermissions, NoSuchKeyError, change_permissions, namespace_permissions
from cepheid_security import Action, Need, Principal
from cepheid_security.authorization import ACTIONS, SubscriptionAuthMode
from cepheid_wire import NON_PERSISTENT, PERSISTENT, NamespaceName, TopicName

NO_CONTENT = 204
MAX_ROLE_CHARACTERS = 1000
MAX_TOPICS_AT_ONCE = 1000

_NAMESPACES = "/admin/v2/namespaces"
_NAMESPACE = f"{_NAMESPACES}/{{tenant}}/{{namespace}}"

Granted = Mapping[str, tuple[Action, ...]]
Change = Callable[[NamespacePermissions], NamespacePermissions]
TopicChange = tuple[TopicName, str, tuple[Action, ...]]
"""A topic, a role, and the actions that replace its earlier ones there."""


class TopicGrant(BaseModel):
    topic: str
    role: str
    actions: list[Action]


class TopicRevocation(BaseModel):
    topic: str
    role: str


ActionsBody = Annotated[list[Action], json_body(list[Action])]
RolesBody = Annotated[list[str], json_body(list[str])]
ModeBody = Annotated[str, json_body(str)]
GrantsBody = Annotated[list[TopicGrant], json_body(Annotated[list[TopicGrant], Field(max_length=MAX_TOPICS_AT_ONCE)])]
RevocationsBody = Annotated[
    list[TopicRevocation], json_body(Annotated[list[TopicRevocation], Field(max_length=MAX_TOPICS_AT_ONCE)])
]


async def _role(role: str) -> str:
    return _checked("role", _decoded(role))


async def _subscription(subscription: str) -> str:
    return _checked("subscription", _decoded(subscription))


RolePath = Annotated[str, Depends(_role)]
GrantedSubscriptionPath = Annotated[str, Depends(_subscription)]


def permissions(context: AdminContext) -> APIRouter:
    router = APIRouter()
    for add in (_add_namespace_routes, _add_topic_routes, _add_bulk_routes):
        add(router, context)
    _add_why(router, context)
    return router


def _granting(context: AdminContext) -> list[Any]:
    """Return a dependency for routes that grant something: they are refused before their body is read."""

    async def require_authorization(request: Request) -> None:
        if context.broker.authorizer is None:
            call = f"{request.method} {request.scope['path'][:500]}"
            text = "authorization is off, so every client may do everything: set authorization.enabled to grant permissions"
            raise NotServedError(f"{call} is not served: {text}")

    return [Depends(require_authorization)]


def _add_namespace_routes(router: APIRouter, context: AdminContext) -> None:
    granting = _granting(context)

    @router.get(f"{_NAMESPACE}/permissions")
    async def granted_in_namespace(namespace: NamespacePath) -> dict[str, list[str]]:
        """Return the actions granted in the namespace, by role"""
        return _shown((await read_permissions(context, namespace)).namespace)

    @router.get(f"{_NAMESPACE}/permissions/subscription")
    async def granted_on_subscriptions(namespace: NamespacePath) -> dict[str, list[str]]:
        """Return roles by subscription; a subscription that is not listed is open to all roles that may consume"""
        found = (await read_permissions(context, namespace)).subscriptions
        return {subscription: list(roles) for subscription, roles in found.items()}

    @router.post(f"{_NAMESPACE}/permissions/{{role}}", status_code=NO_CONTENT, dependencies=granting)
    async def grant_in_namespace(request: Request, namespace: NamespacePath, role: RolePath, actions: ActionsBody) -> None:
        """Replace the actions of the role. 501 while authorization is off"""
        describe_change(request, actions or ["no actions"])
        await _change(context, namespace, lambda found: found.replace(namespace=_with(found.namespace, role, actions)))

    @router.delete(f"{_NAMESPACE}/permissions/{{role}}", status_code=NO_CONTENT)
    async def revoke_in_namespace(namespace: NamespacePath, role: RolePath) -> None:
        """Remove all actions of the role, except those on single topics; succeeds if it has none"""
        await _change(context, namespace, lambda found: found.replace(namespace=_with(found.namespace, role, ())))

    @router.post(f"{_NAMESPACE}/permissions/subscription/{{subscription}}", status_code=NO_CONTENT, dependencies=granting)
    async def grant_on_subscription(
        request: Request, namespace: NamespacePath, subscription: GrantedSubscriptionPath, roles: RolesBody
    ) -> None:
        """Reserve the subscription for these roles, in place of earlier ones; they also need the right to consume"""
        names = tuple(dict.fromkeys(_checked("role", role) for role in roles))
        describe_change(request, names or ["no roles"])
        await _change(context, namespace, lambda found: _with_subscription(found, subscription, names))

    @router.delete(f"{_NAMESPACE}/permissions/{{subscription}}/{{role}}", status_code=NO_CONTENT)
    async def revoke_on_subscription(namespace: NamespacePath, subscription: GrantedSubscriptionPath, role: RolePath) -> None:
        """Remove the role from the subscription; succeeds if it has none. Without roles the subscription is open again"""

        def without(found: NamespacePermissions) -> NamespacePermissions:
            left = tuple(each for each in found.subscriptions.get(subscription, ()) if each != role)
            return _with_subscription(found, subscription, left)

        await _change(context, namespace, without)

    @router.get(f"{_NAMESPACE}/subscriptionAuthMode")
    async def get_subscription_auth_mode(namespace: NamespacePath) -> str:
        """Return `None`, or `Prefix`: names of subscriptions must begin with the role"""
        return (await read_permissions(context, namespace)).subscription_auth_mode

    @router.post(f"{_NAMESPACE}/subscriptionAuthMode", status_code=NO_CONTENT, dependencies=granting)
    async def set_subscription_auth_mode(request: Request, namespace: NamespacePath, mode: ModeBody) -> None:
        """Set the mode, a JSON string. 501 while authorization is off"""
        if mode not in get_args(SubscriptionAuthMode):
            raise PreconditionError(f"{mode[:100]!r} is not a mode: use {' or '.join(get_args(SubscriptionAuthMode))}")
        describe_change(request, [mode])
        await _change(context, namespace, lambda found: found.replace(subscription_auth_mode=mode))


def _add_topic_routes(router: APIRouter, context: AdminContext) -> None:
    for domain in (PERSISTENT, NON_PERSISTENT):
        _add_routes_of_domain(router, context, f"/admin/v2/{domain}/{{tenant}}/{{namespace}}/{{topic}}/permissions")


def _add_routes_of_domain(router: APIRouter, context: AdminContext, path: str) -> None:

    @router.get(path)
    async def granted_on_topic(topic: TopicPath) -> dict[str, list[str]]:
        """Return the actions granted on the topic or its namespace, by role"""
        found = await read_permissions(context, topic.namespace)
        names = {str(topic), str(topic.base)}
        if names.isdisjoint(found.topics):
            await _require_topic(context, topic)
        merged: dict[str, tuple[Action, ...]] = dict(found.namespace)
        for name in sorted(names):
            for role, actions in found.topics.get(name, {}).items():
                merged[role] = tuple(action for action in ACTIONS if action in (*merged.get(role, ()), *actions))
        return _shown(merged)

    @router.post(f"{path}/{{role}}", status_code=NO_CONTENT, dependencies=_granting(context))
    async def grant_on_topic(request: Request, topic: TopicPath, role: RolePath, actions: ActionsBody) -> None:
        """Replace the role's actions on this topic and its partitions, which need not exist. 501 while authorization is off"""
        describe_change(request, actions or ["no actions"])
        await _change(context, topic.namespace, lambda found: _with_topic(found, topic, role, actions))

    @router.delete(f"{path}/{{role}}", status_code=NO_CONTENT)
    async def revoke_on_topic(topic: TopicPath, role: RolePath) -> None:
        """Remove what was granted on the topic itself; 412 if nothing was"""
        before = await read_permissions(context, topic.namespace)
        if str(topic) not in before.topics:
            await _require_topic(context, topic)

        def without(found: NamespacePermissions) -> NamespacePermissions:
            if role not in found.topics.get(str(topic), {}):
                raise PreconditionError(f"Role {role[:200]!r} was granted nothing on {topic}", topic=str(topic))
            return _with_topic(found, topic, role, ())

        await _change(context, topic.namespace, without)


def _add_bulk_routes(router: APIRouter, context: AdminContext) -> None:
    @router.post(f"{_NAMESPACES}/grantPermissionsOnTopics", status_code=NO_CONTENT, dependencies=_granting(context))
    async def grant_on_topics(grants: GrantsBody, request: Request) -> None:
        """Grant permissions on many topics, one namespace after the other, each as a whole"""
        wanted = [(TopicName.parse(each.topic), _checked("role", each.role), tuple(each.actions)) for each in grants]
        await _change_topics(context, request, wanted)

    @router.post(f"{_NAMESPACES}/revokePermissionsOnTopics", status_code=NO_CONTENT)
    async def revoke_on_topics(revocations: RevocationsBody, request: Request) -> None:
        """Revoke permissions on many topics, one namespace after the other; succeeds for roles that have none"""
        wanted = [(TopicName.parse(each.topic), _checked("role", each.role), ()) for each in revocations]
        await _change_topics(context, request, wanted)


def _add_why(router: APIRouter, context: AdminContext) -> None:
    @router.get("/cepheid/v1/permissions/why")
    async def why_allowed(
        request: Request,
        role: str,
        topic: str,
        action: Literal["produce", "consume", "lookup", "admin"],
        subscription: str | None = None,
    ) -> dict[str, Any]:
        """Return whether a role may do this on a topic, and by which rule; any role may ask about itself"""
        authorizer, name = context.broker.authorizer, TopicName.parse(topic)
        if authorizer is None:
            return {"allowed": True, "rule": "authorization is off (authorization.enabled)"}
        if role != call_of(request).client_role:
            await require(context, request, Need.TENANT_ADMIN, name)
        decision = await authorizer.judge(Principal(role, "why"), _NEEDS[action], topic=name, subscription=subscription)
        return {"allowed": decision.allowed, "rule": decision.rule}


_NEEDS = {
    "produce": Need.PRODUCE,
    "consume": Need.CONSUME,
    "lookup": Need.PRODUCE_OR_CONSUME,
    "admin": Need.TENANT_ADMIN,
}


async def read_permissions(context: AdminContext, namespace: NamespaceName) -> NamespacePermissions:
    """Return the recorded permissions of a namespace. Raises NamespaceNotFoundError."""
    await context.require_namespace(namespace)
    found = await namespace_permissions(context.store).get((namespace.tenant, namespace.local_name))
    return NamespacePermissions() if found is None else found.record


async def _change(context: AdminContext, namespace: NamespaceName, change: Change) -> None:
    """Apply `change`. Raises NamespaceNotFoundError, PermissionsFullError, PermissionsContendedError and the errors of `change`."""
    try:
        await change_permissions(context.store, namespace.tenant, namespace.local_name, change)
    except NoSuchKeyError:
        raise NamespaceNotFoundError(f"Namespace {namespace} does not exist", namespace=str(namespace)) from None


async def _change_topics(context: AdminContext, request: Request, wanted: Sequence[TopicChange]) -> None:
    """Change permissions on many topics, after checking that all changes are allowed."""
    describe_change(request, (f"{role} on {topic}: {' '.join(actions) or 'nothing'}" for topic, role, actions in wanted))
    by_namespace: dict[NamespaceName, list[TopicChange]] = {}
    for each in wanted:
        by_namespace.setdefault(each[0].namespace, []).append(each)
    for namespace in by_namespace:
        await require(context, request, Need.TENANT_ADMIN, namespace)
    for namespace, changes in by_namespace.items():
        await _change(context, namespace, lambda found, changes=changes: _with_topics(found, changes))  # type: ignore[misc]


def _with_topics(found: NamespacePermissions, changes: Iterable[TopicChange]) -> NamespacePermissions:
    for topic, role, actions in changes:
        found = _with_topic(found, topic, role, actions)
    return found


def _with_topic(found: NamespacePermissions, topic: TopicName, role: str, actions: Iterable[Action]) -> NamespacePermissions:
    granted = _with(found.topics.get(str(topic), {}), role, actions)
    return found.replace(topics=_with_entry(found.topics, str(topic), granted))


def _with_subscription(found: NamespacePermissions, subscription: str, roles: tuple[str, ...]) -> NamespacePermissions:
    return found.replace(subscriptions=_with_entry(found.subscriptions, subscription, roles))


def _with(granted: Granted, role: str, actions: Iterable[Action]) -> dict[str, tuple[Action, ...]]:
    wanted = frozenset(actions)
    return _with_entry(granted, role, tuple(action for action in ACTIONS if action in wanted))


def _with_entry(mapping: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the mapping with this entry, or without it if the value is empty."""
    left = {each: kept for each, kept in mapping.items() if each != name}
    return {**left, name: value} if value else left


def _shown(granted: Granted) -> dict[str, list[str]]:
    return {role: list(actions) for role, actions in granted.items()}


async def _require_topic(context: AdminContext, topic: TopicName) -> None:
    if await context.broker.catalog.partitions(topic) is None:
        raise TopicNotFoundError(f"Topic {topic} does not exist", topic=str(topic))


def _decoded(segment: str) -> str:
    """Decode a role or subscription in the path: only once, keeping `+`, which is common in user names."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise PreconditionError(f"{segment[:200]!r} in the path is not percent-encoded UTF-8") from None


def _checked(kind: str, name: str) -> str:
    if not name.strip() or not name.isprintable() or len(name) > MAX_ROLE_CHARACTERS:
        shown = name[:100]
        raise PreconditionError(
            f"{shown!r} cannot name a {kind}: use 1 to {MAX_ROLE_CHARACTERS} printable characters, not only blanks"
        )
    return name
