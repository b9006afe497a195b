"""Load balancing: load reports, the leader, and its moves and splits. README.md has the rules."""

from cepheid_broker.balancing.balance import BalanceRules, BrokerState, BundleState, Move, Plan, Split, balance, compared, mean_load
from cepheid_broker.balancing.load_balancer import PREFIX, REPORT_LIMIT_S, BalanceView, LoadBalancer, Outcome, changed
from cepheid_broker.balancing.loads import BrokerReport, BundleLoad, local_broker_data, report_from
from cepheid_broker.balancing.orders import BundleOrders, MoveOrder, OrderRefusedError, SplitOrder
from cepheid_broker.balancing.own_load import OwnLoad
from cepheid_broker.balancing.peers import BalancePeers, HttpPeers
from cepheid_broker.balancing.split_points import by_load, by_topics, middle

__all__ = [
    "PREFIX",
    "REPORT_LIMIT_S",
    "BalancePeers",
    "BalanceRules",
    "BalanceView",
    "BrokerReport",
    "BrokerState",
    "BundleLoad",
    "BundleOrders",
    "BundleState",
    "HttpPeers",
    "LoadBalancer",
    "Move",
    "MoveOrder",
    "OrderRefusedError",
    "Outcome",
    "OwnLoad",
    "Plan",
    "Split",
    "SplitOrder",
    "balance",
    "by_load",
    "by_topics",
    "changed",
    "compared",
    "local_broker_data",
    "mean_load",
    "middle",
    "report_from",
]
