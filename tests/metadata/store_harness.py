"""The stores under one contract: how each is opened, and how its session ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cepheid_metadata import MemoryStore, MemoryTree, MetadataStore
from cepheid_metadata.rocks_store import RocksStore
from cepheid_metadata.zookeeper_store import ZooKeeperStore
from cepheid_ports import Ports
from tests.zookeeper_support import new_chroot, shared_zookeeper


class MemoryHarness:
    def __init__(self, directory: Path) -> None:
        self.tree = MemoryTree()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[MetadataStore]:
        store = MemoryStore(self.tree)
        yield store
        await store.aclose()


class RocksHarness:
    def __init__(self, directory: Path) -> None:
        self.directory = directory / "metadata"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[MetadataStore]:
        store = await RocksStore.open(self.directory, Ports())
        try:
            yield store
        finally:
            await store.aclose()


class ZooKeeperHarness:
    def __init__(self, directory: Path) -> None:
        self.root = new_chroot()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[MetadataStore]:
        store = await ZooKeeperStore.open([shared_zookeeper().address], Ports(), root=self.root)
        try:
            yield store
        finally:
            await store.aclose()


Harness = MemoryHarness | RocksHarness | ZooKeeperHarness
HARNESSES: dict[str, type[Harness]] = {"memory": MemoryHarness, "rocksdb": RocksHarness, "zookeeper": ZooKeeperHarness}
