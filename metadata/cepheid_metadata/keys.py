"""The key layout: which record is stored under which key. No other module builds keys.

    /cluster                                   identity of this cluster
    /clusters/C  /tenants/T  /namespaces/T/N   policies
    /topics/T/N/D/bb/topic                     topic record        D domain, bb = two hex digits of a hash of the local name
    /chains/T/N/D/bb/topic                     chain
    /chains/T/N/D/bb/topic/n                   page of a chain: older ledgers (chain_pages.py)
    /incarnations/iii/incarnation              mark of a chain that exists; iii = the first three digits of its incarnation
    /cursors/T/N/D/bb/topic/subscription       cursor
    /schemas/T/N/bb/topic                      schema history, of all partitions and both domains; definitions below it
    /ledgers/ids                               id counter
    /ledgers/dddd/dddd/dddd                    ledger, id below 10^12, zero-padded in three parts
    /ledgers/high/ddd/dddd/dddd/dddd/dddd      ledger, id from 10^12: all 19 digits that 63 bits can have
    /deleted-ledgers/dddd/dddd/dddd            deleted ledger that can still be restored, id below 10^12
    /deleted-ledgers/high/ddd/dddd/…           the same, id from 10^12
    /purged-ledgers/n                          which of 8,192 ledgers were deleted for good; n: id divided by 8,192
    /bookies/cookies/ID                        owner of a bookie's data directories
    /bookies/lives/ID                          counter that shows whether the disks are an old copy (bookie_life.py)
    /bookies/decommissioned/ID                 former owner of data directories that are not needed any more
    /bookies/available/ID                      registration (ephemeral)
    /bookies/readonly/ID                       registration of a bookie that accepts no writes (ephemeral)
    /brokers/ID                                registration (ephemeral)
    /bundles/T/N/range                         owner of a bundle (ephemeral)
    /bundle-histories/T/N/range                epochs of a bundle's owners
    /topic-changes/T/N                         mark of a namespace whose topics changed
    /leader                                    broker that balances the load (ephemeral)
    /isolation-policies                        which brokers serve which namespaces
    /dynamic-settings                          settings that were changed while brokers run
    /permissions/T/N                           permissions on a namespace and its topics
    /repair/marks/dddd/dddd/dddd               ledger that lacks copies, id below 10^12
    /repair/marks/high/ddd/dddd/…              the same, id from 10^12
    /repair/unchecked/ID                       ledger whose copies were not checked since its recovery
    /repair/locks/ID                           ledger that a replication worker is repairing (ephemeral)
    /repair/locks/check-ID                     ledger whose copies a process is checking (ephemeral)
    /repair/auditor                            auditor of the cluster (ephemeral)
    /repair/audit                              findings of the auditor's last walks
    /repair/off                                switch: automatic repair is off
    /repair/draining/ID                        bookie that is being decommissioned
    /repair/requests/ID                        bookie whose ledgers are to be repaired now
    /repair/missing/ID                         ledgers that a bookie keeps although metadata lacks them
    /revocations                               list of revoked tokens
    /upgrade/format                            storage format of the cluster
    /upgrade/bookies/ID                        storage format that the last process of a bookie knows
    /reports/brokers/ID, /reports/bookies/ID   report of the last process of that name about itself (process_reports.py)
    /secrets/ticket-keys                       keys that sign read tickets (ticket_keyring.py); no backup has them
    /restored                                  metadata was restored from a backup, and an operator has not confirmed it yet
    /restored/bookies/ID                       bookie that has reported its ledgers since the restore, or is given up

Rules:
1. No parent gets more than 10,000 children of a kind that users can multiply (names of tenants, namespaces of one tenant,
   topics of one bucket and subscriptions of one topic are limited by policy, not by layout).
2. A name is one segment: percent-encoded UTF-8 (so it may contain `/` or anything else), including `.` and `..`.
3. Sorted keys list ledgers in numeric order.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

import crc32c

from cepheid_metadata.errors import InvalidNameError
from cepheid_wire import TopicName

CLUSTER_KEY = "/cluster"
CLUSTERS_KEY = "/clusters"
TENANTS_KEY = "/tenants"
NAMESPACES_KEY = "/namespaces"
TOPICS_KEY = "/topics"
CHAINS_KEY = "/chains"
INCARNATIONS_KEY = "/incarnations"
CURSORS_KEY = "/cursors"
SCHEMAS_KEY = "/schemas"
LEDGERS_KEY = "/ledgers"
LEDGER_IDS_KEY = "/ledgers/ids"
HIGH_LEDGERS_KEY = "/ledgers/high"
DELETED_LEDGERS_KEY = "/deleted-ledgers"
HIGH_DELETED_LEDGERS_KEY = "/deleted-ledgers/high"
PURGED_LEDGERS_KEY = "/purged-ledgers"
BOOKIE_COOKIES_KEY = "/bookies/cookies"
BOOKIE_LIVES_KEY = "/bookies/lives"
DECOMMISSIONED_BOOKIES_KEY = "/bookies/decommissioned"
AVAILABLE_BOOKIES_KEY = "/bookies/available"
READONLY_BOOKIES_KEY = "/bookies/readonly"
BROKERS_KEY = "/brokers"
BUNDLES_KEY = "/bundles"
BUNDLE_HISTORIES_KEY = "/bundle-histories"
TOPIC_CHANGES_KEY = "/topic-changes"
LEADER_KEY = "/leader"
ISOLATION_POLICIES_KEY = "/isolation-policies"
DYNAMIC_SETTINGS_KEY = "/dynamic-settings"
PERMISSIONS_KEY = "/permissions"
REPAIR_MARKS_KEY = "/repair/marks"
HIGH_REPAIR_MARKS_KEY = "/repair/marks/high"
UNCHECKED_LEDGERS_KEY = "/repair/unchecked"
REPAIR_LOCKS_KEY = "/repair/locks"
AUDITOR_KEY = "/repair/auditor"
AUDIT_KEY = "/repair/audit"
REPAIR_OFF_KEY = "/repair/off"
DRAINING_BOOKIES_KEY = "/repair/draining"
REPAIR_REQUESTS_KEY = "/repair/requests"
MISSING_LEDGERS_KEY = "/repair/missing"
REVOCATIONS_KEY = "/revocations"
STORAGE_FORMAT_KEY = "/upgrade/format"
KNOWN_FORMATS_KEY = "/upgrade/bookies"
BROKER_REPORTS_KEY = "/reports/brokers"
BOOKIE_REPORTS_KEY = "/reports/bookies"
SECRETS_KEY = "/secrets"
TICKET_KEYS_KEY = "/secrets/ticket-keys"
RESTORED_KEY = "/restored"
RESTORED_BOOKIES_KEY = "/restored/bookies"

EPHEMERAL_KEYS = (
    AVAILABLE_BOOKIES_KEY,
    READONLY_BOOKIES_KEY,
    BROKERS_KEY,
    BUNDLES_KEY,
    LEADER_KEY,
    REPAIR_LOCKS_KEY,
    AUDITOR_KEY,
)
"""Everything at or below these keys belongs to a running process: a backup leaves it out."""

_CHAIN_KEY_PARTS = 6  # /chains/T/N/D/bb/topic

MAX_LEDGER_ID = 2**63 - 1
_FIRST_HIGH_LEDGER_ID = 10**12
LEDGER_ID_PARTS = {  # segments below each tree of ledgers
    LEDGERS_KEY: 3,
    HIGH_LEDGERS_KEY: 5,
    DELETED_LEDGERS_KEY: 3,
    HIGH_DELETED_LEDGERS_KEY: 5,
    REPAIR_MARKS_KEY: 3,
    HIGH_REPAIR_MARKS_KEY: 5,
}
NOT_LEDGERS = (
    LEDGER_IDS_KEY,
    HIGH_LEDGERS_KEY,
    HIGH_DELETED_LEDGERS_KEY,
    HIGH_REPAIR_MARKS_KEY,
)  # children of the same parents as the first parts of ledger ids


@lru_cache(maxsize=16_384)  # tenants and namespaces are in every key, and an opening topic's own name in several
def encode_name(name: str) -> str:
    """Return `name` as one key segment."""
    if not name:
        raise InvalidNameError("a name is empty")
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidNameError(f"not encodable as UTF-8: {name!r}", name=name) from None
    return encoded.replace(".", "%2E") if encoded in (".", "..") else encoded


def decode_name(segment: str) -> str:
    return unquote(segment, errors="strict")


def cluster_key(cluster: str) -> str:
    return f"{CLUSTERS_KEY}/{encode_name(cluster)}"


def tenant_key(tenant: str) -> str:
    return f"{TENANTS_KEY}/{encode_name(tenant)}"


def namespaces_key(tenant: str) -> str:
    """Return the parent of a tenant's namespaces."""
    return f"{NAMESPACES_KEY}/{encode_name(tenant)}"


