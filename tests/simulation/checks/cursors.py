"""Checks of what cursors have saved (C2), in the moment in which somebody is told of it: not only after the next crash.

"saved" ──► the committed record of the cursor, or the last whole snapshot in the ledger that it names, covers what was asked
a commit ──► no record names a ledger that its chain has put down for deletion
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_managed_ledger.cursor_ledger import SnapshotReader
from cepheid_managed_ledger.cursor_state import CursorState, decode_state
from cepheid_metadata import Chain, Position, keys
from cepheid_wire import TopicName, count_messages
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.client_notes import ClientNotes, mask_of
from tests.simulation.checks.history import History
from tests.simulation.checks.topic_model import Acked, TopicModel

EVERY = -1
"""A mask of all the messages that an entry has, however many."""


def saved_state(history: History, topic: TopicName, name: str) -> CursorState | None:
    """What the next owner will read: of a snapshot, what the ledger surely has. None: there is no such cursor."""
    record = history.cursor_records.get(keys.cursor_key(topic, name))
    if record is None:
        return None
    ledger_id = record.cursor_ledger_id
    if ledger_id is None:
        return CursorState(record.mark_delete) if record.state is None else decode_state(record.state)
    snapshots = SnapshotReader({name: record.generation})
    for payload in reversed(history.sent.get(ledger_id, [])[: history.entries_of(ledger_id)]):
        snapshots.feed(payload)
        if snapshots.is_complete:
            break
    return snapshots.states.get(name, CursorState(record.mark_delete))


def waiting_messages(state: CursorState, position: Position) -> int:
    """The mask of an entry's messages that a saved state does not have as acknowledged."""
    if position <= state.mark_delete or position.entry_id in state.acked.get(position.ledger_id, ()):
        return 0
    return state.batches[position][0] if position in state.batches else EVERY


def check_saved(history: History, topic: TopicModel, topic_name: TopicName, name: str, asked: Acked) -> None:
    """An owner reports these as saved: the acknowledgements (C2), and the delivery counts of what is not acknowledged (C8)."""
    state = saved_state(history, topic_name, name)
    if state is None:
        return
    for position in topic.stored:
        if topic.may_be_gone(position):
            continue
        waiting = waiting_messages(state, position)
        lost = waiting & asked.messages_of(position)
        history.check(
            "C2", not lost, lambda p=position, m=lost: f"{name} of {topic.name} reports messages {m:#b} of {p} as saved: {state!r}"
        )
        least = asked.counts.get(position, 0) if waiting else 0
        history.check(
            "C8",
            least <= _count(state, position),
            lambda p=position, c=least: f"{name} of {topic.name} reports {c} deliveries of {p} as saved: {state!r}",
        )


def _count(state: CursorState, position: Position) -> int:
    return sum(
        count for ledger_id, count, entries in state.redelivered if ledger_id == position.ledger_id and position.entry_id in entries
    )


@dataclass(frozen=True, slots=True)
class _Ask:
    topic: TopicName
    subscription: str
    generation: int
    messages: Mapping[Position, int]


class SavedAnswers:
    """Of one connection: ACKs that want an answer, until it is given."""

    def __init__(self, notes: ClientNotes) -> None:
        self._notes = notes
        self._history = notes.history
        self._asks: dict[int, _Ask] = {}  # by request

    def on_ack(self, topic: str, subscription: str, ack: pb.CommandAck, *, is_ordered: bool) -> None:
        name, cumulative = TopicName.parse(topic), ack.ack_type == pb.CommandAck.Cumulative
        record = self._history.cursor_records.get(keys.cursor_key(name, subscription))
        if record is None or self._notes.is_moving(topic, subscription) or (cumulative and not is_ordered):
            return  # what comes amid a move is void; a server ignores cumulative ones of consumers that share entries
        messages: dict[Position, int] = {}
        for ident in ack.message_id:
            position = Position(ident.ledgerId, _signed(ident.entryId))
            if cumulative:
                messages.update((before, EVERY) for before in self._entries(name) if before < position)
            messages[position] = self._acknowledged(topic, position, mask_of(ident.ack_set))
        self._asks[ack.request_id] = _Ask(name, subscription, record.generation, messages)

    def on_answer(self, request_id: int, opening: tuple[str, int] | None) -> None:
        """`opening`: whose word it is that all of it is saved; None: it failed. One that is deposed says so of what was saved
        before, and has nothing to save; what was asked before a move is void behind it."""
        ask, history = self._asks.pop(request_id, None), self._history
        if ask is None or opening is None or history.reigning.get(keys.chain_key(ask.topic)) != opening:
            return
        record = history.cursor_records.get(keys.cursor_key(ask.topic, ask.subscription))
        state = saved_state(history, ask.topic, ask.subscription)
        if record is None or state is None or record.generation != ask.generation:
            return
        there, whose = dict.fromkeys(self._entries(ask.topic)), f"{ask.subscription} of {ask.topic}"
        for position, messages in ask.messages.items():
            lost = messages & waiting_messages(state, position) if position in there else 0
            history.check("C2", not lost, lambda p=position: f"{whose} answers for {p}: {record!r} {state!r}")

    def _entries(self, topic: TopicName) -> list[Position]:
        """That are in the committed chain."""
        chain = self._history.chains.get(keys.chain_key(topic))
        listed = [] if chain is None else [ledger.ledger_id for ledger in chain.ledgers]
        return [Position(ledger_id, entry) for ledger_id in listed for entry in range(self._history.entries_of(ledger_id))]

    def _acknowledged(self, topic: str, position: Position, left: int) -> int:
        """The messages of an entry that an ACK names: those that its words leave out, of as many as there are."""
        if not left:
            return EVERY
        tail = self._notes.delivered.get((topic, *position))
        return 0 if tail is None else ~left & ((1 << count_messages(tail)) - 1)


def _signed(number: int) -> int:
    """-1 travels as 2^64 - 1."""
    return number - (1 << 64) if number >= 1 << 63 else number


def check_retired(history: History, chain_key: str, chain: Chain) -> None:
    """C2, once all of a commit is done: what a record names is not about to be deleted."""
    of_topic = f"{keys.CURSORS_KEY}{chain_key.removeprefix(keys.CHAINS_KEY)}/"
    for key, record in history.cursor_records.items():
        if key.startswith(of_topic) and record.chain_incarnation == chain.incarnation and chain.ledgers:
            named = record.cursor_ledger_id
            history.check(
                "C2", named not in chain.deletions, lambda k=key, n=named: f"{k} names ledger {n}, which is being deleted"
            )
