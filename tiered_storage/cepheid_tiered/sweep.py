"""Delete objects that no topic needs: those that crashed uploads and deleted topics left in a bucket.

    list the bucket ──► read all chains ──► plan_sweep (core) ──► read the chain of each directory again ──► delete

An object is an orphan only when all of this holds:
1. No chain record names it: as an offloaded ledger, as an upload that has begun, or in the queue of objects to delete.
2. It is older than the grace period, by the clock of the store that lists it.
3. It belongs to this cluster: the manifest of its directory says so. Without a readable manifest its owner is unknown, and it is
   kept.
4. Metadata could be read. A chain that cannot be read keeps its whole directory; a failed listing ends the sweep. While a restore
   of metadata from a backup is not confirmed, nothing is deleted: chains may name less than they did.

The bucket is listed before the chains are read. An upload is recorded in its chain before it begins, and a URL is never used twice.
So an object that was listed and is not named afterwards will not be named later, except by a restore from this bucket. The last
check of each directory is for that; still, do not sweep while a restore runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar
from urllib.parse import quote, unquote, urlsplit

from cepheid_metadata import (
    Chain,
    CorruptRecordError,
    MetadataStore,
    NewerFormatError,
    keys,
    list_chains,
    read_chain,
    require_cluster,
)
from cepheid_metadata.listing import list_names
from cepheid_metadata.repositories import restored_record
from cepheid_ports import CepheidError
from cepheid_tiered.bucket import Bucket
from cepheid_tiered.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, ManifestError, manifest_url
from cepheid_tiered.object_store import StoredObject
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError, SegmentError
from cepheid_tiered.unnamed_objects import ledger_id_of
from cepheid_wire import NamespaceName, TopicName

DEFAULT_GRACE_S = 7 * 24 * 3600


class SweepRefusedError(CepheidError):
    """Metadata does not say reliably which objects are needed. Nothing was deleted."""

    hint: ClassVar[str] = "run `cepheid metadata confirm` first; what the restored metadata does not name may be the only copy"


class Why(Enum):
    """A sweep's decision about an object."""

    ORPHAN = "orphan"
    NAMED = "named by a chain"
    YOUNG = "younger than the grace period"
    OTHER_CLUSTER = "belongs to another cluster"
    UNKNOWN_CLUSTER = "without a readable manifest or footer: its cluster is not known"
    UNKNOWN_CHAIN = "its topic's chain cannot be read"
    NOT_OURS = "not an object of tiered storage"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known about one directory, which belongs to one topic."""

    cluster_id: str | None
    """Cluster in its manifest; None without a readable manifest."""


@dataclass(frozen=True, slots=True)
class Named:
    """The objects and topics that metadata names."""

    places: frozenset[str]
    """Places of all objects in chain records, without the options of their URLs."""
    topics: frozenset[str] = frozenset()
    """Ends of the directories of all topics with a chain: `tenant/namespace/topic`."""
    unreadable: frozenset[str] = frozenset()
    """Ends of the directories of topics whose chain cannot be read."""
    names: frozenset[str] = field(init=False)
    """Of the objects, without their directories: a place may have several URLs (a link, another host name of a store), and the name
    of a segment has 64 random bits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(place.rpartition("/")[2] for place in self.places))


@dataclass(frozen=True, slots=True)
class SweepPlan:
    decisions: tuple[tuple[StoredObject, Why], ...]

    @property
    def orphans(self) -> list[StoredObject]:
        return [found for found, why in self.decisions if why is Why.ORPHAN]

    def count(self, why: Why) -> int:
        return sum(one is why for _, one in self.decisions)


def plan_sweep(
    objects: Iterable[StoredObject],
    named: Named,
    sightings: Mapping[str, Sighting],
    cluster_id: str,
    now_ms: int,
    grace_ms: int,
) -> SweepPlan:
    """Decide about each object. `sightings` are by directory; `named` was read after the objects were listed."""
    return SweepPlan(tuple((found, _decide(found, named, sightings, cluster_id, now_ms - grace_ms)) for found in objects))


def _decide(found: StoredObject, named: Named, sightings: Mapping[str, Sighting], cluster_id: str, before_ms: int) -> Why:
    place = place_of(found.url)
    directory, _, name = place.rpartition("/")
    if place in named.places or (_is_segment(name) and name in named.names):
        return Why.NAMED
    if not _is_segment(name) and name != MANIFEST_NAME:
        return Why.NOT_OURS
    topic = topic_path_of(directory)
    if topic in named.unreadable:
        return Why.UNKNOWN_CHAIN
    sighting = sightings.get(directory)
    if sighting is None or sighting.cluster_id is None:
        return Why.UNKNOWN_CLUSTER
    if sighting.cluster_id != cluster_id:
        return Why.OTHER_CLUSTER
    if name == MANIFEST_NAME and topic in named.topics:
        return Why.NAMED  # the topic exists, and its owner writes the manifest
    return Why.YOUNG if found.modified_ms > before_ms else Why.ORPHAN


def place_of(url: str) -> str:
    """Return the place of an object without its URL's options: URLs that differ only in these count as one object."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def topic_path_of(directory: str) -> str:
    """Return the end of a directory's URL that names the topic, in one spelling."""
    return "/".join(quote(unquote(part), safe="") for part in directory.split("/")[-3:])


def topic_path(topic: TopicName) -> str:
    return "/".join(quote(part, safe="") for part in (topic.tenant, topic.namespace.local_name, topic.local_name))


def _is_segment(name: str) -> bool:
    return ledger_id_of(name) is not None


