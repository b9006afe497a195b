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
import pulsar
import pulsar.schema
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


def _public_names_of_the_official_client() -> set[str]:
    """Return the names of its classes, their methods, and the arguments of those. Not of Pulsar Functions: their classes alone."""
    names: set[str] = set()
    for module in (pulsar, pulsar.schema):
        for name, thing in vars(module).items():
            is_its_own = inspect.isclass(thing) and thing.__module__.partition(".")[0] in ("pulsar", "_pulsar")
            if not is_its_own or name.startswith("_"):
                continue
            names.add(name)
            if thing.__module__.startswith("pulsar.functions") or module is pulsar.schema or issubclass(thing, Exception):
                continue
            if not thing.__module__.startswith("pulsar") or "Info" in name or "Policy" in name or "EncryptionKey" in name:
                continue
            for method, call in [("__init__", thing.__init__), *vars(thing).items()]:
                if isinstance(call, staticmethod):
                    call = call.__func__
                if not inspect.isfunction(call) or (method.startswith("_") and method != "__init__"):
                    continue
                names |= {method} - {"__init__"}
                if name in ("Client", "Producer", "Consumer", "Reader"):
                    names |= set(inspect.signature(call).parameters)
    return names - {"self", "args", "kwargs", "cls"}


@pytest.mark.page
def test_the_migration_table_has_all_of_the_official_client() -> None:
    section = _text_of("python-recipes.md").partition("## From pulsar-client")[2]
    written = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", section))))
    assert sorted(_public_names_of_the_official_client() - written) == []


@pytest.mark.page
def test_the_migration_table_names_what_there_is() -> None:
    section = _text_of("python-recipes.md").partition("## From pulsar-client")[2]
    named = set(re.findall(r"`cepheid\.(\w+)", section)) | set(
        re.findall(r"\b[A-Z]\w+Error\b", section.partition("| not there")[0])
    )
    theirs = _public_names_of_the_official_client()
    assert {name for name in named - theirs if not hasattr(cepheid, name)} <= {"admin", "sync"}


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
