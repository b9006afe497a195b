"""Permissions with the official client: denied, granted, revoked, and cut off from metadata."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar
import pytest

from cepheid_metadata import NamespacePermissions, change_permissions
from cepheid_security import token_keys
from cepheid_security.tokens import create_token
from cepheid_testkit import StandaloneCluster
from cepheid_wire import NamespaceName
from tests.e2e.official_client import EARLIEST, client_of, publish, receive
from tests.support import wait_until


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "token.key"
    path.write_bytes(b"k" * 64)
    return path


def demanding(key: Path) -> StandaloneCluster:
    return StandaloneCluster(
        authentication={"methods": ["token"], "secret_keys": [str(key)]},
        authorization={"enabled": True, "super_user_roles": ["root"]},
    )


@contextmanager
def client_as(role: str, cluster: StandaloneCluster, key: Path) -> Iterator[Any]:
    token = create_token(token_keys.secret_key(str(key)), role, time.time_ns() // 1_000_000)
    with client_of(cluster.service_url, authentication=pulsar.AuthenticationToken(token)) as client:
        yield client


async def permit(cluster: StandaloneCluster, **permissions: Any) -> None:
    """Change the permissions, and return when they are in force: the broker reads them after it was notified."""
    record = NamespacePermissions.model_validate(permissions)
    await change_permissions(cluster.standalone.broker.store, "public", "default", lambda _: record)
    authorizer = cluster.standalone.broker.authorizer
    assert authorizer is not None
    if (known := authorizer._namespaces.get(NamespaceName("public", "default"))) is not None:
        watched = known.permissions
        assert watched is not None
        await wait_until(lambda: watched.record == record, what="the new permissions")


async def test_a_client_may_do_what_it_was_granted_and_nothing_else(key: Path) -> None:
    async with demanding(key) as cluster:

        def denied() -> None:
            with client_as("app", cluster, key) as client:
                with pytest.raises(pulsar.AuthorizationError):
                    client.create_producer("orders")
                with pytest.raises(pulsar.AuthorizationError):
                    client.subscribe("orders", "s")

        def works() -> None:
            with client_as("app", cluster, key) as client:
                publish(client, "orders", [b"1", b"2"])
                consumer = client.subscribe("orders", "s", initial_position=EARLIEST)
                assert [message.data() for message in receive(consumer, 2)] == [b"1", b"2"]
                with pytest.raises(pulsar.AuthorizationError):
                    client.create_producer("other")
                with pytest.raises(pulsar.AuthorizationError):
                    client.subscribe("orders", "reserved")

        def root_works() -> None:
            with client_as("root", cluster, key) as client:
                publish(client, "other", [b"1"])

        await cluster.blocking(denied)
        topic = {"persistent://public/default/orders": {"app": ("produce", "consume")}}
        await permit(cluster, topics=topic, subscriptions={"reserved": ("somebody",)})
        await cluster.blocking(works)
        await cluster.blocking(root_works)


async def test_a_pattern_matches_only_topics_that_the_client_may_use(key: Path) -> None:
    async with demanding(key) as cluster:

        def fill() -> None:
            with client_as("root", cluster, key) as client:
                for topic in ("p-mine", "p-secret"):
                    publish(client, topic, [topic.encode()])

        def read() -> list[bytes]:
            with client_as("app", cluster, key) as client:
                consumer = client.subscribe(re.compile("persistent://public/default/p-.*"), "s", initial_position=EARLIEST)
                found = [message.data() for message in receive(consumer, 1)]
                with pytest.raises(pulsar.Timeout):
                    consumer.receive(500)
                return found

        await cluster.blocking(fill)
        await permit(cluster, topics={"persistent://public/default/p-mine": {"app": ("consume",)}})
        assert await cluster.blocking(read) == [b"p-mine"]


async def test_a_revoked_producer_is_closed_and_publishes_nothing_more(key: Path) -> None:
    async with demanding(key) as cluster:
        opened: list[Any] = []

        def open_producer() -> None:
            token = create_token(token_keys.secret_key(str(key)), "app", time.time_ns() // 1_000_000)
            client = pulsar.Client(cluster.service_url, authentication=pulsar.AuthenticationToken(token))
            client.create_producer("orders").send(b"before")
            impatient = client.create_producer("orders", send_timeout_millis=2_000)  # it tries again for so long
            opened.extend((client, impatient))

        def send_after() -> None:
            client, impatient = opened
            with pytest.raises(pulsar.Timeout):
                impatient.send(b"after")
            client.close()

        def stored() -> list[bytes]:
            with client_as("root", cluster, key) as client:
                reader = client.create_reader("orders", pulsar.MessageId.earliest)
                found = []
                while reader.has_message_available():
                    found.append(reader.read_next(30_000).data())
                return found

        await permit(cluster, namespace={"app": ("produce",)})
        await cluster.blocking(open_producer)
        (topic,) = cluster.standalone.broker.topics.loaded()
        assert len(topic.producers) == 2
        await permit(cluster)
        await wait_until(lambda: not topic.producers)
        await cluster.blocking(send_after)
        assert await cluster.blocking(stored) == [b"before"]
