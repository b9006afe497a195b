"""What does it cost to turn a stored value into the columns of its schema? Five flat fields, one core, in process; µs per record.

Beside each figure stands what a library does record by record (fastavro, json, protobuf), with the same values, in turn.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import time
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass

from benchmarks.report import print_line
from cepheid_decode import OnBadRecord, ScanCounters, SchemaVersion
from cepheid_decode.typed import TypedColumns
from cepheid_decode.typed.protobuf_schema import native_descriptor

VERSION = bytes(8)
AVRO = {
    "type": "record",
    "name": "Trade",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "symbol", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "quantity", "type": ["null", "int"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
F = FieldDescriptorProto
Decode = Callable[[], object]


def protobuf_definition() -> bytes:
    file = FileDescriptorProto(name="trade.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Trade")
    kinds = (F.TYPE_INT64, F.TYPE_STRING, F.TYPE_DOUBLE, F.TYPE_INT32, F.TYPE_INT64)
    for number, (field, kind) in enumerate(zip(("id", "symbol", "price", "quantity", "at"), kinds, strict=True), 1):
        message.field.add(name=field, number=number, type=kind, label=F.LABEL_OPTIONAL)
    encoded = base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()
    return json.dumps({"fileDescriptorSet": encoded, "rootMessageTypeName": "bench.Trade"}).encode()


def trades(count: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [
        {
            "id": row,
            "symbol": f"SYM{rng.randrange(1000)}",
            "price": rng.random() * 100,
            "quantity": rng.randrange(1000),
            "at": 1_700_000_000_000 + row,
        }
        for row in range(count)
    ]


def ours(kind: str, definition: bytes, encoded: list[bytes]) -> Decode:
    columns = TypedColumns([SchemaVersion(VERSION, kind, definition)], None, OnBadRecord.FAIL, ScanCounters())
    values, codes = pa.array(encoded, pa.binary()), np.zeros(len(encoded), np.int32)
    return lambda: columns.columns(values, None, codes, [VERSION])


def record_by_record(encoded: list[bytes], read: Callable[[bytes], dict[str, Any]]) -> Decode:
    return lambda: pa.array([read(value) for value in encoded])


def cases(count: int) -> dict[str, tuple[Decode, Decode]]:
    written = trades(count)
    parsed = fastavro.parse_schema(AVRO)
    avro = [_avro(parsed, trade) for trade in written]
    texts = [json.dumps(trade).encode() for trade in written]
    protobuf = protobuf_definition()
    message = GetMessageClass(native_descriptor(protobuf))
    messages = [message(**trade).SerializeToString() for trade in written]  # type: ignore[no-untyped-call]
    definition = json.dumps(AVRO).encode()
    names = [field["name"] for field in AVRO["fields"]]  # type: ignore[index]

    def read_message(value: bytes) -> dict[str, Any]:
        found = message.FromString(value)
        return {name: getattr(found, name) for name in names}

    return {
        "avro": (
            ours("AVRO", definition, avro),
            record_by_record(avro, lambda value: fastavro.schemaless_reader(io.BytesIO(value), parsed, None)),  # type: ignore[arg-type, return-value]
        ),
        "json": (ours("JSON", definition, texts), record_by_record(texts, json.loads)),
        "protobuf": (ours("PROTOBUF_NATIVE", protobuf, messages), record_by_record(messages, read_message)),
    }


def _avro(parsed: Any, trade: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, parsed, trade)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for name, pair in cases(arguments.records).items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(arguments.pairs):
            for decode, seconds in zip(pair, times, strict=True):
                started = time.process_time()
                decode()
                seconds.append(time.process_time() - started)
        own, library = (1e6 * sorted(seconds)[len(seconds) // 2] / arguments.records for seconds in times)
        figures |= {f"{name}_us": round(own, 3), f"{name}_library_us": round(library, 3)}
    print_line(
        "scan_typed",
        figures=figures,
        load={"records": arguments.records, "fields": 5, "pairs": arguments.pairs, "figure": "median of processor time"},
        settings={"process": "one, no server"},
    )


if __name__ == "__main__":
    main()
