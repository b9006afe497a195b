"""Reads the entries of a piece, verified and without a gap, from any replicas that have them.

    piece ──► fragments ──► cover by preferred replicas ──► streams ──► groups
                 ▲               ▲ a replica fails: continues elsewhere from the next entry
                 │               └── all have failed: a pause (50 ms … 2 s), and the next round
                 ├── no replica has it, or none came back: the ledger is looked up in metadata once more
                 └── damaged on all of them: an error, or an entry without bytes in its place (`damaged_as_empty`)

Rule 1: entries are in order, each once, without omissions: a failure never looks like an end.
Rule 2: a read gives up when every replica has failed in `read_attempts` rounds, and for as long as `unreachable_s` if one of them
may come back. A ledger that metadata no longer has is a DataLossError at once.
Rule 3: a stopped read waits for nothing, neither in a pause nor for an answer, and blames no bookie for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import DamagedEntryError, DataLossError, EntriesUnreadableError, PlanUnavailableError
from cepheid_decode.history import Fragment, LedgerHistory, Piece
from cepheid_decode.scan_request import ReadSettings
from cepheid_rpc import SCAN_CHUNK_BYTES, EntryGroup, ReadRequest, Status, encode_group
from cepheid_scan.read_rounds import GivenUpError, ReadRounds
from cepheid_scan.replica_order import Suspects, last_reachable, plan_cover, positions_by_liking, write_set
from cepheid_scan.stop_signal import StopSignal
from cepheid_scan.striped_source import MergedReads, ReplicaFailure

log = logging.getLogger(__name__)

RACK_VARIABLE = "CEPHEID_RACK"
_NO_LIMIT_BYTES = 1 << 62
_TICKET_PAUSE_S = 1.0


class MovedToObjectError(Exception):
    """Bookies no longer have the ledger: it is an object now. `entry_id`: the next entry to read."""

    def __init__(self, url: str, entry_id: int) -> None:
        super().__init__(f"the ledger moved to {url}")
        self.url = url
        self.entry_id = entry_id


_suspects = Suspects()  # shared by the tasks of the process, which learn from each other


class EntrySource:
    """Reads entries for one task. `bookies`: addresses by id; others are not asked.

    `replan` returns the current location of a piece's ledger, None if it is deleted; it may add to `bookies`. `damaged_as_empty`:
    an entry that is damaged on all of its bookies is returned without bytes, which no message is, so that the decoder handles it as
    a bad record. `stop`: None if the read is stopped only by closing what `read` returns.
    """

    def __init__(
        self,
        bookies: Mapping[str, str],
        ticket: bytes,
        settings: ReadSettings,
        counters: ScanCounters,
        *,
        replan: Replan | None,
        racks: Mapping[str, str] | None = None,
        damaged_as_empty: bool = False,
        stop: StopSignal | None = None,
    ) -> None:
        self._bookies = bookies
        self._ticket = ticket
        self.settings = settings
        self.counters = counters
        self.replan = replan
        self._rack = settings.rack or os.environ.get(RACK_VARIABLE) or None
        self._racks = racks or {}
        self._damaged_as_empty = damaged_as_empty
        self.stop = stop or StopSignal()
        self._ticket_at: dict[tuple[str, int], float] = {}  # by topic and ledger: when the last new ticket was issued

    def read(self, piece: Piece) -> Iterator[EntryGroup]:
        """Yield groups of exactly the piece's range, in order. Raises EntriesUnreadableError, DataLossError, which say where,
        MovedToObjectError and StoppedError.
        """
        entry_id = piece.first_entry_id
        looked_at = damaged_at = -2  # none
        may_renew = self.replan is not None
        while entry_id <= piece.last_entry_id:
            ensemble, last = fragment_at(piece.fragments, entry_id, piece.last_entry_id)
            if not ensemble:
                raise ValueError(f"{piece.topic}: no fragment of ledger {piece.ledger_id} has entry {entry_id}")
            attempts = 1 if entry_id == damaged_at + 1 else self.settings.read_attempts  # damage occurs in runs
            try:
                for group in self._read_run(piece, ensemble, entry_id, last, attempts, may_renew=may_renew):
                    entry_id = group.last_entry_id + 1
                    may_renew = self.replan is not None
                    self.counters.entries += len(group)
                    yield group
            except GivenUpError as stuck:
                try:
                    if stuck.needs_ticket:
                        may_renew = may_renew and not stuck.is_key_unknown  # once, until entries arrive
                        piece = self._with_new_ticket(piece, stuck)
                        continue
                    if stuck.entry_id == looked_at or (stuck.is_damaged and stuck.entry_id == damaged_at + 1):
                        raise _unreadable(piece, stuck) from None
                    looked_at = stuck.entry_id
                    piece = self._look_again(piece, stuck)
                except DamagedEntryError as error:
                    if not self._damaged_as_empty:
                        raise
                    # All of a damaged block at once, if all of its entries have the same bookies.
                    damaged_at = min(stuck.until, last) if piece.write_quorum == len(ensemble) else stuck.entry_id
                    until = "" if damaged_at == stuck.entry_id else f", and so are those up to {damaged_at}"
                    log.warning(
                        "scan.entries_damaged: %s%s", error.args[0], until, extra={**error.facts, "last_entry_id": damaged_at}
                    )
                    group = encode_group(piece.ledger_id, stuck.entry_id, -1, 0, [b""] * (damaged_at + 1 - stuck.entry_id))
                    entry_id = damaged_at + 1
                    self.counters.entries += len(group)
                    yield group

    def _read_run(
        self, piece: Piece, ensemble: Sequence[str], entry_id: int, last: int, attempts: int, *, may_renew: bool
    ) -> Iterator[EntryGroup]:
        """Yield entries of one fragment. `may_renew`: as in ReadRounds. Raises GivenUpError, StoppedError."""
        settings, quorum = self.settings, piece.write_quorum
        rounds = ReadRounds(attempts, settings.unreachable_s, may_renew=may_renew)
        while entry_id <= last:
            usable = self._usable(ensemble, piece.ledger_id, entry_id, rounds)
            reachable = last_reachable(entry_id, last, len(ensemble), quorum, usable)
            if reachable < entry_id:
                pause_s = rounds.end_round(entry_id, self._failures(ensemble, quorum, entry_id, rounds), time.monotonic())
                self.counters.wait_s += pause_s
                self.stop.pause(pause_s)
                continue
            cover = self._cover(ensemble, quorum, entry_id, reachable, usable)
            request = self._request(piece, entry_id, reachable)
            with (
                MergedReads(
                    request,
                    ensemble,
                    self._bookies,
                    cover,
                    self.counters,
                    settings=settings,
                ) as merged,
                self.stop.ending(merged.close),
            ):
                for group in merged.groups():
                    self.stop.check()
                    entry_id = group.last_entry_id + 1
                    rounds.on_progress()
                    yield group
            self.stop.check()  # before a bookie is blamed for an answer that was cut off here
            if merged.failure is not None:
                self._on_failed(piece, merged.failure, rounds)

    def _request(self, piece: Piece, first: int, last: int) -> ReadRequest:
        wished = self.settings.chunk_bytes
        chunk_bytes = next((size for size in SCAN_CHUNK_BYTES if size >= wished), SCAN_CHUNK_BYTES[-1])
        ticket = piece.ticket or self._ticket
        return ReadRequest(piece.ledger_id, first, last, _NO_LIMIT_BYTES, ticket=ticket, scan=True, chunk_bytes=chunk_bytes)

    def _usable(self, ensemble: Sequence[str], ledger_id: int, entry_id: int, rounds: ReadRounds) -> list[int]:
        """Return the positions that may be asked in this round, the best one first."""
        suspects = _suspects.among(ensemble, time.monotonic())
        liked = positions_by_liking(ensemble, ledger_id, entry_id, rack=self._rack, racks=self._racks, suspects=suspects)
        return [position for position in liked if position not in rounds.failures and ensemble[position] in self._bookies]

    def _cover(self, ensemble: Sequence[str], quorum: int, first: int, last: int, usable: Sequence[int]) -> dict[int, int]:
        """Return the cover, without suspects if possible: one more stream costs less than a bookie that does not answer."""
        suspects = _suspects.among(ensemble, time.monotonic())
        trusted = [position for position in usable if ensemble[position] not in suspects]
        cover = plan_cover(first, last, len(ensemble), quorum, trusted) or plan_cover(first, last, len(ensemble), quorum, usable)
        assert cover is not None, f"positions {usable} have entries {first}..{last} between them"
        return cover

    def _failures(self, ensemble: Sequence[str], quorum: int, entry_id: int, rounds: ReadRounds) -> list[ReplicaFailure]:
        """Return the failures of all bookies that should have the entry."""
        return [
            rounds.failures.get(position)
            or ReplicaFailure(position, ensemble[position], entry_id, "no address: it was down at planning", for_good=True)
            for position in write_set(entry_id, len(ensemble), quorum)
        ]

    def _on_failed(self, piece: Piece, failure: ReplicaFailure, rounds: ReadRounds) -> None:
        now = time.monotonic()
        rounds.on_failed(failure, now)
        self.counters.retries += 1
        if failure.status is Status.BAD_DIGEST:
            self.counters.damaged += 1
        if failure.status in (None, Status.BAD_DIGEST):
            _suspects.add(failure.bookie, now)
        log.warning(
            "scan.replica_failed: bookie %s did not give entry %d:%d of %s: %s",
            failure.bookie,
            piece.ledger_id,
            failure.entry_id,
            piece.topic,
            failure.reason,
            extra={**facts_of(piece, failure.entry_id), "bookie": failure.bookie},
        )

    def _with_new_ticket(self, piece: Piece, stuck: GivenUpError) -> Piece:
        """Return the piece with a newly issued ticket: a long read outlives its first one. Raises EntriesUnreadableError."""
        ledger = look_up(self.replan, piece, _unreadable(piece, stuck))
        if ledger is None or not ledger.ticket or ledger.ticket == piece.ticket:
            raise _unreadable(piece, stuck)
        now = time.monotonic()
        which = (str(piece.topic), piece.ledger_id)
        if (
            now - self._ticket_at.get(which, float("-inf")) < _TICKET_PAUSE_S
        ):  # clocks far apart: every new ticket counts as expired
            raise _unreadable(piece, stuck)
        self._ticket_at[which] = now
        log.info("scan.ticket_renewed", extra=facts_of(piece, stuck.entry_id))
        return replace(piece, ticket=ledger.ticket)

    def _look_again(self, piece: Piece, stuck: GivenUpError) -> Piece:
        """Return the piece at its current location. Metadata is read once per entry that no bookie returns."""
        here = stuck.entry_id
        known = self._place(piece.fragments, here)
        ledger = look_up(self.replan, piece, _unreadable(piece, stuck))
        if ledger is None:
            raise trimmed(piece, here, stuck.reasons)
        if ledger.object_url and not ledger.fragments:
            log.info("scan.ledger_moved", extra=facts_of(piece, here))
            raise MovedToObjectError(ledger.object_url, here)
        if self._place(ledger.fragments, here) == known:
            raise _unreadable(piece, stuck)
        log.info("scan.ledger_moved", extra=facts_of(piece, here))
        return replace(
            piece,
            fragments=ledger.fragments,
            ensemble_size=ledger.ensemble_size,
            write_quorum=ledger.write_quorum,
            ticket=ledger.ticket,
        )

    def _place(self, fragments: Sequence[Fragment], entry_id: int) -> list[tuple[str, str | None]]:
        """Return where an entry is, as far as known: bookies with their addresses."""
        return [(bookie, self._bookies.get(bookie)) for bookie in fragment_at(fragments, entry_id, entry_id)[0]]


def fragment_at(fragments: Sequence[Fragment], entry_id: int, last: int) -> tuple[tuple[str, ...], int]:
    """Return the ensemble of this entry, () if none, and up to which entry (at most `last`) it has the following ones."""
    ensemble: tuple[str, ...] = ()
    for fragment in fragments:
        if fragment.first_entry_id > entry_id:
            return ensemble, min(last, fragment.first_entry_id - 1)
        ensemble = fragment.ensemble
    return ensemble, last


Replan: TypeAlias = Callable[[Piece], LedgerHistory | None]
"""Returns the current location of a piece's ledger; None: it is deleted. Raises PlanUnavailableError."""


