"""What is asked of a cluster that has nothing to do any more: journals are let go of and space comes back (V6), nothing waits or
is counted as under way, and budgets are whole (V9); and of a topic that is terminated in the middle of its appends (M10)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.checks.audit_waits import RESUMED_S, wait_for
from tests.simulation.checks.disk import logs_without_reference, marked_sequence, orphaned_blocks
from tests.simulation.checks.history import History

if TYPE_CHECKING:
    from tests.simulation.workloads.topics import TopicWorkload
    from tests.simulation.world.sim_broker import SimBroker
    from tests.simulation.world.world import World

CHECKPOINT_S = 5.0
"""Several of the bookies' intervals (`cluster.py`)."""
_SLOW_JOURNAL_S = (0.9, 1.3)
"""More than the interval of checkpoints, less than the timeout of an add."""
COLLECTED_S = 30.0
"""A deleted ledger goes after two looks at metadata, its log with the next one."""
GIVEN_BACK_S = 15.0
"""What was read ahead and nobody fetched is dropped after five seconds, when the topic is next looked after."""


async def check_rest(world: World, auditor: SimBroker) -> None:
    """Bookies that serve, clients that are gone."""
    bookies = [bookie for bookie in world.bookies.values() if bookie.serving]
    await _append_slowly(world, auditor)
    await wait_for(
        world,
        "V9",
        lambda: not any(_under_way(bookie.bookie) for bookie in bookies),
        lambda: f"still under way: {[(bookie.id, _under_way(bookie.bookie)) for bookie in bookies]}",
        limit_s=GIVEN_BACK_S,
    )
    await check_given_back(world, [auditor])
    await wait_for(
        world,
        "V6",
        lambda: not any(map(unmarked_batches, bookies)),
        lambda: f"marks stay behind: {[(bookie.id, unmarked_batches(bookie)) for bookie in bookies]}",
        limit_s=CHECKPOINT_S,
    )
    await wait_for(
        world,
        "V6",
        lambda: not any(dead_logs(bookie) for bookie in bookies),
        lambda: f"logs without a reference stay: {[(bookie.id, dead_logs(bookie)) for bookie in bookies]}",
        limit_s=COLLECTED_S,
    )
    for bookie in bookies:
        orphans = orphaned_blocks(bookie.index)
        world.history.check("V6", not orphans, lambda b=bookie, found=orphans: f"{b.id} has blocks of deleted ledgers: {found}")


async def check_given_back(world: World, brokers: Sequence[SimBroker]) -> None:
    """Brokers whose work is done have every byte back in their budgets and windows. Those that are down have none."""

    def living() -> list[SimBroker]:
        return [broker for broker in brokers if broker.node.alive]

    await wait_for(
        world,
        "V9",
        lambda: not any(map(_not_given_back, living())),
        lambda: f"not given back: {[(broker.process, _not_given_back(broker)) for broker in living()]}",
        limit_s=GIVEN_BACK_S,
    )


def _not_given_back(broker: SimBroker) -> list[str]:
    client, topics = broker.client, broker.managed_ledgers
    counters = {
        "kept for newcomers": client.ensemble_change_statistics().kept_bytes,
        "windows of bookies": sum(channel.waiting_bytes for channel in client.statistics().values()),
        "catch-up reads": topics.catch_up.used_bytes,
        "appends": sum(topic._appender.waiting_bytes for topic in topics.opened.values() if topic._appender is not None),
    }
    if broker.ready:
        counters["publishing"] = broker.broker._publish_budget.used_bytes
        counters["read ahead"] = broker.broker.topics.dispatch.budget.used_bytes
    return [f"{name} {count}" for name, count in counters.items() if count]


async def _append_slowly(world: World, auditor: SimBroker) -> None:
    """The last that journals hear is what they took long for, and no later add comes to the help of a checkpoint that was begun
    too early."""
    for bookie in world.bookies.values():
        bookie.slow_thread, bookie.slow_thread_s = "journal", _SLOW_JOURNAL_S
    done = world.spawn(auditor.node, world.ledger_workload.append_once(auditor), "a last append")
    await wait_for(world, "V3", done.done, "a ledger cannot be made, or does not take an append", limit_s=RESUMED_S)
    for bookie in world.bookies.values():
        bookie.slow_thread = ""


def unmarked_batches(bookie: Any) -> int:
    """Of its journal."""
    return 0 if bookie.bookie is None else bookie.bookie._journal.durable.sequence - marked_sequence(bookie.disks)


def _under_way(bookie: Any) -> list[str]:
    """What a bookie still counts, though everything was answered."""
    counters = {
        "adds waiting": bookie._admission.waiting_bytes,
        "background adds waiting": bookie._admission.background.waiting_bytes,
        "background adds in the journal": bookie._pace.in_journal_bytes,
        "journal": bookie._journal.queued_bytes,
        "reads": bookie._open_reads,
        "reading": bookie._reader._budget.used_bytes,
    }
    return [f"{name} {count}" for name, count in counters.items() if count]


def dead_logs(bookie: Any) -> list[str]:
    current = bookie.bookie._logs.current_log_id if bookie.bookie is not None else 0
    return logs_without_reference(bookie.disks, bookie.index, current)


async def check_terminate(history: History, workload: TopicWorkload, auditor: SimBroker, managed_ledger: Any) -> None:
    """M10. Raises what terminating raises; then the topic is to be opened again."""
    if not managed_ledger.is_terminated:
        opening = (auditor.process, managed_ledger.chain.epoch)
        under_way = [workload.append(opening, managed_ledger) for _ in range(3)]
        ended = asyncio.create_task(managed_ledger.terminate())
        for _ in range(20):  # turns of the loop, in which it begins
            await asyncio.sleep(0)
        late = workload.append(opening, managed_ledger)
        await ended
        answered = all(told.done() for told in under_way)
        history.check("M10", answered, f"{workload.topic} is terminated, and not all of its appends are answered")
        history.check("M10", not await late, f"{workload.topic} takes an append while it is terminated")
    after = workload.append((auditor.process, managed_ledger.chain.epoch), managed_ledger)
    history.check("M10", not await after, f"{workload.topic} takes an append after it was terminated")
    recorded = history.chains[workload.model.key].terminated_at  # and that it is the end, was checked at its commit
    history.check(
        "M10",
        recorded is not None and managed_ledger.last_confirmed == recorded,
        lambda: f"{workload.topic} is terminated at {recorded}: {managed_ledger!r}",
    )
