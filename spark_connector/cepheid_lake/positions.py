"""The progress of an export, without I/O: by topic partition, the position after the last message in the table.

    rows of a batch ──► Progress.advance ──► {"persistent://public/default/orders-partition-0": "12:345:8", …}

The map is committed together with the rows, so rows and positions never disagree. A partition that is not in it has not been
read yet: the next run reads it from its first message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cepheid_decode import WHOLE_ENTRY, MessagePosition
from cepheid_decode.columns import TYPED_PREFIX

POSITION_COLUMNS = ("topic", "ledger_id", "entry_id", "batch_index")
"""Columns of every message row. In typed rows their names have the prefix `__`."""


def position_columns(mode: str) -> tuple[str, ...]:
    return POSITION_COLUMNS if mode == "messages" else tuple(f"{TYPED_PREFIX}{name}" for name in POSITION_COLUMNS)


def table_column(name: str) -> str:
    """Return a column's name in the table. pyarrow's datasets cannot read some names of typed rows (`__batch_index`)."""
    return f"_{name.removeprefix(TYPED_PREFIX)}" if name.startswith(TYPED_PREFIX) else name


class Progress:
    """The progress, from `positions` committed by an earlier run. Rows of a partition must be in its order."""

    def __init__(self, mode: str, positions: Mapping[str, str]) -> None:
        self._columns = position_columns(mode)
        self._next = dict(positions)
        self._last_entries: dict[str, MessagePosition] = {}

    def __repr__(self) -> str:
        return f"<Progress of {len(self._next)} topic partitions>"

    @property
    def positions(self) -> dict[str, str]:
        return dict(self._next)

    def take_last_entries(self) -> dict[str, MessagePosition]:
        """Return the entry of the last row, by topic partition, for partitions with rows since the last call."""
        taken, self._last_entries = self._last_entries, {}
        return taken

    def advance(self, batch: Any) -> None:
        """Advance past `batch`, a pyarrow.RecordBatch with the position columns."""
        topic, ledger_id, entry_id, batch_index = (batch.column(name) for name in self._columns)
        for name, row in _last_rows(topic):
            ledger, entry, index = ledger_id[row].as_py(), entry_id[row].as_py(), batch_index[row].as_py()
            if index is None or index == WHOLE_ENTRY:
                following = MessagePosition(ledger, entry + 1)
            else:
                following = MessagePosition(ledger, entry, index + 1)
            self._next[name] = str(following)
            self._last_entries[name] = MessagePosition(ledger, entry)


def _last_rows(topic: Any) -> list[tuple[str, int]]:
    """Return the last row of each topic in a column of names. A batch mostly has rows of one topic only."""
    rows = len(topic)
    if not rows:
        return []
    first, last = topic[0].as_py(), topic[rows - 1].as_py()
    if first == last:
        return [(last, rows - 1)]
    return list({name: row for row, name in enumerate(topic.to_pylist())}.items())
