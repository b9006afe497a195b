"""Courses of events that are known to lose data, each as a short script on a calm cluster. The checks of every answer and
commit run as in random worlds; what a script asserts beside is what it is about. Numbers and names: docs/invariants.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import pytest

from cepheid_bookie import BookieSettings
from cepheid_broker.deduplication import ProducerSequence
from cepheid_broker.managed_ledger import ManagedLedgerConfig, ManagedLedgerSettings, State
from cepheid_ledger import LedgerFencedError
from cepheid_ledger.master_key import master_key_of
from cepheid_metadata import Fragment, Op, Position, keys, ledger_records
from cepheid_rpc import ReadRequest
from cepheid_wire import TopicName
from tests.simulation.audit import read_all
from tests.simulation.cluster import SimBookie, SimBroker
from tests.simulation.faults import CALM
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.sim_connection import SimConnections
from tests.simulation.stage import Stage
from tests.simulation.virtual_loop import SimulationError
from tests.simulation.workload_dedup import POLICIES, Client, DedupWorkload
from tests.simulation.workload_ledgers import Quorums
from tests.simulation.workload_topics import TopicWorkload
from tests.support import wait_until

T = TypeVar("T")
QUIET = replace(CALM, silence_s=1_000.0)  # a connection that hangs stays open


class Script(Stage):
    """A stage whose bookies and brokers are up; `play` it with a coroutine function that gets it."""

    def __init__(self, bookies: int) -> None:
        super().__init__("script", QUIET)
        self._count = bookies

    def run(self, script: Callable[[Script], Coroutine[Any, Any, None]]) -> None:
        self.play(self._run(script))

    async def _run(self, script: Callable[[Script], Coroutine[Any, Any, None]]) -> None:
        self.build(self._count)
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            broker.start()
        await script(self)

    def __getattr__(self, name: str) -> Any:
        """`script.b1`, `script.east`."""
        machines: dict[str, Any] = {**self.__dict__.get("bookies", {}), **self.__dict__.get("brokers", {})}
        try:
            return machines[name]
        except KeyError:
            raise AttributeError(name) from None

    async def at(self, broker: SimBroker, work: Coroutine[Any, Any, T]) -> T:
        """Runs something in a broker's process, and waits for it."""
        return await broker.node.start(work, name="script")

    async def new_ledger(self, broker: SimBroker, qw: int, qa: int) -> Any:
        return await self.at(broker, broker.ledgers.create(ensemble_size=qw, write_quorum=qw, ack_quorum=qa, custom={}))

    def append(self, broker: SimBroker, writer: Any, *payloads: bytes) -> list[Any]:
        """A list that gets the outcome."""
        told: list[Any] = []
        broker.node.context.run(writer.append, payloads, told.append)
        return told

    async def holds(self, bookie: SimBookie, ledger_id: int, *entry_ids: int) -> None:
        await wait_until(lambda: all(e in self.history.bookie(bookie.id).ok.get(ledger_id, {}) for e in entry_ids))


async def restart(bookie: SimBookie) -> None:
    bookie.crash(power=True)
    await bookie.start()


async def fencing_read(script: Script, broker: SimBroker, bookie_id: str, ledger_id: int) -> list[Any]:
    """What a recoverer's read of entry 0 answers."""
    key = master_key_of(script.history.ledgers[ledger_id])
    connection = SimConnections(script.network, broker.node).get(bookie_id)

    async def read() -> list[Any]:
        return [chunk async for chunk in connection.read(ReadRequest(ledger_id, 0, 0, fence=True, master_key=key))]

    return await script.at(broker, read())


# 1. half-written-fence-miss


async def half_written_fence_miss(script: Script) -> None:
    net = script.network
    for bookie in ("b2", "b3"):  # entry 0 is on b1 alone
        net.block("east", bookie, "add")
    writer = await script.new_ledger(script.east, 3, 2)
    told = script.append(script.east, writer, b"zero")
    await script.holds(script.b1, writer.ledger_id, 0)

    net.block("west", "b3", "fence")  # b1 and b2 are enough to cover the fence …
    net.block("west", "b1", "recovery read")  # … and b1 falls silent before it is read
    end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
    assert end.last_entry_id == -1, "b2 and b3 deny it, which decides"

    net.unblock("east", "b3", "add")  # the late add arrives where the fence did not
    await wait_until(lambda: bool(told))
    assert isinstance(told[0], LedgerFencedError)


