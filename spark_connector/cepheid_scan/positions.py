"""Places in the history of one topic (of one partition, where it has several): a message, by ledger, entry and place in a batch.

12:345       the entry 345 of ledger 12
12:345:7     the eighth message of that entry's batch
"""

from __future__ import annotations

from dataclasses import dataclass

from cepheid_scan.errors import BadOptionError

WHOLE_ENTRY = -1
"""In place of an index in a batch: the entry as a whole, so its first message where something starts."""


@dataclass(frozen=True, slots=True, order=True)
class MessagePosition:
    """Ordered as the topic is, as long as its ledgers' ids rise, which they do by construction of a chain."""

    ledger_id: int
    entry_id: int
    batch_index: int = WHOLE_ENTRY

    @classmethod
    def parse(cls, text: str) -> MessagePosition:
        """From `ledger:entry` or `ledger:entry:index`; raises BadOptionError."""
        parts = text.strip().split(":")
        if len(parts) not in (2, 3) or not all(part.lstrip("-").isascii() and part.lstrip("-").isdigit() for part in parts):
            raise BadOptionError(f"'{text}' is no position: write ledger:entry or ledger:entry:index, like 12:345:7", value=text)
        numbers = [int(part) for part in parts]
        if numbers[0] < 0 or min(numbers[1:]) < -1:
            raise BadOptionError(f"'{text}' is no position: ledger and entry ids count from 0", value=text)
        return cls(*numbers)

    def __str__(self) -> str:
        place = f"{self.ledger_id}:{self.entry_id}"
        return place if self.batch_index == WHOLE_ENTRY else f"{place}:{self.batch_index}"
