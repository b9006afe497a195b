"""Partition metadata, lookup, topics of a namespace: what is created, what is refused, and in which reply."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_broker.settings import TopicCreation
from cepheid_broker.topics.topic_watches import topics_hash
from cepheid_metadata import StoreUnavailableError
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full

FAILED = pb.CommandPartitionedTopicMetadataResponse.Failed


async def partitions(client: ScriptedClient, topic: str, **fields: Any) -> pb.CommandPartitionedTopicMetadataResponse:
    ask = pb.CommandPartitionedTopicMetadata(topic=topic, request_id=client.request_id(), **fields)
    answer = await client.ask(ask, pb.CommandPartitionedTopicMetadataResponse)
    assert answer.request_id == ask.request_id
    return answer


async def test_trap_10_a_new_topic_is_created_and_has_no_partitions() -> None:
    """Success with 0, never TopicNotFound, also for a name that looks like a partition."""
    async with BrokerWorld() as world, await world.client() as client:
        for topic in (full("t"), full("t"), full("t-partition-3")):
            answer = await partitions(client, topic)
            assert (answer.response, answer.partitions) == (pb.CommandPartitionedTopicMetadataResponse.Success, 0)
            assert answer.HasField("response")
            assert answer.HasField("partitions")


async def test_partitioned_topics_are_created_when_the_broker_says_so() -> None:
    creation = TopicCreation(topic_type="partitioned", partitions=3)
    async with BrokerWorld(topic_creation=creation) as world, await world.client() as client:
        assert (await partitions(client, full("t"))).partitions == 3
        assert (await partitions(client, full("t-partition-2"))).partitions == 0
        await client.produce_on("t-partition-2")
        refused = await client.ask(pb.CommandProducer(topic=full("t"), producer_id=1, request_id=9), pb.CommandError)
        assert (refused.error, refused.request_id) == (ServerError.NOT_ALLOWED_ERROR, 9)
        assert "partitions" in refused.message


@pytest.mark.parametrize("asks_not_to_create", [True, False])
async def test_a_missing_topic_is_not_found_when_it_may_not_be_created(asks_not_to_create: bool) -> None:
    creation = TopicCreation(allowed=asks_not_to_create)
    async with BrokerWorld(topic_creation=creation) as world, await world.client() as client:
        answer = await partitions(client, full("t"), metadata_auto_creation_enabled=not asks_not_to_create)
        assert (answer.response, answer.error) == (FAILED, ServerError.TOPIC_NOT_FOUND)
        if asks_not_to_create:
            return
        refused = await client.ask(pb.CommandProducer(topic=full("t"), producer_id=1, request_id=9), pb.CommandError)
        assert refused.error == ServerError.TOPIC_NOT_FOUND
        assert "topic_creation" in refused.message, "says what to do"
        client.send(pb.CommandSubscribe(topic=full("t"), subscription="s", subType=0, consumer_id=1, request_id=10))
        assert (await client.expect(pb.CommandError)).error == ServerError.TOPIC_NOT_FOUND
        await client.expect_nothing()  # a code that fails at once needs no CLOSE_CONSUMER


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://public/default/",
        "nonsense://a/b/c",
        "a/b",
        "persistent://a/b/c/d/e",
        "persistent://public/def ault/x",
        "",
        "..",
    ],
)
async def test_trap_11_invalid_names_fail_at_once_in_the_reply_of_each_command(topic: str) -> None:
    """An ERROR would be ignored by C++ and cost its whole timeout. NotAllowed, since code 17 is retried (§24)."""
    async with BrokerWorld() as world, await world.client() as client:
        answer = await partitions(client, topic)
        assert (answer.response, answer.error) == (FAILED, ServerError.NOT_ALLOWED_ERROR)
        assert answer.message
        looked_up = await client.ask(pb.CommandLookupTopic(topic=topic, request_id=5), pb.CommandLookupTopicResponse)
        assert (looked_up.response, looked_up.error) == (pb.CommandLookupTopicResponse.Failed, ServerError.NOT_ALLOWED_ERROR)
        client.send(pb.CommandProducer(topic=topic, producer_id=0, request_id=6))
        assert (await client.expect(pb.CommandError)).error == ServerError.NOT_ALLOWED_ERROR
        client.send(pb.CommandSubscribe(topic=topic, subscription="s", subType=0, consumer_id=0, request_id=7))
        assert (await client.expect(pb.CommandError)).error == ServerError.NOT_ALLOWED_ERROR


async def test_an_unknown_namespace_is_refused_and_both_domains_are_known() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        answer = await partitions(client, "persistent://public/nowhere/t")
        assert (answer.response, answer.error) == (FAILED, ServerError.TOPIC_NOT_FOUND)
        assert "namespace public/nowhere does not exist" in answer.message
        answer = await partitions(client, "non-persistent://public/default/t")
        assert (answer.response, answer.partitions) == (pb.CommandPartitionedTopicMetadataResponse.Success, 0)


async def test_trap_13_a_lookup_that_has_to_wait_has_the_words_that_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ closes its connection on ServiceNotReady here, unless the text has one of the words that it knows."""
    async with BrokerWorld() as world, await world.client() as client:

        async def unavailable(*_: object, **__: object) -> int:
            raise StoreUnavailableError("planted")

        monkeypatch.setattr(world.broker.catalog, "partitions_or_create", unavailable)
        answer = await partitions(client, full("t"))
        assert (answer.response, answer.error) == (FAILED, ServerError.SERVICE_NOT_READY)
        assert "Failed to acquire ownership" in answer.message


