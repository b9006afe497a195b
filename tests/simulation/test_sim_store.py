"""The simulated metadata store: reads of the past stay within what a session may see; outages and sessions are heard in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cepheid_metadata import BadVersionError, SessionState, StoreUnavailableError
from tests.simulation.faults import CALM, FaultPlan
from tests.simulation.node import Node
from tests.simulation.sim_store import SimStore, SimTree
from tests.simulation.virtual_loop import run_simulated

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


def test_a_paused_process_hears_of_its_session_when_it_resumes() -> None:
    async def run() -> None:
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

    run_simulated(run())


async def store_call(node: Node, call: Coroutine[Any, Any, Any]) -> None:
    await node.start(call, name="call")
