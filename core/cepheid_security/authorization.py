"""Authorization: one decision for every port, without I/O.

    settings: super-users, proxies ─┐
    records: administrators, grants ─┼─► decide(need, topic, subscription) ─► allowed or not, and by which rule
    the client's principal ─────────┘

Rules
1. Everything that no rule allows is denied.
2. Super-users may do everything, administrators of a tenant everything inside it.
3. Other roles need a grant of the action, on the topic or on its namespace. A grant on a partitioned topic covers its partitions.
4. A subscription with roles of its own, or a namespace in the mode Prefix, restricts which roles may consume; it grants nothing.
5. A proxy role names the role that it acts for, and both must be allowed. No other role may act for another one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from cepheid_security.principal import Principal

Action = Literal["produce", "consume", "functions", "sources", "sinks", "packages"]
"""An action that can be granted. The names are those of Pulsar's admin API (AuthAction)."""
ACTIONS: tuple[Action, ...] = get_args(Action)

SubscriptionAuthMode = Literal["None", "Prefix"]


class Need(enum.Enum):
    """The permission that an operation needs."""

    NOBODY_IN_PARTICULAR = "nobody in particular"
    """Open to every client, authenticated or not: probes."""
    AUTHENTICATED = "authenticated"
    PRODUCE = "produce"
    CONSUME = "consume"
    """With a subscription, if one is named."""
    PRODUCE_OR_CONSUME = "produce or consume"
    """Lookups, partitions, schemas and statistics of one topic."""
    NAMESPACE_READ = "namespace read"
    """Lists of topics: any grant of produce or consume in the namespace. The list has only topics that the role may use."""
    TENANT_ADMIN = "tenant admin"
    SUPER_USER = "super-user"
    CLUSTER_PEER = "cluster peer"
    """Calls that only brokers, repair workers and super-users make."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Special roles from the settings of a process."""

    super_users: frozenset[str] = frozenset()
    proxies: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Grants:
    """Permissions from the records of one namespace and its tenant."""

    tenant_admins: frozenset[str] = frozenset()
    namespace: Mapping[str, frozenset[Action]] = field(default_factory=dict)
    """Actions by role."""
    topics: Mapping[str, Mapping[str, frozenset[Action]]] = field(default_factory=dict)
    """Actions by the topic's full name (a partitioned topic's covers its partitions) and by role."""
    subscriptions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Roles by subscription. A subscription without an entry or roles is open to each role that may consume."""
    subscription_auth_mode: SubscriptionAuthMode = "None"
    """Prefix: the name of a subscription must begin with the role."""


NO_GRANTS = Grants()


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether an operation is allowed, and by which rule."""

    allowed: bool
    rule: str
    """A sentence that says which rule allows or denies. Clients see it, so it names no other roles."""
    temporary: bool = False
    """Whether it is denied only because the permissions cannot be read now."""


_TOPIC_ACTIONS: Mapping[Need, tuple[Action, ...]] = {
    Need.PRODUCE: ("produce",),
    Need.CONSUME: ("consume",),
    Need.PRODUCE_OR_CONSUME: ("produce", "consume"),
    Need.NAMESPACE_READ: ("produce", "consume"),
}
# Finds the same partitions as TopicName.partition_index, which this package does not import.
_PARTITION = re.compile(r"(?<=[^/])-partition-(0|[1-9][0-9]{0,9})\Z")
_MAX_PARTITION_INDEX = (1 << 31) - 1


def decide(
    roles: Roles,
    grants: Grants,
    principal: Principal | None,
    need: Need,
    *,
    topic: str | None = None,
    subscription: str | None = None,
) -> Decision:
    """Return whether `principal` (None: not authenticated) may do what needs this permission, and by which rule.

    `grants` are those of the operation's namespace. `topic` is a full name, possibly of a partition. Without it only grants for
    all topics of the namespace count; Need.NAMESPACE_READ is met by a grant on any topic.
    """
    if need is Need.NOBODY_IN_PARTICULAR:
        return Decision(True, "it is open to every client")
    if principal is None:
        return Decision(False, "the client did not authenticate")
    if (problem := original_role_problem(roles, principal.role, principal.original_role)) is not None:
        return Decision(False, problem)
    own = _decide_role(roles, grants, principal.role, need, topic, subscription)
    if principal.original_role is None or not own.allowed:
        return own
    return _decide_role(roles, grants, principal.original_role, need, topic, subscription)


