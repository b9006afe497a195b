"""Keeps the manifest of each open topic with offloaded ledgers (cepheid_tiered/manifest.py): what a restore from the bucket needs.

    tick ──► each open topic: offloaded since the last manifest? at once   cursors, policies, ledgers changed? each interval
         └──► one task, one topic after the other: gather ──► encode in pieces ──► put

Rules
1. The manifest is beside the newest complete object of the topic, wherever its policy points by now. It exists from the first
   upload that has begun, so that the remains of one that crashed can be told from those of another cluster.
2. A manifest that names another cluster is never overwritten: the topic was restored there, and its objects are theirs.
3. Nothing waits for a manifest. A put that fails is repeated after the interval, and the first failure of a topic is logged.
4. The manifest of a topic that is deleted is deleted with it; if that fails, a sweep finds it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cepheid_broker.schemas import HistoryStore
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.topic import Topic
from cepheid_managed_ledger import ManagedLedger
from cepheid_metadata import (
    Chain,
    ClusterIdentity,
    MetadataStore,
    Record,
    namespace_records,
    require_cluster,
    tenant_records,
    topic_records,
)
from cepheid_ports import CepheidError, Ports, TaskOwner
from cepheid_tiered.bucket import Bucket
from cepheid_tiered.manifest import (
    MAX_MANIFEST_BYTES,
    DamagedManifestError,
    Manifest,
    ManifestCursor,
    ManifestLedger,
    ManifestObject,
    manifest_url,
    name_from,
)
from cepheid_tiered.segment import NoSuchSegmentError
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

MAX_STATE_BYTES = 64 * 1024
"""Of one cursor. A larger one is kept without it: what was acknowledged above its mark-delete position is delivered again."""
MAX_STATES_BYTES = 16 * 1024 * 1024
"""Of all cursors of a topic."""
_MAX_URLS = 100_000
_TIMEOUT_S = 60.0
_LEDGERS_IN_ONE_GO = 1_000


class ManifestOfAnotherClusterError(CepheidError):
    """The objects of a topic belong to another cluster now."""

    hint = "the topic was restored there from this bucket: delete it here, or set another offload URL"


class _Written:
    """What the last manifest of an open topic was made of."""

    __slots__ = ("chain", "complete", "cursors", "failed", "foreign", "last_confirmed", "next_at", "policies", "topic")

    def __init__(self, topic: PersistentTopic) -> None:
        self.topic = topic
        self.chain: Chain | None = None
        self.complete: frozenset[tuple[int, bool]] | None = None
        self.cursors: object = None
        self.policies: object = None
        self.last_confirmed: object = None
        self.next_at = 0.0
        """Loop time before which only what was offloaded is a reason to write."""
        self.failed = False
        self.foreign = False


class TopicManifests:
    def __init__(
        self,
        loaded: Callable[[], Iterable[Topic]],
        store: MetadataStore,
        bucket: Bucket,
        tasks: TaskOwner,
        ports: Ports,
        interval_s: float,
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._bucket = bucket
        self._tasks = tasks
        self._ports = ports
        self._interval_s = interval_s
        self._histories = HistoryStore(store)
        self._topics: dict[TopicName, _Written] = {}
        self._urls: dict[TopicName, str] = {}
        self._writing: asyncio.Task[None] | None = None
        self._identity: ClusterIdentity | None = None
        self.written = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<TopicManifests {self.written} written, {self.failures} failed>"

    def on_tick(self) -> None:
        """Rule 3: at most one task, whatever the bucket does."""
        if self._writing is None or self._writing.done():
            due = self._due(asyncio.get_running_loop().time())
            if due:
                self._writing = self._tasks.start(self._write_all(due), name="topic-manifests")

    def is_late(self, topic: PersistentTopic) -> bool:
        """Whether what was offloaded of this open topic is not in its manifest yet. False where writing it has just failed."""
        chain = topic.ledger.chain
        if not chain.offloaded:
            return False
        written = self._topics.get(topic.name)
        if written is None or written.topic is not topic:
            return True
        return not written.failed and not written.foreign and _complete(chain) != written.complete

    async def on_topic_deleting(self, name: TopicName) -> None:
        """Rule 4."""
        self._topics.pop(name, None)
        url = self._urls.pop(name, None)
        if url is None:
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._bucket.delete(url)
        except (CepheidError, TimeoutError) as error:
            log.warning("manifest.not_deleted", extra={"topic": str(name), "url": url, "error": str(error)})

    def _due(self, now: float) -> list[_Written]:
        topics: dict[TopicName, _Written] = {}
        due: list[_Written] = []
        for topic in self._loaded():
            if not isinstance(topic, PersistentTopic) or topic.closed or not topic.ledger.chain.offloaded:
                continue
            written = self._topics.get(topic.name)
            if written is None or written.topic is not topic:
                written = _Written(topic)
            topics[topic.name] = written
            if self._is_due(written, now):
                due.append(written)
        self._topics = topics
        return due

    def _is_due(self, written: _Written, now: float) -> bool:
        ledger = written.topic.ledger
        if written.failed or written.foreign:
            return now >= written.next_at
        if ledger.chain is not written.chain and _complete(ledger.chain) != written.complete:
            return True
        if now < written.next_at:
            return False
        return (
            ledger.chain is not written.chain
            or ledger.last_confirmed != written.last_confirmed
            or written.topic.policies is not written.policies
            or _revisions(ledger) != written.cursors
        )

    async def _write_all(self, due: list[_Written]) -> None:
        for written in due:
            if written.topic.closed:
                continue
            written.next_at = asyncio.get_running_loop().time() + self._interval_s
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._write(written)
            except (CepheidError, TimeoutError) as error:
                self.failures += 1
                if not written.failed:
                    log.warning("manifest.not_written", extra={"topic": str(written.topic.name), "error": str(error)})
                written.failed = True
                written.foreign = isinstance(error, ManifestOfAnotherClusterError)
            else:
                written.failed = written.foreign = False

    async def _write(self, written: _Written) -> None:
        topic, ledger = written.topic, written.topic.ledger
        chain = ledger.chain
        if not chain.offloaded:
            return
        _, newest = max((found.complete, ledger_id) for ledger_id, found in chain.offloaded.items())
        url = manifest_url(chain.offloaded[newest].url)
        if self._identity is None:
            self._identity = await require_cluster(self._store)
        if written.chain is None or written.foreign:
            await self._check_ours(url, topic.name, self._identity)
        marks = _complete(chain), _revisions(ledger), topic.policies, ledger.last_confirmed
        manifest = await self._gather(topic.name, ledger, chain, url, self._identity)
        pieces: list[bytes] = []
        for piece in manifest.encode_pieces():
            pieces.append(piece)
            await asyncio.sleep(0)
        if topic.closed:
            return  # its next owner writes it
        await self._bucket.put(url, b"".join(pieces))
        written.chain = chain
        written.complete, written.cursors, written.policies, written.last_confirmed = marks
        if len(self._urls) >= _MAX_URLS and topic.name not in self._urls:
            del self._urls[next(iter(self._urls))]
        self._urls[topic.name] = url
        self.written += 1

    async def _check_ours(self, url: str, name: TopicName, identity: ClusterIdentity) -> None:
        """Rule 2. A damaged manifest is replaced, one of a newer release is not: NewerManifestError."""
        try:
            found = Manifest.decode(await self._bucket.get(url, max_bytes=MAX_MANIFEST_BYTES), url)
        except (NoSuchSegmentError, DamagedManifestError):
            return
        if found.cluster_id != identity.cluster_id:
            message = f"{url} is the manifest of cluster {found.cluster!r} ({found.cluster_id}): the objects of {name} belong to it"
            raise ManifestOfAnotherClusterError(message, url=url, topic=str(name))

    async def _gather(self, name: TopicName, ledger: ManagedLedger, chain: Chain, url: str, identity: ClusterIdentity) -> Manifest:
        ledgers = await _ledger_rows(ledger, chain, url)
        cursors_at_ms = self._ports.wall_ms()
        cursors = await _cursor_rows(ledger)
        history, definitions = await self._schemas(name)
        namespace = name.namespace
        tenant, policies, own, base = await asyncio.gather(
            tenant_records(self._store).get(namespace.tenant),
            namespace_records(self._store).get((namespace.tenant, namespace.local_name)),
            topic_records(self._store).get(name),
            topic_records(self._store).get(name.base),
        )
        return Manifest(
            cluster_id=identity.cluster_id,
            cluster=identity.name,
            topic=str(name),
            incarnation=chain.incarnation,
            epoch=chain.epoch,
            written_at_ms=self._ports.wall_ms(),
            tenant_record=_plain(None if tenant is None else tenant.record),
            namespace_record=_plain(None if policies is None else policies.record),
            topic_record=_plain(None if own is None else own.record),
            base_record=_plain(None if base is None or not name.is_partition else base.record),
            schema_history=history,
            schema_definitions=definitions,
            ledgers=ledgers,
            cursors=cursors,
            cursors_at_ms=cursors_at_ms,
            terminated_at=None if chain.terminated_at is None else (chain.terminated_at.ledger_id, chain.terminated_at.entry_id),
            properties=chain.properties,
        )

    async def _schemas(self, name: TopicName) -> tuple[Mapping[str, Any] | None, dict[str, Mapping[str, Any]]]:
        found = await self._histories.get(name)
        if found is None:
            return None, {}
        definitions: dict[str, Mapping[str, Any]] = {}
        rows = []
        for row in found.record.versions:
            definition = await self._histories.definition(name, row)
            if definition is not None:  # None: it was deleted since the history was read
                rows.append(row)
                definitions[str(row.version)] = _plain(definition) or {}
        return _plain(found.record.replace(versions=tuple(rows))), definitions


def _complete(chain: Chain) -> frozenset[tuple[int, bool]]:
    """What an urgent change changes: which ledgers the bucket has, and for which of them an upload has begun."""
    return frozenset((ledger_id, found.complete) for ledger_id, found in (chain.offloaded or {}).items())


def _revisions(ledger: ManagedLedger) -> tuple[tuple[str, int], ...]:
    return tuple((name, cursor.revision) for name, cursor in ledger.cursors.items())


async def _ledger_rows(ledger: ManagedLedger, chain: Chain, url: str) -> list[ManifestLedger]:
    rows: list[ManifestLedger] = []
    messages = chain.messages or {}
    for number, found in enumerate(chain.ledgers, 1):
        ledger_id, entries, size_bytes = found.ledger_id, found.entries, found.size_bytes
        if entries is None:  # still open: as much as is confirmed by now
            entries, size_bytes = ledger.ledgers.entries_of(ledger_id) or 0, 0
            if ledger_id in ledger.ledgers:
                size_bytes = ledger.ledgers.size_of(ledger_id)
        stored = None
        if (copy := chain.offload_of(ledger_id)) is not None:
            stored = ManifestObject(name_from(url, copy.url), copy.object_bytes, copy.completed_at_ms)
        rows.append(ManifestLedger(ledger_id, entries, size_bytes, messages.get(ledger_id), found.closed_at_ms, stored))
        if number % _LEDGERS_IN_ONE_GO == 0:
            await asyncio.sleep(0)
    return rows


async def _cursor_rows(ledger: ManagedLedger) -> list[ManifestCursor]:
    rows: list[ManifestCursor] = []
    room_bytes = MAX_STATES_BYTES
    for name, cursor in list(ledger.cursors.items()):
        _, mark_delete, state = await cursor.encoded()
        kept = state if len(state) <= min(MAX_STATE_BYTES, room_bytes) else None
        room_bytes -= len(kept or b"")
        rows.append(ManifestCursor(name, (mark_delete.ledger_id, mark_delete.entry_id), kept, dict(cursor.properties)))
        await asyncio.sleep(0)
    return rows


def _plain(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    fields: dict[str, Any] = json.loads(record.encode())
    return fields
