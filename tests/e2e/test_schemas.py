"""Schemas as users of the official client meet them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import _pulsar
import pulsar
import pytest
from google.protobuf import timestamp_pb2, wrappers_pb2
from pulsar.schema import AvroSchema, Integer, JsonSchema, Long, ProtobufNativeSchema, Record, String, StringSchema

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of, publish


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[pulsar.Client]:
    with client_of(cluster.service_url) as client:
        yield client


def named(name: str, /, **fields: Any) -> type[Record]:
    """Versions of one application's class: the same name, other fields."""
    return type(name, (Record,), fields)


USER = named("User", id=Long(required=True))
USER_WITH_NAME = named("User", id=Long(required=True), name=String(required_default=True))
USER_WITH_TEXT_ID = named("User", id=String(required=True))
USER_WITH_CITY = named("User", id=Long(required=True), city=String(required=True))


def version_of(message: pulsar.Message) -> int:
    return int.from_bytes(message.schema_version().encode("latin-1"), "big")  # eight bytes, given out as text


def admin(cluster: ProcessCluster, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{cluster.admin_url}/admin/v2{path}", data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_records_travel_and_carry_the_version_of_their_schema(client: pulsar.Client, topic: str, kind: Any) -> None:
    consumer = client.subscribe(topic, "s", schema=kind(USER_WITH_NAME), initial_position=EARLIEST)
    producer = client.create_producer(topic, schema=kind(USER_WITH_NAME))
    producer.send(USER_WITH_NAME(id=7, name="seven"))
    message = consumer.receive(TIMEOUT_MS)
    assert (message.value().id, message.value().name) == (7, "seven")
    assert version_of(message) == 0


def test_a_schema_evolves_and_old_consumers_read_new_messages_by_asking_for_their_version(
    client: pulsar.Client, topic: str
) -> None:
    old = client.subscribe(topic, "old", schema=AvroSchema(USER), initial_position=EARLIEST)
    client.create_producer(topic, schema=AvroSchema(USER)).send(USER(id=1))
    client.create_producer(topic, schema=AvroSchema(USER_WITH_NAME)).send(USER_WITH_NAME(id=2, name="two"))
    new = client.subscribe(topic, "new", schema=AvroSchema(USER_WITH_NAME), initial_position=EARLIEST)
    read_by_old = [old.receive(TIMEOUT_MS) for _ in range(2)]
    read_by_new = [new.receive(TIMEOUT_MS) for _ in range(2)]
    assert [version_of(message) for message in read_by_old] == [0, 1]
    assert [message.value().id for message in read_by_old] == [1, 2]
    assert [(message.value().id, message.value().name) for message in read_by_new] == [(1, None), (2, "two")]


def test_an_incompatible_producer_is_refused_at_once_and_told_the_field(
    cluster: ProcessCluster, client: pulsar.Client, topic: str
) -> None:
    client.create_producer(topic, schema=AvroSchema(USER))
    for incompatible in (USER_WITH_TEXT_ID, USER_WITH_CITY):
        with pytest.raises(_pulsar.IncompatibleSchema):
            client.create_producer(topic, schema=AvroSchema(incompatible))
    assert "field 'id': the new schema has string, version 0 has long" in cluster.log_text
    assert client.create_producer(topic, schema=AvroSchema(USER)) is not None


def test_an_incompatible_consumer_is_refused_at_once(client: pulsar.Client, topic: str) -> None:
    client.create_producer(topic, schema=AvroSchema(USER))
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.subscribe(topic, "s", schema=AvroSchema(USER_WITH_TEXT_ID))
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.subscribe(topic, "s", schema=JsonSchema(USER))
    client.subscribe(topic, "s", schema=AvroSchema(USER))


def test_a_consumer_with_a_schema_on_a_topic_of_bytes_is_refused(client: pulsar.Client, topic: str) -> None:
    publish(client, topic, [b"bytes"])
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.subscribe(topic, "s", schema=AvroSchema(USER))


def test_the_first_consumer_of_an_idle_topic_gives_it_its_schema(client: pulsar.Client, topic: str) -> None:
    client.subscribe(topic, "s", schema=AvroSchema(USER))
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=AvroSchema(USER_WITH_TEXT_ID))


