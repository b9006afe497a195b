"""What a bookie has promised, and the check that it keeps it: the model of the crash tests."""

from __future__ import annotations

from cepheid_bookie import Bookie
from cepheid_rpc import AddAnswer, AddRequest, EntryGroup, ExplicitLac, LacRequest, Status
from tests.bookie.bookie_support import KEY, add_requests, entries_of, group_of, read_all


class Promises:
    """Sends requests and notes what was answered; `check` asks a later life of the bookie for all of it."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], bytes] = {}
        self.ok: dict[tuple[int, int], bytes] = {}
        self.fenced: dict[int, None] = {}
        self.fence_asked: dict[int, None] = {}
        self.lac: dict[int, int] = {}
        self.broken: list[str] = []

    async def add(self, bookie: Bookie, *groups: EntryGroup, recovery: bool = False) -> list[Status]:
        for group in groups:
            self.sent.update({(group.ledger_id, i): entry for i, entry in entries_of([group]).items()})

        def on_answer(answer: AddAnswer) -> None:
            if answer.status is Status.OK:
                if not recovery and answer.ledger_id in self.fenced:
                    self.broken.append(f"{answer} of a regular add after the fence was answered")
                for i in range(answer.first_entry_id, answer.last_entry_id + 1):
                    self.ok[answer.ledger_id, i] = self.sent[answer.ledger_id, i]

        answers = await add_requests(bookie, [AddRequest(group, KEY, recovery) for group in groups], on_answer)
        assert not self.broken, self.broken
        return [answer.status for answer in answers]

    async def fence(self, bookie: Bookie, ledger_id: int) -> None:
        self.fence_asked[ledger_id] = None
        answer = await bookie.read_lac(LacRequest(ledger_id, KEY, fence=True))
        if answer.status is Status.OK or answer.status.certain_no:
            self.fenced[ledger_id] = None

    async def fence_by_read(self, bookie: Bookie, ledger_id: int, entry_id: int) -> None:
        self.fence_asked[ledger_id] = None
        _, missing = await read_all(bookie, ledger_id, entry_id, entry_id, fence=True)
        if not missing or missing[entry_id].certain_no:
            self.fenced[ledger_id] = None

    async def write_lac(self, bookie: Bookie, ledger_id: int, lac: int) -> None:
        if await bookie.write_lac(ExplicitLac(ledger_id, lac, KEY)) is Status.OK:
            self.lac[ledger_id] = max(lac, self.lac.get(ledger_id, -1))

    async def check(self, bookie: Bookie) -> None:
        """Everything promised holds, and nothing is there that was never sent."""
        ledgers = sorted({ledger_id for ledger_id, _ in self.sent} | set(self.fence_asked) | set(self.lac))
        for ledger_id in ledgers:
            await self._check_entries(bookie, ledger_id)
            answer = await bookie.read_lac(LacRequest(ledger_id, KEY))
            assert answer.explicit_lac >= self.lac.get(ledger_id, -1), f"ledger {ledger_id} forgot its explicit LAC"
            if ledger_id in self.fenced:
                probe = group_of(ledger_id, 1_000_000)
                (status,) = await self.add(bookie, probe)
                assert status is Status.FENCED, f"ledger {ledger_id} forgot its fence: {status}"
                del self.sent[ledger_id, 1_000_000]

    async def _check_entries(self, bookie: Bookie, ledger_id: int) -> None:
        promised = {i: entry for (ledger, i), entry in self.ok.items() if ledger == ledger_id}
        sent = {i: entry for (ledger, i), entry in self.sent.items() if ledger == ledger_id}
        last = max(sent, default=0) + 2
        entries, missing = await read_all(bookie, ledger_id, 0, last)
        lost = sorted(promised.keys() - entries.keys())
        assert not lost, f"ledger {ledger_id}: entries {lost} were answered OK and are {[missing[i].name for i in lost]}"
        for i, entry in entries.items():
            assert sent.get(i) == entry, f"entry {ledger_id}:{i} is not what was sent"
        answer = await bookie.read_lac(LacRequest(ledger_id, KEY))
        if promised:
            assert answer.highest_entry is not None, f"{answer} of ledger {ledger_id}, which holds {max(promised)}"
            assert answer.highest_entry.first_entry_id >= max(promised)
