"""Several brokers of one cluster in one loop: memory metadata with a session for each, one real bookie, real ports."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_broker.admin import AdminContext, AdminServer
from cepheid_broker.broker import Broker
from cepheid_broker.ownership import PeerCalls
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.ownership import Here
from cepheid_broker.settings import AdminSettings, BrokerSettings
from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
from cepheid_managed_ledger import ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_metadata import (
    ClusterRecord,
    LedgerIds,
    MemoryStore,
    MemoryTree,
    NamespaceRecord,
    Op,
    OpResult,
    RetentionPolicy,
    SessionState,
    StoreUnavailableError,
    TenantRecord,
    Versioned,
    Watch,
    cluster_records,
    ledger_records,
    namespace_records,
    tenant_records,
)
from cepheid_ports import Ports
from cepheid_security.audit import AuditLog
from cepheid_wire import TopicName
from tests.broker.broker_world import OneBookie
from tests.broker.scripted_client import ScriptedClient, full
from tests.roles_by_name import RolesByName
from tests.support import wait_until

SLOW_S = 30.0


class SessionOf:
    """A session that a test may cut off, or end without telling: what a broker sees that was asleep, or behind a dead switch."""

    def __init__(self, tree: MemoryTree) -> None:
        self._tree = tree
        self._store = MemoryStore(tree)
        self._subscribers: list[Callable[[SessionState], None]] = []
        self._is_cut = False
        self.asleep = False

    def __repr__(self) -> str:
        return f"<SessionOf {self._store!r}{', cut' if self._is_cut else ''}>"

    def cut(self) -> None:
        """SUSPENDED: nothing is answered, and the session lives on."""
        self._is_cut = True
        self._tell(SessionState.SUSPENDED)

    def mend(self) -> None:
        self._is_cut = False
        self._tell(SessionState.CONNECTED)

    def sleep(self) -> None:
        """The process stands still for so long that the server ends its session; it has heard of nothing yet."""
        self.asleep = self._is_cut = True
        self._tree.end_session(self._store, self._store._session_id)

    def wake(self) -> None:
        """The first thing that it hears is that the session is over. `renew` gives it a new one."""
        self.asleep = False
        self._tree._sessions.append(self._store)  # so that it can be expired in its books too
        self._store.expire_session()

    def expire(self) -> None:
        """As the server does it, and the client hears of it at once."""
        self._store.expire_session()

    def renew(self) -> None:
        self._is_cut = False
        self._store.renew_session()

    @property
    def state(self) -> SessionState:
        """As the store's own books have it."""
        return self._store.session_state

    def _tell(self, state: SessionState) -> None:
        for on_session in list(self._subscribers):
            on_session(state)

    def _check(self) -> None:
        if self._is_cut:
            raise StoreUnavailableError("planted: the metadata store is out of reach")

    # MetadataStore

    async def get(self, key: str) -> Versioned | None:
        self._check()
        return await self._store.get(key)

    async def exists(self, key: str) -> bool:
        self._check()
        return await self._store.exists(key)

    async def children(self, key: str) -> list[str]:
        self._check()
        return await self._store.children(key)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._check()
        return await self._store.create(key, value, ephemeral=ephemeral, sequential=sequential)

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        self._check()
        return await self._store.put(key, value, expected_version)

    async def delete(self, key: str, expected_version: int | None) -> None:
        self._check()
        await self._store.delete(key, expected_version)

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        self._check()
        return await self._store.multi(ops)

    async def sync(self, key: str) -> None:
        self._check()

    async def watch(self, key: str) -> Watch:
        self._check()
        return await self._store.watch(key)

    async def watch_children(self, key: str) -> Watch:
        self._check()
        return await self._store.watch_children(key)

    @property
    def session_state(self) -> SessionState:
        return SessionState.SUSPENDED if self._is_cut else self._store.session_state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        self._subscribers.append(on_session)
        end = self._store.subscribe(on_session)

        def unsubscribe() -> None:
            end()
            self._subscribers.remove(on_session)

        return unsubscribe

    async def aclose(self) -> None:
        if self.asleep:
            self.wake()
        await self._store.aclose()