def test_strings(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic, schema=StringSchema())
    producer.send("größer")
    consumer = client.subscribe(topic, "s", schema=StringSchema(), initial_position=EARLIEST)
    assert consumer.receive(TIMEOUT_MS).value() == "größer"
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=AvroSchema(USER))


def test_protobuf_messages(client: pulsar.Client, topic: str) -> None:
    schema = ProtobufNativeSchema(timestamp_pb2.Timestamp)
    consumer = client.subscribe(topic, "s", schema=schema, initial_position=EARLIEST)
    client.create_producer(topic, schema=schema).send(timestamp_pb2.Timestamp(seconds=5))
    assert consumer.receive(TIMEOUT_MS).value().seconds == 5
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=ProtobufNativeSchema(wrappers_pb2.Int64Value))


def test_partitions_share_a_schema(client: pulsar.Client, cluster: ProcessCluster, topic: str) -> None:
    assert admin(cluster, "PUT", f"/persistent/public/default/{topic}/partitions", 3)[0] == 204
    client.create_producer(topic, schema=AvroSchema(USER))
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(f"{topic}-partition-2", schema=AvroSchema(USER_WITH_TEXT_ID))
    path = f"/schemas/public/default/{topic}/schemas"
    assert [row["version"] for row in admin(cluster, "GET", path)[1]["getSchemaResponses"]] == [0]
    assert admin(cluster, "DELETE", f"/persistent/public/default/{topic}/partitions?force=true")[0] == 204
    assert admin(cluster, "GET", path)[0] == 404


def test_non_persistent_topics_have_schemas(client: pulsar.Client, topic: str) -> None:
    name = f"non-persistent://public/default/{topic}"
    consumer = client.subscribe(name, "s", schema=JsonSchema(USER))
    client.create_producer(name, schema=JsonSchema(USER)).send(USER(id=1))
    assert consumer.receive(TIMEOUT_MS).value().id == 1
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(name, schema=JsonSchema(USER_WITH_TEXT_ID))


def test_schemas_over_http_lookup(cluster: ProcessCluster, client: pulsar.Client, topic: str) -> None:
    """The client asks the admin API for versions then, and needs `properties` to be there."""
    client.create_producer(topic, schema=AvroSchema(USER)).send(USER(id=1))
    client.create_producer(topic, schema=AvroSchema(USER_WITH_NAME)).send(USER_WITH_NAME(id=2, name="two"))
    with client_of(cluster.admin_url) as over_http:
        consumer = over_http.subscribe(topic, "s", schema=AvroSchema(USER), initial_position=EARLIEST)
        assert [consumer.receive(TIMEOUT_MS).value().id for _ in range(2)] == [1, 2]


def test_a_strategy_is_in_force_at_once(cluster: ProcessCluster, client: pulsar.Client, topic: str) -> None:
    assert admin(cluster, "PUT", "/namespaces/public/evolving", {})[0] in (204, 409)
    name = f"public/evolving/{topic}"
    client.create_producer(name, schema=AvroSchema(USER))
    with pytest.raises(_pulsar.IncompatibleSchema):
        client.create_producer(name, schema=AvroSchema(USER_WITH_TEXT_ID))
    strategy = "/namespaces/public/evolving/schemaCompatibilityStrategy"
    assert admin(cluster, "PUT", strategy, "ALWAYS_COMPATIBLE") == (204, None)  # trap 44: exactly 204
    deadline_tries = 40
    for _ in range(deadline_tries):  # within a second
        try:
            client.create_producer(name, schema=AvroSchema(USER_WITH_TEXT_ID)).close()
            break
        except _pulsar.IncompatibleSchema:
            continue
    else:
        raise AssertionError("the new strategy is not in force")
    assert admin(cluster, "GET", f"/schemas/public/evolving/{topic}/schema")[1]["version"] == 1


def test_a_schema_of_1_mb_works(client: pulsar.Client, topic: str) -> None:
    wide = named("Wide", **{f"field_{number:05d}_{'x' * 40}": Integer() for number in range(8000)})
    schema = AvroSchema(wide)
    assert 800_000 < len(schema.schema_info().schema()) < 1 << 20
    consumer = client.subscribe(topic, "s", schema=schema, initial_position=EARLIEST)
    client.create_producer(topic, schema=schema).send(wide())
    assert version_of(consumer.receive(TIMEOUT_MS)) == 0
