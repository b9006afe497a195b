"""Checks of how processes use the metadata store (O2, O3, M6): what they had read when they wrote, and in which session.

get, answers of its own writes ──► versions that a process has learned ──► a write names one of them, or makes the key (O2)
a write of a chain begins ──► the process reads none of the ledgers that leave it (M6)
a session ends ──► its ephemeral keys are gone ──► the same process makes others in the next one (O3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cepheid_metadata import Check, Create, Delete, Op, Put, keys
from tests.simulation.checks.chain_pages import chain_of_page, whole_chain
from tests.simulation.checks.history import History
from tests.simulation.checks.trim import check_not_read


class StoreChecks:
    """`SimStore` tells of each read and write; `nodes` are those of the tree."""

    def __init__(self, history: History, nodes: dict[str, Any]) -> None:
        self._history = history
        self._nodes = nodes
        self._learned: dict[tuple[str, str], dict[int, None]] = {}  # by process and key
        self._asked: dict[tuple[str, str], Put] = {}  # by process and key: the last write of a chain
        self._companions: dict[tuple[str, str, int], list[tuple[str, int]]] = {}  # made in one write by a process: one tells of all

    def learned(self, process: str, key: str, version: int) -> None:
        for companion, its_version in self._companions.get((process, key, version), ((key, version),)):
            self._learned.setdefault((process, companion), {})[its_version] = None

    def asks(self, process: str, ops: Sequence[Op]) -> None:
        """A process begins a write. One that it repeats was decided on before."""
        for op in ops:
            if not isinstance(op, Put) or not op.key.startswith(f"{keys.CHAINS_KEY}/") or chain_of_page(op.key) is not None:
                continue
            if self._asked.get((process, op.key)) != op:
                self._asked[process, op.key] = op
                chain = whole_chain(op.key, op.value, lambda key: self._page(key, ops))
                if chain is not None:  # else another owner has changed it, and this write will be refused
                    check_not_read(self._history, op.key, chain, process)

    def _page(self, key: str, ops: Sequence[Op]) -> bytes | None:
        """A page as it would be after a write."""
        made = next((op.value for op in ops if isinstance(op, Create) and op.key == key), None)
        node = self._nodes.get(key)
        return made if made is not None or node is None else bytes(node.value)

    def answered(self, process: str, ops: Sequence[Op], results: Sequence[Any]) -> None:
        """A process hears that its write was done: it knows the versions that it made."""
        for op, result in zip(ops, results, strict=True):
            if isinstance(op, Create):
                self.learned(process, result, 0)
            elif isinstance(op, Put):
                self.learned(process, op.key, result)

    def wrote(self, process: str, ops: Sequence[Op], past_sessions: Sequence[int]) -> None:
        """A write was committed."""
        if len(ops) > 1:
            versions = [
                (op.key, 0 if isinstance(op, Create) else op.expected_version + 1) for op in ops if isinstance(op, (Create, Put))
            ]
            self._companions.update(dict.fromkeys(((process, *each) for each in versions), versions))
        made: dict[str, None] = {}
        for op in ops:
            if isinstance(op, Create):
                made[op.key] = None
                if op.ephemeral:
                    self._check_session(process, op.key, past_sessions)
            elif op.key not in made:
                self._check_version(process, op)

    def _check_version(self, process: str, op: Put | Delete | Check) -> None:
        version = op.expected_version
        if version is None and op.key.startswith((f"{keys.TOPICS_KEY}/", f"{keys.REPAIR_REQUESTS_KEY}/")):
            return  # a request that was served, or an operator's word: whatever it says, it is to be gone (`TopicCatalog.delete`)
        if version == 0 and isinstance(op, Delete) and op.key.startswith(f"{keys.UNCHECKED_LEDGERS_KEY}/"):
            return  # it is created and never changed: the listing tells as much as reading it
        known = self._learned.get((process, op.key), {})
        self._history.check(
            "O2",
            version in known,
            lambda: f"{process} writes {op.key} over version {version}, of which it has read {list(known) or 'none'}: {op!r}",
        )

    def _check_session(self, process: str, key: str, past_sessions: Sequence[int]) -> None:
        left = [other for other, node in self._nodes.items() if node.owner in past_sessions]
        self._history.check("O3", not left, lambda: f"{process} makes {key} in a new session, and {left} of its last one is there")
