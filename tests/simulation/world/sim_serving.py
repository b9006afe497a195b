"""The serving half of a simulated broker's process: the real `Broker` with its listener, put together as `BrokerRole` does it.

    ledger ids checked ──► protocol port open ──► registered: bundles are given to it          run, in the process
    bundles given back ──► ports closed ──► managed ledgers ──► ledger client ──► metadata     stop, in good order

There is no HTTP: what an operator does by it is in `sim_operator.py`, and how brokers hand bundles over in `sim_peers.py`; other
calls between brokers, of partitioned topics, are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cepheid_broker.broker import Broker
from cepheid_broker.first_objects import create_first_objects
from cepheid_broker.ownership import PeerCalls
from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import SoleOwnership
from cepheid_broker.ownership.peer_link import PeerLinks
from cepheid_broker.settings import BrokerSettings, ConnectionSettings, DispatchSettings, PolicySettings
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgers
from cepheid_metadata import LedgerIds, MemoryStore, MetadataError, MetadataStore, namespace_records
from cepheid_ports import Ports
from cepheid_security.authenticator import Authenticator
from tests.simulation.world.sim_store import SimTree

KIB = 1 << 10
PORT = 6650
CLUSTER = "simulated"
NAMESPACE = ("public", "default")
_RETRY_S = 0.3

CONNECTION_SETTINGS = ConnectionSettings(
    handshake_timeout_s=2.0,
    keepalive_s=2.0,
    liveness_probe_s=0.5,
    publish_window_bytes=8 * KIB,
    write_high_bytes=4 * KIB,
)
DISPATCH_SETTINGS = DispatchSettings(
    read_bytes=1 * KIB,
    read_ahead_bytes=2 * KIB,
    read_ahead_total_bytes=16 * KIB,
    read_retry_s=0.1,
    pass_bytes=2 * KIB,
    max_unacked_messages=40,
)
# A chunked message that is cut off for longer than a snapshot takes, or ten times its entries, is no more told from a new one.
POLICY_SETTINGS = PolicySettings(dedup_snapshot_entries=30, dedup_snapshot_s=60, max_unacked_per_subscription=60)


def broker_settings(name: str) -> BrokerSettings:
    """Small and impatient, so that a few hundred messages meet every bound."""
    return BrokerSettings(
        host=name,
        port=PORT,
        max_message_bytes=64 * KIB,
        publish_buffer_bytes=64 * KIB,
        request_timeout_s=8.0,
        topic_retry_s=0.1,
        close_timeout_s=3.0,
        reader_seek_grace_s=3.0,
        inactive_check_s=3.0,
        closed_topic_check_s=4.0,
        backlog_check_s=0.5,
        rate_window_s=1.0,
        connection=CONNECTION_SETTINGS,
        dispatch=DISPATCH_SETTINGS,
        policies=POLICY_SETTINGS,
    )


async def found_cluster(tree: SimTree, *, bundles: int = 4) -> None:
    """What must be there before clients come: tenants, and `public/default` in so many bundles."""
    store = MemoryStore(tree)
    await create_first_objects(store, CLUSTER)
    records = namespace_records(store)
    found = await records.get(NAMESPACE)
    assert found is not None
    await records.replace(NAMESPACE, found.record.replace(bundles=bundles), found.version)


class SimServing:
    """Of one process; made and run in it."""

    def __init__(
        self,
        name: str,
        settings: BrokerSettings,
        store: MetadataStore,
        ids: LedgerIds,
        managed_ledgers: ManagedLedgers,
        ledger_config: ManagedLedgerConfig,
        ports: Ports,
        *,
        orderly: bool,
        authenticator: Authenticator | None = None,
        peers: PeerCalls | None = None,
        note: Callable[[str], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`orderly`: brokers ask whose a topic is; else each believes that all are its own, and fencing alone decides."""
        self.ready = False
        self._name = name
        self._ids = ids
        self._note = note
        ownership: BundleOwnership | SoleOwnership = SoleOwnership()
        if orderly:
            liveness = BrokerLiveness(store, PeerLinks(release="simulated").hold)
            ownership = BundleOwnership(
                store,
                ports,
                release="simulated",
                patience_s=10.0,
                on_failed=on_failed,
                timeout_s=5.0,
                reach=OwnerReach(6.0, sign_at=liveness.sign_at),
                liveness=liveness,
            )
        self._ownership = ownership
        self.broker = Broker(
            settings,
            CLUSTER,
            store,
            managed_ledgers,
            ports,
            ledger_config=ledger_config,
            ownership=ownership,
            authenticator=authenticator,
            peers=peers,
        )

    def __repr__(self) -> str:
        return f"<SimServing {self.broker!r}{'' if self.ready else ', not ready'}>"

    async def run(self) -> None:
        """Returns when it serves. A process that fails while it starts is started again by its supervisor: here it tries again."""
        await self._patiently(self._ids.check)
        await self.broker.start()
        ownership = self._ownership
        if isinstance(ownership, BundleOwnership):
            addresses = {"pulsar": f"{self._name}:{self.broker.port}", "http": f"{self._name}:8080"}
            await self._patiently(lambda: ownership.start(self._name, addresses))
        self.ready = True
        self._note("it serves")

    async def _patiently(self, work: Callable[[], object]) -> None:
        while True:
            try:
                await work()  # type: ignore[misc]
                return
            except MetadataError as error:
                self._note(f"metadata does not let it start: {error!r}")
                await asyncio.sleep(_RETRY_S)
