"""Deduplication without I/O: what is new, what is repeated, what is not known; against a model with crashes and failures."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cepheid_broker.publishing.deduplication import (
    Chunk,
    Mark,
    NameClaim,
    ProducerSequence,
    SequenceIds,
    mark_of_batch,
    sequence_ids_of,
)


class Verdict(enum.Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"


def judge(sequence: ProducerSequence, highest: int) -> Verdict:
    if sequence.is_new(highest, highest):
        assert not sequence.is_stored(highest, highest)
        return Verdict.NEW
    return Verdict.DUPLICATE if sequence.is_stored(highest, highest) else Verdict.UNKNOWN


def push(sequence: ProducerSequence, sequence_id: int) -> bool:
    return sequence.push(sequence_id, sequence_id, sequence_id)


def one(sequence_id: int) -> Mark:
    return Mark(sequence_id, sequence_id)


def stored(sequence: ProducerSequence, highest: int) -> None:
    assert push(sequence, highest)
    sequence.begin(one(highest))
    sequence.confirm(one(highest))


def test_what_is_stored_is_a_duplicate_and_what_is_under_way_is_not_known() -> None:
    sequence = SequenceIds().follow("p", 0.0)
    stored(sequence, 5)
    push(sequence, 7)
    sequence.begin(one(7))
    verdicts = [judge(sequence, highest) for highest in (0, 5, 6, 7, 8)]
    assert verdicts == [Verdict.DUPLICATE, Verdict.DUPLICATE, Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.NEW]
    sequence.confirm(one(7))
    assert judge(sequence, 6) is Verdict.DUPLICATE


def test_after_a_failed_append_the_same_ids_are_new() -> None:
    sequence = SequenceIds().follow("p", 0.0)
    stored(sequence, 5)
    for highest in (7, 9):
        push(sequence, highest)
        sequence.begin(one(highest))
    sequence.fail(one(9))
    assert judge(sequence, 8) is Verdict.NEW
    assert judge(sequence, 7) is Verdict.UNKNOWN  # still under way
    sequence.fail(one(7))
    assert judge(sequence, 6) is Verdict.NEW
    assert judge(sequence, 5) is Verdict.DUPLICATE


def test_what_was_never_appended_is_new_again() -> None:
    sequence = SequenceIds().follow("p", 0.0)
    push(sequence, 3)
    sequence.begin(one(3))
    push(sequence, 6)
    sequence.abandon()
    assert (sequence.pushed, sequence.persisted) == (one(3), one(-1))


def test_a_name_is_forgotten_when_nobody_uses_it_for_long() -> None:
    ids = SequenceIds()
    used, left, waiting = ids.follow("used", 0.0), ids.follow("left", 0.0), ids.follow("waiting", 0.0)
    for sequence in (used, left, waiting):
        stored(sequence, 1)
    push(waiting, 2)
    waiting.begin(one(2))
    ids.leave(left, 10.0)
    ids.leave(waiting, 10.0)
    assert ids.forget_idle(10.0, 0.0, max_names=100) == 0
    assert ids.forget_idle(11.0, 0.0, max_names=100) == 1
    assert left.is_forgotten
    assert ids.snapshot() == {"used": 1, "waiting": 1}


def test_beyond_the_bound_the_longest_unused_names_go_first() -> None:
    ids = SequenceIds()
    for index in range(10):
        sequence = ids.follow(f"p{index}", 0.0)
        stored(sequence, index)
        if index >= 2:
            ids.leave(sequence, 100.0 - index)
    assert ids.forget_idle(0.0, 0.0, max_names=4) == 6
    assert list(ids.snapshot()) == ["p0", "p1", "p2", "p3"]


def test_a_restored_name_goes_on_and_later_entries_complete_it() -> None:
    ids = SequenceIds()
    ids.restore({"a": 4, "b": 9}, 0.0)
    ids.note_stored("a", one(6), 0.0)
    ids.note_stored("b", one(3), 0.0)
    ids.note_stored("c", one(0), 0.0)
    assert ids.snapshot() == {"a": 6, "b": 9, "c": 0}
    assert judge(ids.follow("a", 0.0), 6) is Verdict.DUPLICATE


def test_chunks_of_messages_that_are_not_whole_are_saved_as_long_as_their_name_is_known() -> None:
    ids, name = SequenceIds(), "a/b"
    ids.note_stored(name, one(4), 0.0)
    ids.note_stored_chunk(name, Chunk(5, 0, 17, 300), 0.0)
    ids.note_stored_chunk(name, Chunk(5, 1, 17, 300), 0.0)
    ids.note_stored_chunk("new", Chunk(0, -1, 17, -300), 0.0)  # whatever a client writes there
    saved = ids.snapshot()
    assert sequence_ids_of(saved) == {name: 4}, "what earlier releases see"

    restored = SequenceIds()
    restored.restore(saved, 1.0)
    assert restored.snapshot() == saved
    sequence, new = restored.follow(name, 1.0), restored.follow("new", 1.0)
    assert (sequence.persisted, new.persisted) == (one(4), one(-1))
    assert [sequence.has_chunk(Chunk(5, index, 17, 300)) for index in range(3)] == [True, True, False]
    assert not sequence.has_chunk(Chunk(5, 0, 18, 300)), "another attempt"
    assert new.has_chunk(Chunk(0, -1, 17, -300))
    restored.note_stored(name, one(5), 2.0)
    restored.leave(new, 2.0)
    restored.forget_idle(3.0, 0.0, max_names=100)
    assert restored.snapshot() == {name: 5}


def claimed(ids: SequenceIds, name: str, claim: NameClaim, ends: int) -> None:
    ids.set_claim(name, claim, 0.0)
    stored(ids.follow(name, 0.0), ends)


def test_a_claimed_name_is_remembered_for_as_long_as_it_says_and_forgotten_last() -> None:
    ids = SequenceIds()
    for name, used_at in (("claimed", 0.0), ("early", 50.0), ("late", 80.0)):
        sequence = ids.follow(name, 0.0)
        stored(sequence, 1)
        ids.leave(sequence, used_at)
    ids.set_claim("claimed", NameClaim("me", 100), 0.0)
    assert ids.forget_idle(90.0, idle_s=30.0, max_names=100) == 1
    assert sequence_ids_of(ids.snapshot()) == {"claimed": 1, "late": 1}
    assert ids.forget_idle(90.0, idle_s=30.0, max_names=1) == 1
    assert sequence_ids_of(ids.snapshot()) == {"claimed": 1}
    assert ids.forget_idle(101.0, idle_s=30.0, max_names=100) == 1


def test_what_is_claimed_survives_and_earlier_releases_pass_over_it() -> None:
    ids = SequenceIds()
    claimed(ids, "a/b", NameClaim("me", 100, 4, "ten"), 9)
    saved = ids.snapshot()
    assert sequence_ids_of(saved) == {"a/b": 9}
    restored = SequenceIds()
    restored.restore(saved, 0.0)
    assert restored.snapshot() == saved


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (NameClaim("me", 100, 4, "ten"), None),
        (NameClaim("me", 100), None),  # tells nothing
        (NameClaim("me", 100, 10, "more"), None),  # of what comes next
        (NameClaim("me", 100, 4, "nine"), "of other content"),
        (NameClaim("you", 100, 4, "ten"), "belongs to 'me'"),
    ],
)
def test_a_name_is_for_its_owner_and_what_was_begun_is_not_changed(claim: NameClaim, reason: str | None) -> None:
    ids = SequenceIds()
    claimed(ids, "p", NameClaim("me", 100, 4, "ten"), 9)
    said = ids.why_refused("p", claim)
    assert said is None if reason is None else reason in str(said)


def test_what_was_told_and_never_stored_may_be_told_anew() -> None:
    ids = SequenceIds()
    claimed(ids, "p", NameClaim("me", 100, 10, "ten"), 9)
    assert ids.why_refused("p", NameClaim("me", 100, 10, "nine")) is None


Batch = tuple[int, ...]
"""Sequence ids, rising."""


def packed(ids: list[int], keys: list[int], most: int) -> list[Batch]:
    """As clients make batches by key: one for each key of a round, in the order of their first ids."""
    batches: list[Batch] = []
    for start in range(0, len(ids), most):
        by_key: dict[int, list[int]] = {}
        for sequence_id, key in zip(ids[start : start + most], keys[start : start + most], strict=True):
            by_key.setdefault(key, []).append(sequence_id)
        batches += sorted(map(tuple, by_key.values()))
    return batches


class Broker:
    """Stores the batches of one name that it is sent, as far as they are new."""

    def __init__(self, *, says_highest: bool) -> None:
        self.says_highest = says_highest
        self.log: list[Batch] = []
        self.saved: tuple[int, dict[str, int]] = (0, {})
        self.ids = SequenceIds()

    def mark(self, batch: Batch) -> Mark:
        return mark_of_batch(batch[0], len(batch), batch[-1] if self.says_highest else 0)

    def send(self, batch: Batch) -> None:
        sequence = self.ids.follow("p", 0.0)
        mark = self.mark(batch)
        if sequence.push(batch[0], *mark):
            sequence.begin(mark)
            self.log.append(batch)
            sequence.confirm(mark)
        else:
            assert sequence.is_stored(batch[0], mark.ends)
        self.ids.leave(sequence, 0.0)

    def save(self) -> None:
        self.saved = len(self.log), self.ids.snapshot()

    def unload(self) -> None:
        self.save()
        self.crash()

    def crash(self) -> None:
        self.ids = SequenceIds()
        self.ids.restore(self.saved[1], 0.0)
        for batch in self.log[self.saved[0] :]:
            self.ids.note_stored("p", self.mark(batch), 0.0)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    gaps=st.lists(st.sampled_from([1, 1, 1, 4]), min_size=20, max_size=20),
    most=st.integers(1, 9),
    says_highest=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["save", "crash", "unload", "reconnect"])), max_size=5),
)
def test_batches_that_are_sent_again_as_they_were_are_stored_once(
    keys: list[int], gaps: list[int], most: int, says_highest: bool, steps: list[tuple[int, str]]
) -> None:
    batches = packed(list(accumulate(gaps[: len(keys)])), keys, most)
    broker, unanswered = Broker(says_highest=says_highest), 0
    for sent, then in steps:
        sent = max(sent % (len(batches) + 1), unanswered)
        for batch in batches[unanswered:sent]:
            broker.send(batch)
        if then == "reconnect":
            unanswered = sent
        else:
            getattr(broker, then)()
    for batch in batches[unanswered:]:
        broker.send(batch)
    assert broker.log == batches


@given(
    count=st.integers(1, 20),
    says_highest=st.booleans(),
    runs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 20), st.booleans()), max_size=5),
)
def test_nothing_is_lost_of_batches_that_an_application_packs_anew(
    count: int, says_highest: bool, runs: list[tuple[int, int, int, bool]]
) -> None:
    """Each run starts somewhere in what is sent already, packs by another number, and ends early."""
    broker, reached = Broker(says_highest=says_highest), 0
    for start, most, batches, crash in [*runs, (0, 7, 20, False)]:
        ids = list(range(min(start, reached), count))
        for batch in packed(ids, [0] * len(ids), most)[:batches]:
            broker.send(batch)
            reached = batch[-1] + 1
            assert set(batch) <= {sequence_id for stored in broker.log for sequence_id in stored}, "answered, and not stored"
        broker.save()
        if crash:
            broker.crash()
    assert {sequence_id for stored in broker.log for sequence_id in stored} == set(range(count))


@dataclass(slots=True)
class Append:
    ids: list[int]
    last_chunks: list[int]  # those of the ids that are recorded


class Client:
    """Sends 0, 1, 2 … in order, resends what is unanswered after every reconnect, as official clients do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.next_id = 0
        self.unanswered: deque[tuple[int, int]] = deque()  # (sequence id, chunks)
        self.answered: list[int] = []
        self.sequence: ProducerSequence | None = None
        self.to_send: deque[tuple[int, int]] = deque()
        self.pending: deque[Append] = deque()


