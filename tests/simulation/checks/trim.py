"""What leaves a chain (M6): a prefix, consumed, and no longer to be kept by the formula of retention, recomputed here from what was
sent and from the policies that the topic had. That its owner does not read it. And that no cursor stays in it (M7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cepheid_managed_ledger import Retention
from cepheid_metadata import EARLIEST, Chain, Position, keys
from tests.simulation.checks.history import History
from tests.simulation.checks.topic_model import TopicModel
from tests.simulation.world.sim_clock import true_ms

RIGHT_MS = 60_000
"""A clock that is wrong by less is right."""


class TrimChecks:
    """Looks at each commit of a chain record."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._emptied: dict[str, None] = {}  # incarnations

    def on_chain(self, key: str, before: Chain | None, chain: Chain, process: str) -> None:
        if before is None:
            return
        history, topic = self._history, self._history.topics.get(key)
        kept = [ledger.ledger_id for ledger in chain.ledgers]
        gone = [ledger.ledger_id for ledger in before.ledgers if ledger.ledger_id not in kept]
        has_entries = any(map(history.entries_of, gone))  # else they are empty, and go with an opening
        if topic is not None:
            self._note_closed(topic, before, chain, process)
            self._check_consumed(topic, before, gone)
            if has_entries:
                self._check_retention(topic, gone, kept, process, (process, chain.epoch) in topic.timely)
        if has_entries and kept and before.incarnation == chain.incarnation:  # else the topic is being deleted, or was
            history.did("trim" if topic is not None else "trim for clients")
            history.on_trimmed(key, gone, kept)
            self._check_saved_positions(key, chain, gone)
        if gone and not kept and before.incarnation == chain.incarnation:
            self._emptied[chain.incarnation] = None
            history.on_emptied(key, chain, gone)

    def on_chain_deleted(self, key: str) -> None:
        """A chain without ledgers is not emptied before its record goes, and its subscriptions go with it all the same."""
        chain = self._history.chains.get(key)
        if chain is not None and chain.incarnation not in self._emptied:
            self._history.on_emptied(key, chain, ())

    def _note_closed(self, topic: TopicModel, before: Chain, chain: Chain, process: str) -> None:
        """When a ledger ended, if its record says about the same. A clock that was wrong already when the topic was opened, or when
        the opening closed the ledger, cannot be told from a right one."""
        now_ms, ended = true_ms(), [ledger.ledger_id for ledger in before.ledgers if ledger.entries]
        for ledger in chain.ledgers:
            is_right = abs(ledger.closed_at_ms - now_ms) < RIGHT_MS or (process, chain.epoch) in topic.timely
            if ledger.entries and ledger.ledger_id not in ended and is_right:
                topic.closed_at_ms[ledger.ledger_id] = now_ms

    def _check_consumed(self, topic: TopicModel, before: Chain, gone: Sequence[int]) -> None:
        """It was acknowledged by every cursor, and is the beginning."""
        stays = [ledger.ledger_id for ledger in before.ledgers if ledger.entries and ledger.ledger_id not in gone]
        goes = [ledger.ledger_id for ledger in before.ledgers if ledger.entries and ledger.ledger_id in gone]
        is_prefix = not (stays and goes) or goes[-1] < stays[0]
        self._history.check("M6", is_prefix, lambda: f"{topic.name}: ledgers {goes} leave the chain, and {stays} stay")
        for ledger_id in gone:
            topic.trimmed[ledger_id] = None
            for position in [position for position in topic.stored if position.ledger_id == ledger_id]:
                consumed = topic.is_consumed(position)
                self._history.check("M6", consumed, lambda p=position: f"{topic.name}: {p} left the chain and is not acknowledged")

    def _check_retention(
        self, topic: TopicModel, gone: Sequence[int], kept: Sequence[int], process: str, clock_was_right: bool
    ) -> None:
        """Each is too old, or what is left without it and those before is enough: all by one policy that its owner had. Since that
        one decided the topic may have grown: here it may be larger, never smaller."""
        history, now_ms = self._history, true_ms()
        left_bytes = sum(map(history.bytes_of, kept))
        going: list[tuple[int | None, int]] = []  # (age if it is known, what is left without it), from the last to the first
        for ledger_id in reversed(gone):
            closed_at_ms = topic.closed_at_ms.get(ledger_id) if clock_was_right else None
            going.append((None if closed_at_ms is None else now_ms - closed_at_ms, left_bytes))
            left_bytes += history.bytes_of(ledger_id)
        policies = topic.policies.get(process, [])
        history.check(
            "M6",
            any(all(_may_go(policy, *each) for each in going) for policy in policies),
            lambda: f"{topic.name}: {process} trims ledgers {gone}; (age in ms, bytes left), last first: {going}; {policies}",
        )

    def _check_saved_positions(self, key: str, chain: Chain, gone: Sequence[int]) -> None:
        """M7. A record may name an entry that left: the last one, or what stood behind it: that is the edge of the list.
        Before that one it means a place that no list has. Of a cursor whose state is in a ledger the record's position is only what
        is gone back to when that ledger is lost."""
        history, cursors_key = self._history, f"{keys.CURSORS_KEY}{key.removeprefix(keys.CHAINS_KEY)}/"
        last = max(Position(ledger_id, history.entries_of(ledger_id) - 1) for ledger_id in gone if history.entries_of(ledger_id))
        for name, record in history.cursor_records.items():
            is_inline = record.chain_incarnation == chain.incarnation and record.cursor_ledger_id is None
            if is_inline and name.startswith(cursors_key):
                history.check(
                    "M7",
                    record.mark_delete >= last,
                    lambda n=name, r=record: f"{n} is saved at {r.mark_delete}, everything up to {last} leaves the chain",
                )


