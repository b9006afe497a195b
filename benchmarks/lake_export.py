"""How fast is a topic exported to Parquet, beside Spark writing the same rows?

A topic of 20 × 1 KB entries with keys. In turn: `cepheid_lake.export` to an empty folder, and Spark reading the topic and writing
Parquet with the same compression. Spark's session is warm; the export runs in this process.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments
from benchmarks.spark_bench import add_spark_arguments, fill, frame, keep_everything, keyed_batch, open_session, seconds

MESSAGES, SIZE = 20, 1000  # of an entry; bytes of a message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    add_spark_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of values")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    import cepheid_lake

    with Server(arguments) as server:
        keep_everything(server.admin_url)
        topic = server.topic("lake-export")
        entries = int(arguments.gigabytes * 1e9) // (MESSAGES * SIZE)
        load.run(fill(server.url, topic, keyed_batch(MESSAGES, SIZE), entries, num_messages=MESSAGES))
        spark = open_session(arguments.spark_cores, arguments.java_options)
        exports: list[float] = []
        sparks: list[float] = []
        with tempfile.TemporaryDirectory(prefix="cepheid-bench-lake-", dir=arguments.data) as directory:

            def export(folder: Path) -> None:
                report = cepheid_lake.export(topic, f"parquet://{folder}", service_url=server.url)
                assert report.rows == entries * MESSAGES, f"{report.rows} rows"

            def write(folder: Path) -> None:
                frame(spark, server.url, topic).write.option("compression", "zstd").parquet(str(folder))

            for pair in range(-1, arguments.pairs):  # the first pair loads classes and modules
                for run, took in ((export, exports), (write, sparks)):
                    folder = Path(directory) / f"{run.__name__}-{pair}"
                    spent_s = seconds(lambda run=run, folder=folder: run(folder))  # type: ignore[misc]
                    shutil.rmtree(folder)
                    if pair >= 0:
                        took.append(spent_s)
        version = spark.version
        spark.stop()
        megabytes = entries * MESSAGES * SIZE / 1e6
        figures: dict[str, Any] = {
            "mb_per_s": round(megabytes / percentile(exports, 0.5), 1),
            "spark_mb_per_s": round(megabytes / percentile(sparks, 0.5), 1),
            "over_spark": round(percentile([theirs / ours for ours, theirs in zip(exports, sparks, strict=True)], 0.5), 2),
        }
        print_line(
            "lake_export",
            figures=figures,
            load={"gigabytes": arguments.gigabytes, "messages_per_entry": MESSAGES, "pairs": arguments.pairs},
            settings={**server.settings, "spark": version, "spark_cores": arguments.spark_cores},
        )


if __name__ == "__main__":
    main()