class Histories(RuleBasedStateMachine):
    """A topic: its log, its snapshot, its producers. `reset` and `saved` are where the mutants cut."""

    reset_after_failure = True
    snapshot_pushed = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int, bool]] = []  # (name, sequence id, is its last chunk)
        self.saved: tuple[int, dict[str, int]] = (0, {})
        self.ids = SequenceIds()
        self.clients = [Client("a"), Client("b")]
        self.in_flight: deque[tuple[Client | None, str, ProducerSequence | None, Append]] = deque()
        self.now = 0.0

    # Clients

    def client(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    @rule(index=st.integers(0, 1), chunks=st.sampled_from([1, 1, 1, 3]), gap=st.sampled_from([1, 1, 2]), at_once=st.booleans())
    def publish(self, index: int, chunks: int, gap: int, at_once: bool) -> None:
        client = self.client(index)
        message = (client.next_id, chunks)
        client.next_id += gap
        client.unanswered.append(message)
        if client.sequence is not None:
            client.to_send.append(message)
        if at_once:
            self.send(index)

    @rule(index=st.integers(0, 1))
    def send(self, index: int) -> None:
        """What it has to send reaches the broker as one group. It connects for that: the broker lets it in when nothing of it is
        under way, and it resends everything unanswered."""
        client = self.client(index)
        if client.sequence is None and self.ids.is_settled(client.name):
            client.sequence = self.ids.follow(client.name, self.now)
            client.to_send = deque(client.unanswered)
        if client.sequence is None or not client.to_send:
            return
        append = Append([], [])
        while client.to_send:
            sequence_id, chunks = client.to_send.popleft()
            verdict = judge(client.sequence, sequence_id)
            if verdict is Verdict.DUPLICATE:
                self.check_stored(client.name, sequence_id)
                self.on_answered(client, sequence_id)
            elif verdict is Verdict.NEW:
                append.ids += [sequence_id] * chunks
                append.last_chunks.append(sequence_id)
                push(client.sequence, sequence_id)
                assert judge(client.sequence, sequence_id) is Verdict.UNKNOWN
        if append.ids:
            client.sequence.begin(one(append.last_chunks[-1]))
            client.pending.append(append)
            self.in_flight.append((client, client.name, client.sequence, append))

    @rule(index=st.integers(0, 1))
    def lose_connection(self, index: int) -> None:
        client = self.client(index)
        if client.sequence is not None:
            self.disconnect(client)

    def disconnect(self, client: Client) -> None:
        assert client.sequence is not None
        self.ids.leave(client.sequence, self.now)
        client.sequence = None
        client.to_send.clear()
        client.pending.clear()
        self.in_flight = deque((None if c is client else c, *rest) for c, *rest in self.in_flight)

    def on_answered(self, client: Client, sequence_id: int) -> None:
        if client.unanswered and client.unanswered[0][0] == sequence_id:
            client.unanswered.popleft()
        client.answered.append(sequence_id)

    # The ledger

    @precondition(lambda self: self.in_flight)
    @rule()
    def append_is_stored(self) -> None:
        client, name, sequence, append = self.in_flight.popleft()
        assert sequence is not None
        self.store(name, append)
        sequence.confirm(one(append.last_chunks[-1]))
        if client is not None:
            client.pending.popleft()
            for sequence_id in append.last_chunks:
                self.on_answered(client, sequence_id)

    @precondition(lambda self: self.in_flight)
    @rule()
    def append_is_refused(self) -> None:
        """And everything of that client behind it; the ledger lives on, the client reconnects."""
        client, name, _, _ = self.in_flight[-1]
        kept = deque(item for item in self.in_flight if item[1] != name)
        for _, other, sequence, append in self.in_flight:
            if other == name and sequence is not None and self.reset_after_failure:
                sequence.fail(one(append.last_chunks[-1]))
            elif other == name and sequence is not None:
                sequence._under_way.remove(one(append.last_chunks[-1]))
        self.in_flight = kept
        if client is not None:
            self.disconnect(client)

    def store(self, name: str, append: Append) -> None:
        for index, sequence_id in enumerate(append.ids):
            last = index + 1 == len(append.ids) or append.ids[index + 1] != sequence_id
            self.log.append((name, sequence_id, last))

    # The broker

    @rule()
    def save_snapshot(self) -> None:
        ids = self.ids.snapshot()
        if self.snapshot_pushed:
            ids = {name: sequence.pushed.ends for name, sequence in self.ids._names.items() if sequence.pushed.ends >= 0}
        self.saved = (len(self.log), ids)

    @rule(cut=st.integers(0, 3), torn=st.booleans())
    def crash(self, cut: int, torn: bool) -> None:
        """What was under way may be stored up to anywhere, also within a chunked message; the next owner reads the log."""
        for client in self.clients:
            client.sequence = None
            client.to_send.clear()
            client.pending.clear()
        for _, name, _, append in list(self.in_flight)[:cut]:
            if torn and len(append.ids) > 1:
                kept = append.ids[: len(append.ids) // 2]
                for index, sequence_id in enumerate(kept):
                    last = append.ids[index + 1] != sequence_id
                    self.log.append((name, sequence_id, last))
                break
            self.store(name, append)
        self.in_flight.clear()
        self.now += 1
        self.ids = SequenceIds()
        position, saved = self.saved
        self.ids.restore(saved, self.now)
        for name, sequence_id, last in self.log[position:]:
            if last:
                self.ids.note_stored(name, one(sequence_id), self.now)

    # H3, H1, H4

    def check_stored(self, name: str, sequence_id: int) -> None:
        assert (name, sequence_id, True) in self.log, f"{name} {sequence_id} was called a duplicate and is not stored"

    @invariant()
    def each_message_is_stored_once_and_in_order(self) -> None:
        for client in self.clients:
            whole = [sequence_id for name, sequence_id, last in self.log if name == client.name and last]
            assert whole == sorted(set(whole))

    @invariant()
    def what_was_answered_is_stored(self) -> None:
        for client in self.clients:
            whole = {sequence_id for name, sequence_id, last in self.log if name == client.name and last}
            assert set(client.answered) <= whole


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


class NoReset(Histories):
    """Mutant: what failed stays pushed (#5218)."""

    reset_after_failure = False

    def crash(self, cut: int, torn: bool) -> None:  # not a rule: a crash would repair it
        raise NotImplementedError

    @invariant()
    def nobody_is_stuck(self) -> None:
        for client in self.clients:
            if client.sequence is not None and client.sequence.is_settled:
                for sequence_id, _ in client.to_send:
                    assert judge(client.sequence, sequence_id) is not Verdict.UNKNOWN, "dropped although it was never stored"


class SnapshotOfPushed(Histories):
    """Mutant: a snapshot names what may never be stored."""

    snapshot_pushed = True


@pytest.mark.parametrize("mutant", [NoReset, SnapshotOfPushed])
def test_the_machine_finds_planted_bugs(mutant: type[Histories]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            mutant,
            settings=settings(
                max_examples=3000,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                derandomize=True,  # they are found always, or never
            ),
        )
