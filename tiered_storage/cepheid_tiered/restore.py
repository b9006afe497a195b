"""Restore topics from a bucket alone, by their manifests.

    list the bucket ► read manifests ► no broker runs, no id is taken ► id counter above all ids of the bucket
        each topic: tenant, namespace, schemas, cursors ► chain and its mark ► topic record ► manifest names this cluster

Restored topics have their ledger ids, incarnation, schema versions and cursors, so positions stored elsewhere (offsets of Spark,
message ids of clients) stay valid. Ledgers are read from their objects; nothing is copied to bookies.

Rules:
1. The bucket is read before metadata is written. If it cannot be listed nothing is restored.
2. No broker is registered: one might have taken ledger ids that a manifest names. No other ledger of the cluster has such an id.
   While a restore of metadata is not confirmed, bookies may have ledgers that metadata does not know: only topics that exist get
   copies then.
3. The record of the topic is written last, so that no client finds a partly restored topic. An interrupted restore is repeated:
   records of the same incarnation that exist already are kept, and the rest is added.
4. A topic that exists keeps all its data. If metadata is older than the bucket, as after a restore from a backup, its chain gets
   the copies that it does not name: of its own ledgers, and of later ones. A topic that cannot be restored does not affect others.
5. An object that is missing, or has another size, is reported, and its topic is refused unless the caller accepts that.
6. Objects that the manifest does not name are added if their footers say that they belong to the topic (unnamed_objects.py).
7. The objects belong to the restored topic from then on: its manifest is written again with the id of its new cluster, by which
   brokers and sweeps of the old cluster know that the objects are no longer theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from cepheid_metadata import (
    MAX_REQUEST_BYTES,
    BadVersionError,
    Chain,
    ChainLedger,
    ClusterIdentity,
    Create,
    CursorRecord,
    Found,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NamespaceRecord,
    NoSuchKeyError,
    OffloadedLedger,
    Position,
    Put,
    Record,
    SchemaDefinition,
    SchemaHistory,
    TenantRecord,
    TopicRecord,
    keys,
    namespace_records,
    read_chain,
    require_cluster,
    schema_histories,
    tenant_records,
    topic_records,
)
from cepheid_metadata.chain_pages import changes, read_stored_chain, split
from cepheid_metadata.ledger_ids import raise_ledger_ids
from cepheid_metadata.listing import list_deleted_ledgers, list_ledgers, list_names
from cepheid_metadata.repositories import restored_record
from cepheid_metadata.restored_metadata import ID_MARGIN
from cepheid_ports import CepheidError
from cepheid_tiered.bucket import Bucket
from cepheid_tiered.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, ManifestError, ManifestLedger, url_from
from cepheid_tiered.object_store import StoredObject
from cepheid_tiered.segment import SegmentError
from cepheid_tiered.sweep import list_all_chains, place_of
from cepheid_tiered.unnamed_objects import FooterOf, FoundObjects, find_unnamed, ledger_id_of
from cepheid_wire import InvalidTopicNameError, TopicName

_PART_BYTES = MAX_REQUEST_BYTES - 50_000  # room for the key and for a request's own bytes
_TRIES = 20
_TAKEN_IN_AT_ONCE = 200

R = TypeVar("R", bound=Record)


class BucketRestoreRefusedError(CepheidError):
    """The restore cannot begin. Nothing was written."""

    hint: ClassVar[str] = "stop all brokers of the cluster, restore, and start them again"


class NotConfirmedError(BucketRestoreRefusedError):
    """Metadata may still name more than it does now."""

    hint: ClassVar[str] = "run `cepheid metadata confirm` first"


class NoManifestError(CepheidError):
    """There are no manifests below the URL, so nothing to restore."""

    hint: ClassVar[str] = "name the URL of the offload policy (bucket and prefix), or the directory of a tenant, namespace or topic"


class Outcome(Enum):
    RESTORED = "restored"
    PLANNED = "would be restored"
    THERE = "is restored already"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class RestoredTopic:
    """The outcome of restoring one manifest."""

    topic: str
    manifest: str
    outcome: Outcome
    reason: str = ""
    """Why the topic is refused or unreadable, or a remark on a restored topic."""
    ledgers: int = 0
    entries: int = 0
    size_bytes: int = 0
    cursors: int = 0
    cursors_without_state: tuple[str, ...] = ()
    """Cursors without their acknowledgements above the mark-delete position, whose messages are delivered again."""
    cursors_age_ms: int = 0
    lost: tuple[ManifestLedger, ...] = ()
    """Ledgers with entries that were never offloaded."""
    missing: tuple[str, ...] = ()
    """Objects that the manifest names and that are not in the bucket as they were."""
    taken_in: tuple[int, ...] = ()
    """Ledgers whose objects were found by listing the bucket; for an existing topic, those whose copies its chain did not name."""
    not_taken: tuple[str, ...] = ()
    """Other objects in its directory that the manifest does not name, with the reason."""

    @property
    def is_bad(self) -> bool:
        return self.outcome in (Outcome.REFUSED, Outcome.UNREADABLE)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A topic that can be restored."""

    name: TopicName
    url: str
    manifest: Manifest
    kept: tuple[ManifestLedger, ...]
    missing: tuple[str, ...]
    there: bool
    """Whether its chain exists, so that the restore is continued or repeated."""
    taken_in: tuple[int, ...] = ()
    not_taken: tuple[str, ...] = ()


