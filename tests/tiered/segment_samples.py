"""Entries of every kind for segments, and segments over a store in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cepheid_decode import SchemaVersion
from cepheid_ports import ThreadWorker
from cepheid_rpc import EntryGroup, encode_group
from cepheid_tiered import SegmentReader, SegmentStore, SegmentSummary
from cepheid_tiered.memory_objects import MemoryObjects
from cepheid_tiered.object_store import ObjectStore
from cepheid_tiered.segments import Segments, SegmentSettings
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import batched, message, metadata, single

TOPIC = TopicName.parse("persistent://public/default/t-partition-3")
LEDGER_ID = 12
STORE = "memory:///bucket"


def groups_of(tails: Sequence[bytes], per_group: int = 100) -> list[EntryGroup]:
    groups, length = [], 0
    for start in range(0, len(tails), per_group):
        some = tails[start : start + per_group]
        groups.append(encode_group(LEDGER_ID, start, start - 1, length, some))
        length += sum(map(len, some))
    return groups


async def source(groups: Sequence[EntryGroup]) -> AsyncIterator[Sequence[EntryGroup]]:
    for group in groups:
        yield [group]


@asynccontextmanager
async def segments_over(objects: ObjectStore, schemas: Sequence[SchemaVersion] = (), **settings: Any) -> AsyncIterator[Segments]:
    worker = ThreadWorker("segments")

    async def known(_topic: TopicName) -> Sequence[SchemaVersion]:
        return schemas

    segments = Segments(objects, worker, known, SegmentSettings(**settings))
    try:
        yield segments
    finally:
        await segments.aclose()
        await worker.aclose()


async def write(segments: SegmentStore, groups: Sequence[EntryGroup], store_url: str = STORE) -> tuple[str, SegmentSummary]:
    url = segments.url_of(store_url, TOPIC, LEDGER_ID)
    return url, await segments.write(url, TOPIC, LEDGER_ID, source(groups))


async def parquet_of(tails: Sequence[bytes], schemas: Sequence[SchemaVersion] = ()) -> bytes:
    objects = MemoryObjects()
    async with segments_over(objects, schemas) as segments:
        url, _ = await write(segments, groups_of(tails))
    return objects.objects[url]


async def read_range(reader: SegmentReader, first: int, last: int) -> list[EntryGroup]:
    """All of these entries: one read may end where more would have to be fetched."""
    found: list[EntryGroup] = []
    while first <= last:
        found += await reader.read(first, last, max_bytes=1 << 30)
        first = found[-1].last_entry_id + 1
    return found


def stored(groups: Sequence[EntryGroup]) -> bytes:
    return b"".join(bytes(group.data) for group in groups)


def encrypted(payload: bytes = b"secret") -> bytes:
    described = metadata(encryption_algo="AES", encryption_param=b"\1\2")
    described.encryption_keys.add(key="team", value=b"\xff")
    return _tail(described, payload)


def chunks(payload: bytes, count: int, **fields: Any) -> list[bytes]:
    step = -(-len(payload) // count)
    return [
        single(
            payload[index * step : (index + 1) * step],
            uuid="u-1",
            chunk_id=index,
            num_chunks_from_msg=count,
            total_chunk_msg_size=len(payload),
            **fields,
        )
        for index in range(count)
    ]


def _tail(described: pb.MessageMetadata, payload: bytes) -> bytes:
    from cepheid_wire import encode_tail

    return encode_tail(described, payload)


ODD_ENTRIES: dict[str, bytes] = {
    "marker": single(b"marker", marker_type=10),
    "encrypted": encrypted(),
    "no metadata": b"\x00\x00\x00\x09abc",
    "empty entry": b"",
    "broken batch": single(b"\xff\xff\xff\xff", num_messages_in_batch=3),
    "first chunk": chunks(b"0123456789", 2)[0],
    "last chunk without the first": chunks(b"abc", 2, producer_name="q")[1],
    "transaction": single(b"t", txnid_least_bits=1, txnid_most_bits=2),
    "compacted out": batched([message(b"", compacted_out=True), message(b"", compacted_out=True)]),
}
"""Entries without a message that a reader of columns could show."""


def avro(*fields: tuple[str, Any], version: int = 0) -> SchemaVersion:
    definition = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": kind, **({"default": None} if "null" in kind else {})} for name, kind in fields],
    }
    return SchemaVersion(version.to_bytes(8, "big"), "AVRO", json.dumps(definition).encode())
