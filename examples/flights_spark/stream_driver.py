"""The streaming query of the demo, as a driver process that is killed and restarted on the same checkpoint.

`python -m examples.flights_spark.stream_driver SERVICE_URL TOPIC DIRECTORY BYTES_PER_TRIGGER`

    DIRECTORY/checkpoint        Spark's checkpoint
    DIRECTORY/totals.json       totals per carrier after the last micro-batch; replaced at once, so that it is never half written
    DIRECTORY/progress.jsonl    one line per micro-batch, as Spark reports it
    DIRECTORY/stop              the query ends when this file appears
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from examples.flights_spark.spark_session import open_session

_POLL_S = 0.2


def main(service_url: str, topic: str, directory: Path, bytes_per_trigger: str) -> None:
    spark = open_session("cepheid demo: stream")
    from pyspark.sql import functions as f

    flights = (
        spark.readStream.format("cepheid")
        .option("service.url", service_url)
        .option("topics", topic)
        .option("readMode", "typed")
        .option("startingOffsets", "earliest")
        .option("maxBytesPerTrigger", bytes_per_trigger)
        .load()
    )
    event_id = f.col("event_id")
    totals = flights.groupBy("carrier").agg(
        f.count(f.lit(1)).alias("events"),
        f.sum(event_id).alias("id_sum"),
        f.sum(event_id * event_id).alias("id_square_sum"),
        f.coalesce(f.sum("dep_delay"), f.lit(0)).alias("delay_minutes"),
    )

    def write_totals(frame: Any, batch_id: int) -> None:
        rows = {row["carrier"]: {name: row[name] for name in frame.columns if name != "carrier"} for row in frame.collect()}
        part = directory / "totals.part"
        part.write_text(json.dumps({"batch_id": batch_id, "totals": rows}))
        os.replace(part, directory / "totals.json")

    query = (
        totals.writeStream.outputMode("complete")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .foreachBatch(write_totals)
        .start()
    )
    noted = -1
    while not (directory / "stop").exists():
        query.awaitTermination(_POLL_S)  # raises the error that ended the query
        noted = _note_progress(query, directory / "progress.jsonl", noted)
    query.stop()
    spark.stop()


def _note_progress(query: Any, path: Path, noted: int) -> int:
    """Write the micro-batches after `noted` to `path`; return the id of the last one."""
    for progress in query.recentProgress:
        if progress["batchId"] > noted and progress["numInputRows"]:
            noted = progress["batchId"]
            with path.open("a") as file:
                file.write(json.dumps(json.loads(progress.json)) + "\n")
    return noted


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
