"""`cepheid tiered verify`, `sweep` and `restore`: commands on the objects of a bucket (docs/tiered-storage.md)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, done, print_json, print_lines
from cepheid_cli.admin.units import counted, shown_bytes, shown_time
from cepheid_cli.metadata import STORE_HELP
from cepheid_ports import CepheidError
from cepheid_wire import NamespaceName, TopicName

if TYPE_CHECKING:
    from cepheid_cli.ledger_verifying import Verdict
    from cepheid_metadata import MetadataStore
    from cepheid_tiered.bucket import Bucket
    from cepheid_tiered.restore import RestoredTopic
    from cepheid_tiered.segments import Segments
    from cepheid_tiered.sweep import SweepPlan
    from cepheid_tiered.verify_objects import ExpectedSegment, VerifiedSegment

_PROGRESS_S = 5.0
_SHOWN = 20

Url = Annotated[str, typer.Argument(help="Bucket and prefix of the offload policy, or a directory below it: s3://bucket/prefix.")]
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Metadata store, whose chains are authoritative: {STORE_HELP}."),
]


class NoObjectsError(CepheidError):
    """There are no objects to verify."""

    hint = "see `cepheid tiered status`; name the bucket with --url if no cluster is left"


def register(app: typer.Typer) -> None:
    app.command()(verify)
    app.command()(sweep)
    app.command()(restore)


def verify(
    name: Annotated[str | None, typer.Argument(help="Topic or namespace (public/default). Default: all.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Bucket and prefix: verify what its manifests list.")] = None,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """Read objects back, and compare them with their checksums and records.

    Exit code 0: all are valid. 1: objects are missing, damaged, or differ from their record. 3: some could not be read.
    """

    async def main() -> list[VerifiedSegment]:
        from cepheid_tiered.verify_objects import Condition, verify_segment

        async with _opened_objects() as (bucket, segments):
            expected, unreadable = await _expected(bucket, name, url, admin_url, metadata)
            for text in unreadable:
                print(f"could not be read: {text}")
            if not expected and not unreadable:
                raise NoObjectsError(f"nothing of {name or 'any topic'} is offloaded")
            verified: list[VerifiedSegment] = []
            progress = _Progress(len(expected), sum(one.object_bytes for one in expected))
            for one in expected:
                found = await verify_segment(segments, one)
                if found.condition is Condition.BAD and await _is_forgotten(bucket, one, metadata):
                    continue  # retention removed it after it was listed
                verified.append(found)
                progress.note(one.object_bytes)
                if found.condition is not Condition.VALID and not as_json:
                    print_lines(_problem_lines(found))
            unread.extend(unreadable)
            return verified

    unread: list[str] = []
    verified = asyncio.run(main())
    if as_json:
        print_json([{**asdict(one.expected), "condition": one.condition.value, "reason": one.reason} for one in verified])
    else:
        print_lines([_verified_words(verified)])
    verdict = _verdict(verified, unread)
    if verdict:
        raise typer.Exit(int(verdict))


def sweep(
    url: Url,
    metadata: Annotated[str, typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Metadata of the cluster: {STORE_HELP}.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    grace_hours: Annotated[float, typer.Option("--grace-hours", min=0, help="Keep younger objects.")] = 168.0,
    as_json: Json = False,
) -> None:
    """Delete what crashed uploads and deleted topics left in a bucket. Objects named by a chain are never deleted."""
    from cepheid_tiered.sweep import sweep as sweep_bucket

    async def main() -> SweepPlan:
        async with _opened_objects() as (bucket, segments), _opened_store(metadata) as store:

            async def writer_of(segment: str) -> str:
                ledger_id = int(segment.partition("?")[0].rpartition("/")[2].partition("-")[0])
                return (await segments.footer(segment, ledger_id)).metadata.cluster

            return await sweep_bucket(
                store, bucket, url, _now_ms(), grace_s=grace_hours * 3600, dry_run=dry_run, writer_of=writer_of
            )

    plan = asyncio.run(main())
    if as_json:
        print_json([{**asdict(found), "decision": why.value} for found, why in plan.decisions])
        return
    for found in plan.orphans:
        print(f"{found.url}  {shown_bytes(found.size_bytes)}  {shown_time(found.modified_ms)}")
    size_bytes = sum(found.size_bytes for found in plan.orphans)
    done(f"{counted(len(plan.orphans), 'object')}, {shown_bytes(size_bytes)}: {'would be deleted' if dry_run else 'deleted'}")
    for why, count in sorted(Counter(why for _, why in plan.decisions).items(), key=lambda one: one[0].name):
        if why.name != "ORPHAN":
            done(f"kept: {counted(count, 'object')} ({why.value})")


def restore(
    url: Url,
    into: Annotated[str, typer.Option("--into", envvar="CEPHEID_METADATA", help=f"Metadata of the cluster: {STORE_HELP}.")],
    topic: Annotated[str | None, typer.Option("--topic", help="Only this topic, with its partitions.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be restored, and what would not.")] = False,
    accept_missing: Annotated[
        bool, typer.Option("--accept-missing", help="Restore topics without the ledgers whose objects are missing or truncated.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore topics from a bucket alone, into a cluster whose brokers are stopped (create one with `cepheid init`).

    Repeat a restore that was interrupted. The objects then belong to the new cluster: never start the old one again.
    """
    from cepheid_tiered.restore import restore_topics

    async def main() -> list[RestoredTopic]:
        only = None if topic is None else str(TopicName.parse(topic))
        async with _opened_objects() as (bucket, segments), _opened_store(into) as store:
            return await restore_topics(
                store, bucket, url, _now_ms(), only=only, accept_missing=accept_missing, dry_run=dry_run, footer_of=segments.footer
            )

    report = asyncio.run(main())
    if as_json:
        print_json([{**asdict(one), "outcome": one.outcome.value} for one in report])
    else:
        for one in report:
            print_lines(restored_lines(one))
        done(_restored_words(report))
    if any(one.is_bad for one in report):
        raise typer.Exit(1)


