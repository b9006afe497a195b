"""The metadata store: a tree of small versioned values, shared by processes. Three stores implement this one interface.

    create ──► version 0 ──put(expected 0)──► 1 ──put(expected 1)──► 2 …         a version names one state of one key
                                        put(expected 0) ──► BadVersionError      compare-and-set, the only way to change

Rules (ZooKeeper's behaviour, so that every store can implement them):
1. Every write is atomic and, once answered, durable. `multi` applies all of its operations or none.
2. `create` creates missing parents (empty value, persistent); they stay when their last child is deleted, and a `multi` that
   fails may leave them behind.
3. A key with children cannot be deleted; an ephemeral key has none, and vanishes with the session that created it.
4. A sequential key gets ten digits appended, higher than any given out before under that parent; numbers may be skipped.
5. A watch fires once: "something changed since you armed it". It carries no contents, merges changes and may be spurious:
   arm it, then read, then wait.
6. Reads see every write that was answered to this store before they were called. Writes of another process may
   appear later, unless `sync` was awaited first.
7. Keep a parent below 10,000 children: a listing is one reply, and replies have a size limit too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_metadata.errors import InvalidKeyError, ValueTooLargeError
from cepheid_metadata.watch import Watch

# ZooKeeper refuses requests above 1,048,575 bytes (jute.maxbuffer); the difference is room for its headers and ACLs.
MAX_REQUEST_BYTES = 1_000_000
MAX_KEY_CHARS = 8_192
_KEY = re.compile(r"(?:/[\x21-\x2e\x30-\x7e]+)+")


@dataclass(frozen=True, slots=True)
class Versioned:
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Create:
    """Create a key. Its result is the key created (which differs from `key` if sequential)."""

    key: str
    value: bytes
    ephemeral: bool = False
    sequential: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """Replace a value. Its result is the new version."""

    key: str
    value: bytes
    expected_version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key. `expected_version` None deletes any version. Its result is None."""

    key: str
    expected_version: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """Check that a key has this version. Its result is None."""

    key: str
    expected_version: int


Op = Create | Put | Delete | Check
OpResult = str | int | None


class SessionState(enum.Enum):
    """SUSPENDED: unreachable, the session may still live. LOST: it has ended, and ephemeral keys are deleted."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class StoreSecurity:
    """How a store is protected from other users. A store on this machine is protected."""

    user: bool = True
    """This process has a user of its own there."""
    private: bool = True
    """Only this user can access what it creates. Secrets always are private if it has a user."""
    encrypted: bool = True
    """Data sent to the store is encrypted, or crosses no network."""

    @property
    def plain_problem(self) -> str | None:
        """What is wrong for a process that is otherwise secured; None: nothing."""
        if self.encrypted:
            return None
        return "the connection to ZooKeeper is without TLS, so its user's password crosses the network in the clear: use zks://"


def security_of(store: MetadataStore) -> StoreSecurity:
    """Return how a store is protected: only a store that other machines can reach reports it."""
    found: StoreSecurity = getattr(store, "security", StoreSecurity())
    return found


async def watch_and_get(store: MetadataStore, key: str) -> tuple[Watch, Versioned | None]:
    """Arm a watch of `key`, then read it: no change after the read is missed. Raises as `watch` and `get` do.

    If the store can do both in one request, it is one.
    """
    if (together := getattr(store, "watch_and_get", None)) is not None:
        found: tuple[Watch, Versioned | None] = await together(key)
        return found
    watch = await store.watch(key)
    try:
        return watch, await store.get(key)
    except BaseException:
        watch.cancel()
        raise


class MetadataStore(Protocol):
    """A metadata store; see the rules above. All methods may raise StoreUnavailableError, SessionLostError, StoreClosedError,
    InvalidKeyError."""

    async def get(self, key: str) -> Versioned | None:
        """Return the value and its version; None: the key certainly does not exist."""

    async def exists(self, key: str) -> bool: ...

    async def children(self, key: str) -> list[str]:
        """Return the names (not keys) of the children, sorted. Raises NoSuchKeyError. `/` always exists."""

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        """Create a key; return it. Raises KeyExistsError, EphemeralParentError, ValueTooLargeError."""

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        """Replace a value; return the new version. Raises NoSuchKeyError, BadVersionError, ValueTooLargeError."""

    async def delete(self, key: str, expected_version: int | None) -> None:
        """Delete a key; None: any version. Raises NoSuchKeyError, BadVersionError, NotEmptyError."""

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        """Apply all operations in order, or none. Raises the error of the failing operation, with its index in `op_index`."""

    async def sync(self, key: str) -> None:
        """Make later reads see all writes at or below `key` from before this call, by any process."""

    async def watch(self, key: str) -> Watch:
        """Arm a watch, which fires when the key is created, changed or deleted. The key need not exist."""

    async def watch_children(self, key: str) -> Watch:
        """Arm a watch, which fires when a child or the key itself is created or deleted. The key need not exist."""

    @property
    def session_state(self) -> SessionState: ...

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call `on_session` in the loop at every change of state. The result ends the subscription."""

    async def aclose(self) -> None:
        """End the session. Running requests are finished or fail with StoreClosedError."""


def check_key(key: str) -> None:
    """Raise InvalidKeyError unless this is a key. Stricter than ZooKeeper: printable ASCII, as names are percent-encoded
    (keys.py)."""
    dotted = "/." in key and not {".", ".."}.isdisjoint(key.split("/"))
    if len(key) > MAX_KEY_CHARS or dotted or _KEY.fullmatch(key) is None:
        raise InvalidKeyError(f"not a key: {key[:200]!r} ({len(key)} characters)", key=key[:200])


def check_ops(ops: Sequence[Op]) -> None:
    """Raise InvalidKeyError or ValueTooLargeError for bad operations. The size limit applies to the whole request."""
    size_bytes = 0
    for op in ops:
        check_key(op.key)
        # ZooKeeper reads -1 as "any version": a blind write, which our callers must not make by accident.
        assert isinstance(op, Create) or op.expected_version is None or op.expected_version >= 0, f"{op.key}: bad version"
        size_bytes += len(op.key) + (len(op.value) if isinstance(op, Create | Put) else 0)
    if size_bytes > MAX_REQUEST_BYTES:
        where = ops[0].key if len(ops) == 1 else f"a multi of {len(ops)} operations, first {ops[0].key}"
        message = f"{where}: {size_bytes} bytes in one request, the limit is {MAX_REQUEST_BYTES}"
        raise ValueTooLargeError(message, key=ops[0].key, size_bytes=size_bytes)
