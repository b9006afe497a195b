"""After the last fault, seen by clients: every producer hears of all that it sent (V9, H1), every subscription gets what it is owed
(V7, H5), every topic opens and is served (V4); then all of it is read, and the history judged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cepheid_managed_ledger import ManagedLedgerConfig, Retention
from cepheid_wire import TopicName
from tests.simulation.checks.audit_waits import OPENED_S, SERVED_S, read_all, wait_for
from tests.simulation.workloads.ledgers import EXPECTED
from tests.simulation.world.sim_broker import SimBroker

if TYPE_CHECKING:
    from tests.simulation.world.world import World


async def audit_clients(world: World) -> None:
    clients = world.clients
    assert clients is not None
    if not world.orderly:  # brokers that believe to own everything never agree whose a topic is: one has to go
        others = list(world.brokers.values())[1:]
        for broker in others:
            world.start_outside(broker.stop(), f"stop {broker.name}")
        await wait_for(
            world, "V4", lambda: not any(broker.node.alive for broker in others), lambda: f"{others} do not stop", limit_s=OPENED_S
        )
    await wait_for(world, "V9", lambda: not clients.unanswered, lambda: f"never answered: {clients.unanswered}", limit_s=SERVED_S)
    if not world.orderly:
        # A broker that was deposed hears of it when it next writes: until then its consumers wait, for what it does not have.
        # Whoever crashed last comes back after five seconds at most.
        while not all(client.node.alive for client in clients.clients):  # noqa: ASYNC110 - machines tell nobody
            await asyncio.sleep(0.1)
        clients.publish_once_more()
        await wait_for(
            world, "V9", lambda: not clients.unanswered, lambda: f"never answered: {clients.unanswered}", limit_s=SERVED_S
        )
    await wait_for(
        world, "V7", lambda: not clients.owed(), lambda: f"these do not get what they are owed: {clients.owed()}", limit_s=SERVED_S
    )


async def judge_clients(world: World, auditor: SimBroker) -> None:
    """The brokers of the clients are gone; `auditor` opens every topic anew."""
    clients = world.clients
    assert clients is not None
    for topic in clients.topics:
        done = world.spawn(auditor.node, _read(world, auditor, topic), f"audit of {topic}")
        await wait_for(world, "V4", done.done, f"{topic} cannot be opened and read", limit_s=OPENED_S)
    clients.judge()


async def _read(world: World, auditor: SimBroker, topic: TopicName) -> None:
    clients, quorums = world.clients, world.quorums
    assert clients is not None
    config = ManagedLedgerConfig(
        quorums.ensemble_size, quorums.write_quorum, quorums.ack_quorum, Retention(time_ms=-1, size_bytes=-1)
    )
    while True:
        try:
            managed_ledger = await auditor.managed_ledgers.open(topic, config)
            clients.note_audit(topic, await read_all(managed_ledger))
            return
        except EXPECTED as error:
            world.history.note(f"audit of {topic}: {error!r}")
            await asyncio.sleep(0.5)
