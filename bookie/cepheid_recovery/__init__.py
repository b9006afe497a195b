"""Automatic repair: the auditor finds ledgers that lack copies, replication workers copy them."""

from cepheid_recovery.audit_follower import AuditFollower
from cepheid_recovery.auditor import Auditor, mark_ledger
from cepheid_recovery.auto_recovery import AutoRecovery
from cepheid_recovery.cluster_state import ClusterState, RepairBookies
from cepheid_recovery.recovery_metrics import audit_families
from cepheid_recovery.replication_worker import ReplicationWorker
from cepheid_recovery.settings import RecoverySettings
from cepheid_recovery.shortage import BookiesSeen, Shortage, find_shortage

__all__ = [
    "AuditFollower",
    "Auditor",
    "AutoRecovery",
    "BookiesSeen",
    "ClusterState",
    "RecoverySettings",
    "RepairBookies",
    "ReplicationWorker",
    "Shortage",
    "audit_families",
    "find_shortage",
    "mark_ledger",
]
