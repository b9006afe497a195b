"""Checks of the storage node's promises: S1-S5, S8 and S12 while it answers; S2, S3, S6 and S8 by replaying copies of its disk.

`BookieProbe` stands between the network and a real `Bookie`: it sees every request arrive and every answer leave.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cepheid_bookie.ledger_deletion import HeldCopy
from cepheid_bookie.write_cache import cached_size
from cepheid_ledger.master_key import master_key_of
from cepheid_rpc import (
    AddAnswer,
    AddRequest,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    ReadAnswer,
    ReadRequest,
    Status,
    encode_group,
)
from tests.simulation.checks.copies import check_copies
from tests.simulation.checks.history import BookieFacts, History, write_set_of
from tests.simulation.world.sim_network import ServedBookie

_NO_ENTRY = 1 << 40  # an entry id that no writer reaches
_FENCED_ANSWERS = (Status.OK, Status.NO_LEDGER, Status.NO_ENTRY, Status.BAD_DIGEST)


class Durable(Protocol):
    """The disks of a bookie, as far as power loss leaves them."""

    def is_durable(self, data: bytes) -> bool: ...


class BookieProbe:
    """Implements `ServedBookie` over one incarnation of a bookie."""

    def __init__(
        self, bookie_id: str, bookie: ServedBookie, disk: Durable, history: History, on_fence: Callable[[], None] | None = None
    ) -> None:
        self._id = bookie_id
        self._bookie = bookie
        self._disk = disk
        self._history = history
        self._facts: BookieFacts = history.bookie(bookie_id)
        self._on_fence = on_fence

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None:
        facts = self._facts
        facts.admissions += 1
        admission = facts.admissions
        unanswered: dict[int, deque[AddRequest]] = {}
        for request in requests:
            unanswered.setdefault(request.group.ledger_id, deque()).append(request)
            facts.largest_add_bytes = max(facts.largest_add_bytes, cached_size(request.group))
            self._check_first_bytes(request)
            self._note(lambda request=request: f"< {'recovery ' * request.recovery}add {_name(request.group)}")

        def observed(answers: Sequence[AddAnswer]) -> None:
            for answer in answers:
                self._note(
                    lambda answer=answer: (
                        f"> {answer.status.name} {answer.ledger_id}:{answer.first_entry_id}..{answer.last_entry_id}"
                    )
                )
                self._on_answer(answer, unanswered.get(answer.ledger_id, deque()), admission)
            on_answers(answers)

        self._bookie.add(requests, observed)
        check_bounds(self._id, self._bookie, self._history)

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        held = max(self._facts.ok.get(request.ledger_id, ()), default=-1)
        dropped = self._facts.dropped.get(request.ledger_id)
        self._note(lambda: f"< {'fence' if request.fence else 'lac'} {request.ledger_id}")
        answer = await self._bookie.read_lac(request)
        self._note(lambda: f"> {answer.status.name} lac {answer.last_add_confirmed} of {request.ledger_id}")
        history, ledger_id = self._history, request.ledger_id
        if self._facts.dropped.get(ledger_id) != dropped:
            held = -1  # meanwhile
        if answer.status.certain_no:
            record = history.ledgers.get(ledger_id)
            named = record is not None and any(self._id in fragment.ensemble for fragment in record.fragments)
            history.check("S5", held < 0 or not named, lambda: f"{self._id} denies having anything; {history.story(ledger_id)}")
        if answer.status is Status.OK:
            highest = answer.highest_entry.first_entry_id if answer.highest_entry is not None else -1
            forgotten = ledger_id <= self._facts.forgotten_through
            history.check(
                "S2", forgotten or highest >= held, lambda: f"{self._id} holds nothing above {highest}; {history.story(ledger_id)}"
            )
            history.check(
                "L9",
                answer.last_add_confirmed <= history.readable_end(ledger_id),
                lambda: f"{self._id} tells LAC {answer.last_add_confirmed}; {history.story(ledger_id)}",
            )
        if request.fence and answer.status in _FENCED_ANSWERS:
            self._on_fenced(ledger_id)
        return answer

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        arrived_after, dropped = self._facts.admissions, self._facts.dropped.get(request.ledger_id)
        promised = [
            entry_id
            for entry_id in self._facts.ok.get(request.ledger_id, ())
            if request.first_entry_id <= entry_id <= request.last_entry_id
        ]
        asked = f"{request.ledger_id}:{request.first_entry_id}..{request.last_entry_id}"
        self._note(lambda: f"< {'fencing ' * request.fence}read {asked}")
        async for chunk in self._bookie.read(request):
            self._note(lambda chunk=chunk: f"> {_names(chunk)} for read {asked}")
            for group in chunk.groups:
                self._check_sent(group.ledger_id, group.first_entry_id, list(group.payloads()))
            for missing in chunk.missing:
                if missing.status.certain_no and self._facts.dropped.get(request.ledger_id) == dropped:
                    self._check_absent(request, missing.first_entry_id, missing.last_entry_id, promised, arrived_after)
            if request.fence and (chunk.groups or any(missing.status in _FENCED_ANSWERS for missing in chunk.missing)):
                self._on_fenced(request.ledger_id)
            yield chunk

    async def write_lac(self, request: ExplicitLac) -> Status:
        status = await self._bookie.write_lac(request)
        if status is Status.OK:
            lacs, ledger_id = self._facts.unrecorded_lacs, request.ledger_id
            lacs[ledger_id] = max(request.last_add_confirmed, lacs.get(ledger_id, -1))
        return status

    def _note(self, text: Callable[[], str]) -> None:
        if self._history.trace is not None:
            self._history.note(lambda: f"{self._id} {text()}")

    # -- the checks -----------------------------------------------------------------------------------------------------

    def _on_answer(self, answer: AddAnswer, unanswered: deque[AddRequest], admission: int) -> None:
        """Answers of one ledger come in the order of its requests: each covers what is next, a part or several of them."""
        entry_id = answer.first_entry_id
        while entry_id <= answer.last_entry_id:
            group = unanswered[0].group if unanswered else None
            if group is None or not group.first_entry_id <= entry_id <= group.last_entry_id:
                self._history.violated("S1", f"{self._id} answers {answer}, which is not what it was asked next")
                return
            last = min(answer.last_entry_id, group.last_entry_id)
            if answer.status is Status.OK:
                self._on_ok(unanswered[0], entry_id, last, admission)
            elif not unanswered[0].recovery:
                self._facts.refused.update({(answer.ledger_id, e): answer.status for e in range(entry_id, last + 1)})
            if last == group.last_entry_id:
                unanswered.popleft()
            entry_id = last + 1

    def _on_ok(self, request: AddRequest, first: int, last: int, admission: int) -> None:
        history, facts, ledger_id = self._history, self._facts, request.group.ledger_id
        if admission <= facts.dropped.get(ledger_id, -1):
            return  # it was dropped before its batch was synced
        ok, kept = facts.ok.setdefault(ledger_id, {}), facts.kept.setdefault(ledger_id, {})
        for entry_id in range(first, last + 1):
            name = (ledger_id, entry_id)
            entry = bytes(request.group.entry(entry_id))
            history.check(
                "S1",
                self._disk.is_durable(entry),
                lambda n=name: f"{self._id} answered OK for {_at(n)}, which power loss can take",
            )
            facts.unindexed[name] = entry
            kept[entry_id] = facts.losses
            known = ok.setdefault(entry_id, entry)
            history.check("L7", known == entry, lambda n=name: f"{self._id} holds two different entries {_at(n)}")
            if request.recovery:
                facts.copied_at[name] = history.now_s
                continue  # passes fences, and tells no producer anything
            forgotten = ledger_id <= facts.forgotten_through
            history.check(
                "S11", not forgotten, lambda n=name: f"{self._id} answered OK for {_at(n)}, its fences were lost with its disks"
            )
            fenced = ledger_id in facts.fenced
            history.check("S3", not fenced, lambda n=name: f"{self._id} answered OK for {_at(n)} after its fence was answered")
            denied = facts.absent.get(name, 0) >= admission
            history.check(
                "S4", not denied, lambda n=name: f"{self._id} got {_at(n)}, denied it to a fencing read, and then answered OK"
            )
            facts.ok_admission.setdefault(name, admission)

    def _on_fenced(self, ledger_id: int) -> None:
        if ledger_id not in self._facts.fenced:
            self._facts.fenced[ledger_id] = self._history.now_s
            self._facts.unrecorded_fences[ledger_id] = None
            self._history.note(f"{self._id} fenced ledger {ledger_id}")
            if self._on_fence is not None:
                self._on_fence()

    def _check_absent(self, request: ReadRequest, first: int, last: int, promised: list[int], arrived_after: int) -> None:
        history, ledger_id = self._history, request.ledger_id
        denied = [entry_id for entry_id in promised if first <= entry_id <= last and history.names(ledger_id, entry_id, self._id)]
        history.check(
            "S5", not denied, lambda: f"{self._id} denies entries {denied} it answered OK for; {history.story(ledger_id)}"
        )
        if request.fence and ledger_id in history.ledgers:
            for entry_id in range(first, min(last, first + 1_000) + 1):
                admitted = self._facts.ok_admission.get((ledger_id, entry_id), arrived_after + 1)
                history.check(
                    "S4",
                    admitted > arrived_after,
                    lambda e=entry_id: f"{self._id} denies {ledger_id}:{e}, admitted before the fencing read, and answered OK",
                )
                self._facts.absent[(ledger_id, entry_id)] = max(arrived_after, self._facts.absent.get((ledger_id, entry_id), 0))

    def _check_sent(self, ledger_id: int, first_entry_id: int, payloads: list[memoryview]) -> None:
        history = self._history
        sent = history.sent.get(ledger_id)
        if sent is None:
            return  # a ledger that no probe watches
        for entry_id, payload in enumerate(payloads, first_entry_id):
            same = entry_id < len(sent) and sent[entry_id] == payload
            history.check("S8", same, lambda entry_id=entry_id: f"{self._id} returns {ledger_id}:{entry_id}, which nobody sent so")

    def _check_first_bytes(self, request: AddRequest) -> None:
        """L4: an entry's own LAC is below it, and no higher than the writer's when it was sent."""
        group, history = request.group, self._history
        true_lac = history.true_lac(group.ledger_id)
        if group.ledger_id not in history.sent:
            return
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            lac = group.header(entry_id).last_add_confirmed
            history.check(
                "L4",
                lac < entry_id and lac <= true_lac,
                lambda e=entry_id, lac=lac: f"entry {group.ledger_id}:{e} carries LAC {lac}, its writer's is {true_lac}",
            )


def check_bounds(bookie_id: str, bookie: Any, history: History) -> None:
    """S12. Soft by one group each; what waits for its ledger to be loaded goes past the door of the cache when it is."""
    settings, cache, admission, journal = bookie.settings, bookie._cache, bookie._admission, bookie._journal
    soft = history.bookie(bookie_id).largest_add_bytes
    late = settings.waiting_bytes + soft
    history.check(
        "S12",
        admission.waiting_bytes <= late
        and cache.active.used_bytes <= cache.half_bytes + late
        and journal.queued_bytes <= settings.journal_queue_bytes + late,
        lambda: f"{bookie_id} holds more than it may: {cache!r}, {admission.waiting_bytes} B wait, {journal!r}; {settings!r}",
    )


class DeletionProbe:
    """Between a garbage collector and its bookie (S10): what metadata has, or can get back, is not deleted, and no copy is dropped
    that metadata counts on.

    `amid_deletion` is awaited when some of the ledgers are deleted and the others are not, with this probe."""

    def __init__(
        self,
        bookie_id: str,
        bookie: Any,
        history: History,
        amid_deletion: Callable[[DeletionProbe], Awaitable[None]] | None = None,
    ) -> None:
        self._amid_deletion = amid_deletion
        self._id = bookie_id
        self._bookie = bookie
        self._history = history
        self._looks: dict[int, tuple[float, int]] = {}  # ledger → when its copy was looked at last, and after which admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bookie, name)

    async def delete_ledgers(self, ledger_ids: Sequence[int]) -> None:
        for ledger_id in ledger_ids:
            living = ledger_id in self._history.ledgers or ledger_id in self._history.restorable
            self._history.check(
                "S10", not living, lambda ledger_id=ledger_id: f"{self._id} deletes; {self._history.story(ledger_id)}"
            )
            self._history.bookie(self._id).kept.pop(ledger_id, None)
            if (record := self._history.ledgers.get(ledger_id)) is not None:
                check_copies(self._history, record, f"{self._id} deletes")
        half = len(ledger_ids) // 2
        if half and self._amid_deletion is not None:
            await self._bookie.delete_ledgers(ledger_ids[:half])
            await self._amid_deletion(self)
            ledger_ids = ledger_ids[half:]
        await self._bookie.delete_ledgers(ledger_ids)

    async def look_at_copy(self, ledger_id: int) -> HeldCopy | None:
        copy: HeldCopy | None = await self._bookie.look_at_copy(ledger_id)
        self._looks[ledger_id] = self._history.now_s, self._history.bookie(self._id).admissions
        return copy

    async def reclaim(self, *, urgent: bool = False) -> list[int]:
        compactions = self._bookie.statistics().compactions
        deleted: list[int] = await self._bookie.reclaim(urgent=urgent)
        if self._bookie.statistics().compactions > compactions:
            self._history.did("compact entry logs")
        return deleted

    async def drop_copy(self, copy: HeldCopy) -> bool:
        """What was admitted before the look is dropped in this step, if nothing was admitted since."""
        history, ledger_id = self._history, copy.state.ledger_id
        looked_s, admission = self._looks[ledger_id]
        surplus = history.was_surplus(ledger_id, self._id, looked_s)
        history.check("S10", surplus, lambda: f"{self._id} drops its copy; {history.story(ledger_id)}")
        if copy.state.adds == copy.adds and self._bookie._ledgers.get(ledger_id) is copy.state:
            history.did("drop a surplus copy")
            history.bookie(self._id).drop(ledger_id, admission)
            if (record := history.ledgers.get(ledger_id)) is not None:
                check_copies(history, record, f"{self._id} drops its copy")
        return bool(await self._bookie.drop_copy(copy))


@dataclass(frozen=True, slots=True)
class Promises:
    """What a bookie has promised by now; a copy, since it goes on promising."""

    ok: dict[int, dict[int, bytes]]
    lost: dict[int, set[int]]  # of these, what went with its disks
    fenced: tuple[int, ...]


def promises_of(facts: BookieFacts) -> Promises:
    ok = {ledger_id: dict(entries) for ledger_id, entries in facts.ok.items()}
    lost: dict[int, set[int]] = {}
    if facts.losses:
        lost = {ledger_id: {e for e in entries if not facts.holds(ledger_id, e)} for ledger_id, entries in ok.items()}
    return Promises(ok, lost, tuple(facts.fenced))


async def check_promises(
    who: str,
    bookie_id: str,
    bookie: ServedBookie,
    history: History,
    promises: Promises,
    has_decayed: Callable[[int, int], bool] | None = None,
) -> None:
    """After a replay (S2, S3, S8): every entry once answered OK is there with its bytes, every fence stands.

    A bookie whose disks may fail at any moment may not know of an entry. One whose disks are well now must give all that it
    did not lose with them, but for what `has_decayed` (ledger, entry).
    """
    for ledger_id, entries in promises.ok.items():
        record = history.ledgers.get(ledger_id)
        if record is not None:
            named = {e: data for e, data in entries.items() if bookie_id in write_set_of(record, e)}
            given = await _check_entries(who, bookie, history, ledger_id, named)
            if has_decayed is not None and ledger_id in history.ledgers:
                owed = named.keys() - given - promises.lost.get(ledger_id, set())
                kept_back = sorted(entry_id for entry_id in owed if not has_decayed(ledger_id, entry_id))
                history.check(
                    "S8",
                    not kept_back,
                    lambda ledger_id=ledger_id, e=kept_back: f"{who} cannot give entries {e}; {history.story(ledger_id)}",
                )
    for ledger_id in promises.fenced:
        await _check_fence(who, bookie, history, ledger_id)


async def _check_entries(who: str, bookie: ServedBookie, history: History, ledger_id: int, expected: dict[int, bytes]) -> set[int]:
    """Returns which of them it gave."""
    given: set[int] = set()
    if not expected:
        return given
    async for chunk in bookie.read(ReadRequest(ledger_id, min(expected), max(expected))):
        for group in chunk.groups:
            for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                data = expected.get(entry_id)
                same = data is None or data == group.entry(entry_id)
                history.check("S8", same, lambda e=entry_id: f"{who} has other bytes for {ledger_id}:{e} than were answered OK")
                given.add(entry_id)
        for missing in chunk.missing:
            lost = [entry_id for entry_id in expected if missing.first_entry_id <= entry_id <= missing.last_entry_id]
            kept = not (missing.status.certain_no and lost)
            history.check("S2", kept, lambda lost=lost: f"{who} lost entries {lost}; {history.story(ledger_id)}")
    return given


async def _check_fence(who: str, bookie: ServedBookie, history: History, ledger_id: int) -> None:
    record = history.ledgers.get(ledger_id) or history.deleted.get(ledger_id)
    assert record is not None
    answered: asyncio.Future[Sequence[AddAnswer]] = asyncio.get_running_loop().create_future()
    group = encode_group(ledger_id, _NO_ENTRY, -1, 0, [b"must be refused"])
    bookie.add([AddRequest(group, master_key_of(record))], lambda answers: answered.done() or answered.set_result(answers))
    (answer,) = await answered
    history.check("S3", answer.status is not Status.OK, lambda: f"{who} forgot its fence; {history.story(ledger_id)}")


def _at(name: tuple[int, int]) -> str:
    return f"{name[0]}:{name[1]}"


def _name(group: EntryGroup) -> str:
    return f"{group.ledger_id}:{group.first_entry_id}..{group.last_entry_id}"


def _names(chunk: ReadAnswer) -> str:
    missing = [f"{m.status.name} {m.first_entry_id}..{m.last_entry_id}" for m in chunk.missing]
    return ", ".join([*map(_name, chunk.groups), *missing]) or "nothing"
