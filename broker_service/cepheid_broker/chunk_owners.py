"""Which consumer got the first chunks of a message whose last one is still to be sent: it must get the others, too.

Remembered from the first chunk on until the last one is sent; or until the first one is acknowledged, or skipped: whoever did so
is done with the message, and its producer may have died before the last chunk. Beyond the bound the oldest is forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

from cepheid_broker.dispatch import AckView
from cepheid_broker.holders import Holder
from cepheid_broker.position import Position


class Chunked(NamedTuple):
    uuid: str
    owner: Holder
    first: Position  # of those that this consumer was given
    key_hash: int


class ChunkOwners:
    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages: dict[str, Chunked] = {}  # by uuid, the oldest first
        self._by_first: dict[Position, str] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<ChunkOwners of {len(self._messages)} messages>"

    def owner(self, uuid: str) -> Holder | None:
        found = self._messages.get(uuid)
        return None if found is None else found.owner

    def add(self, uuid: str, owner: Holder, first: Position, key_hash: int = 0) -> Chunked | None:
        """Returns what is forgotten for it."""
        self._messages[uuid] = Chunked(uuid, owner, first, key_hash)
        self._by_first[first] = uuid
        return self.forget(next(iter(self._messages))) if len(self._messages) > self._max_messages else None

    def forget(self, uuid: str) -> Chunked | None:
        found = self._messages.pop(uuid, None)
        if found is not None:
            self._by_first.pop(found.first, None)
        return found

    def on_acked(self, position: Position) -> Chunked | None:
        """Returns what is forgotten."""
        uuid = self._by_first.get(position)
        return None if uuid is None else self.forget(uuid)

    def forget_acknowledged(self, acks: AckView) -> list[Chunked]:
        done = [uuid for (ledger, entry), uuid in self._by_first.items() if not acks.unacknowledged_runs(ledger, entry, entry)]
        return [chunked for uuid in done if (chunked := self.forget(uuid)) is not None]

    def leave(self, owner: Holder) -> None:
        for uuid in [uuid for uuid, chunked in self._messages.items() if chunked.owner is owner]:
            self.forget(uuid)

    def clear(self) -> None:
        self._messages.clear()
        self._by_first.clear()
