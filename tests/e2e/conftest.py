"""One cluster, or one broker with a tap, for all end-to-end tests of a module; every test has its own topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.tapped_broker import TappedBroker


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name = request.node.name
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)


@pytest.fixture(scope="module")
def tapped() -> Iterator[TappedBroker]:
    with TappedBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def small() -> Iterator[TappedBroker]:
    """Its largest message has 64 KiB. The client takes the limit for all producers of the process, until it connects elsewhere."""
    with TappedBroker(max_message_bytes=64 << 10) as broker:
        yield broker
