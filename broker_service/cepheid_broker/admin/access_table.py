"""What each call of the admin API needs: one row for a method and a path template. A call without a row is denied.

access.py enforces it where authorization is on, before a call's body is read. tests/admin/test_admin_access.py compares the table
with the routes of the application, and docs/security.md explains the needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cepheid_broker.admin.policy_table import POLICIES, PathOf
from cepheid_broker.admin.unset_policies import OF_NAMESPACES, OF_TOPICS
from cepheid_security import Need

_T = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
_NT = "/admin/v2/non-persistent/{tenant}/{namespace}/{topic}"
_N = "/admin/v2/namespaces/{tenant}/{namespace}"
_SCHEMAS = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"
_LOOKUP = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"
_OUR_TOPIC = "/cepheid/v1/topics/{domain}/{tenant}/{namespace}/{topic}"
_SUB = f"{_T}/subscription/{{sub}}"


@dataclass(frozen=True, slots=True)
class Access:
    """A row: the need of a call, and how it is checked and audited."""

    need: Need
    by_peers: bool = False
    """Whether other brokers also make this call, for a part that this broker serves."""
    in_handler: bool = False
    """Whether the handler makes further checks, as only it knows what the call is about."""
    audited: bool | None = None
    """Whether an allowed call is written to the audit log. None: every call but GET, as it changes something."""


Row = tuple[str, str, Access]

_OPEN = Access(Need.NOBODY_IN_PARTICULAR)
_KNOWN = Access(Need.AUTHENTICATED)
_SUPER = Access(Need.SUPER_USER)
_ADMIN = Access(Need.TENANT_ADMIN)
_ADMIN_OR_PEER = Access(Need.TENANT_ADMIN, by_peers=True)
_USER = Access(Need.PRODUCE_OR_CONSUME)
_USER_OR_PEER = Access(Need.PRODUCE_OR_CONSUME, by_peers=True)
_READER = Access(Need.CONSUME)
_READER_OR_PEER = Access(Need.CONSUME, by_peers=True)
_LISTER = Access(Need.NAMESPACE_READ)
_IN_HANDLER = Access(Need.AUTHENTICATED, in_handler=True)


def _rows() -> Iterator[Row]:
    # Probes, metrics, brokers, bookies
    yield from _each("GET", _OPEN, "/status.html", "/health", "/ready")
    yield from _each("GET", _KNOWN, "/admin/v2/brokers/ready", "/admin/v2/brokers/version", "/admin/v2/clusters")
    yield "GET", "/metrics", _IN_HANDLER  # samples of a namespace or topic only for roles that may use it
    yield "GET", "/admin/v2/tenants", _IN_HANDLER  # only those that the role administers
    for path in (
        "",
        "/health",
        "/leaderBroker",
        "/configuration",
        "/configuration/values",
        "/configuration/runtime",
        "/internal-configuration",
        "/backlog-quota-check",
        "/{cluster}",
        "/{cluster}/{broker}/ownedNamespaces",
    ):
        yield "GET", f"/admin/v2/brokers{path}", _SUPER
    yield "POST", "/admin/v2/brokers/configuration/{configName}/{configValue}", _SUPER
    yield "DELETE", "/admin/v2/brokers/configuration/{configName}", _SUPER
    for path in ("/all", "/racks-info", "/racks-info/{bookie}"):
        yield "GET", f"/admin/v2/bookies{path}", _SUPER

    # Load balancing
    yield "GET", "/admin/v2/broker-stats/load-report", _SUPER
    yield from _each("GET POST", Access(Need.SUPER_USER, by_peers=True), "/cepheid/v1/balance")
    yield "POST", "/cepheid/v1/balance/report", Access(Need.SUPER_USER, by_peers=True, audited=False)
    for path in ("move", "split"):
        yield "POST", f"/cepheid/v1/balance/{path}", Access(Need.SUPER_USER, by_peers=True)
    isolation = "/admin/v2/clusters/{cluster}/namespaceIsolationPolicies"
    yield from _each("GET", _SUPER, isolation, f"{isolation}/brokers", f"{isolation}/brokers/{{broker}}")
    yield from _each("GET POST DELETE", _SUPER, f"{isolation}/{{policyName}}")

    # Clusters, tenants, namespaces
    yield from _each("GET PUT POST DELETE", _SUPER, "/admin/v2/clusters/{cluster}")
    yield "GET", "/admin/v2/tenants/{tenant}", _ADMIN
    yield from _each("PUT POST DELETE", _SUPER, "/admin/v2/tenants/{tenant}")
    yield "GET", "/admin/v2/namespaces/{tenant}", _ADMIN
    yield "GET", _N, _ADMIN
    yield "PUT", _N, Access(Need.TENANT_ADMIN, in_handler=True)  # an offload policy in its body needs a super-user
    yield "DELETE", _N, _ADMIN
    yield "GET", f"{_N}/topics", _LISTER
    yield "GET", f"{_N}/bundles", _ADMIN
    yield "PUT", f"{_N}/unload", _ADMIN
    yield from _each("PUT", _ADMIN_OR_PEER, f"{_N}/{{bundle}}/unload")
    yield "PUT", f"{_N}/{{bundle}}/split", _ADMIN
    yield "GET", f"{_N}/{{bundle}}/topicHashPositions", _ADMIN
    yield "DELETE", f"{_N}/{{bundle}}", _ADMIN
    yield from _each("POST", _ADMIN, f"{_N}/clearBacklog", f"{_N}/clearBacklog/{{sub}}", f"{_N}/unsubscribe/{{sub}}")
    for path in ("clearBacklog", "clearBacklog/{sub}", "unsubscribe/{sub}"):
        yield "POST", f"{_N}/{{bundle}}/{path}", _ADMIN_OR_PEER

    # Permissions
    yield from _each("GET", _ADMIN, f"{_N}/permissions", f"{_N}/permissions/subscription")
    yield from _each("POST DELETE", _ADMIN, f"{_N}/permissions/{{role}}")
    yield "POST", f"{_N}/permissions/subscription/{{subscription}}", _ADMIN
    yield "DELETE", f"{_N}/permissions/{{subscription}}/{{role}}", _ADMIN
    yield from _each("GET POST", _ADMIN, f"{_N}/subscriptionAuthMode")
    for topic in (_T, _NT):
        yield "GET", f"{topic}/permissions", _ADMIN
        yield from _each("POST DELETE", _ADMIN, f"{topic}/permissions/{{role}}")
    for path in ("grantPermissionsOnTopics", "revokePermissionsOnTopics"):
        yield "POST", f"/admin/v2/namespaces/{path}", _IN_HANDLER  # needs the tenant administrator of each topic in the body
    yield "GET", "/cepheid/v1/permissions/why", _IN_HANDLER  # about another role: needs the administrator of the topic's tenant

    # Policies
    yield from _policy_rows()
    for prefix in (_N, _T):
        yield "GET", f"{prefix}/backlogQuotaMap", _ADMIN
        yield from _each("POST DELETE", _ADMIN, f"{prefix}/backlogQuota")
        yield from _each("GET POST", _ADMIN, f"{prefix}/replication")
    yield "DELETE", f"{_T}/replication", _ADMIN
    # Values of the offload policy, which only super-users may set (see _policy_rows).
    yield from _each("GET", _ADMIN, f"{_N}/offloadThreshold", f"{_N}/offloadThresholdInSeconds", f"{_N}/offloadDeletionLagMs")
    yield from _each("PUT", _SUPER, f"{_N}/offloadThreshold", f"{_N}/offloadThresholdInSeconds")
    yield from _each("PUT DELETE", _SUPER, f"{_N}/offloadDeletionLagMs")
    yield from _each("GET PUT DELETE", _ADMIN, f"{_N}/properties")
    yield from _each("GET DELETE", _ADMIN, f"{_N}/property/{{key}}")
    yield "PUT", f"{_N}/property/{{key}}/{{value}}", _ADMIN

    # Topics of both kinds
    for topic in (_T, _NT):
        namespace = topic.removesuffix("/{topic}")
        yield from _each("GET", _LISTER, namespace, f"{namespace}/partitioned")
        yield "PUT", topic, _ADMIN
        yield "DELETE", topic, _ADMIN_OR_PEER
        yield "PUT", f"{topic}/unload", _ADMIN_OR_PEER
        yield "GET", f"{topic}/partitions", _USER
        yield from _each("PUT POST", _ADMIN, f"{topic}/partitions")
        yield "DELETE", f"{topic}/partitions", _ADMIN_OR_PEER
        yield from _each("GET", _USER_OR_PEER, f"{topic}/stats", f"{topic}/internalStats")
        yield "GET", f"{topic}/partitioned-stats", _USER
        yield "GET", f"{topic}/subscriptions", _READER_OR_PEER

    # Persistent topics
    yield "GET", f"{_T}/partitioned-internalStats", _USER
    yield from _each("GET", _USER, f"{_T}/internal-info", f"{_T}/properties")
    yield from _each("PUT DELETE", _ADMIN, f"{_T}/properties")
    yield "POST", f"{_T}/createMissedPartitions", _ADMIN
    yield "POST", f"{_T}/terminate/partitions", _ADMIN
    yield from _each("POST", _ADMIN_OR_PEER, f"{_T}/terminate", f"{_T}/trim")
    yield "DELETE", f"{_T}/truncate", _ADMIN_OR_PEER
    yield from _each("GET PUT", _ADMIN, f"{_T}/offload")
    for path in ("lastMessageId", "examinemessage", "ledger/{ledgerId}/entry/{entryId}", "messageid/{timestamp}"):
        yield "GET", f"{_T}/{path}", _READER
    yield "PUT", f"{_T}/backlogSize", Access(Need.CONSUME, audited=False)
    yield "POST", f"{_T}/all_subscription/expireMessages/{{expireTimeInSeconds}}", _ADMIN_OR_PEER

    # Subscriptions
    yield from _each("PUT DELETE", _READER_OR_PEER, _SUB)
    yield from _each("GET PUT", _READER_OR_PEER, f"{_SUB}/properties")
    for path in (
        "skip_all",
        "skip/{numMessages}",
        "expireMessages/{expireTimeInSeconds}",
        "expireMessages",
        "resetcursor/{timestamp}",
        "resetcursor",
    ):
        yield "POST", f"{_SUB}/{path}", _READER_OR_PEER
    yield "POST", f"{_SUB}/analyzeBacklog", Access(Need.CONSUME, audited=False)
    yield "GET", f"{_SUB}/position/{{messagePosition}}", _READER

    # Schemas and lookup
    yield from _each("GET", _USER, f"{_SCHEMAS}/schema", f"{_SCHEMAS}/schema/{{version}}", f"{_SCHEMAS}/schemas")
    yield "POST", f"{_SCHEMAS}/schema", Access(Need.PRODUCE)
    yield "DELETE", f"{_SCHEMAS}/schema", _ADMIN
    for path in ("compatibility", "version"):
        yield "POST", f"{_SCHEMAS}/{path}", Access(Need.PRODUCE_OR_CONSUME, audited=False)
    yield from _each("GET", _USER, _LOOKUP, f"{_LOOKUP}/bundle")

    # Ours: history, storage, metadata
    yield "GET", "/cepheid/v1/plan", Access(Need.AUTHENTICATED, by_peers=True, in_handler=True)
    yield from _each("GET", _IN_HANDLER, "/cepheid/v1/topics", "/cepheid/v1/ledgers", "/cepheid/v1/ledgers/{ledger}")
    yield "GET", f"{_OUR_TOPIC}/subscription/{{sub}}/why", _READER
    yield "POST", f"{_OUR_TOPIC}/subscription/{{sub}}/skip_unreadable", _ADMIN
    yield "GET", f"{_OUR_TOPIC}/tiered", _USER
    yield "GET", "/cepheid/v1/tiered/{tenant}/{namespace}", _ADMIN
    for path in (
        "ledgers/{ledger}/recover_from/{bookie}",
        "bookies",
        "bookies/{bookie}/ledgers",
        "bookies/{bookie}/decommission",
        "metadata/restored",
        "repair",
        "repair/short",
        "security",
        "upgrade",
        "revocations",
    ):
        yield "GET", f"/cepheid/v1/{path}", _SUPER
    yield "GET", "/cepheid/v1/metadata/backup", Access(Need.SUPER_USER, audited=True)  # it contains the keys of all ledgers
    for path in (
        "ledgers/{ledger}/undelete",
        "ledgers/{ledger}/purge",
        "ledgers/{ledger}/recover_from/{bookie}",
        "metadata/confirm",
        "metadata/without/{bookie}",
        "repair/ledgers/{ledger}",
        "bookies/{bookie}/recover",
        "upgrade/finish",
        "revocations",
    ):
        yield "POST", f"/cepheid/v1/{path}", _SUPER
    yield "DELETE", "/cepheid/v1/revocations", _SUPER
    yield from _each("GET PUT DELETE", _SUPER, "/cepheid/v1/brokers/{broker}/drain")
    yield "POST", "/cepheid/v1/handover", Access(Need.CLUSTER_PEER, by_peers=True, audited=False)
    yield from _each("PUT DELETE", _SUPER, "/cepheid/v1/repair/off", "/cepheid/v1/bookies/{bookie}/decommission")


def _policy_rows() -> Iterator[Row]:
    """Yield the rows of routes made from tables: a policy is read and set by the tenant's administrator.

    Only super-users may set where ledgers are offloaded: the broker writes there with its own credentials, or on its own machine.
    """
    for kind in POLICIES:
        write = _SUPER if kind.field == "offload" else _ADMIN
        for prefix, path in ((_N, kind.namespace), (_T, kind.topic)):
            if path is not None:
                yield from _rows_of_policy(prefix, path, write)
    for prefix, unset in ((_N, OF_NAMESPACES), (_T, OF_TOPICS)):
        for policy in unset:
            yield "GET", f"{prefix}/{policy.word}", _ADMIN


def _rows_of_policy(prefix: str, path: PathOf, write: Access) -> Iterator[Row]:
    yield "GET", f"{prefix}/{path.word}", _ADMIN
    yield path.set_by, f"{prefix}/{path.word}", write
    if path.deletable:
        yield "DELETE", f"{prefix}/{path.removed_at or path.word}", write


def _each(methods: str, access: Access, *paths: str) -> Iterator[Row]:
    for path in paths:
        for method in methods.split():
            yield method, path, access


def _table() -> Mapping[tuple[str, str], Access]:
    found: dict[tuple[str, str], Access] = {}
    for method, path, access in _rows():
        assert (method, path) not in found, f"{method} {path} has two rows"
        found[method, path] = access
    return found


ACCESS: Mapping[tuple[str, str], Access] = _table()
"""Access by method and path template."""


_AUDITED = frozenset(
    ("domain", "tenant", "namespace", "topic", "sub", "subscription", "role", "bundle", "key", "cluster", "broker", "bookie",
     "ledger", "configName", "policyName", "timestamp", "numMessages", "expireTimeInSeconds")
)  # fmt: skip
"""Names of path segments whose values are written to logs. Others, such as the value of a property, may be secrets."""


def audited_path(method: str, path: str) -> str:
    """Return a path for logs, without values that may be secret; a path outside of the table is cut."""
    segments = path.rstrip("/").split("/")
    for template in _TEMPLATES.get((method, len(segments)), ()):
        if all(wanted == got or wanted.startswith("{") for wanted, got in zip(template, segments, strict=True)):
            pairs = zip(template, segments, strict=True)
            return "/".join(wanted if wanted.startswith("{") and wanted[1:-1] not in _AUDITED else got for wanted, got in pairs)
    return "/".join([*segments[:3], "…"]) if len(segments) > 3 else "/".join(segments)


def _templates() -> Mapping[tuple[str, int], list[list[str]]]:
    """Return templates by method and number of segments, those with more fixed segments first, as they match more closely."""
    found: dict[tuple[str, int], list[list[str]]] = {}
    for method, path in ACCESS:
        template = path.split("/")
        found.setdefault((method, len(template)), []).append(template)
    for templates in found.values():
        templates.sort(key=lambda template: sum(segment.startswith("{") for segment in template))
    return found


_TEMPLATES = _templates()
