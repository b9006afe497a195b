"""Schemas on the wire: versions in answers, errors in the reply that clients wait for, policies in force at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.policies.topic_policies import SchemaCompatibility, TopicPolicies
from cepheid_broker.schemas import Schema, encode_version, wire_schema
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, subscribe
from tests.schemas.schema_examples import field, key_value, user

ID = user(field("id", "long"))
ID_NAME = user(field("id", "long"), field("name", "string", default=""))
ID_TEXT = user(field("id", "string"))
SHARED = pb.CommandSubscribe.Shared


def wire(schema: Schema) -> pb.Schema:
    return wire_schema("User", schema)


def wire_type(name: str) -> Any:
    return pb.Schema.Type.Value(name)


def bare(kind: int) -> pb.Schema:
    return pb.Schema(name="", schema_data=b"", type=kind)  # type: ignore[arg-type]


async def refused(client: ScriptedClient, body: Any) -> pb.CommandError:
    answer = await client.ask(body, pb.CommandError)
    assert answer.error == int(ServerError.INCOMPATIBLE_SCHEMA)
    return answer


def producer(topic: str, schema: pb.Schema, producer_id: int = 9) -> pb.CommandProducer:
    return pb.CommandProducer(topic=full(topic), producer_id=producer_id, request_id=1, schema=schema)


async def asked(client: ScriptedClient, topic: str, version: bytes | None = None) -> pb.CommandGetSchemaResponse:
    ask = pb.CommandGetSchema(request_id=3, topic=full(topic))
    if version is not None:
        ask.schema_version = version
    answer = await client.ask(ask, pb.CommandGetSchemaResponse)
    assert answer.request_id == 3
    return answer


async def test_producers_get_the_version_and_clients_the_schema_of_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        assert (await client.produce_on("t", 0, schema=wire(ID))).schema_version == bytes(8)
        assert (await client.produce_on("t", 1, schema=wire(ID_NAME))).schema_version == encode_version(1)
        assert (await client.produce_on("t", 2, schema=wire(ID))).schema_version == bytes(8)
        plain = await client.produce_on("t", 3)
        assert plain.HasField("schema_version")
        assert plain.schema_version == b""
        latest = await asked(client, "t")
        assert (latest.schema.name, latest.schema.schema_data, latest.schema_version) == ("t", ID_NAME.data, encode_version(1))
        first = await asked(client, "t", bytes(8))
        assert (first.schema.type, first.schema.schema_data) == (pb.Schema.Avro, ID.data)


@pytest.mark.parametrize(
    ("topic", "version", "code"),
    [
        ("nothing", None, ServerError.TOPIC_NOT_FOUND),
        ("t", encode_version(7), ServerError.TOPIC_NOT_FOUND),
        ("t", encode_version(-1), ServerError.TOPIC_NOT_FOUND),
        ("t", b"", ServerError.INCOMPATIBLE_SCHEMA),
        ("t", b"\0", ServerError.INCOMPATIBLE_SCHEMA),
        ("persistent://a/b/c/d", None, ServerError.NOT_ALLOWED_ERROR),
    ],
)
async def test_a_schema_that_is_not_there_is_told_in_its_own_reply(topic: str, version: bytes | None, code: ServerError) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", schema=wire(ID))
        answer = await asked(client, topic, version)
        assert answer.error_code == int(code)
        assert answer.error_message
        assert not answer.HasField("schema")


async def test_the_empty_version_of_a_topic_without_a_schema_is_the_type_none() -> None:
    """Go asks for it with each message of a `NewBytesSchema`. The latest schema is still none: AUTO_CONSUME relies on that."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await world.create_topic("split", 2)
        for topic in ("t", "split-partition-1"):
            answer = await asked(client, topic, b"")
            assert not answer.HasField("error_code")
            assert answer.schema == pb.Schema(name=topic.removesuffix("-partition-1"), schema_data=b"", type=wire_type("None"))
            assert answer.schema_version == b""
            assert (await asked(client, topic)).error_code == int(ServerError.TOPIC_NOT_FOUND)
        assert (await asked(client, "nothing", b"")).error_code == int(ServerError.TOPIC_NOT_FOUND)


