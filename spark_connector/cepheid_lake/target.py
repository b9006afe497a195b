"""What an export writes to: a table that takes rows and the positions they reach in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cepheid_lake.errors import LakeTargetError

FORMAT = 1
"""Format number of commit records. A table that a later release has written is refused."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What the last commit says. `topic` and `mode` are those of the first one: a table holds one export."""

    topic: str
    mode: str
    positions: Mapping[str, str]


class Target(Protocol):
    """One table. Blocking, from one thread. Every method raises LakeTargetError."""

    def open(self) -> Committed | None:
        """Finish what a killed export left behind, and return where the table stands. None: nothing was exported to it yet."""

    def add(self, batch: Any) -> int:
        """Take a pyarrow.RecordBatch for the next commit; returns about how many bytes it will have."""

    def commit(self, committed: Committed) -> None:
        """Make all rows since the last commit visible together with their positions. Raises ConcurrentExportError."""

    def close(self) -> None:
        """Drop rows that were not committed."""


def check_format(text: object, where: str) -> None:
    if text != FORMAT:
        raise LakeTargetError(f"{where} was written in format {text!r}, and this release knows format {FORMAT}: upgrade Cepheid")
