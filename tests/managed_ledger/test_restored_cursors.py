"""Cursors whose records claim more than the topic has: an old backup was restored, or entries are lost. What is written later
was never acknowledged, also when it comes to lie below the place that the record claimed."""

from __future__ import annotations

import dataclasses

import pytest
from crc32c import crc32c

from cepheid_managed_ledger import CursorStateNewerError, ManagedLedgerSettings
from cepheid_managed_ledger.cursor_ledger import Snapshot, parts_of
from cepheid_managed_ledger.cursor_state import encode_state
from cepheid_metadata import CursorRecord, keys
from cepheid_rpc import encode_group
from tests.managed_ledger.topic_world import SETTINGS, TOPIC, Broker, TopicWorld, append_all, topic_world

pytestmark = pytest.mark.virtual_time

LAZY = SETTINGS.model_copy(update={"cursor_flush_s": 600.0})
TINY = LAZY.model_copy(update={"cursor_inline_bytes": 20, "cursor_part_bytes": 40})


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is acknowledged of nine entries that the topic has no more."""

    up_to: int = -1
    entries: tuple[int, ...] = ()
    batch: int | None = None
    sequence_ids: bool = False


CLAIMS = {
    "mark-delete": Claim(up_to=7),
    "holes": Claim(entries=(2, 3, 7)),
    "part of a batch": Claim(batch=3),
    "sequence ids": Claim(up_to=8, sequence_ids=True),
}


def record_of(world: TopicWorld) -> CursorRecord:
    return CursorRecord.decode(world.tree.nodes[keys.cursor_key(TOPIC, "sub")].value, "sub")


async def with_a_cursor_of_the_future(world: TopicWorld, claim: Claim) -> Broker:
    """A topic of three entries, whose chain is taken back to before an owner whose cursor was saved. Who opens it next."""
    nodes, chain_key = world.tree.nodes, keys.chain_key(TOPIC)
    before, future = world.broker(), world.broker(seed=2)
    ledger = await before.open()
    await ledger.create_cursor("sub", ledger.first_position())
    await append_all(ledger, 3)
    await ledger.aclose()
    backup = nodes[chain_key]

    ledger = await future.open()
    cursor = ledger.cursors["sub"]
    positions = await append_all(ledger, 9)
    if claim.up_to >= 0:
        cursor.acknowledge_cumulative(positions[claim.up_to])
    cursor.acknowledge(positions[entry] for entry in claim.entries)
    if claim.batch is not None:
        cursor.acknowledge_indexes(positions[claim.batch], (0b01,), 2)
    if claim.sequence_ids:
        cursor.set_sequence_ids({"producer": 12})
    await cursor.saved()
    await future.crash()
    nodes[chain_key] = backup
    return before


@pytest.mark.parametrize("settings", [LAZY, TINY], ids=["inline", "in a cursor ledger"])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
async def test_what_is_written_later_was_never_acknowledged(
    claim: Claim, settings: ManagedLedgerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with topic_world(settings=settings) as world:
        broker = await with_a_cursor_of_the_future(world, claim)
        claimed = record_of(world)
        assert (claimed.cursor_ledger_id is None) == (settings is LAZY)
        ledger = await broker.open()
        # Sequence ids speak of entries that are lost: without them it is at the start, so that they are found anew.
        backlog = 3 if claim.up_to < 0 or claim.sequence_ids else 0
        assert ledger.cursors["sub"].backlog_entries == backlog
        assert ledger.cursors["sub"].sequence_ids == {}
        await append_all(ledger, 9)
        await broker.crash()

        ledger = await world.broker(seed=3).open()
        assert ledger.cursors["sub"].backlog_entries == backlog + 9
        assert ledger.cursors["sub"].ack_set.batches == {}
        assert ledger.cursors["sub"].sequence_ids == {}
        assert record_of(world).generation > claimed.generation, "as a reset: the position may go back"
    assert "cursor.above_the_end" in caplog.text


@pytest.mark.parametrize("where", ["record", "state of a snapshot", "head of a snapshot"])
async def test_state_of_a_newer_release_is_refused_and_stays_as_it_is(where: str) -> None:
    """Taking it for damage would forget acknowledgements for good, with the first save."""
    async with topic_world(settings=LAZY if where == "record" else TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 40)
        cursor.acknowledge(positions[1::2])
        await cursor.saved()
        record = record_of(world)
        await broker.aclose()
        key = keys.cursor_key(TOPIC, "sub")
        if where == "record":
            assert record.state is not None
            newer = record.replace(state=of_format_9(record.state))
            world.tree.nodes[key] = world.tree.nodes[key]._replace(value=newer.encode())
        else:
            assert record.cursor_ledger_id is not None
            state = encode_state(cursor.ack_set)
            (part,) = parts_of(Snapshot("sub", 0, of_format_9(state) if "state" in where else state), 99, 1 << 20)
            part = b"\x09" + part[1:] if "head" in where else part
            entries = world.cluster["a"].entries[record.cursor_ledger_id]
            entries[max(entries)] = encode_group(record.cursor_ledger_id, max(entries), -1, 0, [part])
        before_opening = world.tree.nodes[key].value
        with pytest.raises(CursorStateNewerError, match="format 9"):
            await world.broker(seed=2).open()
        assert world.tree.nodes[key].value == before_opening


def of_format_9(state: bytes) -> bytes:
    body = b"\x09" + state[1:-4]
    return body + crc32c(body).to_bytes(4, "little")
