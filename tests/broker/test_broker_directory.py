"""The brokers that run, as their registrations say."""

from __future__ import annotations

import pytest

from cepheid_broker.ownership.broker_directory import BrokerDirectory
from cepheid_metadata import BrokerRegistration, MemoryStore, MemoryTree, broker_records
from cepheid_ports import TaskOwner


async def test_a_registration_that_cannot_be_read_hides_no_other_broker(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(MemoryTree())
    for name in ("a:8080", "b:8080"):
        record = BrokerRegistration(broker_id=name, addresses={"pulsar": name}, started_at_ms=0)
        await broker_records(store).create(name, record, ephemeral=True)
    tasks = TaskOwner("test")
    directory = BrokerDirectory(store, tasks)
    await directory.start()
    damaged = broker_records(store).key_of("a:8080")
    await store.put(damaged, b"garbage", 0)
    await store.create(broker_records(store).key_of("c:8080"), b"garbage", ephemeral=True)
    await directory.refresh()
    assert list(directory.brokers) == ["a:8080", "b:8080"]
    assert damaged in [getattr(record, "key", "") for record in caplog.records]
    await store.delete(damaged, None)
    await directory.refresh()
    assert list(directory.brokers) == ["b:8080"]
    await tasks.aclose()
