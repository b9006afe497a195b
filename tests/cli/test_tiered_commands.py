"""`cepheid tiered verify`, `sweep` and `restore` on a bucket of files, with real segments and a real store of metadata."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_cli.tiered import problem_lines
from cepheid_decode import SchemaVersion
from cepheid_metadata import chain_records, cluster_identity, found_cluster
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports, ThreadWorker
from cepheid_rpc import EntryGroup, encode_group
from cepheid_tiered.manifest import Manifest, ManifestCursor, ManifestLedger, ManifestObject
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.segments import Segments, SegmentSettings
from cepheid_wire import TopicName

ORDERS = TopicName.parse("persistent://t/n/orders")
ENTRIES = 20


class BucketOfFiles:
    """One topic with two segments, and ledger 9 that was never offloaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory}/bucket"
        self.metadata = f"rocksdb:{directory}/metadata"
        asyncio.run(self._make())

    async def _make(self) -> None:
        worker = ThreadWorker("objects")

        async def no_schemas(_: TopicName) -> list[object]:
            return []

        async def groups(ledger_id: int) -> AsyncIterator[Sequence[EntryGroup]]:
            yield [encode_group(ledger_id, 0, -1, 0, [b"%d" % number for number in range(ENTRIES)])]

        (self.directory / "bucket").mkdir()
        objects = ObjectStores(worker)
        segments = Segments(objects, worker, no_schemas)  # type: ignore[arg-type]
        rows = []
        for ledger_id in (7, 8):
            url = segments.url_of(self.url, ORDERS, ledger_id)
            summary = await segments.write(url, ORDERS, ledger_id, groups(ledger_id))
            found = ManifestObject(url.rpartition("/")[2], summary.object_bytes, 1, summary.crc32c)
            rows.append(ManifestLedger(ledger_id, ENTRIES, summary.entry_bytes, summary.messages, 1, found))
        rows.append(ManifestLedger(9, 5, 100, None, 0, None))
        manifest = Manifest(
            "old-id", "old", str(ORDERS), "i1", 1, 1, None, None, {"format": 1, "created_at_ms": 1}, None, None, {}, rows,
            [ManifestCursor("sub", (7, 3), None, {})], 1,
        )  # fmt: skip
        await objects.put(f"{self.url}/t/n/orders/manifest.json", manifest.encode())
        await segments.aclose()
        await worker.aclose()
        store = await open_store(self.metadata, Ports())
        await found_cluster(store, "new", Ports())
        await store.aclose()

    def object(self, index: int) -> Path:
        return sorted((self.directory / "bucket/t/n/orders").glob("*.parquet"))[index]

    async def write_remains(self) -> Path:
        """An object of the new cluster that no chain names."""
        store = await open_store(self.metadata, Ports())
        identity = await cluster_identity(store).get(None)
        await store.aclose()
        assert identity is not None
        return await self.write_object(5, identity.record.cluster_id)

    async def write_object(self, ledger_id: int, cluster: str = "") -> Path:
        """An object with one entry that the manifest does not name."""
        worker = ThreadWorker("objects", threads=1)

        async def no_schemas(_: TopicName) -> list[SchemaVersion]:
            return []

        async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
            yield [encode_group(ledger_id, 0, -1, 0, [b"x"])]

        segments = Segments(ObjectStores(worker), worker, no_schemas, SegmentSettings(cluster=cluster))
        url = segments.url_of(self.url, ORDERS, ledger_id)
        await segments.write(url, ORDERS, ledger_id, groups())
        await segments.aclose()
        await worker.aclose()
        return self.directory / "bucket/t/n/orders" / url.rpartition("/")[2]

    async def ledger_ids(self) -> list[int]:
        store = await open_store(self.metadata, Ports())
        found = await chain_records(store).get(ORDERS)
        await store.aclose()
        assert found is not None
        return [ledger.ledger_id for ledger in found.record.ledgers]


@pytest.fixture
def bucket(tmp_path: Path) -> BucketOfFiles:
    return BucketOfFiles(tmp_path)


def tiered(*words: str) -> Result:
    return CliRunner().invoke(app, ["tiered", *words], catch_exceptions=False)


def test_sound_objects_are_valid(bucket: BucketOfFiles) -> None:
    result = tiered("verify", "--url", bucket.url)
    assert result.exit_code == 0, result.output
    assert "2 objects" in result.output
    assert "2 valid, 0 bad, 0 not known" in result.output


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def change(path: Path) -> None:
    import pyarrow.parquet as pq

    raw_entry = pq.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[raw_entry.data_page_offset + raw_entry.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [Path.unlink, cut, change])
