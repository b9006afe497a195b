from __future__ import annotations

from pathlib import Path

import pytest

from tests.metadata.store_harness import HARNESSES, MemoryHarness, RocksHarness


@pytest.fixture(params=sorted(HARNESSES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryHarness | RocksHarness:
    """Each contract test runs on every store."""
    made: MemoryHarness | RocksHarness = HARNESSES[request.param](tmp_path)
    return made
