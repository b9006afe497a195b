"""ZooKeeper's planner on records that change between its reads; on a real cluster: test_planners.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from cepheid_decode import PlanSource, PlanUnavailableError
from cepheid_metadata import (
    BookieRegistration,
    Chain,
    ChainLedger,
    LedgerMetadata,
    LedgerState,
    OffloadedLedger,
    Record,
    TopicRecord,
    keys,
)
from cepheid_metadata import Fragment as RecordedFragment
from cepheid_scan import zookeeper_planner as planner_module
from cepheid_scan.zookeeper_planner import ZooKeeperPlanner
from cepheid_wire import TopicName

R = TypeVar("R", bound=Record)
TOPIC = TopicName.parse("t")
CHAIN = keys.chain_key(TOPIC)


class ScriptedReads:
    """`on_chain` is called behind each read of the chain."""

    def __init__(self, source: PlanSource) -> None:
        self.found: dict[str, Record] = {keys.topic_key(TOPIC): TopicRecord(created_at_ms=0)}
        self.on_chain: Callable[[], None] = lambda: None
        self.chain_reads = 0

    def values(self, wanted: Sequence[str]) -> list[bytes | None]:
        return [b"" for _ in wanted]

    def records(self, wanted: Sequence[str], kind: type[R]) -> list[R | None]:
        found = [self.found.get(key) for key in wanted]
        assert all(one is None or isinstance(one, kind) for one in found)
        if CHAIN in wanted:
            self.chain_reads += 1
            self.on_chain()
        return found  # type: ignore[return-value]

    def children(self, wanted: Sequence[str]) -> list[list[str]]:
        return [["b"] if key == keys.AVAILABLE_BOOKIES_KEY else [] for key in wanted]

    def close(self) -> None:
        pass

    def keep(self, *ledger_ids: int) -> None:
        """These are the topic's, and no others are left."""
        self.found[CHAIN] = Chain(incarnation="i", ledgers=tuple(ChainLedger(ledger_id=each, entries=5) for each in ledger_ids))
        for key in [key for key, one in self.found.items() if isinstance(one, LedgerMetadata)]:
            del self.found[key]
        for each in ledger_ids:
            self.found[keys.ledger_key(each)] = closed_ledger(each)


def closed_ledger(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        fragments=(RecordedFragment(first_entry_id=0, ensemble=("b",)),),
        last_entry_id=4,
        length_bytes=50,
        creation_token=1,
        created_at_ms=0,
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedReads]:
    made = ScriptedReads(PlanSource())
    made.found[f"{keys.AVAILABLE_BOOKIES_KEY}/b"] = BookieRegistration(bookie_id="b", incarnation="i", addresses={"grpc": "h:1"})
    monkeypatch.setattr(planner_module, "ZooKeeperReads", lambda source: made)
    return made


def planned(planner: ZooKeeperPlanner) -> list[int]:
    (history,) = planner.plan([str(TOPIC)]).topics
    return [ledger.ledger_id for ledger in history.ledgers]


def test_a_ledger_that_is_trimmed_between_its_chain_and_its_record_is_left_out(reads: ScriptedReads) -> None:
    reads.keep(1, 2)
    after = iter([(2, 3), (4, 5)])
    reads.on_chain = lambda: reads.keep(*next(after, (4, 5)))
    planner = ZooKeeperPlanner(PlanSource(metadata="zk://nobody"))
    assert planned(planner) == [4, 5], "of the third look, as of one moment"
    assert reads.chain_reads == 3


def test_a_chain_that_is_trimmed_at_every_look_is_no_plan(reads: ScriptedReads) -> None:
    reads.keep(0)
    reads.on_chain = lambda: reads.keep(reads.chain_reads)
    planner = ZooKeeperPlanner(PlanSource(metadata="zk://nobody"))
    with pytest.raises(PlanUnavailableError, match="changed 3 times while they were read"):
        planned(planner)
    assert reads.chain_reads == 3
    reads.on_chain = lambda: None
    assert planned(planner) == [3], "the next question is a new one"


def test_a_ledger_that_is_only_an_object_needs_no_record_of_its_own(reads: ScriptedReads) -> None:
    reads.keep(1, 2)
    ledgers = (ChainLedger(ledger_id=1, entries=5, size_bytes=50, closed_at_ms=9), ChainLedger(ledger_id=2, entries=5))
    copies = {
        1: OffloadedLedger(url="s3://b/1", started_at_ms=1, complete=True, on_bookies=False, object_bytes=30),
        2: OffloadedLedger(url="s3://b/2", started_at_ms=1),
    }
    reads.found[CHAIN] = Chain(incarnation="i", ledgers=ledgers, offloaded=copies)
    del reads.found[keys.ledger_key(1)]
    (history,) = ZooKeeperPlanner(PlanSource(metadata="zk://nobody")).plan([str(TOPIC)]).topics
    assert [(one.ledger_id, one.last_entry_id, one.object_url, bool(one.fragments)) for one in history.ledgers] == [
        (1, 4, "s3://b/1", False),
        (2, 4, "", True),  # an upload that is not complete does not count
    ]


def test_what_is_known_of_a_closed_ledger_counts_though_its_record_went(reads: ScriptedReads) -> None:
    """Its chain was read before it was trimmed, so it is of that moment: readers hear the rest of its bookies."""
    reads.keep(1, 2)
    planner = ZooKeeperPlanner(PlanSource(metadata="zk://nobody"))
    assert planned(planner) == [1, 2]
    reads.on_chain = lambda: reads.keep(2)
    assert planned(planner) == [1, 2]
    assert planned(planner) == [2]
