"""The eye on the log: a defect that the code under test caught and only told fails the run, an everyday failure does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.checks.history import History
from tests.simulation.world.log_watch import LogWatch
from tests.simulation.world.virtual_loop import VirtualLoop

log = logging.getLogger("cepheid_test")


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize("defect", [TypeError("an unexpected keyword"), AssertionError(), KeyError(3)])
def test_a_defect_that_the_code_only_told_of_fails_the_run(defect: Exception, loop: VirtualLoop) -> None:
    with LogWatch(History(loop), loop):
        log.warning("read.failed", extra={"ledger_id": 7, "error": repr(defect)})
    assert f"read.failed: {defect!r}" in str(loop.failure)


def test_the_first_defect_is_the_one_that_is_told(loop: VirtualLoop) -> None:
    with LogWatch(History(loop), loop):
        log.error("first", extra={"error": repr(TypeError())})
        log.error("second", extra={"error": repr(KeyError())})
    assert str(loop.failure) == "first: TypeError()"


@pytest.mark.parametrize(
    "told", [repr(ConnectionResetError()), repr(TimeoutError()), "BookieUnavailableError()", "disk full", "", 7, None]
)
def test_what_faults_bring_about_fails_nothing(told: object, loop: VirtualLoop) -> None:
    with LogWatch(History(loop), loop):
        log.warning("append.failed", extra={"error": told})
        log.warning("no error field")
    assert loop.failure is None
