"""A topic is created in one step with a look at its namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cepheid_broker.errors import NamespaceNotFoundError, TooManyError
from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_broker.settings import TopicCreation
from cepheid_broker.topics.topic_catalog import TopicCatalog
from cepheid_metadata import (
    KeyExistsError,
    MemoryStore,
    MemoryTree,
    NamespaceRecord,
    Op,
    OpResult,
    namespace_records,
    topic_records,
)
from cepheid_ports import Ports
from cepheid_wire import TopicName

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
async def test_a_namespace_that_changed_meanwhile_is_looked_at_again(change: NamespaceRecord) -> None:
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


async def test_a_namespace_takes_no_more_topics_than_it_may() -> None:
    store = MemoryStore(MemoryTree())
    catalog = TopicCatalog(store, TopicCreation(), TopicPolicies(), Ports())
    await namespace_records(store).create(("t", "ns"), NamespaceRecord(max_topics=4))
    await catalog.create(TopicName.parse("persistent://t/ns/a"), 2)
    await catalog.create(TopicName.parse("non-persistent://t/ns/b"), 0)
    names = [TopicName.parse(f"persistent://t/ns/{letter}") for letter in "cdef"]
    outcomes = await asyncio.gather(*(catalog.create(name, 0) for name in names), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [TooManyError] * 3
    assert "has 4 topics and partitions, its policy allows 4" in str(outcomes[-1])
    with pytest.raises(KeyExistsError):  # there already: that is no question of room
        await catalog.create(TopicName.parse("persistent://t/ns/a"), 2)
    await catalog.create(TopicName.parse("persistent://t/ns/__system"), 0)
    assert await catalog.partitions_or_create(names[0]) == 0
    await store.aclose()
