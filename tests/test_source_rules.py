"""Rules that the simulator rests on, checked on the source: ports are the only way to threads, files, time and chance."""

from __future__ import annotations

import ast
import tomllib
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
    "ack_set", "back_reader", "bundle_states", "chunk_owners", "counted_group", "cursor_state", "deduplication", "delayed_entries",
    "delivery_counts", "dispatch", "dispatch_failover", "dispatch_key_shared", "dispatch_shared", "ended_totals", "entry_group",
    "forward_reader", "frames", "holders", "key_owners", "key_places", "ledger_counts", "ledger_list", "ledger_part", "limbo",
    "metadata_edits", "non_persistent_dispatch", "policy_resolution", "position_set", "producer_access", "recovery_state",
    "striping", "summed_stats", "topic_stats", "tree", "trim", "turns", "unconfirmed", "waiting_keys", "writer_state",
    "zookeeper_requests",
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


def test_every_package_has_a_floor_and_is_checked_for_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = {
        path.parent.name
        for folder in ("sdk", "metadata", "bookie", "broker_service", "spark_connector")
        for path in ROOT.glob(f"{folder}/*/__init__.py")
    }
    shipped = [path.split("/")[-1] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    (contract,) = project["tool"]["importlinter"]["contracts"]
    on_floors = [package.strip() for floor in contract["layers"] for package in floor.split("|")]
    for listed in (shipped, on_floors, project["tool"]["importlinter"]["root_packages"], project["tool"]["mypy"]["packages"]):
        assert sorted(listed) == sorted(there)


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
    sets: list[ast.expr] = [loop for loop in loops if isinstance(loop, ast.Set | ast.SetComp)]
    sets += [loop for loop in loops if isinstance(loop, ast.Call) and ast.unparse(loop.func) in ("set", "frozenset")]
    assert not [loop.lineno for loop in sets]
