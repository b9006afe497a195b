"""How large is the block index of 10 million entries of 1 KB? Of few topics, whose blocks are full, and of many, whose are not.

Writes the keys that flushes of so many entries make (half of the write cache each), and no entries.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.report import print_line

FLUSH_BYTES = 32 << 20
BLOCK_BYTES = 1 << 20
LOG_BYTES = 256 << 20
ENTRY_OVERHEAD = 40  # a header of 36 bytes, and its end in the block's table


def index_size(directory: Path, entries: int, entry_bytes: int, topics: int) -> tuple[int, int]:
    """Return the bytes of the database's files and the number of blocks."""
    from cepheid_bookie.block_index import BlockRef
    from cepheid_bookie.ledger_record import LedgerRecord
    from cepheid_bookie.rocks_index import RocksBlockIndex

    index = RocksBlockIndex(directory)
    stored_bytes = entry_bytes + ENTRY_OVERHEAD
    per_flush = max(topics, FLUSH_BYTES // stored_bytes)
    per_block = BLOCK_BYTES // stored_bytes
    next_id = [0] * topics
    offset = blocks_in_all = 0
    record = LedgerRecord(bytes(16))
    for start in range(0, entries, per_flush):
        blocks: list[BlockRef] = []
        share = min(per_flush, entries - start) // topics
        for topic in range(topics):
            end = next_id[topic] + share
            while next_id[topic] < end:
                count = min(per_block, end - next_id[topic])
                first, next_id[topic] = next_id[topic], next_id[topic] + count
                length = count * stored_bytes
                blocks.append(BlockRef(topic, first, first + count - 1, 1 + offset // LOG_BYTES, offset % LOG_BYTES, length))
                offset += length
        index.write(blocks, dict.fromkeys(range(topics), record) if start == 0 else {})
        blocks_in_all += len(blocks)
    index.close()
    return sum(path.stat().st_size for path in directory.iterdir()), blocks_in_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--few-topics", type=int, default=10)
    parser.add_argument("--many-topics", type=int, default=10_000)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for name, topics in (("few", arguments.few_topics), ("many", arguments.many_topics)):
        with tempfile.TemporaryDirectory(prefix="cepheid-bench-") as directory:
            size_bytes, blocks = index_size(Path(directory) / "index", arguments.entries, arguments.entry_bytes, topics)
        figures |= {f"mb_{name}_topics": round(size_bytes / 1e6, 1), f"blocks_{name}_topics": blocks}
    print_line("index_size", figures=figures, load=vars(arguments), settings={})


if __name__ == "__main__":
    main()
