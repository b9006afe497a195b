"""The interface of an export's table, which commits rows together with their positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cepheid_lake.errors import LakeTargetError

FORMAT = 1
"""Format number of commit records. A table written by a later release is refused."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The last commit. `topic` and `mode` are those of the first one: a table holds one export."""

    topic: str
    mode: str
    positions: Mapping[str, str]


class Target(Protocol):
    """One table. Blocking calls from one thread. Every method raises LakeTargetError."""

    def open(self) -> Committed | None:
        """Complete what a killed export left, and return the last commit. None: nothing was exported to the table yet."""

    def add(self, batch: Any) -> int:
        """Add a pyarrow.RecordBatch to the next commit; return its approximate size in bytes."""

    def commit(self, committed: Committed) -> None:
        """Make all rows since the last commit visible together with their positions. Raises ConcurrentExportError."""

    def close(self) -> None:
        """Discard uncommitted rows."""


def check_format(text: object, where: str) -> None:
    if text != FORMAT:
        raise LakeTargetError(f"{where} was written in format {text!r}, and this release knows format {FORMAT}: upgrade Cepheid")
