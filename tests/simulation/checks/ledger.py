"""Checks of one ledger's life where its clients see it (L3-L5, L7-L9, L11, L13, L14): each answer to its writer, each read.

`LedgerClientProbe` stands between a broker's code and its real `LedgerClient`; `ConnectionsProbe` between that client and the
network, where it sees what a recoverer truly learned.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cepheid_ledger import ClosedLedger, FoundEnd, LedgerClient, LedgerError, LedgerWriter, NewLedger
from cepheid_rpc import (
    AddSource,
    BookieConnection,
    Buffer,
    DigestMismatchError,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
)
from tests.simulation.checks.history import History, RecovererFacts
from tests.simulation.checks.records import check_end

_FENCED_ANSWERS = (Status.OK, Status.NO_LEDGER, Status.NO_ENTRY, Status.BAD_DIGEST)


class LedgerClientProbe:
    """What a managed ledger uses of a `LedgerClient`, observed. `process` names the client's process and incarnation."""

    def __init__(self, client: LedgerClient, history: History, process: str) -> None:
        self._client = client
        self._history = history
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create(self, **options: Any) -> WriterProbe:
        return self._observed(await self._client.create(**options))

    def begin(self, new: NewLedger) -> WriterProbe:
        return self._observed(self._client.begin(new))

    def _observed(self, writer: LedgerWriter) -> WriterProbe:
        history = self._history
        history.check("L14", writer.ledger_id not in history.sent, f"ledger id {writer.ledger_id} was given out twice")
        history.sent[writer.ledger_id] = []
        history.writers[writer.ledger_id] = writer
        return WriterProbe(writer, history)

    async def recover(self, ledger_id: int, **options: Any) -> ClosedLedger:
        end = await self._client.recover(ledger_id, **options)
        self._history.note(f"{self._process} recovered ledger {ledger_id} to {end.last_entry_id}")
        check_end(self._history, ledger_id, end, "a recoverer")
        return end

    async def find_end(self, ledger_id: int) -> FoundEnd:
        """The checks of the commit judge what is still to be written."""
        found = await self._client.find_end(ledger_id)
        self._history.note(f"{self._process} found the end of ledger {ledger_id} at {found.end.last_entry_id}")
        if found.closing is None:
            check_end(self._history, ledger_id, found.end, "a recoverer")
        return found

    async def open_reader(self, ledger_id: int) -> ReaderProbe:
        return ReaderProbe(await self._client.open_reader(ledger_id), ledger_id, self._history, self._process)

    async def delete(self, ledger_id: int, **options: Any) -> None:
        await self._client.delete(ledger_id, **options)


class WriterProbe:
    def __init__(self, writer: Any, history: History) -> None:
        self._writer = writer
        self._history = history
        self.ledger_id: int = writer.ledger_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append(self, payloads: Sequence[Buffer], on_done: Callable[[EntryGroup | LedgerError], None]) -> EntryGroup | None:
        copies = [bytes(payload) for payload in payloads]
        before = self._writer.last_add_pushed

        def observed(outcome: EntryGroup | LedgerError) -> None:
            if isinstance(outcome, EntryGroup):
                self._on_told_ok(outcome)
            on_done(outcome)

        self._history.sent[self.ledger_id] += copies  # before the append: it may reach a bookie within the call
        group: EntryGroup | None = self._writer.append(payloads, observed)
        pushed = self._writer.last_add_pushed - before
        if pushed != len(copies):
            del self._history.sent[self.ledger_id][-len(copies) :]
            self._history.check("L4", pushed == 0, f"append of {len(copies)} entries pushed {pushed}")
        return group

    async def close(self) -> ClosedLedger:
        end: ClosedLedger = await self._writer.close()
        check_end(self._history, self.ledger_id, end, "its writer")
        lac = self._writer.last_add_confirmed
        self._history.check("L8", end.last_entry_id == lac, f"the writer of {self.ledger_id} closed at {end}, its LAC is {lac}")
        return end

    def _on_told_ok(self, group: EntryGroup) -> None:
        history, ledger_id = self._history, self.ledger_id
        acked = history.acked.get(ledger_id, 0)
        name = f"{ledger_id}:{group.first_entry_id}..{group.last_entry_id}"
        history.check("L4", group.first_entry_id == acked, lambda: f"told OK for {name} when {acked} entries were")
        history.check("L4", group.last_entry_id <= history.true_lac(ledger_id), lambda: f"told OK for {name} above LAC")
        history.acked[ledger_id] = group.last_entry_id + 1
        record = history.ledgers.get(ledger_id)
        if record is None:  # a late answer: what it speaks of was in the ledger when it was deleted, or it is a lie
            last = history.deleted[ledger_id].last_entry_id
            told = last is not None and group.last_entry_id <= last
            history.check("L13", told, lambda: f"told OK for {name} of a deleted ledger; {history.story(ledger_id)}")
            return
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            answered = history.answered(record, entry_id)  # disks may be lost behind their answers: L6
            history.check(
                "L3",
                len(answered) >= record.ack_quorum,
                lambda e=entry_id, h=answered: f"told OK for {ledger_id}:{e}, which only {h} hold; {history.story(ledger_id)}",
            )
        if record.last_entry_id is not None:
            history.check(
                "L5", group.last_entry_id <= record.last_entry_id, lambda: f"told OK for {name}; {history.story(ledger_id)}"
            )