async def test_get_or_create_is_held_to_the_rules_of_producers() -> None:
    async with BrokerWorld() as world, await world.client() as client:

        async def get_or_create(topic: str, schema: pb.Schema) -> pb.CommandGetOrCreateSchemaResponse:
            ask = pb.CommandGetOrCreateSchema(request_id=0, topic=full(topic), schema=schema)
            return await client.ask(ask, pb.CommandGetOrCreateSchemaResponse)

        await client.produce_on("t", schema=wire(ID))
        assert (await get_or_create("t", wire(ID_NAME))).schema_version == encode_version(1)
        none = await get_or_create("t", bare(0))
        assert (none.HasField("error_code"), none.schema_version) == (False, b"")
        refusal = await get_or_create("t", wire(ID_TEXT))
        assert refusal.error_code == int(ServerError.INCOMPATIBLE_SCHEMA)
        assert "field 'id'" in refusal.error_message
        assert (await get_or_create("missing", wire(ID))).error_code == int(ServerError.TOPIC_NOT_FOUND)


async def test_producers_and_consumers_are_refused_with_the_field_and_the_version() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", schema=wire(ID))
        answer = await refused(client, producer("t", wire(ID_TEXT)))
        assert "field 'id': the new schema has string, version 0 has long" in answer.message
        answer = await refused(client, subscribe("t", "s", 0, 1, subType=SHARED, schema=wire(ID_TEXT)))
        assert "field 'id': the consumer's schema has string, version 0 has long" in answer.message
        assert "s" not in world.topic("t").subscriptions, "what is refused leaves no subscription behind"
        malformed = pb.Schema(name="", schema_data=b"{", type=pb.Schema.Json)
        assert "is not JSON" in (await refused(client, producer("t", malformed))).message
        await client.ping()


@pytest.mark.parametrize("kind", [pb.Schema.Type.Value("None"), pb.Schema.AutoConsume])
async def test_who_takes_any_schema_is_not_compared(kind: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", schema=wire(ID))
        await client.subscribe("t", "s", schema=bare(kind))
        await client.produce_on("t", 1, schema=bare(kind))
        await client.subscribe("idle", "s", consumer_id=1, schema=bare(kind))
        assert (await asked(client, "idle")).error_code == int(ServerError.TOPIC_NOT_FOUND)


async def test_only_an_idle_topic_takes_the_schema_of_a_consumer() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("idle", "s", schema=wire(ID))
        assert (await asked(client, "idle")).schema.schema_data == ID.data
        await client.produce_on("producer", 1)
        await client.subscribe("consumer", "s", consumer_id=1)
        await client.produce_on("data", 2)
        await client.publish(1, producer_id=2)
        await client.ask(pb.CommandCloseProducer(producer_id=2, request_id=1), pb.CommandSuccess)
        for topic in ("producer", "consumer", "data"):
            answer = await refused(client, subscribe(topic, "x", 9, 1, subType=SHARED, schema=wire(ID)))
            assert "its data is bytes" in answer.message


async def test_policies_are_read_at_each_connect() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", schema=wire(ID))
        topic = world.topic("t")
        topic.on_policies(replace(TopicPolicies(), schema_auto_update=False, schema_validation_enforced=True))
        await refused(client, producer("t", wire(ID_NAME)))
        await refused(client, pb.CommandProducer(topic=full("t"), producer_id=9, request_id=1))
        await client.produce_on("t", 1, schema=wire(ID))
        topic.on_policies(replace(TopicPolicies(), schema_compatibility=SchemaCompatibility.ALWAYS_COMPATIBLE))
        assert (await client.produce_on("t", 2, schema=wire(ID_TEXT))).schema_version == encode_version(1)


async def test_partitions_share_a_schema_and_a_deleted_topic_forgets_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("p", partitions=2)
        await client.produce_on("p-partition-0", schema=wire(ID))
        await refused(client, producer("p-partition-1", wire(ID_TEXT)))
        assert (await asked(client, "p")).schema.schema_data == ID.data
        await client.produce_on("t", 1, schema=wire(ID))
        await world.broker.topics.delete(world.topic("t").name, force=True)
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 1
        assert (await asked(client, "t")).error_code == int(ServerError.TOPIC_NOT_FOUND)
        await world.broker.topics.delete(world.topic("p-partition-0").name, force=True)
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        assert (await asked(client, "p")).schema.schema_data == ID.data, "the other partition still has it"


async def test_key_value_schemas_keep_their_bytes_and_properties() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        pair = key_value(ID, ID_NAME)
        await client.produce_on("t", schema=wire(pair))
        found = (await asked(client, "t")).schema
        assert (found.type, found.schema_data) == (pb.Schema.KeyValue, pair.data)
        assert {each.key: each.value for each in found.properties} == pair.properties
        answer = await refused(client, producer("t", wire(key_value(ID_TEXT, ID_NAME))))
        assert "field 'key.id'" in answer.message
