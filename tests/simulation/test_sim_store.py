"""The simulated metadata store: reads of the past stay within what a session may see; outages and sessions are heard in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from cepheid_metadata import BadVersionError, NoSuchKeyError, SessionLostError, SessionState, StoreUnavailableError
from tests.simulation.faults.plan import CALM, FaultPlan
from tests.simulation.world.node import Node
from tests.simulation.world.sim_store import SimStore, SimTree
from tests.simulation.world.virtual_loop import run_simulated

pytestmark = pytest.mark.virtual_time

A = "/some/key"


def play(script: Callable[[SimStore, SimStore], Coroutine[Any, Any, None]]) -> None:
    """With the stores of two processes; the second reads a second behind."""

    async def run() -> None:
        tree, plan = SimTree(), FaultPlan("sim store", CALM)
        ahead, behind = SimStore(tree, plan, "ahead"), SimStore(tree, plan, "behind")
        behind.lag_s = 1.0
        await script(ahead, behind)

    run_simulated(run())


async def value_of(store: SimStore) -> bytes | None:
    found = await store.get(A)
    return None if found is None else found.value


def test_a_follower_shows_the_past_until_it_has_caught_up() -> None:
    async def script(ahead: SimStore, behind: SimStore) -> None:
        await ahead.create(A, b"one")
        assert await value_of(behind) is None
        await asyncio.sleep(1.1)
        await ahead.put(A, b"two", 0)
        assert await value_of(behind) == b"one"
        assert await value_of(ahead) == b"two"
        await asyncio.sleep(1.1)
        assert await value_of(behind) == b"two"

    play(script)


def test_a_follower_lists_the_past_too() -> None:
    async def script(ahead: SimStore, behind: SimStore) -> None:
        await ahead.create(A, b"one")
        with pytest.raises(NoSuchKeyError):
            await behind.children("/some")
        await asyncio.sleep(1.1)
        await ahead.create("/some/other/key", b"one")
        await ahead.delete(A, 0)
        assert await behind.children("/some") == ["key"]
        assert await ahead.children("/some") == ["other"]
        await asyncio.sleep(1.1)
        assert await behind.children("/some") == ["other"]
        assert await behind.children("/some/other") == ["key"]
        await ahead.delete("/some/other/key", 0)
        await behind.sync("/some")
        assert await behind.children("/some/other") == []

    play(script)


def test_who_lists_without_a_session_is_refused_behind_too() -> None:
    async def script(ahead: SimStore, behind: SimStore) -> None:
        await ahead.create(A, b"one")
        behind.expire()
        with pytest.raises(SessionLostError):
            await behind.children("/some")

    play(script)


@pytest.mark.parametrize("how", ["sync", "refused write", "watch"])
def test_what_a_session_has_seen_it_sees(how: str) -> None:
    async def script(ahead: SimStore, behind: SimStore) -> None:
        await ahead.create(A, b"one")
        await asyncio.sleep(1.1)
        watch = await behind.watch(A)
        await ahead.put(A, b"two", 0)
        if how == "sync":
            await behind.sync(A)
        elif how == "watch":
            await watch.wait()
        else:
            with pytest.raises(BadVersionError):
                await behind.put(A, b"three", 0)
        assert await value_of(behind) == b"two"

    play(script)


def test_an_outage_refuses_and_leaves_what_is_under_way_unknown() -> None:
    async def script(ahead: SimStore, behind: SimStore) -> None:
        await ahead.create(A, b"one")
        heard: list[SessionState] = []
        ahead.subscribe(heard.append)
        ahead.loses_answer = lambda ops: ahead._tree.begin_outage() is None  # once it is applied
        with pytest.raises(StoreUnavailableError) as raised:
            await ahead.multi([])
        assert raised.value.outcome_unknown
        with pytest.raises(StoreUnavailableError) as raised:
            await ahead.put(A, b"two", 0)
        assert not raised.value.outcome_unknown
        ahead._tree.end_outage()
        assert await value_of(ahead) == b"one"
        assert heard == [SessionState.SUSPENDED, SessionState.CONNECTED]

    play(script)


async def test_a_paused_process_hears_of_its_session_when_it_resumes() -> None:
    node, tree, heard = Node("east"), SimTree(), list[SessionState]()
    store = node.context.run(SimStore, tree, FaultPlan("sim store", CALM), "east")
    store.subscribe(heard.append)
    await store_call(node, store.create(A, b"", ephemeral=True))
    node.pause()
    store.expire()
    await asyncio.sleep(5)
    assert (heard, store.session_state, tree.nodes.get(A)) == ([], SessionState.CONNECTED, None)
    node.resume()
    await asyncio.sleep(0.1)
    assert heard == [SessionState.LOST]
    store.renew()
    await asyncio.sleep(0.1)
    assert store.session_state is SessionState.CONNECTED


async def store_call(node: Node, call: Coroutine[Any, Any, Any]) -> None:
    await node.start(call, name="call")


def with_faults(**faults: Any) -> tuple[SimTree, SimStore]:
    tree = SimTree()
    return tree, SimStore(tree, FaultPlan("sim store", replace(CALM, **faults)), "east")


async def test_a_late_watch_tells_of_many_changes_at_once() -> None:
    _, store = with_faults(late_watch=1.0, late_watch_s=(2.0, 2.0))
    watches = [await store.watch(key) for key in (A, "/other/key")]
    await store.create(A, b"one")
    await store.create("/other/key", b"one")
    await asyncio.sleep(1.5)
    assert not any(watch.has_fired for watch in watches)
    await asyncio.sleep(1)
    assert all(watch.has_fired for watch in watches)
    assert store._plan.counts == {"watch late": 1, "watches merged": 1}


async def test_a_missed_watch_is_found_out_with_the_next_connection() -> None:
    _, store = with_faults(missed_watch=1.0, missed_watch_s=(3.0, 3.0))
    heard: list[SessionState] = []
    store.subscribe(heard.append)
    watch = await store.watch(A)
    await store.create(A, b"one")
    await asyncio.sleep(2.5)
    assert (watch.has_fired, heard) == (False, [])
    await asyncio.sleep(1)
    assert (watch.has_fired, heard) == (True, [SessionState.SUSPENDED, SessionState.CONNECTED])
    assert store._plan.ends_s >= 1_003  # loop time: peace waits for it


async def test_changes_that_nobody_watches_are_no_news() -> None:
    _, store = with_faults(missed_watch=1.0, missed_watch_s=(3.0, 3.0))
    await store.watch(A)
    await store.create("/other/key", b"one")
    assert store._plan.counts == {}


@pytest.mark.deadline(600)
async def test_while_a_leader_is_elected_nothing_is_answered_and_then_everything_or_nothing_is_known() -> None:
    outcomes: set[str] = set()
    for number in range(30):
        tree, plan = SimTree(), FaultPlan(f"election {number}", CALM)
        store = SimStore(tree, plan, "east")
        tree.begin_election()
        writing = asyncio.ensure_future(store.create(A, b"one"))
        await asyncio.sleep(5)
        assert tree.electing
        assert not writing.done()
        tree.end_election(plan)
        await asyncio.wait([writing])
        outcomes.add("failed" if isinstance(writing.exception(), StoreUnavailableError) else "done")
        await asyncio.sleep(1)
        assert store.session_state is SessionState.CONNECTED
    assert outcomes == {"failed", "done"}


async def test_a_write_takes_effect_when_there_is_a_leader_even_if_nobody_waits_for_it_any_more() -> None:
    tree, plan = SimTree(), FaultPlan("election", CALM)
    store, other, gone = (SimStore(tree, plan, name) for name in ("east", "west", "north"))
    tree.begin_election()
    for each, key in ((store, "/given/up"), (gone, "/session/over")):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await each.create(key, b"one")
    gone.expire()
    later = asyncio.ensure_future(store.put("/given/up", b"two", 0))
    await asyncio.sleep(3)
    tree.stores.clear()  # so that no connection breaks
    tree.end_election(plan)
    assert await later == 1, "requests of a session are served in the order they were made"
    assert await other.get("/session/over") is None


async def test_two_slownesses_do_not_multiply() -> None:
    tree, store = with_faults(metadata_delay_s=(0.003, 0.003))
    tree.slow, store.slow = 300.0, 40.0
    began = asyncio.get_running_loop().time()
    await store.create(A, b"one")
    assert asyncio.get_running_loop().time() - began < 2.0


async def test_a_process_that_stopped_in_order_has_no_session_to_abandon() -> None:
    tree, store = with_faults()
    await store.create(A, b"", ephemeral=True)
    await store.aclose()
    store.abandon()
    assert A not in tree.nodes
