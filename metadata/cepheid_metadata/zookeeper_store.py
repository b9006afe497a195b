"""The metadata store of a cluster: ZooKeeper through kazoo, whose thread never touches objects of the loop (kazoo_connection.py).

    get … multi ──► RequestLane (order, window, deadlines) ──► kazoo ──► LoopInbox ──► answers, watch events, connection changes

    CONNECTED ──connection lost──► SUSPENDED ──same session──► CONNECTED          every watch fires: read again
                                       └──the server reports: expired──► LOST ──new session, no key left of the old──► CONNECTED

1. Only the server ends a session: SUSPENDED lasts as long as the outage, and nothing is dropped by our own clock.
2. A request without a connection waits for it until the outage is `patience_s` old, which hides the restart of a server;
   later ones fail at once, with `outcome_unknown` False: they were not sent. A write whose answer is lost or late fails with
   `outcome_unknown`. Reading again decides: a session's requests are executed in the order of sending, the servers accept nothing
   more from a session's old connection once it has a new one, and that begins with a sync: its server may lag.
3. Nothing is sent twice. A create without its parents is refused by the server before it is sent again with them.
4. After LOST, CONNECTED waits until the keys that the old session owned are gone (the server may start a session while it still
   ends another). Ephemeral sequential keys whose creation had an unknown outcome are not followed: their names are not known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from cepheid_metadata.errors import (
    AccessDeniedError,
    SessionLostError,
    StoreClosedError,
    StoreOpenError,
    StoreUnavailableError,
)
from cepheid_metadata.kazoo_connection import ConnectionEvent, Digest, KazooConnection, LoopInbox
from cepheid_metadata.request_lane import RequestLane
from cepheid_metadata.session import SessionEvents
from cepheid_metadata.store import Create, Delete, Op, OpResult, Put, SessionState, StoreSecurity, Versioned, check_key
from cepheid_metadata.tree import ROOT
from cepheid_metadata.watch import Watch
from cepheid_metadata.zookeeper_tree import ZooKeeperTree
from cepheid_metadata.zookeeper_watches import ZooKeeperWatches
from cepheid_ports import Ports, TaskOwner
from cepheid_security import ClientTls

CLOSE_GRACE_S = 2.0
RESTART_PAUSE_S = 1.0
OLD_KEYS_POLL_S = 0.02


class ZooKeeperUnreachableError(StoreOpenError):
    """No session could be opened."""

    hint: ClassVar[str] = "check that the ZooKeeper servers run and that these addresses reach them"


class ZooKeeperStore:
    """The store over consecutive sessions. Implements `MetadataStore`. Created by `open`."""

    def __init__(
        self,
        addresses: Sequence[str],
        ports: Ports,
        *,
        root: str,
        digest: Digest | None,
        tls: ClientTls | None,
        session_timeout_s: float,
        request_timeout_s: float,
        patience_s: float,
    ) -> None:
        self._where = f"ZooKeeper at {','.join(addresses)}{root}"
        self._inbox = LoopInbox(self._on_group)
        self._lane = RequestLane(self._where, request_timeout_s, patience_s)
        self._tree = ZooKeeperTree(self._lane, root, has_user=digest is not None)
        self.security = StoreSecurity(digest is not None, digest is not None and digest.private, encrypted=tls is not None)
        self._watches = ZooKeeperWatches(self._lane, self._tree.path)
        self._connect_to = addresses, session_timeout_s, digest, tls
        self._connection = self._new_connection()
        self._worker = ports.new_worker("zookeeper-close", 1)  # kazoo blocks while it closes
        self._tasks = TaskOwner("zookeeper-store")
        self._events = SessionEvents(SessionState.LOST)  # until the first session
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session_id = 0
        self._sessions = self._disconnects = 0
        self._old_keys: dict[str, None] = {}  # of sessions that ended; may still exist
        self._old_sessions: set[int] = set()
        self._connection_changes = 0
        self._closed = False

    def __repr__(self) -> str:
        session = f"session {self._session_id:#x} {self.session_state.value}"
        return f"<ZooKeeperStore {self._where} {session}: {len(self._watches)} watches>"

    @staticmethod
    async def open(
        addresses: Sequence[str],
        ports: Ports,
        *,
        root: str = "",
        digest: Digest | None = None,
        tls: ClientTls | None = None,
        session_timeout_s: float = 4.0,
        request_timeout_s: float | None = None,
        patience_s: float = 3.0,
        open_timeout_s: float = 15.0,
    ) -> ZooKeeperStore:
        """Open a session below the key `root`, which is created. Raises StoreOpenError, and the server's errors for `root`."""
        store = ZooKeeperStore(
            addresses,
            ports,
            root=root,
            digest=digest,
            tls=tls,
            session_timeout_s=session_timeout_s,
            request_timeout_s=2 * session_timeout_s if request_timeout_s is None else request_timeout_s,
            patience_s=patience_s,
        )
        try:
            store._connection.start()
            try:
                async with asyncio.timeout(open_timeout_s):
                    await store._opened
            except TimeoutError:
                message = f"no session on {store._where} within {open_timeout_s:g} s{store._connection.last_problem()}"
                raise ZooKeeperUnreachableError(message, addresses=list(addresses)) from None
            await store._tree.make_root(private=store.security.private)
            if store.security.private:
                await store._tree.close_secrets()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def get(self, key: str) -> Versioned | None:
        check_key(key)
        return await self._tree.get(key)

    async def exists(self, key: str) -> bool:
        check_key(key)
        return await self._tree.stat(key) is not None

    async def children(self, key: str) -> list[str]:
        if key != ROOT:
            check_key(key)
        return await self._tree.children(key)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        (made,) = await self._tree.write([Create(key, value, ephemeral, sequential)])
        assert isinstance(made, str)
        return made

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        (version,) = await self._tree.write([Put(key, value, expected_version)])
        assert isinstance(version, int)
        return version

    async def delete(self, key: str, expected_version: int | None) -> None:
        await self._tree.write([Delete(key, expected_version)])

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        return await self._tree.write(tuple(ops))

    async def sync(self, key: str) -> None:
        check_key(key)
        await self._tree.sync(key)

    async def watch(self, key: str) -> Watch:
        check_key(key)
        return await self._watches.watch(key)

    async def watch_and_get(self, key: str) -> tuple[Watch, Versioned | None]:
        """Arm a watch of a key and read it, as `watch_and_get` of store.py. A missing key takes two requests."""
        check_key(key)
        return await self._watches.watch_and_get(key)

    async def watch_children(self, key: str) -> Watch:
        if key != ROOT:
            check_key(key)
        return await self._watches.watch_children(key)

    @property
    def session_state(self) -> SessionState:
        return self._events.state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._events.subscribe(on_session)

    def statistics(self) -> dict[str, int]:
        """Return counters for metrics."""
        return {
            "requests": self._lane.requests,
            "requests_waiting": self._lane.waiting,
            "request_timeouts": self._lane.timeouts,
            "watches": len(self._watches),
            "watches_at_server": self._watches.armed,
            "sessions": self._sessions,
            "disconnects": self._disconnects,
        }

    async def aclose(self) -> None:
        """End the session at the server, if it can be reached, and with it its ephemeral keys."""
        if self._closed:
            return
        self._closed = True
        closed = StoreClosedError(f"the metadata store on {self._where} was closed")
        await self._tasks.aclose()
        self._lane.refuse(closed)
        self._watches.fail_all(closed)
        stopping = asyncio.ensure_future(self._worker.run(self._connection.stop))
        try:
            _, late = await asyncio.wait([stopping], timeout=CLOSE_GRACE_S)
            if late:
                self._connection.cut()  # the server does not answer: the session ends by its timeout
            await stopping
        finally:
            self._connection.cut()
            self._inbox.run()  # answers from before the end
            self._inbox.close()
            self._lane.fail_all(closed)
            await self._worker.aclose()

    # The session

    def _on_group(self) -> None:
        if not self._closed:
            self._lane.pump()

    def _on_connection(self, event: ConnectionEvent) -> None:
        if self._closed:
            return
        self._connection_changes += 1
        match event.state:
            case "CONNECTED":
                self._on_connected(event.session_id)
            case "CONNECTING":
                self._disconnects += 1
                self._watches.on_disconnected()
                self._lane.suspend()
                if self.session_state is SessionState.CONNECTED:
                    self._events.become(SessionState.SUSPENDED)
            case _:
                self._on_session_ended()
                if event.state != "EXPIRED_SESSION":  # kazoo gave up, which it does only after errors of its own
                    self._tasks.start(self._connect_anew(), name="connect-anew")

    def _on_connected(self, session_id: int) -> None:
        if session_id != self._session_id:
            if self.session_state is not SessionState.LOST:
                self._on_session_ended()
            self._session_id = session_id
            self._sessions += 1
        if self.session_state is SessionState.LOST:
            self._tasks.start(self._begin_session(self._connection_changes), name="begin-session")
        else:
            self._watches.on_reconnected()
            self._lane.connect(self._tree.catch_up)
            self._events.become(SessionState.CONNECTED)

    def _on_session_ended(self) -> None:
        lost = SessionLostError(f"session {self._session_id:#x} on {self._where} ended, and there is no new one yet")
        self._old_keys.update(self._tree.own_keys)
        self._tree.own_keys.clear()
        self._old_sessions.add(self._session_id)
        self._lane.refuse(lost)
        self._watches.fail_all(SessionLostError(f"session {self._session_id:#x} on {self._where} ended"))
        self._events.become(SessionState.LOST)

    async def _begin_session(self, connection_changes: int) -> None:
        """Report CONNECTED once the keys of old sessions are gone. Gives up if the connection changes meanwhile."""
        while self._old_keys and connection_changes == self._connection_changes:
            with contextlib.suppress(StoreUnavailableError, SessionLostError):  # a late answer, or the next connection starts again
                await self._forget_old_keys()
            if self._old_keys:
                await asyncio.sleep(OLD_KEYS_POLL_S)
        if connection_changes != self._connection_changes:
            return
        self._old_sessions.clear()
        self._lane.connect(self._tree.catch_up)
        if not self._opened.done():
            self._opened.set_result(None)
        self._events.become(SessionState.CONNECTED)

    async def _forget_old_keys(self) -> None:
        for key in list(self._old_keys):
            try:
                stat = await self._tree.stat(key, at_once=True)
            except AccessDeniedError:
                stat = None  # not created by this user
            if stat is None or stat.owner_session_id not in self._old_sessions:
                self._old_keys.pop(key, None)

    def _new_connection(self) -> KazooConnection:
        addresses, session_timeout_s, digest, tls = self._connect_to
        connection = KazooConnection(addresses, session_timeout_s, digest, self._inbox, self._on_connection, tls=tls)
        self._lane.client, self._lane.last_problem = connection.client, connection.last_problem
        return connection

    async def _connect_anew(self) -> None:
        await asyncio.sleep(RESTART_PAUSE_S)
        await self._worker.run(self._connection.stop)
        self._connection = self._new_connection()
        self._connection.start()
