"""Checks of a topic's chain and cursors (M1-M4, M7, M10, C1-C8): at each commit, after each opening, and in the audit."""

from __future__ import annotations

from typing import Any

from cepheid_metadata import Chain, CursorRecord, Position, keys
from tests.simulation.checks.client_notes import mask_of
from tests.simulation.checks.history import History
from tests.simulation.checks.offload import OffloadChecks
from tests.simulation.checks.topic_model import DEDUP, WHOLE, Acked, CursorModel, TopicModel
from tests.simulation.checks.trim import TrimChecks, check_positions


class TopicRecordChecks:
    """Looks at each commit of a chain or cursor record."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._trims = TrimChecks(history)
        self._offloads = OffloadChecks(history)
        self._earlier: dict[str, set[str]] = {}  # by key of the chain: incarnations that were followed by another

    def on_chain(self, key: str, chain: Chain, process: str) -> None:
        history = self._history
        known = history.chains.get(key)
        earlier = self._earlier.setdefault(key, set())
        is_back = chain.incarnation in earlier
        history.check("M1", not is_back, lambda: f"{process} brings {chain.incarnation} of {key} back, which was made anew since")
        if known is not None and known.incarnation != chain.incarnation:
            earlier.add(known.incarnation)
            history.earlier_epochs[chain.incarnation] = history.epoch_of(known) + 1  # it begins with epoch 0
        epoch = history.epoch_of(chain)
        before = history.reigning.get(key, (process, epoch))
        history.reigning[key] = (process, epoch)
        history.last_epochs[key, process] = epoch
        in_turn = epoch > before[1] or (process, epoch) == before
        history.check("M1", in_turn, lambda: f"{process} writes {key} in epoch {epoch}, {before[0]} had written in {before[1]}")
        self._trims.on_chain(key, known, chain, process)
        self._offloads.on_chain(key, known, chain, process)
        self._check_terminated(key, known, chain)
        history.note(
            lambda: f"{process} chain epoch {chain.epoch} {[(ledger.ledger_id, ledger.entries) for ledger in chain.ledgers]}"
        )
        history.chains[key] = chain
        self._check_rise(key, known, chain)
        for ledger in chain.ledgers:
            if ledger.entries is None:
                continue
            record = history.ledgers.get(ledger.ledger_id) or history.deleted.get(ledger.ledger_id)
            last = None if record is None else record.last_entry_id
            history.check(
                "M2",
                last == ledger.entries - 1,
                lambda ledger=ledger: f"{process} records {ledger.entries} entries in {key}; {history.story(ledger.ledger_id)}",
            )
            gone = ledger.ledger_id not in history.ledgers and chain.is_on_bookies(ledger.ledger_id)
            history.check("M7", not gone, lambda ledger=ledger: f"{key} names ledger {ledger.ledger_id}, which was deleted")

    def on_chain_deleted(self, key: str) -> None:
        self._trims.on_chain_deleted(key)

    def _check_rise(self, key: str, before: Chain | None, chain: Chain) -> None:
        """H2: positions rise along a topic, also when it was deleted and is made anew."""
        history = self._history
        is_anew = before is None or before.incarnation != chain.incarnation
        known = () if is_anew else [ledger.ledger_id for ledger in before.ledgers]
        fresh = [ledger.ledger_id for ledger in chain.ledgers if ledger.ledger_id not in known]
        if fresh:
            largest = history.largest_ledger.get(key, 0)
            history.check("H2", min(fresh) > largest, lambda: f"{key} gets ledgers {fresh}, and has had {largest}")
            history.largest_ledger[key] = max(fresh)

    def _check_terminated(self, key: str, before: Chain | None, chain: Chain) -> None:
        """M10: a topic ends once, behind all that was acknowledged, and never grows again."""
        history, topic = self._history, self._history.topics.get(key)
        if chain.terminated_at is not None and topic is not None:
            above = [position for position in topic.stored if position > chain.terminated_at]
            history.check(
                "M10", not above, lambda: f"{topic.name} is terminated at {chain.terminated_at}, {above} were acknowledged"
            )
        if chain.terminated_at is not None and (before is None or before.terminated_at is None):
            end = self._end_of(chain)
            history.check(
                "M10", chain.terminated_at == end, lambda: f"{key} is terminated at {chain.terminated_at}, it ends at {end}"
            )
        if before is None or before.terminated_at is None or before.incarnation != chain.incarnation or not chain.ledgers:
            return  # an empty list: it is being deleted
        known, now = ([(ledger.ledger_id, ledger.entries) for ledger in record.ledgers] for record in (before, chain))
        same = chain.terminated_at == before.terminated_at and now == known[len(known) - len(now) :]
        history.check("M10", same, lambda: f"{key} was terminated with {known}, and is changed to {now}, {chain.terminated_at}")

    def _end_of(self, chain: Chain) -> Position:
        """Its last entry, as the records of its ledgers have it; without entries the edge before them, and before every ledger
        if it never had one."""
        counts = [(ledger.ledger_id, self._history.entries_of(ledger.ledger_id)) for ledger in chain.ledgers]
        edge = Position(counts[0][0] if counts else -1, -1)
        return max((Position(ledger_id, count - 1) for ledger_id, count in counts if count), default=edge)

    def on_cursor(self, key: str, record: CursorRecord | None) -> None:
        history = self._history
        if record is None:
            history.cursor_records.pop(key, None)
            return
        where = f"generation {record.generation} epoch {record.chain_epoch} ledger {record.cursor_ledger_id}"
        history.note(f"cursor record {key} mark-delete {record.mark_delete} {where}")
        before = history.cursor_records.get(key)
        history.cursor_records[key] = record
        chain = history.chains.get(f"{keys.CHAINS_KEY}{key.removeprefix(keys.CURSORS_KEY).rpartition('/')[0]}")
        history.check(
            "C7",
            chain is not None and chain.incarnation == record.chain_incarnation,
            lambda: f"{key} is saved by an opening of {record.chain_incarnation}, its topic is {chain and chain.incarnation}",
        )
        if before is None or before.chain_incarnation != record.chain_incarnation:
            return
        history.check(
            "C7",
            record.chain_epoch >= before.chain_epoch,
            lambda: f"{key}: epoch {before.chain_epoch} is followed by {record.chain_epoch}",
        )
        moved_on = record.generation > before.generation or (
            record.generation == before.generation and _gap(chain, record.mark_delete) >= _gap(chain, before.mark_delete)
        )
        ends = [f"{saved.mark_delete} of generation {saved.generation}" for saved in (before, record)]
        history.check("C1", moved_on, lambda: f"{key}: {ends[0]} is followed by {ends[1]}")


def _gap(chain: Chain | None, position: Position) -> Position:
    """Several positions name one gap: the edge before a ledger is the last entry before it."""
    ended = [] if chain is None else [ledger for ledger in chain.ledgers if ledger.entries]
    before = [ledger for ledger in ended if ledger.ledger_id < position.ledger_id]
    return Position(before[-1].ledger_id, before[-1].entries - 1) if before and position.entry_id == -1 else position


def check_opened(history: History, topic: TopicModel, managed_ledger: Any, *, is_new: bool) -> None:
    """An owner: everything told to producers and consumers before it is there (M3, C2, C6, C8), and nothing else (C3).

    A new one also decides what became of cursors whose creation or deletion had an unknown outcome. In one that is given out again
    that may be under way yet: behind a save that waits for bookies, after its caller has been told that it takes too long."""
    for position in topic.stored:
        there = managed_ledger.is_valid(position)
        history.check(
            "M3",
            there or topic.may_be_gone(position),
            lambda p=position: f"{topic.name} opened without {p}, which was acknowledged: {managed_ledger!r}",
        )
    for name, model in list(topic.cursors.items()):
        cursor = managed_ledger.cursors.get(name)
        if cursor is None:
            history.check("C2", not model.certain, f"{topic.name} opened without cursor {name}")
            if is_new:
                del topic.cursors[name]
            continue
        model.certain |= is_new
        _check_cursor(history, topic, model, cursor, managed_ledger)
    for name in managed_ledger.cursors:
        history.check("C3", name in topic.cursors, f"{topic.name} has a cursor {name} that nobody made")


def _check_cursor(history: History, topic: TopicModel, model: CursorModel, cursor: Any, managed_ledger: Any) -> None:
    name = f"cursor {model.name} of {topic.name}"
    for position in topic.stored:
        if not managed_ledger.is_valid(position):
            continue  # trimmed
        acked = acked_messages(cursor, position)
        lost, invented = model.must.messages_of(position) & ~acked, acked & ~model.allowed_messages_of(position)
        history.check(
            "C2", not lost, lambda p=position, lost=lost: f"{name} lost messages {lost:#b} of {p}, reported as saved: {cursor!r}"
        )
        history.check(
            "C3",
            not invented,
            lambda p=position, i=invented: f"{name} has messages {i:#b} of {p} acknowledged, nobody did: {cursor!r}",
        )
        count = cursor.redelivery_counts_in(position.ledger_id).get(position.entry_id, 0)
        least, most = model.must.counts.get(position, 0), model.redelivered.get(position, 0)
        right = count == 0 if acked == WHOLE else least <= count <= most
        history.check(
            "C8",
            right,
            lambda p=position, c=count, a=least, z=most: f"{name} counts {c} deliveries of {p}, not {a} to {z}: {cursor!r}",
        )
    check_backlog(history, cursor)
    check_backlog_told(history, topic, model, Acked(), cursor)
    if model.name == DEDUP:
        _check_sequence_ids(history, name, model, cursor, managed_ledger)


def check_backlog(history: History, cursor: Any) -> None:
    """C5: the count, which the cursor keeps as it goes, is that of the entries it has not acknowledged."""
    ledgers = cursor.ack_set._ledgers
    positions = [Position(ledger_id, entry) for ledger_id in ledgers.ledger_ids for entry in range(ledgers.entries_of(ledger_id))]
    waiting = sum(not cursor.is_acknowledged(position) for position in positions)
    history.check("C5", cursor.backlog_entries == waiting, lambda: f"{cursor!r} counts {cursor.backlog_entries}, not {waiting}")


def check_backlog_told(history: History, topic: TopicModel, model: CursorModel, memory: Acked, cursor: Any) -> None:
    """C5, of an opening that reigns: the count is that of the entries in the committed chain which, as their clients were told, may
    or must wait. `memory`: what this cursor was given to acknowledge since its last reset."""
    listed = [ledger.ledger_id for ledger in history.chains[topic.key].ledgers]
    entries = [Position(ledger_id, entry) for ledger_id in listed for entry in range(history.entries_of(ledger_id))]
    may_wait = [entry for entry in entries if model.must.messages_of(entry) | memory.messages_of(entry) != WHOLE]
    must_wait = [entry for entry in may_wait if entry in topic.stored and model.allowed_messages_of(entry) != WHOLE]
    count = cursor.backlog_entries
    history.check(
        "C5",
        len(must_wait) <= count <= len(may_wait),
        lambda: f"{cursor!r} of {topic.name} counts {count}, not {len(must_wait)} to {len(may_wait)} of {len(entries)}",
    )


def inspect_subscriptions(history: History, broker: Any) -> None:
    """C5 and M7: what an operator sees of a broker. Asked so, each subscription also says what it waits for."""
    if not broker.node.alive:
        return
    for managed_ledger in broker.managed_ledgers._open.values():
        if managed_ledger.is_usable:
            check_positions(history, broker.process, managed_ledger)
            for cursor in managed_ledger.cursors.values():
                check_backlog(history, cursor)
    if broker.ready:
        for topic in broker.broker.topics.loaded():
            for subscription in list(topic.subscriptions.values()):
                shown = subscription.figures().backlog_entries
                history.check("C5", shown >= 0, lambda s=subscription, n=shown: f"{s!r} shows a backlog of {n}")


def _check_sequence_ids(history: History, name: str, model: CursorModel, cursor: Any, managed_ledger: Any) -> None:
    """C6: the ids name the position with which they were set."""
    ids = cursor.sequence_ids
    belongs_to = Position(ids["ledger"], ids["entry"]) if ids else model.created_at
    rank = managed_ledger.ledgers.rank
    history.check(
        "C6",
        rank(belongs_to) == rank(cursor.mark_delete),
        lambda: f"{name} is at {cursor.mark_delete} with the sequence ids of {belongs_to}: {managed_ledger!r}",
    )


def acked_messages(cursor: Any, position: Position) -> int:
    """Of an entry, what a cursor has."""
    if cursor.is_acknowledged(position):
        return WHOLE
    words = cursor.unacked_words(position)
    return 0 if words is None else WHOLE & ~mask_of(words)


def check_entry(history: History, topic: TopicModel, position: Position, payload: bytes) -> None:
    """Something was read: it is what was acknowledged there (M9), or at least something that somebody appended."""
    expected = topic.stored.get(position)
    history.check(
        "M9",
        expected is None or expected == payload,
        lambda: f"{topic.name}: {position} reads {payload!r}, acknowledged was {expected!r}",
    )
    history.check("M4", payload in topic.sent, lambda: f"{topic.name}: {position} reads {payload!r}, which nobody appended")


def check_all_entries(history: History, topic: TopicModel, entries: list[tuple[Position, bytes]]) -> None:
    """The whole chain, read from its start (M3, M4)."""
    found = dict(entries)
    for position, payload in topic.stored.items():
        kept = found.get(position) == payload
        history.check(
            "M3",
            kept or (position not in found and topic.may_be_gone(position)),
            lambda p=position: f"{topic.name}: {p} was acknowledged and reads {found.get(p)!r}",
        )
    seen: dict[bytes, Position] = {}
    for position, payload in entries:
        check_entry(history, topic, position, payload)
        first = seen.setdefault(payload, position)
        history.check(
            "M4", first == position, lambda p=position, f=first: f"{topic.name}: one append is stored twice, at {f} and {p}"
        )
    for opening, payloads in topic.appended.items():
        _check_order(history, topic, opening, [seen.get(payload) for payload in payloads])
    order = [position for position, _ in entries]
    history.check("M3", order == sorted(order), f"{topic.name}: entries are read in the order {order}")


def _check_order(history: History, topic: TopicModel, opening: tuple[str, int], places: list[Position | None]) -> None:
    """M5: what one producer appended is stored in its order, and nothing of it behind something that is not."""
    found = [place for place in places if place is not None]
    history.check("M5", found == sorted(found), lambda: f"{topic.name}: the appends of {opening} are stored at {places}")
    if not topic.trimmed:  # else one that nobody was told of may be among what is gone
        prefix = places[: len(found)]
        history.check("M5", None not in prefix, lambda: f"{topic.name}: appends of {opening} are missing in between: {places}")
