"""What every cluster starts with, made by many processes at once."""

from __future__ import annotations

from cepheid_broker.first_objects import create_first_objects
from cepheid_metadata import (
    BadVersionError,
    KeyExistsError,
    MemoryStore,
    MemoryTree,
    cluster_records,
    list_namespaces,
    list_tenants,
)


class Overtaken(MemoryStore):
    """Somebody else does the same between each look and the write that follows."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.lost: list[str] = []

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        await create_first_objects(MemoryStore(self._tree), "east", service_urls=() if self.lost else ("pulsar://early:1",))
        try:
            return await super().create(key, value, ephemeral=ephemeral, sequential=sequential)
        except KeyExistsError:
            self.lost.append(key)
            raise

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        if not any(lost.startswith("put") for lost in self.lost):
            await create_first_objects(MemoryStore(self._tree), "east", admin_urls=("http://early:2",))
        try:
            return await super().put(key, value, expected_version)
        except BadVersionError:
            self.lost.append(f"put {key}")
            raise


async def test_who_is_overtaken_everywhere_makes_the_same() -> None:
    store = Overtaken(MemoryTree())
    await create_first_objects(store, "east", service_urls=("pulsar://late:1",))
    assert store.lost[:2] == ["/clusters/east", "put /clusters/east"]
    assert "/namespaces/public/default" in store.lost
    found = await cluster_records(store).get("east")
    assert found is not None
    assert (found.record.broker_service_url, found.record.service_url) == ("pulsar://late:1", "http://early:2")
    assert await list_tenants(store) == ["public", "pulsar"]
    assert await list_namespaces(store, "public") == ["default"]
