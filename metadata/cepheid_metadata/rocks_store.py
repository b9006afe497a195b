"""The durable store of a single machine: RocksDB in one named thread.

    get, children ──► read lane ──┐
                                  ├──► worker "metadata" (RocksTree): reads, or one synced batch for all writes that waited
    create … multi ──► write lane ┘

A thousand writes at once cost a few syncs. Groups of reads run between groups of writes, and see what was committed.

When a write fails (disk full) the state is SUSPENDED: writes are refused, reads continue if the files allow it, and every
`retry_s` the database is opened again until it accepts writes. The session survives that; it ends with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cepheid_metadata.errors import MetadataError, StoreClosedError, StoreUnavailableError
from cepheid_metadata.group_lane import GroupLane
from cepheid_metadata.rocks_tree import Commit, Outcome, RocksTree
from cepheid_metadata.session import SessionEvents
from cepheid_metadata.store import Create, Delete, Op, OpResult, Put, SessionState, Versioned, check_key, check_ops
from cepheid_metadata.tree import ROOT, TreeBatch
from cepheid_metadata.watch import Watch, Watches
from cepheid_ports import Ports, TaskOwner, Worker

ReadRequest = tuple[Callable[[str], Any], str]


class RocksStore:
    """A store with one session. Implements `MetadataStore`. Created by `open`."""

    def __init__(self, tree: RocksTree, worker: Worker, retry_s: float) -> None:
        self._tree = tree
        self._worker = worker
        self._retry_s = retry_s
        self._reads: GroupLane[ReadRequest] = GroupLane("read", worker, self._read_group)
        self._writes: GroupLane[Sequence[Op]] = GroupLane("write", worker, self._write_group, on_group=self._on_written)
        self._committed: TreeBatch | None = None  # handed from the worker to the loop, one group at a time
        self._watches = Watches()
        self._child_watches = Watches()
        self._events = SessionEvents(SessionState.CONNECTED)
        self._tasks = TaskOwner("metadata-store")
        self._closed = False

    def __repr__(self) -> str:
        return f"<RocksStore {self._tree.directory} {self.session_state.value}: {self._reads!r} {self._writes!r}>"

    @staticmethod
    async def open(directory: Path, ports: Ports, *, retry_s: float = 1.0) -> RocksStore:
        """Open the store. Raises StoreInUseError, NewerFormatError, StoreDamagedError, StoreOpenError, which name the directory."""
        worker = ports.new_worker("metadata", 1)
        tree = RocksTree(directory)
        try:
            await worker.run(tree.open)
        except BaseException:
            await worker.aclose()
            raise
        return RocksStore(tree, worker, retry_s)

    async def get(self, key: str) -> Versioned | None:
        check_key(key)
        found: Versioned | None = await self._read(self._tree.get, key)
        return found

    async def exists(self, key: str) -> bool:
        return await self.get(key) is not None

    async def children(self, key: str) -> list[str]:
        if key != ROOT:
            check_key(key)
        names: list[str] = await self._read(self._tree.children, key)
        return names

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
        self._check_open()  # there is one process, and its reads always see its writes

    async def watch(self, key: str) -> Watch:
        check_key(key)
        self._check_open()
        return self._watches.arm(key)

    async def watch_children(self, key: str) -> Watch:
        if key != ROOT:
            check_key(key)
        self._check_open()
        return self._child_watches.arm(key)

    @property
    def session_state(self) -> SessionState:
        return self._events.state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._events.subscribe(on_session)

    def statistics(self) -> dict[str, int]:
        """Return counters for metrics: requests and their groups (jobs; for writes: syncs)."""
        return {
            "reads": self._reads.requests,
            "read_groups": self._reads.groups,
            "writes": self._writes.requests,
            "write_groups": self._writes.groups,
            "watches": len(self._watches) + len(self._child_watches),
        }

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.aclose()
        closed = StoreClosedError(f"the metadata store in {self._tree.directory} was closed")
        self._reads.refuse_waiting(closed)
        self._writes.refuse_waiting(closed)
        self._watches.fail_all(closed)
        self._child_watches.fail_all(closed)
        try:
            await self._worker.run(self._tree.close)  # after the running groups, which are answered
        finally:
            await self._worker.aclose()

    async def _read(self, read: Callable[[str], Any], key: str) -> Any:
        self._check_open()
        return await self._reads.ask((read, key))

    async def _write(self, ops: Sequence[Op]) -> list[OpResult]:
        check_ops(ops)
        self._check_open()
        if self.session_state is SessionState.SUSPENDED:
            message = f"metadata in {self._tree.directory} cannot be written now; opening it again every {self._retry_s} s"
            raise StoreUnavailableError(message, directory=str(self._tree.directory))
        size_bytes = sum(len(op.value) for op in ops if isinstance(op, Create | Put))
        results: list[OpResult] = await self._writes.ask(ops, size_bytes)
        return results

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the metadata store in {self._tree.directory} was closed")

    # In the worker

    def _read_group(self, requests: Sequence[ReadRequest]) -> list[Any]:
        answers: list[Any] = []
        for read, key in requests:
            try:
                answers.append(read(key))
            except MetadataError as error:  # each caller gets its own answer
                answers.append(error)
        return answers

    def _write_group(self, requests: Sequence[Sequence[Op]]) -> Sequence[Any]:
        self._committed = None
        commit = self._tree.commit(requests)
        if commit.outcome is Outcome.APPLIED:
            self._committed = commit.batch
            return commit.answers
        return [self._failure(commit, answer) for answer in commit.answers]

    def _failure(self, commit: Commit, answer: list[OpResult] | MetadataError) -> StoreUnavailableError:
        """Return the error of a failed group. A refused request depended on others that failed: it may be retried, too."""
        outcome_unknown = commit.outcome is Outcome.UNKNOWN and not isinstance(answer, MetadataError)
        fate = "it is not known whether the change happened" if outcome_unknown else "nothing was changed"
        message = f"writing metadata in {self._tree.directory} failed, {fate}: {commit.problem}"
        return StoreUnavailableError(message, outcome_unknown=outcome_unknown, directory=str(self._tree.directory))

    # In the loop

    def _on_written(self) -> None:
        if self._committed is not None:
            self._watches.fire(self._committed.watch_keys)
            self._child_watches.fire(self._committed.watch_children_keys)
            self._committed = None
        if not self._tree.is_writable and not self._closed and self.session_state is SessionState.CONNECTED:
            self._events.become(SessionState.SUSPENDED)
            self._tasks.start(self._become_writable(), name="become-writable")

    async def _become_writable(self) -> None:
        writable = False
        while not writable:
            await asyncio.sleep(self._retry_s)
            writable = await self._worker.run(self._tree.reopen)
        self._fire_all()
        self._events.become(SessionState.CONNECTED)

    def _fire_all(self) -> None:
        """Fire all watches: a write of unknown outcome may have happened, so every watcher must read again."""
        self._watches.fire_all()
        self._child_watches.fire_all()
