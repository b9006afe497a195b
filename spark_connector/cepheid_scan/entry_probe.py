"""Publish times of stored entries: each from a read of that one entry at a bookie.

For a ledger in object storage, statistics show on which side of a time a whole row group is. The column with
publish times is read only from the row group that is on both sides.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from cepheid_decode.counters import ScanCounters
from cepheid_decode.entry_metadata import PUBLISH_TIME, parse_entries
from cepheid_decode.errors import BadOptionError, BadRecordError, DataLossError
from cepheid_decode.history import HistoryPlan, LedgerHistory, TopicHistory
from cepheid_decode.scan_request import ReadSettings, StorageAccess
from cepheid_scan.entry_source import EntrySource, Replan
from cepheid_scan.ledger_source import LedgerSource
from cepheid_scan.splits import fragments_of, piece_of

log = logging.getLogger(__name__)


class BookieProbe:
    """Implements `edges.EntryProbe`. `replan`: returns the current location of a ledger, None if it is deleted."""

    def __init__(
        self,
        plan: HistoryPlan,
        settings: ReadSettings,
        replan: Replan | None = None,
        storage: StorageAccess = StorageAccess(),  # noqa: B008 - frozen
    ) -> None:
        self._storage = storage
        self._objects: dict[str, _ObjectTimes | None] = {}  # None: it cannot be read, and its bookies are used
        self._lock = threading.Lock()
        self._plan = plan
        self._settings = settings
        self._replan = replan

    def publish_time_ms(
        self, history: TopicHistory, ledger: LedgerHistory, entry_id: int, about_ms: int | None = None
    ) -> int | None:
        """Return the time as in EntryProbe; without `about_ms` the exact one."""
        if ledger.object_url and not (ledger.fragments and self._settings.prefer_bookies):
            found = self._in_object(ledger, entry_id, about_ms)
            if found is not None:
                return found
        piece = piece_of(history, ledger, entry_id, entry_id, fragments_of(ledger, entry_id, entry_id))
        ticket = self._plan.ticket_of(history.topic, history.partition)  # the tickets of hundreds of topics would be too large
        bookies = EntrySource(self._plan.bookies, ticket, self._settings, ScanCounters(), replan=self._replan)
        source = LedgerSource(bookies, self._storage)
        try:
            (group,) = source.read(piece)
        except DataLossError:
            return None
        entries = parse_entries([group])
        if (why := entries.refused.get(0)) is not None:
            message = f"entry {ledger.ledger_id}:{entry_id} of {history.topic} tells no publish time: {why}"
            raise BadRecordError(message, topic=history.topic, ledger_id=ledger.ledger_id, entry_id=entry_id)
        return int(entries.fields.number(PUBLISH_TIME)[0])

    def _in_object(self, ledger: LedgerHistory, entry_id: int, about_ms: int | None) -> int | None:
        """Return the time; None: the columns do not show it, or the object cannot be read."""
        from cepheid_scan.object_files import SegmentUnusableError

        with self._lock:  # two threads must not use one object
            try:
                if ledger.object_url not in self._objects:
                    self._objects[ledger.object_url] = _ObjectTimes(ledger, self._storage, self._settings)
                times = self._objects[ledger.object_url]
                return None if times is None else times.publish_time_ms(entry_id, about_ms)
            except SegmentUnusableError as error:
                log.warning("scan.object_unusable: %s: %s", ledger.object_url, error, extra={"ledger_id": ledger.ledger_id})
                self._objects[ledger.object_url] = None
                return None
            except BadOptionError:  # the library is missing
                if not ledger.fragments:
                    raise
                self._objects[ledger.object_url] = None
                return None


class _ObjectTimes:
    """Publish times of one object. Raises SegmentUnusableError."""

    def __init__(self, ledger: LedgerHistory, storage: StorageAccess, settings: ReadSettings) -> None:
        from cepheid_scan.object_segments import open_segment

        self._segment = open_segment(ledger.object_url, ledger.ledger_id, storage, settings, ScanCounters())
        self._index = -1  # of the row group whose times were last read
        self._times: tuple[Any, Any] = ((), ())

    def publish_time_ms(self, entry_id: int, about_ms: int | None) -> int | None:
        (group,) = self._segment.within(entry_id, entry_id)
        found = group.publish_ms
        if group.complete and found is not None and about_ms is not None:
            if found.high < about_ms:
                return int(found.high)
            if found.low >= about_ms:
                return int(found.low)
        if group.index != self._index:
            self._times, self._index = self._segment.publish_times(group), group.index
        ids, times = self._times
        published_ms = int(times[ids.searchsorted(entry_id)])
        return published_ms if published_ms >= 0 else None
