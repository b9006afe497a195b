"""Cuts ranges of topics into tasks by bytes: a pure function, so that a repeated call returns the same tasks.

    topic A   |──ledger 7──|─9─|────────12────────|           ranges, ledger by ledger
                  task 0   |  task 1   |  task 2  | task 3    filled one after the other up to the target, across
    topic B   |3|4|                                 task 3    ledgers, topics and partitions

Rules
1. Every entry of a range is in exactly one piece; pieces and tasks are in the order of the ranges, and of the topic.
2. A ledger's entries count as equally large. The rest of a ledger is not split off if it is below `_SLIVER` of a task.
3. A task is below `MAX_TASK_BYTES` pickled, whatever its size in entries: Spark sends it with every attempt.
4. With `entries_per_task` only the ranges and recorded ends decide, not the current location of the entries: a stream that cuts
   a range again much later gets the same tasks. So a task has at most `MAX_STREAM_PIECES` pieces instead of rule 3.
5. There are at most `max_tasks`. If there would be more, those of a stream are enlarged, by rule 4 always alike, since its cut
   is in the checkpoint, and an error would recur at every restart; so are those made small by `min_tasks`. Otherwise it is an
   error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import Fragment, HistoryPlan, LedgerHistory, Piece, ScanTask, TopicHistory
from cepheid_decode.positions import MessagePosition

MAX_TASK_BYTES = 4096
BEFORE_ENTRIES = 1000
"""Entries read before each piece, for chunked messages that began there, unless `ReadSettings.chunk_lookback` overrides it."""

MAX_STREAM_PIECES = 12
MAX_TASKS = 50_000

_ROOM_BYTES = MAX_TASK_BYTES - 500  # the rest is for pickle itself
_PIECE_BYTES, _FRAGMENT_BYTES, _REFERENCE_BYTES, _STRING_BYTES = 60, 25, 5, 12  # approximate pickled size of each
_BEFORE_BYTES = 800  # of ledgers (eight) and fragments (twenty) before, pickled; of more the oldest are not looked back at
_SLIVER = 1 / 4
_GROWTH = 1.1


@dataclass(frozen=True, slots=True)
class TopicRange:
    """Messages of a topic from `first` (inclusive) to `end` (exclusive)."""

    history: TopicHistory
    first: MessagePosition
    end: MessagePosition


def cut_ranges(
    ranges: Sequence[TopicRange],
    plan: HistoryPlan,
    *,
    target_bytes: int,
    min_tasks: int = 1,
    entries_per_task: Mapping[str, int] | None = None,
    max_tasks: int = MAX_TASKS,
    look_back: int = BEFORE_ENTRIES,
) -> list[ScanTask]:
    """Return the tasks. `entries_per_task`: by topic with partition; `target_bytes` and `min_tasks` are then ignored.

    `look_back`: number of entries before its own whose location a task gets. Raises BadOptionError.
    """
    runs = [run for each in ranges for run in _runs(each, look_back)]
    total_bytes = sum(run.size_bytes for run in runs)
    least, most_growth = 0.0, math.inf
    if entries_per_task is None:
        wanted_bytes = min(target_bytes, -(-total_bytes // min_tasks)) if min_tasks > 1 else target_bytes
        most_growth = target_bytes / max(1, wanted_bytes)
        shares = [max(1.0, wanted_bytes / run.entry_bytes) for run in runs]
    else:
        least = len(runs) / MAX_STREAM_PIECES
        shares = [float(max(1, entries_per_task[run.topic])) for run in runs]
    expected = max(least, sum((run.last - run.first + 1) / share for run, share in zip(runs, shares, strict=True)))
    growth = max(1.0, expected / max_tasks)  # rule 5
    while growth <= most_growth:
        packer = _Packer(plan, None if entries_per_task is None else int(MAX_STREAM_PIECES * growth))
        for run, share in zip(runs, shares, strict=True):
            packer.take(run, share if growth == 1.0 else float(math.ceil(share * growth)))
        tasks = packer.finish()
        if len(tasks) <= max_tasks:
            return tasks
        expected, growth = len(tasks), growth * _GROWTH
    raise _too_many(total_bytes, round(expected), max_tasks)


def _too_many(total_bytes: int, tasks: int, max_tasks: int) -> BadOptionError:
    advice_mb = -(-total_bytes // (max_tasks // 2) >> 20) + 1
    return BadOptionError(
        f"{total_bytes} bytes would be {tasks} tasks, at most {max_tasks} are planned: set targetPartitionBytes to "
        f"{advice_mb}mb or more, or read a shorter range",
        tasks=tasks,
        max_tasks=max_tasks,
        bytes=total_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of a range in one ledger."""

    history: TopicHistory
    ledger: LedgerHistory
    first: int
    last: int  # inclusive
    first_batch_index: int
    end_batch_index: int
    before: tuple[Piece, ...]  # tails of earlier ledgers, the oldest first
    look_back: int

    @property
    def topic(self) -> str:
        return self.history.topic

    @property
    def entry_bytes(self) -> float:
        """The average size; at least 1, for the open ledger of an older server, which does not report its size."""
        return max(1.0, self.ledger.size_bytes / (self.ledger.last_entry_id + 1))

    @property
    def size_bytes(self) -> int:
        return round(self.entry_bytes * (self.last - self.first + 1))

    def piece(self, first: int, last: int) -> Piece:
        fragments = _from_near(fragments_of(self.ledger, max(0, first - self.look_back), last), first)
        return replace(
            piece_of(self.history, self.ledger, first, last, fragments),
            first_batch_index=self.first_batch_index if first == self.first else 0,
            end_batch_index=self.end_batch_index if last == self.last else -1,
            before=_reaching(self.before, self.look_back - first),
        )


