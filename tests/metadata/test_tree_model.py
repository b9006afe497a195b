"""Random histories of operations against a plain model, in memory and in RocksDB, singly and in groups."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_metadata import Check, Create, Delete, MemoryTree, MetadataError, Op, Put
from cepheid_metadata.rocks_tree import RocksTree

pytestmark = pytest.mark.slow

KEYS = st.sampled_from(["/a", "/b", "/a/x", "/a/y", "/a/x/1", "/a/x/2", "/a-x", "/b/x"])
VERSIONS = st.integers(0, 2)
OPS: st.SearchStrategy[Op] = st.one_of(
    st.builds(Create, KEYS, st.binary(max_size=3), st.booleans(), st.booleans()),
    st.builds(Create, KEYS, st.binary(max_size=3)),
    st.builds(Put, KEYS, st.binary(max_size=3), VERSIONS),
    st.builds(Delete, KEYS, st.none() | VERSIONS),
    st.builds(Check, KEYS, VERSIONS),
)
GROUPS = st.lists(st.lists(st.lists(OPS, min_size=1, max_size=4), min_size=1, max_size=6), max_size=12)


class Model:
    """The rules of store.py in the plainest words: a dict of (value, version, is ephemeral)."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, bool]] = {}
        self.sequences: dict[str, int] = {}

    def multi(self, ops: list[Op]) -> list[Any] | str:
        """The results, or the name of the error."""
        saved = dict(self.nodes), dict(self.sequences)
        results = []
        for op in ops:
            result = getattr(self, type(op).__name__.lower())(op)
            if isinstance(result, str) and result.endswith("Error"):
                self.nodes, self.sequences = saved
                return result
            results.append(result)
        return results

    def create(self, op: Create) -> str:
        parents = ["/".join(op.key.split("/")[:n]) for n in range(2, len(op.key.split("/")))]
        if any(self.nodes.get(parent, (b"", 0, False))[2] for parent in parents):
            return "EphemeralParentError"
        parent = op.key.rpartition("/")[0]
        number = self.sequences.get(parent, 0)
        key = f"{op.key}{number:010}" if op.sequential else op.key
        if key in self.nodes:
            return "KeyExistsError"
        for missing in parents:
            self.nodes.setdefault(missing, (b"", 0, False))
        self.nodes[key] = (op.value, 0, op.ephemeral)
        self.sequences[parent] = number + op.sequential
        return key

    def wrong(self, op: Put | Delete | Check) -> str | None:
        if op.key not in self.nodes:
            return "NoSuchKeyError"
        return None if op.expected_version in (None, self.nodes[op.key][1]) else "BadVersionError"

    def check(self, op: Check) -> str | None:
        return self.wrong(op)

    def put(self, op: Put) -> str | int:
        if wrong := self.wrong(op):
            return wrong
        _, version, ephemeral = self.nodes[op.key]
        self.nodes[op.key] = (op.value, version + 1, ephemeral)
        return version + 1

    def delete(self, op: Delete) -> str | None:
        if wrong := self.wrong(op):
            return wrong
        if any(key.startswith(op.key + "/") for key in self.nodes):
            return "NotEmptyError"
        del self.nodes[op.key]
        self.sequences.pop(op.key, None)
        return None

    def children(self, key: str) -> list[str]:
        prefix = key.rstrip("/") + "/"
        return sorted(found[len(prefix) :] for found in self.nodes if found.startswith(prefix) and "/" not in found[len(prefix) :])


def outcome(result: list[Any] | MetadataError) -> list[Any] | str:
    return type(result).__name__ if isinstance(result, MetadataError) else result


@given(GROUPS)
@settings(max_examples=100, deadline=None)
def test_the_memory_tree_is_the_model(groups: list[list[list[Op]]]) -> None:
    model, tree = Model(), MemoryTree()
    for ops in (ops for group in groups for ops in group):
        try:
            result: list[Any] | str = tree.apply(ops, session_id=1)
        except MetadataError as error:
            result = type(error).__name__
        assert result == model.multi(ops)
        assert {key: node[:2] for key, node in tree.nodes.items() if key != "/"} == {k: v[:2] for k, v in model.nodes.items()}
        for key in ["/", *model.nodes]:
            assert tree.names(key) == model.children(key)
            assert tree.nodes[key].children == len(model.children(key))


@given(GROUPS)
@settings(max_examples=40, deadline=None)
def test_groups_in_rocksdb_are_the_model(groups: list[list[list[Op]]]) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as directory:
        tree = RocksTree(Path(directory))
        tree.open()
        for group in groups:
            answers = tree.commit(group).answers
            assert [outcome(answer) for answer in answers] == [model.multi(ops) for ops in group]
            for key in ["/", *model.nodes]:
                assert tree.children(key) == model.children(key)
            for key, (value, version, _) in model.nodes.items():
                found = tree.get(key)
                assert found is not None
                assert (found.value, found.version) == (value, version)
        tree.close()
        tree.open()
        for key in [key for key, node in model.nodes.items() if node[2]]:
            del model.nodes[key]
        for key in ["/", *model.nodes]:
            assert tree.children(key) == model.children(key)
        tree.close()
