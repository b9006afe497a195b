"""A process that makes Spark's calls of a streaming query itself: without a JVM it starts in a second, and can be killed often.

python -m tests.spark.source_driver SERVICE_URL TOPIC DIRECTORY

It makes the file `started` before the first call, and then writes what stream_driver.py does: its checkpoint, and a file for each
batch. Its lease has a name of its own, so that none that a start made and never used holds the topic's ledgers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql.types import BinaryType, StructField, StructType

from cepheid_spark.source import CepheidDataSource

SLICE_ENTRIES = 5
IDLE_PAUSE_S = 0.01


def main(service_url: str, topic: str, directory: Path) -> None:
    options = {"service.url": service_url, "topics": topic, "subscription": "killed"}
    query = PlayedQuery({**options, "maxEntriesPerTrigger": str(SLICE_ENTRIES), "chunkLookback": "0"}, directory)
    (directory / "started").touch()
    query.run()


class PlayedQuery:
    def __init__(self, options: dict[str, str], directory: Path) -> None:
        self._reader: Any = CepheidDataSource(options).streamReader(StructType([StructField("value", BinaryType())]))
        self._directory = directory
        self._offsets = directory / "checkpoint" / "offsets"
        self._commits = directory / "checkpoint" / "commits"
        for path in self._offsets, self._commits:
            path.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        logged = len(list(self._offsets.glob("[0-9]*")))
        if logged and not (self._commits / str(logged - 1)).exists():
            self._execute(logged - 1)
        while True:
            start = self._start_of(logged)
            end = self._reader.latestOffset(start, self._reader.getDefaultReadLimit())
            if end == start:
                time.sleep(IDLE_PAUSE_S)
                continue
            self._write(self._offsets / str(logged), end)
            if logged:
                self._reader.commit(start)
            self._execute(logged)
            logged += 1

    def _start_of(self, number: int) -> Any:
        return json.loads((self._offsets / str(number - 1)).read_text()) if number else self._reader.initialOffset()

    def _execute(self, number: int) -> None:
        end = json.loads((self._offsets / str(number)).read_text())
        batches = [batch for each in self._reader.partitions(self._start_of(number), end) for batch in self._reader.read(each)]
        rows = [int(value) for batch in batches for value in batch.column("value").to_pylist()]
        output = self._directory / f"batch-{number}"
        assert not output.exists() or json.loads(output.read_text()) == rows, f"batch {number} is repeated with other rows: {rows}"
        self._write(output, rows)
        self._write(self._commits / str(number), {})

    def _write(self, path: Path, value: Any) -> None:
        """Wholly or not at all."""
        unfinished = self._directory / "unfinished"
        unfinished.write_text(json.dumps(value))
        unfinished.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
