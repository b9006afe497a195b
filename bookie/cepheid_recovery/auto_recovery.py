"""Automatic repair in one process: it may be elected as the auditor, repairs marked ledgers, and checks recovered ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from cepheid_ledger import LedgerClient, Placement
from cepheid_metadata import MetadataStore
from cepheid_ports import Ports
from cepheid_ports.prometheus import Family
from cepheid_recovery.auditor import Auditor
from cepheid_recovery.cluster_state import ClusterState, RepairBookies
from cepheid_recovery.copy_checker import CopyChecker
from cepheid_recovery.recovery_metrics import audit_families, recovery_families
from cepheid_recovery.replication_worker import ReplicationWorker
from cepheid_recovery.settings import RecoverySettings


class AutoRecovery:
    """Automatic repair. `start` once, `aclose` once. The ledger client, its placement and the store belong to the caller."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        placement: Placement,
        bookies: RepairBookies,
        settings: RecoverySettings,
        ports: Ports,
        *,
        on_draining: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        """`on_draining` is called at each poll with the bookies that are being decommissioned."""
        self._settings = settings
        self._state = state = ClusterState(store, bookies, on_draining)
        self.worker = ReplicationWorker(name, store, client, placement, state, settings, ports)
        self.auditor = Auditor(name, store, client, state, settings, ports, on_marked=self.worker.wake)
        self.checker = CopyChecker(name, store, client, state, settings, ports, on_marked=self.worker.wake)
        self._opened = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<AutoRecovery {self.auditor!r}, {self.worker!r}>"

    def start(self) -> None:
        """Start repair, unless `recovery.enabled` is off."""
        if not self._settings.enabled:
            return
        self._opened.push_async_callback(self.auditor.aclose)
        self._opened.push_async_callback(self.worker.aclose)
        self._opened.push_async_callback(self.checker.aclose)
        self.auditor.start()
        self.worker.start()
        self.checker.start()

    def on_bookies_changed(self) -> None:
        """Check at once, and try again what was not possible, after bookies came or went."""
        self.auditor.retry_all()
        self.worker.retry_all()
        self.checker.retry_all()

    async def aclose(self) -> None:
        await self._opened.aclose()

    def families(self) -> Iterator[Family]:
        """Return the metrics of this process."""
        yield from recovery_families(self.auditor, self.worker, self.checker)

    def cluster_families(self) -> Iterator[Family]:
        """Return the figures of the cluster, if this process is the auditor."""
        if self.auditor.statistics.is_auditor and self.auditor.audit is not None:
            yield from audit_families(self.auditor.audit)