async def test_a_lookup_leads_to_this_broker_itself() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        for topic in (full("t"), "t", "public/default/t"):
            answer = await client.ask(pb.CommandLookupTopic(topic=topic, request_id=3), pb.CommandLookupTopicResponse)
            assert (answer.response, answer.request_id) == (pb.CommandLookupTopicResponse.Connect, 3)
            assert answer.authoritative
            assert answer.brokerServiceUrl == f"pulsar://127.0.0.1:{world.port}"
            assert not answer.proxy_through_service_url


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"advertised_host": "broker.example", "advertised_port": 7000}, "pulsar://broker.example:7000"),
        ({"host": "0.0.0.0"}, "pulsar://127.0.0.1:{port}"),  # the address that the client reached
    ],
)
async def test_trap_12_the_advertised_address_is_what_clients_can_reach(settings: dict[str, Any], url: str) -> None:
    async with BrokerWorld(**settings) as world, await world.client() as client:
        answer = await client.ask(pb.CommandLookupTopic(topic="t", request_id=3), pb.CommandLookupTopicResponse)
        assert answer.brokerServiceUrl == url.format(port=world.port)


async def test_trap_35_topics_of_a_namespace_are_listed_with_each_partition() -> None:
    """The client strips the suffix itself."""
    async with BrokerWorld() as world, await world.client() as client:
        await partitions(client, full("b"))
        await world.create_topic("a", 2)
        ask = pb.CommandGetTopicsOfNamespace(request_id=4, namespace="public/default")
        answer = await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)
        assert list(answer.topics) == [full("a-partition-0"), full("a-partition-1"), full("b")]
        assert answer.changed
        assert not answer.filtered
        ask.topics_hash = answer.topics_hash
        again = await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)
        assert (list(again.topics), again.changed) == ([], False)
        ask.namespace = "public"
        assert (await client.ask(ask, pb.CommandError)).request_id == 4


@pytest.mark.parametrize("namespace", ["public/nowhere", "nobody/default"])
async def test_a_namespace_that_does_not_exist_has_no_topics(namespace: str) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        for mode in pb.CommandGetTopicsOfNamespace.Mode.values():
            ask = pb.CommandGetTopicsOfNamespace(request_id=4, namespace=namespace, mode=mode)
            answer = await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)
            assert (list(answer.topics), answer.topics_hash, answer.changed) == ([], topics_hash([]), True)


def test_the_hash_of_a_topic_list_is_that_of_the_reference() -> None:
    assert topics_hash(["foo"]) == "1daec4cf"  # protocol.md §21
    assert topics_hash(["b", "a"]) == topics_hash(["a", "b"])


async def test_a_listener_that_is_not_there_is_refused_at_once() -> None:
    """The client's own test suite expects it (protocol.md §7.2): the address of another listener may be out of its reach."""
    async with BrokerWorld() as world, await world.client() as client:
        ask = pb.CommandLookupTopic(topic="t", request_id=3, advertised_listener_name="inner")
        answer = await client.ask(ask, pb.CommandLookupTopicResponse)
        assert (answer.response, answer.error) == (pb.CommandLookupTopicResponse.Failed, ServerError.NOT_ALLOWED_ERROR)
        assert "no listener 'inner'" in answer.message
        ask.advertised_listener_name = ""  # C++ always sets it
        assert (await client.ask(ask, pb.CommandLookupTopicResponse)).response == pb.CommandLookupTopicResponse.Connect
