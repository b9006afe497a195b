"""Where mutants are registered: known mistakes that are put into the product's code from outside.

A mutant is a context in which some method of the product behaves as a plausible mistake would make it. Its name is that of its
function, with blanks. The modules beside this one hold them by subject; `catalogue.py` loads them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set

Mutant = Callable[[], contextlib.AbstractContextManager[None]]

MUTANTS: dict[str, Mutant] = {}
"""Random worlds must catch each of these."""
RULES: dict[str, Set[str]] = {}
"""By which rules they may. By another one it would be luck, or a mistake in a check."""
SCENARIO_MUTANTS: dict[str, Mutant] = {}
"""Random worlds miss these, or take hundreds of seeds (their docstrings say why). The heads of scenarios name them."""


def mutant(*rules: str) -> Callable[[Mutant], Mutant]:
    """Registers a mutant that random worlds catch by one of these rules: numbers of invariants, or the class of an exception that
    the mistake makes the product itself raise."""

    def register(patch: Mutant) -> Mutant:
        name = _add(MUTANTS, patch)
        RULES[name] = frozenset(rules)
        return patch

    return register


def scenario_mutant(patch: Mutant) -> Mutant:
    """Registers a mutant that only a scenario catches."""
    _add(SCENARIO_MUTANTS, patch)
    return patch


def _add(mutants: dict[str, Mutant], patch: Mutant) -> str:
    name = patch.__name__.replace("_", " ")
    assert name not in MUTANTS | SCENARIO_MUTANTS, f"two mutants are called {name!r}"
    mutants[name] = patch
    return name
