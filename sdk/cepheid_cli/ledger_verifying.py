"""`cepheid ledgers verify`: finds bad copies, and says what to do about them."""

from __future__ import annotations

import asyncio
import enum
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cepheid_cli.admin.common import done, print_json
from cepheid_cli.ledger_access import BookieReach, bookie_reach, reader_of, record_of
from cepheid_cli.ledger_source import BookiesReplacedError, LedgerSource, NoSuchLedgerHereError
from cepheid_ledger.verification import Copy, Finding, LedgerReport, verify_ledger

_REPAIR_POLL_S = 0.5
_MAX_LOOKS = 5  # of a ledger whose bookies are replaced each time


class Verdict(enum.IntEnum):
    """The outcome of a verification, which is the exit code of the command. 2 is that of wrong usage."""

    SOUND = 0
    BAD = 1
    NOT_KNOWN = 3


async def verify_ledgers(
    source: LedgerSource,
    views: list[dict[str, Any]],
    damaged: list[dict[str, Any]],
    *,
    as_json: bool,
    repair_for_s: float | None = None,
) -> Verdict:
    """Print problems as they are found, and a summary. `damaged`: ledgers with an unreadable record, as listed.

    `repair_for_s`: have bad copies replaced from valid replicas, wait at most this long for that, and verify these ledgers again.
    """
    reports: list[LedgerReport] = []
    not_repaired = ""
    async with bookie_reach(source) as reach:
        for view in views:
            try:
                report = await _verified(source, view, reach)
            except NoSuchLedgerHereError:
                continue  # it was deleted for good after it was listed, with its entries
            reports.append(report)
            if not as_json:
                _print(report)
        if repair_for_s is not None:
            reports, not_repaired = await _repaired(source, reports, reach, repair_for_s, as_json=as_json)
    if as_json:
        print_json([*map(_plain, reports), *({"damaged": record} for record in damaged)])
    else:
        for record in damaged:
            print(f"ledger {record['ledger_id']}: its record in metadata is damaged, its copies cannot be located:")
            print(f"      {record['error']}")
        tail = f"; {_counted(len(damaged), 'record', 'records')} of ledgers damaged" if damaged else ""
        print(summary(reports) + not_repaired + tail)
    return Verdict.BAD if damaged else verdict_on(reports)


async def _repaired(
    source: LedgerSource, reports: Sequence[LedgerReport], reach: BookieReach, wait_s: float, *, as_json: bool
) -> tuple[list[LedgerReport], str]:
    """Return the reports after a repair, and for the summary which ledgers changed too much to be repaired.

    Reports of ledgers with bad copies are new; those of ledgers that were deleted for good meanwhile are left out.
    """
    asked: list[int] = []
    deleted: list[int] = []
    replaced: list[int] = []
    for report in reports:
        bookies = {finding.bookie for finding in report.findings if finding.ailment is not Copy.UNREADABLE or finding.valid}
        if bookies:
            try:
                await source.repair(report.ledger_id, sorted(bookies))
                asked.append(report.ledger_id)
            except NoSuchLedgerHereError:
                deleted.append(report.ledger_id)
            except BookiesReplacedError:
                replaced.append(report.ledger_id)
    if asked and await source.repair_is_off():
        done(f"automatic repair is off: {_counted(len(asked), 'ledger is', 'ledgers are')} copied again after `cepheid repair on`")
        asked = []  # nothing changes until then
    elif asked:
        done(f"{_counted(len(asked), 'ledger is', 'ledgers are')} copied again from valid replicas")
    deadline = time.monotonic() + wait_s
    waiting = asked
    while waiting and time.monotonic() < deadline:
        await asyncio.sleep(_REPAIR_POLL_S)
        waiting = [ledger_id for ledger_id in waiting if await source.is_marked(ledger_id)]
    if waiting:
        done(f"{_counted(len(waiting), 'ledger is', 'ledgers are')} not repaired yet: cepheid ledgers short says why")
    again = {*asked, *deleted, *replaced}
    after: list[LedgerReport] = []
    for report in reports:
        if report.ledger_id in again:
            try:
                report = await _verified(source, await source.one(report.ledger_id), reach)
            except NoSuchLedgerHereError:
                if report.ledger_id not in deleted:
                    deleted.append(report.ledger_id)
                continue
            if not as_json:
                _print(report)
        after.append(report)
    text = f"; {_counted(len(deleted), 'ledger', 'ledgers')} deleted meanwhile" if deleted else ""
    if replaced := [ledger_id for ledger_id in replaced if ledger_id not in deleted]:
        text += f"; {_counted(len(replaced), 'ledger', 'ledgers')} moved to other bookies meanwhile, and not repaired"
    return after, text


