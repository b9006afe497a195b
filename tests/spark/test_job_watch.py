"""`JobWatch` of `cepheid demo-spark`, which kills a bookie in the middle of a Spark job."""

from __future__ import annotations

from pyspark.sql import SparkSession

from examples.flights_spark.batch_driver import JobWatch


def test_a_job_watch_counts_tasks(spark: SparkSession) -> None:
    watch = JobWatch(spark, 0.25, lambda: None)
    watch.run(lambda: spark.range(0, 64, 1, 64).rdd.count())
    _, _, tasks = watch.summary()["acted_at"]
    assert tasks == 64
    assert 16 <= watch.finished[-1][1] <= 64  # Spark counts finished tasks in a thread of its own, which may be late at the end