def usable_topics(roles: Roles, grants: Grants, principal: Principal | None) -> Callable[[str], bool]:
    """Return a function that tells whether `principal` may use the topic of a full name.

    It answers as `decide` does with Need.PRODUCE_OR_CONSUME. What depends only on the role is computed once, since lists have
    thousands of names.
    """
    need = Need.PRODUCE_OR_CONSUME
    if principal is None or original_role_problem(roles, principal.role, principal.original_role) is not None:
        return lambda topic: False
    speaking = (principal.role,) if principal.original_role is None else (principal.role, principal.original_role)
    limited = [role for role in speaking if not _decide_role(roles, grants, role, need, None, None).allowed]
    granted = [_granted_names(grants, role, _TOPIC_ACTIONS[need]) for role in limited]
    if not all(granted):
        return lambda topic: False
    return lambda topic: all(not names.isdisjoint(_names_of(topic)) for names in granted)


def _granted_names(grants: Grants, role: str, actions: tuple[Action, ...]) -> frozenset[str]:
    return frozenset(name for name, by_role in grants.topics.items() if not by_role.get(role, frozenset()).isdisjoint(actions))


def original_role_problem(roles: Roles, role: str, original_role: str | None) -> str | None:
    """Return why a client with `role` cannot act for `original_role` (None: for itself), or None if it can."""
    if role not in roles.proxies:
        if original_role is None or original_role == role:
            return None
        return f"role {role!r} names the original principal {original_role!r}, and is not one of authorization.proxy_roles"
    if original_role is None:
        return f"role {role!r} is one of authorization.proxy_roles and must name an original principal"
    if original_role in roles.proxies:
        return f"the original principal {original_role!r} is one of authorization.proxy_roles itself"
    return None


def _decide_role(roles: Roles, grants: Grants, role: str, need: Need, topic: str | None, subscription: str | None) -> Decision:
    if need is Need.AUTHENTICATED:
        return Decision(True, f"role {role!r} is authenticated")
    if role in roles.super_users:
        return Decision(True, f"role {role!r} is a super-user (authorization.super_user_roles)")
    if need is Need.SUPER_USER:
        return Decision(False, f"role {role!r} is not a super-user (authorization.super_user_roles)")
    if need is Need.CLUSTER_PEER:
        if role in roles.peers:
            return Decision(True, f"role {role!r} is one of this cluster's own processes (authorization.peer_roles)")
        return Decision(False, f"role {role!r} is neither a super-user nor one of authorization.peer_roles")
    if role in grants.tenant_admins:
        return Decision(True, f"role {role!r} is an administrator of the tenant")
    if need is Need.TENANT_ADMIN:
        return Decision(False, f"role {role!r} is not an administrator of the tenant")
    granted = _granted(grants, role, need, topic)
    if granted.allowed and need is Need.CONSUME and subscription is not None:
        # Checked last: a role without a grant must not learn which subscriptions are reserved.
        return _narrowed(grants, role, subscription) or granted
    return granted


def _narrowed(grants: Grants, role: str, subscription: str) -> Decision | None:
    reserved = grants.subscriptions.get(subscription)
    if reserved and role not in reserved:
        return Decision(False, f"subscription {subscription!r} is reserved for other roles than {role!r}")
    if grants.subscription_auth_mode == "Prefix" and not subscription.startswith(role):
        why = f"the namespace's subscription_auth_mode is Prefix, and subscription {subscription!r} does not begin with it"
        return Decision(False, f"role {role!r}: {why}")
    return None


def _granted(grants: Grants, role: str, need: Need, topic: str | None) -> Decision:
    wanted = _TOPIC_ACTIONS[need]
    for name in _names_of(topic):
        granted = grants.topics.get(name, {}).get(role, frozenset())
        for action in wanted:
            if action in granted:
                return Decision(True, f"role {role!r} has {action} on the topic {name}")
    for action in wanted:
        if action in grants.namespace.get(role, frozenset()):
            return Decision(True, f"role {role!r} has {action} on the namespace")
    asked = " or ".join(wanted)
    if need is Need.NAMESPACE_READ:
        for name, by_role in grants.topics.items():
            if not by_role.get(role, frozenset()).isdisjoint(wanted):
                return Decision(True, f"role {role!r} has a grant on a topic of the namespace, {name}")
        return Decision(False, f"role {role!r} has {asked} neither on the namespace nor on a topic in it")
    return Decision(False, f"role {role!r} has {asked} neither on the topic nor on its namespace")


def _names_of(topic: str | None) -> tuple[str, ...]:
    """Return the names to look up in grants: the topic's, and that of the partitioned topic that it is a partition of."""
    if topic is None:
        return ()
    found = _PARTITION.search(topic)
    if found is None or int(found[1]) > _MAX_PARTITION_INDEX:
        return (topic,)
    return (topic, topic[: found.start()])
