"""Which bundles should move, and which should be split first: a function of the current loads, without I/O.

    every broker within `tolerance` of the mean ──► nothing
    else, repeatedly: hottest broker ── its bundle that fits the gap best ──► coldest broker
                                └── none fits: its hottest bundle is split, and the halves may fit in the next round

Rules
1. A move makes the pair of brokers more even: the load that moves is at most three quarters of their difference.
2. Loads out of tolerance are brought to half of the tolerance, so that small changes of the load do not start it again.
3. Loads that differ by less than `MIN_GAP` are equal, whatever their ratio: an idle cluster stays as it is.
4. A broker that takes no bundles (draining, unsteady, or not allowed by policies) is never a target. It still gives away excess
   load, and is left out of the mean only if its load is below that of the others.
5. A bundle with one topic cannot be split, nor for some time one whose split was refused: the plan notes it. It may still move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

MIN_GAP = 0.02
MIN_LOAD = 0.001
"""Least load of a bundle that is worth a move."""
SPLIT_LOAD = 0.5
"""Load above which a bundle is split, whichever broker owns it."""
_MOST_OF_GAP = 0.75
_SPLITS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class BundleState:
    """The load of a bundle, and what may be done with it."""

    name: str
    load: float
    topics: int
    may_move: bool = True
    """False for some time after a move."""
    may_split: bool = True
    split_refused: str = ""
    """Why a recent split of it was refused, or ""."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The load of a broker and its bundles. `own_load` is its load besides that of the bundles."""

    broker_id: str
    bundles: tuple[BundleState, ...]
    own_load: float = 0.0
    takes: bool = True
    note: str = ""
    """A sentence for operators if something is wrong with the broker, else ""."""

    @property
    def load(self) -> float:
        return self.own_load + sum(bundle.load for bundle in self.bundles)


@dataclass(frozen=True, slots=True)
class BalanceRules:
    """Limits of balancing that operators may set."""

    tolerance: float = 0.2
    moves_at_once: int = 8
    split_topics: int = 1000
    """Number of open topics above which a bundle is split; 0: never."""


@dataclass(frozen=True, slots=True)
class Move:
    """A bundle that should be served by another broker."""

    bundle: str
    source: str
    target: str
    why: str
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Split:
    """A bundle that should be cut in two, by the load of its topics or by their number."""

    bundle: str
    broker: str
    by: Literal["load", "topics"]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves and splits that should be made now."""

    moves: tuple[Move, ...] = ()
    splits: tuple[Split, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for operators about what should be done and cannot."""

    @property
    def is_empty(self) -> bool:
        return not self.moves and not self.splits


MayServe = Callable[[str, str], bool]
"""Return whether policies allow a broker (by id) to serve a bundle (by name)."""


def compared(brokers: Sequence[BrokerState]) -> list[BrokerState]:
    """Return the brokers whose loads should be equal: those that take bundles, and those that can only give some away (rule 4)."""
    takers = [broker for broker in brokers if broker.takes]
    mean = mean_load(takers)
    return [broker for broker in brokers if broker.takes or (takers and broker.load > mean)]


def mean_load(brokers: Sequence[BrokerState]) -> float:
    """Return the mean load of these brokers, or 0 for an empty list."""
    return sum(broker.load for broker in brokers) / max(1, len(brokers))


def is_uneven(brokers: Sequence[BrokerState], tolerance: float) -> bool:
    """Return whether a broker is further from the mean than `tolerance`, a share of it (rule 3 excepted)."""
    sources = compared(brokers)
    targets = [broker.load for broker in brokers if broker.takes]
    if len(sources) < 2 or not targets:
        return False
    highest, lowest, mean = max(broker.load for broker in sources), min(targets), mean_load(sources)
    return highest - lowest > MIN_GAP and (highest > mean * (1 + tolerance) or lowest < mean * (1 - tolerance))


def balance(
    brokers: Sequence[BrokerState],
    rules: BalanceRules,
    *,
    may_serve: MayServe = lambda _bundle, _broker: True,
    may_stay: MayServe = lambda _bundle, _broker: False,
    start_above: float | None = None,
) -> Plan:
    """Return the moves and splits to make now.

    A bundle that moved recently may stay at a broker that may not serve it if `may_stay` allows that: policies depend on loads, and
    loads on where bundles are.
    Loads are evened out if a broker is further from the mean than the share `start_above`; None: than `rules.tolerance`.
    """
    draft = _Draft(brokers, rules, may_serve)
    draft.split_large()
    draft.move_misplaced(may_stay)
    if is_uneven(brokers, rules.tolerance if start_above is None else start_above):
        draft.even_out()
    return Plan(tuple(draft.moves), tuple(draft.splits), tuple(draft.notes))


@dataclass(slots=True)
class _Place:
    """A broker with the moves of the plan so far applied."""

    broker_id: str
    load: float
    takes: bool
    bundles: dict[str, BundleState] = field(default_factory=dict)


