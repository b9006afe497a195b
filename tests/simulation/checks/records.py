"""Checks of a ledger's record at each commit (L1-L3, L5, L6, L10, L12-L14, M7), and of every end that somebody reports (L8)."""

from __future__ import annotations

from cepheid_ledger import ClosedLedger
from cepheid_metadata import UNDELETED, LedgerMetadata, LedgerState
from tests.simulation.checks.copies import check_copies
from tests.simulation.checks.history import History, write_set_of
from tests.simulation.checks.repair import RepairChecks

_LEGAL = {
    LedgerState.OPEN: (LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED),
    LedgerState.IN_RECOVERY: (LedgerState.IN_RECOVERY, LedgerState.CLOSED),
    LedgerState.CLOSED: (LedgerState.CLOSED,),
}


def check_end(history: History, ledger_id: int, end: ClosedLedger, who: str) -> None:
    """Somebody says: this is the end."""
    reported = (end.last_entry_id, end.length)
    known = history.ends.setdefault(ledger_id, reported)
    history.check("L8", known == reported, lambda: f"{who} reports the end {reported} of ledger {ledger_id}, others {known}")
    record = history.ledgers.get(ledger_id) or history.deleted[ledger_id]
    committed = (record.last_entry_id, record.length_bytes)
    history.check(
        "L8", committed == reported, lambda: f"{who} reports the end {reported}, metadata {committed} of ledger {ledger_id}"
    )