def verdict_on(reports: Sequence[LedgerReport]) -> Verdict:
    """Return BAD if any copy is certainly bad, NOT_KNOWN if any could not be checked."""
    if any(report.is_bad for report in reports):
        return Verdict.BAD
    return Verdict.SOUND if all(report.is_sound for report in reports) else Verdict.NOT_KNOWN


async def _verified(source: LedgerSource, view: dict[str, Any], reach: BookieReach) -> LedgerReport:
    """Verify the ledger by its current record: problems count as bad copies only if the record did not change meanwhile.

    Raises NoSuchLedgerHereError.
    """
    ledger_id = record_of(view).ledger_id
    ledger = record_of(await source.one(ledger_id))  # the listing may be old
    for _ in range(_MAX_LOOKS):
        reader = reader_of(source, ledger, reach)
        last_entry_id = await reader.read_lac()
        ledger = record_of(await source.one(ledger_id))  # read after the end: it names the ensembles of all confirmed entries
        report = await verify_ledger(ledger, last_entry_id, reach.get)
        if reader.may_miss_entries:
            report.end_unknown_for = reader.silent
        if report.is_sound or record_of(await source.one(ledger_id)).fragments == ledger.fragments:
            break
    return report


def summary(reports: Sequence[LedgerReport]) -> str:
    """Return the last line of a verification: copies and entries, with certain results apart from unknown ones."""
    wanted, valid = sum(report.copies_wanted for report in reports), sum(report.copies_valid for report in reports)
    bad, unknown = sum(report.copies_bad for report in reports), sum(report.copies_unknown for report in reports)
    lost, unseen = sum(report.lost_entries for report in reports), sum(report.unknown_entries for report in reports)
    text = f"{_counted(len(reports), 'ledger', 'ledgers')}, {_counted(wanted, 'copy', 'copies')}: "
    text += f"{valid} valid, {bad} bad or missing, {unknown} not known"
    if not_sound := sum(not report.is_sound for report in reports):
        text += f", in {_counted(not_sound, 'ledger', 'ledgers')}"
    text += f"; {_counted(lost, 'entry', 'entries')} without a valid copy"
    if unseen:
        text += f", {_counted(unseen, 'entry', 'entries')} of which only bookies that did not answer can have one"
    if open_ends := sum(bool(report.end_unknown_for) for report in reports):
        text += f"; the end of {open_ends} open {'ledger' if open_ends == 1 else 'ledgers'} is not known"
    return text


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def cure(finding: Finding, ack_quorum: int) -> str:
    """Return what an operator can do about it now."""
    if finding.ailment is Copy.DIVERGENT:
        if finding.valid:
            return f"{finding.valid} others agree with each other: cepheid ledgers verify --repair copies them over this one"
        return (
            "the copies contradict each other: keep every disk as it is and report it; readers get the first one that they ask for"
        )
    if finding.ailment is Copy.UNREADABLE:
        return f"start {finding.bookie} or check its log, then verify again: nothing is known about these copies"
    if finding.valid == 0:
        return "no valid copy was seen: bring back the bookies or disks that are away, if there are any"
    if finding.valid < ack_quorum:
        return f"{finding.valid} valid elsewhere, fewer than the ack quorum: lose no other bookie before they are copied"
    return f"{finding.valid} valid elsewhere, so readers are served: cepheid ledgers verify --repair replaces the copy"


def _print(report: LedgerReport) -> None:
    if report.is_sound:
        return
    entries = f"entries 0..{report.last_entry_id}" if report.last_entry_id >= 0 else "no entry seen"
    print(f"ledger {report.ledger_id} ({report.state}), {entries}:")
    for finding in report.findings:
        first, last = finding.first_entry_id, finding.last_entry_id
        entries = f"entry {first}" if first == last else f"entries {first}..{last}"
        print(f"  {entries} at {finding.bookie}: {finding.ailment.name.lower()} ({finding.reason})")
        print(f"      {cure(finding, report.ack_quorum)}")
    if report.end_unknown_for:
        print(f"  its end is not known: {', '.join(report.end_unknown_for)} did not answer, and may have entries after that")
        print("      start them or check their logs, then verify again")
    sys.stdout.flush()


def _plain(report: LedgerReport) -> dict[str, Any]:
    plain = asdict(report)
    for finding in plain["findings"]:
        finding["ailment"] = Copy(finding["ailment"]).name.lower()
    return dict(json.loads(json.dumps(plain)))