def restored_lines(one: RestoredTopic) -> list[str]:
    """Return lines on one topic: what was restored, what was never offloaded, and how old its cursors are."""
    lines = [f"{one.topic or one.manifest}: {one.outcome.value}" + (f": {one.reason}" if one.reason else "")]
    if one.is_bad:
        return lines
    cursors = f"{counted(one.cursors, 'cursor')}, {one.cursors_age_ms / 1000:,.0f} s old"
    lines.append(
        f"  {counted(one.ledgers, 'ledger')}, {counted(one.entries, 'entry', 'entries')}, {shown_bytes(one.size_bytes)}; {cursors}"
    )
    if one.lost:
        entries, size_bytes = sum(ledger.entries for ledger in one.lost), sum(ledger.size_bytes for ledger in one.lost)
        ids = ", ".join(str(ledger.ledger_id) for ledger in one.lost[:_SHOWN]) + (" …" if len(one.lost) > _SHOWN else "")
        ledgers = f"{counted(len(one.lost), 'ledger')} ({ids})"
        lines.append(f"  never offloaded, lost: {ledgers}, {counted(entries, 'entry', 'entries')}, {shown_bytes(size_bytes)}")
    if one.taken_in:
        ids = ", ".join(map(str, one.taken_in[:_SHOWN])) + (" …" if len(one.taken_in) > _SHOWN else "")
        whose = "in its chain" if one.outcome.name == "THERE" else "in the manifest"
        lines.append(f"  found in the bucket, not {whose}, and restored: {counted(len(one.taken_in), 'ledger')} ({ids})")
    lines += [f"  found in the bucket, and not restored: {text}" for text in one.not_taken[:_SHOWN]]
    if one.missing:
        lines.append(f"  missing in the bucket: {', '.join(one.missing[:_SHOWN])}")
    if one.cursors_without_state:
        names = ", ".join(one.cursors_without_state[:_SHOWN])
        lines.append(f"  acknowledged above the mark-delete position, delivered again: {names}")
    return lines


def _restored_words(report: list[RestoredTopic]) -> str:
    counts = Counter(one.outcome.value for one in report)
    return "; ".join(f"{counted(count, 'topic')} {outcome}" for outcome, count in counts.items())


def _problem_lines(found: VerifiedSegment) -> Iterable[str]:
    expected = found.expected
    yield f"{expected.topic}, ledger {expected.ledger_id}: {found.condition.value}: {found.reason}"
    if expected.on_bookies:
        yield "  bookies still have this ledger, and readers use them"


def _verified_words(verified: list[VerifiedSegment]) -> str:
    counts = Counter(one.condition.value for one in verified)
    size_bytes = sum(one.expected.object_bytes for one in verified)
    words = ", ".join(f"{counts[name]} {name}" for name in ("valid", "bad", "not known"))
    return f"{counted(len(verified), 'object')}, {shown_bytes(size_bytes)}: {words}"


def _verdict(verified: list[VerifiedSegment], unread: list[str]) -> Verdict:
    from cepheid_cli.ledger_verifying import Verdict

    conditions = {one.condition.name for one in verified}
    if "BAD" in conditions:
        return Verdict.BAD
    return Verdict.NOT_KNOWN if "NOT_KNOWN" in conditions or unread else Verdict.SOUND


async def _expected(
    bucket: Bucket, name: str | None, url: str | None, admin_url: str, metadata: str | None
) -> tuple[list[ExpectedSegment], list[str]]:
    """Return the expected objects, and what could not be read to find them."""
    if url is None and metadata is not None:
        return await _expected_of_chains(name, metadata)
    expected: list[ExpectedSegment] = []
    unreadable: list[str] = []
    for one in [url] if url is not None else _policy_urls(name, admin_url):
        found, failed = await _expected_of_manifests(bucket, one, name)
        expected += found
        unreadable += failed
    return list({one.url: one for one in expected}.values()), unreadable


