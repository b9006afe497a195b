"""A broker over real parts in one loop: memory metadata, one real bookie in a temporary directory, real managed ledgers."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_broker.broker import Broker
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.topic import Topic
from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
from cepheid_managed_ledger import ManagedLedgerFailedError, ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_metadata import (
    LedgerIds,
    MemoryStore,
    MemoryTree,
    NamespacePermissions,
    NamespaceRecord,
    SessionState,
    StoreUnavailableError,
    TenantRecord,
    chain_records,
    change_permissions,
    ledger_records,
    namespace_records,
    tenant_records,
)
from cepheid_ports import Ports
from cepheid_rpc import BookieConnection
from cepheid_security import Principal
from cepheid_security.audit import AuditLog, Result
from cepheid_tiered import SegmentStore
from cepheid_wire import TopicName
from tests.broker.scripted_client import ScriptedClient
from tests.roles_by_name import RolesByName


class _RefusableLedgers(ManagedLedgers):
    """Opens no topic while a test says so: storage that is not there for a moment."""

    refuse = False

    async def open(self, *args: Any, **kwargs: Any) -> Any:
        if self.refuse:
            raise ManagedLedgerFailedError("planted: no topic is opened now")
        return await super().open(*args, **kwargs)


class _FillableDisk(RealDisk):
    """Says that it is full while a test says so."""

    full = False

    def free_bytes(self) -> int:
        return 0 if self.full else super().free_bytes()


class OutageStore(MemoryStore):
    """Cannot be reached while a test says so."""

    away = False

    def set_away(self, away: bool) -> None:
        self.away = away
        self._events.become(SessionState.SUSPENDED if away else SessionState.CONNECTED)

    def _check_session(self) -> None:
        if self.away:
            raise StoreUnavailableError("planted: the metadata store is away")
        super()._check_session()


class SeenAudit(AuditLog):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str, str]] = []

    def record(
        self,
        principal: Principal | None,
        peer: str,
        operation: str,
        object: str,
        result: Result,
        detail: str = "",
        *,
        original_role: str = "",
    ) -> None:
        self.lines.append(("" if principal is None else principal.role, operation, object, result))


class OneBookie:
    """`BookieConnections` of one in-process bookie."""

    def __init__(self, bookie: Bookie) -> None:
        self._connection = bookie.connection()

    def get(self, bookie_id: str) -> BookieConnection:
        assert bookie_id == self._connection.bookie_id
        return self._connection

    async def aclose(self) -> None:
        await self._connection.aclose()


class BrokerWorld:
    """`async with BrokerWorld(max_message_bytes=…) as world`: the keywords are fields of BrokerSettings."""

    def __init__(
        self,
        *,
        ledgers: ManagedLedgerSettings | None = None,
        refusal_retry_s: float = 10.0,
        segments: SegmentStore | None = None,
        **settings: Any,
    ) -> None:
        self.settings = BrokerSettings.model_validate({"port": 0, "topic_retry_s": 0.02, **settings})
        self._ledger_settings = ledgers or ManagedLedgerSettings()
        self._client_settings = LedgerSettings(refusal_retry_s=refusal_retry_s)
        self._segments = segments
        self._opened = AsyncExitStack()
        self.writable = ["bookie-1"]
        """The bookies that new ledgers may get."""
        self.audit = SeenAudit()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise

    async def _start(self) -> None:
        opened, ports = self._opened, Ports()
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cepheid-")))
        self.tree = MemoryTree()
        self.store = OutageStore(self.tree)
        await tenant_records(self.store).create("public", TenantRecord())
        await namespace_records(self.store).create(("public", "default"), NamespaceRecord())
        identity, settings = BookieIdentity("bookie-1", "test"), StorageSettings(disk_check_interval_s=0.01)
        self.disk = _FillableDisk(directory)
        bookie = self._bookie = await Bookie.open(identity, settings, self.disk, MemoryBlockIndex(), ports)
        opened.push_async_callback(bookie.aclose)
        connections = OneBookie(bookie)
        opened.push_async_callback(connections.aclose)
        placement = RackAwarePlacement(lambda: self.writable, ports.random)
        self.ledger_client = LedgerClient(
            connections, ledger_records(self.store), LedgerIds(self.store), placement, self._client_settings, ports
        )
        opened.push_async_callback(self.ledger_client.aclose)
        self.tail_cache = TailCache(64 << 20)
        self._managed_ledgers = _RefusableLedgers(
            self.ledger_client, self.store, self.tail_cache, self._ledger_settings, ports, segments=self._segments
        )
        opened.push_async_callback(self._managed_ledgers.aclose)
        authenticator = RolesByName() if self.settings.authorization.enabled else None
        self.broker = Broker(
            self.settings, "standalone", self.store, self._managed_ledgers, ports, authenticator=authenticator, audit=self.audit
        )
        await self.broker.start()
        opened.push_async_callback(self.broker.aclose)

    @property
    def port(self) -> int:
        return self.broker.port

    async def client(self, role: str = "", *, handshake: bool = True, original_principal: str = "") -> ScriptedClient:
        return await ScriptedClient.open(self.port, handshake=handshake, role=role, original_principal=original_principal)

    async def permit(self, where: str = "default", /, **permissions: Any) -> None:
        """Permissions on a namespace of the tenant `public`, in the place of those that there were; the broker knows them then."""
        record = NamespacePermissions.model_validate(permissions)
        await change_permissions(self.store, "public", where, lambda _: record)
        for _ in range(20):  # turns of the loop in which the watch fires and the record is read
            await asyncio.sleep(0)

    def topic(self, name: str) -> Topic:
        topic = self.broker.topics.find(TopicName.parse(name))
        assert topic is not None, f"{name} is not open"
        return topic

    async def create_topic(self, name: str, partitions: int = 0) -> None:
        await self.broker.catalog.create(TopicName.parse(name), partitions)

    async def fence(self, name: str) -> None:
        """What another broker's takeover does: the topic's open ledger takes no more appends, and its chain has changed."""
        topic = self.topic(name)
        await self.ledger_client.recover(topic.ledger.ledgers.last_ledger_id)
        records = chain_records(self.store)
        found = await records.get(topic.name)
        assert found is not None
        await records.replace(topic.name, found.record.replace(epoch=found.record.epoch + 1), found.version)

    def fill_disk(self) -> None:
        """Fill the bookie's disk, which it notices at once."""
        self.disk.full = True
        self._bookie.look_at_free_space_now()
        assert not self._bookie.writable

    def refuse_opening_topics(self, refuse: bool) -> None:
        self._managed_ledgers.refuse = refuse
