"""Opens the planner of a source: a broker's plan service, or ZooKeeper itself; and looks up single ledgers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from cepheid_decode.errors import BadOptionError, NoSuchTopicError
from cepheid_decode.history import LedgerHistory
from cepheid_decode.scan_request import PlanSource
from cepheid_scan.plan_service import PlanServicePlanner
from cepheid_scan.planner import Planner


def open_planner(source: PlanSource) -> Planner:
    """Return a planner for `source`; the caller closes it. Raises BadOptionError, PlanUnavailableError."""
    if source.metadata is not None:
        try:
            from cepheid_scan.zookeeper_planner import ZooKeeperPlanner
        except ImportError as error:  # not needed by readers through brokers
            missing = (
                f"planning from ZooKeeper itself needs {error.name}: pip install 'cepheid[spark]', or give service.url instead"
            )
            raise BadOptionError(missing, value="metadata") from None

        return ZooKeeperPlanner(source)
    return PlanServicePlanner(source)


def find_ledger(source: PlanSource, topic: str, ledger_id: int) -> tuple[LedgerHistory | None, Mapping[str, str]]:
    """Return the ledger, None if the topic no longer has it, and the addresses of all running bookies: it may have moved."""
    with closing(open_planner(source)) as planner:
        try:
            plan = planner.plan([topic])
        except NoSuchTopicError:
            return None, {}
    found = (ledger for ledger in plan.topics[0].ledgers if ledger.ledger_id == ledger_id)
    return next(found, None), plan.bookies
