"""The JSON line of a benchmark: what was asked, the load, the figures, and on what machine they came about."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def print_line(bench: str, *, load: Mapping[str, Any], figures: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The one line on standard output. `figures` are what `bars.toml` speaks of."""
    line = {"bench": bench, **figures, "load": dict(load), "settings": dict(settings), "machine": machine()}
    print(json.dumps(line), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; `values` need not be sorted. NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latency_figures(latencies_s: Sequence[float], prefix: str = "latency_ms") -> dict[str, float]:
    return {
        f"{prefix}_{name}": round(1000 * percentile(latencies_s, share), 3)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
    }


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **_sync_figures(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _sync_figures(rounds: int = 100) -> dict[str, float]:
    """What a durable 4 KiB write costs where the benchmarks' data lies by default: no receipt can be faster."""
    times = []
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), rounds * 4096)
        for index in range(rounds):
            started = time.perf_counter()
            os.pwrite(file.fileno(), os.urandom(4096), index * 4096)
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - started))
    return {"sync_ms_p50": round(percentile(times, 0.5), 3), "sync_ms_p99": round(percentile(times, 0.99), 3)}
