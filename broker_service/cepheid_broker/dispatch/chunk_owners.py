"""Which consumer got the first chunks of a message whose last one is not sent yet: it must get the others, too.

An owner is remembered from the first chunk until the last one is sent, or until all chunks that it got are acknowledged or skipped:
the message is finished then, and its producer may have died before the last chunk. Above the bound the oldest is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_broker.dispatch.effects import AckView
from cepheid_broker.dispatch.holders import Holder
from cepheid_metadata import Position


@dataclass(slots=True, eq=False)
class Chunked:
    uuid: str
    owner: Holder
    key_hash: int
    given: dict[Position, None] = field(default_factory=dict)  # its unacknowledged chunks


class ChunkOwners:
    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages: dict[str, Chunked] = {}  # by uuid, the oldest first
        self._at: dict[Position, Chunked] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<ChunkOwners of {len(self._messages)} messages>"

    def owner(self, uuid: str) -> Holder | None:
        found = self._messages.get(uuid)
        return None if found is None else found.owner

    def give(self, uuid: str, owner: Holder, position: Position, key_hash: int = 0) -> Chunked | None:
        """Note that a chunk was sent; `owner` gets all its chunks if this is the first. Return the message forgotten for it."""
        chunked = self._messages.get(uuid)
        if chunked is None:
            chunked = self._messages[uuid] = Chunked(uuid, owner, key_hash)
        chunked.given[position] = None
        self._at[position] = chunked
        return self.forget(next(iter(self._messages))) if len(self._messages) > self._max_messages else None

    def forget(self, uuid: str) -> Chunked | None:
        found = self._messages.pop(uuid, None)
        if found is not None:
            for position in found.given:
                del self._at[position]
        return found

    def on_acked(self, position: Position) -> Chunked | None:
        """Note an acknowledgement. Return the message forgotten for it."""
        chunked = self._at.pop(position, None)
        if chunked is None:
            return None
        del chunked.given[position]
        return None if chunked.given else self.forget(chunked.uuid)

    def forget_acknowledged(self, acks: AckView) -> list[Chunked]:
        done = [p for p in self._at if not acks.unacknowledged_runs(p.ledger_id, p.entry_id, p.entry_id)]
        return [chunked for position in done if (chunked := self.on_acked(position)) is not None]

    def leave(self, owner: Holder) -> None:
        for uuid in [uuid for uuid, chunked in self._messages.items() if chunked.owner is owner]:
            self.forget(uuid)

    def clear(self) -> None:
        self._messages.clear()
        self._at.clear()
