"""Versions of a topic's schema: numbered once, kept whole, one history however many register at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_broker.errors import IncompatibleSchemaError, InvalidSchemaError, SchemaNotFoundError, TooManySchemasError
from cepheid_broker.policies.topic_policies import SchemaCompatibility as S
from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_broker.schemas import MAX_SCHEMA_BYTES, NO_VERSION, Schema, SchemaRegistry, SchemaType, encode_version
from cepheid_broker.schemas import registry as registry_module
from cepheid_metadata import MemoryStore, MemoryTree, NoSuchKeyError, TopicRecord, keys, schema_histories, topic_records
from cepheid_ports import Ports
from cepheid_wire import NamespaceName, TopicName
from tests.schemas.schema_examples import field, user
from tests.support import run_async

TOPIC = TopicName.parse("persistent://public/default/orders")
POLICIES = TopicPolicies()
OPTIONAL = (field("name", "string", default=""), field("more", "int", default=0))
STRING = Schema(SchemaType.STRING)
ID = user(field("id", "long"))
ID_NAME = user(field("id", "long"), field("name", "string", default=""))
ID_TEXT = user(field("id", "string"))


def large(marker: str) -> Schema:
    """Near the limit: more than a request to the store may carry."""
    definition = user(field("id", "long", doc=marker + "d" * (MAX_SCHEMA_BYTES - 200), default=len(marker)))
    return Schema(definition.type, definition.data, {"marker": marker})


class Interleaving(MemoryStore):
    """Others get their turn before each request, as with a store across a network."""

    def __init__(self, tree: MemoryTree, seed: int) -> None:
        super().__init__(tree)
        self._random = random.Random(seed)

    async def _yield(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def get(self, key: str) -> Any:
        await self._yield()
        return await super().get(key)

    async def create(self, *args: Any, **options: Any) -> str:
        await self._yield()
        return await super().create(*args, **options)

    async def multi(self, *args: Any) -> Any:
        await self._yield()
        return await super().multi(*args)


def new_registry(store: MemoryStore | None = None) -> SchemaRegistry:
    return SchemaRegistry(store or MemoryStore(MemoryTree()), Ports())


async def history_of(store: MemoryStore) -> Any:
    found = await schema_histories(store).get(TOPIC)
    return None if found is None else found.record


async def parts_of(store: MemoryStore) -> list[str]:
    try:
        return await store.children(keys.schemas_key(TOPIC))
    except NoSuchKeyError:
        return []


async def test_versions_count_from_0_and_the_same_schema_keeps_its_version() -> None:
    registry = new_registry()
    assert await registry.register(TOPIC, ID, S.FULL) == 0
    assert await registry.register(TOPIC, ID_NAME, S.FULL) == 1
    assert await registry.register(TOPIC, ID, S.FULL) == 0
    assert (await registry.latest(TOPIC)).schema == ID_NAME
    assert (await registry.get(TOPIC, 0)).schema == ID
    assert [found.version async for found in registry.versions(TOPIC)] == [0, 1]
    assert await registry.version_of(TOPIC, ID) == 0
    with pytest.raises(SchemaNotFoundError):
        await registry.version_of(TOPIC, ID_TEXT)
    with pytest.raises(SchemaNotFoundError, match="no schema of version 2"):
        await registry.get(TOPIC, 2)


async def test_partitions_and_both_domains_share_a_history() -> None:
    registry = new_registry()
    await registry.register(TOPIC.partition(3), ID, S.FULL)
    for other in (TOPIC, TOPIC.partition(0), TopicName.parse("non-persistent://public/default/orders")):
        assert (await registry.latest(other)).schema == ID
    with pytest.raises(SchemaNotFoundError):
        await registry.latest(TopicName.parse("orders2"))


async def test_a_schema_of_1_mb_is_kept_in_parts_and_one_byte_more_is_refused_with_the_limit() -> None:
    store = MemoryStore(MemoryTree())
    registry = new_registry(store)
    await registry.register(TOPIC, ID, S.FULL)
    schema = large("a")
    assert await registry.register(TOPIC, schema, S.FULL) == 1
    assert len(await parts_of(store)) > 2
    assert (await registry.latest(TOPIC)).schema == schema
    longer = Schema(schema.type, schema.data, {"marker": "m" * 500})
    with pytest.raises(InvalidSchemaError, match=str(MAX_SCHEMA_BYTES)):
        await registry.register(TOPIC, longer, S.FULL)


async def test_a_refusal_names_the_topic_and_nothing_is_stored() -> None:
    store = MemoryStore(MemoryTree())
    registry = new_registry(store)
    with pytest.raises(InvalidSchemaError, match="schema of topic persistent://public/default/orders: the definition"):
        await registry.register(TOPIC, Schema(SchemaType.AVRO, b"{"), S.FULL)
    assert await history_of(store) is None
    await registry.register(TOPIC, ID, S.FULL)
    with pytest.raises(IncompatibleSchemaError, match=r"topic persistent://public/default/orders: .* version 0.*field 'id'"):
        await registry.register(TOPIC, ID_TEXT, S.FULL)
    assert [row.version for row in (await history_of(store)).versions] == [0]
    assert registry.refused == 2


@pytest.mark.parametrize("kind", [SchemaType.NONE, SchemaType.BYTES, SchemaType.AUTO_CONSUME, SchemaType.AUTO_PUBLISH])
async def test_types_that_are_no_schema_are_not_registered(kind: SchemaType) -> None:
    with pytest.raises(InvalidSchemaError, match=kind.value):
        await new_registry().register(TOPIC, Schema(kind), S.FULL)


async def test_transitive_strategies_look_at_every_version() -> None:
    """The third goes with the second, not with the first."""
    first = user(field("id", "long"))
    second = user(field("id", "long"), field("extra", "string", default=""))
    third = user(field("id", "long"), field("extra", "string"))
    for strategy, allowed in ((S.BACKWARD, True), (S.BACKWARD_TRANSITIVE, False)):
        registry = new_registry()
        await registry.register(TOPIC, first, strategy)
        await registry.register(TOPIC, second, strategy)
        if allowed:
            assert await registry.register(TOPIC, third, strategy) == 2
        else:
            with pytest.raises(IncompatibleSchemaError, match=r"version 0.*'extra'"):
                await registry.register(TOPIC, third, strategy)


async def test_undefined_is_the_default_strategy() -> None:
    registry = new_registry()
    await registry.register(TOPIC, ID, S.UNDEFINED)
    with pytest.raises(IncompatibleSchemaError, match="FULL"):
        await registry.check(TOPIC, ID_TEXT, S.UNDEFINED)
    await registry.check(TOPIC, ID, S.ALWAYS_INCOMPATIBLE)  # it is there already


async def test_versions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_VERSIONS", 2)
    registry = new_registry()
    await registry.register(TOPIC, ID, S.ALWAYS_COMPATIBLE)
    await registry.register(TOPIC, ID_TEXT, S.ALWAYS_COMPATIBLE)
    with pytest.raises(TooManySchemasError, match="there are 2 versions already"):
        await registry.register(TOPIC, STRING, S.ALWAYS_COMPATIBLE)
    assert await registry.register(TOPIC, ID, S.ALWAYS_COMPATIBLE) == 0
    await registry.delete(TOPIC, force=True)
    assert await registry.register(TOPIC, STRING, S.ALWAYS_COMPATIBLE) == 3


async def test_bytes_of_all_versions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_HISTORY_BYTES", 500)
    registry = new_registry()
    await registry.register(TOPIC, ID, S.FULL)
    await registry.register(TOPIC, ID_NAME, S.FULL)
    with pytest.raises(TooManySchemasError, match=r"2 versions have \d+ bytes"):
        await registry.register(TOPIC, user(field("id", "long", doc="d" * 300), *OPTIONAL), S.FULL)


# Producers and consumers


async def test_producers() -> None:
    registry = new_registry()
    assert await registry.for_producer(TOPIC, None, POLICIES) == NO_VERSION
    assert await registry.for_producer(TOPIC, ID, POLICIES) == bytes(8)
    assert await registry.for_producer(TOPIC, ID_NAME, POLICIES) == encode_version(1)
    assert await registry.for_producer(TOPIC, None, POLICIES) == NO_VERSION
    closed = TopicPolicies(schema_auto_update=False, schema_validation_enforced=True)
    assert await registry.for_producer(TOPIC, ID, closed) == bytes(8)
    with pytest.raises(IncompatibleSchemaError, match="isAllowAutoUpdateSchema"):
        await registry.for_producer(TOPIC, user(), closed)
    with pytest.raises(IncompatibleSchemaError, match="schemaValidationEnforced"):
        await registry.for_producer(TOPIC, None, closed)
    await registry.delete(TOPIC)
    assert await registry.for_producer(TOPIC, None, closed) == NO_VERSION


async def test_consumers() -> None:
    registry = new_registry()
    await registry.for_consumer(TOPIC, None, POLICIES, topic_is_idle=False)
    with pytest.raises(IncompatibleSchemaError, match="its data is bytes"):
        await registry.for_consumer(TOPIC, ID, POLICIES, topic_is_idle=False)
    await registry.for_consumer(TOPIC, ID_NAME, POLICIES, topic_is_idle=True)
    assert (await registry.latest(TOPIC)).schema == ID_NAME
    await registry.for_consumer(TOPIC, ID, POLICIES, topic_is_idle=False)
    with pytest.raises(IncompatibleSchemaError, match="field 'id': the consumer's schema has string, version 0 has long"):
        await registry.for_consumer(TOPIC, ID_TEXT, POLICIES, topic_is_idle=True)
    assert [found.version async for found in registry.versions(TOPIC)] == [0]
    closed = TopicPolicies(schema_auto_update=False)
    with pytest.raises(IncompatibleSchemaError, match="isAllowAutoUpdateSchema"):
        await registry.for_consumer(TopicName.parse("other"), ID, closed, topic_is_idle=True)


async def test_a_consumer_reads_the_latest_or_every_version() -> None:
    registry = new_registry()
    await registry.register(TOPIC, ID, S.ALWAYS_COMPATIBLE)
    await registry.register(TOPIC, user(field("other", "string")), S.ALWAYS_COMPATIBLE)
    reads_the_latest = user(field("other", "string"), field("more", "int", default=0))
    await registry.for_consumer(TOPIC, reads_the_latest, TopicPolicies(schema_compatibility=S.BACKWARD), topic_is_idle=False)
    for strategy in (S.BACKWARD_TRANSITIVE, S.FULL_TRANSITIVE):
        with pytest.raises(IncompatibleSchemaError, match="version 0"):
            await registry.for_consumer(TOPIC, reads_the_latest, TopicPolicies(schema_compatibility=strategy), topic_is_idle=False)


# Deleting


async def test_a_deleted_schema_is_readable_by_number_and_its_number_is_not_used_again() -> None:
    store = MemoryStore(MemoryTree())
    registry = new_registry(store)
    await registry.register(TOPIC, ID, S.FULL)
    assert await registry.delete(TOPIC) == 1
    for gone in (registry.latest(TOPIC), registry.version_of(TOPIC, ID), registry.delete(TOPIC)):
        with pytest.raises(SchemaNotFoundError):
            await gone
    assert (await registry.get(TOPIC, 0)).schema == ID
    assert await registry.register(TOPIC, ID_TEXT, S.FULL) == 2  # compared with nothing: nothing is in force
    assert await registry.delete(TOPIC, force=True) == 3
    with pytest.raises(SchemaNotFoundError):
        await registry.get(TOPIC, 0)
    assert await parts_of(store) == []
    assert await registry.register(TOPIC, ID, S.FULL) == 4


async def test_a_history_goes_with_its_topic_and_stays_while_another_uses_it() -> None:
    store = MemoryStore(MemoryTree())
    registry, topics = new_registry(store), topic_records(store)
    base = TOPIC
    volatile = TopicName.parse("non-persistent://public/default/orders")
    for name in (base, volatile):
        await topics.create(name, TopicRecord(created_at_ms=1, partitions=2))
    await registry.register(base, ID, S.FULL)
    await registry.register(base, large("a"), S.ALWAYS_COMPATIBLE)
    await store.create(keys.schema_part_key(base, "left-by-a-crash", 0), b"")
    await registry.on_topic_deleting(base.partition(1))
    await registry.on_topic_deleting(volatile)
    assert (await registry.get(base, 0)).schema == ID
    await topics.delete(volatile, None)
    await registry.on_topic_deleting(base)
    assert await history_of(store) is None
    assert await parts_of(store) == []
    await registry.on_topic_deleting(base)  # again: an interrupted deletion is repeated


async def test_the_schemas_of_a_namespace_go_with_it() -> None:
    store = MemoryStore(MemoryTree())
    registry = new_registry(store)
    names = [TopicName.parse(f"public/default/{name}") for name in ("a", "b-c", "ü")]
    for name in names:
        await registry.register(name, ID, S.FULL)
    elsewhere = TopicName.parse("public/other/a")
    await registry.register(elsewhere, ID, S.FULL)
    await registry.on_namespace_deleting(NamespaceName("public", "default"))
    for name in names:
        with pytest.raises(SchemaNotFoundError):
            await registry.get(name, 0)
    assert (await registry.latest(elsewhere)).version == 0


# Races

EVOLVING = [user(field("id", "long"), *(field(f"f{n}", "int", default=0) for n in range(count))) for count in range(5)]
CANDIDATES = st.sampled_from([*EVOLVING, ID_TEXT, STRING])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    wanted=st.lists(CANDIDATES, min_size=2, max_size=12),
    strategy=st.sampled_from([S.FULL, S.FULL_TRANSITIVE, S.ALWAYS_COMPATIBLE, S.ALWAYS_INCOMPATIBLE]),
)
def test_registries_that_race_give_one_history(seed: int, wanted: list[Schema], strategy: S) -> None:
    async def main() -> None:
        tree = MemoryTree()
        registries = [new_registry(Interleaving(tree, seed + index)) for index in range(2)]
        work: list[Coroutine[Any, Any, int]] = [
            registries[index % 2].register(TOPIC, schema, strategy) for index, schema in enumerate(wanted)
        ]
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        store = MemoryStore(tree)
        reader = new_registry(store)
        rows = (await history_of(store)).versions
        assert [row.version for row in rows] == list(range(len(rows)))
        assert len({row.content_hash for row in rows}) == len(rows)
        assert len(await parts_of(store)) == len(rows)
        for schema, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, IncompatibleSchemaError), outcome
                assert strategy is not S.ALWAYS_COMPATIBLE
            else:
                assert (await reader.get(TOPIC, outcome)).schema == schema
        if strategy is S.ALWAYS_INCOMPATIBLE:
            assert len(rows) == 1
        if strategy in (S.FULL, S.FULL_TRANSITIVE):  # nothing got past the check: all are of the first one's kind
            assert len({row.type for row in rows}) == 1
            kinds = {(await reader.get(TOPIC, row.version)).schema == ID_TEXT for row in rows}
            assert len(kinds) == 1

    run_async(main())


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), forces=st.lists(st.booleans(), min_size=1, max_size=3), whole=st.booleans())
def test_deletions_that_race_with_large_schemas_leave_nothing_half(seed: int, forces: list[bool], whole: bool) -> None:
    async def main() -> None:
        tree = MemoryTree()
        registries = [new_registry(Interleaving(tree, seed + index)) for index in range(2)]

        deleted: list[int] = []

        async def delete(force: bool) -> None:
            try:
                deleted.append(await registries[1].delete(TOPIC, force=force))
            except SchemaNotFoundError:
                pass

        async def delete_topic() -> None:
            await registries[1].on_topic_deleting(TOPIC)

        await registries[0].register(TOPIC, ID, S.ALWAYS_COMPATIBLE)
        await asyncio.gather(
            *(registries[0].register(TOPIC, large(marker), S.ALWAYS_COMPATIBLE) for marker in ("a", "bb")),
            *(delete(force) for force in forces),
            *([delete_topic()] if whole else []),
        )
        store = MemoryStore(tree)
        history, reader = await history_of(store), new_registry(store)
        rows = history.versions if history else ()
        for row in rows:
            assert (await reader.get(TOPIC, row.version)).version == row.version  # CorruptRecordError if a part is gone
        if not whole:
            assert history.next_version == 3 + len(deleted)
            assert len(set(deleted)) == len(deleted)
            assert len(await parts_of(store)) == sum(row.parts for row in rows)

    run_async(main())
