"""The compare-and-set loop: conflicts and unknown outcomes are decided anew from what is there."""

from __future__ import annotations

import pytest

from cepheid_ledger import LedgerFencedError, NoSuchLedgerError
from cepheid_ledger.metadata_edits import in_recovery
from cepheid_ledger.metadata_loop import change_ledger, read_ledger
from cepheid_metadata import LedgerMetadata, LedgerState, StoreUnavailableError
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, ledger_world

pytestmark = pytest.mark.virtual_time


def plan(ledger: LedgerMetadata) -> LedgerMetadata | None:
    if ledger.is_closed:
        raise LedgerFencedError("somebody was first")
    return in_recovery(ledger) if ledger.state is LedgerState.OPEN else None


async def setting(world: LedgerWorld) -> int:
    return (await world.create()).ledger_id


async def test_a_change_is_made_once_and_its_version_returned() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        changed = await change_ledger(world.records, found, plan, FAST)
        assert changed == await world.records.get(found.record.ledger_id)
        assert changed.record.state is LedgerState.IN_RECOVERY


async def test_a_conflict_is_decided_from_the_new_value() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        await world.records.replace(found.record.ledger_id, in_recovery(found.record), found.version)
        assert (await change_ledger(world.records, found, plan, FAST)).version == found.version + 1, "nothing was needed"


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("unreadable", [0, 3])
async def test_an_unknown_outcome_is_read_again_until_it_is_known(applied: bool, unreadable: int) -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.lose_answers = 1 if applied else 0
        world.store.lose_requests = 0 if applied else 1
        world.store.unreadable = unreadable
        changed = await change_ledger(world.records, found, plan, FAST)
        assert changed.record.state is LedgerState.IN_RECOVERY
        assert changed.version == found.version + 1, "applied exactly once"


async def test_a_certain_refusal_is_the_callers() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.refuse = 1
        with pytest.raises(StoreUnavailableError):
            await change_ledger(world.records, found, plan, FAST)


async def test_a_store_that_stays_unreadable_ends_in_a_timeout() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.lose_answers, world.store.unreadable = 1, 1_000_000
        with pytest.raises(TimeoutError):
            await change_ledger(world.records, found, plan, FAST.model_copy(update={"metadata_timeout_s": 0.05}))


async def test_a_deleted_ledger_is_named() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        await world.records.delete(found.record.ledger_id, None)
        with pytest.raises(NoSuchLedgerError):
            await change_ledger(world.records, found, plan, FAST)
        with pytest.raises(NoSuchLedgerError):
            await read_ledger(world.records, found.record.ledger_id)


async def test_creation_recognises_its_own_record_by_the_token() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        await world.create()
        world.store.lose_answers = 1
        writer = await world.create()
        assert writer.ledger_id == 2, "the record of the lost answer is ours: no second id"


async def test_creation_takes_another_id_when_the_record_is_not_ours() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        foreign = (await world.create()).metadata
        await world.records.create(2, foreign.replace(ledger_id=2))
        writer = await world.create()
        assert writer.ledger_id == 3
        assert (await world.record(2)).creation_token == foreign.creation_token
        world.store.lose_requests = 1  # nothing came of it: a new id, and never two ledgers
        assert (await world.create()).ledger_id == 5


async def test_a_refusal_after_an_attempt_without_answer_is_no_certainty() -> None:
    """The first request may still be on its way; whoever believes the refusal goes on with a record that is about to change."""
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.lose_requests = world.store.refuse_after_loss = 1
        with pytest.raises(StoreUnavailableError) as caught:
            await change_ledger(world.records, found, plan, FAST)
        assert caught.value.outcome_unknown


class LateStore(FaultyStore):
    """The first write arrives just before the second, and nobody can read after that."""

    late: tuple[str, bytes, int] | None = None
    is_late = False

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        if self.is_late:
            self.is_late, self.late = False, (key, value, expected_version)
            raise StoreUnavailableError("connection lost", outcome_unknown=True)
        if self.late is not None:
            await super().put(*self.late)
            self.unreadable = 1
        return await super().put(key, value, expected_version)


async def test_a_conflict_with_an_attempt_without_answer_is_no_certainty_before_it_is_read() -> None:
    """Taken for a refusal, a change of ensemble would be in force, and what the replaced bookie holds would count."""
    async with ledger_world(store_of=LateStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.is_late = True
        with pytest.raises(StoreUnavailableError) as caught:
            await change_ledger(world.records, found, plan, FAST)
        assert (await world.record(found.record.ledger_id)).state is LedgerState.IN_RECOVERY, "it is in force"
        assert caught.value.outcome_unknown


async def test_a_session_that_ends_while_the_outcome_is_looked_up_leaves_it_unknown() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        world.store.lose_answers = world.store.lose_session = 1
        with pytest.raises(StoreUnavailableError) as caught:
            await change_ledger(world.records, found, plan, FAST)
        assert caught.value.outcome_unknown


async def test_a_refusal_after_a_conflict_is_certain() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        found = await read_ledger(world.records, await setting(world))
        await world.records.replace(found.record.ledger_id, found.record.replace(custom={"by": "another"}), found.version)
        refusing = iter([0, 1])

        def refusing_plan(ledger: LedgerMetadata) -> LedgerMetadata | None:
            world.store.refuse = next(refusing)
            return plan(ledger)

        with pytest.raises(StoreUnavailableError) as caught:
            await change_ledger(world.records, found, refusing_plan, FAST)
        assert not caught.value.outcome_unknown