def test_1_half_written_fence_miss() -> None:
    """Recovery's reads fence too: b3, which the fence missed, refuses the late add."""
    Script(3).run(half_written_fence_miss)


def test_1_a_recovery_that_fences_by_lac_reads_alone_loses_the_entry() -> None:
    with MUTANTS["fence not by reads"](), pytest.raises(InvariantViolation, match=r"^L10"):
        Script(3).run(half_written_fence_miss)


# 2. empty-last-fragment


def test_2_empty_last_fragment() -> None:
    """A thousand entries, the ensemble changed, nothing written since, a bookie of the new one dies: recovery ends at 999."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 3, 2)
        ledger_id, ensemble = writer.ledger_id, script.history.ledgers[writer.ledger_id].last_fragment.ensemble
        told = [script.append(script.east, writer, *[b"%d" % (50 * n + k) for k in range(50)]) for n in range(20)]
        await wait_until(lambda: all(told))

        others = [bookie for bookie in script.bookies if bookie not in ensemble]
        records = ledger_records(script.east.store)

        async def change_ensemble() -> None:
            found = await records.get(ledger_id)
            assert found is not None
            fragment = Fragment(first_entry_id=1000, ensemble=(ensemble[0], *others))
            changed = found.record.replace(fragments=(*found.record.fragments, fragment))
            await records.replace(ledger_id, changed, found.version)

        await script.at(script.east, change_ensemble())
        script.east.crash()
        script.bookies[others[0]].crash(power=False)
        end = await script.at(script.west, script.west.ledgers.recover(ledger_id))
        assert end == (999, sum(len(b"%d" % n) for n in range(1000)))
        assert [fragment.first_entry_id for fragment in script.history.ledgers[ledger_id].fragments] == [0, 1000]

    Script(5).run(course)


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


# 9. fence-then-power-loss


def test_9_fence_then_power_loss() -> None:
    """A bookie denies an entry to a fencing read and loses power at once: it is fenced when it comes back."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        bookie = script.bookies[script.history.ledgers[writer.ledger_id].last_fragment.ensemble[0]]
        (chunk,) = await fencing_read(script, script.west, bookie.id, writer.ledger_id)
        assert chunk.missing[0].status.certain_no
        await restart(bookie)
        told = script.append(script.east, writer, b"late")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerFencedError)

    Script(1).run(course)


def test_9_a_fence_that_is_not_waited_for_is_forgotten() -> None:
    with MUTANTS["answer a fence before it is durable"](), pytest.raises((InvariantViolation, AssertionError)):
        test_9_fence_then_power_loss()


# 10. add-in-flight-at-fence


def test_10_add_in_flight_at_fence() -> None:
    """An add waits for the journal when a fencing read arrives: the read sees the entry."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        script.b1.work_delay_s = 0.5
        told = script.append(script.east, writer, b"in flight")
        await asyncio.sleep(0.1)
        assert not told
        (chunk,) = await fencing_read(script, script.west, "b1", writer.ledger_id)
        assert [bytes(payload) for payload in chunk.groups[0].payloads()] == [b"in flight"]
        await wait_until(lambda: bool(told))

    Script(1).run(course)


# 11. fence-without-entries-checkpoint


def test_11_fence_without_entries_checkpoint() -> None:
    """A fence of an idle bookie goes through a checkpoint that has no entry to write, and then the power fails."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        await fencing_read(script, script.west, "b1", writer.ledger_id)
        before = script.b1.bookie.statistics().mark_sequence
        await wait_until(lambda: script.b1.bookie.statistics().mark_sequence > before)
        await restart(script.b1)
        told = script.append(script.east, writer, b"late")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerFencedError)

    Script(1).run(course)


