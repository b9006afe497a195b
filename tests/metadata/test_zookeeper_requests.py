"""Parents that a transaction adds, the failing operation of one, and its size as the server counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, RolledBackError, RuntimeInconsistency

from cepheid_metadata import Create, Delete, MetadataError, Op, Put, ValueTooLargeError
from cepheid_metadata.tree import ROOT, Node, TreeBatch, parent_of
from cepheid_metadata.zookeeper_requests import check_size, failing_index, parents_to_check, with_parents

NAMES = st.sampled_from("ab")
KEYS = st.lists(NAMES, min_size=1, max_size=4).map(lambda names: "".join(f"/{name}" for name in names))
OPS = st.lists(st.one_of(KEYS.map(lambda key: Create(key, b"x")), KEYS.map(Delete)), min_size=1, max_size=6)


def made(ops: list[Op], *there: str) -> list[str]:
    """What the plan creates or deletes, in order; parents that were added in brackets."""
    planned = with_parents(ops, dict.fromkeys(there, True))
    return [op.key if place is not None else f"[{op.key}]" for op, place in planned]


def test_only_missing_parents_are_added_before_whom_they_are_for() -> None:
    assert made([Create("/a", b"")]) == ["/a"]
    assert made([Create("/a/b/c", b"")]) == ["[/a]", "[/a/b]", "/a/b/c"]
    assert made([Create("/a/b/c", b"")], "/a", "/a/b") == ["/a/b/c"]
    assert made([Create("/a/x", b""), Create("/a/y", b"")]) == ["[/a]", "/a/x", "/a/y"]
    assert made([Create("/a", b""), Create("/a/b/c", b"")]) == ["/a", "[/a/b]", "/a/b/c"]
    assert made([Delete("/a/b"), Create("/a/b/c", b"")], "/a", "/a/b") == ["/a/b", "[/a/b]", "/a/b/c"]


def test_parents_are_asked_for_from_the_top() -> None:
    assert parents_to_check([Create("/a/b/c", b""), Create("/d", b""), Create("/e/f", b""), Delete("/g/h")]) == ["/a", "/e", "/a/b"]


class Tree:
    """The core of the embedded stores, without their making of parents."""

    def __init__(self, keys: list[str]) -> None:
        self.nodes = {ROOT: Node(b"", 0, 0, 0, 0)}
        self.apply([Create(key, b"") for key in keys])

    def apply(self, ops: list[Op], *, makes_parents: bool = True) -> None:
        batch = TreeBatch(self.nodes.get)
        for op in ops:
            if not makes_parents and isinstance(op, Create):
                parent = parent_of(op.key)
                assert batch.changed.get(parent, self.nodes.get(parent)) is not None, f"{parent} is missing for {op}"
            batch.apply([op], 0)
        for key, node in batch.changed.items():
            if node is None:
                self.nodes.pop(key, None)
            else:
                self.nodes[key] = node


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sets(KEYS, max_size=4), OPS)
def test_a_plan_does_what_a_store_that_makes_parents_does(keys: set[str], ops: list[Op]) -> None:
    expected, there = Tree([]), Tree([])
    for key in sorted(keys):
        for tree in (expected, there):
            if key not in tree.nodes:
                tree.apply([Create(key, b"")])
    try:
        expected.apply(ops)
    except MetadataError as error:
        with pytest.raises(type(error)):
            there.apply([op for op, _ in with_parents(ops, dict.fromkeys(there.nodes, True))])
        return
    there.apply([op for op, _ in with_parents(ops, dict.fromkeys(there.nodes, True))], makes_parents=False)
    assert there.nodes == expected.nodes


@pytest.mark.parametrize(
    ("answers", "index"),
    [
        (["/a", True], None),
        ([RolledBackError(), BadVersionError(), RuntimeInconsistency()], 1),
        ([NoNodeError(), RuntimeInconsistency()], 0),
        ([RolledBackError(), RolledBackError(), NodeExistsError()], 2),
        ([RuntimeInconsistency(), RuntimeInconsistency()], 0),  # the server does not say: some operation is named
    ],
)
def test_the_operation_that_failed_is_found(answers: list[object], index: int | None) -> None:
    assert failing_index(answers) == index


def test_a_transaction_of_many_small_operations_is_too_large_before_the_server_says_so() -> None:
    ops = [Put(f"/a/{n:05d}", b"", 0) for n in range(14_000)]
    check_size(ops[:10_000], "/root")
    with pytest.raises(ValueTooLargeError, match="a multi of 14000 operations, first /a/00000"):
        check_size(ops, "/root")
