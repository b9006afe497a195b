"""The query of the demo in Spark, as a driver process. The bucket's credentials come from its environment.

`python -m examples.flights_tiered.spark_driver SERVICE_URL TOPIC RESULT`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from examples.flights_spark.batch_driver import mean_delays
from examples.flights_spark.spark_session import open_session


def main(service_url: str, topic: str, result: Path) -> None:
    spark = open_session("cepheid demo: tiered storage")
    reader = spark.read.format("cepheid").option("service.url", service_url).option("topics", topic).option("readMode", "typed")
    flights = reader.load()
    started = time.monotonic()
    events = flights.count()
    delays = [row.asDict() for row in mean_delays(flights).collect()]
    result.write_text(json.dumps({"events": events, "delays": delays, "seconds": time.monotonic() - started}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