class OneBroker:
    """With its own session, ledger client, ports. Stopped in order by `stop`."""

    def __init__(self, world: BrokersWorld, broker_id: str) -> None:
        self.id = broker_id
        self._world = world
        self._opened = AsyncExitStack()
        self.session = SessionOf(world.tree)

    def __repr__(self) -> str:
        return f"<OneBroker {self.id}, {self.broker!r}>"

    async def start(self, port: int = 0) -> None:
        opened, ports, store = self._opened, Ports(), self.session
        opened.push_async_callback(store.aclose)
        connections = OneBookie(self._world.bookie)
        opened.push_async_callback(connections.aclose)
        placement = RackAwarePlacement(lambda: ["bookie-1"], ports.random)
        client = LedgerClient(connections, ledger_records(store), LedgerIds(store), placement, LedgerSettings(), ports)
        opened.push_async_callback(client.aclose)
        ledgers = ManagedLedgers(client, store, TailCache(64 << 20), ManagedLedgerSettings(), ports)
        opened.push_async_callback(ledgers.aclose)
        self.ownership = BundleOwnership(store, ports, timeout_s=10.0)
        settings = BrokerSettings.model_validate({"port": port, "topic_retry_s": 0.02, **self._world.settings})
        authenticator, peers = None, None
        self.audited: list[dict[str, Any]] = []
        """Lines of the audit log, where the world has roles."""
        if self._world.with_roles:
            authenticator, peers = RolesByName(), PeerCalls(settings.request_timeout_s, token=lambda: "broker")
            audit = AuditLog(self._take_lines, ports.new_worker("audit", 1), ports.wall_ms)
            opened.push_async_callback(audit.aclose)
        else:
            audit = AuditLog()
        self.broker = Broker(
            settings,
            "standalone",
            store,
            ledgers,
            ports,
            ownership=self.ownership,
            authenticator=authenticator,
            peers=peers,
            audit=audit,
        )
        addresses = {}
        if self._world.with_admin:
            context = AdminContext(self.broker, AdminSettings(stop_grace_s=0.1))
            self.admin = AdminServer(context, "127.0.0.1", 0, authenticator=authenticator)
            await self.admin.start()
            opened.push_async_callback(self.admin.aclose)
            addresses["http"] = f"127.0.0.1:{self.admin.port}"
        await self.broker.start()
        opened.push_async_callback(self.broker.aclose)
        addresses["pulsar"] = f"127.0.0.1:{self.broker.port}"
        await self.ownership.start(self.id, addresses)

    @property
    def port(self) -> int:
        return self.broker.port

    @property
    def service_url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin.port}"

    async def client(self) -> ScriptedClient:
        return await ScriptedClient.open(self.port)

    def has_open(self, topic: str) -> bool:
        return self.broker.topics.find(TopicName.parse(full(topic))) is not None

    def _take_lines(self, lines: bytes) -> None:
        self.audited += map(json.loads, lines.splitlines())

    async def stop(self) -> None:
        await self._opened.aclose()


class BrokersWorld:
    """`async with BrokersWorld(count=2, admin=True, …) as world`: further keywords are fields of BrokerSettings.

    `roles`: clients are authenticated by the name of their role, and brokers have the role `broker` for each other.
    """

    def __init__(self, count: int = 2, *, admin: bool = False, roles: bool = False, bundles: int = 4, **settings: Any) -> None:
        self.settings = settings
        self.with_roles = roles
        self.with_admin = admin
        self.brokers: list[OneBroker] = []
        self._count = count
        self._bundles = bundles
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def _start(self) -> None:
        opened = self._opened
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cepheid-")))
        self.tree = MemoryTree()
        self.store = MemoryStore(self.tree)
        await cluster_records(self.store).create("standalone", ClusterRecord())
        for tenant, namespace in (("public", "default"), ("pulsar", "system")):
            await tenant_records(self.store).create(tenant, TenantRecord(allowed_clusters=("standalone",)))
            keep = RetentionPolicy(time_limit_min=-1, size_limit_mb=-1)  # what nobody subscribed to stays
            record = NamespaceRecord(bundles=self._bundles, replication_clusters=("standalone",), retention=keep)
            await namespace_records(self.store).create((tenant, namespace), record)
        identity = BookieIdentity("bookie-1", "test")
        self.bookie = await Bookie.open(identity, StorageSettings(), RealDisk(directory), MemoryBlockIndex(), Ports())
        opened.push_async_callback(self.bookie.aclose)
        for _ in range(self._count):
            await self.add_broker()
        everybody = [broker.id for broker in self.brokers]
        for broker in self.brokers:
            await wait_until(lambda broker=broker: list(broker.ownership.directory.brokers) == everybody)  # type: ignore[misc]

    async def add_broker(self) -> OneBroker:
        broker = OneBroker(self, f"broker-{len(self.brokers) + 1}")
        self._opened.push_async_callback(broker.stop)
        await broker.start()
        self.brokers.append(broker)
        return broker

    async def owner_of(self, topic: str, *, asked: OneBroker | None = None) -> OneBroker:
        """As `asked` (the first one) sees it: who owns it, or would if it were asked."""
        location = await (asked or self.brokers[0]).ownership.locate(TopicName.parse(full(topic)))
        if isinstance(location, Here):
            return asked or self.brokers[0]
        return next(broker for broker in self.brokers if broker.id == location.broker_id)

    def other_than(self, broker: OneBroker) -> OneBroker:
        return next(other for other in self.brokers if other is not broker)

    async def topic_on(self, broker: OneBroker, prefix: str = "topic") -> str:
        """The short name of a topic that this broker owns now; nothing is created."""
        for number in range(1000):
            name = f"{prefix}-{number}"
            topic = TopicName.parse(full(name))
            await (await self.owner_of(name)).ownership.locate(topic, authoritative=True)
            if broker.ownership.owns(topic):
                return name
        raise AssertionError(f"{broker!r} has no bundle")
