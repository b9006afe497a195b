"""A client of a Spark Connect server that has PySpark and nothing of this project: its import is refused. For tests.

python connect_client.py CONNECT_URL SERVICE_URL TOPIC CHECKPOINT
"""

from __future__ import annotations

import json
import sys
from typing import Any


class Refuse:
    """Finds nothing of ours, as on a machine where only 'pyspark[connect]' is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0].startswith(("cepheid", "pyspark_cepheid")):
            raise ModuleNotFoundError(f"not on this machine: {name}", name=name)


def main(connect_url: str, service_url: str, topic: str, checkpoint: str) -> None:
    sys.meta_path.insert(0, Refuse())  # type: ignore[arg-type]
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(connect_url).getOrCreate()
    options = {"service.url": service_url, "topics": topic}
    batch = spark.read.format("cepheid").options(**options).load()
    found: dict[str, Any] = {"batch": sorted(int(row.value) for row in batch.select("value").collect())}
    stream = spark.readStream.format("cepheid").options(**options, startingOffsets="earliest", maxEntriesPerTrigger="200").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(600)
    progress = query.recentProgress
    found["stream"] = sum(one.numInputRows for one in progress)
    found["batches"] = sum(one.numInputRows > 0 for one in progress)
    found["lag"] = json.loads(progress[-1].sources[0].latestOffset)["lagEntries"]
    try:
        spark.read.format("cepheid").options(**options, readMod="entries").load().count()
    except Exception as error:
        found["typo"] = str(error)
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
