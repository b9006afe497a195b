"""Every block of Python in the pages about the client runs, one after the other, with what the earlier ones defined."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import signal
import sys
import types
from pathlib import Path

import httpx
import pytest

import cepheid
from tests.client.conftest import ClusterThread
from tests.support import wait_until

DOCS = Path(__file__).parents[2] / "docs"


def _text_of(page: str) -> str:
    return (DOCS / page).read_text()


async def _run_blocks(page: str, cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return the module that they were run in."""
    text = _text_of(page)
    blocks = list(re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL))
    assert blocks
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where dataclasses look for the types of their fields
    for block in blocks:
        code = block.group(1).replace("pulsar://localhost:6650", cluster.url).replace("http://localhost:8080", cluster.admin_url)
        line = text.count("\n", 0, block.start(1))
        compiled = compile("\n" * line + code, str(DOCS / page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, module.__dict__)
        if inspect.isawaitable(result):
            await result
    return module


async def test_the_guide(cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch) -> None:
    await _run_blocks("python.md", cluster, monkeypatch)


async def test_the_recipes(cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = await _run_blocks("python-recipes.md", cluster, monkeypatch)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer("jobs") as producer:
            await producer.send(b"job")
        working = asyncio.create_task(recipes.main())
        stats_path = "persistent/public/default/jobs/stats"
        await wait_until(
            lambda: cluster.admin("GET", stats_path)["subscriptions"].get("workers", {}).get("msgBacklog") == 0,
            what="the job is done",
        )
        os.kill(os.getpid(), signal.SIGTERM)
        await working
        async with (
            recipes.lifespan(recipes.app),
            httpx.AsyncClient(transport=httpx.ASGITransport(recipes.app), base_url="http://web") as web,
        ):
            answer = await web.post("/orders/ann", content=b"order")
        async with client.reader("web-orders") as reader:
            message = await reader.read(timeout=30)
        assert (answer.status_code, message.data, message.key) == (201, b"order", "ann")
        assert answer.json() == {"stored_at": str(message.message_id)}
