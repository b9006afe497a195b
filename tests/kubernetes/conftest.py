"""These tests need a running node: `make test-kubernetes`. Without it the folder is not collected."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.places import HOME, RunningNode, running_node

collect_ignore_glob = [] if os.environ.get("CEPHEID_KUBERNETES") else ["test_*.py"]
FIGURES: dict[str, object] = {}
"""What was measured, for the lines at the end and for docs/kubernetes.md."""


@pytest.fixture(scope="session")
def node() -> RunningNode:
    found = running_node()
    if found is None:
        pytest.fail("no node is running: python -m tests.kubernetes up")
    return found


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, object]]:
    yield FIGURES
    if FIGURES:
        Path(HOME / "figures.json").write_text(json.dumps(FIGURES, indent=2))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("figures")
        for name, value in FIGURES.items():
            terminalreporter.write_line(f"{name:<40} {value}")
