"""Reads entries `first..last` of one fragment from the bookies of a cover: one stream each, merged by entry id.

    E = 4, Qw = 2      entry       0    1    2    3    4    5
    cover              b           0    1              4    5        together they have every id; as few are asked as possible
                       d                     2    3
    E = Qw             c           0    1    2    3    4    5        the same with one stream

Rule 1: the result is a run without a gap; it ends before the first entry that its stream does not return, with that `failure`.
Rule 2: a stream is pulled only when its entries are due, so the others hold only their read-ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cepheid_decode.counters import ScanCounters
from cepheid_decode.scan_request import ReadSettings
from cepheid_rpc import BookieUnavailableError, EntryGroup, MalformedGroupError, MissingEntries, ReadRequest, Status
from cepheid_scan.bookie_reads import BookieRead

_REASONS = {
    Status.TICKET_EXPIRED: "the read ticket has expired: plan again to get a new one",
    Status.TICKET_KEY_UNKNOWN: "the bookie does not know the key of the read ticket (yet)",
    Status.UNAUTHORIZED: "UNAUTHORIZED: the read ticket is not valid for these entries",
}


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """Why one bookie did not return one entry. `status` is its own answer, for entries up to `until`; None: there was none."""

    position: int
    bookie: str
    entry_id: int
    reason: str
    status: Status | None = None
    retry_after_s: float = 0.0
    for_good: bool = False
    until: int = -1

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered differently later."""
        return not self.for_good and (self.status is None or self.status.retriable)


class MergedReads:
    """Context manager of merged streams, which it closes at the end. `cover`: by entry id mod E, the position for those entries."""

    def __init__(
        self,
        request: ReadRequest,
        ensemble: Sequence[str],
        addresses: Mapping[str, str],
        cover: Mapping[int, int],
        counters: ScanCounters,
        *,
        settings: ReadSettings,
    ) -> None:
        self._request = request
        self._size = len(ensemble)
        self._cover = cover
        self.failure: ReplicaFailure | None = None
        self._lanes: dict[int, _Lane] = {}
        try:
            positions = sorted(set(cover.values()))
            read_ahead_bytes = max(2 * request.chunk_bytes, settings.decode_bytes // len(positions))
            for position in positions:
                bookie = ensemble[position]
                read = BookieRead(
                    bookie,
                    addresses[bookie],
                    request,
                    read_ahead_bytes=read_ahead_bytes,
                    verify=settings.verify_checksum,
                    tls=settings.tls,
                )
                self._lanes[position] = _Lane(position, read, request.first_entry_id, counters, settings.read_timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MergedReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.read.close()

    def groups(self) -> Iterator[EntryGroup]:
        """Yield groups up to the range's end, or until `failure` is set."""
        entry_id, last = self._request.first_entry_id, self._request.last_entry_id
        while entry_id <= last:
            lane = self._lanes[self._cover[entry_id % self._size]]
            try:
                group = lane.take(entry_id)
            except _NotGivenError as error:
                self.failure = error.failure
                return
            part = group.slice(entry_id, min(group.last_entry_id, last))
            entry_id = part.last_entry_id + 1
            yield part


class _NotGivenError(Exception):
    def __init__(self, failure: ReplicaFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class _Lane:
    """Groups of one stream that were not taken. `until`: nothing is known yet of ids from there on."""

    def __init__(self, position: int, read: BookieRead, first: int, counters: ScanCounters, timeout_s: float) -> None:
        self.position = position
        self.read = read
        self._until = first
        self._counters = counters
        self._timeout_s = timeout_s
        self._groups: deque[EntryGroup] = deque()
        self._missing: tuple[MissingEntries, ...] = ()
        self._retry_after_s = 0.0

    def take(self, entry_id: int) -> EntryGroup:
        """Return the group with this entry; requested ids rise. Raises _NotGivenError."""
        groups = self._groups
        while True:
            while groups and groups[0].last_entry_id < entry_id:
                groups.popleft()
            if groups and groups[0].first_entry_id <= entry_id:
                return groups[0]
            for run in self._missing:
                if run.first_entry_id <= entry_id <= run.last_entry_id:
                    raise self._not_given(entry_id, _REASONS.get(run.status, run.status.name), run.status, run.last_entry_id)
            if entry_id < self._until:
                raise self._not_given(entry_id, "an answer that says nothing of the entry")
            self._next_chunk(entry_id)

    def _next_chunk(self, entry_id: int) -> None:
        began = time.monotonic()
        try:
            found = self.read.next_chunk(self._timeout_s)
        except (BookieUnavailableError, MalformedGroupError) as error:  # the second: damaged in transit, or of a newer bookie
            raise self._not_given(entry_id, error.args[0]) from error
        finally:
            self._counters.wait_s += time.monotonic() - began
        if found is None:
            raise self._not_given(entry_id, "the answer ended before the entry")
        chunk, size_bytes = found
        if chunk.next_entry_id <= self._until:
            raise self._not_given(entry_id, "an empty answer")
        self._counters.bytes += size_bytes
        by_bookie = self._counters.by_bookie
        by_bookie[self.read.bookie] = by_bookie.get(self.read.bookie, 0) + size_bytes
        self._until = chunk.next_entry_id
        self._groups.extend(sorted(chunk.groups, key=lambda group: group.first_entry_id))
        self._missing, self._retry_after_s = chunk.missing, chunk.retry_after_ms / 1000

    def _not_given(self, entry_id: int, reason: str, status: Status | None = None, until: int = -1) -> _NotGivenError:
        failure = ReplicaFailure(self.position, self.read.bookie, entry_id, reason, status, self._retry_after_s, until=until)
        return _NotGivenError(failure)