async def restore_topics(
    store: MetadataStore,
    bucket: Bucket,
    url: str,
    now_ms: int,
    *,
    only: str | None = None,
    accept_missing: bool = False,
    dry_run: bool = False,
    footer_of: FooterOf | None = None,
    on_topic: Callable[[RestoredTopic], None] = lambda _: None,
) -> list[RestoredTopic]:
    """Restore all topics below `url`, or `only` one (with its partitions), and return the outcome of each, by name.

    `footer_of` reads objects that no manifest names; without it they are left out.

    Raises BucketRestoreRefusedError, NoManifestError, SegmentError (the bucket could not be read), and what the store raises: then
    call it again.
    """
    objects, manifests = await _list(bucket, url)
    largest_id = max((one for name in objects if (one := ledger_id_of(name.rpartition("/")[2])) is not None), default=-1)
    found: list[tuple[str, Manifest]] = []
    report: list[RestoredTopic] = []

    def note(one: RestoredTopic) -> None:
        report.append(one)
        on_topic(one)

    for manifest_url in manifests:
        try:
            manifest = Manifest.decode(await bucket.get(manifest_url, max_bytes=MAX_MANIFEST_BYTES), manifest_url)
            name = TopicName.parse(manifest.topic)
        except (ManifestError, InvalidTopicNameError, SegmentError) as error:
            note(RestoredTopic("", manifest_url, Outcome.UNREADABLE, str(error)))
            continue
        largest_id = max([largest_id, *(ledger.ledger_id for ledger in manifest.ledgers)])
        if only is None or only in (str(name), str(name.base)):
            found.append((manifest_url, manifest))
    if not found and not report:
        raise NoManifestError(f"there is no {MANIFEST_NAME}{f' of {only}' if only else ''} below {url}", url=url)
    identity = await _require_idle(store)
    is_confirmed = not await restored_record(store).exists(None)
    taken = await _TakenIds.read(store)
    plans: list[_Plan] = []
    for manifest_url, manifest in sorted(found, key=lambda one: (one[1].topic, -one[1].written_at_ms)):
        try:
            plan = await _plan(store, manifest_url, manifest, objects, taken, plans, accept_missing, footer_of)
            if not plan.there and not is_confirmed:
                raise _RefusedTopicError(
                    "metadata was restored from a backup: run `cepheid metadata confirm` before it can come back"
                )
            plans.append(plan)
        except _RefusedTopicError as error:
            note(_told(manifest_url, manifest, now_ms, Outcome.REFUSED, str(error.args[0]), missing=error.missing))
    if not plans and not is_confirmed:
        raise NotConfirmedError("metadata of this cluster was restored from a backup, and that is not confirmed yet")
    if dry_run:
        for plan in plans:
            note(_told(plan.url, plan.manifest, now_ms, Outcome.THERE if plan.there else Outcome.PLANNED, plan=plan))
        return _sorted(report)
    if plans:
        # Of the whole bucket, not only of what is restored now: another restore may bring the rest back later. With a margin for
        # ledgers that came after the manifests.
        await raise_ledger_ids(store, max(largest_id, 0) + 1 + ID_MARGIN)
    bases = _newest_bases(plan.manifest for plan in plans)
    for plan in plans:
        try:
            await _Writer(store, identity, plan, bases.get(plan.name.base)).write()
        except _RefusedTopicError as error:
            note(_told(plan.url, plan.manifest, now_ms, Outcome.REFUSED, str(error.args[0])))
            continue
        reason = await _claim(bucket, plan, identity)
        note(_told(plan.url, plan.manifest, now_ms, Outcome.THERE if plan.there else Outcome.RESTORED, reason, plan=plan))
    return _sorted(report)


