"""A conditional write knows its outcome in the end: applied, not applied, or somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cepheid_managed_ledger.conditional_write import write
from cepheid_metadata import (
    BadVersionError,
    Check,
    Create,
    Delete,
    KeyExistsError,
    MemoryStore,
    MemoryTree,
    NoSuchKeyError,
    Op,
    OpResult,
    Put,
    StoreUnavailableError,
)
from tests.managed_ledger.losing_store import LosingStore
from tests.managed_ledger.topic_world import SETTINGS
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

QUICK = SETTINGS.model_copy(update={"metadata_timeout_s": 0.05, "metadata_retry_s": 0.001})


def fates(store: LosingStore, *each: str | None) -> None:
    """What happens to the first, second, … write; later ones go as usual."""
    remaining = list(each)
    store.lose = lambda _: remaining.pop(0) if remaining else None


async def with_chain(store: LosingStore) -> None:
    """/chain at version 0, /cursor at version 0, /going at version 0."""
    for key in ("/chain", "/cursor", "/going"):
        await MemoryStore(store._tree).create(key, b"old")


WRITES: dict[str, list[Op]] = {
    "put": [Put("/chain", b"new", 0)],
    "create": [Create("/chain/made", b"new")],
    "check and put": [Check("/chain", 0), Put("/cursor", b"new", 0)],
    "check and delete": [Check("/chain", 0), Delete("/going", 0)],
    "put and more": [Put("/chain", b"new", 0), Create("/cursor/made", b"new"), Delete("/going", 0)],
}


@pytest.mark.parametrize("ops", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("each", [(), ("answer",), ("request",), ("request", "request", "answer")], ids=str)
async def test_is_applied_exactly_once_whatever_gets_lost(ops: list[Op], each: tuple[str, ...]) -> None:
    store = LosingStore(MemoryTree())
    await with_chain(store)
    fates(store, *each)
    await write(store, ops, QUICK)
    nodes = store._tree.nodes
    for op in ops:
        if isinstance(op, Delete):
            assert op.key not in nodes
        elif isinstance(op, Put):
            assert (nodes[op.key].value, nodes[op.key].version) == (b"new", 1)
        else:
            assert op.key in nodes


class LateStore(LosingStore):
    """The first request arrives just before the second."""

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if self.lost:
            await self.deliver_late()
        return await super().multi(ops)


@pytest.mark.parametrize("ops", WRITES.values(), ids=WRITES)
async def test_a_first_attempt_that_arrives_late_is_our_own(ops: list[Op]) -> None:
    store = LateStore(MemoryTree())
    await with_chain(store)
    fates(store, "late")
    await write(store, ops, QUICK)
    assert max(node.version for node in store._tree.nodes.values()) <= 1


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (Put("/chain", b"new", 3), BadVersionError),
        (Put("/gone", b"new", 0), NoSuchKeyError),
        (Create("/chain", b"new"), KeyExistsError),
        (Check("/chain", 4), BadVersionError),
    ],
)
async def test_somebody_elses_change_is_a_conflict(op: Op, error: type[Exception]) -> None:
    store = LosingStore(MemoryTree())
    await with_chain(store)
    with pytest.raises(error):
        await write(store, [op, Put("/cursor", b"new", 0)], QUICK)
    assert store._tree.nodes["/cursor"].value == b"old"


async def test_a_conflict_after_a_lost_request_is_certain_while_the_other_has_our_version() -> None:
    store = LosingStore(MemoryTree())
    await with_chain(store)
    fates(store, "request")
    await MemoryStore(store._tree).put("/chain", b"somebody else's", 0)
    with pytest.raises(BadVersionError):
        await write(store, WRITES["put and more"], QUICK)


@pytest.mark.parametrize("fate", ["answer", "request"])
async def test_what_others_have_written_over_cannot_be_told_any_more(fate: str) -> None:
    """The answer to the first attempt is lost, and before we look the next owner has written: ours may lie below."""
    store = LosingStore(MemoryTree())
    await with_chain(store)
    fates(store, fate)
    slow_to_look = SETTINGS.model_copy(update={"metadata_retry_s": 0.1})
    writing = asyncio.ensure_future(write(store, WRITES["put"], slow_to_look))
    await wait_until(lambda: store.lost == 1)
    other = MemoryStore(store._tree)
    version = store._tree.nodes["/chain"].version
    for _ in range(2):
        version = await other.put("/chain", b"the next owner's", version)
    with pytest.raises(StoreUnavailableError) as caught:
        await writing
    assert caught.value.outcome_unknown


async def test_an_outcome_that_stays_unknown_is_told_as_unknown() -> None:
    store = LosingStore(MemoryTree())
    await with_chain(store)
    store.lose = lambda _: setattr(store, "unreachable", True) or "answer"
    with pytest.raises(StoreUnavailableError) as caught:
        await write(store, WRITES["put"], QUICK)
    assert caught.value.outcome_unknown


async def test_a_refused_write_certainly_did_not_happen() -> None:
    store = LosingStore(MemoryTree())
    store.unreachable = True
    started = asyncio.get_running_loop().time()
    with pytest.raises(StoreUnavailableError) as caught:
        await write(store, WRITES["put"], SETTINGS)
    assert not caught.value.outcome_unknown
    assert asyncio.get_running_loop().time() - started < SETTINGS.metadata_timeout_s, "told at once"