def _runs(wanted: TopicRange, look_back: int) -> Iterator[_Run]:
    first, end = wanted.first, wanted.end
    before: tuple[Piece, ...] = ()
    for ledger in wanted.history.ledgers:
        if ledger.last_entry_id < 0:
            continue
        start_entry = max(0, first.entry_id) if ledger.ledger_id == first.ledger_id else 0
        end_index = end.batch_index if ledger.ledger_id == end.ledger_id and end.batch_index > 0 else -1
        last_entry = ledger.last_entry_id
        if ledger.ledger_id == end.ledger_id:
            last_entry = min(last_entry, end.entry_id if end_index >= 0 else end.entry_id - 1)
            end_index = end_index if last_entry == end.entry_id else -1
        if first.ledger_id <= ledger.ledger_id <= end.ledger_id and start_entry <= last_entry:
            starts_here = ledger.ledger_id == first.ledger_id and start_entry == first.entry_id
            yield _Run(
                wanted.history,
                ledger,
                start_entry,
                last_entry,
                max(0, first.batch_index) if starts_here else 0,
                end_index,
                before,
                look_back,
            )
        if ledger.ledger_id <= end.ledger_id and look_back:
            before = _bounded(_reaching((*before, _tail(wanted.history, ledger, look_back)), look_back))


def _reaching(tails: tuple[Piece, ...], entries: int) -> tuple[Piece, ...]:
    """Return as many of the last tails as contain this many entries."""
    start = len(tails)
    while start and entries > 0:
        start -= 1
        entries -= tails[start].last_entry_id - tails[start].first_entry_id + 1
    return tails[start:]


