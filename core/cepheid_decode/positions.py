"""Positions in the history of one topic (or one partition): a message, by ledger, entry and index in its batch.

12:345       the entry 345 of ledger 12
12:345:7     the eighth message of that entry's batch
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cepheid_decode.errors import BadOptionError

WHOLE_ENTRY = -1
"""Used as batch index: the whole entry, so its first message if a range starts there."""

_TEXT = re.compile(r"([0-9]{1,19}):(-1|[0-9]{1,19})(?::(-1|[0-9]{1,19}))?")
_MOST_ID = (1 << 63) - 1  # of a ledger or an entry, as stored
_MOST_INDEX = (1 << 31) - 1
_SHOWN = 100  # characters of rejected text in messages


@dataclass(frozen=True, slots=True, order=True)
class MessagePosition:
    """Ordered like the topic, because the ledger ids in a chain increase."""

    ledger_id: int
    entry_id: int
    batch_index: int = WHOLE_ENTRY

    @classmethod
    def parse(cls, text: str) -> MessagePosition:
        """Parse `ledger:entry` or `ledger:entry:index`; raises BadOptionError."""
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        parts = _TEXT.fullmatch(text.strip())
        if parts is None:
            raise BadOptionError(
                f"'{shown}' is not a position: write ledger:entry or ledger:entry:index, each a number from 0, like 12:345:7",
                value=shown,
            )
        ledger_id, entry_id, index = (WHOLE_ENTRY if part is None else int(part) for part in parts.groups())
        if max(ledger_id, entry_id) > _MOST_ID or index > _MOST_INDEX:
            raise BadOptionError(f"'{shown}' is not a position: an id is at most {_MOST_ID}, an index {_MOST_INDEX}", value=shown)
        return cls(ledger_id, entry_id, index)

    def __str__(self) -> str:
        place = f"{self.ledger_id}:{self.entry_id}"
        return place if self.batch_index == WHOLE_ENTRY else f"{place}:{self.batch_index}"
