"""One task of a scan, from its pieces to rows in Arrow. Spark tasks, `scan()` and the command line run it.

    pieces ──► LedgerSource ──► groups, `decode_bytes` at a time ──► decoder ──► RecordBatches
       │           ▲ a thread reads ahead                                    ▲
       └─ object in object storage ──► ObjectRows, if its columns suffice ───────┘

Rule 1: order is that of the pieces, and within them of the entries; every row once.
Rule 2: memory is bounded by read-ahead, collected groups (or the decoder's copy of them), and rows: each of about
`decode_bytes`. Collected groups are freed when copied, and rows when the next ones are requested.
Rule 3: one log line at the end, however it ends; and a warning if rows are missing, whose text is complete: where no
logging is set up, as in Spark's workers, only the text is shown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import DataLossError
from cepheid_decode.history import LedgerHistory, Piece, ScanTask
from cepheid_decode.scan_request import OnBadRecord, PlanSource, ReadMode, ScanSpec
from cepheid_rpc import EntryGroup
from cepheid_scan.decryption_keys import open_decryptor
from cepheid_scan.entry_source import EntrySource, Replan, facts_of
from cepheid_scan.ledger_source import LedgerSource
from cepheid_scan.object_files import SegmentUnusableError
from cepheid_scan.stop_signal import StopSignal

if TYPE_CHECKING:
    import pyarrow as pa

    from cepheid_decode.typed_rows import TypedRows
    from cepheid_wire.payload_decryption import PayloadDecryptor

log = logging.getLogger(__name__)

T = TypeVar("T")


class Decoder(Protocol):
    """Decodes groups of a piece, in order, to rows. It keeps no groups while it yields rows. `finish` at the piece's end."""

    def decode(self, piece: Piece, groups: Iterable[EntryGroup]) -> Iterator[pa.RecordBatch]: ...

    def finish(self, piece: Piece) -> Iterator[pa.RecordBatch]: ...


