"""docs/operations.md shows what bookies with full, slow and failing disks say. Here they say it, and the page must have it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from cepheid_bookie import GarbageCollector
from cepheid_bookie.disk_health import HealthLimits
from cepheid_bookie.disk_space import DiskSpace
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.read_watch import FAILED_PLACES
from cepheid_bookie.settings import MiB, StorageSettings
from cepheid_cli.log_lines import EventFormatter
from cepheid_metadata import InGrace
from tests.bookie.bookie_support import Machine, add, added, group_of, read_all, settle, small_settings
from tests.bookie.test_garbage_collection import Metadata

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(600)]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def on_page(text: str) -> bool:
    """Whether the page has the text, in lines of its own."""
    return " ".join(text.split()) in " ".join(PAGE.read_text().split())


def lines(caplog: pytest.LogCaptureFixture, *events: str) -> list[str]:
    """The lines of these events as a log has them, without the time."""
    records = [record for record in caplog.records if record.msg in events]
    assert {record.msg for record in records} == set(events)
    return [EventFormatter().format(record).split(" ", 2)[2] for record in records]


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


class DiskOf:
    """A disk of which only the free space is known."""

    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self) -> int:
        return self.free


async def test_a_disk_that_fills(caplog: pytest.LogCaptureFixture) -> None:
    journal, data = DiskOf(540_000_000), DiskOf(1_070_000_000)
    space = DiskSpace(journal, data, None, StorageSettings(), lambda: None, lambda: None)  # type: ignore[arg-type]
    space.look_now()
    data.free = 335_000_000
    space.look_now()
    assert on_page(f"read-only: {space.reason}")
    data.free = 350_000_000
    space.look_now()
    assert on_page(f"read-only: {space.reason}")
    data.free = 500_000_000
    space.look_now()
    space.stop()
    for line in lines(caplog, "bookie.disk_low", "bookie.read_only", "bookie.writable"):
        assert on_page(line)


async def test_deleted_ledgers_that_wait_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(settings=small_settings(min_free_data_bytes=1 << 40))
    async with machine.bookie() as bookie:
        await added(bookie, *[group_of(ledger_id, 0) for ledger_id in range(1, 13)], recovery=True)
        metadata = Metadata()
        metadata.in_grace = {ledger_id: InGrace(1, 128 * MiB) for ledger_id in range(1, 13)}
        await GarbageCollector(bookie, metadata).collect()
    assert on_page(lines(caplog, "gc.deleted_ledgers_wait")[0])


async def test_a_disk_that_is_slow_and_one_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    settings = StorageSettings()
    assert HealthLimits(settings.slow_disk_s, settings.stalled_disk_s, settings.slow_disk_for_s) == HealthLimits(2, 20, 30)
    machine = Machine()
    async with machine.bookie(disk_check_interval_s=2.0) as bookie:
        machine.workers["journal"].takes_s = 3.0
        for first in range(11):
            await add(bookie, group_of(7, first))
        assert on_page(f"read-only: {bookie.read_only_reason}")
        machine.workers["journal"].takes_s = 0.0
        await asyncio.sleep(60)
        machine.workers["journal"].hold()
        hanging = asyncio.ensure_future(add(bookie, group_of(7, 20)))
        await asyncio.sleep(21)
        assert on_page(f"serving, {bookie.read_only_reason}")
        machine.workers["journal"].release()
        await hanging
        await asyncio.sleep(60)
    for line in lines(caplog, "disk.slow", "disk.stalled", "disk.healthy"):
        assert on_page(line)


async def test_a_disk_that_does_not_answer_reads_and_one_that_fails_them(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    async with machine.bookie(stalled_disk_s=20.0, read_ahead_bytes=0) as bookie:
        await added(bookie, *[group_of(ledger_id, 0) for ledger_id in range(1, 4)])
        await bookie.checkpoint()
        machine.workers["read"].hold()
        reads = [asyncio.ensure_future(read_all(bookie, ledger_id, 0, 0)) for ledger_id in range(1, 4)]
        await asyncio.sleep(20.01)
        assert on_page(f"serving, {bookie.read_only_reason}")
        machine.workers["read"].release()
        await asyncio.gather(*reads)
        for place in range(FAILED_PLACES):
            bookie._read_watch.on_failed_read(1, place, OSError(errno.EIO, os.strerror(errno.EIO)))
        assert on_page(f"read-only: {bookie.read_only_reason}")
    for line in lines(caplog, "disk.reads_hang", "disk.reads_fail"):
        assert on_page(line), line


async def test_an_index_that_is_damaged(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.index.on_damage(IndexCorruptError("the block index data/bookie-1/index is damaged: Corruption: …"))
        await settle()
        assert on_page(f"serving, {bookie.read_only_reason}")


async def test_a_disk_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:

        def on_operation(name: str, path: str) -> None:
            if name == "sync" and path.startswith("journal/"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        machine.disk.on_operation = on_operation
        await add(bookie, group_of(7, 0))
        await settle()
        machine.disk.on_operation = None
    assert on_page(lines(caplog, "bookie.failed")[0])
