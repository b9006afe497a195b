"""All mutants, loaded: whoever looks for one by its name asks here."""

from __future__ import annotations

from tests.simulation.mutants import (  # noqa: F401  they register their mutants
    balance,
    bookies,
    bounds,
    cluster,
    compaction,
    cursors,
    dispatch,
    offload,
    permissions,
    recovery,
    repair,
    sequence_ids,
    topics,
    upkeep,
)
from tests.simulation.mutants.registry import MUTANTS, RULES, SCENARIO_MUTANTS

__all__ = ["MUTANTS", "RULES", "SCENARIO_MUTANTS"]
