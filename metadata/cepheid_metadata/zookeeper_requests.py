"""Translates our operations to ZooKeeper's, and its errors to ours. Without I/O.

ZooKeeper does not create parents. A create without its parent is sent again as a transaction that also creates it, so that it stays
all or nothing: `parents_to_check` returns the keys to look up, `with_parents` adds the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kazoo.exceptions import (
    AuthFailedError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.exceptions import (
    BadVersionError as ZooKeeperBadVersionError,
)
from kazoo.exceptions import (
    NotEmptyError as ZooKeeperNotEmptyError,
)
from kazoo.protocol.serialization import int_struct, write_string

from cepheid_metadata.errors import (
    AccessDeniedError,
    BadVersionError,
    EphemeralParentError,
    KeyExistsError,
    MetadataError,
    NoSuchKeyError,
    NotEmptyError,
    StoreUnavailableError,
    ValueTooLargeError,
)
from cepheid_metadata.store import MAX_REQUEST_BYTES, Check, Create, Delete, Op, OpResult, Put
from cepheid_metadata.tree import ROOT, parent_of

ANY_VERSION = -1
SERVER_LIMIT_BYTES = 1_048_000  # jute.maxbuffer less one request's header: above it the server ends the connection
OP_OVERHEAD_BYTES = 64  # lengths, flags and the ACL of one operation of a transaction
Planned = tuple[Op, int | None]  # an operation and its place among the caller's; None: a parent that was added
Path = Callable[[str], str]
AclOf = Callable[[str], Any]
"""Returns the ACL of a key to be created; None: that of the connection."""


def send_ops(client: Any, ops: Sequence[Op], path: Path, acl_of: AclOf) -> Any:
    """Return kazoo's result for one operation or a transaction."""
    if len(ops) > 1:
        transaction = client.transaction()
        for op in ops:
            match op:
                case Create():
                    transaction.create(path(op.key), op.value, acl_of(op.key), ephemeral=op.ephemeral, sequence=op.sequential)
                case Put():
                    transaction.set_data(path(op.key), op.value, op.expected_version)
                case Delete():
                    transaction.delete(path(op.key), _version(op))
                case Check():
                    transaction.check(path(op.key), op.expected_version)
        return transaction.commit_async()
    (op,) = ops
    match op:
        case Create():
            return client.create_async(path(op.key), op.value, acl_of(op.key), ephemeral=op.ephemeral, sequence=op.sequential)
        case Put():
            return client.set_async(path(op.key), op.value, op.expected_version)
        case Delete():
            return client.delete_async(path(op.key), _version(op))
        case Check():
            transaction = client.transaction()  # there is no single check
            transaction.check(path(op.key), op.expected_version)
            return transaction.commit_async()


def _version(op: Delete) -> int:
    return ANY_VERSION if op.expected_version is None else op.expected_version


def answers_of(ops: Sequence[Op], answer: Any) -> list[Any]:
    """Return one answer of ZooKeeper per operation; some are exceptions if a transaction failed."""
    return list(answer) if len(ops) > 1 or isinstance(ops[0], Check) else [answer]


def result_of(op: Op, answer: Any, root: str) -> OpResult:
    match op:
        case Create():
            return str(answer)[len(root) :]
        case Put():
            return int(answer.version)
        case _:
            return None


def failing_index(answers: Sequence[Any]) -> int | None:
    """Return the operation that failed a transaction: the others are reported as rolled back or not executed."""
    failed = [index for index, answer in enumerate(answers) if isinstance(answer, Exception)]
    guilty = (i for i in failed if not isinstance(answers[i], RolledBackError | RuntimeInconsistency))
    return next(guilty, failed[0] if failed else None)


def needs_stat(error: Exception) -> bool:
    """Whether its message has numbers, which must be requested from ZooKeeper."""
    return isinstance(error, ZooKeeperBadVersionError | ZooKeeperNotEmptyError)


