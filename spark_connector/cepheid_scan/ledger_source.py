"""Reads the entries of a piece from any copy of its ledger: on bookies, or in object storage.

    piece ──► has an object? ──yes──► object ──not usable──► bookies, if they have it ──► look up again ──► error
                  └──no──► bookies ──given up──► look up again: moved to an object ──► object

Rule 1: if both copies exist the object is read, so that history does not compete with the main work of bookies; the setting
`prefer_bookies` reverses this.
Rule 2: a change of copies omits and repeats nothing: it continues at the next entry.
Rule 3: a task does not try an object again that has failed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cepheid_decode.errors import BadOptionError, DamagedEntryError, EntriesUnreadableError
from cepheid_decode.history import Piece
from cepheid_decode.scan_request import StorageAccess
from cepheid_rpc import EntryGroup
from cepheid_scan.entry_source import EntrySource, MovedToObjectError, facts_of, look_up, trimmed
from cepheid_scan.object_files import SegmentUnusableError

if TYPE_CHECKING:
    from cepheid_scan.object_segments import Segment

log = logging.getLogger(__name__)

_MOST_OPEN = 4


class LedgerSource:
    """Reads a task's entries. Objects are read with the settings of the EntrySource, and into its counters."""

    def __init__(self, bookies: EntrySource, storage: StorageAccess) -> None:
        self._bookies = bookies
        self._storage = storage
        self._settings = bookies.settings
        self._counters = bookies.counters
        self.stop = bookies.stop
        self._segments: dict[str, Segment] = {}
        self._unusable: dict[str, SegmentUnusableError] = {}

    def reads_object(self, piece: Piece) -> bool:
        """Whether the piece's object is the copy to read first."""
        if not piece.object_url or piece.object_url in self._unusable:
            return False
        return not (piece.fragments and self._settings.prefer_bookies)

    def segment(self, piece: Piece) -> Segment:
        """Return the piece's opened object. Raises SegmentUnusableError; BadOptionError if the library that reads it is missing and
        bookies do not have the ledger.
        """
        if (found := self._segments.get(piece.object_url)) is None:
            from cepheid_scan.object_segments import open_segment  # loads pyarrow's reader of Parquet

            try:
                found = open_segment(piece.object_url, piece.ledger_id, self._storage, self._settings, self._counters)
            except BadOptionError as error:
                if not piece.fragments:
                    raise
                raise SegmentUnusableError(str(error)) from None
            while len(self._segments) >= _MOST_OPEN:
                del self._segments[next(iter(self._segments))]
            self._segments[piece.object_url] = found
        return found

    def read(self, piece: Piece) -> Iterator[EntryGroup]:
        """Yield groups of exactly the piece's range, in order. Raises EntriesUnreadableError, DataLossError, which say where,
        BadOptionError if the library for object storage is missing, and StoppedError.
        """
        left = piece
        while left.first_entry_id <= left.last_entry_id:
            try:
                if not left.fragments and (failed := self._unusable.get(left.object_url)) is not None:
                    raise failed
                for group in self._from_object(left) if self.reads_object(left) else self._bookies.read(left):
                    left = replace(left, first_entry_id=group.last_entry_id + 1)
                    yield group
                return
            except SegmentUnusableError as error:
                left = self.without_object(left, error)
            except MovedToObjectError as moved:
                left = replace(left, first_entry_id=moved.entry_id, fragments=(), object_url=moved.url)
            except EntriesUnreadableError as error:
                if not left.object_url or left.object_url in self._unusable or self.reads_object(left):
                    raise
                log.warning("scan.read_from_object: %s", error.args[0], extra=facts_of(left, left.first_entry_id))
                left = replace(left, fragments=())

    def without_object(self, piece: Piece, failure: SegmentUnusableError) -> Piece:
        """Return the piece to read from another copy, after its object failed. Raises EntriesUnreadableError, DataLossError."""
        self._unusable[piece.object_url] = failure
        self._segments.pop(piece.object_url, None)
        if piece.fragments:
            self._warn(piece, failure)
            return replace(piece, object_url="")
        ledger = look_up(self._bookies.replan, piece, _unreadable(piece, failure))
        if ledger is None:
            raise trimmed(piece, piece.first_entry_id, f"its object: {failure}")
        if not ledger.fragments and ledger.object_url in self._unusable:
            raise _unreadable(piece, failure)
        self._warn(piece, failure)
        return replace(
            piece,
            object_url=ledger.object_url,
            fragments=ledger.fragments,
            ensemble_size=ledger.ensemble_size,
            write_quorum=ledger.write_quorum,
        )

    def _from_object(self, piece: Piece) -> Iterator[EntryGroup]:
        for group in self.segment(piece).entry_groups(piece.first_entry_id, piece.last_entry_id):
            self.stop.check()
            self._counters.entries += len(group)
            yield group

    def _warn(self, piece: Piece, failure: SegmentUnusableError) -> None:
        log.warning(
            "scan.object_unusable: ledger %d of %s is read from another copy from entry %d on: %s: %s",
            piece.ledger_id,
            piece.topic,
            piece.first_entry_id,
            piece.object_url,
            failure,
            extra=facts_of(piece, piece.first_entry_id),
        )


def _unreadable(piece: Piece, failure: SegmentUnusableError) -> EntriesUnreadableError:
    kind = DamagedEntryError if failure.is_damaged else EntriesUnreadableError
    return kind(
        f"entry {piece.ledger_id}:{piece.first_entry_id} of {piece.topic} is only in object storage, and its object cannot be "
        f"read: {piece.object_url}: {failure}. See `cepheid tiered verify`, and check the credentials of this reader",
        **facts_of(piece, piece.first_entry_id),
        url=piece.object_url,
    )
