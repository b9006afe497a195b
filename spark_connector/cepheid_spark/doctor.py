"""`doctor(spark)`: will this Spark read topics well? Says what is wrong, and which settings to change.

settings        of the session: what costs milliseconds per task, what gives wrong rows
workers         their Python, pyarrow, grpc and this package: a missing one ends a worker with no useful word
bookies         whether every worker reaches each of them (when options say where the cluster is)

Only DataFrames are used, so it works over Connect too.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cepheid_ports import CepheidError
from cepheid_spark.versions import is_enough

if TYPE_CHECKING:
    import pyarrow as pa

PROBES = 8
"""Tasks that look around: on a larger cluster not every worker is seen."""
REACH_TIMEOUT_S = 3.0
_SETTINGS = (  # name, wanted, default, why
    ("spark.python.unix.domain.socket.enabled", "true", "false", "each Python task is about 40 ms shorter"),
    ("spark.python.worker.reuse", "true", "true", "channels to bookies live as long as a worker"),
    ("spark.sql.python.filterPushdown.enabled", "false", "false", "pushed filters leak into later queries on the same DataFrame"),
    ("spark.speculation", "false", "false", "two attempts of one task would write at once (sinks)"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`is_good` None: something to know, neither right nor wrong."""

    what: str
    is_good: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "BAD ", None: "    "}[self.is_good]
        return f"{mark} {self.what}: {self.text}"


def doctor(spark: Any, options: Mapping[str, str] | None = None) -> list[Finding]:
    """Prints what it finds and returns it. With the `options` of a read it also looks for the cluster and its bookies."""
    findings = [_check_version(spark), *(_check_setting(spark, *setting) for setting in _SETTINGS)]
    bookies: Mapping[str, str] = {}
    if options is not None:
        finding, bookies = _find_bookies(options)
        findings.append(finding)
    findings += _check_workers(spark, bookies)
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    return findings


def _check_version(spark: Any) -> Finding:
    good = is_enough(spark.version)
    return Finding("Spark", good, spark.version if good else f"{spark.version}: install 4.2 or newer")


def _check_setting(spark: Any, name: str, wanted: str, default: str, why: str) -> Finding:
    value = str(spark.conf.get(name, default)).lower()
    return Finding(name, value == wanted, value if value == wanted else f"is {value}, set it to {wanted}: {why}")


def _find_bookies(options: Mapping[str, str]) -> tuple[Finding, Mapping[str, str]]:
    """From this process: over Connect the server may see another network, which the workers' findings tell."""
    from cepheid_scan.planner import open_planner
    from cepheid_spark.options import parse_options

    try:
        parsed = parse_options(options, streaming=True)
        with closing(open_planner(parsed.source)) as planner:
            plan = planner.plan(planner.topics(parsed.topics))
    except CepheidError as error:
        return Finding("cluster", False, str(error)), {}
    ledgers = sum(len(topic.ledgers) for topic in plan.topics)
    return Finding("cluster", True, f"{len(plan.topics)} topics, {ledgers} ledgers, {len(plan.bookies)} bookies"), plan.bookies


def _check_workers(spark: Any, bookies: Mapping[str, str]) -> list[Finding]:
    addresses = dict(bookies)

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from cepheid_spark.doctor import look_around

        yield from look_around(batches, addresses)

    try:
        rows = spark.range(0, PROBES, 1, PROBES).mapInArrow(look, "found string").distinct().collect()
    except Exception as error:
        # Whatever Spark wraps a dead worker in: the last lines of its text say what happened there.
        last = [line.strip() for line in str(error).splitlines() if "Error" in line][:3]
        text = "; ".join(last) or type(error).__name__
        return [Finding("workers", False, f"{text} (are cepheid[spark] and pyarrow installed in the workers' PYSPARK_PYTHON?)")]
    return [finding for row in rows for finding in _judge_worker(json.loads(row["found"]), bool(bookies))]


def _judge_worker(found: Mapping[str, Any], asked_bookies: bool) -> list[Finding]:
    host, here = found["host"], platform.python_version()
    same = found["python"].split(".")[:2] == here.split(".")[:2]
    python = f"Python {found['python']}" + ("" if same else f", and {here} here: they must be of one minor version")
    findings = [Finding(f"worker on {host}", same, python)]
    for module, version in found["modules"].items():
        findings.append(
            Finding(f"worker on {host}", version is not None, f"{module} {version or 'is missing: install cepheid[spark]'}")
        )
    for bookie, error in found["unreachable"].items():
        findings.append(Finding(f"worker on {host}", False, f"does not reach bookie {bookie}: {error}"))
    if asked_bookies and not found["unreachable"]:
        findings.append(Finding(f"worker on {host}", True, "reaches every bookie"))
    return findings


def look_around(batches: Iterator[pa.RecordBatch], bookies: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """Runs in a worker: one row of JSON."""
    import importlib.metadata
    import socket

    import pyarrow as pa

    for _ in batches:  # Spark wants its input read
        pass
    modules: dict[str, str | None] = {}
    for name in ("cepheid", "pyarrow", "numpy", "grpcio"):
        try:
            modules[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            modules[name] = None
    unreachable: dict[str, str] = {}
    for bookie, place in bookies.items():
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
        except OSError as error:
            unreachable[f"{bookie} at {place}"] = str(error)
    found = {"host": socket.gethostname(), "python": platform.python_version(), "modules": modules, "unreachable": unreachable}
    yield pa.RecordBatch.from_pydict({"found": [json.dumps(found)]})
