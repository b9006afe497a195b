"""A Spark driver that scans a topic again and again while it is told to: the other side of `spark_beside_publish`.

Standard input: `go` and `stop`, one a line. Standard output: `ready`; for each `stop`, once the scan that runs is over, one JSON
line: {"scans", "rows", "seconds"}.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

from benchmarks.scheduling import CLASSES, enter_class
from benchmarks.spark_bench import add_spark_arguments, discard, frame, open_session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("topic")
    parser.add_argument("--until", help="position before which the scans end, so that each reads the same")
    parser.add_argument("--scheduling", choices=CLASSES, default="normal")
    add_spark_arguments(parser)
    arguments = parser.parse_args()
    enter_class(arguments.scheduling)  # before Spark's JVM and workers are started, which inherit it
    spark = open_session(arguments.spark_cores, arguments.java_options)
    options = {"endingOffsets": json.dumps({arguments.topic: arguments.until})} if arguments.until else {}
    rows = frame(spark, arguments.url, arguments.topic, **options).count()
    print("ready", flush=True)
    running = threading.Event()
    ended = threading.Event()
    scanning = threading.Lock()
    told: list[float] = []

    def scan() -> None:
        while not ended.is_set():
            if not running.wait(0.05):
                continue
            with scanning:
                if running.is_set():
                    started = time.perf_counter()
                    discard(frame(spark, arguments.url, arguments.topic, **options))
                    told.append(time.perf_counter() - started)

    thread = threading.Thread(target=scan, name="scanner", daemon=True)
    thread.start()
    for line in sys.stdin:
        if line.strip() == "go":
            told.clear()
            running.set()
        else:
            running.clear()
            with scanning:  # else it would go on into what is measured without it
                pass
            print(json.dumps({"scans": len(told), "rows": rows * len(told), "seconds": sum(told)}), flush=True)
    ended.set()
    thread.join()
    spark.stop()


if __name__ == "__main__":
    main()
