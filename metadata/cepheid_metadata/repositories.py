"""Typed access to records: one repository per noun, thin over the store.

found = await chains.get(topic)                               # None, or (record, version)
version = await chains.replace(topic, record, found.version)   # BadVersionError: somebody else changed it
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
    """Records of one type, each found by its noun `N` (a ledger id, a topic, a pair of names …); `store` for what one write shares
    with others."""

    def __init__(self, store: MetadataStore, key_of: Callable[[N], str], record_type: type[R]) -> None:
        self.store = store
        self._record_type = record_type
        self.key_of = key_of

    async def get(self, noun: N) -> Found[R] | None:
        """None: there is none (certain). Raises NewerFormatError, CorruptRecordError."""
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
        """The version, 0. Raises KeyExistsError."""
        await self.store.create(self.key_of(noun), record.encode(), ephemeral=ephemeral)
        return 0

    async def replace(self, noun: N, record: R, expected_version: int) -> int:
        """The new version. Raises BadVersionError, NoSuchKeyError."""
        return await self.store.put(self.key_of(noun), record.encode(), expected_version)

    async def delete(self, noun: N, expected_version: int | None) -> None:
        """Raises BadVersionError, NoSuchKeyError."""
        await self.store.delete(self.key_of(noun), expected_version)

    def create_op(self, noun: N, record: R, *, ephemeral: bool = False) -> Create:
        """For `multi`; so are the other two."""
        return Create(self.key_of(noun), record.encode(), ephemeral=ephemeral)

    def replace_op(self, noun: N, record: R, expected_version: int) -> Put:
        return Put(self.key_of(noun), record.encode(), expected_version)

    def delete_op(self, noun: N, expected_version: int | None = None) -> Delete:
        return Delete(self.key_of(noun), expected_version)


def ledger_records(store: MetadataStore) -> Records[int, LedgerMetadata]:
    """By ledger id."""
    return Records(store, keys.ledger_key, LedgerMetadata)


def deleted_ledger_records(store: MetadataStore) -> Records[int, DeletedLedger]:
    """By ledger id."""
    return Records(store, keys.deleted_ledger_key, DeletedLedger)


def purged_ledger_records(store: MetadataStore) -> Records[int, PurgedLedgers]:
    """By page (`deleted_ledgers.py`)."""
    return Records(store, keys.purged_ledgers_key, PurgedLedgers)


def topic_records(store: MetadataStore) -> Records[TopicName, TopicRecord]:
    return Records(store, keys.topic_key, TopicRecord)


def chain_records(store: MetadataStore) -> Records[TopicName, Chain]:
    return Records(store, keys.chain_key, Chain)


def cursor_records(store: MetadataStore) -> Records[tuple[TopicName, str], CursorRecord]:
    """By (topic, subscription)."""
    return Records(store, lambda noun: keys.cursor_key(*noun), CursorRecord)


def schema_histories(store: MetadataStore) -> Records[TopicName, SchemaHistory]:
    """By topic, or any of its partitions."""
    return Records(store, keys.schemas_key, SchemaHistory)


def tenant_records(store: MetadataStore) -> Records[str, TenantRecord]:
    return Records(store, keys.tenant_key, TenantRecord)


def namespace_records(store: MetadataStore) -> Records[tuple[str, str], NamespaceRecord]:
    """By (tenant, namespace)."""
    return Records(store, lambda noun: keys.namespace_key(*noun), NamespaceRecord)


def namespace_permissions(store: MetadataStore) -> Records[tuple[str, str], NamespacePermissions]:
    """By (tenant, namespace). Changed by `change_permissions` alone."""
    return Records(store, lambda noun: keys.permissions_key(*noun), NamespacePermissions)


def cluster_records(store: MetadataStore) -> Records[str, ClusterRecord]:
    return Records(store, keys.cluster_key, ClusterRecord)


def cluster_identity(store: MetadataStore) -> Records[None, ClusterIdentity]:
    """There is one: its noun is None."""
    return Records(store, lambda _: keys.CLUSTER_KEY, ClusterIdentity)


def bookie_cookies(store: MetadataStore) -> Records[str, BookieCookie]:
    return Records(store, keys.bookie_cookie_key, BookieCookie)


def bookie_lives(store: MetadataStore) -> Records[str, BookieLife]:
    return Records(store, keys.bookie_life_key, BookieLife)


def decommissioned_bookies(store: MetadataStore) -> Records[str, DecommissionedBookie]:
    """By bookie id."""
    return Records(store, keys.decommissioned_bookie_key, DecommissionedBookie)


def available_bookies(store: MetadataStore) -> Records[str, BookieRegistration]:
    """Ephemeral."""
    return Records(store, keys.available_bookie_key, BookieRegistration)


def readonly_bookies(store: MetadataStore) -> Records[str, BookieRegistration]:
    """Ephemeral."""
    return Records(store, keys.readonly_bookie_key, BookieRegistration)


def broker_records(store: MetadataStore) -> Records[str, BrokerRegistration]:
    """Ephemeral."""
    return Records(store, keys.broker_key, BrokerRegistration)


def bundle_owners(store: MetadataStore) -> Records[tuple[str, str, str], BundleOwner]:
    """By (tenant, namespace, range). Ephemeral."""
    return Records(store, lambda noun: keys.bundle_key(*noun), BundleOwner)


def bundle_histories(store: MetadataStore) -> Records[tuple[str, str, str], BundleHistory]:
    """By (tenant, namespace, range)."""
    return Records(store, lambda noun: keys.bundle_history_key(*noun), BundleHistory)


def topic_changes(store: MetadataStore) -> Records[tuple[str, str], TopicChanges]:
    """By (tenant, namespace)."""
    return Records(store, lambda noun: keys.topic_changes_key(*noun), TopicChanges)


def leader_record(store: MetadataStore) -> Records[None, LeaderRecord]:
    """Ephemeral. There is one: its noun is None."""
    return Records(store, lambda _: keys.LEADER_KEY, LeaderRecord)


def isolation_policies(store: MetadataStore) -> Records[None, IsolationPolicies]:
    """There is one, once a policy was set: its noun is None."""
    return Records(store, lambda _: keys.ISOLATION_POLICIES_KEY, IsolationPolicies)


def dynamic_settings(store: MetadataStore) -> Records[None, DynamicSettings]:
    """There is one, once a setting was changed: its noun is None."""
    return Records(store, lambda _: keys.DYNAMIC_SETTINGS_KEY, DynamicSettings)


def repair_marks(store: MetadataStore) -> Records[int, RepairMark]:
    """By ledger id."""
    return Records(store, keys.repair_mark_key, RepairMark)


def unchecked_ledgers(store: MetadataStore) -> Records[int, UncheckedLedger]:
    """By ledger id."""
    return Records(store, keys.unchecked_ledger_key, UncheckedLedger)


def repair_locks(store: MetadataStore) -> Records[int, RepairLock]:
    """By ledger id. Ephemeral."""
    return Records(store, keys.repair_lock_key, RepairLock)


def check_locks(store: MetadataStore) -> Records[int, RepairLock]:
    """By ledger id. Ephemeral: which process checks the copies of a ledger."""
    return Records(store, keys.check_lock_key, RepairLock)


def auditor_record(store: MetadataStore) -> Records[None, AuditorRecord]:
    """Ephemeral. There is one: its noun is None."""
    return Records(store, lambda _: keys.AUDITOR_KEY, AuditorRecord)


def audit_record(store: MetadataStore) -> Records[None, Audit]:
    """There is one: its noun is None."""
    return Records(store, lambda _: keys.AUDIT_KEY, Audit)


def repair_switch(store: MetadataStore) -> Records[None, RepairSwitch]:
    """There is one, while repair is off: its noun is None."""
    return Records(store, lambda _: keys.REPAIR_OFF_KEY, RepairSwitch)


def draining_bookies(store: MetadataStore) -> Records[str, DrainingBookie]:
    """By bookie id."""
    return Records(store, keys.draining_bookie_key, DrainingBookie)


def repair_requests(store: MetadataStore) -> Records[str, RepairRequest]:
    """By bookie id."""
    return Records(store, keys.repair_request_key, RepairRequest)


def missing_ledgers(store: MetadataStore) -> Records[str, MissingLedgers]:
    """By bookie id."""
    return Records(store, keys.missing_ledgers_key, MissingLedgers)


def restored_record(store: MetadataStore) -> Records[None, RestoredMetadata]:
    """There is one between a restore and its confirmation: its noun is None."""
    return Records(store, lambda _: keys.RESTORED_KEY, RestoredMetadata)


def bookie_reports(store: MetadataStore) -> Records[str, BookieReport]:
    """By bookie id."""
    return Records(store, keys.restored_bookie_key, BookieReport)


def revocation_list(store: MetadataStore) -> Records[None, RevocationList]:
    """There is one, once a token was revoked: its noun is None."""
    return Records(store, lambda _: keys.REVOCATIONS_KEY, RevocationList)
