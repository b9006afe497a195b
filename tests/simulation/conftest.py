"""What the rest of the test run has left in memory is no business of the simulator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_worlds_leave() -> Iterator[None]:
    """Garbage is collected after every seed: behind some thousand other tests that took as long as the seed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
