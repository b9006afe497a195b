"""Restores a backup of metadata into an empty store.

    nothing runs, store empty? ► /restored ► all records in the order of the backup ► id counter ► /cluster: processes may start

Rules:
1. No broker or bookie starts on a store without `/cluster`, so no process uses metadata that is half restored. An interrupted
   restore is continued with the same backup: each record is written in one step, or does not exist.
2. `/restored` is written first. It stays until an operator confirms (`restored_metadata.py`).
3. A process from before the restore has versions of records, and could overwrite a restored record that happens to have such a
   version. Brokers drop their state when their session ends, and a restore needs a store without registrations. In addition:
   - The mark of each chain gets a version that it never had. Every write to a topic's records checks it.
   - The record of a ledger that is not closed gets the version of the backup plus `LEDGER_VERSION_MARGIN`, that of a closed
     one the version of the backup.
   All other records begin at version 0. They are read and changed by one process at a time, or read again after a conflict.
4. The id counter is above every ledger of the backup, plus `ID_MARGIN`. Bookies raise it further when they start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from cepheid_metadata import keys
from cepheid_metadata.backup_format import BackupEntry, BackupSummary
from cepheid_metadata.errors import CorruptRecordError, MetadataError
from cepheid_metadata.ledger_records import LedgerIdCounter, LedgerMetadata
from cepheid_metadata.listing import list_names
from cepheid_metadata.repositories import cluster_identity, restored_record
from cepheid_metadata.restored_metadata import ID_MARGIN, raise_counter
from cepheid_metadata.restored_records import RestoredMetadata
from cepheid_metadata.store import Create, MetadataStore, Op, Put
from cepheid_ports import Ports

LEDGER_VERSION_MARGIN = 64
"""More changes than the record of one ledger gets between a backup and the loss of the metadata: one for each failed bookie."""

_MARK_STEPS = 16
_MAX_VERSION = 10_000  # one operation for each: more would not fit one request
_GROUP_OPS = 500
_GROUP_BYTES = 400_000


class RestoreRefusedError(MetadataError):
    """The store is not empty, or processes use it."""

    hint: ClassVar[str] = "nothing was written; name an empty store or another root in ZooKeeper: zk://host:port/root"


async def restore_metadata(store: MetadataStore, summary: BackupSummary, entries: Iterable[BackupEntry], ports: Ports) -> None:
    """Write a checked backup into an empty store. Raises RestoreRefusedError, and the errors of the store: call it again then."""
    continued = await _is_continued(store, summary)
    if not continued:
        restored = RestoredMetadata(
            backup_sha256=summary.sha256, backup_created_at_ms=summary.created_at_ms, restored_at_ms=ports.wall_ms()
        )
        await restored_record(store).create(None, restored)
    writer = _Writer(store, ports, continued)
    identity: BackupEntry | None = None
    largest, next_ledger_id = -1, 0
    for entry in entries:
        if entry.key == keys.CLUSTER_KEY:
            identity = entry
        elif entry.key == keys.LEDGER_IDS_KEY:
            next_ledger_id = LedgerIdCounter.decode(entry.value, entry.key).next_ledger_id
        else:
            if (ledger_id := keys.ledger_id_of(entry.key)) is not None:
                largest = max(largest, ledger_id)
            await writer.add(entry)
    if identity is None:
        raise RestoreRefusedError(f"the backup has no record {keys.CLUSTER_KEY}: it is not the backup of a cluster")
    await writer.flush()
    await raise_counter(store, max(next_ledger_id, largest + 1) + ID_MARGIN)
    await store.create(identity.key, identity.value)


async def _is_continued(store: MetadataStore, summary: BackupSummary) -> bool:
    """Return whether this same backup was restored in part. Raises RestoreRefusedError."""
    await store.sync(keys.CLUSTER_KEY)
    for parent, kind in (
        (keys.BROKERS_KEY, "broker"),
        (keys.AVAILABLE_BOOKIES_KEY, "bookie"),
        (keys.READONLY_BOOKIES_KEY, "bookie"),
    ):
        if names := await list_names(store, parent):
            message = f"{kind} {names[0]} is registered in this store: stop all brokers and bookies of the cluster first"
            raise RestoreRefusedError(message, registered=names)
    found = await cluster_identity(store).get(None)
    if found is not None:
        message = f"the store holds the cluster {found.record.name!r} ({found.record.cluster_id}); a restore needs an empty store"
        raise RestoreRefusedError(message, cluster_id=found.record.cluster_id)
    restored = await restored_record(store).get(None)
    if restored is not None:
        if restored.record.backup_sha256 != summary.sha256:
            message = "the store holds part of another backup, whose restore did not finish: finish that one, or use an empty store"
            raise RestoreRefusedError(message)
        return True
    if (key := await _first_record(store)) is not None:
        raise RestoreRefusedError(f"the store has a record {key}; a restore needs an empty store", key=key)
    return False


async def _first_record(store: MetadataStore) -> str | None:
    """Return a key with a value. Keys without one are parents that stayed when their last child was deleted."""
    pending = ["/"]
    while pending:
        key = pending.pop()
        if key != "/" and (found := await store.get(key)) is not None and found.value:
            return key
        pending += [f"{key.rstrip('/')}/{name}" for name in await store.children(key)]
    return None


class _Writer:
    """Writes records in groups of one request each."""

    def __init__(self, store: MetadataStore, ports: Ports, continued: bool) -> None:
        self._store = store
        self._continued = continued
        self._mark_step = 1 + ports.random.randrange(_MARK_STEPS)
        self._ops: list[Op] = []
        self._bytes = 0

    async def add(self, entry: BackupEntry) -> None:
        if self._continued and await self._is_there(entry.key):
            return
        ops = _record_ops(entry, self._version_of(entry))
        size_bytes = sum(len(op.key) for op in ops) + len(entry.value)
        if self._ops and (len(self._ops) + len(ops) > _GROUP_OPS or self._bytes + size_bytes > _GROUP_BYTES):
            await self.flush()
        self._ops += ops
        self._bytes += size_bytes

    async def flush(self) -> None:
        if self._ops:
            await self._store.multi(self._ops)
            self._ops, self._bytes = [], 0

    async def _is_there(self, key: str) -> bool:
        found = await self._store.get(key)
        return found is not None and bool(found.value)

    def _version_of(self, entry: BackupEntry) -> int:
        """Return the version that the restored record gets (rule 3)."""
        if entry.key.startswith(f"{keys.INCARNATIONS_KEY}/"):
            return entry.version + self._mark_step
        if keys.ledger_id_of(entry.key) is None:
            return 0
        try:
            closed = LedgerMetadata.decode(entry.value, entry.key).is_closed
        except CorruptRecordError:
            closed = True  # unreadable: no process can change it
        return min(_MAX_VERSION, entry.version + (0 if closed else LEDGER_VERSION_MARGIN))


def _record_ops(entry: BackupEntry, version: int) -> list[Op]:
    """Return operations that create the record with this version. Values in between are never seen, so they are empty."""
    if not version:
        return [Create(entry.key, entry.value)]
    steps = [Put(entry.key, b"", before) for before in range(version - 1)]
    return [Create(entry.key, b""), *steps, Put(entry.key, entry.value, version - 1)]
