"""Rules about the source itself: ports are the only way to the outside world, cores decide without I/O, imports have no cycle."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.import_graph import cycles, imports_of

pytestmark = pytest.mark.page

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "metadata", "bookie", "tiered_storage", "broker_service", "sdk", "spark_connector")
SIMULATED = {
    "cepheid_ports": "core",
    "cepheid_wire": "core",
    "cepheid_metadata": "metadata",
    "cepheid_rpc": "bookie",
    "cepheid_bookie": "bookie",
    "cepheid_ledger": "bookie",
    "cepheid_recovery": "bookie",
    "cepheid_managed_ledger": "broker_service",
    "cepheid_broker": "broker_service",
}
"""Packages that run in the simulator, and the folder of each."""
FACES = (
    "cepheid_managed_ledger",
    *(
        f"cepheid_broker.{name}"
        for name in ("balancing", "dispatch", "ownership", "policies", "protocol", "publishing", "schemas", "topics")
    ),
)
"""Packages that other product code imports from as a whole, never from their modules."""
CORES = (
    "ack_set", "back_reader", "background_pace", "balance", "balance_memory", "bundle_states", "chunk_owners", "counted_group",
    "cursor_state", "deduplication",
    "delayed_entries", "delivery_counts", "dispatch_failover", "dispatch_key_shared", "dispatch_shared", "effects", "ended_totals",
    "entry_group", "forward_reader", "frames", "holders", "journal_tail",
    "key_owners", "key_places", "ledger_counts", "ledger_list", "ledger_part", "limbo", "loads",
    "chain_edits", "metadata_edits", "non_persistent_dispatch", "offload_plan", "policy_resolution", "position_set",
    "producer_access", "recovery_state", "split_points",
    "striping", "summed_stats", "topic_stats", "tree", "trim", "turns", "unconfirmed",
    "waiting_keys", "writer_state", "zookeeper_requests",
)  # fmt: skip

BANNED_CALLS = {
    "time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "time.sleep", "datetime.now", "datetime.datetime.now",
    "random.random", "random.randint", "random.choice", "random.shuffle", "random.sample", "os.urandom", "uuid.uuid4",
    "secrets.token_hex", "threading.Thread", "concurrent.futures.ThreadPoolExecutor", "asyncio.to_thread", "asyncio.create_task",
    "open", "os.open",
}  # fmt: skip
MAY_CALL = {"cepheid_bookie.disk": {"open", "os.open"}}


@functools.cache
def product() -> Mapping[str, ast.Module]:
    """Every module of the product, parsed once, by its dotted name."""
    parsed = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parsed[".".join(path.relative_to(ROOT / folder).with_suffix("").parts)] = ast.parse(path.read_text())
    return parsed


def simulated() -> Iterator[tuple[str, ast.Module]]:
    """Modules that the simulator runs, without `cepheid_ports`, which gives the real world to all others."""
    for name, tree in product().items():
        if name.split(".")[0] in SIMULATED and not name.startswith("cepheid_ports."):
            yield name, tree


def core_modules() -> dict[str, ast.Module]:
    """The cores by module name; each stem in CORES names exactly one module."""
    found = {name: tree for name, tree in simulated() if name.rpartition(".")[2] in CORES}
    assert sorted(name.rpartition(".")[2] for name in found) == sorted(CORES)
    return found


def test_every_package_has_a_floor_and_is_checked_for_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = {path.parent.name for folder in FOLDERS for path in ROOT.glob(f"{folder}/*/__init__.py")}
    shipped = [path.split("/")[-1] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    floors, *_ = project["tool"]["importlinter"]["contracts"]
    on_floors = [package.strip() for floor in floors["layers"] for package in floor.split("|")]
    for listed in (shipped, on_floors, project["tool"]["importlinter"]["root_packages"]):
        assert sorted(listed) == sorted(there)
    assert sorted(project["tool"]["mypy"]["packages"]) == sorted([*there, "examples"])


def test_the_outside_world_is_reached_through_ports() -> None:
    found = [
        f"{name}:{node.lineno} {called}"
        for name, tree in simulated()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in BANNED_CALLS - MAY_CALL.get(name, set())
    ]
    assert not found


def test_cores_have_no_io_no_clock_and_no_order_by_hash() -> None:
    found = []
    for name, tree in core_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                banned = modules & {"asyncio", "time", "random", "os", "socket", "threading"}
                found += [f"{name}:{node.lineno} imports {module}" for module in sorted(banned)]
            elif isinstance(node, ast.Await | ast.AsyncFunctionDef):
                found.append(f"{name}:{node.lineno} awaits")
            elif isinstance(node, ast.For | ast.comprehension):
                loop = node.iter
                called = ast.unparse(loop.func) if isinstance(loop, ast.Call) else ""
                if isinstance(loop, ast.Set | ast.SetComp) or called in ("set", "frozenset"):
                    found.append(f"{name}:{loop.lineno} iterates over a set")
    assert not found


def test_errors_that_leave_their_package_are_of_one_family() -> None:
    """Classes that derive from Python's exceptions alone are for the package that raises and catches them."""
    plain = {
        (name.split(".")[0], node.name)
        for name, tree in product().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases and all(map(_is_python_error, node.bases)) and node.name != "CepheidError"
    }
    found = []
    for name, tree in product().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                origin = node.module.split(".")[0]
                if name.endswith("__init__") or origin != name.split(".")[0]:
                    taken = [alias.name for alias in node.names if (origin, alias.name) in plain]
                    found += [f"{name}:{node.lineno} imports {error}" for error in taken]
    assert not found


def _is_python_error(base: ast.expr) -> bool:
    kind = getattr(builtins, ast.unparse(base), None)
    return isinstance(kind, type) and issubclass(kind, Exception)


def test_no_import_cycle_not_even_of_types() -> None:
    """Type-only and function-level imports count: a reader's map has them too."""
    assert cycles(imports_of(product())) == []


def exports(face: str) -> set[str]:
    """Names that a face re-exports: some functions are called like their modules."""
    tree = product()[f"{face}.__init__"]
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_packages_with_a_face_are_imported_through_it() -> None:
    found = []
    for name, tree in product().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                modules = [alias.name for alias in node.names if node.module not in FACES or alias.name not in exports(node.module)]
                imported = [node.module, *(f"{node.module}.{name}" for name in modules)]
            else:
                continue
            for module in imported:
                face = next((face for face in FACES if module.startswith(face + ".")), None)
                if face is not None and module in product() and not f"{name}.".startswith(face + "."):
                    found.append(f"{name}:{node.lineno} imports {module} past {face}")
    assert not found


def test_every_folder_of_the_broker_has_a_readme_and_a_face() -> None:
    broker = ROOT / "broker_service/cepheid_broker"
    for folder in (path for path in broker.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert re.match(r'"""', (folder / "__init__.py").read_text()), folder.name
        assert (folder / "README.md").exists(), folder.name