class ReaderProbe:
    def __init__(self, reader: Any, ledger_id: int, history: History, process: str) -> None:
        self._reader = reader
        self._process = process
        self._ledger_id = ledger_id
        self._history = history
        self._lac = -1
        self.is_of_a_topic = True
        """False: a workload reads the ledger past its topic, which does not know of that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        reads, place = self._history.reads, (self._process, self._ledger_id)
        reads[place] = reads.get(place, 0) + self.is_of_a_topic
        try:
            groups: list[EntryGroup] = await self._reader.read(first, last, max_bytes=max_bytes)
        finally:
            reads[place] -= self.is_of_a_topic
        expected = first
        for group in groups:
            self._check_group(group, expected)
            expected = group.last_entry_id + 1
        return groups

    async def read_lac(self) -> int:
        lac: int = await self._reader.read_lac()
        history, end = self._history, self._history.readable_end(self._ledger_id)
        history.check("L9", lac <= end, lambda: f"a reader of {self._ledger_id} is told LAC {lac}, the end is {end}")
        history.check("L9", lac >= self._lac, lambda: f"a reader's LAC of {self._ledger_id} fell from {self._lac} to {lac}")
        self._lac = lac
        return lac

    def _check_group(self, group: EntryGroup, expected: int) -> None:
        history, ledger_id = self._history, self._ledger_id
        end = history.readable_end(ledger_id)
        history.check("L9", group.first_entry_id == expected, lambda: f"reading {ledger_id} from {expected} gave {group!r}")
        history.check("L9", group.last_entry_id <= end, lambda: f"a reader got {group!r}; {history.story(ledger_id)}")
        sent = history.sent[ledger_id][group.first_entry_id : group.last_entry_id + 1]
        history.check("L7", [bytes(payload) for payload in group.payloads()] == sent, lambda: f"{group!r} is not what was sent")


class ConnectionsProbe:
    """The registry of one process; remembers what its recoveries were told."""

    def __init__(self, connections: Any, history: History, process: str) -> None:
        self._connections = connections
        self._history = history
        self._process = process

    def get(self, bookie_id: str) -> BookieConnection:
        return ConnectionProbe(self._connections.get(bookie_id), self._history, self._process)


class ConnectionProbe:
    def __init__(self, connection: BookieConnection, history: History, process: str) -> None:
        self._connection = connection
        self._history = history
        self._process = process

    @property
    def bookie_id(self) -> str:
        return self._connection.bookie_id

    def open_add_stream(self, source: AddSource) -> Any:
        return self._connection.open_add_stream(source)

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        if not request.fence:
            return await self._connection.read_lac(request)
        learned = self._history.recoverer(self._process, request.ledger_id)  # before the answer: disks may be lost from here on
        answer = await self._connection.read_lac(request)
        if answer.status in _FENCED_ANSWERS:
            learned.fenced[self.bookie_id] = None
        learned.last_add_confirmed = max(learned.last_add_confirmed, _confirmed_by(answer))
        return answer

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        if request.fence:
            self._check_covered(request.ledger_id)
        async for chunk in self._connection.read(request):
            if (learned := self._recovery_of(request)) is not None and self._is_fenced(request.ledger_id):
                negatives = learned.negatives.setdefault(self.bookie_id, [])
                negatives += [(m.first_entry_id, m.last_entry_id) for m in chunk.missing if m.status.certain_no]
            yield chunk

    def _recovery_of(self, request: ReadRequest) -> RecovererFacts | None:
        """Whoever fenced a ledger and reads behind all that it was told recovers it, whether or not its reads say so."""
        learned = self._history.recoverers.get((self._process, request.ledger_id))
        return learned if learned is not None and request.last_entry_id > learned.last_add_confirmed else None

    def _is_fenced(self, ledger_id: int) -> bool:
        """Else the no of this bookie says nothing of later: what is on its way may yet be answered OK."""
        return ledger_id in self._history.bookie(self.bookie_id).fenced

    async def write_lac(self, request: ExplicitLac) -> Status:
        return await self._connection.write_lac(request)

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _check_covered(self, ledger_id: int) -> None:
        history = self._history
        record = history.ledgers.get(ledger_id)
        if record is None:
            return
        fenced = history.recoverer(self._process, ledger_id).fenced
        ensemble, quorum = record.last_fragment.ensemble, record.write_quorum
        needed = quorum - record.ack_quorum + 1
        if record.is_closed:
            return  # somebody else finished; what this one still does has no effect
        for start in range(len(ensemble)):
            window = [ensemble[(start + offset) % len(ensemble)] for offset in range(quorum)]
            answered = [bookie for bookie in window if bookie in fenced]
            history.check(
                "L11",
                len(answered) >= needed,
                lambda window=window, answered=answered: (
                    f"{self._process} reads {ledger_id} to recover it, of {window} only {answered} are fenced"
                ),
            )


def _confirmed_by(answer: LacAnswer) -> int:
    """The LAC that an undamaged entry carries."""
    group = answer.highest_entry
    if group is None:
        return -1
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        return -1
    return group.header(group.first_entry_id).last_add_confirmed
