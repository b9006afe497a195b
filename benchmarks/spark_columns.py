"""What does naming columns save in Spark, and how do whole rows compare with the same rows in Parquet?

A topic of 20 × 1 KB entries with keys, and one of 1000 × 100 B. In turn, with all columns: the rows of the topic, and Spark's own
reading of a Parquet file with the same rows. Then with `columns`: `count(*)` over one small column, and the key alone. Both need no
payload, and the ratios say how much sooner they are done than the whole rows. At last the messages are counted by the entries'
metadata alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments
from benchmarks.spark_bench import add_spark_arguments, discard, fill, frame, keep_everything, keyed_batch, open_session, seconds
from benchmarks.spark_read import LARGE, SMALL, write_parquet

WARM_ROUNDS = 3  # the JVM compiles what it runs: rounds before these are slower


def count_rows(spark: Any, url: str, topic: str, rows: int) -> None:
    found = frame(spark, url, topic, columns="partition").count()
    assert found == rows, f"{found} rows, not {rows}"


def count_by_entries(spark: Any, url: str, topic: str, rows: int) -> None:
    (found,) = frame(spark, url, topic, readMode="entries", columns="num_messages").selectExpr("sum(num_messages)").first()
    assert found == rows, f"{found} messages, not {rows}"


def compare(spark: Any, server: Server, topic: str, rows: int, path: Path, rounds: int) -> dict[str, float]:
    """Interleaved rounds. Return the median of each ratio."""
    write_parquet(server, topic, path)
    url = server.url
    loads = {
        "whole": lambda: discard(frame(spark, url, topic)),
        "parquet": lambda: discard(spark.read.parquet(str(path))),
        "count": lambda: count_rows(spark, url, topic, rows),
        "key": lambda: discard(frame(spark, url, topic, columns="key")),
        "entries": lambda: count_by_entries(spark, url, topic, rows),
    }
    took: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(WARM_ROUNDS + rounds):
        for name, run in loads.items():
            spent_s = seconds(run)
            if number >= WARM_ROUNDS:
                took[name].append(spent_s)
    figures: dict[str, float] = {}
    for figure, dividend, divisor in (
        ("share_of_parquet", "parquet", "whole"),
        ("count_over_whole", "whole", "count"),
        ("key_over_whole", "whole", "key"),
        ("entries_count_over_whole", "whole", "entries"),
    ):
        ratios = [long_s / short_s for long_s, short_s in zip(took[dividend], took[divisor], strict=True)]
        figures[figure] = round(percentile(ratios, 0.5), 2)
    return figures | {"whole_rows_per_s": round(rows / percentile(took["whole"], 0.5))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    add_spark_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of values in each topic")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with Server(arguments) as server, tempfile.TemporaryDirectory(prefix="cepheid-bench-columns-", dir=arguments.data) as directory:
        keep_everything(server.admin_url)
        spark = open_session(arguments.spark_cores, arguments.java_options)
        for name, (messages, size) in {"1kb": LARGE, "100b": SMALL}.items():
            topic = server.topic(f"columns-{name}")
            entries = int(arguments.gigabytes * 1e9) // (messages * size)
            load.run(fill(server.url, topic, keyed_batch(messages, size), entries, num_messages=messages))
            found = compare(spark, server, topic, entries * messages, Path(directory) / f"{name}.parquet", arguments.rounds)
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
        version = spark.version
        spark.stop()
    print_line(
        "spark_columns",
        figures=figures,
        load={
            "gigabytes": arguments.gigabytes,
            "messages_per_entry": {"1kb": LARGE[0], "100b": SMALL[0]},
            "rounds": arguments.rounds,
        },
        settings={**server.settings, "spark": version, "spark_cores": arguments.spark_cores},
    )


if __name__ == "__main__":
    main()