def check_not_read(history: History, key: str, chain: Chain, process: str) -> None:
    """M6, of a write that begins: its process reads no ledger that leaves the chain. Reads that begin later may fail."""
    before = history.chains.get(key)
    if before is None or (before.incarnation, before.epoch) != (chain.incarnation, chain.epoch):
        return  # an opening, or a deletion: whoever was reading there is deposed
    kept = [ledger.ledger_id for ledger in chain.ledgers]
    gone = [ledger.ledger_id for ledger in before.ledgers if ledger.ledger_id not in kept]
    uploads = [ledger_id for ledger_id, found in (before.offloaded or {}).items() if not found.complete]  # they are stopped
    is_read = [ledger_id for ledger_id in gone if history.reads.get((process, ledger_id)) and ledger_id not in uploads]
    history.check("M6", not is_read, lambda: f"{process} takes ledgers {is_read} out of {key} while it reads them")


def check_positions(history: History, process: str, managed_ledger: Any) -> None:
    """M7, of the opening that reigns: every durable cursor is in a ledger that the committed chain lists, or at the beginning of a
    topic that never had one. A trim moves those along that are in what goes, first: what they show to operators and clients
    exists."""
    key = keys.chain_key(managed_ledger.topic)
    if not managed_ledger.is_usable or history.reigning.get(key) != (process, history.epoch_of(managed_ledger.chain)):
        return
    listed = [ledger.ledger_id for ledger in history.chains[key].ledgers]
    for cursor in managed_ledger.cursors.values():
        # Until the owner hears that its topic has its first ledger, the cursors stay where they were.
        begins = not managed_ledger.chain.ledgers and cursor.mark_delete == EARLIEST
        there = cursor.mark_delete.ledger_id in listed or begins
        history.check("M7", there, lambda c=cursor: f"{c!r} of {managed_ledger.topic} is in none of the ledgers {listed}")


def _may_go(policy: Retention, age_ms: int | None, left_bytes: int) -> bool:
    is_old = policy.time_ms >= 0 and (age_ms is None or age_ms > policy.time_ms - RIGHT_MS)
    return is_old or 0 <= policy.size_bytes <= left_bytes
