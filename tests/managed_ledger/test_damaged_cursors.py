"""Cursor ledgers that are damaged on every disk: the topic opens, from older states, and says so. What may be well is awaited."""

from __future__ import annotations

import pytest

from cepheid_ledger import EntryUnavailableError, LedgerError, RecoveryFailedError
from cepheid_managed_ledger import ManagedLedger
from cepheid_metadata import Position
from tests.managed_ledger.test_cursors import TINY, record_of
from tests.managed_ledger.topic_world import THREE_BOOKIES, Broker, TopicWorld, append_all, topic_world

pytestmark = pytest.mark.virtual_time


async def with_two_snapshots(world: TopicWorld, broker: Broker) -> tuple[int, list[Position], range]:
    """A cursor whose acknowledgements were saved twice in one ledger; its id, the topic's entries, entries of the newer state."""
    ledger = await broker.open(THREE_BOOKIES)
    cursor = await ledger.create_cursor("sub", ledger.first_position())
    positions = await append_all(ledger, 400)
    cursor.acknowledge(positions[:50])
    cursor.acknowledge(positions[51:200:2])
    await cursor.saved()
    ledger_id = (await record_of(world)).cursor_ledger_id
    assert ledger_id is not None
    first_of_newer = len(world.cluster["a"].ids(ledger_id))
    cursor.acknowledge([positions[300]])
    await cursor.saved()
    assert (await record_of(world)).cursor_ledger_id == ledger_id
    return ledger_id, positions, range(first_of_newer, len(world.cluster["a"].ids(ledger_id)))


def damage(world: TopicWorld, ledger_id: int, entries: range, bookies: str = "abc") -> None:
    for name in "abc":
        world.cluster[name].checks_disk = True
    for name in bookies:
        for entry_id in entries:
            world.cluster[name].damage(ledger_id, entry_id)


@pytest.mark.parametrize("ended", ["closed", "crashed"])
@pytest.mark.parametrize("how_much", ["one part of the newer", "all of the newer", "everything"])
async def test_an_older_state_counts_and_that_is_said(how_much: str, ended: str, caplog: pytest.LogCaptureFixture) -> None:
    async with topic_world("a", "b", "c", settings=TINY) as world:
        broker = world.broker()
        ledger_id, positions, newer = await with_two_snapshots(world, broker)
        await (broker.crash() if ended == "crashed" else broker.aclose())
        cut = {"one part of the newer": newer[-1:], "all of the newer": newer, "everything": range(newer[-1] + 1)}
        damage(world, ledger_id, cut[how_much])
        broker = world.broker(seed=2)
        ledger = await broker.open(THREE_BOOKIES)
        cursor = ledger.cursors["sub"]
        assert cursor.mark_delete == positions[49]
        assert cursor.backlog_entries == (350 if how_much == "everything" else 350 - 75)
        assert cursor.is_rewound == (how_much == "everything")
        assert ledger.statistics().cursors_rewound == 1
        await saved_again(world, ledger, positions)
        await broker.aclose()
        ledger = await world.broker(seed=3).open(THREE_BOOKIES)
        assert ledger.cursors["sub"].mark_delete == positions[299]
        assert ledger.statistics().cursors_rewound == 0
        assert ledger_id not in await world.ledger_records(), "it can be deleted"
    assert "cursor.ledger_damaged" in {record.message for record in caplog.records}


async def saved_again(world: TopicWorld, ledger: ManagedLedger, positions: list[Position]) -> None:
    cursor = ledger.cursors["sub"]
    cursor.acknowledge_cumulative(positions[299])
    await cursor.saved()


@pytest.mark.parametrize("ended", ["closed", "crashed"])
@pytest.mark.parametrize("doubt", ["a bookie is down", "damaged on the way", "a disk that fails"])
async def test_what_may_be_well_is_waited_for(doubt: str, ended: str) -> None:
    async with topic_world("a", "b", "c", settings=TINY) as world:
        broker = world.broker()
        ledger_id, _, newer = await with_two_snapshots(world, broker)
        await (broker.crash() if ended == "crashed" else broker.aclose())
        good = dict(world.cluster["c"].entries[ledger_id])
        damage(world, ledger_id, newer, "ab" if doubt == "a bookie is down" else "abc")
        world.cluster["c"].down = doubt == "a bookie is down"
        if doubt == "damaged on the way":
            world.cluster["c"].checks_disk = False
        elif doubt == "a disk that fails":
            world.cluster["c"].limbo = True
            for entry_id in newer:
                del world.cluster["c"].entries[ledger_id][entry_id]
        broker = world.broker(seed=2)
        with pytest.raises((EntryUnavailableError, RecoveryFailedError)) as told:
            await broker.open(THREE_BOOKIES)
        assert isinstance(told.value, LedgerError)
        assert told.value.retriable
        world.cluster["c"].down = world.cluster["c"].limbo = False
        world.cluster["c"].entries[ledger_id] = good
        ledger = await broker.open(THREE_BOOKIES)
        assert ledger.cursors["sub"].backlog_entries == 350 - 75 - 1
        assert ledger.statistics().cursors_rewound == 0
