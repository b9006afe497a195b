"""Authorization of this broker's clients: permissions from records, kept up to date by watches, checked at every port.

    tenant record ───────┐ watched, read when a client first uses the namespace
    permissions record ──┴──► Grants ──► check: once per request, never per message
                         └──► a change ──► on_changed(tenant): open producers, consumers and watchers are checked again

Rules
1. A check awaits metadata only for a namespace that is not known yet. That a namespace has no permissions is remembered for
   ABSENT_S, for at most MAX_ABSENT namespaces, so that names invented by clients cost little memory and not a read for each denial.
2. Permissions that may be outdated (the metadata store is unavailable, or a record cannot be read) are used for `stale_s`. After
   that, whatever needs them is denied until they have been read again. Such a denial is temporary: clients try again.
3. Changes are noticed by watches, so they apply as soon as this broker receives them.
4. Where permissions are not enforced yet, a denial is logged and the request allowed. `judge` returns the decision as if enforced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from cepheid_broker.errors import AuthorizationError, PermissionsOutOfDateError
from cepheid_metadata import (
    MetadataError,
    MetadataStore,
    NamespacePermissions,
    Record,
    SessionState,
    TenantRecord,
    WatchedRecord,
    WatchedRecords,
    grants_of,
    keys,
)
from cepheid_ports import RefusalLog, SingleFlight, TaskOwner
from cepheid_security import NO_GRANTS, Decision, Grants, Need, Principal, Roles, decide, usable_topics
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of checks for permissions that are too old."""
SHORTEST_S = 0.05
"""Shortest wait, so that rounding cannot lead to a deadline that is over at once, again and again."""
ABSENT_S = 1.0
MAX_ABSENT = 100
R = TypeVar("R", bound=Record)

_NOT_ENFORCED = Decision(True, "permissions are not enforced (authorization.enforced)")
_FROM_SETTINGS = (Need.NOBODY_IN_PARTICULAR, Need.AUTHENTICATED, Need.SUPER_USER, Need.CLUSTER_PEER)
"""Needs that settings and principal decide, without records."""


@dataclass(slots=True)
class _Known:
    """The permissions on one namespace, or on one tenant (then `permissions` is None)."""

    tenant: WatchedRecord[TenantRecord]
    permissions: WatchedRecord[NamespacePermissions] | None
    grants: Grants = NO_GRANTS

    def refresh(self) -> None:
        self.grants = grants_of(self.tenant.record, None if self.permissions is None else self.permissions.record)

    @property
    def stale_since(self) -> float | None:
        """Since when, in loop time, it may be outdated."""
        since = self.tenant.stale_since
        own = None if self.permissions is None else self.permissions.stale_since
        return own if since is None or (own is not None and own < since) else since


