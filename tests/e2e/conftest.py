"""One cluster as a process for all end-to-end tests of a module; every test has its own topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cepheid_testkit import ProcessCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name = request.node.name
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)
