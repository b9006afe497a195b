"""Waiting in the demos: it lasts as long as something moves, and no longer."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from examples.progress import DemoStalledError, wait_while_moving


def test_a_wait_goes_on_while_progress_changes_and_looks_once_more_at_the_end() -> None:
    looks, started = count(), time.monotonic()
    last = -1

    def progress() -> int:
        nonlocal last
        last = next(looks)
        return last

    wait_while_moving(lambda: last >= 8, progress, stall_s=0.2, logs=Path())
    assert time.monotonic() - started > 0.2, "it was longer than a stall may be"
    assert last == 9


def test_a_wait_without_progress_ends_with_an_error_that_names_the_logs() -> None:
    with pytest.raises(DemoStalledError, match="nothing moved for 0 s at 7: see the logs in /logs"):
        wait_while_moving(lambda: False, lambda: 7, stall_s=0.0, logs=Path("/logs"))