def namespace_key(tenant: str, namespace: str) -> str:
    return f"{NAMESPACES_KEY}/{encode_name(tenant)}/{encode_name(namespace)}"


def domain_key(root: str, tenant: str, namespace: str, domain: str) -> str:
    """Return the parent of a namespace's buckets under `root` (TOPICS_KEY, CHAINS_KEY or CURSORS_KEY)."""
    return f"{root}/{encode_name(tenant)}/{encode_name(namespace)}/{encode_name(domain)}"


def topic_key(topic: TopicName) -> str:
    return TOPICS_KEY + _topic_path(topic)


def chain_key(topic: TopicName) -> str:
    return CHAINS_KEY + _topic_path(topic)


def chain_page_key(chain_key: str, number: int) -> str:
    """Return the key of a page of the chain with this key."""
    return f"{chain_key}/{number}"


def is_chain_key(key: str) -> bool:
    """Whether this is the key of a chain, and not of one of its pages."""
    return key.startswith(f"{CHAINS_KEY}/") and key.count("/") == _CHAIN_KEY_PARTS


def incarnation_key(incarnation: str) -> str:
    return f"{INCARNATIONS_KEY}/{encode_name(incarnation[:3])}/{encode_name(incarnation)}"


def cursors_key(topic: TopicName) -> str:
    """Return the parent of a topic's cursors."""
    return CURSORS_KEY + _topic_path(topic)


