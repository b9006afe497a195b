"""Random histories on a real ZooKeeper server beside the store in memory: the same answers and errors, the same watches fire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cepheid_metadata import Check, Create, Delete, MemoryStore, MemoryTree, MetadataError, MetadataStore, NoSuchKeyError, Op, Put
from cepheid_metadata.zookeeper_store import ZooKeeperStore
from cepheid_ports import Ports
from tests.support import run_async
from tests.zookeeper_support import new_chroot, shared_zookeeper

pytestmark = pytest.mark.slow

KEYS = ("/a", "/b", "/a/x", "/a/y", "/a/x/1", "/a/x/2", "/a-x", "/b/x")
KEY, VERSION = st.sampled_from(KEYS), st.integers(0, 2)
OP: st.SearchStrategy[Op] = st.one_of(
    st.builds(Create, KEY, st.binary(max_size=3), st.booleans()),
    st.builds(Create, KEY, st.binary(max_size=3)),
    st.builds(Put, KEY, st.binary(max_size=3), VERSION),
    st.builds(Delete, KEY, st.none() | VERSION),
    st.builds(Check, KEY, VERSION),
)
HISTORY = st.lists(st.lists(OP, min_size=1, max_size=4), max_size=10)


async def step(store: MetadataStore, ops: list[Op]) -> tuple[Any, list[bool]]:
    """What `ops` answered, and which of the watches of all keys fired."""
    watches = [await store.watch(key) for key in KEYS] + [await store.watch_children(key) for key in KEYS]
    try:
        answer: Any = await store.multi(ops)
    except MetadataError as error:
        answer = type(error), error.op_index
    fired = [watch.has_fired for watch in watches]
    for watch in watches:
        watch.cancel()
    return answer, fired


async def contents(store: MetadataStore) -> dict[str, Any]:
    found: dict[str, Any] = {"/": await store.children("/")}
    for key in KEYS:
        try:
            found[key] = await store.get(key), await store.children(key)
        except NoSuchKeyError:
            found[key] = None
    return found


@given(st.lists(HISTORY, min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_zookeeper_is_the_model(sessions: list[list[list[Op]]]) -> None:
    async def main() -> None:
        tree, root = MemoryTree(), new_chroot()
        for history in sessions:  # ephemeral keys end with each
            model = MemoryStore(tree)
            store = await ZooKeeperStore.open([shared_zookeeper().address], Ports(), root=root)
            try:
                assert await contents(store) == await contents(model)
                for ops in history:
                    assert await step(store, ops) == await step(model, ops)
                assert await contents(store) == await contents(model)
            finally:
                await store.aclose()
                await model.aclose()

    run_async(main())
