"""What the leader remembers between rounds, so that noise moves no bundle and none moves back and forth. Without I/O.

    reports of a round ──► smoothed loads; of bundles just moved: as before the move ──► uneven in 3 rounds? ──► balance ──► Plan

Rules
1. Loads are evened out only after they were uneven for `CONFIRM_ROUNDS` rounds, and then in each round until nothing is left to do.
2. A bundle that moved rests for `REST_S`. A bundle whose move was refused rests for `REFUSED_REST_S`; one whose split was refused
   is not split for that time, but may move.
3. For `SETTLE_S` after a move, or an unanswered order for one, the bundle counts at its new broker with its earlier load: there are
   no rates yet. The processor scale of both brokers is not measured meanwhile: processor time still includes the bundle at its
   old owner.
4. The processor time of a broker that has just started is ignored: importing and opening are not a load that can be moved.
5. The two parts of a split bundle get their loads from their topics, and may move at once.
6. While no event loop is busy, all brokers have the same processor scale. A loop with little to do spends more time on each message
   than one that takes several at once, and this time does not move with a bundle.
7. A broker that keeps restarting takes no bundles until it has run for some time: each of its ends interrupts the clients of its
   topics. Its bundles stay with the brokers that took them over.
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
"""Starts within `FLAPPING_S` that make a broker unsteady until it has run for `STEADY_S`."""
FLAPPING_S = 900.0
STEADY_S = 180.0
_SAME_START_S = 4.0
"""How much the start time of one process may differ between reports, because they take some time to arrive."""
_NEW_PART = 0.5
"""Weight of the newest report in smoothed loads."""
_MOST_SCALE = 10.0
_IDLE_CPU, _BUSY_CPU = 0.3, 0.7
"""Shares of a core. Up to the first, a loop counts as idle; from the second on, its own processor scale applies to its bundles."""


@dataclass(slots=True)
class _Moved:
    at_s: float
    target: str
    load: float


class BalanceMemory:
    """Smoothed loads, recent moves and refusals, and starts of brokers, as the leader knows them."""

    def __init__(self) -> None:
        self._loads: dict[str, float] = {}  # smoothed estimates, by bundle
        self._scales: dict[str, float] = {}  # processor share divided by estimate, by broker, at least 1
        self._involved: dict[str, float] = {}  # when a broker last gave or took a bundle
        self._moved: dict[str, _Moved] = {}
        self._rest_until: dict[str, float] = {}
        self._unsplit: dict[str, tuple[float, str]] = {}  # until when a bundle is not split, and why
        self._starts: dict[str, list[float]] = {}  # start times by broker, newest last
        self._uneven_rounds = 0
        self._active = False

    def __repr__(self) -> str:
        return f"<BalanceMemory of {len(self._loads)} bundles, uneven for {self._uneven_rounds} rounds>"

    def on_report(self, now_s: float, report: BrokerReport) -> None:
        """Note when the broker started. Call once, when the report arrives, since its age is right at that moment."""
        starts, started_s = self._starts.setdefault(report.broker_id, []), now_s - report.age_s
        if not starts or started_s - starts[-1] > _SAME_START_S:
            starts.append(started_s)
            del starts[:-FLAPPING_STARTS]

    def states(
        self, now_s: float, reports: Sequence[BrokerReport], leaving: Collection[str] = (), *, may_split: bool = True
    ) -> list[BrokerState]:
        """Add the reports of a round, one of each broker, and return the brokers' states for `balance`.

        A report may be from an earlier round. `leaving` are the ids of brokers that take no bundles.
        """
        self._forget(now_s, reports)
        on_the_way = self._on_the_way(now_s, reports)
        reporting = {report.broker_id: None for report in reports}
        gone_from_here = {  # the source's report is older than the move
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
        """Return the plan of this round (rule 1). Call once a round."""
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
        """Return the ids of the unsteady brokers (rule 7)."""
        return [report.broker_id for report in reports if self._why_unsteady(report)]

    def _why_unsteady(self, report: BrokerReport) -> str:
        """Return a sentence on why no bundle should move to this broker (rule 7), or "" if it is steady."""
        starts = self._starts.get(report.broker_id, [])
        if len(starts) < FLAPPING_STARTS or starts[-1] - starts[0] > FLAPPING_S or report.age_s >= STEADY_S:
            return ""
        within_s = starts[-1] - starts[0]
        what = f"{report.broker_id} has started {len(starts)} times within {within_s:.0f} s: look at its log"
        return f"{what}. No bundle moves to it until it has run for {STEADY_S:.0f} s"

    def _on_the_way(self, now_s: float, reports: Sequence[BrokerReport]) -> dict[str, list[BundleState]]:
        """Return the moved bundles by new broker that its reports do not have yet: it acquires them when a client asks."""
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
        )  # processor time that its bundles do not explain
        return BrokerState(report.broker_id, tuple(bundles), own_load, takes)

    def _measure(self, now_s: float, reports: Sequence[BrokerReport]) -> dict[str, float]:
        """Smooth the loads of all bundles, and return each broker's factor for them (rule 6)."""
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
        """Return the sum of the smoothed loads of the broker's bundles."""
        return sum(self._loads[bundle.bundle] for bundle in report.bundles)

    def _forget(self, now_s: float, reports: Sequence[BrokerReport]) -> None:
        """Drop loads of bundles and brokers without a report in this round, and rests and moves that are over."""
        there = {bundle.bundle: None for report in reports for bundle in report.bundles}
        brokers = {report.broker_id: None for report in reports}
        self._loads = {name: load for name, load in self._loads.items() if name in there}
        self._scales = {name: scale for name, scale in self._scales.items() if name in brokers}
        self._involved = {name: at_s for name, at_s in self._involved.items() if now_s - at_s < SETTLE_S}
        self._moved = {name: moved for name, moved in self._moved.items() if now_s - moved.at_s < SETTLE_S}
        self._rest_until = {name: until_s for name, until_s in self._rest_until.items() if now_s < until_s}
        self._unsplit = {name: found for name, found in self._unsplit.items() if now_s < found[0]}
        self._starts = {name: starts for name, starts in self._starts.items() if now_s - starts[-1] < FLAPPING_S or name in brokers}
