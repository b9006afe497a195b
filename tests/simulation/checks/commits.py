"""Every committed write of the metadata store, decoded and handed to the checks of its kind of record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cepheid_metadata import BundleOwner, Check, Create, CursorRecord, Delete, LedgerMetadata, Op, Put, keys
from tests.simulation.checks.chain_pages import CommittedPages, chain_of_page
from tests.simulation.checks.cursors import check_retired
from tests.simulation.checks.history import History
from tests.simulation.checks.records import LedgerRecordChecks
from tests.simulation.checks.repair import RepairChecks
from tests.simulation.checks.topic import TopicRecordChecks
from tests.simulation.workloads.owners import OwnerRecordChecks


class CommitChecks:
    def __init__(self, history: History, nodes: Mapping[str, object]) -> None:
        """`nodes`: what the tree holds, by key."""
        self._history = history
        self._repairs = RepairChecks(history)
        self._ledgers = LedgerRecordChecks(history, self._repairs)
        self._topics = TopicRecordChecks(history)
        self._pages = CommittedPages(history)
        self._owners = OwnerRecordChecks(history, nodes)

    def on_commit(self, ops: Sequence[Op], process: str) -> None:
        ops = _merged(ops)
        self._repairs.begin(ops, process)
        self._pages.on_commit(ops)
        deleted_tree, chain_tree = f"{keys.DELETED_LEDGERS_KEY}/", f"{keys.CHAINS_KEY}/"
        # A ledger that comes back was there until now; a chain is judged by the records of its ledgers as they are afterwards.
        for op in sorted(ops, key=lambda op: op.key.startswith((deleted_tree, chain_tree))):
            if op.key.startswith(f"{keys.LEDGERS_KEY}/") and op.key not in keys.NOT_LEDGERS:
                self._on_ledger(op, process)
            elif op.key.startswith(deleted_tree):
                self._on_deleted_ledger(op)
            elif chain_of_page(op.key) is not None:
                continue  # seen with its record
            elif op.key.startswith(f"{keys.CHAINS_KEY}/") and isinstance(op, Create | Put):
                self._topics.on_chain(op.key, self._pages.whole(op.key, op.value, process), process)
            elif op.key.startswith(f"{keys.CHAINS_KEY}/") and isinstance(op, Delete):
                self._topics.on_chain_deleted(op.key)
            elif op.key.startswith(f"{keys.CURSORS_KEY}/") and not isinstance(op, Check):
                record = None if isinstance(op, Delete) else CursorRecord.decode(op.value, op.key)
                self._topics.on_cursor(op.key, record)
            elif op.key.startswith(f"{keys.BROKERS_KEY}/") and isinstance(op, Create):
                self._owners.on_registered(op.key)
            elif op.key.startswith(f"{keys.BUNDLES_KEY}/") and not isinstance(op, Check):
                record = None if isinstance(op, Delete) else BundleOwner.decode(op.value, op.key)
                self._owners.on_owner(op.key, record, process)
        self._repairs.end(process)
        self._check_retired(ops)

    def _check_retired(self, ops: Sequence[Op]) -> None:
        """When all of a write is known."""
        for op in ops:
            if op.key.startswith(f"{keys.CHAINS_KEY}/") and (chain := self._history.chains.get(op.key)) is not None:
                check_retired(self._history, op.key, chain)

    def _on_ledger(self, op: Op, process: str) -> None:
        match op:
            case Create(key, value):
                self._ledgers.on_created(LedgerMetadata.decode(value, key), process)
            case Put(key, value):
                self._ledgers.on_changed(LedgerMetadata.decode(value, key), process)
            case Delete(key):
                self._ledgers.on_deleted(_id_of(key, keys.LEDGERS_KEY), process)

    def _on_deleted_ledger(self, op: Op) -> None:
        """Entries are kept while it can be brought back (S10)."""
        match op:
            case Create(key):
                self._history.restorable[_id_of(key, keys.DELETED_LEDGERS_KEY)] = None
            case Delete(key):
                self._history.restorable.pop(_id_of(key, keys.DELETED_LEDGERS_KEY), None)


def _merged(ops: Sequence[Op]) -> list[Op]:
    """What is made and then put in one write counts as made so: nobody sees what is in between."""
    merged: list[Op] = []
    made: dict[str, int] = {}  # where in it, by key
    for op in ops:
        if isinstance(op, Put) and op.key in made:
            create = merged[made[op.key]]
            assert isinstance(create, Create)
            merged[made[op.key]] = replace(create, value=op.value)
            continue
        if isinstance(op, Create):
            made[op.key] = len(merged)
        merged.append(op)
    return merged


def _id_of(key: str, tree: str) -> int:
    return int(key.removeprefix(f"{tree}/").replace("/", ""))
