"""Permissions on the binary port: the table of commands, denials and their answers, changes, proxies, lists, outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from cepheid_broker.admin.broker_metrics import broker_families
from cepheid_broker.peer import Peer
from cepheid_broker.protocol import connection as connection_module
from cepheid_broker.protocol.access import COMMAND_NEEDS, REFUSED_COMMANDS
from cepheid_broker.protocol.connection import Connection
from cepheid_broker.protocol.connection_unserved import UnservedCommands
from cepheid_broker.topics.topic_watches import TopicWatch
from cepheid_metadata import NamespaceRecord, namespace_permissions, namespace_records, tenant_records
from cepheid_security import Need, Principal
from cepheid_security.revocations import RevokedTokens
from cepheid_wire import CommandType, ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, subscribe
from tests.support import wait_until

TOPIC = full("orders")
ON = {"enabled": True, "super_user_roles": ["root"], "proxy_roles": ["proxy"], "stale_s": 300.0}
WRITER = {"namespace": {"writer": ("produce",)}}
READER = {"namespace": {"reader": ("consume",)}}
BOTH = {"namespace": {"writer": ("produce",), "reader": ("consume",)}}


def world_of(**authorization: Any) -> BrokerWorld:
    return BrokerWorld(authorization={**ON, **authorization})


def error_of(answer: Any) -> ServerError:
    """The code, in whichever field this kind of answer has it."""
    field = "error_code" if hasattr(answer, "error_code") else "error"
    return ServerError(getattr(answer, field))


def producer(topic: str, request_id: int = 0, **fields: Any) -> pb.CommandProducer:
    return pb.CommandProducer(topic=topic, producer_id=0, request_id=request_id, **fields)


# The table


async def test_each_command_that_is_served_has_a_row_and_no_row_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "COMMAND_NEEDS", frozenset(CommandType))  # so that what has no row shows
    async with BrokerWorld() as world, await world.client():
        (connection,) = world.broker._listener.connections
        assert isinstance(connection, Connection)
        served = {*connection._table, CommandType.SEND, CommandType.PING}  # these two have no entry in the table of methods
    assert served == set(COMMAND_NEEDS)


def test_a_command_that_is_served_has_a_need_of_its_own() -> None:
    assert set(UnservedCommands(cast(Peer, None)).table) == set(REFUSED_COMMANDS)


ASKS: dict[CommandType, Callable[[], Message]] = {
    CommandType.PARTITIONED_METADATA: lambda: pb.CommandPartitionedTopicMetadata(topic=TOPIC, request_id=0),
    CommandType.LOOKUP: lambda: pb.CommandLookupTopic(topic=TOPIC, request_id=0),
    CommandType.GET_TOPICS_OF_NAMESPACE: lambda: pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=0),
    CommandType.WATCH_TOPIC_LIST: lambda: pb.CommandWatchTopicList(
        namespace="public/default", topics_pattern=".*", request_id=0, watcher_id=0
    ),
    CommandType.GET_SCHEMA: lambda: pb.CommandGetSchema(topic=TOPIC, request_id=0),
    CommandType.GET_OR_CREATE_SCHEMA: lambda: pb.CommandGetOrCreateSchema(
        topic=TOPIC, request_id=0, schema=pb.Schema(name="", schema_data=b"", type=pb.Schema.String)
    ),
    CommandType.PRODUCER: lambda: producer(TOPIC),
    CommandType.SUBSCRIBE: lambda: subscribe(TOPIC, "s", 0, 0, subType=pb.CommandSubscribe.Exclusive),
}
"""A request of each command whose need is a permission."""


@pytest.mark.parametrize("command", [kind for kind, need in COMMAND_NEEDS.items() if need is not Need.AUTHENTICATED])
async def test_a_role_without_permissions_is_denied_each_command_that_needs_one(command: CommandType) -> None:
    if COMMAND_NEEDS[command] is Need.NOBODY_IN_PARTICULAR:
        return
    async with world_of() as world, await world.client("stranger") as client:
        await world.create_topic("orders")
        client.send(ASKS[command]())
        answer = await client.receive_body()
        assert error_of(answer) is ServerError.AUTHORIZATION_ERROR, answer
        assert answer.request_id == 0
        ((role, operation, _, result),) = world.audit.lines
        assert (role, operation, result) == ("stranger", command.name, "denied")
        await client.ping()  # the connection lives
        families = {family.name: family for family in broker_families(world.broker)}
        assert families["cepheid_broker_authorization_denied_total"].samples[0].value == 1


# Grants


async def test_a_grant_lets_a_client_in_and_its_end_closes_what_is_open() -> None:
    async with world_of() as world, await world.client("writer") as writer, await world.client("reader") as reader:
        await world.permit(**BOTH)
        await writer.produce_on("orders")
        await reader.subscribe("orders", "s", permits=10)
        await writer.publish(1)
        await reader.expect_message()
        await world.permit(**READER)
        closed = await writer.expect(pb.CommandCloseProducer)
        assert closed.producer_id == 0
        writer.send_message(1)  # on its way when it was closed: dropped, and the connection lives
        await writer.ping()
        assert error_of(await writer.ask(producer(TOPIC), pb.CommandError)) is ServerError.AUTHORIZATION_ERROR
        await world.permit(**WRITER)
        await reader.expect(pb.CommandCloseConsumer)
        await writer.produce_on("orders")
        await writer.publish(1, first_sequence_id=2)


async def test_a_role_may_only_do_what_it_was_granted() -> None:
    async with world_of() as world, await world.client("writer") as writer, await world.client("reader") as reader:
        await world.permit(**BOTH)
        refused = await writer.ask(subscribe(TOPIC, "s", 0, 0, subType=pb.CommandSubscribe.Exclusive), pb.CommandError)
        assert (error_of(refused), "consume" in refused.message) == (ServerError.AUTHORIZATION_ERROR, True)
        refused = await reader.ask(producer(TOPIC), pb.CommandError)
        assert (error_of(refused), "produce" in refused.message) == (ServerError.AUTHORIZATION_ERROR, True)
        # A dead-letter topic is created with its subscription: that needs consume as well.
        refused = await writer.ask(producer(TOPIC, initial_subscription_name="dlq"), pb.CommandError)
        assert error_of(refused) is ServerError.AUTHORIZATION_ERROR
        assert list(world.broker.topics.loaded()) == []  # nothing was opened or created for them
        assert await world.broker.catalog.partitions(TopicName.parse(TOPIC)) is None


async def test_a_grant_on_a_partitioned_topic_covers_its_partitions_and_nothing_else() -> None:
    async with world_of() as world, await world.client("one") as client:
        await world.create_topic("orders", 2)
        await world.permit(topics={TOPIC: {"one": ("produce", "consume")}})
        await client.produce_on("orders-partition-1")
        ask = pb.CommandPartitionedTopicMetadata(topic=TOPIC, request_id=1)
        assert (await client.ask(ask, pb.CommandPartitionedTopicMetadataResponse)).partitions == 2
        for other in ("orders2", "orders-partition-01", "non-persistent://public/default/orders"):
            refused = await client.ask(pb.CommandProducer(topic=full(other), producer_id=1, request_id=2), pb.CommandError)
            assert error_of(refused) is ServerError.AUTHORIZATION_ERROR, other


async def test_a_grant_on_a_topic_does_not_create_partitions_that_it_does_not_have() -> None:
    async with world_of() as world, await world.client("one") as client:
        await world.create_topic("orders", 2)
        await world.permit(topics={TOPIC: {"one": ("produce", "consume")}}, namespace={"two": ("produce",)})
        for name in ("orders-partition-2", "orders-partition-2147483647"):
            missing = TopicName.parse(name)
            for ask in (
                producer(full(name)),
                subscribe(full(name), "s", 0, 0, subType=pb.CommandSubscribe.Exclusive),
                pb.CommandPartitionedTopicMetadata(topic=full(name), request_id=0),
            ):
                client.send(ask)
                refused = await client.receive_body()
                assert error_of(refused) is ServerError.TOPIC_NOT_FOUND, refused
                assert "has no grant on the namespace" in refused.message
            assert await world.broker.catalog.partitions(missing) is None
        async with await world.client("two") as other:
            await other.produce_on("orders-partition-2")


async def test_administrators_of_the_tenant_may_do_everything_in_it_until_they_are_none() -> None:
    async with world_of() as world, await world.client("admin") as client:
        tenants = tenant_records(world.store)
        found = await tenants.get("public")
        assert found is not None
        await tenants.replace("public", found.record.replace(admin_roles=("admin",)), found.version)
        await client.produce_on("orders")
        await tenants.replace("public", found.record, found.version + 1)
        await client.expect(pb.CommandCloseProducer)


async def test_permissions_end_with_their_namespace() -> None:
    async with world_of() as world, await world.client("writer") as client:
        await world.permit(**WRITER)
        await client.produce_on("orders")
        await namespace_permissions(world.store).delete(("public", "default"), None)
        await client.expect(pb.CommandCloseProducer)


@pytest.mark.parametrize(
    "topic", ["persistent://public/../orders", "persistent://public/default/../x/y", "persistent://public/default\n/x"]
)
async def test_a_name_that_tries_to_leave_its_namespace_is_refused(topic: str) -> None:
    async with world_of() as world, await world.client("writer") as client:
        await world.permit(**WRITER)
        assert error_of(await client.ask(producer(topic), pb.CommandError)) is ServerError.NOT_ALLOWED_ERROR


@pytest.mark.parametrize("topic", ["persistent://public/default/%2E%2E%2Fother%2Fx", "persistent://public/default/..%2fother"])
async def test_a_name_is_never_decoded_and_stays_in_its_namespace(topic: str) -> None:
    async with world_of() as world, await world.client("writer") as client:
        await namespace_records(world.store).create(("public", "other"), NamespaceRecord())
        await world.permit("other", **WRITER)
        assert error_of(await client.ask(producer(topic), pb.CommandError)) is ServerError.AUTHORIZATION_ERROR


# Proxies


@pytest.mark.parametrize(
    ("role", "original", "reason"),
    [
        ("writer", "root", "not one of authorization.proxy_roles"),
        ("proxy", "", "must name an original principal"),
        ("proxy", "proxy", "is one of authorization.proxy_roles itself"),
    ],
)
async def test_only_a_proxy_may_speak_for_somebody_else(role: str, original: str, reason: str) -> None:
    async with world_of() as world, await world.client(handshake=False) as client:
        connect = pb.CommandConnect(client_version="x", auth_method_name="token", auth_data=role.encode())
        if original:
            connect.original_principal = original
        refused = await client.ask(connect, pb.CommandError)
        assert error_of(refused) is ServerError.AUTHORIZATION_ERROR
        assert reason in refused.message
        await client.expect_closed()


async def test_a_proxy_needs_the_permission_and_so_does_whom_it_speaks_for() -> None:
    async with world_of() as world, await world.client("proxy", original_principal="writer") as client:
        for granted in ({"writer": ("produce",)}, {"proxy": ("produce",)}):
            await world.permit(namespace=granted)
            assert error_of(await client.ask(producer(TOPIC), pb.CommandError)) is ServerError.AUTHORIZATION_ERROR
        await world.permit(namespace={"writer": ("produce",), "proxy": ("produce",)})
        await client.produce_on("orders")


async def test_a_role_whose_tokens_were_revoked_loses_what_it_has_behind_a_proxy() -> None:
    async with world_of() as world, await world.client("proxy", original_principal="writer") as client:
        await world.permit(namespace={"writer": ("produce",), "proxy": ("produce",)})
        await client.produce_on("orders")
        assert world.broker._authenticator is not None
        world.broker._authenticator.revoked = RevokedTokens(roles={"writer": 1})
        world.broker.end_revoked()
        await client.expect_closed()
        async with await world.client(handshake=False) as again:
            connect = pb.CommandConnect(client_version="x", auth_method_name="token", auth_data=b"proxy")
            connect.original_principal = "writer"
            refused = await again.ask(connect, pb.CommandError)
            assert error_of(refused) is ServerError.AUTHENTICATION_ERROR
            assert "behind a proxy old ones cannot be told from new ones" in refused.message


async def test_what_is_not_enforced_yet_is_logged_and_done(caplog: pytest.LogCaptureFixture) -> None:
    async with world_of(enforced=False) as world, await world.client("stranger") as client:
        await client.produce_on("orders")
        assert world.broker.authorizer is not None
        assert world.broker.authorizer.denied == 0
        judged = await world.broker.authorizer.judge(Principal("stranger", "test"), Need.PRODUCE, topic=TopicName.parse(TOPIC))
        assert not judged.allowed
    told = [vars(record) for record in caplog.records if record.message == "authorization.would_deny"]
    assert {(line["role"], line["what"], line["where"]) for line in told} >= {("stranger", "produce", TOPIC)}


# Lists


async def names_of(client: ScriptedClient) -> list[str]:
    ask = pb.CommandGetTopicsOfNamespace(request_id=0, namespace="public/default")
    return list((await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)).topics)


async def test_lists_of_topics_hold_only_what_the_role_may_use() -> None:
    async with world_of() as world, await world.client("one") as one, await world.client("root") as root:
        await world.permit(topics={TOPIC: {"one": ("consume",)}})
        await world.create_topic("orders", 2)
        await world.create_topic("secret")
        partitions = [f"{TOPIC}-partition-{index}" for index in range(2)]
        assert await names_of(one) == partitions
        assert await names_of(root) == [*partitions, full("secret")]


async def test_a_watcher_learns_of_what_its_role_may_use_when_that_changes() -> None:
    async with world_of() as world, await world.client("one") as client:
        await world.create_topic("orders")
        await world.create_topic("other")
        await world.permit(topics={TOPIC: {"one": ("consume",)}})
        ask = pb.CommandWatchTopicList(namespace="public/default", topics_pattern=".*", request_id=0, watcher_id=0)
        assert list((await client.ask(ask, pb.CommandWatchTopicListSuccess)).topic) == [TOPIC]
        await world.permit(topics={full("other"): {"one": ("consume",)}})
        update = await client.expect(pb.CommandWatchTopicUpdate)
        assert (list(update.new_topics), list(update.deleted_topics)) == ([full("other")], [TOPIC])
        await world.create_topic("secret")
        await client.expect_nothing()


async def test_watchers_are_looked_at_one_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, looked_at, loop = 0, [], asyncio.get_running_loop()

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if len(looked_at) < 3:
            loop.call_soon(count_turn)

    def look_again(watch: TopicWatch) -> None:
        looked_at.append(turn)

    monkeypatch.setattr(TopicWatch, "look_again", look_again)
    async with world_of() as world, await world.client("one") as client:
        await world.permit(topics={TOPIC: {"one": ("consume",)}})
        for number in range(3):
            ask = pb.CommandWatchTopicList(namespace="public/default", topics_pattern=".*", request_id=0, watcher_id=number)
            await client.ask(ask, pb.CommandWatchTopicListSuccess)
        count_turn()
        await world.permit(topics={TOPIC: {"one": ("consume", "produce")}})
        await wait_until(lambda: len(looked_at) == 3)
        assert len(set(looked_at)) == 3


# Outages


async def test_known_permissions_hold_for_a_while_without_metadata_and_come_back_with_it() -> None:
    async with world_of(stale_s=0.5) as world, await world.client("writer") as client, await world.client("root") as root:
        await world.permit(**WRITER)
        await client.produce_on("orders")
        await root.produce_on("roots")
        world.store.set_away(True)
        await client.publish(1)
        await client.expect(pb.CommandCloseProducer)
        refused = await client.ask(producer(TOPIC), pb.CommandError)
        assert error_of(refused) is ServerError.SERVICE_NOT_READY  # retried, also at another broker
        assert "authorization.stale_s" in refused.message
        await root.publish(1)  # super-users need no records
        world.store.set_away(False)
        while True:
            client.send(producer(TOPIC))
            if isinstance(await client.receive_body(), pb.CommandProducerSuccess):
                break


async def test_a_revocation_during_an_outage_is_in_force_when_it_ends() -> None:
    async with world_of() as world, await world.client("writer") as client:
        await world.permit(**WRITER)
        await client.produce_on("orders")
        world.store.set_away(True)
        await client.publish(1)
        world.store.away = False  # another broker's client reaches metadata, while this broker does not know yet
        await world.permit(**READER)
        world.store.set_away(False)
        await client.expect(pb.CommandCloseProducer)
