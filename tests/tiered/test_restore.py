"""Topics come back from a bucket alone: what comes back, what is refused, and what the report says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cepheid_metadata import (
    Chain,
    ChainLedger,
    LedgerIds,
    MemoryStore,
    MemoryTree,
    MetadataStore,
    Position,
    SchemaDefinition,
    SchemaHistory,
    SchemaVersion,
    TopicRecord,
    chain_records,
    cursor_records,
    found_cluster,
    keys,
    namespace_records,
    read_chain,
    schema_histories,
    tenant_records,
    topic_records,
)
from cepheid_metadata.chain_pages import create_chain
from cepheid_metadata.repositories import restored_record
from cepheid_metadata.restored_records import RestoredMetadata
from cepheid_metadata.store import Op, OpResult
from cepheid_ports import Ports
from cepheid_tiered.manifest import Manifest, ManifestLedger
from cepheid_tiered.restore import (
    BucketRestoreRefusedError,
    NoManifestError,
    NotConfirmedError,
    Outcome,
    RestoredTopic,
    restore_topics,
)
from cepheid_tiered.segment import DamagedSegmentError, SegmentError
from cepheid_tiered.segment_format import SegmentMetadata
from cepheid_tiered.unnamed_objects import FooterOf
from cepheid_wire import TopicName
from tests.tiered.fake_bucket import NOW_MS, ROOT, FakeBucket, ended, manifest_of, object_name, offloaded, on_bookies

ORDERS = TopicName.parse("persistent://t/n/orders")


class Cut(Exception):
    """The process is killed here."""


def run(test: Callable[[MemoryStore, FakeBucket], Awaitable[None]]) -> None:
    async def main() -> None:
        store = MemoryStore(MemoryTree())
        await found_cluster(store, "new-name", Ports())
        await test(store, FakeBucket())

    asyncio.run(main())


async def restored(store: MetadataStore, bucket: FakeBucket, **options: object) -> dict[str, RestoredTopic]:
    return {one.topic or one.manifest: one for one in await restore_topics(store, bucket, ROOT, NOW_MS, **options)}  # type: ignore[arg-type]


def test_chain_cursors_and_policies_come_back_with_their_ids() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        url = bucket.add_topic(manifest_of("t/n/orders", offloaded(41), on_bookies(57, 3), offloaded(60), on_bookies(77, 5)))
        (report,) = await restore_topics(store, bucket, ROOT, NOW_MS)
        assert report == RestoredTopic(
            str(ORDERS), url, Outcome.RESTORED, ledgers=2, entries=20, size_bytes=2_000, cursors=1, cursors_without_state=("sub",),
            cursors_age_ms=30_000, lost=(on_bookies(57, 3), on_bookies(77, 5)),
        )  # fmt: skip
        chain = (await chain_records(store).get(ORDERS)).record  # type: ignore[union-attr]
        assert [(one.ledger_id, one.entries) for one in chain.ledgers] == [(41, 10), (60, 10)]
        assert (chain.incarnation, chain.epoch, chain.messages) == ("incarnation-of-t/n/orders", 3, {41: 10, 60: 10})
        found = chain.offload_of(41)
        assert found is not None
        assert (found.url, found.on_bookies) == (f"{ROOT}/t/n/orders/{object_name(41)}", False)
        assert await store.exists(keys.incarnation_key(chain.incarnation))
        cursor = (await cursor_records(store).get((ORDERS, "sub"))).record  # type: ignore[union-attr]
        assert (cursor.mark_delete, cursor.chain_incarnation) == (Position(41, 4), chain.incarnation)
        assert (await topic_records(store).get(ORDERS)).record.properties == {"owner": "ann"}  # type: ignore[union-attr]
        tenant = (await tenant_records(store).get("t")).record  # type: ignore[union-attr]
        assert (tenant.admin_roles, tenant.allowed_clusters) == (("ann",), ("new-name", "third"))
        namespace = (await namespace_records(store).get(("t", "n"))).record  # type: ignore[union-attr]
        assert (namespace.message_ttl_s, namespace.bundles, namespace.replication_clusters) == (77, 8, ("new-name",))
        assert await LedgerIds(store).take(newest=True) > 77 + 99_999  # what came after the manifest is not used again

    run(test)


def test_partitions_come_back_under_their_partitioned_topic() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        for index, (partitions, at_ms) in enumerate([(2, 100), (3, 200)]):
            one = manifest_of(f"t/n/orders-partition-{index}", offloaded(10 + index))
            base = {"format": 2, "partitions": partitions, "created_at_ms": 1, "message_ttl_s": partitions}
            bucket.add_topic(replace(one, topic_record=None, base_record=base, written_at_ms=at_ms))
        report = await restored(store, bucket)
        assert [one.outcome for one in report.values()] == [Outcome.RESTORED] * 2
        base_record = (await topic_records(store).get(ORDERS)).record  # type: ignore[union-attr]
        assert (base_record.partitions, base_record.message_ttl_s) == (3, 3)
        assert not await topic_records(store).exists(ORDERS.partition(0))
        assert await chain_records(store).exists(ORDERS.partition(1))

    run(test)


def a_schema(*sizes: int) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    import json

    definitions = {str(version): SchemaDefinition(type="AVRO", data=b"a" * size) for version, size in enumerate(sizes)}
    rows = [
        SchemaVersion(
            version=int(version),
            type="AVRO",
            content_hash=f"h{version}",
            token=f"t{version}",
            parts=1,
            size_bytes=1,
            created_at_ms=1,
        )
        for version in definitions
    ]
    history = SchemaHistory(next_version=9, current_from=1, versions=tuple(rows))
    return json.loads(history.encode()), {version: json.loads(one.encode()) for version, one in definitions.items()}


def test_schemas_keep_their_versions_whatever_their_size() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        history, definitions = a_schema(10, 1_500_000, 20)
        bucket.add_topic(replace(manifest_of("t/n/orders", offloaded(4)), schema_history=history, schema_definitions=definitions))
        await restored(store, bucket)
        found = (await schema_histories(store).get(ORDERS)).record  # type: ignore[union-attr]
        assert (found.next_version, found.current_from, [row.version for row in found.versions]) == (9, 1, [0, 1, 2])
        for row, size in zip(found.versions, (10, 1_500_000, 20), strict=True):
            parts = [await store.get(keys.schema_part_key(ORDERS, row.token, part)) for part in range(row.parts)]
            whole = b"".join(part.value for part in parts if part is not None)
            assert len(SchemaDefinition.decode(whole, "x").data) == size

    run(test)


def test_a_restore_is_repeated_without_harm() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41), on_bookies(42)))
        first = await restored(store, bucket)
        before = await chain_records(store).get(ORDERS)
        second = await restored(store, bucket)
        assert second == {name: replace(one, outcome=Outcome.THERE) for name, one in first.items()}
        assert await chain_records(store).get(ORDERS) == before

    run(test)


@pytest.mark.parametrize("writes", range(14))
def test_a_restore_that_was_cut_off_is_continued(writes: int) -> None:
    """Whatever number of writes it had done."""

    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        history, definitions = a_schema(10, 20)
        bucket.add_topic(replace(manifest_of("t/n/orders", offloaded(41)), schema_history=history, schema_definitions=definitions))
        multi, left = store.multi, writes

        async def cut(ops: list[Op]) -> list[OpResult]:
            nonlocal left
            if not left:
                raise Cut
            left -= 1
            return await multi(ops)

        store.multi = cut  # type: ignore[method-assign,assignment]
        try:
            await restored(store, bucket)
        except Cut:
            assert not await topic_records(store).exists(ORDERS)
        store.multi = multi  # type: ignore[method-assign]
        report = await restored(store, bucket)
        assert report[str(ORDERS)].outcome in (Outcome.RESTORED, Outcome.THERE)
        assert await topic_records(store).exists(ORDERS)
        assert await cursor_records(store).exists((ORDERS, "sub"))
        assert (await schema_histories(store).get(ORDERS)).record.next_version == 9  # type: ignore[union-attr]

    run(test)


def test_a_dry_run_changes_nothing() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        before = dict(bucket.objects)
        report = await restored(store, bucket, dry_run=True)
        assert report[str(ORDERS)].outcome is Outcome.PLANNED
        assert bucket.objects == before
        assert not await tenant_records(store).exists("t")

    run(test)


def test_the_manifest_names_the_new_cluster() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        url = bucket.add_topic(manifest_of("t/n/orders", offloaded(41), on_bookies(42)))
        await restored(store, bucket)
        claimed = Manifest.decode(bucket.objects[url][0], url)
        assert claimed.cluster == "new-name"
        assert [ledger.ledger_id for ledger in claimed.ledgers] == [41, 42]

    run(test)


def damage(bucket: FakeBucket, url: str) -> None:
    bucket.objects[url] = (bucket.objects[url][0][:-20], 0)


def newer(bucket: FakeBucket, url: str) -> None:
    bucket.objects[url] = (bucket.objects[url][0].replace(b'"format":1', b'"format":9', 1), 0)


@pytest.mark.parametrize(("spoil", "words"), [(damage, "is not a manifest"), (newer, "is a manifest of format 9")])
def test_one_manifest_that_cannot_be_read_does_not_hinder_the_others(spoil: Callable[[FakeBucket, str], None], words: str) -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        spoil(bucket, bad := bucket.add_topic(manifest_of("t/n/other", offloaded(42))))
        report = await restored(store, bucket)
        assert report[str(ORDERS)].outcome is Outcome.RESTORED
        assert report[bad].outcome is Outcome.UNREADABLE
        assert words in report[bad].reason
        assert bad in report[bad].reason

    run(test)


def test_policies_of_a_newer_release_are_refused_by_name() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(replace(manifest_of("t/n/orders", offloaded(41)), namespace_record={"format": 99, "color": "red"}))
        report = await restored(store, bucket)
        assert report[str(ORDERS)].outcome is Outcome.REFUSED
        assert "holds a namespace record of format 99" in report[str(ORDERS)].reason

    run(test)


@pytest.mark.parametrize("content", [None, b"short"])
def test_an_object_that_is_missing_or_truncated_is_named(content: bytes | None) -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41), offloaded(42)))
        url = f"{ROOT}/t/n/orders/{object_name(41)}"
        del bucket.objects[url]
        if content is not None:
            bucket.objects[url] = (content, 0)
        report = (await restored(store, bucket))[str(ORDERS)]
        assert (report.outcome, report.missing) == (Outcome.REFUSED, (object_name(41),))
        assert object_name(41) in report.reason
        assert "--accept-missing" in report.reason
        report = (await restored(store, bucket, accept_missing=True))[str(ORDERS)]
        assert (report.outcome, report.ledgers, report.missing) == (Outcome.RESTORED, 1, (object_name(41),))

    run(test)


def test_a_topic_that_exists_is_not_touched() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        await restored(store, bucket)
        before = await chain_records(store).get(ORDERS)
        bucket.add_topic(manifest_of("t/n/orders", offloaded(99), incarnation="another"))
        report = (await restored(store, bucket))[str(ORDERS)]
        assert report.outcome is Outcome.REFUSED
        assert "has a topic of this name" in report.reason
        assert await chain_records(store).get(ORDERS) == before

    run(test)


def test_a_ledger_id_that_another_topic_has_is_refused() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        bucket.add_topic(manifest_of("t/n/other", offloaded(41)))
        report = await restored(store, bucket)
        assert [one.outcome for one in report.values()] == [Outcome.RESTORED, Outcome.REFUSED]
        assert "ledger 41 is that of persistent://t/n/orders" in report["persistent://t/n/other"].reason

    run(test)


def test_a_running_broker_is_refused() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        await store.create(keys.broker_key("b:8080"), b"x", ephemeral=True)
        with pytest.raises(BucketRestoreRefusedError, match="broker b:8080 runs"):
            await restored(store, bucket)

    run(test)


def test_a_bucket_that_is_away_or_empty_restores_nothing() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        with pytest.raises(NoManifestError, match="below s3://bucket/prefix"):
            await restored(store, bucket)
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        bucket.is_away = True
        with pytest.raises(SegmentError, match="connection refused"):
            await restored(store, bucket)
        assert not await tenant_records(store).exists("t")

    run(test)


def test_only_the_topic_that_was_named_comes_back() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        bucket.add_topic(manifest_of("t/n/other", offloaded(42)))
        assert list(await restored(store, bucket, only=str(ORDERS))) == [str(ORDERS)]

    run(test)


@pytest.mark.parametrize(
    ("ledgers", "at", "end"),
    [
        ((offloaded(41), offloaded(42)), (42, 9), Position(42, 9)),
        ((offloaded(41), on_bookies(42)), (42, 9), Position(41, 9)),
        ((on_bookies(42),), (42, 9), Position(0, -1)),
    ],
)
def test_a_terminated_topic_ends_at_the_last_entry_that_came_back(
    ledgers: tuple[ManifestLedger, ...], at: tuple[int, int], end: Position
) -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(replace(manifest_of("t/n/orders", *ledgers), terminated_at=at))
        await restored(store, bucket)
        assert (await chain_records(store).get(ORDERS)).record.terminated_at == end  # type: ignore[union-attr]

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("writes", [3, 6, None])
def test_a_chain_of_20_000_ledgers_comes_back_in_pages(writes: int | None) -> None:
    """Also when it was cut off between two pages."""

    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", *(offloaded(number) for number in range(1, 20_001))))
        multi, left = store.multi, writes

        async def cut(ops: list[Op]) -> list[OpResult]:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise Cut
            return await multi(ops)

        store.multi = cut  # type: ignore[method-assign,assignment]
        try:
            await restored(store, bucket)
        except Cut:
            store.multi = multi  # type: ignore[method-assign]
            await restored(store, bucket)
        found = await read_chain(store, ORDERS)
        assert found is not None
        assert [one.ledger_id for one in found.record.ledgers] == list(range(1, 20_001))
        assert len(found.record.offloaded or ()) == 20_000

    run(test)


def footers(*found: tuple[int, int], topic: str = str(ORDERS), cluster: str = "old", size_bytes: int = 30) -> FooterOf:
    """Of the objects of these ledgers, each with so many entries. Others are damaged."""

    async def footer_of(url: str, ledger_id: int) -> Any:
        if ledger_id not in dict(found):
            raise DamagedSegmentError(f"{url} was cut off", url=url)
        entries = dict(found)[ledger_id]
        metadata = SegmentMetadata(topic, ledger_id, entries, entries, 100 * entries, 7, cluster)
        return SimpleNamespace(metadata=metadata, object_bytes=size_bytes)

    return footer_of


def add_object(bucket: FakeBucket, ledger_id: int, token: int | None = None) -> str:
    name = object_name(ledger_id) if token is None else f"{ledger_id:020d}-{token:016x}.parquet"
    bucket.objects[f"{ROOT}/t/n/orders/{name}"] = (b"x" * 30, NOW_MS)
    return name


@pytest.mark.parametrize(
    ("manifest", "footer_of", "taken_in", "reason"),
    [
        ((offloaded(41), ended(42)), footers((42, 10)), (42,), None),
        ((offloaded(41), on_bookies(42, 3)), footers((42, 10)), (42,), None),  # it was open, and got more
        ((offloaded(41),), footers((42, 10)), (42,), None),  # it came after the manifest
        ((offloaded(41), ended(42)), footers((42, 9)), (), "has 9 entries, the manifest says 10"),
        ((offloaded(41), on_bookies(42, 11)), footers((42, 10)), (), "has 10 entries, the manifest says 11"),
        ((offloaded(41), offloaded(43)), footers((42, 10)), (), "older than those of the manifest"),
        ((offloaded(41), ended(42)), footers((41, 10), (42, 10), cluster="twin"), (42,), None),  # as its named objects
        ((ended(42),), footers((42, 10), cluster="twin"), (), "cluster twin wrote it"),
        ((offloaded(41), ended(42)), footers((42, 10), topic="persistent://t/n/x"), (), "holds a ledger of persistent://t/n/x"),
        ((offloaded(41), ended(42)), footers(), (), "was cut off"),
    ],
)
def test_objects_that_the_manifest_does_not_name_are_taken_in_by_their_footers(
    manifest: tuple[ManifestLedger, ...], footer_of: FooterOf, taken_in: tuple[int, ...], reason: str | None
) -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", *manifest))
        name = add_object(bucket, 42)
        report = (await restored(store, bucket, footer_of=footer_of))[str(ORDERS)]
        assert (report.outcome, report.taken_in) == (Outcome.RESTORED, taken_in)
        found = await read_chain(store, ORDERS)
        assert found is not None
        copy = found.record.offload_of(42)
        if reason is None:
            assert report.not_taken == ()
            assert copy is not None
            assert copy.url.endswith(name)
            assert next(one.entries for one in found.record.ledgers if one.ledger_id == 42) == 10
        else:
            assert copy is None
            assert name in report.not_taken[0]
            assert reason in report.not_taken[0]

    run(test)


def test_another_copy_takes_the_place_of_a_missing_one() -> None:
    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        del bucket.objects[f"{ROOT}/t/n/orders/{object_name(41)}"]
        add_object(bucket, 41, token=5)
        report = (await restored(store, bucket, footer_of=footers((41, 10))))[str(ORDERS)]
        assert (report.outcome, report.taken_in, report.missing) == (Outcome.RESTORED, (41,), ())

    run(test)


def test_metadata_older_than_the_bucket_gets_the_copies_that_it_does_not_name() -> None:
    """As after a restore from a backup: 41 left the bookies since, 42 was open, 43 came later, and 44 is named by nothing."""

    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        await restored_record(store).create(None, RestoredMetadata(backup_sha256="x", backup_created_at_ms=1, restored_at_ms=1))
        bucket.add_topic(manifest_of("t/n/other", offloaded(50)))
        with pytest.raises(NotConfirmedError):
            await restored(store, bucket)
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41), offloaded(42), offloaded(43)))
        add_object(bucket, 44)
        ledgers = (ChainLedger(ledger_id=41, entries=10, size_bytes=1_000, closed_at_ms=5), ChainLedger(ledger_id=42))
        old = Chain(incarnation="incarnation-of-t/n/orders", epoch=2, ledgers=ledgers)
        await create_chain(store, ORDERS, old)
        await topic_records(store).create(ORDERS, TopicRecord(created_at_ms=1))
        reports = await restored(store, bucket, footer_of=footers((44, 10)))
        assert "run `cepheid metadata confirm`" in reports["persistent://t/n/other"].reason
        report = reports[str(ORDERS)]
        assert (report.outcome, report.taken_in) == (Outcome.THERE, (41, 42, 43, 44))
        chain = (await read_chain(store, ORDERS)).record  # type: ignore[union-attr]
        assert [(one.ledger_id, one.entries) for one in chain.ledgers] == [(41, 10), (42, 10), (43, 10), (44, 10)]
        assert all(chain.offload_of(one.ledger_id) for one in chain.ledgers)
        assert [chain.is_on_bookies(number) for number in (41, 42, 43)] == [True, True, False]
        url = f"{ROOT}/t/n/orders/manifest.json"
        assert [one.ledger_id for one in Manifest.decode(bucket.objects[url][0], url).offloaded] == [41, 42, 43, 44]
        again = (await restored(store, bucket, footer_of=footers((44, 10))))[str(ORDERS)]
        assert again.taken_in == ()

    run(test)


def test_ledger_ids_of_the_whole_bucket_are_not_used_again() -> None:
    """Also those of topics that are not restored now, and of objects without a manifest."""

    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        bucket.add_topic(manifest_of("t/n/orders", offloaded(41)))
        bucket.add_topic(manifest_of("t/n/other", offloaded(5_000_000)))
        bucket.objects[f"{ROOT}/t/n/gone/{object_name(7_000_000)}"] = (b"x", 0)
        await restored(store, bucket, only=str(ORDERS))
        assert await LedgerIds(store).take(newest=True) > 7_000_000

    run(test)


def test_pages_of_a_restore_that_was_cut_off_do_not_stay() -> None:
    """They would keep the chain's key from being deleted."""

    async def test(store: MemoryStore, bucket: FakeBucket) -> None:
        key = keys.chain_key(ORDERS)
        for number in (0, 9):
            await store.create(keys.chain_page_key(key, number), b"of another restore")
            await store.put(keys.chain_page_key(key, number), b"written twice", 0)
        bucket.add_topic(manifest_of("t/n/orders", *(offloaded(number) for number in range(1, 5_001))))
        await restored(store, bucket)
        found = await chain_records(store).get(ORDERS)
        assert found is not None
        pages = [str(ref.number) for ref in found.record.pages or ()]
        assert await store.children(key) == sorted(pages)
        assert len(pages) > 1
        versions = [await store.get(keys.chain_page_key(key, int(page))) for page in pages]
        assert {one.version for one in versions if one is not None} == {0}

    run(test)
