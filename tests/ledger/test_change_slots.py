"""What all ensemble changes of a process share: rounds of retries. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import LedgerSettings
from cepheid_ledger.change_slots import ChangeSlots

pytestmark = pytest.mark.virtual_time

SETTINGS = LedgerSettings(ensemble_retry_s=1.0)


class Ledger:
    """Retries without success until `has_spare`; then its change is refused while `metadata` says so."""

    has_spare = False
    metadata_is_away = False

    def __init__(self, slots: ChangeSlots) -> None:
        self._slots = slots
        self.retried_at: list[float] = []
        self.is_whole = False

    def retry(self) -> bool:
        self.retried_at.append(asyncio.get_running_loop().time() - 1_000.0)
        if self.has_spare:
            asyncio.get_running_loop().call_later(0.01, self._end)
        return self.has_spare

    def _end(self) -> None:
        self._slots.on_metadata(is_away=self.metadata_is_away)
        self.is_whole = not self.metadata_is_away
        if not self.is_whole:
            self._slots.retry_later(self)


@pytest.mark.deadline(600)
async def test_pauses_grow_while_there_is_no_spare_and_everybody_is_served_when_there_is() -> None:
    slots = ChangeSlots(SETTINGS)
    ledgers = [Ledger(slots) for _ in range(450)]
    for ledger in ledgers:
        slots.retry_later(ledger)
    await asyncio.sleep(36.5)
    assert ledgers[0].retried_at == ledgers[449].retried_at == [1, 3, 7, 15, 25, 35]
    Ledger.has_spare = True
    try:
        await asyncio.sleep(10)
    finally:
        Ledger.has_spare = False
    assert all(ledger.is_whole for ledger in ledgers)
    assert slots.statistics().ledgers_waiting == 0
    assert slots._timer is None


async def test_when_a_bookie_came_back_nobody_waits_for_the_end_of_the_pause() -> None:
    slots = ChangeSlots(SETTINGS)
    slots.retry_now()  # for nobody
    ledger = Ledger(slots)
    slots.retry_later(ledger)
    await asyncio.sleep(10)
    assert ledger.retried_at == [1, 3, 7]
    slots.retry_now()
    await asyncio.sleep(2)
    assert ledger.retried_at == [1, 3, 7, 10, 12]
    slots.close()
    slots.retry_now()
    assert slots._timer is None


async def test_while_metadata_is_away_one_asks_and_the_others_follow_when_it_got_through() -> None:
    slots = ChangeSlots(SETTINGS)
    ledgers = [Ledger(slots) for _ in range(300)]
    Ledger.has_spare = Ledger.metadata_is_away = True
    try:
        slots.on_metadata(is_away=True)
        for ledger in ledgers:
            slots.retry_later(ledger)
        await asyncio.sleep(10.5)
        assert 10 <= sum(len(ledger.retried_at) for ledger in ledgers) <= 11
        Ledger.metadata_is_away = False
        await asyncio.sleep(1.1)
        assert all(ledger.is_whole for ledger in ledgers)
    finally:
        Ledger.has_spare = Ledger.metadata_is_away = False


@pytest.mark.deadline(600)
async def test_who_gave_up_is_not_asked_and_nothing_is_left_after_closing() -> None:
    slots = ChangeSlots(SETTINGS)
    first, second = Ledger(slots), Ledger(slots)
    slots.retry_later(first)
    slots.retry_later(second)
    slots.forget(first)
    await asyncio.sleep(1.5)
    assert (first.retried_at, second.retried_at) == ([], [1])
    slots.close()
    slots.retry_later(first)
    await asyncio.sleep(100)
    assert (first.retried_at, second.retried_at) == ([], [1])
