"""How fast does one core turn stored entries into a segment, and how large is the object?

In process, one thread, into a file:// object store: decoding, Parquet, files. Batches of 1,000 messages of 100 B, messages of 1 KB
alone, and the flights of the demo with their Avro schema, not compressed and compressed by the publisher. Times are the
processor's, the best of `--rounds`; `size_…` is the object over the stored bytes. `read_…`: all entries read back, verified.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import fastavro

from benchmarks.report import print_line
from benchmarks.scan_decode import Shape, groups_of
from cepheid_decode import SchemaVersion
from cepheid_ports import ThreadWorker
from cepheid_rpc import EntryGroup, encode_group
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.segments import Segments
from cepheid_wire import TopicName, encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb

TOPIC = TopicName.parse("persistent://public/default/flights-partition-0")
BATCH = 1000


@dataclass(frozen=True)
class Load:
    groups: list[EntryGroup]
    schemas: tuple[SchemaVersion, ...] = ()

    @property
    def stored_bytes(self) -> int:
        return sum(group.size_bytes for group in self.groups)


def messages_alone(count: int) -> Load:
    """Messages of 1 KB of random hexadecimal text, each an entry, and no two alike."""
    chance = random.Random(7)
    tails = []
    for entry in range(count):
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=entry, publish_time=1_700_000_000_000 + entry)
        metadata.partition_key = f"key-{chance.randrange(100_000)}"
        tails.append(encode_tail(metadata, chance.randbytes(512).hex().encode()))
    return Load([encode_group(1, first, -1, 0, tails[first : first + 1000]) for first in range(0, count, 1000)])


def flights(limit: int, codec: int) -> Load:
    from examples.flight_data import load_flights
    from examples.flights_spark.flight_schema import SCHEMA, record_of

    parsed = fastavro.parse_schema(SCHEMA)
    version = bytes(8)
    tails = []
    events = load_flights(limit)
    for start in range(0, len(events), BATCH):
        messages = []
        for event in events[start : start + BATCH]:
            out = io.BytesIO()
            fastavro.schemaless_writer(out, parsed, record_of(event))
            messages.append((pb.SingleMessageMetadata(partition_key=event.carrier), out.getvalue()))
        payload = encode_batch(messages)
        metadata = pb.MessageMetadata(
            producer_name="flights", sequence_id=start, publish_time=1_700_000_000_000 + start, num_messages_in_batch=len(messages)
        )
        metadata.schema_version = version
        if codec != pb.NONE:
            metadata.compression, metadata.uncompressed_size = codec, len(payload)
            payload = _compressed(codec, payload)
        tails.append(encode_tail(metadata, payload))
    return Load([encode_group(1, 0, -1, 0, tails)], (SchemaVersion(version, "AVRO", json.dumps(SCHEMA).encode()),))


def _compressed(codec: int, payload: bytes) -> bytes:
    import cramjam

    if codec == pb.LZ4:
        return bytes(cramjam.lz4.compress_block(payload, store_size=False))
    return bytes(cramjam.zstd.compress(payload, 3))


async def measure(load: Load, rounds: int) -> dict[str, float]:
    write_s = read_s = float("inf")
    ratio = 0.0
    last = load.groups[-1].last_entry_id
    worker = ThreadWorker("bench", 1)

    async def schemas(_topic: TopicName) -> Sequence[SchemaVersion]:
        return load.schemas

    async def groups() -> AsyncIterator[Sequence[EntryGroup]]:
        for group in load.groups:
            yield [group]

    with tempfile.TemporaryDirectory() as folder:
        segments = Segments(ObjectStores(worker), worker, schemas)
        for _ in range(rounds):
            url = segments.url_of(f"file://{folder}", TOPIC, 1)
            began = time.process_time()
            summary = await segments.write(url, TOPIC, 1, groups())
            write_s = min(write_s, time.process_time() - began)
            ratio = summary.object_bytes / load.stored_bytes
            began = time.process_time()
            reader = await segments.open(url, 1, last + 1)
            at = 0
            while at <= last:
                at = (await reader.read(at, last, max_bytes=1 << 20))[-1].last_entry_id + 1
            read_s = min(read_s, time.process_time() - began)
            await segments.delete(url)
        await segments.aclose()
    await worker.aclose()
    mb = load.stored_bytes / 1e6
    return {"mb_per_s": round(mb / write_s, 1), "read_mb_per_s": round(mb / read_s, 1), "size": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=64, help="of each load but the flights")
    parser.add_argument("--flights", type=int, default=336_776)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    size = arguments.mb * 1_000_000
    loads: dict[str, Callable[[], Load]] = {
        "1000x100b": lambda: Load(groups_of(Shape("a", max(size // 120_000, 1), 1000, 100))),
        "1kb": lambda: messages_alone(max(size // 1100, 1)),
        "flights": lambda: flights(arguments.flights, pb.NONE),
        "flights_lz4": lambda: flights(arguments.flights, pb.LZ4),
        "flights_zstd": lambda: flights(arguments.flights, pb.ZSTD),
    }
    figures: dict[str, float] = {}
    stored: dict[str, int] = {}
    for name, make in loads.items():
        if arguments.only and arguments.only != name:
            continue
        load = make()
        stored[name] = load.stored_bytes
        for figure, value in asyncio.run(measure(load, arguments.rounds)).items():
            figures[f"{figure}_{name}"] = value
    print_line("tiered_write", figures=figures, load={"stored_bytes": stored}, settings={"rounds": arguments.rounds})


if __name__ == "__main__":
    main()
