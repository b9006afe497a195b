"""When entries were published, by what their producers say: read where it must be, kept for the positions asked for last.

Rule: publish times are the clients' clocks. They need not rise along a topic; who searches by them finds a place where they
pass a bound, the only one as long as they rise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cepheid_managed_ledger.position_numbers import PositionNumbers
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup
from cepheid_wire import BadTailError, parse_metadata

UNREADABLE_MS = 0
"""Of an entry whose metadata nobody can read: the oldest there can be, so that it holds up neither expiry nor seeking."""


class PublishTimes:
    """For one topic. `peek`: an entry that is in memory; `read`: the first entry at or after a position; `kept`: of all topics."""

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
        """None: it would have to be read."""
        kept = self._kept.get(position)
        if kept is None and (group := self._peek(position)) is not None:
            kept = self._keep(position, group)
        return kept

    async def at(self, position: Position) -> int | None:
        """Of the entry of this name; None: it has left the topic, or is not written yet. Raises what reading raises."""
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
