"""A Spark driver of its own, to be killed: a streaming query that writes each batch's numbers to a file of the batch's name.

python -m tests.spark.stream_driver SERVICE_URL TOPIC DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

SLICE_ENTRIES = 300


def main(service_url: str, topic: str, directory: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "512m")
    spark = builder.config("spark.python.unix.domain.socket.enabled", "true").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def keep(batch: DataFrame, number: int) -> None:
        rows = [int(row.value) for row in batch.collect()]
        unfinished = directory / f"unfinished-{number}"
        unfinished.write_text(json.dumps(rows))
        unfinished.rename(directory / f"batch-{number}")

    reader = spark.readStream.format("cepheid").option("service.url", service_url).option("topics", topic)
    frame = reader.option("maxEntriesPerTrigger", SLICE_ENTRIES).option("chunkLookback", 0).schema("value binary").load()
    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(directory / "checkpoint"))
    writer.start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
