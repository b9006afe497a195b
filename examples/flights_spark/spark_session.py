"""The Spark session of both drivers, with the two settings that make Python tasks cheap (docs/spark.md)."""

from __future__ import annotations

import os
import sys
from typing import Any

CORES = 2


def open_session(name: str) -> Any:
    """Return a SparkSession that runs on this machine and does not show progress."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{CORES}]").appName(name)
    for setting, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.session.timeZone": "UTC",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.worker.reuse": "true",
    }.items():
        builder = builder.config(setting, value)
    return builder.getOrCreate()
