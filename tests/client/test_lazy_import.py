"""`import cepheid` loads what is used, and type checkers see the same names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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


def test_an_admin_script_does_not_load_the_client() -> None:
    heavy = ("cepheid.client", "urllib.request", "cryptography")
    code = f"import sys, cepheid.admin.sync; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
