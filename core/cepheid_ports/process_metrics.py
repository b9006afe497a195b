"""Metrics of the process itself: memory, processor time, open files."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator

from cepheid_ports.prometheus import Family, counter, gauge

_PROC = "/proc/self"  # not a disk: the kernel answers from memory, so reading it in the loop does not block


def process_families() -> Iterator[Family]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield gauge("process_resident_memory_bytes", "Resident memory.", resident_bytes())
    yield counter("process_cpu_seconds_total", "Processor time, user and system.", usage.ru_utime + usage.ru_stime)
    if os.path.isdir(f"{_PROC}/fd"):
        yield gauge("process_open_fds", "Open file descriptors.", len(os.listdir(f"{_PROC}/fd")))
    yield counter(
        "cepheid_process_gc_collections_total",
        "Full collections of the garbage collector; each stops the process for some milliseconds.",
        gc.get_stats()[2]["collections"],
    )


def resident_bytes() -> int:
    """Current resident memory on Linux; elsewhere its maximum so far."""
    try:
        with open(f"{_PROC}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere (getrusage(2))
