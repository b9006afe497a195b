"""When a bookie that was restarted has caught up, so that the next one may be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cepheid_metadata import (
    Audit,
    MemoryStore,
    MemoryTree,
    RepairMark,
    RepairSwitch,
    ShortFigures,
    ShortReason,
    audit_record,
    repair_marks,
)
from cepheid_ports import Ports
from cepheid_recovery.caught_up import CaughtUp, what_is_missing
from cepheid_recovery.roles import BookieNode, BookieNodeSettings
from tests.bookie.test_bookie_role import World, page
from tests.support import wait_until

RUN = "disks process"


def audit(short: int = 0, **runs: str) -> Audit:
    return Audit(finished_at_ms=1, ledgers=5, short=ShortFigures(ledgers=short), bookies={}, runs=runs)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (None, "no walk over all ledgers has ended yet"),
        (audit(), "its copies are being checked"),  # the auditor has not seen it yet
        (audit(b1="disks earlier"), "its copies are being checked"),  # figures from before the restart
        (audit(b1=""), "its copies are being checked"),
        (audit(1, b1=RUN), "1 ledger lacks a copy: cepheid ledgers short"),
        (audit(7, b1=RUN), "7 ledgers lack a copy: cepheid ledgers short"),
        (audit(b1=RUN, b2="other"), ""),
    ],
)
def test_a_bookie_has_caught_up_when_its_run_was_checked_and_no_ledger_lacks_a_copy(found: Audit | None, missing: str) -> None:
    assert what_is_missing(found, None, "b1", RUN) == missing


def mark(
    ledger_id: int, *, copies_left: int = 1, short_entries: int = 0, reason: ShortReason = ShortReason.EMPTY_DISK
) -> RepairMark:
    return RepairMark(
        ledger_id=ledger_id,
        bookies={"b1": reason},
        copies_left=copies_left,
        short_entries=short_entries,
        short_bytes=0,
        since_ms=1,
    )


@pytest.mark.virtual_time
@pytest.mark.deadline(2000)
@pytest.mark.parametrize(
    ("marks", "missing"),
    [
        ([mark(1), mark(2)], ""),  # only where they are open: nothing can be done before they end
        ([mark(1), mark(2, short_entries=10)], "1 ledger lacks a copy: cepheid ledgers short"),
        ([mark(1, copies_left=0), mark(2)], "1 ledger lacks a copy: cepheid ledgers short"),  # no bookie has its entries
        (
            [mark(1), mark(2, short_entries=1), mark(3, reason=ShortReason.PLACEMENT)],
            "1 ledger lacks a copy: cepheid ledgers short",
        ),
        ([mark(1)], "1 ledger lacks a copy: cepheid ledgers short"),  # the audit counts one that has no mark yet
    ],
)
async def test_open_ledgers_hold_it_up_for_two_minutes(marks: list[RepairMark], missing: str) -> None:
    store = MemoryStore(MemoryTree())
    await audit_record(store).create(None, audit(2, b1=RUN))
    for each in marks:
        await repair_marks(store).create(each.ledger_id, each)
    follower = CaughtUp(store, "b1", RUN, timeout_s=1800)
    follower.start()
    await asyncio.sleep(110)
    assert follower.missing == "2 ledgers lack a copy: cepheid ledgers short"
    await asyncio.sleep(20)
    assert follower.missing == missing
    await follower.aclose()


def test_repair_that_is_off_is_named_as_what_to_change() -> None:
    assert "automatic repair is off: cepheid repair on" in what_is_missing(
        audit(1, b1=RUN), RepairSwitch(off_since_ms=1), "b1", RUN
    )


@pytest.mark.virtual_time
@pytest.mark.deadline(200)
async def test_it_stays_caught_up_whatever_is_lost_later() -> None:
    store = MemoryStore(MemoryTree())
    records = audit_record(store)
    version = await records.create(None, audit(3, b1=RUN))
    follower = CaughtUp(store, "b1", RUN, timeout_s=1800)
    follower.start()
    await asyncio.sleep(10)
    assert follower.missing.startswith("3 ledgers lack a copy")
    version = await records.replace(None, audit(b1=RUN), version)
    await wait_until(lambda: not follower.missing)
    await records.replace(None, audit(9, b1=RUN), version)
    await asyncio.sleep(60)
    assert follower.missing == ""
    await follower.aclose()


@pytest.mark.virtual_time
@pytest.mark.deadline(4000)
async def test_it_counts_as_caught_up_after_the_timeout() -> None:
    store = MemoryStore(MemoryTree())
    follower = CaughtUp(store, "b1", RUN, timeout_s=1800)
    follower.start()
    await asyncio.sleep(1790)
    assert follower.missing == "no walk over all ledgers has ended yet"
    await asyncio.sleep(20)
    assert follower.missing == ""
    await follower.aclose()


async def test_the_page_of_a_bookie_says_when_the_next_one_may_be_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path)
    await world.found()
    fields = {"metadata": "zk://x", "data_dir": tmp_path / "b1", "bookie_id": "b1", "port": 0, "http_port": 0}
    node = BookieNode(BookieNodeSettings.model_validate({**fields, "recovery": {"poll_s": 0.1}}), Ports())
    await node.start()
    try:
        answers = []
        async with asyncio.timeout(60):
            while not answers or answers[-1][0] != 200:
                answers.append(await page(node, "/caught-up"))
                await asyncio.sleep(0.05)
        assert answers[-1] == (200, "serving, caught up\n")
        assert {text for status, text in answers if status != 200} <= {
            f"serving, not caught up: {missing}\n"
            for missing in ("it has just started", "no walk over all ledgers has ended yet", "its copies are being checked")
        }
        monkeypatch.setattr(BookieNode, "ready", False)
        assert (await page(node, "/caught-up"))[0] == 503
    finally:
        await node.aclose()
