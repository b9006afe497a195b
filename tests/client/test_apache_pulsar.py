"""The tests of the client, run once more against a real Apache Pulsar, where one is installed (`make pulsar`).

They are those of the other modules of this folder that need no more than a server and its admin API. NOT_HERE says why some of
them are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import cepheid
import cepheid.admin
from tests.apache_pulsar import ApachePulsar, NotInstalledError, installed_home
from tests.client import (
    test_bad_days,
    test_consumer,
    test_encryption,
    test_forks,
    test_interceptors,
    test_official_client,
    test_producer,
    test_schemas,
    test_sync_and_testing,
    test_table_view,
)
from tests.client.conftest import Served

pytestmark = pytest.mark.slow

MODULES = (
    test_bad_days,
    test_consumer,
    test_encryption,
    test_forks,
    test_interceptors,
    test_official_client,
    test_producer,
    test_schemas,
    test_sync_and_testing,
    test_table_view,
)
NOT_HERE = {
    "test_access_modes": "a producer that waited for its turn and is replaced waits again, and is not fenced",
    "test_a_producer_knows_the_version_of_its_broker": "it is Cepheid's",
    "test_a_schema_that_does_not_fit_names_the_field": "the text is the broker's",
    "test_a_topic_that_takes_smaller_messages_than_the_broker_fails_those_alone": "its policies hold a moment after the call",
    "test_after_the_first_failure_of_a_repeatable_producer_nothing_is_stored": "Apache Pulsar stores what was sent after it",
    "test_a_pattern_that_the_broker_refuses_is_followed_too": "the limit is patched; those of other tests here are over its own",
    "test_patterns_are_followed_also_where_brokers_have_no_watchers": "the broker is patched",
}

keys, other_keys = test_encryption.keys, test_encryption.other_keys


class PulsarServer(Served):
    def __init__(self, pulsar: ApachePulsar) -> None:
        self.url = pulsar.url
        self._pulsar = pulsar

    @property
    def admin_url(self) -> str:
        return self._pulsar.admin_url


@pytest.fixture(scope="module")
def cluster() -> Iterator[PulsarServer]:
    try:
        home = installed_home()
    except NotInstalledError as error:
        pytest.skip(str(error))
    with ApachePulsar(home, settings={"acknowledgmentAtBatchIndexLevelEnabled": "true"}) as pulsar:
        yield PulsarServer(pulsar)


async def test_a_schema_that_does_not_fit_is_refused_with_both_versions(cluster: PulsarServer, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=test_bad_days.Order):
        with pytest.raises(cepheid.SchemaError, match=r'(?s)"Renamed".*"number".*"Order".*"id"'):
            await client.producer(topic, schema=test_bad_days.Renamed)


async def test_topics_of_the_admin_client(cluster: PulsarServer, topic: str) -> None:
    async with cepheid.admin.connect(cluster.admin_url) as admin:
        await admin.topics.create_partitioned(topic, 2)
        await admin.subscriptions.create(f"{topic}-partition-0", "billing", cepheid.EARLIEST)
        assert [name.rpartition("/")[2] for name in await admin.namespaces.topics("public/default") if topic in name] == [
            f"{topic}-partition-0",
            f"{topic}-partition-1",
        ]
        assert "billing" in (await admin.topics.stats(f"{topic}-partition-0"))["subscriptions"]


for _module in MODULES:
    for _name, _test in vars(_module).items():
        is_test = _name.startswith("test_") and callable(_test) and "cluster" in inspect.signature(_test).parameters
        if is_test and _name not in NOT_HERE:
            assert _name not in globals(), f"two tests are called {_name}"
            globals()[_name] = _test
