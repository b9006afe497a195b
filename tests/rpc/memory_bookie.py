"""A bookie that keeps everything in memory and answers when told to: the other end of the transport's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from cepheid_rpc import (
    AddAnswer,
    AddRequest,
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
    def __init__(self) -> None:
        self.groups: dict[int, list[EntryGroup]] = {}
        self.requests: list[AddRequest] = []
        self.explicit_lacs: dict[int, int] = {}
        self.held: list[Callable[[], None]] = []
        self.hold_answers = False
        self.chunks_read = 0
        self.reads_ended = 0
        self.speaks = asyncio.Event()
        self.speaks.set()

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None:
        answers = []
        for request in requests:
            group = request.group
            self.requests.append(request)
            self.groups.setdefault(group.ledger_id, []).append(group)
            answers.append(AddAnswer(group.ledger_id, group.first_entry_id, group.last_entry_id, Status.OK))
        if self.hold_answers:
            self.held.append(lambda: on_answers(answers))
        else:
            asyncio.get_running_loop().call_soon(on_answers, answers)

    def release(self) -> None:
        held, self.held = self.held, []
        for answer in held:
            answer()

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        await self.speaks.wait()
        groups = self.groups.get(request.ledger_id)
        if groups is None:
            return LacAnswer(Status.NO_LEDGER)
        last = groups[-1].last_entry_id
        return LacAnswer(Status.OK, last - 1, self.explicit_lacs.get(request.ledger_id, -1), groups[-1].slice(last, last))

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        """One chunk per stored group."""
        next_id = request.first_entry_id
        try:
            await self.speaks.wait()
            for group in self.groups.get(request.ledger_id, ()):
                if group.last_entry_id < next_id or group.first_entry_id > request.last_entry_id:
                    continue
                next_id = group.last_entry_id + 1
                self.chunks_read += 1
                yield ReadAnswer((group,), (), next_id)
            if next_id <= request.last_entry_id:
                missing = MissingEntries(next_id, request.last_entry_id, Status.NO_ENTRY)
                yield ReadAnswer((), (missing,), request.last_entry_id + 1)
        finally:
            self.reads_ended += 1

    async def write_lac(self, request: ExplicitLac) -> Status:
        self.explicit_lacs[request.ledger_id] = request.last_add_confirmed
        return Status.OK


class QueueSource:
    """An AddSource over a list of requests, remembering what it hears."""

    def __init__(self) -> None:
        self.waiting: list[AddRequest] = []
        self.messages = 0
        self.answers: list[AddAnswer] = []
        self.answer_messages = 0
        self.broken: list[BaseException] = []

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        taken: list[AddRequest] = []
        size_bytes = 0
        while self.waiting and (not taken or size_bytes + self.waiting[0].group.size_bytes <= max_bytes):
            request = self.waiting.pop(0)
            size_bytes += request.group.size_bytes
            taken.append(request)
        self.messages += bool(taken)
        return taken

    def on_answers(self, answers: Sequence[AddAnswer]) -> None:
        self.answers += answers
        self.answer_messages += 1

    def on_broken(self, error: BaseException) -> None:
        self.broken.append(error)
