"""A Spark driver of its own, to be killed: a streaming query from one topic to another, exactly once, over a shuffle.

python -m tests.spark.sink_driver SERVICE_URL SOURCE TARGET DIRECTORY [once]

With `once` it writes what there is, and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

ENTRIES_A_BATCH = 2


def main(service_url: str, source: str, target: str, directory: Path, *, once: bool) -> None:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "512m")
    spark = builder.config("spark.python.unix.domain.socket.enabled", "true").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    reader = spark.readStream.format("cepheid").option("service.url", service_url).option("topic", source)
    stream = reader.option("startingOffsets", "earliest").option("maxEntriesPerTrigger", ENTRIES_A_BATCH).load()
    writer = stream.select("key", "value").repartition(2).writeStream.format("cepheid").option("service.url", service_url)
    writer = writer.option("topic", target).option("checkpointLocation", str(directory / "checkpoint"))
    (writer.trigger(availableNow=True) if once else writer).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), once="once" in sys.argv[5:])
