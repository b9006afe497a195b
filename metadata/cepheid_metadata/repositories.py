"""Typed access to records: one repository per kind of record, thin over the store.

found = await chains.get(topic)                               # None, or (record, version)
version = await chains.replace(topic, record, found.version)   # BadVersionError: another process changed it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from cepheid_metadata import keys
from cepheid_metadata.balance_records import DynamicSettings, IsolationPolicies, LeaderRecord
from cepheid_metadata.bundle_records import BundleHistory, BundleOwner, TopicChanges
from cepheid_metadata.cluster_records import (
    BookieCookie,
    BookieLife,
    BookieRegistration,
    BrokerRegistration,
    ClusterIdentity,
    ClusterRecord,
    DecommissionedBookie,
    NamespaceRecord,
    TenantRecord,
)
from cepheid_metadata.errors import CorruptRecordError
from cepheid_metadata.ledger_records import DeletedLedger, LedgerMetadata, PurgedLedgers
from cepheid_metadata.permission_records import NamespacePermissions
from cepheid_metadata.record import Record
from cepheid_metadata.repair_records import (
    Audit,
    AuditorRecord,
    DrainingBookie,
    MissingLedgers,
    RepairLock,
    RepairMark,
    RepairRequest,
    RepairSwitch,
    UncheckedLedger,
)
from cepheid_metadata.restored_records import BookieReport, RestoredMetadata
from cepheid_metadata.revocation_records import RevocationList
from cepheid_metadata.schema_records import SchemaHistory
from cepheid_metadata.store import Create, Delete, MetadataStore, Put
from cepheid_metadata.topic_records import Chain, CursorRecord, TopicRecord
from cepheid_wire import TopicName

N = TypeVar("N")
R = TypeVar("R", bound=Record)


class Found(NamedTuple, Generic[R]):
    record: R
    version: int


class Records(Generic[N, R]):
    """Records of one type, each found by its noun `N` (a ledger id, a topic, a pair of names …). `store` is for writes that include
    other records."""

    def __init__(self, store: MetadataStore, key_of: Callable[[N], str], record_type: type[R]) -> None:
        self.store = store
        self._record_type = record_type
        self.key_of = key_of

    async def get(self, noun: N) -> Found[R] | None:
        """Return the record; None: there certainly is none. Raises NewerFormatError, CorruptRecordError."""
        key = self.key_of(noun)
        found = await self.store.get(key)
        if found is None:
            return None
        try:
            return Found(self._record_type.decode(found.value, key), found.version)
        except CorruptRecordError as error:
            error.version = found.version
            raise

    async def exists(self, noun: N) -> bool:
        return await self.store.exists(self.key_of(noun))

    async def create(self, noun: N, record: R, *, ephemeral: bool = False) -> int:
        """Create the record; return its version, 0. Raises KeyExistsError."""
        await self.store.create(self.key_of(noun), record.encode(), ephemeral=ephemeral)
        return 0

    async def replace(self, noun: N, record: R, expected_version: int) -> int:
        """Replace the record; return the new version. Raises BadVersionError, NoSuchKeyError."""
        return await self.store.put(self.key_of(noun), record.encode(), expected_version)

    async def delete(self, noun: N, expected_version: int | None) -> None:
        """Delete the record. Raises BadVersionError, NoSuchKeyError."""
        await self.store.delete(self.key_of(noun), expected_version)

    def create_op(self, noun: N, record: R, *, ephemeral: bool = False) -> Create:
        """Return the operation for `multi`, like the other two methods."""
        return Create(self.key_of(noun), record.encode(), ephemeral=ephemeral)

    def replace_op(self, noun: N, record: R, expected_version: int) -> Put:
        return Put(self.key_of(noun), record.encode(), expected_version)

    def delete_op(self, noun: N, expected_version: int | None = None) -> Delete:
        return Delete(self.key_of(noun), expected_version)


def ledger_records(store: MetadataStore) -> Records[int, LedgerMetadata]:
    """Return the records of ledgers by id."""
    return Records(store, keys.ledger_key, LedgerMetadata)


def deleted_ledger_records(store: MetadataStore) -> Records[int, DeletedLedger]:
    """Return the records of deleted ledgers by id."""
    return Records(store, keys.deleted_ledger_key, DeletedLedger)


def purged_ledger_records(store: MetadataStore) -> Records[int, PurgedLedgers]:
    """Return the pages of ledgers deleted for good, by number (`deleted_ledgers.py`)."""
    return Records(store, keys.purged_ledgers_key, PurgedLedgers)


def topic_records(store: MetadataStore) -> Records[TopicName, TopicRecord]:
    return Records(store, keys.topic_key, TopicRecord)


def chain_records(store: MetadataStore) -> Records[TopicName, Chain]:
    return Records(store, keys.chain_key, Chain)


def cursor_records(store: MetadataStore) -> Records[tuple[TopicName, str], CursorRecord]:
    """Return the records of cursors by (topic, subscription)."""
    return Records(store, lambda noun: keys.cursor_key(*noun), CursorRecord)


def schema_histories(store: MetadataStore) -> Records[TopicName, SchemaHistory]:
    """Return schema histories by topic, or by any of its partitions."""
    return Records(store, keys.schemas_key, SchemaHistory)


def tenant_records(store: MetadataStore) -> Records[str, TenantRecord]:
    return Records(store, keys.tenant_key, TenantRecord)


def namespace_records(store: MetadataStore) -> Records[tuple[str, str], NamespaceRecord]:
    """Return the records of namespaces by (tenant, namespace)."""
    return Records(store, lambda noun: keys.namespace_key(*noun), NamespaceRecord)


def namespace_permissions(store: MetadataStore) -> Records[tuple[str, str], NamespacePermissions]:
    """Return permissions by (tenant, namespace). Changed only by `change_permissions`."""
    return Records(store, lambda noun: keys.permissions_key(*noun), NamespacePermissions)


def cluster_records(store: MetadataStore) -> Records[str, ClusterRecord]:
    return Records(store, keys.cluster_key, ClusterRecord)


def cluster_identity(store: MetadataStore) -> Records[None, ClusterIdentity]:
    """Return the cluster's identity: one record, with the noun None."""
    return Records(store, lambda _: keys.CLUSTER_KEY, ClusterIdentity)


