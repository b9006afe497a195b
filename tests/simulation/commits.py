"""Every committed write of the metadata store, decoded and handed to the checks of its kind of record."""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_metadata import Create, Delete, LedgerMetadata, Op, Put, keys
from tests.simulation.checks_ledger import LedgerRecordChecks
from tests.simulation.history import History


class CommitChecks:
    def __init__(self, history: History, ledgers: LedgerRecordChecks) -> None:
        self._history = history
        self._ledgers = ledgers

    def on_commit(self, ops: Sequence[Op], process: str) -> None:
        for op in ops:
            if op.key.startswith(f"{keys.LEDGERS_KEY}/") and op.key not in keys.NOT_LEDGERS:
                self._on_ledger(op, process)

    def _on_ledger(self, op: Op, process: str) -> None:
        match op:
            case Create(key, value):
                self._ledgers.on_created(LedgerMetadata.decode(value, key), process)
            case Put(key, value):
                self._ledgers.on_changed(LedgerMetadata.decode(value, key), process)
            case Delete(key):
                self._ledgers.on_deleted(int(key.removeprefix(f"{keys.LEDGERS_KEY}/").replace("/", "")))