def _bounded(tails: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the tails without the oldest for which a task has no room. The last one always stays."""
    sizes = [_piece_bytes(tail) - len(tail.object_url) for tail in tails]  # as many, wherever they are
    start = 0
    while start < len(tails) - 1 and sum(sizes[start:]) > _BEFORE_BYTES:
        start += 1
    return tails[start:]


def _tail(history: TopicHistory, ledger: LedgerHistory, entries: int) -> Piece:
    last = ledger.last_entry_id
    first = max(0, last + 1 - entries)
    fragments = _from_near(fragments_of(ledger, first, last), last)
    return piece_of(history, ledger, max(first, fragments[0].first_entry_id) if fragments else first, last, fragments)


def piece_of(history: TopicHistory, ledger: LedgerHistory, first: int, last: int, fragments: tuple[Fragment, ...]) -> Piece:
    """Return entries `first..last` of a ledger; `fragments` name their bookies."""
    return Piece(
        history.topic,
        history.partition,
        ledger.ledger_id,
        first,
        last,
        ledger.ensemble_size,
        ledger.write_quorum,
        fragments,
        object_url=ledger.object_url,
        ticket=ledger.ticket,
    )


def _from_near(fragments: tuple[Fragment, ...], entry_id: int) -> tuple[Fragment, ...]:
    """Return the fragments without the oldest before that of `entry_id` for which a task has no room."""
    start = max(0, sum(fragment.first_entry_id <= entry_id for fragment in fragments) - 1)
    size_bytes = 0
    while start > 0 and (size_bytes := size_bytes + _fragment_bytes(fragments[start - 1])) <= _BEFORE_BYTES:
        start -= 1
    return fragments[start:]


def fragments_of(ledger: LedgerHistory, first: int, last: int) -> tuple[Fragment, ...]:
    """Return the fragments with any of `first..last`; none for a ledger that is only an object."""
    if not ledger.fragments:
        return ()
    ends = [fragment.first_entry_id for fragment in ledger.fragments[1:]] + [last + 1]
    return tuple(
        fragment for fragment, end in zip(ledger.fragments, ends, strict=True) if fragment.first_entry_id <= last and end > first
    )


class _Packer:
    """Fills one task after another."""

    def __init__(self, plan: HistoryPlan, max_pieces: int | None) -> None:
        """`max_pieces`: limit per task; None: as many as rule 3 allows."""
        self._plan = plan
        self._max_pieces = max_pieces
        self.tasks: list[ScanTask] = []
        self._start_task()

    def _start_task(self) -> None:
        self._pieces: list[Piece] = []
        self._room = 1.0  # of a task
        self._size_bytes = 0.0
        self._pickled = _Pickled(self._plan)

    def take(self, run: _Run, share: float) -> None:
        """Add a run. `share`: number of this run's entries that fill a task."""
        first = run.first
        while first <= run.last:
            left = run.last - first + 1
            fits = int(self._room * share)
            if self._pieces and fits < min(left, share * _SLIVER):
                self._end_task()
                continue
            count = left if left <= fits + share * _SLIVER else max(1, fits)
            piece = self._shortened(run, first, first + count - 1)
            if piece is None:
                self._end_task()
                continue
            taken = piece.last_entry_id - first + 1
            self._pieces.append(piece)
            self._pickled.add(piece)
            self._room -= taken / share
            self._size_bytes += taken * run.entry_bytes
            first += taken
            if self._room < 1 / share or piece.last_entry_id < run.last:
                self._end_task()

    def _shortened(self, run: _Run, first: int, last: int) -> Piece | None:
        """Return as much of it as a pickled task has room for; None: nothing, in a task that already has pieces."""
        piece = run.piece(first, last)
        if self._max_pieces is not None:
            return piece if len(self._pieces) < self._max_pieces else None  # rule 4
        while self._pickled.size_with(piece) > _ROOM_BYTES:
            if self._pieces:
                return None
            own = [fragment for fragment in piece.fragments if fragment.first_entry_id > first]
            if own:
                piece = run.piece(first, own[len(own) // 2].first_entry_id - 1)
            elif len(piece.before) > 1:
                piece = replace(piece, before=piece.before[1:])
            else:
                return piece  # names so long that one piece alone is too large
        return piece

    def _end_task(self) -> None:
        if self._pieces:
            pickled = self._pickled
            task = ScanTask(
                tuple(self._pieces), pickled.bookies(), pickled.ticket(), round(self._size_bytes), racks=pickled.racks()
            )
            self.tasks.append(task)
        self._start_task()

    def finish(self) -> list[ScanTask]:
        self._end_task()
        return self.tasks


class _Pickled:
    """Approximate pickled size of a task: strings and tails of earlier ledgers count once; later mentions are references."""

    def __init__(self, plan: HistoryPlan) -> None:
        self._plan = plan
        self._strings: dict[str, None] = {}
        self._tails: dict[tuple[str, int], None] = {}  # by topic and ledger
        self._bookies: dict[str, None] = {}
        self._tickets: dict[bytes, None] = {}
        self._size_bytes = 0

    def add(self, piece: Piece) -> None:
        self._size_bytes = self.size_with(piece)
        self._strings |= dict.fromkeys([piece.topic])
        self._tails |= dict.fromkeys(map(_place_of, piece.before))
        self._bookies |= dict.fromkeys(_bookies_of(piece))
        if ticket := self._plan.ticket_of(piece.topic, piece.partition):
            self._tickets[ticket] = None

    def size_with(self, piece: Piece) -> int:
        added = _piece_bytes(piece) + _REFERENCE_BYTES * len(piece.before)
        added += sum(_piece_bytes(tail) for tail in piece.before if _place_of(tail) not in self._tails)
        if piece.topic not in self._strings:
            added += _STRING_BYTES + len(piece.topic.encode())
        for bookie in dict.fromkeys(_bookies_of(piece)):
            if bookie not in self._bookies:
                added += 2 * _STRING_BYTES + len(bookie.encode()) + len(self._plan.bookies.get(bookie, "").encode())
                if bookie in self._plan.racks:
                    added += 2 * _STRING_BYTES + len(self._plan.racks[bookie].encode())
        ticket = self._plan.ticket_of(piece.topic, piece.partition)
        return self._size_bytes + added + (0 if ticket in self._tickets else len(ticket) + _STRING_BYTES)

    def bookies(self) -> tuple[tuple[str, str], ...]:
        return tuple((bookie, self._plan.bookies[bookie]) for bookie in self._bookies if bookie in self._plan.bookies)

    def racks(self) -> tuple[tuple[str, str], ...]:
        return tuple((bookie, self._plan.racks[bookie]) for bookie in self._bookies if bookie in self._plan.racks)

    def ticket(self) -> bytes:
        """The tickets of several topics, separated by a space, which they do not contain."""
        return b" ".join(self._tickets) or self._plan.ticket


def _bookies_of(piece: Piece) -> Iterator[str]:
    for part in (piece, *piece.before):
        for fragment in part.fragments:
            yield from fragment.ensemble


def _place_of(piece: Piece) -> tuple[str, int]:
    return piece.topic, piece.ledger_id


def _piece_bytes(piece: Piece) -> int:
    return _PIECE_BYTES + len(piece.object_url) + len(piece.ticket) + sum(map(_fragment_bytes, piece.fragments))


def _fragment_bytes(fragment: Fragment) -> int:
    return _FRAGMENT_BYTES + _REFERENCE_BYTES * len(fragment.ensemble)