async def _expected_of_chains(name: str | None, metadata: str) -> tuple[list[ExpectedSegment], list[str]]:
    from cepheid_metadata import CorruptRecordError, NewerFormatError, read_chain, require_cluster
    from cepheid_tiered.sweep import list_all_chains
    from cepheid_tiered.verify_objects import expected_of_chain

    expected: list[ExpectedSegment] = []
    unreadable: list[str] = []
    async with _opened_store(metadata) as store:
        await require_cluster(store)
        for topic in await list_all_chains(store):
            if not _is_wanted(topic, name):
                continue
            try:
                found = await read_chain(store, topic)
            except (CorruptRecordError, NewerFormatError) as error:
                unreadable.append(str(error))
                continue
            if found is not None:
                expected += expected_of_chain(str(topic), found.record)
    return expected, unreadable


async def _expected_of_manifests(bucket: Bucket, url: str, name: str | None) -> tuple[list[ExpectedSegment], list[str]]:
    from cepheid_tiered.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, ManifestError
    from cepheid_tiered.segment import SegmentError
    from cepheid_tiered.sweep import place_of
    from cepheid_tiered.verify_objects import expected_of_manifest

    expected: list[ExpectedSegment] = []
    unreadable: list[str] = []
    manifests = [found.url async for found in bucket.list(url) if place_of(found.url).endswith(f"/{MANIFEST_NAME}")]
    for manifest_url in sorted(manifests):
        try:
            manifest = Manifest.decode(await bucket.get(manifest_url, max_bytes=MAX_MANIFEST_BYTES), manifest_url)
            if _is_wanted(TopicName.parse(manifest.topic), name):
                expected += expected_of_manifest(manifest, manifest_url)
        except (ManifestError, SegmentError) as error:
            unreadable.append(str(error))
    return expected, unreadable


def _policy_urls(name: str | None, admin_url: str) -> list[str]:
    """Return the destinations of offloads, according to brokers."""
    from cepheid_cli.client_security import connect_admin
    from cepheid_cli.tiered import rows_of

    admin = connect_admin(admin_url)
    names = [name] if name is not None else [f"{found}" for tenant in admin.tenants.list() for found in _namespaces(admin, tenant)]
    urls = dict.fromkeys(row["url"] for one in names for row in rows_of(admin, one) if row["url"])
    return list(urls)


def _namespaces(admin: Any, tenant: str) -> list[str]:
    found: list[str] = admin.namespaces.list(tenant)
    return found


def _is_wanted(topic: TopicName, name: str | None) -> bool:
    if name is None:
        return True
    if name.count("/") == 1:
        return topic.namespace == NamespaceName.parse(name)
    wanted = TopicName.parse(name)
    return wanted in (topic, topic.base)


async def _is_forgotten(bucket: Bucket, expected: ExpectedSegment, metadata: str | None) -> bool:
    """Whether nothing refers to the object any more."""
    from cepheid_tiered.manifest import manifest_url

    if metadata is not None:
        found, _ = await _expected_of_chains(expected.topic, metadata)
        return expected.url not in {one.url for one in found}
    found, failed = await _expected_of_manifests(bucket, manifest_url(expected.url).partition("?")[0].rpartition("/")[0], None)
    return not failed and bool(found) and expected.url not in {one.url for one in found}


class _Progress:
    """Progress lines on standard error every few seconds."""

    def __init__(self, objects: int, size_bytes: int) -> None:
        self._objects, self._bytes = objects, size_bytes
        self._done = self._done_bytes = 0
        self._next_at = time.monotonic() + _PROGRESS_S

    def note(self, size_bytes: int) -> None:
        self._done += 1
        self._done_bytes += size_bytes
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _PROGRESS_S
            share = f"{shown_bytes(self._done_bytes)} of {shown_bytes(self._bytes)}"
            done(f"{self._done} of {counted(self._objects, 'object')}, {share} read")


@asynccontextmanager
async def _opened_objects() -> AsyncIterator[tuple[Bucket, Segments]]:
    from cepheid_ports import ThreadWorker
    from cepheid_tiered.bucket import ObjectBucket
    from cepheid_tiered.object_stores import ObjectStores
    from cepheid_tiered.segments import Segments

    async def no_schemas(_: TopicName) -> list[Any]:
        return []

    worker = ThreadWorker("objects", threads=2)
    try:
        objects = ObjectStores(worker)
        segments = Segments(objects, worker, no_schemas)
        try:
            yield ObjectBucket(objects), segments
        finally:
            await segments.aclose()
    finally:
        await worker.aclose()


@asynccontextmanager
async def _opened_store(url: str) -> AsyncIterator[MetadataStore]:
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    store = await open_store(url, Ports(), must_exist=True)
    try:
        yield store
    finally:
        await store.aclose()


def _now_ms() -> int:
    from cepheid_ports import Ports

    return Ports().wall_ms()
