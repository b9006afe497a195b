"""A bookie in memory that keeps what ledger-protocol §6 promises, with switches for faults. Answers in the next loop turns.

MemoryBookie("a").connection() is a BookieConnection; MemoryCluster is a registry of several, for a LedgerClient.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cepheid_rpc import (
    AddAnswer,
    AddRequest,
    AddSource,
    AddStream,
    BookieConnection,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
)


class MemoryBookie:
    """Switches: `hang` (nothing is answered, adds are kept back), `down` (connections fail), `refuse` (adds get this status),
    `drop_adds` (adds are stored but never answered), `delay_s` (of every answer), `read_delay_s` (of range reads),
    `mute` (reads end without an answer), `lac_down` (LAC requests fail), `lac_status` (they are answered so, and nothing is
    fenced), `refuse_polls` (an older release: requests that wait fail), `full_of_readers` (they are refused), `limbo` (it may
    have forgotten things: what it does not have is unknown), `lie_about_lac` (what its highest entry claims, under a digest that
    is wrong), `checks_disk` (it says which of its copies are damaged, as real bookies do; else the damage shows where they
    arrive)."""

    def __init__(self, bookie_id: str) -> None:
        self.bookie_id = bookie_id
        self.entries: dict[int, dict[int, EntryGroup]] = {}  # ledger → entry id → one-entry group
        self.keys: dict[int, bytes] = {}
        self.fenced: dict[int, bool] = {}
        self.explicit_lacs: dict[int, int] = {}
        self.hang = False
        self.down = False
        self.refuse: Status | None = None
        self.drop_adds = False
        self.delay_s = self.read_delay_s = 0.0
        self.lac_down = self.limbo = self.refuse_polls = self.full_of_readers = self.mute = False
        self.lie_about_lac: int | None = None
        self.lac_status: Status | None = None
        self.checks_disk = False
        self.unreadable: set[int] = set()  # entries that its disk cannot read, of any ledger
        self.add_log: list[AddRequest] = []
        self.reads: list[ReadRequest] = []
        self.lac_requests: list[LacRequest] = []
        self.streams: list[MemoryStream] = []
        self.answer_per_request = False
        self.messages = 0

    def __repr__(self) -> str:
        held = {ledger: f"{min(entries)}..{max(entries)}" for ledger, entries in self.entries.items() if entries}
        return f"<MemoryBookie {self.bookie_id}: {held}, fenced {list(self.fenced)}>"

    def connection(self) -> MemoryConnection:
        return MemoryConnection(self)

    # What operators of the tests do

    def hold(self, *groups: EntryGroup) -> None:
        """Puts entries there as if they had been added."""
        for group in groups:
            self._store(group)

    def ids(self, ledger_id: int) -> list[int]:
        return sorted(self.entries.get(ledger_id, {}))

    def damage(self, ledger_id: int, entry_id: int) -> None:
        group = self.entries[ledger_id][entry_id]
        data = bytearray(group.data)
        data[-1] ^= 1
        self.entries[ledger_id][entry_id] = EntryGroup(ledger_id, entry_id, list(group.ends), bytes(data))

    def break_streams(self) -> None:
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.break_off(BookieUnavailableError(f"{self.bookie_id} broke the stream"))

    # What it does

    def add(self, request: AddRequest) -> Status:
        group = request.group
        ledger_id = group.ledger_id
        self.add_log.append(request)
        if self.refuse is not None:
            return self.refuse
        if self.keys.setdefault(ledger_id, request.master_key) != request.master_key:
            return Status.UNAUTHORIZED
        if self.fenced.get(ledger_id) and not request.recovery:
            return Status.FENCED
        try:
            group.verify()
        except DigestMismatchError:
            return Status.BAD_DIGEST
        self._store(group)
        return Status.OK

    def _store(self, group: EntryGroup) -> None:
        held = self.entries.setdefault(group.ledger_id, {})
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            entry = group.slice(entry_id, entry_id)
            before = held.get(entry_id, entry)
            assert before == entry or not is_valid(before), f"{self.bookie_id}: other bytes for entry {entry_id}"
            held[entry_id] = entry

    async def answer_time(self) -> None:
        if self.down:
            raise BookieUnavailableError(f"{self.bookie_id} is down")
        await asyncio.sleep(self.delay_s)
        while self.hang:  # noqa: ASYNC110 - a switch that tests flip, not an event
            await asyncio.sleep(0.001)

    def fence(self, ledger_id: int) -> None:
        self.fenced[ledger_id] = True

    def lac(self, request: LacRequest) -> LacAnswer:
        self.lac_requests.append(request)
        if self.keys.setdefault(request.ledger_id, request.master_key) != request.master_key:
            return LacAnswer(Status.UNAUTHORIZED)
        if request.fence:
            self.fence(request.ledger_id)
        return self.look_at_lac(request)

    def may_wait(self, request: LacRequest, answer: LacAnswer) -> bool:
        settled = self.fenced.get(request.ledger_id) or self.limbo or self.down
        return request.wait_ms > 0 and answer.last_add_confirmed <= request.above and not settled

    def look_at_lac(self, request: LacRequest) -> LacAnswer:
        entries = self.entries.get(request.ledger_id)
        explicit = self.explicit_lacs.get(request.ledger_id, -1)
        if not entries:
            no = Status.NO_LEDGER if not request.fence else Status.NO_ENTRY
            no = Status.UNKNOWN if self.limbo else no
            return LacAnswer(Status.OK if explicit >= 0 else no, explicit, explicit)
        highest = entries[max(entries)]
        if self.checks_disk and not is_valid(highest):
            return LacAnswer(Status.BAD_DIGEST)
        if self.lie_about_lac is not None:
            data = bytearray(highest.data)
            data[16:24] = self.lie_about_lac.to_bytes(8, "big")
            highest = EntryGroup(request.ledger_id, highest.first_entry_id, list(highest.ends), bytes(data))
        piggybacked = highest.header(highest.first_entry_id).last_add_confirmed
        return LacAnswer(Status.OK, max(explicit, piggybacked), explicit, highest)

    def chunk(self, request: ReadRequest) -> ReadAnswer:
        self.reads.append(request)
        if request.fence:
            self.fence(request.ledger_id)
        entries = self.entries.get(request.ledger_id)
        first, last = request.first_entry_id, request.last_entry_id
        if entries is None:
            status = Status.NO_ENTRY if self.fenced.get(request.ledger_id) else Status.NO_LEDGER
            status = Status.UNKNOWN if self.limbo else status
            return ReadAnswer((), (MissingEntries(first, last, status),), last + 1)
        no = Status.UNKNOWN if self.limbo else Status.NO_ENTRY
        groups: list[EntryGroup] = []
        missing: list[MissingEntries] = []
        size, entry_id, highest = 0, first, max(entries)
        while entry_id <= last and size < request.max_bytes:
            if entry_id > highest:
                missing.append(MissingEntries(entry_id, last, no))
                entry_id = last + 1
                break
            group = entries.get(entry_id)
            if group is None:
                missing.append(MissingEntries(entry_id, entry_id, no))
            elif entry_id in self.unreadable:
                missing.append(MissingEntries(entry_id, entry_id, Status.IO_ERROR))
            elif self.checks_disk and not is_valid(group):
                missing.append(MissingEntries(entry_id, entry_id, Status.BAD_DIGEST))
            else:
                groups.append(group)
                size += group.size_bytes
            entry_id += 1
        return ReadAnswer(tuple(groups), tuple(missing), entry_id)


class MemoryStream:
    """Takes a message a loop turn, as a transport does; answers in order, merged into ranges."""

    def __init__(self, bookie: MemoryBookie, source: AddSource) -> None:
        self._bookie = bookie
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._held_back: list[AddRequest] = []
        self.closed = False

    def wake(self) -> None:
        if self._timer is None and not self.closed:
            self._timer = self._loop.call_soon(self._take)

    async def aclose(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()

    def break_off(self, error: BaseException) -> None:
        if not self.closed:
            self.closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._source.on_broken(error)

    def _take(self) -> None:
        self._timer = None
        if self._bookie.down:
            self.break_off(BookieUnavailableError(f"{self._bookie.bookie_id} is down"))
            return
        if not self._bookie.hang:
            self._held_back += self._source.next_message(1 << 20)
        if self._bookie.hang:
            self._timer = self._loop.call_later(0.001, self._take)
        elif self._held_back:
            self._bookie.messages += 1
            self._timer = self._loop.call_later(self._bookie.delay_s, self._answer)

    def _answer(self) -> None:
        requests, self._held_back = self._held_back, []
        answers = [_answer_to(request, self._bookie.add(request)) for request in requests]
        self._timer = self._loop.call_soon(self._take)
        if self._bookie.drop_adds:
            return
        if not self._bookie.answer_per_request:
            answers = _merged(answers)
        self._source.on_answers(answers)


class MemoryConnection:
    def __init__(self, bookie: MemoryBookie) -> None:
        self._bookie = bookie

    @property
    def bookie_id(self) -> str:
        return self._bookie.bookie_id

    def open_add_stream(self, source: AddSource) -> AddStream:
        stream = MemoryStream(self._bookie, source)
        self._bookie.streams.append(stream)
        return stream

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        await self._bookie.answer_time()
        if self._bookie.lac_down:
            raise BookieUnavailableError(f"{self.bookie_id} does not hear LAC requests")
        if self._bookie.lac_status is not None:
            return LacAnswer(self._bookie.lac_status)
        if request.wait_ms and self._bookie.refuse_polls:
            raise BookieUnavailableError(f"{self.bookie_id} is of an older release")
        if request.wait_ms and self._bookie.full_of_readers:
            return LacAnswer(Status.OVERLOADED)
        answer = self._bookie.lac(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        while self._bookie.may_wait(request, answer) and loop.time() < deadline:
            await asyncio.sleep(0.001)
            answer = self._bookie.look_at_lac(request)
        return answer

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        await self._bookie.answer_time()
        await asyncio.sleep(self._bookie.read_delay_s)
        if self._bookie.mute:
            return
        yield self._bookie.chunk(request)

    async def write_lac(self, request: ExplicitLac) -> Status:
        await self._bookie.answer_time()
        self._bookie.explicit_lacs[request.ledger_id] = request.last_add_confirmed
        return Status.OK

    async def aclose(self) -> None:
        pass


class MemoryCluster:
    """Bookies by id: what a LedgerClient needs of its surroundings."""

    def __init__(self, *bookie_ids: str) -> None:
        self.bookies = {bookie_id: MemoryBookie(bookie_id) for bookie_id in bookie_ids}
        self.not_registered: list[str] = []
        """Bookies that new ledgers do not get: dead, or read-only."""

    def __getitem__(self, bookie_id: str) -> MemoryBookie:
        return self.bookies[bookie_id]

    def get(self, bookie_id: str) -> BookieConnection:
        return self.bookies[bookie_id].connection()

    def available(self) -> Sequence[str]:
        return [bookie_id for bookie_id in self.bookies if bookie_id not in self.not_registered]


def is_valid(group: EntryGroup) -> bool:
    try:
        group.verify()
    except DigestMismatchError:
        return False
    return True


def _answer_to(request: AddRequest, status: Status) -> AddAnswer:
    return AddAnswer(request.group.ledger_id, request.group.first_entry_id, request.group.last_entry_id, status)


def _merged(answers: Sequence[AddAnswer]) -> list[AddAnswer]:
    merged: list[AddAnswer] = []
    for answer in answers:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.ledger_id, last.status) == (answer.ledger_id, answer.status)
            and last.last_entry_id + 1 == answer.first_entry_id
        ):
            merged[-1] = AddAnswer(answer.ledger_id, last.first_entry_id, answer.last_entry_id, answer.status)
        else:
            merged.append(answer)
    return merged
