"""Scenarios of owners that depose each other. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cepheid_broker.managed_ledger import ManagedLedgerConfig, State
from cepheid_metadata import Op, Position, keys
from cepheid_wire import TopicName
from tests.simulation.script import Script
from tests.simulation.workload_ledgers import Quorums
from tests.simulation.workload_topics import TopicWorkload
from tests.support import wait_until

TOPIC = TopicName.parse("persistent://public/default/holes")

# 8. cas-lost-answer


def test_8_cas_lost_answer() -> None:
    """A rollover is recorded, the answer is lost, and while its owner sleeps the next one takes over: no ledger is deleted."""

    async def course(script: Script) -> None:
        def falls_asleep(ops: Sequence[Op]) -> bool:
            rolls_over = any(op.key.startswith(f"{keys.CHAINS_KEY}/") for op in ops)
            if rolls_over:
                script.east.node.pause()
            return rolls_over

        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))  # holds retention
        script.east.store.loses_answer = falls_asleep
        while not script.east.node.paused:  # some go to the next ledger, before it is recorded
            script.east.node.context.run(ledger.append, [b"an entry"], lambda position, count: None)
            await asyncio.sleep(0.0005)
        rolled_to = script.history.chains[keys.chain_key(TOPIC)].ledgers[-1].ledger_id

        successor = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        script.east.node.resume()
        await wait_until(lambda: ledger.state is State.FAILED)
        await asyncio.sleep(5)  # whatever it does with what it believes to be its own
        assert rolled_to in script.history.ledgers
        read = await script.at(script.west, successor.read(Position(rolled_to, 0), max_entries=1, max_bytes=100))
        assert read[0].ledger_id == rolled_to

    Script(1).run(course)


# Seed 0x2793: a repetition at a deposed owner


def test_a_repetition_at_a_deposed_owner_claims_nothing() -> None:
    """East has everything acknowledged and saved; west takes the topic over and resets the cursor; east, whom nobody told, is
    given the same acknowledgements again, has nothing to save for them, and says so. The reset stands, and no rule is broken."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        model = workload.model
        deposed = await script.at(script.east, workload.open(script.east))
        assert deposed is not None
        await script.at(script.east, workload.create_cursor(deposed, "sub"))
        script.east.node.context.run(workload.append, ("east", 1), deposed)
        await wait_until(lambda: bool(model.stored))
        cursor = deposed.cursors["sub"]

        async def acknowledge_and_save() -> None:
            for _ in range(30):
                workload.acknowledge(cursor)
            await workload.save(cursor)

        await script.at(script.east, acknowledge_and_save())
        assert all(model.cursors["sub"].must.covers(position) for position in model.stored)

        reigning = await script.at(script.west, workload.open(script.west))
        assert reigning is not None
        await script.at(script.west, workload.reset(reigning, reigning.cursors["sub"]))
        start = reigning.cursors["sub"].first_unacknowledged()
        await script.at(script.east, acknowledge_and_save())
        assert cursor.backlog_entries == 0, "it looks so to east"

        script.west.crash()
        script.west.start()
        reopened = await script.at(script.west, workload.open(script.west))
        assert reopened is not None
        assert reopened.cursors["sub"].first_unacknowledged() == start

    Script(1).run(course)
