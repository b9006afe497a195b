"""The nodes of a metadata store, and the type of the record that each of them holds.

The key layout is repeated here on purpose: recorded data stays where its release put it, even when the layout changes later.
"""

from __future__ import annotations

from collections.abc import Mapping

from cepheid_metadata import (
    BookieCookie,
    BookieLife,
    BookieRegistration,
    BrokerRegistration,
    BundleHistory,
    BundleOwner,
    Chain,
    ClusterIdentity,
    ClusterRecord,
    CursorRecord,
    DeletedLedger,
    LedgerIdCounter,
    LedgerMetadata,
    MetadataStore,
    NamespaceRecord,
    Record,
    SchemaDefinition,
    SchemaHistory,
    TenantRecord,
    TopicChanges,
    TopicRecord,
    Versioned,
    list_chains,
    list_cursors,
    list_deleted_ledgers,
    list_ledgers,
    list_namespaces,
    list_schemas,
    list_tenants,
    list_topics,
)

# "*" stands for any name, "#" for digits.
LAYOUT: tuple[tuple[str, type[Record]], ...] = (
    ("/cluster", ClusterIdentity),
    ("/clusters/*", ClusterRecord),
    ("/tenants/*", TenantRecord),
    ("/namespaces/*/*", NamespaceRecord),
    ("/topics/*/*/*/*/*", TopicRecord),
    ("/chains/*/*/*/*/*", Chain),
    ("/cursors/*/*/*/*/*/*", CursorRecord),
    ("/schemas/*/*/*/*", SchemaHistory),
    ("/schemas/*/*/*/*/*", SchemaDefinition),  # the first part of its encoding; see `decode_records`
    ("/ledgers/ids", LedgerIdCounter),
    ("/ledgers/#/#/#", LedgerMetadata),
    ("/ledgers/high/#/#/#/#/#", LedgerMetadata),
    ("/deleted-ledgers/#/#/#", DeletedLedger),
    ("/deleted-ledgers/high/#/#/#/#/#", DeletedLedger),
    ("/bookies/cookies/*", BookieCookie),
    ("/bookies/lives/*", BookieLife),
    ("/bookies/available/*", BookieRegistration),
    ("/bookies/readonly/*", BookieRegistration),
    ("/brokers/*", BrokerRegistration),
    ("/bundles/*/*/*", BundleOwner),
    ("/bundle-histories/*/*/*", BundleHistory),
    ("/topic-changes/*/*", TopicChanges),
)
PLAIN_TEXT = ("/incarnations/*/*",)
"""Keys whose value is text, not a record: the topic name of an incarnation."""
FOREIGN = "/zookeeper"
"""ZooKeeper keeps its own nodes below this key."""


def record_type(key: str) -> type[Record] | None:
    """Return the type of the record at `key`, None when the layout has no record there."""
    return next((kind for pattern, kind in LAYOUT if matches(key, pattern)), None)


def decode_records(nodes: Mapping[str, bytes]) -> dict[str, Record]:
    """Decode the value of every node; return the records by key.

    Raises AssertionError for a node that is neither a record, nor one of PLAIN_TEXT, nor an empty parent of such nodes. A schema
    definition that was cut into several parts is returned under the key of its first part.
    """
    records: dict[str, Record] = {}
    for key, value in nodes.items():
        kind = record_type(key)
        if kind is None:
            known = any(matches(key, pattern) for pattern in PLAIN_TEXT)
            assert known or (_is_parent(key) and not value), f"no record type is known for {key}: {value[:100]!r}"
        elif kind is SchemaDefinition:
            token, _, part = key.rpartition("-")
            if part == "0":
                records[key] = kind.decode(b"".join(_parts(nodes, token)), key)
        else:
            records[key] = kind.decode(value, key)
    return records


def _parts(nodes: Mapping[str, bytes], token: str) -> list[bytes]:
    parts: list[bytes] = []
    while (key := f"{token}-{len(parts)}") in nodes:
        parts.append(nodes[key])
    return parts


def matches(key: str, pattern: str) -> bool:
    """Whether `key` lies where `pattern` says; see LAYOUT."""
    found, wanted = key.split("/"), pattern.split("/")
    pairs = zip(wanted, found, strict=False)
    return len(found) == len(wanted) and all(part in ("*", name) or (part == "#" and name.isdigit()) for part, name in pairs)


def _is_parent(key: str) -> bool:
    depth = key.count("/") + 1
    patterns = (*(pattern for pattern, _ in LAYOUT), *PLAIN_TEXT)
    return any(matches(key, "/".join(pattern.split("/")[:depth])) for pattern in patterns)


async def read_nodes(store: MetadataStore) -> dict[str, Versioned]:
    """Read every node of the store, sorted by key."""
    nodes: dict[str, Versioned] = {}
    pending = [f"/{name}" for name in await store.children("/")]
    while pending:
        key = pending.pop()
        if key == FOREIGN:
            continue
        node = await store.get(key)
        if node is not None:  # else an ephemeral node that vanished meanwhile
            nodes[key] = node
            pending += [f"{key}/{name}" for name in await store.children(key)]
    return dict(sorted(nodes.items()))


async def listings(store: MetadataStore) -> dict[str, list[str]]:
    """Return the results of all listings of `cepheid_metadata`, by kind."""
    tenants = await list_tenants(store)
    namespaces = [(tenant, name) for tenant in tenants for name in await list_namespaces(store, tenant)]
    domains = [(*namespace, domain) for namespace in namespaces for domain in ("persistent", "non-persistent")]
    chains = [chain for domain in domains for chain in await list_chains(store, *domain)]
    return {
        "tenants": tenants,
        "namespaces": ["/".join(namespace) for namespace in namespaces],
        "topics": [str(topic) for domain in domains for topic in await list_topics(store, *domain)],
        "chains": [str(chain) for chain in chains],
        "cursors": [f"{chain} {cursor}" for chain in chains for cursor in await list_cursors(store, chain)],
        "schemas": [f"{'/'.join(namespace)} {name}" for namespace in namespaces for name in await list_schemas(store, *namespace)],
        "ledgers": [str(ledger_id) async for ledger_id in list_ledgers(store)],
        "deleted ledgers": [str(ledger_id) async for ledger_id in list_deleted_ledgers(store)],
    }
