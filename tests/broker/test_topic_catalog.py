"""A topic is created in one step with a look at its namespace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.settings import TopicCreation
from cepheid_broker.topic_catalog import TopicCatalog
from cepheid_metadata import MemoryStore, MemoryTree, NamespaceRecord, Op, OpResult, namespace_records, topic_records
from cepheid_ports import Ports
from cepheid_wire import TopicName
from tests.support import run_async

TOPIC = TopicName.parse("persistent://t/ns/topic")


class Meddler(MemoryStore):
    """Changes the namespace between the look at it and the write that relies on it, once."""

    change: NamespaceRecord | None = None

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if self.change is not None:
            change, self.change = self.change, None
            await namespace_records(self).replace(("t", "ns"), change, 0)
        return await super().multi(ops)


@pytest.mark.parametrize("change", [NamespaceRecord(deleted=True), NamespaceRecord(bundles=8)])
def test_a_namespace_that_changed_meanwhile_is_looked_at_again(change: NamespaceRecord) -> None:
    async def main() -> None:
        store = Meddler(MemoryTree())
        catalog = TopicCatalog(store, TopicCreation(), TopicPolicies(), Ports())
        await namespace_records(store).create(("t", "ns"), NamespaceRecord())
        store.change = change
        if change.deleted:
            with pytest.raises(NamespaceNotFoundError):
                await catalog.create(TOPIC, 0)
        else:
            await catalog.create(TOPIC, 0)
        assert await topic_records(store).exists(TOPIC) is not change.deleted
        await store.aclose()

    run_async(main())