def bookie_cookies(store: MetadataStore) -> Records[str, BookieCookie]:
    return Records(store, keys.bookie_cookie_key, BookieCookie)


def bookie_lives(store: MetadataStore) -> Records[str, BookieLife]:
    return Records(store, keys.bookie_life_key, BookieLife)


def decommissioned_bookies(store: MetadataStore) -> Records[str, DecommissionedBookie]:
    """Return the records of decommissioned bookies by id."""
    return Records(store, keys.decommissioned_bookie_key, DecommissionedBookie)


def available_bookies(store: MetadataStore) -> Records[str, BookieRegistration]:
    """Return the registrations of writable bookies by id. Ephemeral."""
    return Records(store, keys.available_bookie_key, BookieRegistration)


def readonly_bookies(store: MetadataStore) -> Records[str, BookieRegistration]:
    """Return the registrations of read-only bookies by id. Ephemeral."""
    return Records(store, keys.readonly_bookie_key, BookieRegistration)


def broker_records(store: MetadataStore) -> Records[str, BrokerRegistration]:
    """Return the registrations of brokers by id. Ephemeral."""
    return Records(store, keys.broker_key, BrokerRegistration)


def bundle_owners(store: MetadataStore) -> Records[tuple[str, str, str], BundleOwner]:
    """Return the owners of bundles by (tenant, namespace, range). Ephemeral."""
    return Records(store, lambda noun: keys.bundle_key(*noun), BundleOwner)


def bundle_histories(store: MetadataStore) -> Records[tuple[str, str, str], BundleHistory]:
    """Return the histories of bundles by (tenant, namespace, range)."""
    return Records(store, lambda noun: keys.bundle_history_key(*noun), BundleHistory)


