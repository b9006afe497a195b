"""The publish times of entries as their producers state them: read if necessary, and kept for recently used positions.

Rule: publish times come from the clients' clocks. They need not rise along a topic; a search by time finds a place where they pass
a bound, which is the only one if they rise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cepheid_managed_ledger.position_numbers import PositionNumbers
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup
from cepheid_wire import BadTailError, parse_metadata

UNREADABLE_MS = 0
"""Time of an entry whose metadata cannot be parsed: the oldest possible, so that it delays neither expiry nor seeking."""


class PublishTimes:
    """Publish times of one topic. `peek`: an entry in memory; `read`: the first entry at or after a position; `kept`: of all
    topics."""

    def __init__(
        self,
        peek: Callable[[Position], EntryGroup | None],
        read: Callable[[Position], Awaitable[list[EntryGroup]]],
        kept: PositionNumbers,
    ) -> None:
        self._peek = peek
        self._read = read
        self._kept = kept
        self.reads = 0

    def __repr__(self) -> str:
        return f"<PublishTimes {self.reads} read, {self._kept!r}>"

    def known(self, position: Position) -> int | None:
        """Return the publish time from memory; None: the entry would have to be read."""
        kept = self._kept.get(position)
        if kept is None and (group := self._peek(position)) is not None:
            kept = self._keep(position, group)
        return kept

    async def at(self, position: Position) -> int | None:
        """Return the publish time of the entry; None: it has left the topic, or is not written yet. Raises the errors of
        reading."""
        known = self.known(position)
        if known is not None:
            return known
        self.reads += 1
        groups = await self._read(position)
        if not groups or (groups[0].ledger_id, groups[0].first_entry_id) != position:
            return None
        return self._keep(position, groups[0])

    def _keep(self, position: Position, group: EntryGroup) -> int:
        try:
            published_ms = parse_metadata(group.payload(position.entry_id)).publish_time
        except BadTailError:
            published_ms = UNREADABLE_MS
        return self._kept.keep(position, published_ms)