class _RefusedTopicError(Exception):
    def __init__(self, reason: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.missing = missing


async def _list(bucket: Bucket, url: str) -> tuple[dict[str, StoredObject], list[str]]:
    """Return all objects by their place, and the sorted URLs of the manifests."""
    objects: dict[str, StoredObject] = {}
    manifests: list[str] = []
    async for found in bucket.list(url):
        objects[place_of(found.url)] = found
        if place_of(found.url).endswith(f"/{MANIFEST_NAME}"):
            manifests.append(found.url)
    return objects, sorted(manifests)


async def _require_idle(store: MetadataStore) -> ClusterIdentity:
    """Check that no broker runs (rule 2), and return the cluster. Raises BucketRestoreRefusedError, ClusterNotFoundedError."""
    identity = await require_cluster(store)
    await store.sync(keys.BROKERS_KEY)
    if names := await list_names(store, keys.BROKERS_KEY):
        raise BucketRestoreRefusedError(f"broker {names[0]} runs in cluster {identity.name!r}", brokers=names)
    return identity


class _TakenIds:
    """Ledger ids that the cluster uses, each with its owner."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}

    @classmethod
    async def read(cls, store: MetadataStore) -> _TakenIds:
        taken = cls()
        async for ledger_id in list_ledgers(store):
            taken._owners[ledger_id] = "a ledger on the bookies"
        async for ledger_id in list_deleted_ledgers(store):
            taken._owners[ledger_id] = "a deleted ledger that can be restored"
        for topic in await list_all_chains(store):
            if (found := await _read_chain(store, topic)) is not None:
                taken.take(str(topic), [ledger.ledger_id for ledger in found.record.ledgers])
                taken.take(str(topic), found.record.deletions)
        return taken

    def take(self, owner: str, ledger_ids: Iterable[int]) -> None:
        self._owners.update(dict.fromkeys(ledger_ids, owner))

    def conflict(self, owner: str, ledger_ids: Iterable[int]) -> tuple[int, str] | None:
        for ledger_id in ledger_ids:
            if (found := self._owners.get(ledger_id, owner)) != owner:
                return ledger_id, found
        return None


async def _plan(
    store: MetadataStore,
    url: str,
    manifest: Manifest,
    objects: Mapping[str, StoredObject],
    taken: _TakenIds,
    before: Sequence[_Plan],
    accept_missing: bool,
    footer_of: FooterOf | None,
) -> _Plan:
    """Return what to restore for a manifest. Raises _RefusedTopicError, SegmentError, and MetadataErrors of the store."""
    name = TopicName.parse(manifest.topic)
    if twin := next((plan for plan in before if plan.name == name), None):
        raise _RefusedTopicError(f"{twin.url} is a newer manifest of this topic")
    chain = await _read_chain(store, name)
    if chain is not None and chain.record.incarnation != manifest.incarnation:
        raise _RefusedTopicError("the cluster has a topic of this name; delete it, or restore into another cluster")
    if chain is None and await topic_records(store).exists(name):
        raise _RefusedTopicError(
            "the cluster has a topic of this name without any entries; delete it to restore the one of the bucket"
        )
    _check_records(manifest, url)
    kept, missing = _present(manifest, url, objects)
    extra = FoundObjects(manifest)
    if footer_of is not None:
        directory = place_of(url).rpartition("/")[0]
        beside = [found for place, found in objects.items() if place.rpartition("/")[0] == directory]
        extra = await find_unnamed(manifest, url, beside, missing, footer_of)
        kept, missing = _present(extra.manifest, url, objects)
    manifest = extra.manifest
    if missing and not accept_missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        reason = f"{names} {'is' if len(missing) == 1 else 'are'} not in the bucket, or not of the size that was written"
        raise _RefusedTopicError(f"{reason}; put back what is missing, or restore the rest with --accept-missing", missing)
    ids = [ledger.ledger_id for ledger in kept]
    if chain is None and (conflict := taken.conflict(manifest.topic, ids)):
        ledger_id, owner = conflict
        raise _RefusedTopicError(f"ledger {ledger_id} is that of {owner} in this cluster; restore into an empty cluster")
    taken.take(manifest.topic, ids)
    taken_in = extra.taken_in
    if chain is not None:
        taken_in = tuple(ledger.ledger_id for ledger in _lacking(chain.record, url, kept))
    return _Plan(name, url, manifest, kept, missing, chain is not None, taken_in, extra.not_taken)


def _check_records(manifest: Manifest, url: str) -> None:
    """Check that this release can read each record. Raises _RefusedTopicError."""
    records: list[tuple[type[Record], Mapping[str, Any] | None, str]] = [
        (TenantRecord, manifest.tenant_record, "tenant"),
        (NamespaceRecord, manifest.namespace_record, "namespace"),
        (TopicRecord, manifest.topic_record, "topic"),
        (TopicRecord, manifest.base_record, "partitioned topic"),
        (SchemaHistory, manifest.schema_history, "schema history"),
        *((SchemaDefinition, one, f"schema version {version}") for version, one in manifest.schema_definitions.items()),
    ]
    for kind, fields, what in records:
        if fields is not None:
            try:
                _decoded(kind, fields, f"{what} in {url}")
            except MetadataError as error:
                raise _RefusedTopicError(str(error)) from None


def _decoded(kind: type[R], fields: Mapping[str, Any], where: str) -> R:
    """Return the decoded record. Raises NewerFormatError, CorruptRecordError."""
    return kind.decode(json.dumps(fields).encode(), where)


def _present(
    manifest: Manifest, url: str, objects: Mapping[str, StoredObject]
) -> tuple[tuple[ManifestLedger, ...], tuple[str, ...]]:
    """Return the ledgers whose objects are in the bucket with their size, and the names of the other objects.

    An object in another store, which was not listed, is assumed to be there: `cepheid tiered verify` reads it.
    """
    kept: list[ManifestLedger] = []
    missing: list[str] = []
    for ledger in manifest.offloaded:
        assert ledger.object is not None
        place = place_of(url_from(url, ledger.object.name))
        found = objects.get(place)
        if "://" in ledger.object.name if found is None else found.size_bytes == ledger.object.size_bytes:
            kept.append(ledger)
        else:
            missing.append(ledger.object.name)
    return tuple(kept), tuple(missing)


def _newest_bases(manifests: Iterable[Manifest]) -> dict[TopicName, TopicRecord]:
    """Return the records of partitioned topics: the newest in a partition's manifest, with the largest number of partitions."""
    bases: dict[TopicName, tuple[int, TopicRecord]] = {}
    for manifest in manifests:
        if manifest.base_record is None:
            continue
        name = TopicName.parse(manifest.topic).base
        record = _decoded(TopicRecord, manifest.base_record, str(name))
        written_at_ms, before = bases.get(name, (-1, record))
        partitions = max(before.partitions, record.partitions)
        newest = record if manifest.written_at_ms > written_at_ms else before
        bases[name] = max(written_at_ms, manifest.written_at_ms), newest.replace(partitions=partitions, deleted=None)
    return {name: record for name, (_, record) in bases.items()}


class _Writer:
    """Writes the records of one topic in the order of rule 3."""

    def __init__(self, store: MetadataStore, identity: ClusterIdentity, plan: _Plan, base: TopicRecord | None) -> None:
        self._store = store
        self._identity = identity
        self._plan = plan
        self._manifest = plan.manifest
        self._name = plan.name
        self._base = base

    async def write(self) -> None:
        await self._write_owners()
        await self._write_schemas()
        if not self._plan.there:
            for key, record in self._cursors():
                await self._put(key, record.encode())
            await self._write_chain()
        elif self._plan.taken_in:
            await self._take_in()
        await self._write_topic()

    async def _write_owners(self) -> None:
        """Write the records of tenant and namespace if the cluster has none of that name."""
        manifest, namespace = self._manifest, self._name.namespace
        tenant = TenantRecord(allowed_clusters=(self._identity.name,))
        if manifest.tenant_record is not None:
            tenant = _decoded(TenantRecord, manifest.tenant_record, namespace.tenant)
            tenant = tenant.replace(allowed_clusters=self._renamed(tenant.allowed_clusters))
        policies = NamespaceRecord(replication_clusters=(self._identity.name,))
        if manifest.namespace_record is not None:
            policies = _decoded(NamespaceRecord, manifest.namespace_record, str(namespace))
            policies = policies.replace(replication_clusters=self._renamed(policies.replication_clusters), deleted=False)
        await self._create(tenant_records(self._store).key_of(namespace.tenant), tenant.encode())
        await self._create(namespace_records(self._store).key_of((namespace.tenant, namespace.local_name)), policies.encode())

    def _renamed(self, clusters: Sequence[str]) -> tuple[str, ...]:
        """Return the cluster names with the old cluster's replaced by this one's."""
        return tuple(dict.fromkeys(self._identity.name if name == self._manifest.cluster else name for name in clusters))

    async def _write_schemas(self) -> None:
        if self._manifest.schema_history is None:
            return
        records = schema_histories(self._store)
        history = _decoded(SchemaHistory, self._manifest.schema_history, str(self._name))
        await self._create(records.key_of(self._name), SchemaHistory(current_from=0).encode())
        found = await records.get(self._name)
        assert found is not None
        rows = list(found.record.versions)
        if [row.version for row in rows] != [row.version for row in history.versions[: len(rows)]]:
            return  # the topic's other partitions have a newer one
        version = found.version
        for row in history.versions[len(rows) :]:
            definition = _decoded(SchemaDefinition, self._manifest.schema_definitions[str(row.version)], str(self._name)).encode()
            parts = [definition[start : start + _PART_BYTES] for start in range(0, len(definition), _PART_BYTES)]
            for number, part in enumerate(parts):
                await self._put(keys.schema_part_key(self._name, row.token, number), part)
            rows.append(row.replace(parts=len(parts), size_bytes=len(definition)))
            grown = SchemaHistory(next_version=row.version + 1, versions=tuple(rows))
            version = await records.replace(self._name, grown, version)
        whole = SchemaHistory(next_version=history.next_version, current_from=history.current_from, versions=tuple(rows))
        await records.replace(self._name, whole, version)

    def _cursors(self) -> list[tuple[str, CursorRecord]]:
        manifest = self._manifest
        return [
            (
                keys.cursor_key(self._name, cursor.name),
                CursorRecord(
                    chain_incarnation=manifest.incarnation,
                    chain_epoch=manifest.epoch,
                    mark_delete=Position(*cursor.mark_delete),
                    state=cursor.state,
                    subscription_properties=dict(cursor.properties),
                    created_at_ms=manifest.cursors_at_ms,
                ),
            )
            for cursor in manifest.cursors
        ]

    async def _write_chain(self) -> None:
        """Write the pages first, then the record that names them, with the mark, so that a chain is complete or absent."""
        key = keys.chain_key(self._name)
        stored = split(restored_chain(self._manifest, self._plan.url, self._plan.kept))
        for ref, page in zip(stored.refs, stored.pages, strict=True):
            await self._put_page(keys.chain_page_key(key, ref.number), page.encode())
        await self._delete_other_pages(key, {str(ref.number) for ref in stored.refs})
        mark = Create(keys.incarnation_key(stored.chain.incarnation), str(self._name).encode())
        parent = await self._store.get(key)  # of pages, without a value
        value = stored.record.encode()
        try:
            await self._store.multi([Create(key, value) if parent is None else Put(key, value, parent.version), mark])
        except (KeyExistsError, BadVersionError) as error:
            raise _RefusedTopicError(f"it was created at this moment: {error.args[0]}") from None

    async def _put_page(self, key: str, value: bytes) -> None:
        """Write a page with version 0, by which its chain deletes it, even if an interrupted restore has left another one."""
        found = await self._store.get(key)
        if found is not None and (found.value != value or found.version):
            await self._store.delete(key, found.version)
            found = None
        if found is None:
            await self._store.multi([Create(key, value)])

    async def _delete_other_pages(self, chain_key: str, names: Container[str]) -> None:
        """Delete the pages of an interrupted restore: a key with children, and so the topic, could not be deleted."""
        try:
            children = await self._store.children(chain_key)
        except NoSuchKeyError:
            return
        for name in children:
            if name not in names:
                await self._store.delete(f"{chain_key}/{name}", None)

    async def _take_in(self) -> None:
        """Add copies to the chain of an existing topic (rule 4), in steps because one write can change only some pages."""
        key = keys.chain_key(self._name)
        by_id = {ledger.ledger_id: ledger for ledger in self._plan.kept}
        rows = [by_id[ledger_id] for ledger_id in self._plan.taken_in]
        for start in range(0, len(rows), _TAKEN_IN_AT_ONCE):
            found = await read_stored_chain(self._store, self._name)
            assert found is not None, f"{self._name} has a chain, and no broker runs"
            stored, version = found
            chain = with_copies(stored.chain, self._manifest, self._plan.url, rows[start : start + _TAKEN_IN_AT_ONCE])
            try:
                await self._store.multi(changes(key, version, stored, split(chain, stored)))
            except BadVersionError as error:
                raise _RefusedTopicError(f"it was changed at this moment: {error.args[0]}") from None

    async def _write_topic(self) -> None:
        manifest = self._manifest
        if manifest.topic_record is not None or not self._name.is_partition:
            record = TopicRecord(created_at_ms=manifest.written_at_ms)
            if manifest.topic_record is not None:
                record = _decoded(TopicRecord, manifest.topic_record, str(self._name)).replace(deleted=None)
            await self._create(keys.topic_key(self._name), record.encode())
        if self._base is not None and self._name.is_partition:
            await self._write_base(self._base)

    async def _write_base(self, record: TopicRecord) -> None:
        records, base = topic_records(self._store), self._name.base
        await self._create(records.key_of(base), record.encode())
        found = await records.get(base)
        if found is not None and found.record.partitions < record.partitions:
            await records.replace(base, found.record.replace(partitions=record.partitions), found.version)

    async def _create(self, key: str, value: bytes) -> None:
        """Create a record, keeping an existing one. A key with children and without a value is only their parent."""
        await self._put(key, value, over_others=False)

    async def _put(self, key: str, value: bytes, *, over_others: bool = True) -> None:
        for _ in range(_TRIES):
            found = await self._store.get(key)
            if found is not None and found.value and (found.value == value or not over_others):
                return
            try:
                await self._store.multi([Create(key, value) if found is None else Put(key, value, found.version)])
            except (KeyExistsError, BadVersionError, NoSuchKeyError):
                continue  # another restore writes the same
            return
        raise MetadataError(f"{key} was changed by others {_TRIES} times in a row; try again")


async def _read_chain(store: MetadataStore, name: TopicName) -> Found[Chain] | None:
    """Return the chain of a topic. A key without a value is the parent of pages from an interrupted restore."""
    found = await store.get(keys.chain_key(name))
    return None if found is None or not found.value else await read_chain(store, name)


def restored_chain(manifest: Manifest, url: str, kept: Sequence[ManifestLedger]) -> Chain:
    """Return the chain of these ledgers, which are only in the bucket."""
    offloaded = {ledger.ledger_id: _copy_of(ledger, url) for ledger in kept}
    terminated_at = None if manifest.terminated_at is None else Position(*manifest.terminated_at)
    if terminated_at is not None and (not kept or kept[-1].ledger_id != terminated_at.ledger_id):
        # The last ledgers were never offloaded. The topic stays terminated, at its last restored entry.
        terminated_at = Position(kept[-1].ledger_id, kept[-1].entries - 1) if kept else Position(0, -1)
    return Chain(
        incarnation=manifest.incarnation,
        epoch=manifest.epoch,
        ledgers=tuple(map(_chain_ledger, kept)),
        terminated_at=terminated_at,
        properties=dict(manifest.properties),
        messages={ledger.ledger_id: ledger.messages for ledger in kept if ledger.messages is not None} or None,
        offloaded=offloaded or None,
    )


def _lacking(chain: Chain, url: str, kept: Sequence[ManifestLedger]) -> list[ManifestLedger]:
    """Return the ledgers whose copies an existing chain lacks: its own, and those after its last one."""
    ledgers = {ledger.ledger_id: ledger for ledger in chain.ledgers}
    newest = max(ledgers, default=-1)
    going = {place_of(url) for url in chain.object_deletions or ()}
    lacking: list[ManifestLedger] = []
    for row in kept:
        found = ledgers.get(row.ledger_id)
        if row.object is None or place_of(url_from(url, row.object.name)) in going:
            is_lacking = False
        elif found is None:
            is_lacking = row.ledger_id > newest and chain.terminated_at is None
        else:
            is_lacking = chain.offload_of(row.ledger_id) is None and found.entries in (None, row.entries)
        if is_lacking:
            lacking.append(row)
    return lacking


def with_copies(chain: Chain, manifest: Manifest, url: str, rows: Sequence[ManifestLedger]) -> Chain:
    """Return the chain with these ledgers as offloaded. A last ledger without an end gets the one in the manifest."""
    ends = {ledger.ledger_id: ledger for ledger in (*manifest.ledgers, *rows) if ledger.ended_at_ms}
    ledgers = {ledger.ledger_id: ledger for ledger in chain.ledgers}
    offloaded = dict(chain.offloaded or {})
    for ledger in chain.ledgers:
        if ledger.is_open and (end := ends.get(ledger.ledger_id)) is not None:
            ledgers[ledger.ledger_id] = _chain_ledger(end)
    for row in rows:
        is_new = row.ledger_id not in ledgers
        if is_new and any(ledger.is_open for ledger in ledgers.values()):
            continue  # no ledger may follow one whose end is unknown
        ledgers.setdefault(row.ledger_id, _chain_ledger(row))
        # The chain's statements about bookies stay true: a read that fails there continues at the object.
        offloaded[row.ledger_id] = _copy_of(row, url).replace(on_bookies=not is_new)
    return chain.replace(ledgers=tuple(ledgers[ledger_id] for ledger_id in sorted(ledgers)), offloaded=offloaded or None)


def _chain_ledger(row: ManifestLedger) -> ChainLedger:
    return ChainLedger(ledger_id=row.ledger_id, entries=row.entries, size_bytes=row.size_bytes, closed_at_ms=row.ended_at_ms)


def _copy_of(row: ManifestLedger, url: str) -> OffloadedLedger:
    assert row.object is not None
    return OffloadedLedger(
        url=url_from(url, row.object.name),
        started_at_ms=row.object.completed_at_ms,
        complete=True,
        completed_at_ms=row.object.completed_at_ms,
        object_bytes=row.object.size_bytes,
        on_bookies=False,
    )


async def _claim(bucket: Bucket, plan: _Plan, identity: ClusterIdentity) -> str:
    """Write the manifest again for this cluster (rule 7). Return a remark, or ""."""
    if plan.manifest.cluster_id == identity.cluster_id and not plan.taken_in:
        return ""
    # Ledgers that were never offloaded stay in it, so that a repeated restore reports the same.
    kept = {ledger.ledger_id for ledger in plan.kept}
    ledgers = [ledger for ledger in plan.manifest.ledgers if ledger.object is None or ledger.ledger_id in kept]
    claimed = replace(plan.manifest, cluster_id=identity.cluster_id, cluster=identity.name, ledgers=ledgers)
    try:
        await bucket.put(plan.url, claimed.encode())
    except SegmentError as error:
        return f"its manifest still names cluster {plan.manifest.cluster_id}, so it is not kept up to date: {error}; restore again"
    return ""


def _told(
    url: str,
    manifest: Manifest,
    now_ms: int,
    outcome: Outcome,
    reason: str = "",
    *,
    plan: _Plan | None = None,
    missing: tuple[str, ...] = (),
) -> RestoredTopic:
    kept = plan.kept if plan is not None else ()
    return RestoredTopic(
        topic=manifest.topic,
        manifest=url,
        outcome=outcome,
        reason=reason,
        ledgers=len(kept),
        entries=sum(ledger.entries for ledger in kept),
        size_bytes=sum(ledger.size_bytes for ledger in kept),
        cursors=len(manifest.cursors),
        cursors_without_state=tuple(cursor.name for cursor in manifest.cursors if cursor.state is None),
        cursors_age_ms=max(0, now_ms - manifest.cursors_at_ms),
        lost=tuple(manifest.not_offloaded),
        missing=plan.missing if plan is not None else missing,
        taken_in=plan.taken_in if plan is not None else (),
        not_taken=plan.not_taken if plan is not None else (),
    )


def _sorted(report: list[RestoredTopic]) -> list[RestoredTopic]:
    return sorted(report, key=lambda one: (one.topic, one.manifest))
