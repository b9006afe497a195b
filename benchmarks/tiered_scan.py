"""How fast is history read from objects, beside the same rows as plain Parquet? One thread, local files, in turn; ratios of rates.

`object`: pyarrow reads the segment as it is, the columns that are asked for. `scan`: a task of `scan()` or of Spark's source reads
it, and gives the rows that it gives from bookies. Spark itself is not in it: its part is the same for all three.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import print_line
from benchmarks.scan_typed import AVRO, VERSION, _avro, trades
from cepheid_decode import Piece, ReadMode, ScanSpec, ScanTask, SchemaVersion
from cepheid_decode.columns import DEFAULT_MESSAGE_COLUMNS
from cepheid_rpc import EntryGroup, encode_group
from cepheid_scan.scan_task import scan_task
from cepheid_tiered.segment_writer import SegmentWriter
from cepheid_wire import TopicName, encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb

TOPIC = TopicName.parse("persistent://public/default/bench")
BATCH = 1000
LEDGER_ID = 7
SCHEMA = SchemaVersion(VERSION, "AVRO", json.dumps(AVRO).encode())
TYPED = tuple(str(field["name"]) for field in AVRO["fields"])  # type: ignore[index]
Read = Callable[[], int]


def entries(values: list[bytes], schema_version: bytes | None) -> Iterator[EntryGroup]:
    for entry_id, first in enumerate(range(0, len(values), BATCH)):
        batch = [
            (pb.SingleMessageMetadata(payload_size=len(value), partition_key=f"k{number % 97}", event_time=1 + number), value)
            for number, value in enumerate(values[first : first + BATCH], first)
        ]
        described = pb.MessageMetadata(
            producer_name="p", sequence_id=first, publish_time=1_700_000_000_000 + entry_id, num_messages_in_batch=len(batch)
        )
        if schema_version is not None:
            described.schema_version = schema_version
        yield encode_group(LEDGER_ID, entry_id, -1, 0, [encode_tail(described, encode_batch(batch))])


def write_segment(path: Path, values: list[bytes], schemas: tuple[SchemaVersion, ...]) -> int:
    """The number of entries."""
    writer = SegmentWriter(TOPIC, LEDGER_ID, schemas)
    count = 0
    with path.open("wb") as file:
        for group in entries(values, schemas[-1].version if schemas else None):
            count += len(group)
            file.writelines(writer.add([group]))
        file.writelines(writer.finish()[0])
    return count


def scan(path: Path, count: int, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
    piece = Piece(str(TOPIC), -1, LEDGER_ID, 0, count - 1, 0, 0, (), object_url=f"file://{path}")
    return scan_task(ScanTask((piece,), ()), spec)


def readers(directory: Path, name: str, values: list[bytes], spec: ScanSpec, of_object: tuple[str, ...]) -> dict[str, Read]:
    segment, plain = directory / f"{name}.parquet", directory / f"{name}-plain.parquet"
    count = write_segment(segment, values, spec.schemas)
    table = pa.Table.from_batches(scan(segment, count, spec))
    assert table.num_rows == len(values)
    pq.write_table(table, plain, compression="zstd")

    def rows(path: Path, columns: tuple[str, ...]) -> int:
        return int(pq.read_table(path, columns=list(columns), use_threads=False, partitioning=None).num_rows)

    return {
        "plain": lambda: rows(plain, spec.columns),
        "object": lambda: rows(segment, of_object),
        "scan": lambda: sum(batch.num_rows for batch in scan(segment, count, spec)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000, help="messages of five fields")
    parser.add_argument("--large", type=int, default=20_000, help="messages of 1 KB")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-") as directory:
        parsed: Any = json.loads(json.dumps(AVRO))
        avro = [_avro(parsed, trade) for trade in trades(arguments.records)]
        large = [value * (1024 // len(value)) for value in avro[: arguments.large]]
        beside = ("__key", "__event_time")
        typed = ScanSpec(ReadMode.TYPED, (*TYPED, *beside), schemas=(SCHEMA,))
        messages = ScanSpec(ReadMode.MESSAGES, DEFAULT_MESSAGE_COLUMNS)
        cases = {
            "typed": readers(Path(directory), "typed", avro, typed, (*TYPED, "key", "event_time")),
            "messages_1kb": readers(Path(directory), "messages", large, messages, DEFAULT_MESSAGE_COLUMNS),
        }
        for case, reads in cases.items():
            times: dict[str, list[float]] = {name: [] for name in reads}
            for _ in range(arguments.pairs):
                for name, read in reads.items():
                    started = time.perf_counter()
                    read()
                    times[name].append(time.perf_counter() - started)
            middle = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
            figures |= {f"{case}_{name}_ms": round(1000 * each, 1) for name, each in middle.items()}
            figures |= {f"{case}_{name}_ratio": round(middle["plain"] / middle[name], 2) for name in ("object", "scan")}
    print_line(
        "tiered_scan",
        figures=figures,
        load={"records": arguments.records, "large": arguments.large, "pairs": arguments.pairs, "figure": "median of elapsed time"},
        settings={"process": "one, no server", "store": "file", "threads": 1},
    )


if __name__ == "__main__":
    main()
