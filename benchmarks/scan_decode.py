"""How fast are stored entries decoded into Arrow columns? One core, in process, without reading them from anywhere.

The default columns, the value alone, and stored entries as they are; batches of small messages (few in a buffer, and many), of
large ones, messages that are not batched, and small ones compressed. Times are the processor's, the best of `--rounds`: what others
do on the machine then costs less of the figure.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import print_line
from cepheid_decode import Piece, ReadMode, ScanCounters, ScanSpec
from cepheid_decode.columns import DEFAULT_ENTRY_COLUMNS, DEFAULT_MESSAGE_COLUMNS
from cepheid_decode.entries_decoder import EntriesDecoder
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_rpc import EntryGroup, encode_group
from cepheid_wire import encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb

TOPIC = "persistent://public/default/flights-partition-0"
GROUP_BYTES = 1 << 20  # as bookies send them


@dataclass(frozen=True)
class Shape:
    name: str
    entries: int
    messages: int  # of each entry; 0: not batched
    size_bytes: int
    keys: bool = True
    compressed: bool = False

    @property
    def rows(self) -> int:
        return self.entries * max(self.messages, 1)


SHAPES = (
    Shape("1x1000x100b", 1, 1000, 100, keys=False),
    Shape("16x1000x100b", 16, 1000, 100),
    Shape("128x1000x100b", 128, 1000, 100),
    Shape("128x1000x100b_lz4", 128, 1000, 100, compressed=True),
    Shape("1000x20x1kb", 1000, 20, 1024),
    Shape("16000x1x1kb", 16_000, 0, 1024),
)


def groups_of(shape: Shape) -> list[EntryGroup]:
    """One piece of random text: what it says does not matter, that it is neither constant nor all zeros does."""
    chance = random.Random(7)
    different = min(shape.entries, 8)
    payloads = [_payload(shape, chance) for _ in range(different)]
    tails = []
    for entry in range(shape.entries):
        metadata = pb.MessageMetadata(
            producer_name="standalone-0-17", sequence_id=entry * max(shape.messages, 1), publish_time=1_700_000_000_000 + entry
        )
        payload = payloads[entry % different]
        if shape.messages:
            metadata.num_messages_in_batch = shape.messages
        elif shape.keys:
            metadata.partition_key = f"key-{entry}"
        if shape.compressed:
            metadata.compression, metadata.uncompressed_size = pb.LZ4, len(payload)
            payload = _lz4(payload)
        tails.append(encode_tail(metadata, payload))
    step = max(1, GROUP_BYTES // len(tails[0]))
    return [encode_group(1, first, -1, 0, tails[first : first + step]) for first in range(0, shape.entries, step)]


def _payload(shape: Shape, chance: random.Random) -> bytes:
    if not shape.messages:
        return _body(shape, chance)
    messages = []
    for index in range(shape.messages):
        metadata = pb.SingleMessageMetadata(sequence_id=index)
        if shape.keys:
            metadata.partition_key = f"key-{chance.randrange(100_000)}"
        messages.append((metadata, _body(shape, chance)))
    return encode_batch(messages)


def _body(shape: Shape, chance: random.Random) -> bytes:
    return b"".join(b"%x" % chance.getrandbits(64) for _ in range(1 + shape.size_bytes // 13))[: shape.size_bytes]


def _lz4(payload: bytes) -> bytes:
    import cramjam

    return bytes(cramjam.lz4.compress_block(payload, store_size=False))


def seconds_of(mode: ReadMode, columns: Sequence[str], groups: Sequence[EntryGroup], rows: int, rounds: int) -> float:
    """Of the processor, the best of `rounds`."""
    spec = ScanSpec(mode, tuple(columns))
    last_entry_id = groups[-1].last_entry_id
    piece = Piece(TOPIC, 0, 1, 0, last_entry_id, 1, 1, ())
    kind = EntriesDecoder if mode is ReadMode.ENTRIES else MessageDecoder
    best = float("inf")
    for _ in range(rounds):
        decoder = kind(spec, ScanCounters(), lambda asked, count: iter(()))
        started = time.process_time()
        found = sum(batch.num_rows for batch in decoder.decode(piece, groups))
        best = min(best, time.process_time() - started)
        assert found == rows, f"{found} rows of {rows}"
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for shape in SHAPES:
        groups = groups_of(shape)
        for name, columns in (("wide", DEFAULT_MESSAGE_COLUMNS), ("value", ("value",))):
            seconds = seconds_of(ReadMode.MESSAGES, columns, groups, shape.rows, arguments.rounds)
            figures[f"{name}_{shape.name}_m_msg_per_s"] = round(shape.rows / seconds / 1e6, 2)
            figures[f"{name}_{shape.name}_mb_per_s"] = round(shape.rows * shape.size_bytes / seconds / 1e6)
        seconds = seconds_of(ReadMode.ENTRIES, DEFAULT_ENTRY_COLUMNS, groups, shape.entries, arguments.rounds)
        figures[f"entries_{shape.name}_mb_per_s"] = round(sum(group.size_bytes for group in groups) / seconds / 1e6)
    print_line(
        "scan_decode",
        figures=figures,
        load={shape.name: f"{shape.entries} entries of {shape.messages or 1} x {shape.size_bytes} B" for shape in SHAPES},
        settings={"rounds": arguments.rounds, "wide_columns": list(DEFAULT_MESSAGE_COLUMNS)},
    )


if __name__ == "__main__":
    main()