def look_up(replan: Replan | None, piece: Piece, failure: EntriesUnreadableError) -> LedgerHistory | None:
    """Return the current location of the piece's ledger; None: it is deleted. Raises `failure` if there is no way to find out."""
    if replan is None:
        raise failure
    try:
        return replan(piece)
    except PlanUnavailableError as error:
        raise failure from error


def trimmed(piece: Piece, entry_id: int, reasons: object) -> DataLossError:
    """Return the error for deleted entries of the piece from `entry_id` on. `reasons`: why they could not be read."""
    return DataLossError(
        f"{piece.topic}: entries {entry_id}..{piece.last_entry_id} of ledger {piece.ledger_id} are gone: the ledger was trimmed, "
        f"or its topic deleted, after this read was planned ({reasons})",
        **facts_of(piece, entry_id),
        last_entry_id=piece.last_entry_id,
    )


def facts_of(piece: Piece, entry_id: int) -> dict[str, Any]:
    """Return the location of an entry, for errors and log lines."""
    return {"topic": piece.topic, "ledger_id": piece.ledger_id, "entry_id": entry_id}


def _unreadable(piece: Piece, stuck: GivenUpError) -> EntriesUnreadableError:
    entry = f"entry {piece.ledger_id}:{stuck.entry_id} of {piece.topic}"
    what = "is damaged on all of its bookies" if stuck.is_damaged else "could be read from none of its bookies"
    return (DamagedEntryError if stuck.is_damaged else EntriesUnreadableError)(
        f"{entry} {what}, in {stuck.rounds} rounds: {stuck.reasons}",
        **facts_of(piece, stuck.entry_id),
        bookies=stuck.reasons,
    )
