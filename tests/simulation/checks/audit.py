"""After the last fault: everything comes to rest within bounds (V1-V3, V9), what is stored is what was promised
(L5-L8, S2), and nothing is left behind (M8)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cepheid_metadata import UNDELETED, LedgerState, Position, keys
from cepheid_wire import TopicName
from tests.simulation.checks.audit_clients import audit_clients, judge_clients
from tests.simulation.checks.audit_rest import check_given_back, check_rest, check_terminate
from tests.simulation.checks.audit_waits import (
    OPENED_S,
    RECOVERED_S,
    REPAIRED_S,
    RESUMED_S,
    SERVED_S,
    STARTED_S,
    read_all,
    wait_for,
)
from tests.simulation.checks.copies import check_copies
from tests.simulation.checks.history import History
from tests.simulation.checks.storage import check_promises, promises_of
from tests.simulation.checks.topic import check_all_entries
from tests.simulation.workloads.ledgers import EXPECTED
from tests.simulation.world.sim_broker import SimBroker

if TYPE_CHECKING:
    from tests.simulation.world.world import World


async def audit(world: World) -> None:
    history = world.history
    await wait_for(
        world,
        "V3",
        lambda: all(pending.count == 0 for process, pending in world.ledger_workload.pending.items() if _lives(world, process)),
        "a writer with bookies around it does not resume",
        limit_s=RESUMED_S,
    )
    if world.stores:
        await _rest(world)
    if world.clients is not None:
        await audit_clients(world)
    await check_given_back(world, list(world.brokers.values()))
    for broker in world.brokers.values():
        if broker.node.alive:
            broker.crash()
    left = [ledger_id for ledger_id, record in history.ledgers.items() if record.state is LedgerState.IN_RECOVERY]
    auditor = world.new_broker("auditor")
    auditor.start()
    if world.stores:
        done = world.spawn(auditor.node, _read_topic(world, auditor), "audit of topics")
        await wait_for(world, "V4", done.done, "some topic cannot be opened, read and written", limit_s=OPENED_S)
        done = world.spawn(auditor.node, _read_deduplicated(world, auditor), "audit of deduplication")
        await wait_for(world, "V4", done.done, "the topic with deduplication cannot be opened and read", limit_s=OPENED_S)
    if world.clients is not None:
        await judge_clients(world, auditor)
    await wait_for(
        world, "M8", lambda: not unnamed_ledgers(history), lambda: f"nothing names the ledgers {unnamed_ledgers(history)}"
    )
    if left:  # their recoverers are dead; those of topics the auditor has opened
        world.spawn(auditor.node, _end_recoveries(world, auditor, left), "audit of recoveries")
        await wait_for(
            world,
            "V2",
            lambda: not _in_recovery(history, left),
            lambda: f"in recovery stay {_in_recovery(history, left)}",
            limit_s=RECOVERED_S,
        )
    done = world.spawn(auditor.node, _read_ledgers(world, auditor), "audit of ledgers")
    await wait_for(world, "V1", done.done, "some ledger cannot be recovered and read", limit_s=RECOVERED_S)
    if world.repairs is not None:
        repairs = world.repairs
        await wait_for(world, "V5", lambda: not repairs.left(), lambda: f"not whole: {repairs.left()}", limit_s=REPAIRED_S)
        repairs.stop()
    bookies = list(world.bookies.values())  # one may still have ended of what had struck it before
    await wait_for(
        world,
        "V8",
        lambda: all(bookie.serving for bookie in bookies),
        lambda: f"not everybody serves: {bookies}",
        limit_s=STARTED_S,
    )
    for bookie in bookies:
        assert bookie.bookie is not None
        promises = promises_of(history.bookie(bookie.id))
        await check_promises(bookie.id, bookie.id, bookie.bookie, history, promises, bookie.has_decayed)
    for record in history.ledgers.values():
        check_copies(history, record, "in the end")
    await check_rest(world, auditor)


async def _rest(world: World) -> None:
    """Workloads that use storage directly come to their end."""
    for broker in world.brokers.values():
        for workload in (world.ledger_workload, world.topic_workload):
            pending = workload.pending.get(broker.process)
            if pending is not None:
                await wait_for(
                    world,
                    "V9",
                    lambda pending=pending: pending.count == 0,
                    f"appends of {broker.process} are never answered",
                    limit_s=SERVED_S,
                )
    dedup = world.dedup_workload
    await wait_for(world, "V9", lambda: dedup.is_quiet, f"messages are sent again and again: {dedup.clients}", limit_s=SERVED_S)
    if world.topic_workload.owners is not None:
        done = world.start_outside(_find_owner(world), "look up")
        await wait_for(world, "V4", done.done, f"nobody comes to own {world.topic_workload.topic}", limit_s=OPENED_S)


async def _find_owner(world: World) -> None:
    """Until exactly one of the brokers says that it is here."""
    owners, topic = world.owners, world.topic_workload.topic
    brokers = list(world.brokers.values())
    while len(owners.owners(brokers, topic)) != 1:
        for broker in brokers:
            await broker.node.start(owners.is_here(broker, topic), name="look up")
        await asyncio.sleep(0.1)


async def _read_topic(world: World, auditor: SimBroker) -> None:
    workload = world.topic_workload
    while True:
        managed_ledger = await workload.open(auditor)
        if managed_ledger is None:
            await asyncio.sleep(0.5)
            continue
        try:
            entries: list[tuple[Position, bytes]] = []
            position = managed_ledger.first_position()
            while groups := await managed_ledger.read(position, max_entries=100, max_bytes=100_000):
                entries += workload.check_groups(managed_ledger, groups)
                position = Position(entries[-1][0].ledger_id, entries[-1][0].entry_id + 1)
            check_all_entries(world.history, workload.model, entries)
            was_terminated = managed_ledger.is_terminated
            if was_terminated or await workload.append((auditor.process, 0), managed_ledger):
                await check_terminate(world.history, workload, auditor, managed_ledger)
                if was_terminated:
                    return
                await workload.close(managed_ledger)  # it is terminated for whoever opens it next, too
        except EXPECTED as error:
            world.history.note(f"audit of topics: {error!r}")
        await asyncio.sleep(0.5)


async def _read_deduplicated(world: World, auditor: SimBroker) -> None:
    workload = world.dedup_workload
    while True:
        try:
            managed_ledger = await auditor.managed_ledgers.open(workload.topic, workload.config)
            workload.check(await read_all(managed_ledger))
            return
        except EXPECTED as error:
            world.history.note(f"audit of deduplication: {error!r}")
            await asyncio.sleep(0.5)


def _in_recovery(history: History, ledger_ids: Sequence[int]) -> list[int]:
    """By the committed record; what is deleted was closed before (L13)."""
    records = history.ledgers
    return [each for each in ledger_ids if each in records and not records[each].is_closed]


async def _end_recoveries(world: World, auditor: SimBroker, ledger_ids: Sequence[int]) -> None:
    while left := _in_recovery(world.history, ledger_ids):
        for ledger_id in left:
            await world.ledger_workload.recover(auditor, ledger_id)
        await asyncio.sleep(0.5)


async def _read_ledgers(world: World, auditor: SimBroker) -> None:
    history = world.history
    for ledger_id in list(history.ledgers):
        while ledger_id in history.ledgers:  # else its topic has deleted it meanwhile
            try:
                end = await auditor.ledgers.recover(ledger_id)
                reader = await auditor.ledgers.open_reader(ledger_id)
                read = 0
                while read <= end.last_entry_id:
                    groups = await reader.read(read, end.last_entry_id, max_bytes=1 << 20)
                    read = groups[-1].last_entry_id + 1
                break
            except EXPECTED as error:
                history.note(f"audit of ledger {ledger_id}: {error!r}")
                await asyncio.sleep(0.5)


def _lives(world: World, process: str) -> bool:
    return any(broker.node.alive and broker.process == process for broker in world.brokers.values())


def unnamed_ledgers(history: History) -> list[int]:
    """Made for a topic in an earlier opening of it, and neither in its chain nor in the record of a cursor."""
    of_cursors = [record.cursor_ledger_id for record in history.cursor_records.values()]
    unnamed = []
    for ledger_id, record in history.ledgers.items():
        topic, made_in = record.custom.get("topic"), (record.custom.get("incarnation"), int(record.custom.get("epoch", 0)))
        chain = None if topic is None else history.chains.get(keys.chain_key(TopicName.parse(topic)))
        if chain is None or made_in[0] != chain.incarnation or made_in[1] >= chain.epoch or UNDELETED in record.custom:
            continue
        if ledger_id not in [ledger.ledger_id for ledger in chain.ledgers] and ledger_id not in of_cursors:
            unnamed.append(ledger_id)
    return unnamed