def cursor_key(topic: TopicName, subscription: str) -> str:
    return f"{CURSORS_KEY}{_topic_path(topic)}/{encode_name(subscription)}"


def namespace_schemas_key(tenant: str, namespace: str) -> str:
    """Return the parent of a namespace's buckets of schema histories."""
    return f"{SCHEMAS_KEY}/{encode_name(tenant)}/{encode_name(namespace)}"


def schemas_key(topic: TopicName) -> str:
    """Return the key of the schema history of a topic and its partitions."""
    namespace = topic.namespace
    return f"{namespace_schemas_key(namespace.tenant, namespace.local_name)}/{_bucket_path(topic.base.local_name)}"


def schema_part_key(topic: TopicName, token: str, part: int) -> str:
    return f"{schemas_key(topic)}/{token}-{part}"


def _topic_path(topic: TopicName) -> str:
    path = domain_key("", topic.namespace.tenant, topic.namespace.local_name, topic.domain)
    return f"{path}/{_bucket_path(topic.local_name)}"


def _bucket_path(name: str) -> str:
    encoded = encode_name(name)
    # Any stable hash works; changing it would hide every topic.
    return f"{crc32c.crc32c(encoded.encode('ascii')) & 0xFF:02x}/{encoded}"


def ledger_key(ledger_id: int) -> str:
    assert 0 <= ledger_id <= MAX_LEDGER_ID, f"not a ledger id: {ledger_id}"
    if ledger_id < _FIRST_HIGH_LEDGER_ID:
        digits = f"{ledger_id:012d}"
        return f"{LEDGERS_KEY}/{digits[:4]}/{digits[4:8]}/{digits[8:]}"
    digits = f"{ledger_id:019d}"
    return f"{HIGH_LEDGERS_KEY}/{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/{digits[15:]}"