def topic_changes(store: MetadataStore) -> Records[tuple[str, str], TopicChanges]:
    """Return the marks of changed topics by (tenant, namespace)."""
    return Records(store, lambda noun: keys.topic_changes_key(*noun), TopicChanges)


def leader_record(store: MetadataStore) -> Records[None, LeaderRecord]:
    """Return the record of the leader: one record, with the noun None. Ephemeral."""
    return Records(store, lambda _: keys.LEADER_KEY, LeaderRecord)


def isolation_policies(store: MetadataStore) -> Records[None, IsolationPolicies]:
    """Return the isolation policies: one record, with the noun None, once a policy was set."""
    return Records(store, lambda _: keys.ISOLATION_POLICIES_KEY, IsolationPolicies)


def dynamic_settings(store: MetadataStore) -> Records[None, DynamicSettings]:
    """Return the dynamic settings: one record, with the noun None, once a setting was changed."""
    return Records(store, lambda _: keys.DYNAMIC_SETTINGS_KEY, DynamicSettings)


def repair_marks(store: MetadataStore) -> Records[int, RepairMark]:
    """Return the marks of ledgers by id."""
    return Records(store, keys.repair_mark_key, RepairMark)


def unchecked_ledgers(store: MetadataStore) -> Records[int, UncheckedLedger]:
    """Return the records of unchecked ledgers by id."""
    return Records(store, keys.unchecked_ledger_key, UncheckedLedger)


def repair_locks(store: MetadataStore) -> Records[int, RepairLock]:
    """Return the locks of ledgers in repair, by id. Ephemeral."""
    return Records(store, keys.repair_lock_key, RepairLock)


def check_locks(store: MetadataStore) -> Records[int, RepairLock]:
    """Return the locks of ledgers whose copies a process checks, by id. Ephemeral."""
    return Records(store, keys.check_lock_key, RepairLock)


def auditor_record(store: MetadataStore) -> Records[None, AuditorRecord]:
    """Return the record of the auditor: one record, with the noun None. Ephemeral."""
    return Records(store, lambda _: keys.AUDITOR_KEY, AuditorRecord)


def audit_record(store: MetadataStore) -> Records[None, Audit]:
    """Return the audit: one record, with the noun None."""
    return Records(store, lambda _: keys.AUDIT_KEY, Audit)


def repair_switch(store: MetadataStore) -> Records[None, RepairSwitch]:
    """Return the switch of automatic repair: one record, with the noun None, while repair is off."""
    return Records(store, lambda _: keys.REPAIR_OFF_KEY, RepairSwitch)


def draining_bookies(store: MetadataStore) -> Records[str, DrainingBookie]:
    """Return the records of draining bookies by id."""
    return Records(store, keys.draining_bookie_key, DrainingBookie)


def repair_requests(store: MetadataStore) -> Records[str, RepairRequest]:
    """Return the requests for repair by bookie id."""
    return Records(store, keys.repair_request_key, RepairRequest)


def missing_ledgers(store: MetadataStore) -> Records[str, MissingLedgers]:
    """Return the records of missing ledgers by bookie id."""
    return Records(store, keys.missing_ledgers_key, MissingLedgers)


def restored_record(store: MetadataStore) -> Records[None, RestoredMetadata]:
    """Return the record of a restore: one record, with the noun None, until the restore is confirmed."""
    return Records(store, lambda _: keys.RESTORED_KEY, RestoredMetadata)


def bookie_reports(store: MetadataStore) -> Records[str, BookieReport]:
    """Return the reports after a restore by bookie id."""
    return Records(store, keys.restored_bookie_key, BookieReport)


def revocation_list(store: MetadataStore) -> Records[None, RevocationList]:
    """Return the revocation list: one record, with the noun None, once a token was revoked."""
    return Records(store, lambda _: keys.REVOCATIONS_KEY, RevocationList)
