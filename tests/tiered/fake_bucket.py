"""A bucket in memory, which can be away, and a topic in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from cepheid_tiered.manifest import Manifest, ManifestCursor, ManifestLedger, ManifestObject
from cepheid_tiered.object_store import StoredObject
from cepheid_tiered.segment import NoSuchSegmentError, SegmentError

ROOT = "s3://bucket/prefix"
NOW_MS = 1_700_000_000_000


class FakeBucket:
    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.is_away = False
        self.deleted: list[str] = []

    async def list(self, url: str) -> AsyncIterator[StoredObject]:
        self._check(url)
        for name, (data, at_ms) in sorted(self.objects.items()):
            if name.startswith(url.rstrip("/") + "/"):
                yield StoredObject(name, len(data), at_ms)

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        self._check(url)
        if url not in self.objects:
            raise NoSuchSegmentError(f"{url} does not exist")
        return self.objects[url][0]

    async def put(self, url: str, data: bytes) -> None:
        self._check(url)
        self.objects[url] = (data, NOW_MS)

    async def delete(self, url: str) -> None:
        self._check(url)
        self.deleted.append(url)
        self.objects.pop(url, None)

    def _check(self, url: str) -> None:
        if self.is_away:
            raise SegmentError(f"could not reach {url}: connection refused", url=url)

    def add_topic(self, manifest: Manifest, *, written_at_ms: int = 0) -> str:
        """Put the manifest and its objects into the bucket. Return the manifest's URL."""
        directory = f"{ROOT}/{manifest.topic.removeprefix('persistent://')}"
        for ledger in manifest.offloaded:
            assert ledger.object is not None
            self.objects[f"{directory}/{ledger.object.name}"] = (b"x" * ledger.object.size_bytes, written_at_ms)
        self.objects[f"{directory}/manifest.json"] = (manifest.encode(), written_at_ms)
        return f"{directory}/manifest.json"


def object_name(ledger_id: int) -> str:
    return f"{ledger_id:020d}-{ledger_id:016x}.parquet"


def offloaded(ledger_id: int, entries: int = 10) -> ManifestLedger:
    found = ManifestObject(object_name(ledger_id), 30, NOW_MS - 90_000)
    return ManifestLedger(ledger_id, entries, 100 * entries, entries, NOW_MS - 100_000, found)


def on_bookies(ledger_id: int, entries: int = 10) -> ManifestLedger:
    return ManifestLedger(ledger_id, entries, 100 * entries, None, 0, None)


def ended(ledger_id: int, entries: int = 10) -> ManifestLedger:
    return ManifestLedger(ledger_id, entries, 100 * entries, None, NOW_MS - 100_000, None)


def manifest_of(topic: str, *ledgers: ManifestLedger, incarnation: str = "", cluster_id: str = "old") -> Manifest:
    return Manifest(
        cluster_id=cluster_id,
        cluster="old-name",
        topic=f"persistent://{topic}",
        incarnation=incarnation or f"incarnation-of-{topic}",
        epoch=3,
        written_at_ms=NOW_MS - 30_000,
        tenant_record={"format": 1, "admin_roles": ["ann"], "allowed_clusters": ["old-name", "third"]},
        namespace_record={"format": 2, "bundles": 8, "replication_clusters": ["old-name"], "message_ttl_s": 77},
        topic_record={"format": 1, "created_at_ms": 5, "properties": {"owner": "ann"}},
        base_record=None,
        schema_history=None,
        schema_definitions={},
        ledgers=ledgers,
        cursors=[ManifestCursor("sub", (ledgers[0].ledger_id if ledgers else 1, 4), None, {"a": "b"})],
        cursors_at_ms=NOW_MS - 30_000,
    )
