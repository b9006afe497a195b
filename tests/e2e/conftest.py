"""One cluster for the end-to-end tests of a process, or one broker with a tap for a module; every test has its own topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.tapped_broker import TappedBroker


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(shared_cluster: ProcessCluster) -> Iterator[ProcessCluster]:
    """Shared with other modules: its namespace public/default stays as it is. A module that changes it has a cluster of its own."""
    began = len(shared_cluster.log_text)
    yield shared_cluster
    said = shared_cluster.log_text[began:]
    assert "Traceback" not in said, said[-4000:]


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
