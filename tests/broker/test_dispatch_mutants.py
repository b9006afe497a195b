"""The random histories of the dispatch cores find the mistakes of `dispatch_mutants.py`: else they would prove nothing."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.broker import dispatch_mutants
from tests.broker.dispatch_mutants import Mutant
from tests.broker.test_dispatch_failover import ExclusiveHistories, OrderedHistories
from tests.broker.test_dispatch_key_shared import KeySharedHistories
from tests.broker.test_dispatch_shared import SharedHistories

pytestmark = pytest.mark.slow

CASES: list[tuple[type[RuleBasedStateMachine], Mutant]] = [
    *((ExclusiveHistories, mutant) for mutant in dispatch_mutants.EXCLUSIVE),
    *((OrderedHistories, mutant) for mutant in dispatch_mutants.FAILOVER),
    *((SharedHistories, mutant) for mutant in dispatch_mutants.SHARED),
    *((KeySharedHistories, mutant) for mutant in dispatch_mutants.KEY_SHARED),
]


@pytest.mark.parametrize(("histories", "mutant"), CASES, ids=[f"{h.__name__}-{m.__name__}" for h, m in CASES])
def test_a_mistake_is_noticed(histories: type[RuleBasedStateMachine], mutant: Mutant) -> None:
    search = settings(
        max_examples=5000, stateful_step_count=50, deadline=None, database=None, phases=[Phase.generate], derandomize=True
    )
    with mutant(), pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(histories, settings=search)
