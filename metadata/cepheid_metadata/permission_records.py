"""Permissions on one namespace and its topics, and their form for `decide`.

They have a record of their own: a grant may be for a topic that does not exist yet, releases that know no permissions can
still read the namespace's record, and a listing of topics finds all grants of the namespace in one place.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from cepheid_metadata.cluster_records import TenantRecord
from cepheid_metadata.record import Record
from cepheid_security import Action, Grants
from cepheid_security.authorization import SubscriptionAuthMode


class NamespacePermissions(Record):
    """The roles that may use a namespace, besides super-users and the tenant's administrators. Without a record no other may."""

    NAME: ClassVar[str] = "namespace permissions"

    namespace: dict[str, tuple[Action, ...]] = Field(default_factory=dict, description="Actions by role, on all topics.")
    topics: dict[str, dict[str, tuple[Action, ...]]] = Field(
        default_factory=dict,
        description="Actions by role, by the full name of the topic. An entry for a partitioned topic covers its partitions.",
    )
    subscriptions: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Roles by subscription: no other role may use it. Without roles every role may use it."
    )
    subscription_auth_mode: SubscriptionAuthMode = Field(
        "None", description="Prefix: the name of a subscription must begin with the role that uses it."
    )


def grants_of(tenant: TenantRecord | None, permissions: NamespacePermissions | None) -> Grants:
    """Return what the records of a tenant and of one of its namespaces allow. None: there is no such record."""
    admins = frozenset(() if tenant is None else tenant.admin_roles)
    if permissions is None:
        return Grants(tenant_admins=admins)
    return Grants(
        tenant_admins=admins,
        namespace={role: frozenset(actions) for role, actions in permissions.namespace.items()},
        topics={
            topic: {role: frozenset(actions) for role, actions in by_role.items()} for topic, by_role in permissions.topics.items()
        },
        subscriptions={subscription: frozenset(roles) for subscription, roles in permissions.subscriptions.items()},
        subscription_auth_mode=permissions.subscription_auth_mode,
    )