# 12. corrupt-log-recovery


async def corrupt_log_recovery(script: Script) -> None:
    writer = await script.new_ledger(script.east, 2, 2)
    told = [script.append(script.east, writer, b"entry %d" % n) for n in range(10)]
    await wait_until(lambda: all(told))
    script.east.crash()
    for bookie in (script.b1, script.b2):
        await restart(bookie)  # replay moves everything into the entry log
    path, offset = _find(script.b1, b"entry 9")
    script.b1.disk.flip_bit(path, offset)
    end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
    assert end.last_entry_id == 9


def test_12_corrupt_log_recovery() -> None:
    """One of two copies decays in the entry log: it is unknown there, not absent, and recovery keeps the entry."""
    Script(2).run(corrupt_log_recovery)


def test_12_a_bookie_that_denies_what_it_cannot_read_is_found_out() -> None:
    with MUTANTS["deny what cannot be read"](), pytest.raises(InvariantViolation, match=r"^S5|^L5"):
        Script(2).run(corrupt_log_recovery)


def _find(bookie: SimBookie, data: bytes) -> tuple[str, int]:
    for path, content in bookie.disk.durable_files().items():
        if path.startswith("entrylog") and data in content:
            return path, content.index(data)
    raise AssertionError(f"{data!r} is in no entry log of {bookie!r}")


# 13. flush-fails-once


def test_13_flush_fails_once() -> None:
    """The index fails in the middle of a flush. The bookie stops; after a restart and a power loss nothing is missing."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        told = [script.append(script.east, writer, b"entry %d" % n) for n in range(10)]
        await wait_until(lambda: all(told))
        failures = _fail_once(script.b1)
        await wait_until(lambda: not script.b1.node.alive)
        assert failures == ["failed"]
        await script.b1.start()
        await asyncio.sleep(2)  # checkpoints that succeed
        await restart(script.b1)  # which asks for everything that was promised (S2)
        end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
        assert end.last_entry_id == 9

    Script(1).run(course)


def _fail_once(bookie: SimBookie) -> list[str]:
    failures: list[str] = []

    def before_sync() -> None:
        if not failures:
            failures.append("failed")
            raise OSError(5, "the index cannot be written")

    bookie.index.before_sync = before_sync
    return failures


# 30. dedup-after-failure


async def dedup_after_failure(script: Script) -> None:
    """The client's view: three messages answered, three under way when every bookie falls silent; then it sends them again."""
    workload = DedupWorkload("payments", script.random, script.history, Quorums(1, 1, 1), clients=1)
    (client,) = workload.clients
    topic = await script.at(script.east, workload.open(script.east))
    workload.serving["east"] = script.east.node, topic
    assert await workload.connect(client)
    workload.publish(client, 3, chunks=1)
    await hear_until(workload, client, answered=3)
    await asyncio.sleep(POLICIES.dedup_snapshot_s + 0.1)  # a snapshot is due by time

    for bookie in script.bookies:
        script.network.block("east", bookie, "add")
    workload.publish(client, 3, chunks=1)
    script.east.node.call_soon(topic.on_tick, 1.0)  # it is taken while they are under way
    await asyncio.sleep(1.5)  # it is saved: metadata is well
    await wait_until(lambda: topic.closed)
    workload.hear(client)
    assert client.peer is None, "the client is told to come back"

    topic = await script.at(script.west, workload.open(script.west))
    workload.serving = {"west": (script.west.node, topic)}
    assert await workload.connect(client)
    await hear_until(workload, client, answered=6)
    workload.check(await script.at(script.west, read_all(topic.ledger)))


async def hear_until(workload: DedupWorkload, client: Client, *, answered: int) -> None:
    def heard() -> bool:
        workload.hear(client)
        return len(client.answered) == answered

    await wait_until(heard)


def test_30_dedup_after_failure() -> None:
    """What was never stored is stored when it is sent again."""
    Script(1).run(dedup_after_failure)


