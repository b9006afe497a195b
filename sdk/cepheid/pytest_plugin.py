"""Fixtures for tests that need a cluster. In conftest.py: `pytest_plugins = ["cepheid.pytest_plugin"]`.

They need cepheid[server]. A cluster runs in its own thread, beside the event loops of the tests.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

from cepheid.testing import Cluster


@pytest.fixture(scope="session")
def cepheid_cluster() -> Iterator[Cluster]:
    """A cluster for all tests of the session: use separate topics in each test (`cepheid_topic`)."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cepheid_new_cluster() -> Iterator[Cluster]:
    """A cluster for one test, for example to restart it."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cepheid_topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses."""
    test = re.sub(r"[^-\w]+", "-", request.node.name, flags=re.ASCII).strip("-")
    return f"{test}-{uuid.uuid4().hex[:8]}"
