"""The entries of a piece from whichever copy of its ledger there is: bookies, or an object in object storage.

    piece ──► has an object? ──yes──► object ──not usable──► bookies, if they have it ──► looked up again ──► error
                  └──no──► bookies ──given up──► looked up again: moved to an object ──► object

Rule 1: the object is read where both copies are there, since history should not compete with what bookies are for; the setting
`prefer_bookies` says otherwise.
Rule 2: a change of copies leaves nothing out and repeats nothing: it goes on at the entry that comes next.
Rule 3: an object that failed once is not asked again by the same task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadOptionError, DamagedEntryError, DataLossError, EntriesUnreadableError, PlanUnavailableError
from cepheid_decode.history import LedgerHistory, Piece
from cepheid_decode.scan_request import ReadSettings, StorageAccess
from cepheid_rpc import EntryGroup
from cepheid_scan.entry_source import EntrySource, MovedToObjectError
from cepheid_scan.object_files import SegmentUnusableError
from cepheid_scan.object_segments import Segment, open_segment
from cepheid_scan.stop_signal import StopSignal

log = logging.getLogger(__name__)

_MOST_OPEN = 4


class LedgerSource:
    """Made per task. The other arguments are those of EntrySource."""

    def __init__(
        self,
        bookies: EntrySource,
        settings: ReadSettings,
        counters: ScanCounters,
        *,
        storage: StorageAccess,
        replan: Callable[[Piece], LedgerHistory | None] | None,
        stop: StopSignal | None = None,
    ) -> None:
        self._bookies = bookies
        self._settings = settings
        self._counters = counters
        self._storage = storage
        self._replan = replan
        self._stop = stop or StopSignal()
        self._segments: dict[str, Segment] = {}
        self._unusable: dict[str, SegmentUnusableError] = {}

    def __repr__(self) -> str:
        return f"<LedgerSource of {self._bookies!r}, {len(self._segments)} objects>"

    def reads_object(self, piece: Piece) -> bool:
        """Whether the piece's object is the copy to read first."""
        if not piece.object_url or piece.object_url in self._unusable:
            return False
        return not (piece.fragments and self._settings.prefer_bookies)

    def segment(self, piece: Piece) -> Segment:
        """The piece's object, opened. Raises SegmentUnusableError; BadOptionError where the library that reads it is missing and
        bookies do not have the ledger."""
        if (found := self._segments.get(piece.object_url)) is None:
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

    def check_stopped(self) -> None:
        self._stop.check()

    def read(self, piece: Piece) -> Iterator[EntryGroup]:
        """Groups of exactly the piece's range, in order. Raises EntriesUnreadableError, DataLossError, which say where,
        BadOptionError where the library for object storage is missing, and StoppedError."""
        left = piece
        while left.first_entry_id <= left.last_entry_id:
            try:
                if not left.fragments and (failed := self._unusable.get(left.object_url)) is not None:
                    raise failed
                if self.reads_object(left):
                    for group in self._from_object(left):
                        left = replace(left, first_entry_id=group.last_entry_id + 1)
                        yield group
                else:
                    for group in self._bookies.read(left):
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
                log.warning("scan.read_from_object: %s", error.args[0], extra=_facts(left))
                left = replace(left, fragments=())

    def without_object(self, piece: Piece, failure: SegmentUnusableError) -> Piece:
        """Where the piece is read instead, after its object failed. Raises EntriesUnreadableError, DataLossError."""
        self._unusable[piece.object_url] = failure
        self._segments.pop(piece.object_url, None)
        if piece.fragments:
            self._warn(piece, failure)
            return replace(piece, object_url="")
        ledger = self._look_again(piece, failure)
        if ledger is None:
            raise DataLossError(
                f"{piece.topic}: entries {piece.first_entry_id}..{piece.last_entry_id} of ledger {piece.ledger_id} are gone: the "
                f"ledger was trimmed, or its topic deleted, after this read was planned (its object: {failure})",
                topic=piece.topic,
                ledger_id=piece.ledger_id,
                entry_id=piece.first_entry_id,
                last_entry_id=piece.last_entry_id,
            )
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

    def _look_again(self, piece: Piece, failure: SegmentUnusableError) -> LedgerHistory | None:
        if self._replan is None:
            raise _unreadable(piece, failure)
        try:
            return self._replan(piece)
        except PlanUnavailableError as error:
            raise _unreadable(piece, failure) from error

    def _from_object(self, piece: Piece) -> Iterator[EntryGroup]:
        for group in self.segment(piece).entry_groups(piece.first_entry_id, piece.last_entry_id):
            self._stop.check()
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
            extra=_facts(piece),
        )


def _unreadable(piece: Piece, failure: SegmentUnusableError) -> EntriesUnreadableError:
    kind = DamagedEntryError if failure.is_damaged else EntriesUnreadableError
    return kind(
        f"entry {piece.ledger_id}:{piece.first_entry_id} of {piece.topic} is only in object storage, and its object cannot be "
        f"read: {piece.object_url}: {failure}. See `cepheid tiered verify`, and check the credentials of this reader",
        topic=piece.topic,
        ledger_id=piece.ledger_id,
        entry_id=piece.first_entry_id,
        url=piece.object_url,
    )


def _facts(piece: Piece) -> dict[str, object]:
    return {"topic": piece.topic, "ledger_id": piece.ledger_id, "entry_id": piece.first_entry_id}
