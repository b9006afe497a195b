"""The store of a cluster: ZooKeeper through kazoo, whose thread never touches anything of the loop (kazoo_connection.py).

    get … multi ──► RequestLane (order, window, deadlines) ──► kazoo ──► LoopInbox ──► answers, watch events, connection changes

    CONNECTED ──connection lost──► SUSPENDED ──same session──► CONNECTED          every watch fires: look again
                                       └──the server says: expired──► LOST ──new session, nothing left of the old──► CONNECTED

1. The server alone ends a session: SUSPENDED lasts as long as the outage, however long, and nothing is dropped on our own clock.
2. A request that finds no connection waits for it until the outage is `patience_s` old, which hides the restart of a server;
   later ones fail at once, `outcome_unknown` False: they were not sent. A write whose answer is lost or late fails with
   `outcome_unknown`. Reading again decides: a session's requests are executed in the order of sending, and the server ends a
   session's old connection before it takes a new one.
3. Nothing is sent twice. A create that misses its parents is refused by the server before it is sent again with them.
4. After LOST, CONNECTED waits until the keys that the old session owned are gone (the server may begin a session while it still
   ends another). Ephemeral sequential keys whose creation had an unknown outcome are not followed: their names are not known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from kazoo.exceptions import KazooException, NoNodeError

from cepheid_metadata.errors import (
    KeyExistsError,
    MetadataError,
    NoSuchKeyError,
    SessionLostError,
    StoreClosedError,
    StoreOpenError,
    StoreUnavailableError,
)
from cepheid_metadata.kazoo_connection import ConnectionEvent, Digest, KazooConnection, LoopInbox
from cepheid_metadata.request_lane import RequestLane
from cepheid_metadata.session import SessionEvents
from cepheid_metadata.store import Create, Delete, Op, OpResult, Put, SessionState, Versioned, check_key, check_ops
from cepheid_metadata.tree import ROOT
from cepheid_metadata.watch import Watch
from cepheid_metadata.zookeeper_requests import (
    AccessDeniedError,
    answers_of,
    check_size,
    error_of,
    failing_index,
    needs_stat,
    parents_to_check,
    refusal_of,
    result_of,
    send_ops,
    with_parents,
)
from cepheid_metadata.zookeeper_watches import ZooKeeperWatches
from cepheid_ports import Ports, TaskOwner

MAX_PARENT_TRIES = 20
CLOSE_GRACE_S = 2.0
RESTART_PAUSE_S = 1.0
OLD_KEYS_POLL_S = 0.02
OWN_NODES_OF_ZOOKEEPER = "zookeeper"


class ZooKeeperUnreachableError(StoreOpenError):
    """No session could be had."""

    hint: ClassVar[str] = "check that the ZooKeeper servers run and that these addresses reach them"


class ZooKeeperStore:
    """One session after the other. Implements `MetadataStore`. Made by `open`."""

    def __init__(
        self,
        addresses: Sequence[str],
        ports: Ports,
        *,
        root: str,
        digest: Digest | None,
        session_timeout_s: float,
        request_timeout_s: float,
        patience_s: float,
    ) -> None:
        self._where = f"ZooKeeper at {','.join(addresses)}{root}"
        self._root = root
        self._inbox = LoopInbox(self._on_group)
        self._lane = RequestLane(self._where, request_timeout_s, patience_s)
        self._watches = ZooKeeperWatches(self._lane, self._path)
        self._connect_to = addresses, session_timeout_s, digest
        self._connection = self._new_connection()
        self._worker = ports.new_worker("zookeeper-close", 1)  # kazoo blocks while it closes
        self._tasks = TaskOwner("zookeeper-store")
        self._events = SessionEvents(SessionState.LOST)  # until the first session
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session_id = 0
        self._sessions = self._disconnects = 0
        self._own_keys: dict[str, None] = {}  # ephemeral keys of this session
        self._old_keys: dict[str, None] = {}  # of sessions that ended, perhaps still there
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
        session_timeout_s: float = 6.0,
        request_timeout_s: float | None = None,
        patience_s: float = 3.0,
        open_timeout_s: float = 15.0,
    ) -> ZooKeeperStore:
        """With a session, below the key `root`, which is made. Raises StoreOpenError, and what the server says to `root`."""
        store = ZooKeeperStore(
            addresses,
            ports,
            root=root,
            digest=digest,
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
                message = f"no session on {store._where} within {open_timeout_s:g} s"
                raise ZooKeeperUnreachableError(message, addresses=list(addresses)) from None
            await store._make_root()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def get(self, key: str) -> Versioned | None:
        check_key(key)
        path = self._path(key)
        try:
            value, stat = await self._read(key, lambda client: client.get_async(path))
        except NoNodeError:
            return None
        return Versioned(value or b"", stat.version)

    async def exists(self, key: str) -> bool:
        check_key(key)
        return await self._stat(key) is not None

    async def children(self, key: str) -> list[str]:
        if key != ROOT:
            check_key(key)
        path = self._path(key)
        try:
            names: list[str] = await self._read(key, lambda client: client.get_children_async(path))
        except NoNodeError:
            raise NoSuchKeyError(f"{key} does not exist", key=key) from None
        return sorted(name for name in names if path != ROOT or name != OWN_NODES_OF_ZOOKEEPER)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        (made,) = await self._write([Create(key, value, ephemeral, sequential)])
        assert isinstance(made, str)
        return made

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        (version,) = await self._write([Put(key, value, expected_version)])
        assert isinstance(version, int)
        return version

    async def delete(self, key: str, expected_version: int | None) -> None:
        await self._write([Delete(key, expected_version)])

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        return await self._write(tuple(ops))

    async def sync(self, key: str) -> None:
        check_key(key)
        path = self._path(key)
        with contextlib.suppress(NoNodeError):
            await self._read(key, lambda client: client.sync_async(path))

    async def watch(self, key: str) -> Watch:
        check_key(key)
        return await self._watches.watch(key)

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
        """Counters for metrics."""
        return {
            "requests": self._lane.requests,
            "requests_waiting": self._lane.waiting,
            "request_timeouts": self._lane.timeouts,
            "watches": len(self._watches),
            "sessions": self._sessions,
            "disconnects": self._disconnects,
        }

    async def aclose(self) -> None:
        """The session ends at the server, if it can be reached, and its ephemeral keys with it."""
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
            self._inbox.run()  # the answers that came before the end
            self._inbox.close()
            self._lane.fail_all(closed)
            await self._worker.aclose()

    # Requests.

    def _path(self, key: str) -> str:
        return (self._root or ROOT) if key == ROOT else self._root + key

    async def _read(self, key: str, send: Callable[[Any], Any], *, at_once: bool = False) -> Any:
        try:
            return await self._lane.ask(send, f"read {key}", at_once=at_once)
        except NoNodeError:
            raise
        except KazooException as error:
            raise refusal_of(key, error, is_write=False) from None

    async def _stat(self, key: str, *, at_once: bool = False) -> Any:
        path = self._path(key)
        return await self._read(key, lambda client: client.exists_async(path), at_once=at_once)

    async def _write(self, ops: Sequence[Op]) -> list[OpResult]:
        check_ops(ops)
        check_size(ops, self._root)
        if not ops:
            return []
        try:
            return await self._commit(ops)
        except NoSuchKeyError as error:
            if not isinstance(ops[error.op_index or 0], Create):
                raise
        return await self._commit_with_parents(ops)

    async def _commit_with_parents(self, ops: Sequence[Op]) -> list[OpResult]:
        for _ in range(MAX_PARENT_TRIES):
            parents = parents_to_check(ops)
            found = await asyncio.gather(*(self.exists(key) for key in parents), return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            planned = with_parents(ops, {key: each is True for key, each in zip(parents, found, strict=True)})
            try:
                results = await self._commit([op for op, _ in planned])
            except MetadataError as error:
                op, place = planned[error.op_index or 0]
                was_made_by_others = place is None and isinstance(error, KeyExistsError)
                if was_made_by_others or (isinstance(op, Create) and isinstance(error, NoSuchKeyError)):
                    continue
                if error.op_index is not None:
                    error.op_index = error.facts["op_index"] = place if len(ops) > 1 else None
                raise
            return [result for (_, place), result in zip(planned, results, strict=True) if place is not None]
        raise StoreUnavailableError(f"{ops[0].key}: its parents come and go; nothing was written", key=ops[0].key)

    async def _commit(self, ops: Sequence[Op]) -> list[OpResult]:
        # Before it is known whether they will be: an answer may be lost.
        self._own_keys.update({op.key: None for op in ops if isinstance(op, Create) and op.ephemeral and not op.sequential})
        what = f"write {ops[0].key}" + (f" and {len(ops) - 1} more" if len(ops) > 1 else "")
        try:
            answer = await self._lane.ask(lambda client: send_ops(client, ops, self._path), what, is_write=True)
        except KazooException as error:
            raise await self._explain(ops[0], error) from None
        answers = answers_of(ops, answer)
        if (index := failing_index(answers)) is not None:
            failed = await self._explain(ops[index], answers[index])
            if len(ops) > 1:
                failed.op_index = failed.facts["op_index"] = index
            raise failed
        results = [result_of(op, each, self._root) for op, each in zip(ops, answers, strict=True)]
        self._note_own_keys(ops, results)
        return results

    def _note_own_keys(self, ops: Sequence[Op], results: Sequence[OpResult]) -> None:
        for op, result in zip(ops, results, strict=True):
            if isinstance(op, Create) and op.ephemeral and op.sequential:
                self._own_keys[str(result)] = None
            elif isinstance(op, Delete):
                self._own_keys.pop(op.key, None)

    async def _explain(self, op: Op, error: Exception) -> MetadataError:
        """ZooKeeper's errors carry no numbers: they are asked for, so that ours say what is there."""
        stat = None
        if needs_stat(error):
            with contextlib.suppress(MetadataError):
                stat = await self._stat(op.key)
        assert isinstance(error, KazooException), error
        return error_of(op, error, stat)

    async def _make_root(self) -> None:
        """Keys of ours are relative to the root; the root itself is made as a key below `/`."""
        if self._root:
            root, self._root = self._root, ""
            try:
                with contextlib.suppress(KeyExistsError):
                    if await self._stat(root) is None:
                        await self._write([Create(root, b"")])
            finally:
                self._root = root

    # The session.

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
                if event.state != "EXPIRED_SESSION":  # kazoo gave up by itself, which it does on errors of its own only
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
            self._lane.connect()
            self._events.become(SessionState.CONNECTED)

    def _on_session_ended(self) -> None:
        lost = SessionLostError(f"session {self._session_id:#x} on {self._where} ended, and there is no new one yet")
        self._old_keys.update(self._own_keys)
        self._own_keys.clear()
        self._old_sessions.add(self._session_id)
        self._lane.refuse(lost)
        self._watches.fail_all(SessionLostError(f"session {self._session_id:#x} on {self._where} ended"))
        self._events.become(SessionState.LOST)

    async def _begin_session(self, connection_changes: int) -> None:
        """Reports CONNECTED once nothing of the old sessions is left; given up when the connection changes meanwhile."""
        while self._old_keys and connection_changes == self._connection_changes:
            with contextlib.suppress(StoreUnavailableError, SessionLostError):  # a late answer; or the next connection begins again
                await self._forget_old_keys()
            if self._old_keys:
                await asyncio.sleep(OLD_KEYS_POLL_S)
        if connection_changes != self._connection_changes:
            return
        self._old_sessions.clear()
        self._lane.connect()
        if not self._opened.done():
            self._opened.set_result(None)
        self._events.become(SessionState.CONNECTED)

    async def _forget_old_keys(self) -> None:
        for key in list(self._old_keys):
            try:
                stat = await self._stat(key, at_once=True)
            except AccessDeniedError:
                stat = None  # not one that this user made
            if stat is None or stat.owner_session_id not in self._old_sessions:
                self._old_keys.pop(key, None)

    def _new_connection(self) -> KazooConnection:
        addresses, session_timeout_s, digest = self._connect_to
        connection = KazooConnection(addresses, session_timeout_s, digest, self._inbox, self._on_connection)
        self._lane.client = connection.client
        return connection

    async def _connect_anew(self) -> None:
        await asyncio.sleep(RESTART_PAUSE_S)
        await self._worker.run(self._connection.stop)
        self._connection = self._new_connection()
        self._connection.start()