def scan_task(
    task: ScanTask, spec: ScanSpec, counters: ScanCounters | None = None, stop: StopSignal | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield batches with exactly `spec`'s columns. Raises EntriesUnreadableError, DataLossError, BadRecordError; StoppedError if
    another thread sets `stop`.
    """
    counters = counters if counters is not None else ScanCounters()
    decryptor = open_decryptor(spec.decryption_keys)
    bookies = dict(task.bookies)
    replan = _replanner(spec.plan_source, bookies)
    skips = spec.on_bad_record is not OnBadRecord.FAIL
    bookie_source = EntrySource(
        bookies, task.ticket, spec.settings, counters, replan=replan, racks=dict(task.racks), damaged_as_empty=skips, stop=stop
    )
    source = LedgerSource(bookie_source, spec.storage)
    decoder = _decoder(spec, counters, LookBack(source), decryptor)
    began = time.monotonic()
    outcome = "stopped by the reader"
    try:
        for piece in task.pieces:
            yield from PieceReader(piece, source, decoder, spec, counters).rows()
        outcome = "complete"
    except Exception as error:
        outcome = str(error)
        raise
    finally:
        _log_end(task, counters, time.monotonic() - began, outcome)
        _warn_of_what_is_missing(task, spec, counters)


class PieceReader:
    """Yields the rows of one piece. `_left`: the part that was not yielded yet; None: nothing."""

    def __init__(self, piece: Piece, source: LedgerSource, decoder: Decoder, spec: ScanSpec, counters: ScanCounters) -> None:
        self._piece = piece
        self._left: Piece | None = piece
        self._source = source
        self._decoder = decoder
        self._spec = spec
        self._counters = counters

    def rows(self) -> Iterator[pa.RecordBatch]:
        if self._spec.mode is ReadMode.ENTRIES or not self._source.reads_object(self._piece):
            yield from self._decoded(self._piece)
        else:
            try:
                yield from self._from_object()
            except SegmentUnusableError as error:
                yield from self._finished()  # data that is read again must not look like a repetition
                if (left := self._left) is None:
                    return
                try:
                    left = self._source.without_object(left, error)
                except DataLossError as loss:
                    self._note_loss(left, left.first_entry_id, loss)
                    return
                self._piece = left
                yield from self._decoded(left)
        yield from self._finished()

    def _from_object(self) -> Iterator[pa.RecordBatch]:
        """Yield rows from the columns of the piece's object, or by decoding its entries if the columns do not suffice."""
        from cepheid_scan.object_rows import ObjectRows, plan_steps

        segment = self._source.segment(self._piece)
        rows = ObjectRows(self._spec, self._piece, segment, self._counters, _typed_rows(self._decoder, self._spec))
        for step in plan_steps(self._piece, segment, self._spec.row_filter):
            if step.group is None:
                # From here on the step is read by another source, which changes copies by itself. It is decoded as part of the
                # whole piece: chunks of a message may be in several steps, with row groups read as columns between them.
                yield from self._decoded(step.piece)
            else:
                for batch, entry_id, batch_index in _timed(rows.read(step), self._counters):
                    self._source.stop.check()
                    yield batch
                    self._given_out(entry_id, batch_index)
                    del batch
                self._counters.entries += step.piece.last_entry_id - step.piece.first_entry_id + 1
            self._given_out(step.piece.last_entry_id)

    def _given_out(self, entry_id: int, batch_index: int = -1) -> None:
        """Note that rows were yielded through this message. `batch_index` -1: through the whole entry."""
        first, index = (entry_id + 1, 0) if batch_index < 0 else (entry_id, batch_index + 1)
        is_over = first > self._piece.last_entry_id
        self._left = None if is_over else replace(self._piece, first_entry_id=first, first_batch_index=index)

    def _decoded(self, part: Piece) -> Iterator[pa.RecordBatch]:
        """Yield rows of the entries of `part`, which is the next part of the piece to decode."""
        entry_id = part.first_entry_id
        try:
            for groups in collected(self._source.read(part), self._spec.settings.decode_bytes):
                entry_id = groups[-1].last_entry_id + 1
                yield from _timed(self._decoder.decode(self._piece, _emptied(groups)), self._counters)
        except DataLossError as loss:
            self._note_loss(part, entry_id, loss)

    def _finished(self) -> Iterator[pa.RecordBatch]:
        return _timed(self._decoder.finish(self._piece), self._counters)

    def _note_loss(self, piece: Piece, entry_id: int, loss: DataLossError) -> None:
        """Raise the loss, unless the reader accepts it."""
        if self._spec.fail_on_data_loss:
            raise loss
        lost = piece.last_entry_id - entry_id + 1
        self._counters.lost_entries += lost
        facts = {**facts_of(piece, entry_id), "lost_entries": lost}
        log.warning("scan.data_lost: %d entries: %s", lost, loss.args[0], extra=facts)


def _typed_rows(decoder: Decoder, spec: ScanSpec) -> TypedRows | None:
    if spec.mode is not ReadMode.TYPED:
        return None
    from cepheid_decode.typed_rows import TypedRows

    assert isinstance(decoder, TypedRows)
    return decoder


def collected(groups: Iterable[EntryGroup], limit_bytes: int) -> Iterator[list[EntryGroup]]:
    """Yield lists of groups to decode at once, soft by one group.

    Groups received before a failure are yielded before it is raised.
    """
    some: list[EntryGroup] = []
    size_bytes = 0
    try:
        for group in groups:
            some.append(group)
            size_bytes += group.size_bytes
            if size_bytes >= limit_bytes:
                yield some
                some, size_bytes = [], 0
    except DataLossError:
        if some:
            yield some
        raise
    if some:
        yield some


def _emptied(groups: list[EntryGroup]) -> Iterator[EntryGroup]:
    """Yield all groups, removing each from the list: the decoder's copy is enough."""
    groups.reverse()
    while groups:
        yield groups.pop()


class LookBack:
    """Reads the entries right before a piece, for chunked messages that began there."""

    def __init__(self, source: EntrySource | LedgerSource) -> None:
        self._source = source

    def __call__(self, piece: Piece, count: int) -> Iterator[EntryGroup]:
        """Yield up to `count` of them, oldest first; from earlier ledgers if this one has fewer. Stops at a deleted one."""
        for part in self.parts(piece, count):
            try:
                yield from self._source.read(part)
            except DataLossError as loss:  # its rows were not requested: only a message that began there is lost
                log.warning("scan.earlier_chunks_gone: %s", loss.args[0], extra={"topic": piece.topic})

    def parts(self, piece: Piece, count: int) -> Iterator[Piece]:
        """Yield the parts where they are, as far as the piece knows."""
        known_from = piece.fragments[0].first_entry_id if piece.fragments else 0
        first = max(piece.first_entry_id - count, known_from)
        if known_from == 0:
            yield from _last_entries(piece.before, count - piece.first_entry_id)
        if first < piece.first_entry_id:
            yield replace(piece, first_entry_id=first, last_entry_id=piece.first_entry_id - 1)


def _last_entries(tails: Sequence[Piece], count: int) -> list[Piece]:
    """Return the last `count` entries of consecutive ledgers' tails, the oldest first."""
    wanted: list[Piece] = []
    for tail in reversed(tails):
        if count <= 0:
            break
        first = max(tail.first_entry_id, tail.last_entry_id - count + 1)
        wanted.append(replace(tail, first_entry_id=first))
        count -= tail.last_entry_id - first + 1
    return wanted[::-1]


def _timed(batches: Iterator[T], counters: ScanCounters) -> Iterator[T]:
    """Count the time in the decoder, not that of the caller that takes the batches."""
    while True:
        began = time.monotonic()
        batch = next(batches, None)
        counters.decode_s += time.monotonic() - began
        if batch is None:
            return
        yield batch
        del batch  # so that it is not kept while the next one is built


def _decoder(
    spec: ScanSpec,
    counters: ScanCounters,
    look_back: Callable[[Piece, int], Iterator[EntryGroup]],
    decryptor: PayloadDecryptor | None = None,
) -> Decoder:
    if spec.mode is ReadMode.ENTRIES:
        from cepheid_decode.entries_decoder import EntriesDecoder

        return EntriesDecoder(spec, counters, look_back)
    if spec.mode is ReadMode.TYPED:
        from cepheid_decode.typed_rows import TypedRows

        return TypedRows(spec, counters, look_back, decryptor)
    from cepheid_decode.message_decoder import MessageDecoder

    return MessageDecoder(spec, counters, look_back, decryptor)


def _replanner(plan_source: PlanSource | None, bookies: dict[str, str]) -> Replan | None:
    """Return a function that also adds the addresses of bookies that started since the plan to `bookies`."""
    if plan_source is None:
        return None

    def replan(piece: Piece) -> LedgerHistory | None:
        from cepheid_scan.open_planner import find_ledger

        ledger, found = find_ledger(plan_source, piece.topic, piece.ledger_id)
        bookies.update(found)
        return ledger

    return replan


def _log_end(task: ScanTask, counters: ScanCounters, duration_s: float, outcome: str) -> None:
    log.info(
        "scan.task_done",
        extra={
            "topic": task.pieces[0].topic if task.pieces else "",
            "pieces": len(task.pieces),
            **asdict(counters),
            "duration_ms": round(1000 * duration_s),
            "outcome": outcome,
        },
    )


def _warn_of_what_is_missing(task: ScanTask, spec: ScanSpec, counters: ScanCounters) -> None:
    missing: list[str] = []
    if counters.bad_records and spec.on_bad_record is not OnBadRecord.FAIL:
        what = "left out" if spec.on_bad_record is OnBadRecord.SKIP else "shown as null"
        missing.append(f"{counters.bad_records} that cannot be decoded {what} (onBadRecord={spec.on_bad_record.value})")
    if counters.lost_entries:
        missing.append(f"{counters.lost_entries} entries lost (failOnDataLoss=false)")
    if missing:
        facts = {"bad_records": counters.bad_records, "lost_entries": counters.lost_entries}
        log.warning("scan.incomplete: of %s: %s", places(task.pieces), ", ".join(missing), extra=facts)


def places(pieces: Sequence[Piece]) -> str:
    some = [f"{piece.topic} {piece.ledger_id}:{piece.first_entry_id}..{piece.last_entry_id}" for piece in pieces[:3]]
    more = f" and {len(pieces) - 3} ranges more" if len(pieces) > 3 else ""
    return f"{', '.join(some)}{more}"
