"""One cluster for all chaos tests of a session, whole before each of them."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.integration.chaos_cluster import ChaosCluster, SharedCluster

ROUNDS = int(os.environ.get("CEPHEID_CHAOS_ROUNDS", "1"))
HERE = Path(__file__).parent
TEST_LIMIT_S = 600


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_round" in metafunc.fixturenames:
        metafunc.parametrize("chaos_round", range(ROUNDS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A busy machine takes longer to start processes than other tests may take; what has a bound here says so itself."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster()
    try:
        yield shared
    finally:
        shared.drop(keep=False)


@pytest.fixture
def chaos(shared_cluster: SharedCluster, request: pytest.FixtureRequest, chaos_round: int) -> Iterator[ChaosCluster]:
    """A whole cluster; whole again after the test, or gone."""
    cluster = shared_cluster.get()
    yield cluster
    if request.node.stash.get(FAILED, False):
        shared_cluster.drop(keep=True)
        return
    try:
        cluster.heal()
    except BaseException:
        shared_cluster.drop(keep=True)
        raise


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report
