"""What really happened, seen from everywhere at once; the checks compare the code's answers with it.

Facts are recorded at the moment they become true (a bookie answers, a writer is told, a record is committed), never asked of
the code under test afterwards. `violated` ends the run, wherever in the code under test it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cepheid_metadata import Chain, CursorRecord, LedgerMetadata, RepairMark
from cepheid_rpc import Status
from tests.simulation.checks.topic_model import TopicModel
from tests.simulation.world.virtual_loop import START_S, VirtualLoop


class InvariantViolation(AssertionError):
    """`rule` is the number in docs/invariants.md."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class HasLac(Protocol):
    @property
    def last_add_confirmed(self) -> int: ...


@dataclass(slots=True)
class BookieFacts:
    """What one bookie promised, over all its incarnations."""

    ok: dict[int, dict[int, bytes]] = field(default_factory=dict)  # ledger → entry → bytes, once answered OK
    fenced: dict[int, float] = field(default_factory=dict)  # ledger → when the fence was answered
    ok_admission: dict[tuple[int, int], int] = field(default_factory=dict)  # (ledger, entry) → the admission first answered OK
    refused: dict[tuple[int, int], Status] = field(default_factory=dict)  # (ledger, entry) → why a regular add was, the last time
    absent: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (ledger, entry) → the last admission before a fencing read's no
    admissions: int = 0
    largest_add_bytes: int = 0
    copied_at: dict[tuple[int, int], float] = field(default_factory=dict)  # (ledger, entry) → when it last took it as a copy
    unindexed: dict[tuple[int, int], bytes] = field(default_factory=dict)  # answered OK, not yet seen in a synced index (S6)
    unrecorded_fences: dict[int, None] = field(default_factory=dict)  # … and fences
    unrecorded_lacs: dict[int, int] = field(default_factory=dict)  # … and the highest LAC of a ledger that a writer told it
    forgotten_through: int = -1  # when its disks were lost: the last ledger that existed then
    losses: int = 0  # how often they were
    lost_at_s: float = float("-inf")  # when they were lost last
    kept: dict[int, dict[int, int]] = field(default_factory=dict)  # ledger → entry → `losses` when it was last answered OK
    dropped: dict[int, int] = field(default_factory=dict)  # ledger → the last admission before its surplus copy was dropped

    def lose_disks(self, last_ledger_id: int, now_s: float) -> None:
        """What was answered OK stays in `ok`; nothing of it is held any more, and no fence."""
        self.forgotten_through = last_ledger_id
        self.lost_at_s = now_s
        self.losses += 1

    def drop(self, ledger_id: int, admission: int) -> None:
        """Owe nothing any more of what was admitted up to `admission`. Fences and LACs stay."""
        self.dropped[ledger_id] = admission
        self.kept.pop(ledger_id, None)
        for entry_id in self.ok.pop(ledger_id, ()):
            self.ok_admission.pop((ledger_id, entry_id), None)

    def holds(self, ledger_id: int, entry_id: int, losses: int | None = None) -> bool:
        """Whether an entry is on its disks now; or was, when they had been lost so often."""
        return self.kept.get(ledger_id, {}).get(entry_id, -1) >= (self.losses if losses is None else losses)


@dataclass(slots=True)
class RecovererFacts:
    """What one process learned while it recovered one ledger, in all its attempts."""

    losses: dict[str, int]  # of every bookie, when it began
    last_add_confirmed: int = -1  # as far as bookies told it
    fenced: dict[str, None] = field(default_factory=dict)  # bookies whose answer to a fencing LAC read arrived
    negatives: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # bookie → ranges that it denied, fenced