class Authorizer:
    """Decides what clients may do. Created inside the running loop; `aclose` it before the store is closed."""

    def __init__(self, roles: Roles, stale_s: float, store: MetadataStore, tasks: TaskOwner, *, enforced: bool = True) -> None:
        self.enforced = enforced
        self._refusals = RefusalLog()
        self._roles = roles
        self._stale_s = stale_s
        self._records = WatchedRecords(store, tasks, on_suspected=self._on_suspected)
        self._tenants: dict[str, _Known] = {}
        self._namespaces: dict[NamespaceName, _Known] = {}
        self._absent: dict[NamespaceName, asyncio.TimerHandle] = {}
        """Namespaces without permissions, with the timer that forgets them (rule 1)."""
        self._loading: SingleFlight[NamespaceName | str, None] = SingleFlight("permissions", _closed)
        self._deadline: asyncio.TimerHandle | None = None
        self._too_old_records = 0
        self.denied = 0
        """Denied requests of clients and administrators."""
        self.on_changed: list[Callable[[str | None], None]] = []
        """Called with the tenant in which permissions changed; None: any, as some became too old, or no longer are."""
        self._unsubscribe = store.subscribe(self._on_session)

    def __repr__(self) -> str:
        return f"<Authorizer {len(self._namespaces)} namespaces, {len(self._tenants)} tenants, {self._records!r}>"

    @property
    def roles(self) -> Roles:
        return self._roles

    @property
    def out_of_date(self) -> int:
        """Number of tenants and namespaces whose permissions are not used, as they could not be read for too long."""
        return sum(map(self._is_too_old, (*self._tenants.values(), *self._namespaces.values())))

    async def check(
        self,
        principal: Principal | None,
        need: Need,
        *,
        topic: TopicName | None = None,
        namespace: NamespaceName | None = None,
        tenant: str | None = None,
        subscription: str | None = None,
        is_request: bool = True,
    ) -> Decision:
        """Return whether `principal` may do what has this need, on a topic, a namespace or a tenant.

        Where permissions are not enforced it may, and what would be denied is logged.
        `is_request`: count a denial. False where the caller only omits something from an answer. Raises MetadataError if the
        permissions are not known and cannot be read.
        """
        facts: _Facts = {"topic": topic, "namespace": namespace, "tenant": tenant, "subscription": subscription}
        if not self.enforced:
            if is_request:
                await self._tell_denial(principal, need, facts)
            return _NOT_ENFORCED
        decision = await self.judge(principal, need, **facts)
        self.denied += is_request and not decision.allowed
        return decision

    async def judge(
        self,
        principal: Principal | None,
        need: Need,
        *,
        topic: TopicName | None = None,
        namespace: NamespaceName | None = None,
        tenant: str | None = None,
        subscription: str | None = None,
    ) -> Decision:
        """Return the decision of the permissions, enforced or not. Raises MetadataError."""
        facts: _Facts = {"topic": topic, "namespace": namespace, "tenant": tenant, "subscription": subscription}
        decision = self._judge_now(principal, need, **facts)
        if decision is None:
            where = topic.namespace if topic is not None else namespace
            owner = _tenant_of(where, tenant)
            await self._loading.run(owner if where is None else where, self._load)
            decision = self._judge_now(principal, need, **facts) or self._without_permissions(principal, need, owner)
        return decision

    async def _tell_denial(self, principal: Principal | None, need: Need, facts: _Facts) -> None:
        """Log what would be denied, so that it can be granted before permissions are enforced."""
        try:
            decision = await self.judge(principal, need, **facts)
        except MetadataError as error:
            log.info("authorization.not_judged", extra={"error": str(error)})
            return
        if not decision.allowed:
            role = "" if principal is None else principal.role
            where = facts["topic"] or facts["namespace"] or facts["tenant"] or ""
            self._refusals.note(
                "authorization.would_deny",
                (role, need, str(where)),
                level=logging.WARNING,
                role=role,
                what=need.value,
                where=str(where),
                rule=decision.rule,
                hint="grant it before permissions are enforced (authorization.enforced)",
            )

    def check_now(
        self,
        principal: Principal | None,
        need: Need,
        *,
        topic: TopicName | None = None,
        namespace: NamespaceName | None = None,
        tenant: str | None = None,
        subscription: str | None = None,
    ) -> Decision | None:
        """Return the decision of `check` from memory; None if permissions have to be read first."""
        if not self.enforced:
            return _NOT_ENFORCED
        return self._judge_now(principal, need, topic=topic, namespace=namespace, tenant=tenant, subscription=subscription)

    def _judge_now(
        self,
        principal: Principal | None,
        need: Need,
        *,
        topic: TopicName | None = None,
        namespace: NamespaceName | None = None,
        tenant: str | None = None,
        subscription: str | None = None,
    ) -> Decision | None:
        first = decide(self._roles, NO_GRANTS, principal, need)
        if first.allowed or principal is None or need in _FROM_SETTINGS:
            return first
        where = topic.namespace if topic is not None else namespace
        above = self._tenants.get(_tenant_of(where, tenant))
        if above is not None and not self._is_too_old(above):
            decision = decide(self._roles, above.grants, principal, need)
            if decision.allowed or where is None:
                return decision
        known = above if where is None else self._namespaces.get(where)
        if known is None:
            return None
        if self._is_too_old(known):
            return self._too_old(known)
        name = None if topic is None else str(topic)
        return decide(self._roles, known.grants, principal, need, topic=name, subscription=subscription)

    def _without_permissions(self, principal: Principal | None, need: Need, tenant: str) -> Decision:
        """Return the decision where no permissions are recorded: only administrators of the tenant may do anything."""
        above = self._tenants.get(tenant)
        if above is None:
            return decide(self._roles, NO_GRANTS, principal, need)
        return self._too_old(above) if self._is_too_old(above) else decide(self._roles, above.grants, principal, need)

    def visible(self, principal: Principal | None, topics: list[TopicName], namespace: NamespaceName) -> list[TopicName]:
        """Return the topics of the namespace that `principal` may use; none while its permissions are not known."""
        everywhere = self.check_now(principal, Need.PRODUCE_OR_CONSUME, namespace=namespace)
        if everywhere is not None and everywhere.allowed:
            return topics
        known = self._namespaces.get(namespace)
        if known is None or everywhere is None or everywhere.temporary:
            return []
        is_usable = usable_topics(self._roles, known.grants, principal)
        return [topic for topic in topics if is_usable(str(topic))]

    async def aclose(self) -> None:
        self._unsubscribe()
        if self._deadline is not None:
            self._deadline.cancel()
        await self._loading.aclose()
        for timer in self._absent.values():
            timer.cancel()

    # Loading

    async def _load(self, what: NamespaceName | str) -> None:
        """Read the permissions on a namespace, or on a tenant, and keep them if there are any, or for a while (rule 1)."""
        if isinstance(what, str):
            user = object()
            tenant = await self._use(keys.tenant_key(what), TenantRecord, what, user)
            if _is_absent(tenant):
                self._records.leave(tenant, user)
            else:
                self._tenants[what] = _Known(tenant, None)
                self._tenants[what].refresh()
            return
        if what.tenant not in self._tenants:
            await self._loading.run(what.tenant, self._load)
        if (above := self._tenants.get(what.tenant)) is None:
            return  # without a tenant there are no namespaces
        key = keys.permissions_key(what.tenant, what.local_name)
        user = object()
        permissions = await self._use(key, NamespacePermissions, what.tenant, user)
        if _is_absent(permissions):
            if len(self._absent) >= MAX_ABSENT:
                self._records.leave(permissions, user)
                return
            loop = asyncio.get_running_loop()
            self._absent[what] = loop.call_later(ABSENT_S, self._forget_if_absent, what, permissions, user)
        self._namespaces[what] = _Known(above.tenant, permissions)
        self._namespaces[what].refresh()

    def _forget_if_absent(self, namespace: NamespaceName, permissions: WatchedRecord[NamespacePermissions], user: object) -> None:
        """Forget that a namespace has no permissions, unless some were granted since."""
        del self._absent[namespace]
        if permissions.record is None:
            del self._namespaces[namespace]
            self._records.leave(permissions, user)

    async def _use(self, key: str, record_type: type[R], tenant: str, user: object) -> WatchedRecord[R]:
        return await self._records.use(key, record_type, user, lambda: self._on_change(tenant), forget_deleted=True)

    # Changes

    def _on_change(self, tenant: str) -> None:
        for known in (self._tenants.get(tenant), *(each for name, each in self._namespaces.items() if name.tenant == tenant)):
            if known is not None:
                known.refresh()
        log.info("permissions.changed", extra={"tenant": tenant})
        self._notify(tenant)

    def _notify(self, tenant: str | None) -> None:
        for hook in self.on_changed:
            hook(tenant)

    # Age (rule 2)

    def _on_session(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            self._records.suspect_all()

    def _is_too_old(self, known: _Known) -> bool:
        since = known.stale_since
        return since is not None and asyncio.get_running_loop().time() - since >= self._stale_s

    def _too_old(self, known: _Known) -> Decision:
        assert known.stale_since is not None
        age_s = asyncio.get_running_loop().time() - known.stale_since
        text = f"permissions could not be read for {age_s:.0f} s, and are used for {self._stale_s:g} s (authorization.stale_s)"
        return Decision(False, text, temporary=True)

    def _on_suspected(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._stale_s, self._on_deadline)

    def _on_deadline(self) -> None:
        """Check for permissions that became too old; while some are, check every second whether that is over."""
        self._deadline = None  # so that the next suspicion sets a timer again
        loop = asyncio.get_running_loop()
        too_old = self.out_of_date
        if too_old != self._too_old_records:
            log.warning(
                "permissions.too_old", extra={"records": too_old, "before": self._too_old_records, "stale_s": self._stale_s}
            )
            self._too_old_records = too_old
            self._notify(None)
        known = (*self._tenants.values(), *self._namespaces.values())
        since = [each.stale_since for each in known if each.stale_since is not None]
        if since:
            left_s = LOOK_S if too_old else max(SHORTEST_S, min(since) + self._stale_s - loop.time())
            self._deadline = loop.call_later(left_s, self._on_deadline)


def _is_absent(watched: WatchedRecord[R]) -> bool:
    """Return whether there is certainly no such record, rather than one that cannot be read."""
    return watched.record is None and watched.stale_since is None


class _Facts(TypedDict):
    topic: TopicName | None
    namespace: NamespaceName | None
    tenant: str | None
    subscription: str | None


def _tenant_of(namespace: NamespaceName | None, tenant: str | None) -> str:
    found = tenant if namespace is None else namespace.tenant
    assert found is not None, "this need concerns a topic, a namespace or a tenant"
    return found


def refusal(decision: Decision, what: str) -> AuthorizationError | PermissionsOutOfDateError:
    """Return the error for a decision that denies `what`, such as "produce on persistent://t/n/x"."""
    kind = PermissionsOutOfDateError if decision.temporary else AuthorizationError
    return kind(f"{what} is not allowed: {decision.rule}")


def _closed() -> PermissionsOutOfDateError:
    return PermissionsOutOfDateError("the broker stops")
