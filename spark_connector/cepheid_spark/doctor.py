"""`doctor(spark)`: checks whether this Spark can read topics well, and which settings to change.

settings        of the session: those that cost milliseconds per task, or cause wrong rows
neighbours      installed modules pyspark_…: one that fails to import disables every Python source
workers         their Python, pyarrow, grpc and this package: a missing one ends a worker without a useful message
bookies         whether every worker reaches each of them (if options name the cluster)

It uses only a DataFrame, so it also works over Connect.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from cepheid_ports import CepheidError
from cepheid_spark.versions import is_enough

_SETTINGS = (  # name, wanted, default, why
    ("spark.python.unix.domain.socket.enabled", "true", "false", "each Python task is about 40 ms shorter"),
    ("spark.python.worker.reuse", "true", "true", "channels to bookies live as long as a worker"),
    ("spark.sql.python.filterPushdown.enabled", "false", "false", "pushed filters leak into later queries on the same DataFrame"),
    ("spark.speculation", "false", "false", "two attempts of one task would write at once (sinks)"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A result. `is_good` None: information, neither right nor wrong."""

    what: str
    is_good: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "BAD ", None: "    "}[self.is_good]
        return f"{mark} {self.what}: {self.text}"


def doctor(spark: Any, options: Mapping[str, str] | None = None) -> list[Finding]:
    """Print the findings and return them. With the `options` of a read, also check the cluster and its bookies."""
    findings = [_check_version(spark), *(_check_setting(spark, *setting) for setting in _SETTINGS), *_check_neighbours()]
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


def _check_neighbours() -> list[Finding]:
    """Check modules of this process; over Connect those of the server matter."""
    findings: list[Finding] = []
    for name in sorted(module.name for module in pkgutil.iter_modules() if module.name.startswith("pyspark_")):
        try:
            importlib.import_module(name)
        except Exception as error:
            why = f"fails to import ({type(error).__name__}: {error}): Spark then finds no Python source; repair or uninstall it"
            findings.append(Finding(f"module {name}", False, why))
    return findings


def _find_bookies(options: Mapping[str, str]) -> tuple[Finding, Mapping[str, str]]:
    """Find bookies from this process; over Connect the server may see another network, as the workers' findings show."""
    from cepheid_scan.open_planner import open_planner
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
    """Check workers with our own source, on the path of a read; mapInArrow would need pandas, which a read does not."""
    from cepheid_spark.doctor_source import DoctorSource

    try:
        spark.dataSource.register(DoctorSource)
        rows = spark.read.format(DoctorSource.name()).option("bookies", json.dumps(dict(bookies))).load().distinct().collect()
    except Exception as error:
        text = _named_errors(str(error)) or type(error).__name__
        return [Finding("workers", False, f"{text} (are cepheid[spark] and pyarrow installed in the workers' PYSPARK_PYTHON?)")]
    return [finding for row in rows for finding in _judge_worker(json.loads(row["found"]), bool(bookies))]


def _named_errors(text: str) -> str:
    """Return the last lines that name an error, without Java's frames, from the text in which Spark wraps a dead worker."""
    lines = (line.strip(" \t:") for line in text.splitlines())
    return "; ".join([line for line in lines if not line.startswith("at ") and ("Error" in line or "Exception" in line)][-2:])


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
    for bookie, reason in found["by_grpc"].items():
        findings.append(Finding(f"worker on {host}", None, f"reads {bookie} by gRPC, which costs more: {reason}"))
    return findings
