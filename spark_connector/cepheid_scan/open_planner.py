"""Open the planner that a source asks for: the plan service of a broker, or ZooKeeper itself; and look up one ledger anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeAlias

from cepheid_decode.errors import BadOptionError, NoSuchTopicError
from cepheid_decode.history import LedgerHistory, Piece
from cepheid_decode.scan_request import PlanSource
from cepheid_scan.plan_service import PlanServicePlanner
from cepheid_scan.planner import Planner


def open_planner(source: PlanSource) -> Planner:
    """Return a planner for `source`; the caller closes it. Raises BadOptionError, PlanUnavailableError."""
    if source.metadata is not None:
        try:
            from cepheid_scan.zookeeper_planner import ZooKeeperPlanner
        except ImportError as error:  # what a reader through brokers does without
            missing = (
                f"planning from ZooKeeper itself needs {error.name}: pip install 'cepheid[spark]', or give service.url instead"
            )
            raise BadOptionError(missing, value="metadata") from None

        return ZooKeeperPlanner(source)
    return PlanServicePlanner(source)


Replan: TypeAlias = Callable[[Piece], LedgerHistory | None]


def find_ledger(source: PlanSource, topic: str, ledger_id: int) -> LedgerHistory | None:
    """None: the topic has it no more (trimmed), or is gone itself."""
    return find_ledger_and_bookies(source, topic, ledger_id)[0]


def find_ledger_and_bookies(source: PlanSource, topic: str, ledger_id: int) -> tuple[LedgerHistory | None, Mapping[str, str]]:
    """With the addresses of all bookies that are up: it may lie on others than when it was planned."""
    with closing(open_planner(source)) as planner:
        try:
            plan = planner.plan([topic])
        except NoSuchTopicError:
            return None, {}
    found = (ledger for ledger in plan.topics[0].ledgers if ledger.ledger_id == ledger_id)
    return next(found, None), plan.bookies