def names_of(chain: Chain) -> set[str]:
    """Return the places of all objects that a chain names."""
    urls = [found.url for found in (chain.offloaded or {}).values()]
    return {place_of(url) for url in (*urls, *(chain.object_deletions or ()))}


async def sweep(
    store: MetadataStore,
    bucket: Bucket,
    url: str,
    now_ms: int,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    dry_run: bool = False,
    on_deleted: Callable[[StoredObject], None] = lambda _: None,
    writer_of: Callable[[str], Awaitable[str]] | None = None,
) -> SweepPlan:
    """Delete the orphans below `url`. Raises SweepRefusedError, SegmentError, and what the store raises; call it again then.

    `writer_of` reads from a segment which cluster wrote it. Two clusters may share a directory by mistake, and its manifest names
    one of them: what the other one wrote stays.
    """
    identity = await require_cluster(store)
    await _require_confirmed(store)
    objects = [found async for found in bucket.list(url)]
    sightings = await _sightings(bucket, objects)
    named = await read_named(store)
    plan = plan_sweep(objects, named, sightings, identity.cluster_id, now_ms, round(grace_s * 1_000))
    if writer_of is not None:
        plan = await _without_those_of_others(plan, writer_of, identity.cluster_id)
    if dry_run:
        return plan
    by_directory: dict[str, list[StoredObject]] = {}
    for found in plan.orphans:
        by_directory.setdefault(place_of(found.url).rpartition("/")[0], []).append(found)
    for orphans in by_directory.values():
        await _require_confirmed(store)
        if not await _is_still_orphaned(store, bucket, orphans, identity.cluster_id):
            continue
        # The manifest is deleted last, so that what an interrupted sweep leaves is still known to be of this cluster.
        for found in sorted(orphans, key=lambda one: one.url.partition("?")[0].endswith(f"/{MANIFEST_NAME}")):
            await bucket.delete(found.url)
            on_deleted(found)
    return plan


async def _without_those_of_others(plan: SweepPlan, writer_of: Callable[[str], Awaitable[str]], cluster_id: str) -> SweepPlan:
    """Return the plan without orphans that another, or an unknown, cluster wrote: these are kept."""
    decisions: list[tuple[StoredObject, Why]] = []
    for found, why in plan.decisions:
        if why is Why.ORPHAN and _is_segment(place_of(found.url).rpartition("/")[2]):
            try:
                writer = await writer_of(found.url)
            except NoSuchSegmentError:
                pass  # it is deleted already
            except DamagedSegmentError:
                why = Why.UNKNOWN_CLUSTER
            else:
                why = why if writer == cluster_id else Why.OTHER_CLUSTER
        decisions.append((found, why))
    return SweepPlan(tuple(decisions))


async def _require_confirmed(store: MetadataStore) -> None:
    await store.sync(keys.RESTORED_KEY)
    if await restored_record(store).exists(None):
        raise SweepRefusedError("metadata was restored from a backup, and that is not confirmed yet: nothing is deleted")


async def _sightings(bucket: Bucket, objects: Sequence[StoredObject]) -> dict[str, Sighting]:
    """Return what the listed manifests say, by directory."""
    sightings: dict[str, Sighting] = {}
    for found in objects:
        directory, _, name = place_of(found.url).rpartition("/")
        if name == MANIFEST_NAME:
            sightings[directory] = await _sighting(bucket, found.url)
    return sightings


async def _sighting(bucket: Bucket, manifest_url: str) -> Sighting:
    try:
        manifest = Manifest.decode(await bucket.get(manifest_url, max_bytes=MAX_MANIFEST_BYTES), manifest_url)
    except (ManifestError, SegmentError):
        return Sighting(None)
    return Sighting(manifest.cluster_id)


async def read_named(store: MetadataStore) -> Named:
    """Return the objects that all chains name. Raises what the store raises."""
    await store.sync(keys.CHAINS_KEY)
    places: set[str] = set()
    topics: set[str] = set()
    unreadable: set[str] = set()
    for topic in await list_all_chains(store):
        try:
            found = await read_chain(store, topic)
        except (CorruptRecordError, NewerFormatError):
            unreadable.add(topic_path(topic))
            continue
        if found is not None:
            places |= names_of(found.record)
            topics.add(topic_path(topic))
    return Named(frozenset(places), frozenset(topics), frozenset(unreadable))


async def list_all_chains(store: MetadataStore) -> list[TopicName]:
    """Return every topic with a chain, even if its tenant or namespace no longer has a record."""
    topics: list[TopicName] = []
    for tenant in await list_names(store, keys.CHAINS_KEY):
        for namespace in await list_names(store, f"{keys.CHAINS_KEY}/{keys.encode_name(tenant)}"):
            topics += await list_chains(store, tenant, namespace, "persistent")
    return topics


async def _is_still_orphaned(store: MetadataStore, bucket: Bucket, orphans: Sequence[StoredObject], cluster_id: str) -> bool:
    """Check one directory again right before the deletion: the topic may have been restored from it meanwhile."""
    directory = place_of(orphans[0].url).rpartition("/")[0]
    tenant, namespace, local_name = (unquote(part) for part in directory.split("/")[-3:])
    topic = TopicName("persistent", NamespaceName(tenant, namespace), local_name)
    await store.sync(keys.chain_key(topic))
    try:
        found = await read_chain(store, topic)
    except (CorruptRecordError, NewerFormatError):
        return False
    if found is not None:
        named = Named(frozenset(names_of(found.record)))
        if any(place_of(one.url).rpartition("/")[2] in named.names for one in orphans):
            return False
    return (await _sighting(bucket, manifest_url(orphans[0].url))).cluster_id == cluster_id