class LedgerRecordChecks:
    """Looks at each commit of a ledger's record."""

    def __init__(self, history: History, repairs: RepairChecks) -> None:
        self._history = history
        self._repairs = repairs

    def on_created(self, record: LedgerMetadata, process: str) -> None:
        history = self._history
        ledger_id = record.ledger_id
        if UNDELETED in record.custom:
            self._on_back(record, process)
            return
        history.check("L14", ledger_id not in history.creators, f"ledger {ledger_id} was created twice")
        history.check("L1", record.state is LedgerState.OPEN, f"ledger {ledger_id} begins as {record.state}")
        history.creators[ledger_id] = process
        history.committed(record)

    def on_changed(self, record: LedgerMetadata, process: str) -> None:
        history = self._history
        before = history.ledgers[record.ledger_id]
        history.committed(record)
        self._check_automaton(before, record)
        self._check_fragments(before, record, process)
        if record.is_closed and not before.is_closed:
            self._check_end(before, record, process)

    def _on_back(self, record: LedgerMetadata, process: str) -> None:
        """An operator brings it back: as it was, and before bookies may have forgotten it."""
        history, ledger_id = self._history, record.ledger_id
        history.did("undelete")
        history.note(lambda: f"{process} brings back {history.story(ledger_id)}")
        history.check("S10", ledger_id in history.restorable, f"ledger {ledger_id} comes back when nobody keeps it any more")
        before = history.deleted.pop(ledger_id)
        history.committed(record)
        same = record.replace(custom=before.custom) == before
        history.check("L1", same, lambda: f"ledger {ledger_id} was {before} and comes back as {record}")

    def on_deleted(self, ledger_id: int, process: str) -> None:
        history = self._history
        record = history.ledgers.pop(ledger_id)
        history.deleted[ledger_id] = record
        history.note(f"{process} deletes ledger {ledger_id}")
        history.check("L13", record.is_closed, f"ledger {ledger_id} was deleted while {record.state}: its writer may go on")
        for key, chain in history.chains.items():
            needed = any(ledger.ledger_id == ledger_id for ledger in chain.ledgers) and chain.is_on_bookies(ledger_id)
            rule = "T2" if ledger_id in (chain.offloaded or {}) else "M7"
            history.check(rule, not needed, lambda key=key: f"{process} deletes ledger {ledger_id}, which {key} names")

    def _check_automaton(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        name = f"ledger {after.ledger_id}"
        check = self._history.check
        check("L1", after.state in _LEGAL[before.state], f"{name}: {before.state} became {after.state}")
        sizes = [(record.ledger_id, record.ensemble_size, record.write_quorum, record.ack_quorum) for record in (before, after)]
        check("L1", sizes[0] == sizes[1], f"{name}: {sizes[0]} became {sizes[1]}")
        if before.is_closed:
            ends = [(record.last_entry_id, record.length_bytes) for record in (before, after)]
            check("L1", ends[0] == ends[1], f"{name}: its end {ends[0]} became {ends[1]}")
        keys = [fragment.first_entry_id for fragment in before.fragments]
        kept = [fragment.first_entry_id for fragment in after.fragments[: len(keys)]]
        check("L1", kept == keys, f"{name}: fragments at {keys} became {kept}")
        distinct = all(len(set(f.ensemble)) == len(f.ensemble) == after.ensemble_size for f in after.fragments)
        check("L1", distinct, f"{name}: not every fragment of {after.fragments} has {after.ensemble_size} bookies")

    def _check_fragments(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        """L2, who edits what; L3, that what was told OK has its quorum under the new version too."""
        is_repair = process in self._history.repairers and before.state is after.state
        match before.state, after.state:
            case _ if is_repair:
                self._repairs.check_claim(before, after, process)
            case LedgerState.OPEN, LedgerState.OPEN:
                self._check_writer_edit(before, after, process)
            case LedgerState.OPEN, LedgerState.CLOSED:
                self._check_writer(after, process, "closes")
                self._check_unchanged(before, after, process)
            case LedgerState.IN_RECOVERY, LedgerState.CLOSED:
                self._check_earlier(before, after, process)  # one recovery may replace the last fragment and add others
            case _:
                self._check_unchanged(before, after, process)
        if not after.is_closed:  # the end has rules of its own
            self._check_quorums(after, process)

    def _check_writer(self, record: LedgerMetadata, process: str, what: str) -> None:
        history, writer = self._history, self._history.creators[record.ledger_id]
        history.check("L2", process == writer, lambda: f"{process} {what} an open ledger of {writer}; {self._story(record)}")

    def _check_writer_edit(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        """Only its writer; only the last fragment; from an entry on below which all is confirmed; nobody returns."""
        history, ledger_id = self._history, after.ledger_id
        self._check_writer(after, process, "changes")
        self._check_kept(before, after, process)
        history.did("change an ensemble")
        old, new = before.last_fragment, after.last_fragment
        lac = history.true_lac(ledger_id)
        history.check(
            "L2",
            new.first_entry_id <= lac + 1,
            lambda: f"{process} begins a fragment at {new.first_entry_id}, confirmed is {lac} alone; {self._story(after)}",
        )
        departed = history.departed.setdefault(ledger_id, {})
        departed.update((bookie, None) for bookie in old.ensemble if bookie not in new.ensemble)
        back = [bookie for bookie in new.ensemble if bookie in departed]
        history.check("L2", not back, lambda: f"{process} takes back {back}, which had left; {self._story(after)}")

    def _check_kept(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        """The last fragment stays, or is replaced as a whole."""
        self._check_earlier(before, after, process)
        if len(after.fragments) > len(before.fragments):
            kept = before.fragments == after.fragments[: len(before.fragments)]
            self._history.check("L2", kept, lambda: f"{process} edits {before.fragments}; {self._story(after)}")

    def _check_earlier(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        """Fragments before the last one stay as they are."""
        kept = before.fragments[:-1] == after.fragments[: len(before.fragments) - 1]
        self._history.check("L2", kept, lambda: f"{process} edits {before.fragments}; {self._story(after)}")

    def _check_unchanged(self, before: LedgerMetadata, after: LedgerMetadata, process: str) -> None:
        same = before.fragments == after.fragments
        self._history.check("L2", same, lambda: f"{process} edits {before.fragments} in {before.state}; {self._story(after)}")

    def _check_quorums(self, record: LedgerMetadata, process: str) -> None:
        history, ledger_id = self._history, record.ledger_id
        for entry_id in range(history.acked.get(ledger_id, 0)):
            answered = history.answered(record, entry_id)
            history.check(
                "L3",
                len(answered) >= record.ack_quorum,
                lambda e=entry_id, h=answered: (
                    f"{process} commits that {ledger_id}:{e}, told OK, is on {h} alone; {self._story(record)}"
                ),
            )

    def _story(self, record: LedgerMetadata) -> str:
        return self._history.story(record.ledger_id)

    def _check_end(self, before: LedgerMetadata, record: LedgerMetadata, process: str) -> None:
        history, ledger_id, last = self._history, record.ledger_id, record.last_entry_id
        assert last is not None
        story = history.story
        acked, sent = history.acked.get(ledger_id, 0), history.sent.get(ledger_id)
        history.note(lambda: f"{process} closed {story(ledger_id)}")
        history.check("L5", last >= acked - 1, lambda: f"acknowledged entries lie above the end; {story(ledger_id)}")
        if sent is not None:
            history.check("L5", last < len(sent), lambda: f"it ends above what was sent; {story(ledger_id)}")
            length = sum(map(len, sent[: last + 1]))
            history.check(
                "L12",
                record.length_bytes == length,
                f"ledger {ledger_id} has {length} bytes, its record says {record.length_bytes}",
            )
        if before.state is LedgerState.IN_RECOVERY:
            self._check_recovered(before, record, process)
            self._check_negatives(before, last + 1, process)
        check_copies(history, record, f"{process} closes")

    def _check_recovered(self, before: LedgerMetadata, record: LedgerMetadata, process: str) -> None:
        """What is behind all that it was told was confirmed, it has copied: bookies that had lost their disks by then do not count
        for what they answered before."""
        history, ledger_id, last = self._history, record.ledger_id, record.last_entry_id
        assert last is not None
        learned = history.recoverer(process, ledger_id)
        confirmed = max(learned.last_add_confirmed, before.last_fragment.first_entry_id - 1)
        for entry_id in range(last + 1):
            if entry_id <= confirmed:
                holders = history.answered(record, entry_id)
            else:
                holders = history.holders(record, entry_id, learned.losses)
            history.check(
                "L10",
                len(holders) >= record.ack_quorum,
                lambda e=entry_id, h=holders: f"closed with {ledger_id}:{e} on {h} alone; {history.story(ledger_id)}",
            )

    def _check_negatives(self, before: LedgerMetadata, absent: int, process: str) -> None:
        history, ledger_id = self._history, before.ledger_id
        negatives = history.recoverer(process, ledger_id).negatives
        denied_by = [
            bookie
            for bookie in write_set_of(before, absent)
            if any(first <= absent <= last for first, last in negatives.get(bookie, ()))
        ]
        history.check(
            "L10",
            len(denied_by) >= before.write_quorum - before.ack_quorum + 1,
            lambda: f"{process} calls {ledger_id}:{absent} absent, only {denied_by} denied it; {history.story(ledger_id)}",
        )
