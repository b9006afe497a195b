"""Plan of a replication worker for a marked ledger, decided from the mark, the record and the bookies. No I/O.

mark × record × registered bookies ──► per finished fragment: copies that move, copies that are checked in place
                                   └─► what cannot be done now, with the reason
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cepheid_ledger import entries_of, is_finished, repeated_racks
from cepheid_metadata import Fragment, LedgerMetadata, RepairMark, ShortReason
from cepheid_recovery.shortage import needed_fragments

ChooseTarget = Callable[[Sequence[str], Collection[str], int], str | None]
"""Chooses, given (ensemble with earlier choices, excluded bookies, position), a bookie outside of both; None: there is none."""


@dataclass(slots=True)
class FragmentRepair:
    """The repair of one finished fragment. `moves`: the new bookie by position; `checks`: positions whose bookie stays and
    gets the copies that it lacks.
    """

    fragment: Fragment
    first_entry_id: int
    last_entry_id: int
    moves: dict[int, str] = field(default_factory=dict)
    checks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RepairPlan:
    """The plan for a ledger. `open_bookies`: bookies of the open fragment that its writer must replace, or recovery if it has none.

    `left`: bookies that stay in the mark, each with the reason why nothing can be done about it now.
    """

    fragments: list[FragmentRepair] = field(default_factory=list)
    open_bookies: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def plan_repair(
    ledger: LedgerMetadata,
    mark: RepairMark,
    registered: Collection[str],
    draining: Collection[str],
    choose_target: ChooseTarget,
    racks: Mapping[str, str] | None = None,
    *,
    lost: Collection[str] = (),
) -> RepairPlan:
    """Return the plan. A bookie that returned with its data needs nothing, and neither does a fragment without entries.

    `lost`: damaged bookies whose grace period is over. `racks` of bookies, as far as known: a badly placed copy moves
    only if that separates copies.
    """
    plan = RepairPlan()
    moving, checking = _sort(mark.bookies, registered, draining, lost, plan.left)
    for fragment in needed_fragments(ledger):
        if not is_finished(ledger, fragment):
            for bookie in fragment.ensemble:
                if mark.bookies.get(bookie) is ShortReason.DAMAGED and bookie in checking:
                    plan.left[bookie] = "the ledger is open: its copies are checked when it is closed"
                elif bookie in checking or (bookie in moving and mark.bookies[bookie] is not ShortReason.PLACEMENT):
                    plan.open_bookies.append(bookie)
            continue
        part = FragmentRepair(fragment, *entries_of(ledger, fragment))
        for position, bookie in enumerate(fragment.ensemble):
            if bookie in checking:
                part.checks.append(position)
            elif bookie in moving:
                ensemble = [part.moves.get(place, one) for place, one in enumerate(fragment.ensemble)]
                target = choose_target(ensemble, {*mark.bookies, *draining}, position)
                if mark.bookies[bookie] is ShortReason.PLACEMENT:
                    if target is not None and _separates(ensemble, position, target, ledger.write_quorum, racks or {}):
                        part.moves[position] = target
                elif target is not None:
                    part.moves[position] = target
                else:
                    plan.left[bookie] = (
                        "no other bookie can take its copies: start more bookies (with ledger.strict_racks in racks without a "
                        "copy of the same entries), or free space on their disks"
                    )
        if part.moves or part.checks:
            plan.fragments.append(part)
    return plan


def _separates(ensemble: Sequence[str], position: int, target: str, write_quorum: int, racks: Mapping[str, str]) -> bool:
    """Return whether fewer copies of an entry share a rack with `target` at that position.

    An unknown rack counts as a separate one.
    """

    def repeated(bookies: Sequence[str]) -> int:
        return repeated_racks([racks.get(bookie, f"unknown/{bookie}") for bookie in bookies], write_quorum)

    return repeated([*ensemble[:position], target, *ensemble[position + 1 :]]) < repeated(ensemble)


def _sort(
    reasons: Mapping[str, ShortReason],
    registered: Collection[str],
    draining: Collection[str],
    lost: Collection[str],
    left: dict[str, str],
) -> tuple[set[str], set[str]]:
    """Return the bookies whose copies move, and those whose copies are checked in place."""
    moving: set[str] = set()
    checking: set[str] = set()
    for bookie, reason in reasons.items():
        runs = bookie in registered
        match reason:
            case ShortReason.PLACEMENT:
                moving.add(bookie)
            case ShortReason.DRAINING | ShortReason.LOST:
                if bookie in draining or (reason is ShortReason.LOST and not runs):
                    moving.add(bookie)
                elif not runs:
                    left[bookie] = "it is no longer decommissioned, and is not running: start it, or wait for the grace period"
            case ShortReason.EMPTY_DISK | ShortReason.DAMAGED:
                if reason is ShortReason.DAMAGED and (bookie in draining or (bookie in lost and not runs)):
                    moving.add(bookie)
                elif runs:
                    checking.add(bookie)
                else:
                    left[bookie] = "it is not running: start it, or wait until its ledgers are copied elsewhere"
    return moving, checking
