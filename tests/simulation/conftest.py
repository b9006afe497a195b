"""What the tests of this folder share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_worlds_leave() -> Iterator[None]:
    """Garbage is collected after every seed. With all the objects that thousands of other tests have left in memory, that would
    take as long as the seed itself."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
