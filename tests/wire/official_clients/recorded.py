"""The entries that the official Java and Go clients wrote, and what is in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

ENTRIES_PATH = Path(__file__).parent / "entries.json"
CLIENTS = ("java", "go")
CODECS = ("none", "lz4", "zlib", "zstd", "snappy")
SHAPES = ("single", "batched", "chunked")
SEVERAL = [b"message 0 " * 20, b"message 1 " * 20, b""]
VALUES = {"single": SEVERAL, "batched": SEVERAL, "chunked": [b"".join(b"%d," % number**3 for number in range(400))]}
"""The messages of a topic of each shape."""


def recorded_entries(client: str, codec: str, shape: str) -> list[bytes]:
    return [base64.b64decode(entry) for entry in json.loads(ENTRIES_PATH.read_text())[client][f"{codec}-{shape}"]]