def test_30_a_snapshot_that_names_what_was_pushed_loses_messages() -> None:
    with MUTANTS["name what was pushed when saving sequence ids"](), pytest.raises(InvariantViolation, match=r"^H3"):
        Script(1).run(dedup_after_failure)


async def sent_and_never_appended(script: Script) -> None:
    """The connection breaks while a message waits for the append before it; the topic lives on, and the message comes again."""
    workload = DedupWorkload("payments", script.random, script.history, Quorums(1, 1, 1), clients=1)
    (client,) = workload.clients
    topic = await script.at(script.east, workload.open(script.east))
    workload.serving["east"] = script.east.node, topic
    assert await workload.connect(client)
    workload.publish(client, 1, chunks=1)
    await asyncio.sleep(0)
    workload.publish(client, 1, chunks=1)
    await asyncio.sleep(0)
    workload.disconnect(client)
    assert await workload.connect(client)
    await hear_until(workload, client, answered=2)
    assert workload.serving["east"][1] is topic
    assert not topic.closed
    workload.check(await script.at(script.east, read_all(topic.ledger)))


def test_30_what_was_taken_and_never_appended_is_new_when_it_comes_again() -> None:
    Script(1).run(sent_and_never_appended)


def test_30_a_producer_that_keeps_what_it_never_appended_is_stuck() -> None:
    with mock.patch.object(ProducerSequence, "abandon"), pytest.raises((AssertionError, SimulationError)):
        Script(1).run(sent_and_never_appended)


# 32. fifty-thousand-holes, half-a-batch

HOLES = 50_001
TOPIC = TopicName.parse("persistent://public/default/holes")


def test_32_fifty_thousand_holes() -> None:
    """Every second of 100,002 entries is acknowledged and saved; the broker dies; the next one knows all of them."""

    async def course(script: Script) -> None:
        script.tree.on_commit = None  # 100,002 entries, looked at one by one, would take a minute
        script.b1.observed = False
        script.b1.settings = BookieSettings(bookie_id="b1", min_free_journal_bytes=0, min_free_data_bytes=0)
        await restart(script.b1)
        for broker in (script.east, script.west):
            broker.crash()
            broker.observed, broker.settings = False, ManagedLedgerSettings()
            broker.start()
        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))
        stored: list[Any] = []
        for _ in range(2 * HOLES // 1_000 + 1):
            script.east.node.context.run(ledger.append, [b""] * 1_000, lambda position, count: stored.append((position, count)))
        await wait_until(lambda: len(stored) == 2 * HOLES // 1_000 + 1, timeout_s=60)
        (first, _), *_ = stored
        acked = [Position(first.ledger_id, entry_id) for entry_id in range(1, 2 * HOLES, 2)]

        async def acknowledge() -> None:
            assert cursor.acknowledge(acked) == []
            await cursor.saved()

        await script.at(script.east, acknowledge())
        script.east.crash()
        await restart(script.b1)
        ledger = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = ledger.cursors["sub"]
        assert cursor.ack_set.acked_entries == HOLES
        assert all(cursor.is_acknowledged(position) for position in acked)
        assert not any(cursor.is_acknowledged(Position(first.ledger_id, entry_id)) for entry_id in range(0, 2 * HOLES, 2))

    Script(1).run(course)


@pytest.mark.parametrize("ending", ["crash", "close"])
def test_32_half_a_batch(ending: str) -> None:
    """Only a part of one batch is acknowledged: that part is saved, and survives a crash as well as an orderly close."""

    async def course(script: Script) -> None:
        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))
        stored: list[Position] = []
        script.east.node.context.run(ledger.append, [b"a batch of four"], lambda position, count: stored.append(position))
        await wait_until(lambda: bool(stored))

        async def acknowledge() -> None:
            assert cursor.acknowledge_indexes(stored[0], (0b1010,), 4)
            if ending == "crash":
                await cursor.saved()
            else:
                await ledger.aclose()

        await script.at(script.east, acknowledge())
        script.east.crash()
        ledger = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        assert ledger.cursors["sub"].unacked_words(stored[0]) == (0b1010,)
        assert not ledger.cursors["sub"].is_acknowledged(stored[0])

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
