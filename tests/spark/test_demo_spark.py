"""`cepheid demo-spark` on a few of the flights: every promise holds, in processes that are really killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cepheid_cli.demo_spark.batch_driver import JobWatch
from cepheid_spark.java_check import NoJavaError, find_java


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_spark_demo_on_a_part_of_the_flights(tmp_path: Path) -> None:
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    # Not a whole number of ledgers, of two full batches each: the open one is to have entries.
    command = [sys.executable, "-m", "cepheid_cli", "demo-spark", "--events", "6250", "--data", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"│ (yes|NO) ", done.stdout) == ["yes"] * 10, done.stdout
    assert sorted(path.name for path in (tmp_path / "demo").glob("*.png")) == ["delays.png", "scan.png", "stream.png"]


def test_the_picture_of_a_scan_ends_with_all_of_its_tasks(spark: SparkSession) -> None:
    watch = JobWatch(spark, 0.25, lambda: None)
    watch.run(lambda: spark.range(0, 64, 1, 64).rdd.count())
    _, _, tasks = watch.told()["acted_at"]
    assert (tasks, watch.finished[-1][1]) == (64, 64)