def test_an_object_that_is_missing_cut_or_changed_is_bad_and_named(bucket: BucketOfFiles, spoil: object) -> None:
    spoil(bucket.object(1))  # type: ignore[operator]
    result = tiered("verify", "--url", bucket.url)
    assert result.exit_code == 1
    assert "persistent://t/n/orders, ledger 8: bad: " in result.output
    assert "1 valid, 1 bad, 0 not known" in result.output


def test_what_cannot_be_read_is_not_known(bucket: BucketOfFiles) -> None:
    manifest = bucket.directory / "bucket/t/n/orders/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":2', 1))
    result = tiered("verify", "--url", bucket.url)
    assert result.exit_code == 3
    assert "is a manifest of format 2; this release knows formats up to 1" in result.output


def test_restores_sweeps_and_verifies_against_chains(bucket: BucketOfFiles) -> None:
    result = tiered("restore", bucket.url, "--into", bucket.metadata, "--dry-run")
    assert "persistent://t/n/orders: would be restored" in result.output
    result = tiered("restore", bucket.url, "--into", bucket.metadata)
    assert result.exit_code == 0, result.output
    assert "persistent://t/n/orders: restored" in result.output
    assert "2 ledgers, 40 entries" in result.output
    assert "never offloaded, lost: 1 ledger (9), 5 entries, 100 B" in result.output
    assert "delivered again: sub" in result.output
    assert asyncio.run(bucket.ledger_ids()) == [7, 8]
    assert tiered("verify", "--metadata", bucket.metadata).exit_code == 0
    remains = asyncio.run(bucket.write_remains())
    unknown = remains.with_name(f"{6:020d}-0123456789abcdef.parquet")
    unknown.write_bytes(b"x")
    result = tiered("sweep", bucket.url, "--metadata", bucket.metadata, "--grace-hours", "0", "--dry-run")
    assert "1 object" in result.output
    assert remains.exists()
    result = tiered("sweep", bucket.url, "--metadata", bucket.metadata, "--grace-hours", "0", "--json")
    assert [one["decision"] for one in json.loads(result.stdout)].count("orphan") == 1
    assert not remains.exists()
    assert unknown.exists(), "it does not say who wrote it"
    assert tiered("verify", "--metadata", bucket.metadata).exit_code == 0


def test_a_restore_that_refuses_a_topic_says_so_by_its_exit_code(bucket: BucketOfFiles) -> None:
    bucket.object(0).unlink()
    result = tiered("restore", bucket.url, "--into", bucket.metadata)
    assert result.exit_code == 1
    assert "persistent://t/n/orders: refused: " in result.output
    result = tiered("restore", bucket.url, "--into", bucket.metadata, "--accept-missing")
    assert result.exit_code == 0
    assert asyncio.run(bucket.ledger_ids()) == [8]


def test_a_restore_takes_in_what_was_uploaded_after_the_manifest(bucket: BucketOfFiles) -> None:
    asyncio.run(bucket.write_object(10))
    older = asyncio.run(bucket.write_object(5))
    result = tiered("restore", bucket.url, "--into", bucket.metadata)
    assert result.exit_code == 0, result.output
    assert "found in the bucket, not in the manifest, and restored: 1 ledger (10)" in result.output
    assert f"found in the bucket, and not restored: {older.name}: its ledger is older" in result.output
    assert asyncio.run(bucket.ledger_ids()) == [7, 8, 10]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"retention_time_ms": 0, "retention_bytes": 0}, "no retention is set, so acknowledged messages are deleted"),
        ({"retention_time_ms": -1, "retention_bytes": 0}, None),
        ({"live": {"refused_ledgers": 3, "refused": {"7": "too long"}}}, "ledger 7 and 2 other ledgers cannot be offloaded at all"),
        ({"live": {"not_held_ledgers": 1}}, "retention no longer waits for 1 ledger whose offload fails"),
        ({"live": {"last_error": "away", "failing_since_ms": 1}}, "offloading fails since"),
    ],
)
def test_status_says_what_is_wrong_with_a_topic(row: dict[str, object], words: str | None) -> None:
    lines = problem_lines([{"topic": "t", "url": "s3://b", "live": None, "waiting_deletions": 0, **row}])
    assert (words is None and not lines) or any(words is not None and words in line for line in lines), lines
