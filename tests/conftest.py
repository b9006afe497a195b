"""Properties run without limits on time: machines that run the tests are shared, and a slow example is no failure.

What could not run for want of Java is said at the end, aloud: an s among thousands of dots is not seen.
"""

from __future__ import annotations

import fcntl
import inspect
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

from tests.installed_wheel import install_wheel
from tests.support import QUICK_JVM, run_async, run_virtual

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # gw0, gw1, …: processes that run tests beside each other
    number = int(os.environ.get("CEPHEID_FIRST_WORKER", "0")) + int(worker.removeprefix("gw"))  # suite.py: runs beside each other
    first = 20_000 + 2_000 * (number % 6)
    os.environ["CEPHEID_FREE_PORTS"] = f"{first}-{first + 1_999}"

for options in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):  # drivers of tests, also in processes of their own
    os.environ.setdefault(options, QUICK_JVM)

settings.register_profile(
    "cepheid",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CEPHEID_FRESH_EXAMPLES" not in os.environ,  # a change is not refused for an example that nobody had seen before
)
settings.load_profile("cepheid")
engine.MAX_SHRINKING_SECONDS = 60
"""Its own limit of 300 s is that of pytest-timeout: a test that failed would be reported as one that hangs, without its example."""

NO_SPARK = "NO SPARK: "
"""Tests of Spark are skipped with a reason that begins so."""


LONG_FILES = (
    "test_demos_run.py",
    "test_dev_commands.py",
    "test_stream_killed.py",
    "test_cluster_master.py",
    "test_brokers_come_and_go.py",
    "test_bookies_lost_for_good.py",
    "test_rolling_restart.py",
    "test_brokers_die.py",
    "test_zookeeper_dies.py",
    "test_producers.py",
    "test_role_processes.py",
    "test_repair_of_processes.py",
    "test_side_by_side.py",
    "test_topics.py",
    "test_cluster_connect.py",
    "test_spark_bad_days.py",
    "test_batch_rows.py",
    "test_coverage.py",
    "test_offload_process.py",
    "test_rendering.py",
)
"""Files with long tests. They begin first: else one process would still be busy with them when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files with long tests to the front; all others keep their order."""
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))


@pytest.fixture(scope="session")
def wheel_bin(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """`bin` of an environment with the wheel of this clone, made once for all processes of a run."""
    if worker_id == "master":  # the only process
        return install_wheel(tmp_path_factory.mktemp("wheel"))
    directory = tmp_path_factory.getbasetemp().parent / "wheel"
    made = directory / "made"
    with (directory.parent / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            directory.mkdir()
            made.write_text(str(install_wheel(directory)))
    return Path(made.read_text())


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on an event loop of its own.

    The loop's time is virtual if the test or its module is marked `virtual_time`. The marker `deadline(seconds)` replaces the time
    limit of `run_async` or `run_virtual`. pytest itself calls all other tests.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    run = run_virtual if pyfuncitem.get_closest_marker("virtual_time") else run_async
    deadline = pyfuncitem.get_closest_marker("deadline")
    run(test(**arguments), *(deadline.args if deadline else ()))
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_SPARK in str(report.longrepr)]
    if skipped:
        why = str(skipped[0].longrepr[2] if isinstance(skipped[0].longrepr, tuple) else skipped[0].longrepr)
        terminalreporter.section("NOT TESTED: SPARK", sep="!", red=True, bold=True)
        terminalreporter.write_line(f"{len(skipped)} tests of Spark did not run. {why.partition(NO_SPARK)[2]}", red=True)
