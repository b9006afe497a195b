"""The effect of operations on the tree, without I/O: the core that the embedded stores share.

    stored tree ──load──► TreeBatch.apply(ops) ──► results at once, `changed` nodes to be stored, keys whose watches fire

One batch may have the operations of many callers: each is decided against the stored tree *and* the earlier ones in the
batch, so that one durable write serves them all. A failing operation has no effect on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cepheid_metadata.errors import (
    BadVersionError,
    EphemeralParentError,
    KeyExistsError,
    MetadataError,
    NoSuchKeyError,
    NotEmptyError,
)
from cepheid_metadata.store import Check, Create, Delete, Op, OpResult, Put

ROOT = "/"
NOBODY = 0  # owner of persistent nodes; session ids start at 1


class Node(NamedTuple):
    value: bytes
    version: int
    owner: int  # session id of an ephemeral node, else NOBODY
    children: int
    next_sequence: int  # for sequential children; never falls while the node exists


EMPTY_NODE = Node(b"", 0, NOBODY, 0, 0)
LoadNode = Callable[[str], Node | None]


def parent_of(key: str) -> str:
    return key[: key.rindex("/")] or ROOT


class TreeBatch:
    """Decides operations in order.

    `changed` maps keys to their new node, or to None if they are deleted; `stored` has the nodes that were looked up, including
    those of all changed keys, as they are before the batch.
    """

    def __init__(self, load: LoadNode) -> None:
        self._load = load
        self._staged: dict[str, Node | None] = {}
        self._fired: dict[str, None] = {}
        self._fired_children: dict[str, None] = {}
        self.stored: dict[str, Node | None] = {}
        self.changed: dict[str, Node | None] = {}
        self.watch_keys: dict[str, None] = {}
        self.watch_children_keys: dict[str, None] = {}

    def apply(self, ops: Sequence[Op], session_id: int) -> list[OpResult]:
        """Apply all of `ops` or none; raise the MetadataError of the first that fails."""
        results: list[OpResult] = []
        try:
            for op in ops:
                results.append(self._apply_one(op, session_id))  # noqa: PERF401 - `results` tells the failing index
        except MetadataError as error:
            if len(ops) > 1:
                error.op_index = error.facts["op_index"] = len(results)
            raise
        else:
            self.changed.update(self._staged)
            self.watch_keys.update(self._fired)
            self.watch_children_keys.update(self._fired_children)
            return results
        finally:
            self._staged.clear()
            self._fired.clear()
            self._fired_children.clear()

    def _apply_one(self, op: Op, session_id: int) -> OpResult:
        match op:
            case Create():
                return self._create(op, session_id)
            case Put():
                return self._put(op)
            case Delete():
                self._delete(op)
                return None
            case Check():
                self._expect(op.key, op.expected_version)
                return None

    def _create(self, op: Create, session_id: int) -> str:
        parent_key = parent_of(op.key)
        parent = self._make_parents(parent_key)
        key, next_sequence = op.key, parent.next_sequence
        if op.sequential:
            key, next_sequence = f"{key}{next_sequence:010d}", next_sequence + 1
        if self._find(key) is not None:
            raise KeyExistsError(f"{key} exists", key=key)
        self._staged[parent_key] = parent._replace(children=parent.children + 1, next_sequence=next_sequence)
        self._staged[key] = Node(op.value, 0, session_id if op.ephemeral else NOBODY, 0, 0)
        self._fired[key] = self._fired_children[key] = self._fired_children[parent_key] = None
        return key

    def _make_parents(self, key: str) -> Node:
        """Return the node at `key`, created with its own parents if missing."""
        if (node := self._find(key)) is not None:
            if node.owner != NOBODY:
                raise EphemeralParentError(f"{key} is ephemeral and cannot have children", key=key)
            return node
        if key == ROOT:
            return EMPTY_NODE
        parent_key = parent_of(key)
        parent = self._make_parents(parent_key)
        self._staged[parent_key] = parent._replace(children=parent.children + 1)
        self._staged[key] = EMPTY_NODE
        self._fired[key] = self._fired_children[key] = self._fired_children[parent_key] = None
        return EMPTY_NODE

    def _put(self, op: Put) -> int:
        node = self._expect(op.key, op.expected_version)
        self._staged[op.key] = node._replace(value=op.value, version=node.version + 1)
        self._fired[op.key] = None
        return node.version + 1

    def _delete(self, op: Delete) -> None:
        key, parent_key = op.key, parent_of(op.key)
        node = self._expect(key, op.expected_version)
        if node.children:
            raise NotEmptyError(f"{key} has {node.children} children", key=key, children=node.children)
        self._staged[key] = None
        parent = self._find(parent_key)
        assert parent is not None, f"{key} is stored without its parent"
        self._staged[parent_key] = parent._replace(children=parent.children - 1)
        self._fired[key] = self._fired_children[key] = self._fired_children[parent_key] = None

    def _expect(self, key: str, version: int | None) -> Node:
        node = self._find(key)
        if node is None:
            raise NoSuchKeyError(f"{key} does not exist", key=key)
        if version is not None and node.version != version:
            message = f"{key} has version {node.version}, not {version} as expected"
            raise BadVersionError(message, key=key, version=node.version, expected_version=version)
        return node

    def _find(self, key: str) -> Node | None:
        if key in self._staged:
            return self._staged[key]
        if key in self.changed:
            return self.changed[key]
        if key not in self.stored:
            self.stored[key] = self._load(key)
        return self.stored[key]
