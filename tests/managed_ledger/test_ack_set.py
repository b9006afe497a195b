"""What a cursor knows to be acknowledged: worked examples, then random histories against a naive model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cepheid_managed_ledger.ack_set import MAX_BATCH_BITS, MAX_BATCH_MESSAGES, AckSet, mask_of, words_of
from cepheid_managed_ledger.cursor_state import decode_state, encode_state
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import ChainLedger, Position
from tests.managed_ledger.test_ledger_list import at, ledger_list


def ack_set(mark_delete: str, *acked: str, chain: LedgerList | None = None) -> AckSet:
    acks = AckSet(chain or ledger_list((5, 3), (6, 0), (8, 5), (9, 3)), at(mark_delete))
    assert acks.acknowledge(map(at, acked)) == []
    return acks


def bits(*indexes: int) -> int:
    return sum(1 << index for index in indexes)


def test_a_run_crosses_the_ends_of_ledgers() -> None:
    chain = ledger_list((5, 3), (6, 0), (8, 1), (9, 3))
    acks = ack_set("5:0", "8:0", "5:2", chain=chain)
    assert acks.mark_delete == at("5:0")
    assert acks.acked_entries == 2
    assert acks.acknowledge([at("5:1")]) == []
    assert acks.mark_delete == at("8:0")
    assert acks.acked_entries == 0
    assert acks.acked == {}


def test_acknowledging_in_order_needs_no_bitmap() -> None:
    acks = ack_set("5:-1", "5:0", "5:1", "5:2", "8:0")
    acks.acknowledge([at("8:1"), at("8:2"), at("8:3")])
    assert (acks.mark_delete, acks.acked, acks.backlog_entries) == (at("8:3"), {}, 4)


@pytest.mark.parametrize("position", ["4:0", "7:0", "8:5", "8:-1", "9:3", "12:0", "5:-7"])
def test_entries_that_do_not_exist_are_refused(position: str) -> None:
    acks = ack_set("5:-1")
    refused = acks.acknowledge([at("5:0"), at(position)])
    assert refused == ([] if position == "4:0" else [at(position)])  # 4 was trimmed: everything before 5:-1 is acknowledged
    assert acks.mark_delete == at("5:0")
    assert acks.backlog_entries == 10


def test_it_may_start_in_the_middle_of_a_batch() -> None:
    chain = ledger_list((5, 3), (8, 5))
    acks = AckSet.starting_at(chain, at("8:1"), words_of((bits(1, 3), 64)))
    assert acks.mark_delete == at("8:0")
    assert not acks.is_acknowledged(at("8:1"))
    assert acks.unacked_messages(at("8:1")) == (bits(1, 3), 64)
    behind = AckSet.starting_at(chain, at("8:5"), words_of((bits(1), 64)))
    assert (behind.mark_delete, behind.backlog_entries) == (at("8:4"), 0), "there is no such entry yet"


@pytest.mark.parametrize(
    ("position", "accepted", "mark_delete"),
    [("8:1", True, "8:1"), ("5:0", True, "5:1"), ("9:-1", True, "9:-1"), ("8:5", False, "5:1"), ("13:0", False, "5:1")],
)
def test_cumulative(position: str, accepted: bool, mark_delete: str) -> None:
    acks = ack_set("5:1")
    assert acks.acknowledge_cumulative(at(position)) is accepted
    assert acks.mark_delete == at(mark_delete)


def test_cumulative_runs_over_what_follows() -> None:
    acks = ack_set("5:-1", "8:2", "8:3", "9:1")
    acks.acknowledge_cumulative(at("8:1"))
    assert acks.mark_delete == at("8:3")
    assert acks.backlog_entries == 3


def test_parts_of_a_batch() -> None:
    acks = ack_set("5:-1")
    assert acks.acknowledge_messages(at("8:1"), bits(1, 3), 4)  # 0 and 2 are acknowledged
    assert acks.unacked_messages(at("8:1")) == (bits(1, 3), 4)
    assert not acks.is_acknowledged(at("8:1"))
    assert acks.acknowledge_messages(at("8:1"), bits(0, 1, 2), 4)
    assert acks.unacked_messages(at("8:1")) == (bits(1), 4)
    assert acks.acknowledge_messages(at("8:1"), bits(0, 2, 3), 4)
    assert acks.unacked_messages(at("8:1")) is None
    assert acks.is_acknowledged(at("8:1"))
    assert acks.acked_entries == 1


def test_cumulative_inside_a_batch() -> None:
    acks = ack_set("5:-1")
    assert acks.acknowledge_messages_cumulative(at("8:1"), bits(2, 3), 4)
    assert acks.mark_delete == at("8:0")
    assert acks.unacked_messages(at("8:1")) == (bits(2, 3), 4)
    assert acks.acknowledge_messages_cumulative(at("8:1"), bits(1, 2, 3), 4), "it never takes anything back"
    assert acks.unacked_messages(at("8:1")) == (bits(2, 3), 4)


def test_a_whole_acknowledgement_ends_a_part() -> None:
    acks = ack_set("5:-1")
    acks.acknowledge_messages(at("8:1"), bits(1), 2)
    acks.acknowledge([at("8:1"), at("8:1")])
    assert acks.batches == {}
    acks.acknowledge_messages(at("9:1"), bits(1), 2)
    acks.acknowledge_cumulative(at("9:2"))
    assert acks.batches == {}


@pytest.mark.parametrize(("position", "messages"), [("8:9", 4), ("8:1", 0), ("8:1", MAX_BATCH_MESSAGES + 1), ("12:0", 4)])
def test_batches_that_cannot_be_are_refused(position: str, messages: int) -> None:
    acks = ack_set("5:-1")
    assert not acks.acknowledge_messages(at(position), 1, messages)
    assert acks.batches == {}


def test_batches_in_part_are_bounded() -> None:
    acks = AckSet(ledger_list((3, 2_000)), at("3:-1"))
    accepted = [acks.acknowledge_messages(Position(3, entry), bits(0), MAX_BATCH_MESSAGES) for entry in range(1, 1_500)]
    assert accepted == [True] * (MAX_BATCH_BITS // MAX_BATCH_MESSAGES) + [False] * (1_499 - MAX_BATCH_BITS // MAX_BATCH_MESSAGES)
    assert acks.acknowledge_messages(at("3:1"), 0, MAX_BATCH_MESSAGES), "what is known goes on"
    assert acks.acknowledge_messages(at("3:1400"), bits(0), MAX_BATCH_MESSAGES)


def test_unacknowledged_runs() -> None:
    acks = ack_set("5:1", "8:1", "8:2", "8:4")
    assert acks.unacknowledged_runs(5, 0, 2) == [(2, 2)]
    assert acks.unacknowledged_runs(5, 0, 1) == []
    assert acks.unacknowledged_runs(8, 0, 4) == [(0, 0), (3, 3)]
    assert acks.unacknowledged_runs(9, 0, 2) == [(0, 2)]
    assert acks.unacknowledged_runs(4, 0, 2) == []


def test_a_long_run_is_absorbed_at_once() -> None:
    chain = ledger_list((1, 300_000), (2, 5))
    acks = AckSet(chain, at("1:-1"))
    acks.acknowledge(Position(1, entry) for entry in range(1, 300_000))
    acks.acknowledge([at("1:0")])
    assert acks.mark_delete == at("1:299999")
    assert acks.backlog_entries == 5


@pytest.mark.parametrize(("words", "mask"), [((-1,), (1 << 64) - 1), ((5, 1), 5 + (1 << 64)), ((0, -(1 << 63)), 1 << 127), ((), 0)])
def test_words_of_the_wire(words: tuple[int, ...], mask: int) -> None:
    assert mask_of(words) == mask
    assert words_of((mask, 64 * len(words))) == words


def test_restored_state_fits_the_chain() -> None:
    saved = ack_set("5:1", "8:1", "8:4", "9:2")
    saved.acknowledge_messages(at("8:3"), 1, 2)
    saved.acknowledge_messages(at("9:1"), 1, 2)
    state = decode_state(encode_state(saved))
    restored = state.ack_set(ledger_list((8, 3), (9, 0), (11, 2)))  # 5 and 6 were trimmed; 8 and 9 turned out shorter
    assert (restored.mark_delete, restored.acked_entries, restored.batches) == (at("8:-1"), 1, {})
    assert restored.backlog_entries == 4
    above = state.ack_set(ledger_list((3, 2)))
    assert (above.mark_delete, above.backlog_entries) == (at("3:1"), 0), "never above the end"


class Model:
    """Sets of entries and messages."""

    def __init__(self, mark_delete: Position) -> None:
        self.chain: list[tuple[int, int]] = [(1, 0)]
        self.acked: set[Position] = set()
        self.batches: dict[Position, set[int]] = {}
        self.start = mark_delete

    @property
    def entries(self) -> list[Position]:
        return [Position(ledger_id, entry) for ledger_id, count in self.chain for entry in range(count)]

    def acknowledge(self, positions: Iterable[Position]) -> None:
        self.acked |= set(positions) & set(self.entries)
        self.batches = {position: left for position, left in self.batches.items() if position not in self.acked}

    def acknowledge_messages(self, position: Position, unacked: set[int], messages: int) -> None:
        if position in self.entries and position not in self.acked:
            left = self.batches.get(position, set(range(messages))) & unacked
            if left:
                self.batches[position] = left
            else:
                self.acknowledge([position])
            if self.batches.get(position) == set(range(messages)):
                del self.batches[position]

    @property
    def backlog(self) -> list[Position]:
        return [entry for entry in self.entries if entry not in self.acked]


MESSAGES = 5


class AckSetHistories(RuleBasedStateMachine):
    """Appends, rollovers, trims, acknowledgements of every kind, saves and restarts."""

    @initialize()
    def start(self) -> None:
        self.ledgers = LedgerList([ChainLedger(ledger_id=1)])
        self.acks = AckSet(self.ledgers, Position(1, -1))
        self.model = Model(Position(1, -1))

    def _records(self, open_id: int | None = None) -> list[ChainLedger]:
        ended = self.model.chain if open_id is not None else self.model.chain[:-1]
        last = ChainLedger(ledger_id=open_id if open_id is not None else self.model.chain[-1][0])
        return [*(ChainLedger(ledger_id=ledger_id, entries=count) for ledger_id, count in ended), last]

    @rule(count=st.integers(1, 6))
    def append(self, count: int) -> None:
        ledger_id, before = self.model.chain[-1]
        self.model.chain[-1] = (ledger_id, before + count)
        self.ledgers.confirm(before + count - 1, count)

    @rule(step=st.integers(1, 3))
    def roll_over(self, step: int) -> None:
        successor = self.model.chain[-1][0] + step
        self.ledgers.update(self._records(open_id=successor))
        self.model.chain.append((successor, 0))

    @precondition(lambda self: len(self.model.chain) > 1)
    @rule()
    def trim(self) -> None:
        first_id, count = self.model.chain[0]
        if all(Position(first_id, entry) in self.model.acked for entry in range(count)):
            edge = Position(self.model.chain[1][0], -1)
            self.acks.skip_to(edge)
            del self.model.chain[0]
            self.ledgers.update(self._records())

    @rule(data=st.data(), count=st.integers(1, 8))
    def acknowledge(self, data: st.DataObject, count: int) -> None:
        positions = [self._some(data) for _ in range(count)]
        before = self.acks.mark_delete
        refused = self.acks.acknowledge(positions)
        existing = self.model.entries
        for position in positions:  # at or below the mark-delete position all is well, whether it ever existed or not
            assert (position in refused) == (position not in existing and (position.entry_id < 0 or position > before))
        self.model.acknowledge(positions)

    @rule(data=st.data())
    def acknowledge_cumulative(self, data: st.DataObject) -> None:
        position = self._some(data)
        if self.acks.acknowledge_cumulative(position):
            self.model.acknowledge(entry for entry in self.model.entries if entry <= position)

    @rule(data=st.data(), unacked=st.sets(st.integers(0, MESSAGES - 1)), cumulative=st.booleans())
    def acknowledge_messages(self, data: st.DataObject, unacked: set[int], cumulative: bool) -> None:
        position = self._some(data)
        if cumulative:
            if self.acks.acknowledge_messages_cumulative(position, bits(*unacked), MESSAGES) and position in self.model.entries:
                self.model.acknowledge(entry for entry in self.model.entries if entry < position)
                self.model.acknowledge_messages(position, unacked, MESSAGES)
        else:
            self.acks.acknowledge_messages(position, bits(*unacked), MESSAGES)
            self.model.acknowledge_messages(position, unacked, MESSAGES)

    @rule()
    def save_and_restart(self) -> None:
        self.acks = decode_state(encode_state(self.acks)).ack_set(self.ledgers)

    def _some(self, data: st.DataObject) -> Position:
        known = [ledger_id for ledger_id, _ in self.model.chain]
        ledger_id = data.draw(st.sampled_from([*known, *known, known[0] - 1, known[-1] + 1]))
        count = dict(self.model.chain).get(ledger_id, 2)
        return Position(ledger_id, data.draw(st.integers(-1, count)))

    @invariant()
    def agree(self) -> None:
        backlog = self.model.backlog
        assert self.acks.backlog_entries == len(backlog)
        first = self.acks.first_unacknowledged()
        assert first == (backlog[0] if backlog else Position(*self.model.chain[-1]))
        assert [self.acks.nth_unacknowledged(number) for number in range(1, len(backlog) + 2)] == [*backlog, None]
        for position in self.model.entries:
            assert self.acks.is_acknowledged(position) == (position in self.model.acked)
            left = self.model.batches.get(position)
            assert self.acks.unacked_messages(position) == (None if left is None else (bits(*left), MESSAGES))
        for ledger_id, count in self.model.chain:
            if count:
                runs = self.acks.unacknowledged_runs(ledger_id, 0, count - 1)
                listed = [Position(ledger_id, entry) for run_first, run_last in runs for entry in range(run_first, run_last + 1)]
                assert listed == [position for position in backlog if position.ledger_id == ledger_id]
                assert all(a[1] + 1 < b[0] for a, b in pairwise(runs)), "runs are maximal"
                for entry in (0, count // 2, count):
                    following = [position for position in backlog if position >= (ledger_id, entry)]
                    found = self.acks.unacknowledged_from(Position(ledger_id, entry))
                    assert found == following[0] if following else not self.ledgers.is_valid(found)
        assert self.acks.acked_entries == sum(map(len, self.acks.acked.values()))
        assert all(self.acks.acked.values()), "no empty bitmaps"
        assert all(self.acks.batches.values()), "no empty batches"
        assert self.acks._batch_bits == MESSAGES * sum(map(len, self.acks.batches.values()))


AckSetHistories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAckSetHistories = AckSetHistories.TestCase


@given(st.sets(st.integers(0, 200_000), max_size=500), st.lists(st.integers(0, 99), max_size=20, unique=True))
def test_every_hole_survives_encoding(acked: set[int], partly: list[int]) -> None:
    chain = ledger_list((3, 200_001), (4, 100))
    acks = AckSet(chain, at("3:-1"))
    acks.acknowledge(Position(3, entry) for entry in acked)
    for entry in partly:
        acks.acknowledge_messages(Position(4, entry), bits(entry, 200), 201)
    restored = decode_state(encode_state(acks)).ack_set(chain)
    assert restored.mark_delete == acks.mark_delete
    assert restored.acked == acks.acked
    assert restored.batches == acks.batches
    assert restored.backlog_entries == acks.backlog_entries
