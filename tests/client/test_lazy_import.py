"""`import cepheid` loads what is used, and type checkers see the same names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cepheid


def test_each_name_comes_from_where_type_checkers_see_it() -> None:
    tree = ast.parse(Path(cepheid.__file__).read_text())
    seen = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == cepheid._HOME_OF
    assert set(cepheid.__all__) == set(seen)
    assert all(getattr(cepheid, name) is not None for name in cepheid.__all__)


MANY = """
import asyncio, sys
before = set(sys.modules)
%s
print(*sorted(set(sys.modules) - before))
"""


def loaded_by(code: str) -> set[str]:
    """Return the modules that the code imports beyond those of asyncio, in an interpreter of its own."""
    ran = subprocess.run([sys.executable, "-c", MANY % code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import cepheid", 5),
        ("import cepheid; cepheid.connect", 145),
        ("import cepheid.admin.sync", 130),
        ("import cepheid_cli.app", 225),  # and what `cepheid topics list` does
    ],
)
def test_few_modules_are_imported(code: str, limit: int) -> None:
    """The limits are what there is and a few more. Each module costs about half a millisecond when a program starts."""
    loaded = loaded_by(code)
    needed_later = {"crc32c", "cryptography", "cramjam", "fastavro", "rich", "pydantic", "urllib.request", "importlib.metadata"}
    assert not loaded & needed_later
    assert len(loaded) <= limit, f"{len(loaded)}: {sorted(loaded)}"


def test_an_admin_script_does_not_load_the_client() -> None:
    assert "cepheid.client" not in loaded_by("import cepheid.admin.sync")
