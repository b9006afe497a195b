"""One server per test module: tests use names of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.admin.admin_world import AdminWorld, running_admin


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("admin") / "data") as world:
        yield world