def error_of(op: Op, error: KazooException, stat: Any) -> MetadataError:
    """Return our error. `stat` is the key's state just afterwards; None: it does not exist, or could not be read."""
    key = op.key
    match error:
        case NoNodeError():
            missing = parent_of(key) if isinstance(op, Create) else key
            return NoSuchKeyError(f"{missing} does not exist", key=missing)
        case NodeExistsError():
            return KeyExistsError(f"{key} exists", key=key)
        case ZooKeeperBadVersionError():
            expected = None if isinstance(op, Create) else op.expected_version
            if stat is None or stat.version == expected:
                return BadVersionError(f"{key} had another version than {expected}", key=key, expected_version=expected)
            message = f"{key} has version {stat.version}, not {expected} as expected"
            return BadVersionError(message, key=key, version=stat.version, expected_version=expected)
        case ZooKeeperNotEmptyError():
            children = stat.children_count if stat is not None else 0
            return NotEmptyError(f"{key} has {children or 'some'} children", key=key, children=children)
        case NoChildrenForEphemeralsError():
            parent = parent_of(key)
            return EphemeralParentError(f"{parent} is ephemeral and cannot have children", key=parent)
        case _:
            return refusal_of(key, error, is_write=True)


def refusal_of(key: str, error: KazooException, *, is_write: bool) -> MetadataError:
    """Return our error for what any request may get."""
    if isinstance(error, NoAuthError | AuthFailedError | InvalidACLError):
        return AccessDeniedError(f"{key}: ZooKeeper denies access ({type(error).__name__})", key=key)
    # System errors, throttling, inconsistencies: problems of the server. Whether it wrote before it failed is unknown.
    message = f"{key}: ZooKeeper failed with {type(error).__name__}"
    return StoreUnavailableError(message, outcome_unknown=is_write, key=key)


class RemoveWatches:
    """A request that kazoo lacks (opcode removeWatches of ZooKeeper 3.5): the server drops this session's watch of a key.

    kazoo drops its own when it reads the answer, in its thread, so that one armed after this request stays.
    """

    type = 18
    CHILDREN, DATA = 1, 2  # ZooKeeper's Watcher.WatcherType

    def __init__(self, client: Any, path: str, kind: int) -> None:
        self._client, self._path, self._kind = client, path, kind

    def serialize(self) -> bytes:
        return bytes(write_string(self._path) + int_struct.pack(self._kind))

    def deserialize(self, _: bytes, offset: int) -> bool:
        watchers = self._client._child_watchers if self._kind == self.CHILDREN else self._client._data_watchers
        watchers.pop(self._path, None)
        return True

    def send(self) -> Any:
        result = self._client.handler.async_result()
        self._client._call(self, result)
        return result


def check_size(ops: Sequence[Op], root: str) -> None:
    """Raise ValueTooLargeError for a request that is too large for the server, with the overhead that `check_ops` does not
    count."""
    size_bytes = sum(
        OP_OVERHEAD_BYTES + len(root) + len(op.key) + (len(op.value) if isinstance(op, Create | Put) else 0) for op in ops
    )
    if size_bytes > SERVER_LIMIT_BYTES:
        message = f"a multi of {len(ops)} operations, first {ops[0].key}: about {size_bytes} bytes as ZooKeeper counts"
        raise ValueTooLargeError(f"{message}, the limit is {MAX_REQUEST_BYTES}", key=ops[0].key, size_bytes=size_bytes)


def parents_to_check(ops: Sequence[Op]) -> list[str]:
    """Return every key above a create, from the top."""
    parents: dict[str, None] = {}
    for op in ops:
        if isinstance(op, Create):
            key, above = op.key, []
            while (key := parent_of(key)) != ROOT:
                above.append(key)
            parents.update(dict.fromkeys(reversed(above)))
    return sorted(parents, key=lambda key: key.count("/"))


def with_parents(ops: Sequence[Op], is_there: Mapping[str, bool]) -> list[Planned]:
    """Return `ops` with creates of the parents that will be missing when they are needed."""
    there = dict(is_there)
    planned: list[Planned] = []
    for index, op in enumerate(ops):
        if isinstance(op, Create):
            for parent in parents_to_check([op]):
                if not there.get(parent, False):
                    planned.append((Create(parent, b""), None))
                    there[parent] = True
            there[op.key] = True
        elif isinstance(op, Delete):
            there[op.key] = False
        planned.append((op, index))
    return planned
