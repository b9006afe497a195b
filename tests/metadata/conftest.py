from __future__ import annotations

from pathlib import Path

import pytest

from tests.metadata.store_harness import HARNESSES, Harness


@pytest.fixture(params=sorted(HARNESSES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """Each contract test runs on every store."""
    return HARNESSES[request.param](tmp_path)
