"""The store in memory: deterministic, without threads or tasks, for tests and the simulator.

One `MemoryTree` is "the server"; each `MemoryStore` over it is one process's session. The simulator wraps sessions to lose,
delay and duplicate requests; this module only implements how a session ends (`expire_session`) and begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepheid_metadata.errors import NoSuchKeyError, SessionLostError, StoreClosedError
from cepheid_metadata.session import SessionEvents
from cepheid_metadata.store import (
    Create,
    Delete,
    Op,
    OpResult,
    Put,
    SessionState,
    Versioned,
    check_key,
    check_ops,
)
from cepheid_metadata.tree import EMPTY_NODE, ROOT, Node, TreeBatch, parent_of
from cepheid_metadata.watch import Watch, Watches


class MemoryTree:
    """The nodes, and the sessions that use them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {ROOT: EMPTY_NODE}
        self._names: dict[str, dict[str, None]] = {ROOT: {}}
        self._sessions: list[MemoryStore] = []
        self._last_session_id = 0

    def open_session(self, store: MemoryStore) -> int:
        self._sessions.append(store)
        self._last_session_id += 1
        return self._last_session_id

    def end_session(self, store: MemoryStore, session_id: int) -> None:
        """Delete the session's ephemeral nodes, which fires watches of other sessions."""
        self._sessions.remove(store)
        gone = [key for key, node in self.nodes.items() if node.owner == session_id]
        self.apply([Delete(key) for key in gone], session_id)

    def names(self, key: str) -> list[str]:
        if key not in self._names:
            raise NoSuchKeyError(f"{key} does not exist", key=key)
        return sorted(self._names[key])

    def apply(self, ops: Sequence[Op], session_id: int) -> list[OpResult]:
        batch = TreeBatch(self.nodes.get)
        results = batch.apply(ops, session_id)
        gone = sorted((key for key, node in batch.changed.items() if node is None), reverse=True)  # children before their parents
        for key, node in batch.changed.items():
            if node is not None:
                self._store(key, node)
        for key in gone:
            self._store(key, None)
        for session in list(self._sessions):
            session.fire(batch)
        return results

    def _store(self, key: str, node: Node | None) -> None:
        if node is not None and key in self.nodes:
            self.nodes[key] = node
            return
        parent_key = parent_of(key)
        name = key[len(parent_key) :].lstrip("/")
        if node is not None:
            self.nodes[key] = node
            self._names[key] = {}
            self._names[parent_key][name] = None
        elif key in self.nodes:  # otherwise it was created and deleted within the batch
            del self.nodes[key], self._names[key], self._names[parent_key][name]


class MemoryStore:
    """A store with one session. Implements `MetadataStore`; everything happens inside the call, without waiting."""

    def __init__(self, tree: MemoryTree) -> None:
        self._tree = tree
        self._watches = Watches()
        self._child_watches = Watches()
        self._events = SessionEvents(SessionState.CONNECTED)
        self._closed = False
        self._session_id = tree.open_session(self)

    def __repr__(self) -> str:
        watches = len(self._watches) + len(self._child_watches)
        return f"<MemoryStore session {self._session_id} {self.session_state.value}: {watches} watches>"

    async def get(self, key: str) -> Versioned | None:
        check_key(key)
        self._check_session()
        node = self._tree.nodes.get(key)
        return None if node is None else Versioned(node.value, node.version)

    async def exists(self, key: str) -> bool:
        check_key(key)
        self._check_session()
        return key in self._tree.nodes

    async def children(self, key: str) -> list[str]:
        if key != ROOT:
            check_key(key)
        self._check_session()
        return self._tree.names(key)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        (made,) = self._apply([Create(key, value, ephemeral, sequential)])
        assert isinstance(made, str)
        return made

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        (version,) = self._apply([Put(key, value, expected_version)])
        assert isinstance(version, int)
        return version

    async def delete(self, key: str, expected_version: int | None) -> None:
        self._apply([Delete(key, expected_version)])

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        return self._apply(ops)

    async def sync(self, key: str) -> None:
        check_key(key)
        self._check_session()

    async def watch(self, key: str) -> Watch:
        check_key(key)
        self._check_session()
        return self._watches.arm(key)

    async def watch_children(self, key: str) -> Watch:
        if key != ROOT:
            check_key(key)
        self._check_session()
        return self._child_watches.arm(key)

    @property
    def session_state(self) -> SessionState:
        return self._events.state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._events.subscribe(on_session)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if self.session_state is not SessionState.LOST:
                self._tree.end_session(self, self._session_id)
            self._fail_watches(StoreClosedError("the metadata store was closed"))

    def expire_session(self) -> None:
        """End the session, as the server would: delete ephemeral nodes, fail watches, refuse everything until a new session."""
        assert not self._closed, f"{self!r} is closed"
        assert self.session_state is not SessionState.LOST, f"{self!r} has no session to expire"
        self._tree.end_session(self, self._session_id)
        self._fail_watches(SessionLostError(f"metadata session {self._session_id} expired"))
        self._events.become(SessionState.LOST)

    def renew_session(self) -> None:
        """Open a new session on the same tree, as a client does when it reaches the server again."""
        assert not self._closed, f"{self!r} is closed"
        assert self.session_state is SessionState.LOST, f"{self!r} has a session"
        self._session_id = self._tree.open_session(self)
        self._events.become(SessionState.CONNECTED)

    def fire(self, batch: TreeBatch) -> None:
        """Fire watches for the tree, as something changed."""
        self._watches.fire(batch.watch_keys)
        self._child_watches.fire(batch.watch_children_keys)

    def _apply(self, ops: Sequence[Op]) -> list[OpResult]:
        check_ops(ops)
        self._check_session()
        return self._tree.apply(ops, self._session_id)

    def _check_session(self) -> None:
        if self._closed:
            raise StoreClosedError("the metadata store was closed")
        if self.session_state is SessionState.LOST:
            raise SessionLostError(f"metadata session {self._session_id} expired, and there is no new one yet")

    def _fail_watches(self, error: Exception) -> None:
        self._watches.fail_all(error)
        self._child_watches.fail_all(error)