class History:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.trace: list[str] | None = None
        self.only: str | None = None
        """The rule that may fail; the others are muted: counted, and not heard."""
        self.checked: dict[str, int] = {}
        self.operations: dict[str, int] = {}
        # Ledgers
        self.sent: dict[int, list[bytes]] = {}  # payloads in the order of their entry ids
        self.acked: dict[int, int] = {}  # how many entries the writer was told OK
        self.writers: dict[int, HasLac] = {}
        self.ledgers: dict[int, LedgerMetadata] = {}  # the committed record
        self.creators: dict[int, str] = {}
        self.records: dict[int, list[tuple[float, LedgerMetadata]]] = {}  # every one that was committed, and when
        self.deleted: dict[int, LedgerMetadata] = {}
        self.restorable: dict[int, None] = {}  # deleted, and may be brought back
        self.departed: dict[int, dict[str, None]] = {}  # bookies that left an ensemble while its writer lived
        self.reads: dict[tuple[str, int], int] = {}  # under way, by process and ledger
        self.ends: dict[int, tuple[int, int]] = {}  # (last, length) that somebody reported as the end
        self.bookies: dict[str, BookieFacts] = {}
        self.recoverers: dict[tuple[str, int], RecovererFacts] = {}
        # Repair
        self.repairers: dict[str, None] = {}  # processes that repair
        self.marks: dict[int, RepairMark] = {}  # the committed records
        self.marked_since: dict[int, dict[str, float]] = {}  # by ledger and bookie that its mark names without a break
        self.registrations: dict[str, list[tuple[float, bool]]] = {}  # by bookie: when it came and left
        self.drained_until: dict[str, float] = {}  # by bookie: when it was last being decommissioned
        self.cookies: dict[str, bytes] = {}  # of bookies: the committed records, also those that were deleted
        self.on_forgotten: Callable[[str], None] = lambda bookie: None  # repair deletes the cookie of a bookie that is empty
        self.is_on_disk: Callable[[str, bytes], bool] = lambda bookie, data: False  # of a bookie that is there
        self.is_readable: Callable[[str, int, int], bool] = lambda bookie, ledger_id, entry_id: True  # nothing of it decayed
        # Object stores
        self.objects: dict[str, bytes] = {}  # by URL
        self.late_objects: dict[str, None] = {}  # see SimObjects
        # Topics
        self.topics: dict[str, TopicModel] = {}  # what clients were told, by key of the chain record
        self.reigning: dict[str, tuple[str, int]] = {}  # by chain: who committed last, and in which epoch
        self.chains: dict[str, Chain] = {}  # the committed records
        self.last_epochs: dict[tuple[str, str], int] = {}  # by key of the chain, and process: of its last opening
        self.largest_ledger: dict[str, int] = {}  # by key of the chain: of all its lives
        self.earlier_epochs: dict[str, int] = {}  # of a topic made anew, by incarnation: those that it had before
        self.cursor_records: dict[str, CursorRecord] = {}
        self.told_last: dict[tuple[str, tuple[int, int]], dict[int, str]] = {}
        """By topic and entry: indices of what was told to be the last message in it, with one who was told. -1: no batch."""
        self.on_trimmed: Callable[[str, Sequence[int], Sequence[int]], None] = lambda key, gone, kept: None  # from a chain
        self.on_emptied: Callable[[str, Chain, Sequence[int]], None] = lambda key, chain, gone: None  # a chain, to be deleted
        self.on_release: Callable[[str, str], None] = lambda key, process: None  # somebody deletes a bundle's owner record

    def __repr__(self) -> str:
        return f"<History {sum(self.operations.values())} operations, {sum(self.checked.values())} checks>"

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._loop.time() - START_S

    def bookie(self, bookie_id: str) -> BookieFacts:
        return self.bookies.setdefault(bookie_id, BookieFacts())

    def recoverer(self, process: str, ledger_id: int) -> RecovererFacts:
        if (process, ledger_id) not in self.recoverers:
            losses = {bookie: facts.losses for bookie, facts in self.bookies.items()}
            self.recoverers[process, ledger_id] = RecovererFacts(losses)
        return self.recoverers[process, ledger_id]

    def did(self, operation: str) -> None:
        """What clients and operators did, and what came of it: an ensemble changed, a trim, a refusal. All of it is progress."""
        self.operations[operation] = self.operations.get(operation, 0) + 1

    def note(self, text: str | Callable[[], str]) -> None:
        """A line of the trace; pass a function where the text costs something."""
        if self.trace is not None:
            self.trace.append(f"{self.now_s:12.6f} {text if isinstance(text, str) else text()}")

    def check(self, rule: str, holds: bool, message: str | Callable[[], str]) -> None:
        """Counts one check of `rule`."""
        self.checked[rule] = self.checked.get(rule, 0) + 1
        if not holds:
            self.violated(rule, message if isinstance(message, str) else message())

    def violated(self, rule: str, message: str) -> None:
        """Ends the run at its next step: the code under test may catch whatever is raised here."""
        if self.only not in (None, rule):
            self.note(f"muted {rule}: {message}")
            return
        self.note(f"VIOLATION {rule}: {message}")
        if self._loop.failure is None:
            self._loop.failure = InvariantViolation(rule, f"{message} (at {self.now_s:.6f} s)")

    def committed(self, record: LedgerMetadata) -> None:
        """This is the ledger's record from now on."""
        self.ledgers[record.ledger_id] = record
        self.records.setdefault(record.ledger_id, []).append((self.now_s, record))

    # -- what follows from the facts ------------------------------------------------------------------------------------

    def true_lac(self, ledger_id: int) -> int:
        """The writer's own LAC. A crashed writer's object stays as it was."""
        writer = self.writers.get(ledger_id)
        return writer.last_add_confirmed if writer is not None else -1

    def readable_end(self, ledger_id: int) -> int:
        """The last entry that any reader may know of."""
        record = self.ledgers.get(ledger_id) or self.deleted.get(ledger_id)
        if record is not None and record.last_entry_id is not None:
            return record.last_entry_id
        return self.true_lac(ledger_id)

    def epoch_of(self, chain: Chain) -> int:
        """It rises also when the topic is deleted and made anew, whose record counts from one again."""
        return self.earlier_epochs.get(chain.incarnation, 0) + chain.epoch

    def entries_of(self, ledger_id: int) -> int:
        """How many it surely has, and its topic counts: to its recorded end, or those that its writer was told OK."""
        record = self.ledgers.get(ledger_id) or self.deleted.get(ledger_id)
        is_closed = record is not None and record.last_entry_id is not None
        return record.last_entry_id + 1 if is_closed else self.acked.get(ledger_id, 0)

    def bytes_of(self, ledger_id: int) -> int:
        """Of these entries."""
        return sum(map(len, self.sent.get(ledger_id, ())[: self.entries_of(ledger_id)]))

    def was_surplus(self, ledger_id: int, bookie_id: str, since_s: float) -> bool:
        """Whether the ledger was closed and named this bookie nowhere, at some moment since then."""
        records = self.records.get(ledger_id, [])
        ends = [*(begin for begin, _ in records[1:]), self.now_s]
        return any(
            record.is_closed and not any(bookie_id in fragment.ensemble for fragment in record.fragments)
            for (_, record), end in zip(records, ends, strict=True)
            if end >= since_s
        )

    def names(self, ledger_id: int, entry_id: int, bookie_id: str) -> bool:
        """Whether metadata says that this bookie has the entry."""
        record = self.ledgers.get(ledger_id)
        return record is not None and bookie_id in write_set_of(record, entry_id)

    def has(self, bookie_id: str, ledger_id: int, entry_id: int) -> bool:
        """Whether a bookie has an entry on its disks, also when it was counted as lost with them, or nobody was told OK."""
        if self.has_told(bookie_id, ledger_id, entry_id):
            return True
        copies = [facts.ok.get(ledger_id, {}).get(entry_id) for facts in self.bookies.values()]
        data = next((each for each in copies if each is not None), None)
        return data is not None and self.is_on_disk(bookie_id, data)

    def has_told(self, bookie_id: str, ledger_id: int, entry_id: int) -> bool:
        """Whether a bookie has an entry on its disks for which it answered OK."""
        facts = self.bookie(bookie_id)
        data = facts.ok.get(ledger_id, {}).get(entry_id)
        return data is not None and (facts.holds(ledger_id, entry_id) or self.is_on_disk(bookie_id, data))

    def on_registration(self, bookie_id: str, is_registered: bool) -> None:
        changes = self.registrations.setdefault(bookie_id, [])
        if self.is_registered(bookie_id) is not is_registered:
            changes.append((self.now_s, is_registered))

    def is_registered(self, bookie_id: str) -> bool:
        changes = self.registrations.get(bookie_id)
        return bool(changes) and changes[-1][1]

    def was_away_within(self, bookie_id: str, seconds: float) -> bool:
        """Whether it was not registered at some moment of the last seconds."""
        return self._was_within(bookie_id, seconds, is_registered=False)

    def was_registered_within(self, bookie_id: str, seconds: float) -> bool:
        return self._was_within(bookie_id, seconds, is_registered=True)

    def lost_disks_while_registered(self, bookie_id: str) -> bool:
        """Whether its disks were lost since it registered last: it did not come back since."""
        changes = self.registrations.get(bookie_id, [])
        return self.bookie(bookie_id).lost_at_s > max((at_s for at_s, state in changes if state), default=float("inf"))

    def _was_within(self, bookie_id: str, seconds: float, *, is_registered: bool) -> bool:
        changes = self.registrations.get(bookie_id, [])
        recent = [state for at_s, state in changes if at_s >= self.now_s - seconds]
        before = [state for at_s, state in changes if at_s < self.now_s - seconds]
        return is_registered in [before[-1] if before else False, *recent]

    def places_of(self, record: LedgerMetadata, entry_id: int) -> list[str]:
        """The write set; of an entry that repair calls lost, also the bookies that it remembers."""
        mark = self.marks.get(record.ledger_id)
        is_lost = mark is not None and any(run.first <= entry_id <= run.last for run in mark.lost)
        return [*write_set_of(record, entry_id), *(mark.former if mark is not None and is_lost else ())]

    def answered(self, record: LedgerMetadata, entry_id: int) -> list[str]:
        """The bookies of the entry's write set that ever answered OK for it (durable then, by S1)."""
        write_set = self.places_of(record, entry_id)
        return [bookie for bookie in write_set if entry_id in self.bookie(bookie).ok.get(record.ledger_id, ())]

    def holders(self, record: LedgerMetadata, entry_id: int, losses: Mapping[str, int] | None = None) -> list[str]:
        """Those that have it on their disks (since they answered, by S2); or had it when disks had been lost so often."""
        return [
            bookie
            for bookie in self.places_of(record, entry_id)
            if self.bookie(bookie).holds(record.ledger_id, entry_id, None if losses is None else losses.get(bookie, 0))
        ]

    def story(self, ledger_id: int) -> str:
        """For failure messages: all that is known of one ledger."""
        record = self.ledgers.get(ledger_id) or self.deleted.get(ledger_id)
        parts: list[Any] = [f"ledger {ledger_id}: sent {len(self.sent.get(ledger_id, ()))}, told OK {self.acked.get(ledger_id, 0)}"]
        if record is not None:
            fragments = " ".join(f"{fragment.first_entry_id}:[{' '.join(fragment.ensemble)}]" for fragment in record.fragments)
            parts.append(f"{record.state} last {record.last_entry_id} {fragments}{'' if ledger_id in self.ledgers else ' DELETED'}")
        for bookie_id, facts in self.bookies.items():
            if ledger_id in facts.ok or ledger_id in facts.fenced:
                held, lost = [], []
                for entry_id in sorted(facts.ok.get(ledger_id, ())):
                    (held if facts.holds(ledger_id, entry_id) else lost).append(entry_id)
                what = f"{_runs(held)}{f' lost {_runs(lost)}' if lost else ''}"
                parts.append(f"{bookie_id} {'fenced ' if ledger_id in facts.fenced else ''}{what}")
        return "; ".join(parts)


def write_set_of(record: LedgerMetadata, entry_id: int) -> list[str]:
    """Said once more, so that a mistake in the product's own arithmetic shows."""
    ensemble = record.fragment_of(entry_id).ensemble
    return [ensemble[(entry_id + place) % len(ensemble)] for place in range(record.write_quorum)]


def _runs(entry_ids: list[int]) -> str:
    runs: list[list[int]] = []
    for entry_id in entry_ids:
        if runs and entry_id == runs[-1][1] + 1:
            runs[-1][1] = entry_id
        else:
            runs.append([entry_id, entry_id])
    return ",".join(f"{first}..{last}" for first, last in runs) or "nothing"
