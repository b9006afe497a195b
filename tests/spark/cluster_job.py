"""What a user submits: it reads a topic in batch and as a stream, and with bookies that executors do not reach. For tests.

spark-submit cluster_job.py SERVICE_URL TOPIC RESULT_FILE CHECKPOINT REFUSING_ADDRESS SILENT_ADDRESS

Nothing is registered, and nothing of the repository is imported: Spark finds the format in what is installed. But for reads with
bookies out of reach: their source is this file's, and travels to the executors by value. Each of their tasks has no way to the
bookie that it asks first, and notes when that one failed it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

import cepheid_scan
import cepheid_spark
import pyspark_cepheid
from cepheid_decode import ScanTask
from cepheid_scan import entry_source
from cepheid_scan.replica_order import Suspects, positions_by_liking
from cepheid_spark.batch_reader import CepheidBatchReader
from cepheid_spark.partitions import TaskPartition
from cepheid_spark.source import CepheidDataSource


class FailureNotes(logging.Handler):
    """A line in the file for each failure of one of `bookies`."""

    def __init__(self, path: str, bookies: set[str]) -> None:
        super().__init__()
        self._path = path
        self._bookies = bookies

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "bookie", None) in self._bookies:
            with open(self._path, "a") as file:
                file.write("failed\n")


class OutOfReachReader(CepheidBatchReader):
    place = ""
    notes = ""

    def partitions(self) -> list[InputPartition]:
        return [TaskPartition(self._moved(partition.task), partition.spec) for partition in super().partitions()]

    def _moved(self, task: ScanTask) -> ScanTask:
        piece = task.pieces[0]
        ensemble, _ = entry_source.fragment_at(piece.fragments, piece.first_entry_id, piece.last_entry_id)
        first, *_ = positions_by_liking(ensemble, piece.ledger_id, piece.first_entry_id, rack=None, racks={}, suspects=())
        return replace(task, bookies=tuple({**dict(task.bookies), ensemble[first]: self.place}.items()))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        entry_source._suspects = Suspects()  # else a bookie that failed an earlier task of this worker is not asked first
        moved = {bookie for bookie, address in partition.task.bookies if address == self.place}
        notes = FailureNotes(self.notes, moved)
        logging.getLogger("cepheid_scan").addHandler(notes)
        try:
            yield from super().read(partition)
        finally:
            logging.getLogger("cepheid_scan").removeHandler(notes)


class OutOfReachSource(CepheidDataSource):
    """Executors are told the option `place` for one bookie's address. `notes`: the file of its failures."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._place, self._notes = options["place"], options["notes"]
        super().__init__({name: value for name, value in options.items() if name not in ("place", "notes")})

    @classmethod
    def name(cls) -> str:
        return "cepheid_out_of_reach"

    def reader(self, schema: StructType) -> CepheidBatchReader:
        reader = super().reader(schema)
        reader.__class__, reader.place, reader.notes = OutOfReachReader, self._place, self._notes
        return reader


def main(service_url: str, topic: str, result: str, checkpoint: str, refusing: str, silent: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    options = {"service.url": service_url, "topics": topic, "minPartitions": "8"}
    found: dict[str, Any] = {}

    def measure(name: str, action: Callable[[], Any]) -> None:
        before, began = tasks_of(spark), time.monotonic()
        rows = action()
        after = tasks_of(spark)
        used = [executor for executor in after if after[executor] > before.get(executor, 0)]
        tasks = sum(after.values()) - sum(before.values())
        found[name] = {"rows": rows, "executors": len(used), "tasks": tasks, "seconds": time.monotonic() - began}

    def stream() -> list[int]:
        reader = spark.readStream.format("cepheid").options(**options, startingOffsets="earliest", maxEntriesPerTrigger="300")
        numbers: list[int] = []

        def keep(batch: DataFrame, _: int) -> None:
            numbers.extend(numbers_of(batch))

        writer = reader.load().writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
        return sorted(numbers)

    def out_of_reach(place: str, name: str) -> None:
        notes = Path(f"{result}.{name}")
        notes.touch()
        reader = spark.read.format("cepheid_out_of_reach").options(**options, place=place, notes=str(notes))
        measure(name, lambda: numbers_of(reader.load()))
        found[name]["failures"] = len(notes.read_text().splitlines())

    measure("batch", lambda: numbers_of(spark.read.format("cepheid").options(**options).load()))
    measure("stream", stream)
    measure("imported", lambda: spark.read.format("cepheid").options(**options).load().rdd.mapPartitions(imported).collect())
    spark.dataSource.register(OutOfReachSource)
    out_of_reach(refusing, "refusing")
    out_of_reach(silent, "silent")
    Path(result).write_text(json.dumps(found))
    spark.stop()


def numbers_of(frame: DataFrame) -> list[int]:
    return sorted(int(row.value) for row in frame.select("value").collect())


def imported(_: Iterator[Row]) -> Iterator[str]:
    """Where the executor's Python has this package from."""
    return (str(module.__file__) for module in (cepheid_scan, cepheid_spark, pyspark_cepheid))


def tasks_of(spark: SparkSession) -> dict[str, int]:
    """Completed tasks by executor, the driver left out."""
    store = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    executors = [store.apply(index) for index in range(store.size())]
    return {executor.id(): executor.completedTasks() for executor in executors if executor.id() != "driver"}


if __name__ == "__main__":
    main(*sys.argv[1:])
