"""The ceiling of any Python source: rows that were made before, given to Spark again and again.

What a scan reaches of it is the share that does not depend on how fast a machine is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition


class BareSource(DataSource):
    """Options: `path` of an Arrow file, whose rows each of `tasks` gives until they are `task_rows`."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        with pa.OSFile(self.options["path"]) as file:
            return from_arrow_schema(pa.ipc.open_file(file).schema)

    def reader(self, schema: Any) -> DataSourceReader:
        return BareReader(self.options["path"], int(self.options["tasks"]), int(self.options["task_rows"]))


class BareReader(DataSourceReader):
    def __init__(self, path: str, tasks: int, task_rows: int) -> None:
        self._path, self._tasks, self._task_rows = path, tasks, task_rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(self._path) as file:
            reader = pa.ipc.open_file(file)
            left = self._task_rows
            for number in itertools.count():
                batch = reader.get_batch(number % reader.num_record_batches).slice(0, left)
                yield batch
                left -= batch.num_rows
                if not left:
                    return


def write_rows(reader: Any, path: Path, rows: int) -> None:
    """The first rows of a scan, in batches as tasks give them to Spark."""
    from cepheid_spark.partitions import portions

    left = rows
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, reader.schema) as writer:
        for batch in reader:
            wanted = batch.slice(0, left)
            for portion in portions(wanted):
                writer.write_batch(portion)
            left -= wanted.num_rows
            if not left:
                return