def ledger_id_of(key: str) -> int | None:
    """Return the id of the ledger whose record has this key; None: it is not the key of a living ledger."""
    root = HIGH_LEDGERS_KEY if key.startswith(f"{HIGH_LEDGERS_KEY}/") else LEDGERS_KEY
    parts = key.removeprefix(f"{root}/").split("/")
    if not key.startswith(f"{root}/") or len(parts) != LEDGER_ID_PARTS[root] or not all(map(str.isdecimal, parts)):
        return None
    return int("".join(parts))


def deleted_ledger_key(ledger_id: int) -> str:
    return DELETED_LEDGERS_KEY + ledger_key(ledger_id).removeprefix(LEDGERS_KEY)


def purged_ledgers_key(page: int) -> str:
    return f"{PURGED_LEDGERS_KEY}/{page}"


def repair_mark_key(ledger_id: int) -> str:
    return REPAIR_MARKS_KEY + ledger_key(ledger_id).removeprefix(LEDGERS_KEY)


def unchecked_ledger_key(ledger_id: int) -> str:
    """Return a key in a flat list, unlike those of marks: the list is short, and often empty, while ids only rise."""
    return f"{UNCHECKED_LEDGERS_KEY}/{ledger_id}"


def repair_lock_key(ledger_id: int) -> str:
    return f"{REPAIR_LOCKS_KEY}/{ledger_id}"


def check_lock_key(ledger_id: int) -> str:
    return f"{REPAIR_LOCKS_KEY}/check-{ledger_id}"


def draining_bookie_key(bookie_id: str) -> str:
    return f"{DRAINING_BOOKIES_KEY}/{encode_name(bookie_id)}"


def known_format_key(bookie_id: str) -> str:
    return f"{KNOWN_FORMATS_KEY}/{encode_name(bookie_id)}"


def broker_report_key(broker_id: str) -> str:
    return f"{BROKER_REPORTS_KEY}/{encode_name(broker_id)}"


def bookie_report_key(bookie_id: str) -> str:
    return f"{BOOKIE_REPORTS_KEY}/{encode_name(bookie_id)}"


def repair_request_key(bookie_id: str) -> str:
    return f"{REPAIR_REQUESTS_KEY}/{encode_name(bookie_id)}"


def missing_ledgers_key(bookie_id: str) -> str:
    return f"{MISSING_LEDGERS_KEY}/{encode_name(bookie_id)}"


def restored_bookie_key(bookie_id: str) -> str:
    return f"{RESTORED_BOOKIES_KEY}/{encode_name(bookie_id)}"


def bookie_cookie_key(bookie_id: str) -> str:
    return f"{BOOKIE_COOKIES_KEY}/{encode_name(bookie_id)}"


def bookie_life_key(bookie_id: str) -> str:
    return f"{BOOKIE_LIVES_KEY}/{encode_name(bookie_id)}"


def decommissioned_bookie_key(bookie_id: str) -> str:
    return f"{DECOMMISSIONED_BOOKIES_KEY}/{encode_name(bookie_id)}"


def available_bookie_key(bookie_id: str) -> str:
    return f"{AVAILABLE_BOOKIES_KEY}/{encode_name(bookie_id)}"


def readonly_bookie_key(bookie_id: str) -> str:
    return f"{READONLY_BOOKIES_KEY}/{encode_name(bookie_id)}"


def broker_key(broker_id: str) -> str:
    return f"{BROKERS_KEY}/{encode_name(broker_id)}"


def bundle_key(tenant: str, namespace: str, bundle_range: str) -> str:
    return f"{BUNDLES_KEY}/{encode_name(tenant)}/{encode_name(namespace)}/{encode_name(bundle_range)}"


def bundle_history_key(tenant: str, namespace: str, bundle_range: str) -> str:
    return f"{BUNDLE_HISTORIES_KEY}/{encode_name(tenant)}/{encode_name(namespace)}/{encode_name(bundle_range)}"


def topic_changes_key(tenant: str, namespace: str) -> str:
    return f"{TOPIC_CHANGES_KEY}/{encode_name(tenant)}/{encode_name(namespace)}"


def permissions_key(tenant: str, namespace: str) -> str:
    return f"{PERMISSIONS_KEY}/{encode_name(tenant)}/{encode_name(namespace)}"
