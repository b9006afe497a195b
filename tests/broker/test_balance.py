"""The decision of load balancing: it converges, stays still where loads are even, and does not move a bundle back and forth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.balancing.balance import BalanceRules, BrokerState, BundleState, Move, Plan, balance, is_uneven
from cepheid_broker.balancing.balance_memory import CONFIRM_ROUNDS, FLAPPING_STARTS, REST_S, STEADY_S, BalanceMemory
from cepheid_broker.balancing.loads import MESSAGES_PER_S, BrokerReport, BundleLoad, local_broker_data, report_from

RULES = BalanceRules()


def broker(name: str, *loads: float, topics: int = 10, takes: bool = True) -> BrokerState:
    bundles = tuple(BundleState(f"t/n/{name}-{number}", load, topics) for number, load in enumerate(loads))
    return BrokerState(name, bundles, takes=takes)


def carried_out(brokers: Sequence[BrokerState], plan: Plan) -> list[BrokerState]:
    """The brokers after the plan: bundles moved, and split into even halves."""
    bundles = {state.broker_id: {bundle.name: bundle for bundle in state.bundles} for state in brokers}
    for move in plan.moves:
        bundles[move.target][move.bundle] = bundles[move.source].pop(move.bundle)
    for split in plan.splits:
        whole = bundles[split.broker].pop(split.bundle)
        for half, topics in (("l", whole.topics // 2), ("u", whole.topics - whole.topics // 2)):
            bundles[split.broker][f"{whole.name}{half}"] = BundleState(f"{whole.name}{half}", whole.load / 2, topics)
    return [BrokerState(state.broker_id, tuple(bundles[state.broker_id].values()), takes=state.takes) for state in brokers]


@pytest.mark.parametrize(
    ("brokers", "moves"),
    [
        ([broker("a", 0.3, 0.3), broker("b")], [("a", "b")]),  # a new broker gets its share
        ([broker("a", 0.25, 0.25), broker("b", 0.4)], []),  # 0.50 and 0.40 are within 20 % of 0.45
        ([broker("a", 0.01, 0.01), broker("b")], []),  # an idle cluster stays as it is
        ([broker("a", 0.3, 0.3), broker("b", takes=False)], []),  # a broker that is drained gets nothing
        ([broker("a", 0.4, 0.2), broker("b", 0.1), broker("c", takes=False)], [("a", "b")]),
        ([broker("a", *[0.2] * 4, takes=False), broker("b", 0.1), broker("c", 0.1)], [("a", "b"), ("a", "c")]),  # it only gives
        ([broker("a", takes=False), broker("b", 0.3), broker("c", 0.3)], []),  # that it has nothing makes nothing uneven
        ([broker("a", 0.3, 0.3, takes=False)], []),
        ([broker("a", 0.3, 0.3)], []),
        ([], []),
    ],
)
def test_moves_what_evens_out_the_loads(brokers: list[BrokerState], moves: list[tuple[str, str]]) -> None:
    plan = balance(brokers, RULES)
    assert [(move.source, move.target) for move in plan.moves] == moves
    assert not plan.splits


def test_a_move_is_explained_in_numbers() -> None:
    (move,) = balance([broker("a", 0.3, 0.3), broker("b")], RULES).moves
    assert move.why == "loads: a 0.60, b 0.00, mean 0.30, bundle 0.300"


def test_a_bundle_that_is_too_hot_to_move_is_split_first() -> None:
    brokers = [broker("a", 0.4), broker("b", 0.05)]
    plan = balance(brokers, RULES)
    assert [(split.bundle, split.by) for split in plan.splits] == [("t/n/a-0", "load")]
    assert not plan.moves
    moved = balance(carried_out(brokers, plan), RULES).moves
    assert [(move.source, move.target) for move in moved] == [("a", "b")]


def test_a_bundle_of_one_topic_stays_and_a_note_says_why() -> None:
    plan = balance([broker("a", 0.45, topics=1), broker("b")], RULES)
    assert plan.is_empty
    assert "is one topic in bundle t/n/a-0, which cannot be split: make it a partitioned topic" in plan.notes[0]


def test_a_bundle_of_too_many_topics_is_split_wherever_it_is() -> None:
    crowded = BrokerState("a", (BundleState("t/n/x", 0.01, 1001), BundleState("t/n/y", 0.01, 1000)))
    plan = balance([crowded], RULES)
    assert [(split.bundle, split.by) for split in plan.splits] == [("t/n/x", "topics")]
    assert not balance([crowded], BalanceRules(split_topics=0)).splits


def test_moves_of_one_round_are_bounded() -> None:
    brokers = [broker("a", *[0.01] * 100), broker("b")]
    assert len(balance(brokers, BalanceRules(moves_at_once=3)).moves) == 3


def test_what_a_policy_does_not_allow_moves_and_nothing_moves_there() -> None:
    def may_serve(bundle: str, broker_id: str) -> bool:
        return broker_id == "c" if bundle == "t/n/a-0" else broker_id != "c"

    plan = balance([broker("a", 0.1, 0.3), broker("b", 0.2), broker("c")], RULES, may_serve=may_serve)
    assert [(move.bundle, move.target, move.why) for move in plan.moves] == [
        ("t/n/a-0", "c", "an isolation policy does not allow a")
    ]
    nowhere = balance([broker("a", 0.1)], RULES, may_serve=lambda bundle, broker_id: False)
    assert nowhere.is_empty


@pytest.mark.parametrize(("rests", "may_stay", "moves"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_a_bundle_that_rests_stays_at_a_secondary_broker(rests: bool, may_stay: bool, moves: int) -> None:
    brokers = [broker("a"), BrokerState("b", (BundleState("t/n/x", 0.01, 10, may_move=not rests),))]
    plan = balance(
        brokers, RULES, may_serve=lambda bundle, broker_id: broker_id == "a", may_stay=lambda bundle, broker_id: may_stay
    )
    assert len(plan.moves) == moves


LOADS = st.lists(st.lists(st.floats(0.0, 0.3), max_size=12), min_size=2, max_size=6)


@given(LOADS)
def test_converges_and_then_stays_still(loads: list[list[float]]) -> None:
    brokers = [broker(f"b{number}", *own, topics=1 << 20) for number, own in enumerate(loads)]
    rules = BalanceRules(split_topics=0)
    for _ in range(200):
        plan = balance(brokers, rules)
        if plan.is_empty:
            break
        before = sorted((state.load for state in brokers), reverse=True)
        brokers = carried_out(brokers, plan)
        if plan.moves:
            after = sorted((state.load for state in brokers), reverse=True)
            assert sum(load * load for load in after) < sum(load * load for load in before)
    assert balance(brokers, rules).is_empty
    assert not is_uneven(brokers, RULES.tolerance)


@given(LOADS)
def test_a_broker_that_takes_nothing_gets_nothing_and_no_bundle_moves_twice(loads: list[list[float]]) -> None:
    brokers = [broker(f"b{number}", *own, takes=number > 0) for number, own in enumerate(loads)]
    moves = balance(brokers, RULES).moves
    assert all(move.target != "b0" for move in moves)
    assert len({move.bundle for move in moves}) == len(moves)


# Rounds


class Cluster:
    """Brokers that do what the memory plans, and report rates as brokers do: those of a bundle that moved grow from nothing."""

    def __init__(self, seed: int, **loads: Sequence[float]) -> None:
        self.random = random.Random(seed)
        self.memory = BalanceMemory()
        self.now_s = 1000.0
        self.owners = {f"t/n/{name}-{number}": name for name, own in loads.items() for number in range(len(own))}
        self.loads = {f"t/n/{name}-{number}": load for name, own in loads.items() for number, load in enumerate(own)}
        self.brokers = list(loads)
        self.moved_s: dict[str, float] = {}
        self.moves: list[tuple[float, Move]] = []
        self.noise = 0.0
        self.cost = 1.0
        """What the processors say, over the estimate."""
        self.idle_cpu = 0.0
        """What they say besides that, however little there is to do."""

    def report(self, name: str) -> BrokerReport:
        bundles = []
        for bundle, owner in self.owners.items():
            if owner == name:
                shown = self.loads[bundle] * (1 + self.noise * self.random.uniform(-1, 1))
                shown *= min(1.0, (self.now_s - self.moved_s.get(bundle, 0.0)) / 10)  # a window of 10 s
                bundles.append(BundleLoad(bundle, messages_in_per_s=shown * MESSAGES_PER_S, topics=0))
        cpu = self.idle_cpu + self.cost * sum(self.loads[bundle] for bundle, owner in self.owners.items() if owner == name)
        return BrokerReport(name, tuple(bundles), cpu, started_at_ms=0, reported_at_ms=10**9)

    def round(self) -> Plan:
        self.now_s += 5.0
        states = self.memory.states(self.now_s, [self.report(name) for name in self.brokers])
        plan = self.memory.plan(states, RULES, lambda bundle, broker_id: True)
        for move in plan.moves:
            assert self.owners[move.bundle] == move.source
            self.owners[move.bundle] = move.target
            self.moved_s[move.bundle] = self.now_s
            self.moves.append((self.now_s, move))
            self.memory.on_moved(self.now_s, move)
        return plan

    def shares(self) -> dict[str, float]:
        return {name: sum(self.loads[bundle] for bundle, owner in self.owners.items() if owner == name) for name in self.brokers}


@pytest.mark.parametrize(
    ("load", "cost", "idle_cpu"),
    [
        (0.015, 0.0, 0.0),
        (0.015, 1.0, 0.0),
        (0.015, 3.0, 0.0),
        (0.0014, 1.5, 0.03),  # loops with little to do: their processors differ less than their loads
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_new_broker_has_its_share_within_a_minute(noise: float, load: float, cost: float, idle_cpu: float) -> None:
    cluster = Cluster(1, a=[load] * 20, b=[load] * 28, c=[])
    cluster.noise, cluster.cost, cluster.idle_cpu = noise, cost, idle_cpu
    for _ in range(12):
        cluster.round()
    mean = sum(cluster.loads.values()) / 3
    assert all(abs(share - mean) <= 0.2 * mean for share in cluster.shares().values()), cluster.shares()
    moved = len(cluster.moves)
    for _ in range(60):
        cluster.round()
    assert len(cluster.moves) - moved <= 2  # it stays as it is


def test_a_broker_that_needs_more_for_each_message_gets_fewer_once_its_loop_is_busy() -> None:
    def loads(cpu: float) -> list[float]:
        held = [BrokerReport(name, (BundleLoad(f"t/n/{name}", 4000.0, topics=0),), reported_at_ms=10**9) for name in "ab"]
        reports = [replace(held[0], cpu=cpu), replace(held[1], cpu=cpu / 2)]
        return [round(state.load, 3) for state in BalanceMemory().states(1000.0, reports)]

    assert loads(0.3) == [0.25, 0.25]  # the estimate is 0.2, and what both processors say is alike
    assert loads(0.5) == [0.438, 0.312]
    assert loads(0.9) == [0.9, 0.45]


def test_what_is_uneven_for_a_moment_moves_nothing() -> None:
    cluster = Cluster(1, a=[0.1] * 4, b=[0.1] * 4)
    for number in range(60):
        cluster.loads["t/n/a-0"] = 0.6 if number % CONFIRM_ROUNDS == 0 else 0.1
        assert not cluster.round().moves


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_no_bundle_back_and_forth(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(seed, **{name: [rng.uniform(0.0, 0.05) for _ in range(rng.randrange(30))] for name in "abcd"})
    cluster.noise, cluster.cost = 0.3, rng.choice([0.5, 1.0, 2.5])
    for _ in range(200):
        cluster.round()
    last: dict[str, float] = {}
    for at_s, move in cluster.moves:
        assert at_s - last.get(move.bundle, float("-inf")) >= REST_S
        last[move.bundle] = at_s
    late = [move for at_s, move in cluster.moves if at_s > 1000 + 500]
    assert len(late) <= 4


def test_a_move_that_was_refused_is_not_tried_again_at_once() -> None:
    cluster = Cluster(1, a=[0.3, 0.3], b=[])
    for _ in range(CONFIRM_ROUNDS - 1):
        cluster.round()
    states = cluster.memory.states(cluster.now_s, [cluster.report(name) for name in cluster.brokers])
    (move,) = cluster.memory.plan(states, RULES, lambda bundle, broker_id: True).moves
    cluster.memory.on_refused(cluster.now_s, move, "")
    states = cluster.memory.states(cluster.now_s, [cluster.report(name) for name in cluster.brokers])
    assert move.bundle not in [each.bundle for each in cluster.memory.plan(states, RULES, lambda bundle, broker_id: True).moves]


def test_a_report_of_before_a_move_does_not_count_the_bundle_at_its_old_broker() -> None:
    memory = BalanceMemory()
    old = [BrokerReport("a", (BundleLoad("t/n/x", MESSAGES_PER_S * 0.2, topics=0),)), BrokerReport("b")]
    memory.on_moved(1000.0, Move("t/n/x", "a", "b", "", 0.2))
    assert [state.load for state in memory.states(1001.0, old)] == [0.0, 0.2]
    assert [state.load for state in memory.states(1001.0, old[:1])] == [0.2]  # the new broker is gone


@pytest.mark.parametrize(("other", "moves"), [(0.0, 0), (0.2, 1)])
def test_a_bundle_whose_split_is_refused_moves_if_that_helps_and_a_note_says_why(other: float, moves: int) -> None:
    memory, now_s, splits, plan = BalanceMemory(), 1000.0, 0, Plan()
    held = tuple(BundleLoad(f"t/n/{load}", MESSAGES_PER_S * load, topics=4) for load in (0.6, other))
    for _ in range(CONFIRM_ROUNDS + 1):
        now_s += 5.0
        plan = memory.plan(memory.states(now_s, [BrokerReport("a", held), BrokerReport("b")]), RULES, lambda *_: True)
        for split in plan.splits:
            splits += split.bundle == "t/n/0.6"
            memory.on_refused(now_s, split, "a namespace has at most 128 bundles")
    assert splits == 1  # not again in each round
    assert [move.bundle for move in plan.moves] == ["t/n/0.6"] * moves
    assert "a namespace has at most 128 bundles" in plan.notes[0]


def test_a_report_comes_back_from_its_wire_form() -> None:
    report = BrokerReport("a", (BundleLoad("t/n/x", 1.5, 2.0, 3.0, 4.0, 5, 6, 7),), 0.5, 1 << 20, 11, 12)
    assert report_from(local_broker_data(report)) == report
    assert report.load == 0.5
    with pytest.raises(ValueError, match="it is not a load report"):
        report_from({"brokerId": "a"})


@pytest.mark.parametrize(("age_ms", "own_load"), [(29_000, 0.0), (31_000, 1.0)])
def test_a_broker_has_just_started_by_its_own_clock(age_ms: int, own_load: float) -> None:
    """It may be wrong by a year, as may that of the leader."""
    started_at_ms = 10**12
    report = BrokerReport("a", (), 1.0, started_at_ms=started_at_ms, reported_at_ms=started_at_ms + age_ms)
    (state,) = BalanceMemory().states(0.0, [report])
    assert state.own_load == own_load


def test_nothing_moves_to_a_broker_that_starts_again_and_again_until_it_has_run_for_a_while() -> None:
    memory, now_s = BalanceMemory(), 1000.0

    def state_after(age_s: float) -> BrokerState:
        started_at_ms = 10**12  # its clock may have been set back at each start
        report = BrokerReport("a", started_at_ms=started_at_ms, reported_at_ms=started_at_ms + int(1000 * age_s))
        memory.on_report(now_s, report)
        (state,) = memory.states(now_s, [report])
        return state

    for start in range(1, FLAPPING_STARTS + 1):
        for age_s in (1.0, 6.0, 11.0):  # reports of one process count once
            assert state_after(age_s).takes == (start < FLAPPING_STARTS)
            now_s += 5.0
        now_s += 20.0
    now_s += STEADY_S
    assert "has started 3 times" in balance([state_after(STEADY_S - 1.0)], RULES).notes[0]
    now_s += 2.0
    assert state_after(STEADY_S + 1.0).takes
    now_s += 3600.0
    assert state_after(1.0).takes  # one start in an hour is none too many
