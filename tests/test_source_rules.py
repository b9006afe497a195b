"""Rules that the simulator rests on, checked on the source: ports are the only way to threads, files, time and chance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cepheid_ports": "sdk",
    "cepheid_wire": "sdk",
    "cepheid_metadata": "metadata",
    "cepheid_rpc": "bookie",
    "cepheid_bookie": "bookie",
    "cepheid_ledger": "bookie",
    "cepheid_broker": "broker_service",
}
WORLD = ROOT / "sdk/cepheid_ports"  # gives the real world to all others
CORES = (
    "writer_state", "recovery_state", "ack_set", "ledger_list", "ledger_counts", "ledger_part", "trim", "dispatch",
    "dispatch_failover", "dispatch_shared", "dispatch_key_shared", "non_persistent_dispatch", "producer_access", "summed_stats",
    "topic_stats",
)  # fmt: skip

BANNED_CALLS = {
    "time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "time.sleep", "datetime.now", "datetime.datetime.now",
    "random.random", "random.randint", "random.choice", "random.shuffle", "random.sample", "os.urandom", "uuid.uuid4",
    "secrets.token_hex", "threading.Thread", "concurrent.futures.ThreadPoolExecutor", "asyncio.to_thread", "asyncio.create_task",
}  # fmt: skip
EXCEPTIONS = {
    ("cepheid_bookie/disk.py", "open"),
}


def sources() -> list[Path]:
    found = [path for name, folder in PACKAGES.items() for path in sorted((ROOT / folder / name).rglob("*.py"))]
    return [path for path in found if WORLD not in path.parents and not path.name.endswith("_pb2.py")]


def calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_there_is_something_to_check() -> None:
    names = {path.stem for path in sources()}
    assert set(CORES) <= names
    assert len(names) > 100


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_the_outside_world_is_reached_through_ports(path: Path) -> None:
    place = "/".join(path.parts[-3:] if path.parts[-2] in ("admin", "managed_ledger") else path.parts[-2:])
    found = [f"{place}:{line} {name}" for line, name in calls(path) if name in BANNED_CALLS]
    if (place, "open") not in EXCEPTIONS:
        found += [f"{place}:{line} {name}" for line, name in calls(path) if name in ("open", "os.open")]
    assert not found


@pytest.mark.parametrize("core", CORES)
def test_cores_have_no_io_no_clock_and_no_order_by_hash(core: str) -> None:
    (path,) = [path for path in sources() if path.stem == core]
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not imported & {"asyncio", "time", "random", "os", "socket", "threading"}, imported
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]
    loops = [node.iter for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    sets = [loop for loop in loops if isinstance(loop, ast.Set | ast.SetComp)]
    sets += [loop for loop in loops if isinstance(loop, ast.Call) and ast.unparse(loop.func) in ("set", "frozenset")]
    assert not [loop.lineno for loop in sets]