class _Draft:
    def __init__(self, brokers: Sequence[BrokerState], rules: BalanceRules, may_serve: MayServe) -> None:
        self._rules = rules
        self._may_serve = may_serve
        self._places = [
            _Place(broker.broker_id, broker.load, broker.takes, {bundle.name: bundle for bundle in broker.bundles})
            for broker in sorted(brokers, key=lambda broker: broker.broker_id)
        ]
        self._targets = [place for place in self._places if place.takes]
        self._mean = mean_load(compared(brokers))
        self.moves: list[Move] = []
        self.splits: list[Split] = []
        self.notes: list[str] = [broker.note for broker in brokers if broker.note]

    def split_large(self) -> None:
        """Split bundles that are too large for one broker, whatever load the others have."""
        limit = self._rules.split_topics
        for place in self._places:
            for bundle in list(place.bundles.values()):
                is_crowded = 0 < limit < bundle.topics
                if bundle.split_refused and (is_crowded or bundle.load > SPLIT_LOAD):
                    self._note_refused(place, bundle)
                if len(self.splits) >= _SPLITS_AT_ONCE or not _is_splittable(bundle):
                    continue
                if is_crowded:
                    self._split(place, bundle, "topics", f"it has {bundle.topics:,} open topics, more than {limit:,}")
                elif bundle.load > SPLIT_LOAD:
                    self._split(place, bundle, "load", f"its load is {bundle.load:.2f}, more than {SPLIT_LOAD}")

    def move_misplaced(self, may_stay: MayServe) -> None:
        """Move bundles away from brokers that a policy does not allow."""
        for place in self._places:
            for bundle in list(place.bundles.values()):
                if len(self.moves) >= self._rules.moves_at_once:
                    return
                if self._may_serve(bundle.name, place.broker_id):
                    continue
                if not bundle.may_move and may_stay(bundle.name, place.broker_id):
                    continue
                allowed = [target for target in self._targets if self._may_serve(bundle.name, target.broker_id)]
                if allowed:
                    target = min(allowed, key=lambda target: (target.load, target.broker_id))
                    self._move(place, target, bundle, f"an isolation policy does not allow {place.broker_id}")

    def even_out(self) -> None:
        enough = max(MIN_GAP, self._mean * self._rules.tolerance / 2)  # rule 2
        while len(self.moves) < self._rules.moves_at_once:
            found = self._best_move(enough)
            if found is None:
                break
            source, target, bundle = found
            numbers = f"loads: {source.broker_id} {source.load:.2f}, {target.broker_id} {target.load:.2f}, mean {self._mean:.2f}"
            self._move(source, target, bundle, f"{numbers}, bundle {bundle.load:.3f}")
        self._split_hottest(enough)

    def _best_move(self, enough: float) -> tuple[_Place, _Place, BundleState] | None:
        """Return a move between the most uneven pair of brokers that has one that fits, or None."""
        for source in sorted(self._places, key=lambda place: (-place.load, place.broker_id)):
            for target in sorted(self._targets, key=lambda place: (place.load, place.broker_id)):
                gap = source.load - target.load
                if gap <= enough:
                    break
                fitting = [
                    bundle
                    for bundle in source.bundles.values()
                    if bundle.may_move
                    and MIN_LOAD <= bundle.load <= gap * _MOST_OF_GAP  # rule 1
                    and self._may_serve(bundle.name, target.broker_id)
                ]
                if fitting:
                    return source, target, min(fitting, key=lambda bundle: (abs(bundle.load - gap / 2), bundle.name))
        return None

    def _split_hottest(self, enough: float) -> None:
        """Split a bundle of the hottest broker if the broker is still too hot because none of its bundles fits."""
        if self.moves or not self._targets:
            return  # moves first: the next round finds what is left
        source = max(self._places, key=lambda place: (place.load, place.broker_id))
        target = min(self._targets, key=lambda place: (place.load, place.broker_id))
        movable = [bundle for bundle in source.bundles.values() if bundle.may_move and bundle.load > MIN_LOAD]
        if source.load - target.load <= enough or not movable:
            return
        hottest = sorted(movable, key=lambda bundle: (-bundle.load, bundle.name))
        if (bundle := next(filter(_is_splittable, hottest), None)) is not None and bundle.load > 2 * MIN_LOAD:
            numbers = f"loads: {source.broker_id} {source.load:.2f}, {target.broker_id} {target.load:.2f}"
            if bundle.name not in {split.bundle for split in self.splits} and len(self.splits) < _SPLITS_AT_ONCE:
                self._split(source, bundle, "load", f"{numbers}, bundle {bundle.load:.3f} is too much for a move")
        elif hottest[0].split_refused:
            self._note_refused(source, hottest[0])
        elif hottest[0].topics == 1:
            self.notes.append(
                f"broker {source.broker_id} has load {source.load:.2f}, the mean is {self._mean:.2f}: {hottest[0].load:.2f} of it "
                f"is one topic in bundle {hottest[0].name}, which cannot be split: make it a partitioned topic"
            )

    def _note_refused(self, place: _Place, bundle: BundleState) -> None:
        note = f"bundle {bundle.name} has too much load or too many topics for {place.broker_id} and cannot be split: "
        if (note := f"{note}{bundle.split_refused}") not in self.notes:
            self.notes.append(note)

    def _split(self, place: _Place, bundle: BundleState, by: Literal["load", "topics"], why: str) -> None:
        self.splits.append(Split(bundle.name, place.broker_id, by, why))
        del place.bundles[bundle.name]  # it does not move in the same round

    def _move(self, source: _Place, target: _Place, bundle: BundleState, why: str) -> None:
        self.moves.append(Move(bundle.name, source.broker_id, target.broker_id, why, bundle.load))
        del source.bundles[bundle.name]
        source.load -= bundle.load
        target.load += bundle.load  # not listed at the target, so that a bundle moves once in a plan


def _is_splittable(bundle: BundleState) -> bool:
    return bundle.may_split and not bundle.split_refused and bundle.topics >= 2
