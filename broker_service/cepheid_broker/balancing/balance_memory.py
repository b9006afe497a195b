"""What the leader remembers between rounds, without I/O: so that noise moves nothing, and no bundle moves back and forth.

    reports of a round ──► loads, smoothed; of what just moved: as they were before ──► uneven in 3 rounds? ──► balance ──► Plan

Rules
1. Only what has been uneven for `CONFIRM_ROUNDS` rounds is evened out. That goes on in each round until nothing is left to do.
2. A bundle that moved rests for `REST_S`. A bundle that could not be moved rests for `REFUSED_REST_S`; one that could not be split
   is not split for as long, and may move.
3. After a move, or an order for one that was not answered, the bundle counts at its new broker with the load that it had before,
   for `SETTLE_S`: there are no rates yet. The share of the processor that counts for the bundles of both brokers is not measured
   again meanwhile: it still has the bundle at the old owner.
4. The processor of a broker that has just started counts for nothing: importing and opening are no load that moves.
5. Two halves of a bundle that was split have their loads from their topics, and may move at once.
6. While no loop is busy, what the processor counts for a bundle is the same at all brokers. A loop with little to do spends more on
   each message than one that takes several at once, and what it spends does not move along with a bundle.
7. A broker that has started again and again takes nothing until it has run for a while: each of its ends stops the clients of what
   it has. Its bundles stay with those who took them over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cepheid_broker.balancing.balance import (
    BalanceRules,
    BrokerState,
    BundleState,
    MayServe,
    Move,
    Plan,
    Split,
    balance,
    is_uneven,
)
from cepheid_broker.balancing.loads import BrokerReport

CONFIRM_ROUNDS = 3
REST_S = 300.0
REFUSED_REST_S = 60.0
SETTLE_S = 25.0
"""Longer than two windows over which brokers average their rates, with the default of 10 s."""
STARTING_S = 30.0
FLAPPING_STARTS = 3
"""A broker that has started as often within `FLAPPING_S` is not steady, until it has run for `STEADY_S`."""
FLAPPING_S = 900.0
STEADY_S = 180.0
_SAME_START_S = 4.0
"""By how much the start of a process may seem to differ from report to report: reports take some time to arrive."""
_NEW_PART = 0.5
"""Weight of the newest report in smoothed loads."""
_MOST_SCALE = 10.0
_IDLE_CPU, _BUSY_CPU = 0.3, 0.7
"""Shares of a core. Up to the one a loop counts as little used, from the other on its own processor time counts for its bundles."""


@dataclass(slots=True)
class _Moved:
    at_s: float
    target: str
    load: float


class BalanceMemory:
    def __init__(self) -> None:
        self._loads: dict[str, float] = {}  # smoothed estimates, by bundle
        self._scales: dict[str, float] = {}  # processor over estimate, by broker, at least 1
        self._involved: dict[str, float] = {}  # when a broker last gave or took a bundle
        self._moved: dict[str, _Moved] = {}
        self._rest_until: dict[str, float] = {}
        self._unsplit: dict[str, tuple[float, str]] = {}  # until when a bundle is not split, and why
        self._starts: dict[str, list[float]] = {}  # of each broker, newest last
        self._uneven_rounds = 0
        self._active = False

    def __repr__(self) -> str:
        return f"<BalanceMemory of {len(self._loads)} bundles, uneven for {self._uneven_rounds} rounds>"

    def on_report(self, now_s: float, report: BrokerReport) -> None:
        """Note when its broker started. Call it once, when the report arrives: the age in it holds for this moment."""
        starts, started_s = self._starts.setdefault(report.broker_id, []), now_s - report.age_s
        if not starts or started_s - starts[-1] > _SAME_START_S:
            starts.append(started_s)
            del starts[:-FLAPPING_STARTS]

    def states(
        self, now_s: float, reports: Sequence[BrokerReport], leaving: Collection[str] = (), *, may_split: bool = True
    ) -> list[BrokerState]:
        """Take the reports of a round, one of each broker; return the brokers as the balance should see them.

        A report may be that of an earlier round. `leaving` are brokers that take nothing.
        """
        self._forget(now_s, reports)
        on_the_way = self._on_the_way(now_s, reports)
        reporting = {report.broker_id: None for report in reports}
        gone_from_here = {  # the report is of before the move
            bundle.name: None for target, bundles in on_the_way.items() if target in reporting for bundle in bundles
        }
        states = []
        scales = self._measure(now_s, reports)
        for report in reports:
            unsteady = self._why_unsteady(report)
            takes = report.broker_id not in leaving and not unsteady
            state = self._state(now_s, report, scales[report.broker_id], takes, may_split)
            coming = tuple(on_the_way.get(report.broker_id, ()))
            held = (bundle for bundle in state.bundles if bundle.name not in gone_from_here)
            states.append(BrokerState(state.broker_id, (*held, *coming), state.own_load, state.takes, unsteady))
        return states

    def plan(
        self,
        brokers: Sequence[BrokerState],
        rules: BalanceRules,
        may_serve: MayServe,
        may_stay: MayServe = lambda _bundle, _broker: False,
    ) -> Plan:
        """Return what should be done in this round (rule 1). Call it once for each round."""
        tolerance = rules.tolerance / 2 if self._active else rules.tolerance
        self._uneven_rounds = self._uneven_rounds + 1 if is_uneven(brokers, tolerance) else 0
        confirmed = self._active or self._uneven_rounds >= CONFIRM_ROUNDS
        start_above = tolerance if confirmed else float("inf")
        plan = balance(brokers, rules, may_serve=may_serve, may_stay=may_stay, start_above=start_above)
        self._active = confirmed and self._uneven_rounds > 0 and not plan.is_empty
        if confirmed and not self._active:
            self._uneven_rounds = 0
        return plan

    def on_moved(self, now_s: float, move: Move) -> None:
        self._moved[move.bundle] = _Moved(now_s, move.target, move.load)
        self._rest_until[move.bundle] = now_s + REST_S
        self._involved[move.source] = self._involved[move.target] = now_s

    def on_refused(self, now_s: float, action: Move | Split, why: str) -> None:
        if isinstance(action, Move):
            self._rest_until[action.bundle] = now_s + REFUSED_REST_S
        else:
            self._unsplit[action.bundle] = now_s + REFUSED_REST_S, why

    def unsteady(self, reports: Sequence[BrokerReport]) -> list[str]:
        """Return the ids of those brokers that are not steady."""
        return [report.broker_id for report in reports if self._why_unsteady(report)]

    def _why_unsteady(self, report: BrokerReport) -> str:
        """Return why nothing should move to this broker (rule 7), as a sentence; empty if it is steady."""
        starts = self._starts.get(report.broker_id, [])
        if len(starts) < FLAPPING_STARTS or starts[-1] - starts[0] > FLAPPING_S or report.age_s >= STEADY_S:
            return ""
        within_s = starts[-1] - starts[0]
        what = f"{report.broker_id} has started {len(starts)} times within {within_s:.0f} s: look at its log"
        return f"{what}. No bundle moves to it until it has run for {STEADY_S:.0f} s"

    def _on_the_way(self, now_s: float, reports: Sequence[BrokerReport]) -> dict[str, list[BundleState]]:
        """Return the bundles that moved and are in no report of their new brokers yet, by these: clients have to ask first."""
        reported = {(bundle.bundle, report.broker_id): None for report in reports for bundle in report.bundles}
        found: dict[str, list[BundleState]] = {}
        for name, moved in self._moved.items():
            if (name, moved.target) not in reported and now_s - moved.at_s < SETTLE_S:
                coming = BundleState(name, moved.load, 0, may_move=False, may_split=False)
                found.setdefault(moved.target, []).append(coming)
        return found

    def _state(self, now_s: float, report: BrokerReport, scale: float, takes: bool, may_split: bool) -> BrokerState:
        bundles = []
        for bundle in report.bundles:
            load = scale * self._loads[bundle.bundle]
            moved = self._moved.get(bundle.bundle)
            if moved is not None and now_s - moved.at_s < SETTLE_S:
                load = moved.load  # rule 3
            rests = now_s < self._rest_until.get(bundle.bundle, 0.0)
            _, refused = self._unsplit.get(bundle.bundle, (0.0, ""))
            bundles.append(BundleState(bundle.bundle, load, bundle.topics, not rests, may_split, refused))
        own_load = (
            0.0 if report.age_s < STARTING_S else max(0.0, report.cpu - _MOST_SCALE * self._estimate(report))
        )  # not the work of its bundles
        return BrokerState(report.broker_id, tuple(bundles), own_load, takes)

    def _measure(self, now_s: float, reports: Sequence[BrokerReport]) -> dict[str, float]:
        """Smooth the loads of all bundles; return by what they are multiplied at each broker (rule 6)."""
        for report in reports:
            for bundle in report.bundles:
                before = self._loads.get(bundle.bundle, bundle.load)
                self._loads[bundle.bundle] = before + _NEW_PART * (bundle.load - before)
            self._measure_scale(now_s, report)
        known = {report.broker_id: self._scales.get(report.broker_id) for report in reports}
        measured = [(scale, self._estimate(report)) for report in reports if (scale := known[report.broker_id]) is not None]
        total = sum(estimate for _, estimate in measured)
        common = sum(scale * estimate for scale, estimate in measured) / total if total > 0.0 else 1.0
        busiest = max((report.cpu for report in reports if report.age_s >= STARTING_S), default=0.0)
        own_part = min(1.0, max(0.0, (busiest - _IDLE_CPU) / (_BUSY_CPU - _IDLE_CPU)))
        return {name: common if own is None else common + own_part * (own - common) for name, own in known.items()}

    def _measure_scale(self, now_s: float, report: BrokerReport) -> None:
        estimate = self._estimate(report)
        settles = now_s - self._involved.get(report.broker_id, float("-inf")) < SETTLE_S
        if not (settles or report.age_s < STARTING_S or estimate <= 0.0):
            measured = min(_MOST_SCALE, max(1.0, report.cpu / estimate))
            before = self._scales.get(report.broker_id, measured)
            self._scales[report.broker_id] = before + _NEW_PART * (measured - before)

    def _estimate(self, report: BrokerReport) -> float:
        """The sum over its bundles, smoothed."""
        return sum(self._loads[bundle.bundle] for bundle in report.bundles)

    def _forget(self, now_s: float, reports: Sequence[BrokerReport]) -> None:
        """Keep what concerns the reports of this round only, and what is not over."""
        there = {bundle.bundle: None for report in reports for bundle in report.bundles}
        brokers = {report.broker_id: None for report in reports}
        self._loads = {name: load for name, load in self._loads.items() if name in there}
        self._scales = {name: scale for name, scale in self._scales.items() if name in brokers}
        self._involved = {name: at_s for name, at_s in self._involved.items() if now_s - at_s < SETTLE_S}
        self._moved = {name: moved for name, moved in self._moved.items() if now_s - moved.at_s < SETTLE_S}
        self._rest_until = {name: until_s for name, until_s in self._rest_until.items() if now_s < until_s}
        self._unsplit = {name: found for name, found in self._unsplit.items() if now_s < found[0]}
        self._starts = {name: starts for name, starts in self._starts.items() if now_s - starts[-1] < FLAPPING_S or name in brokers}
