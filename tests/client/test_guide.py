"""Every block of Python in docs/python.md runs, one after the other, with what the earlier ones defined."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from pathlib import Path

import pytest

from tests.client.conftest import ClusterThread

GUIDE = Path(__file__).parents[2] / "docs/python.md"


async def test_the_guide(cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL))
    assert len(blocks) >= 10
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where dataclasses look for the types of their fields
    for block in blocks:
        code = block.group(1).replace("pulsar://localhost:6650", cluster.url).replace("http://localhost:8080", cluster.admin_url)
        line = text.count("\n", 0, block.start(1))
        compiled = compile("\n" * line + code, str(GUIDE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, module.__dict__)
        if inspect.isawaitable(result):
            await result
