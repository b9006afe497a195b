"""Opens the planner that a source asks for: the plan service of a broker, or ZooKeeper itself in a cluster."""

from __future__ import annotations

from cepheid_decode.errors import BadOptionError
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
