"""What is wrong with which copy, told by reading all of them."""

from __future__ import annotations

import pytest

from cepheid_ledger.verification import Copy, Finding, LedgerReport, verify_ledger
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState
from cepheid_rpc import EntryGroup, encode_group
from tests.ledger.memory_bookie import MemoryBookie
from tests.support import run_virtual

LEDGER = 5


def ledger_of(*fragments: tuple[int, str], write_quorum: int | None = None) -> LedgerMetadata:
    size = len(fragments[0][1])
    return LedgerMetadata(
        ledger_id=LEDGER,
        ensemble_size=size,
        write_quorum=write_quorum or size,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        fragments=tuple(Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in fragments),
        last_entry_id=9,
        length_bytes=0,
        creation_token=1,
        created_at_ms=0,
    )


def written(first: int = 0, count: int = 10, text: str = "") -> EntryGroup:
    return encode_group(LEDGER, first, first - 1, 0, [f"{text}{entry_id}".encode() for entry_id in range(first, first + count)])


def bookies_with(group: EntryGroup, names: str) -> dict[str, MemoryBookie]:
    bookies = {name: MemoryBookie(name) for name in names}
    for bookie in bookies.values():
        store(bookie, group)
    return bookies


def store(bookie: MemoryBookie, group: EntryGroup) -> None:
    held = bookie.entries.setdefault(LEDGER, {})
    for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
        held[entry_id] = group.slice(entry_id, entry_id)


def damaged(group: EntryGroup) -> EntryGroup:
    data = bytearray(group.data)
    data[-1] ^= 1
    return EntryGroup(group.ledger_id, group.first_entry_id, group.ends, bytes(data))


def report_of(bookies: dict[str, MemoryBookie], ledger: LedgerMetadata, last: int = 9) -> LedgerReport:
    return run_virtual(verify_ledger(ledger, last, lambda name: bookies[name].connection(), timeout_s=0.2))


def test_a_sound_ledger_has_all_its_copies() -> None:
    report = report_of(bookies_with(written(), "abc"), ledger_of((0, "abc")))
    assert report.is_sound
    assert (report.copies_wanted, report.copies_valid, report.lost_entries) == (30, 30, 0)


def test_a_missing_run_is_one_finding_with_its_place() -> None:
    bookies = bookies_with(written(), "abc")
    for entry_id in (3, 4, 5, 8):
        del bookies["b"].entries[LEDGER][entry_id]
    report = report_of(bookies, ledger_of((0, "abc")))
    assert report.findings == [
        Finding("b", 3, 5, Copy.MISSING, "NO_ENTRY", 2),
        Finding("b", 8, 8, Copy.MISSING, "NO_ENTRY", 2),
    ]
    assert (report.copies_valid, report.copies_bad, report.copies_unknown, report.lost_entries) == (26, 4, 0, 0)


def test_an_entry_that_nobody_has_is_lost() -> None:
    bookies = bookies_with(written(), "abc")
    for bookie in bookies.values():
        del bookie.entries[LEDGER][9]
    report = report_of(bookies, ledger_of((0, "abc")))
    assert report.lost_entries == 1
    assert [(finding.bookie, finding.valid) for finding in report.findings] == [("a", 0), ("b", 0), ("c", 0)]


def test_what_decayed_is_corrupt_and_what_differs_is_divergent() -> None:
    bookies = bookies_with(written(), "abc")
    bookies["a"].entries[LEDGER][2] = damaged(bookies["a"].entries[LEDGER][2])
    store(bookies["c"], written(7, 1, "another "))  # the majority contradicts it
    store(bookies["c"], written(8, 1, "another "))
    del bookies["b"].entries[LEDGER][8]  # two are left, and nobody can say which one is right
    report = report_of(bookies, ledger_of((0, "abc")))
    found = {(finding.bookie, finding.first_entry_id, finding.ailment, finding.valid) for finding in report.findings}
    assert found == {
        ("a", 2, Copy.CORRUPT, 2),
        ("c", 7, Copy.DIVERGENT, 2),
        ("a", 8, Copy.DIVERGENT, 0),
        ("b", 8, Copy.MISSING, 0),
        ("c", 8, Copy.DIVERGENT, 0),
    }
    assert "is damaged" in next(finding.reason for finding in report.findings if finding.ailment is Copy.CORRUPT)


@pytest.mark.parametrize("switch", ["down", "hang", "limbo"])
def test_a_bookie_that_cannot_say_is_unreadable_not_missing(switch: str) -> None:
    bookies = bookies_with(written(), "abc")
    setattr(bookies["b"], switch, True)
    if switch == "limbo":
        bookies["b"].entries.clear()
    report = report_of(bookies, ledger_of((0, "abc")))
    assert [(finding.bookie, finding.ailment, finding.first_entry_id, finding.last_entry_id) for finding in report.findings] == [
        ("b", Copy.UNREADABLE, 0, 9)
    ]
    assert report.lost_entries == 0
    assert (report.copies_valid, report.copies_bad, report.copies_unknown) == (20, 0, 10)
    assert not report.is_bad


def test_what_only_a_silent_bookie_can_have_is_not_known_instead_of_lost() -> None:
    bookies = bookies_with(written(), "abc")
    for name in "ab":
        del bookies[name].entries[LEDGER][9]
    bookies["c"].down = True
    report = report_of(bookies, ledger_of((0, "abc")))
    assert (report.lost_entries, report.unknown_entries) == (0, 1)
    assert (report.copies_wanted, report.copies_valid, report.copies_bad, report.copies_unknown) == (30, 18, 2, 10)
    bookies["c"].down = False
    del bookies["c"].entries[LEDGER][9]
    report = report_of(bookies, ledger_of((0, "abc")))
    assert (report.lost_entries, report.unknown_entries, report.copies_bad) == (1, 0, 3)


def test_each_fragment_is_looked_for_at_its_own_bookies() -> None:
    bookies = bookies_with(written(0, 6), "ab") | bookies_with(written(6, 4), "cd")
    assert report_of(bookies, ledger_of((0, "ab"), (6, "cd"))).is_sound
    report = report_of(bookies, ledger_of((0, "ab"), (4, "cd")))
    assert [(finding.bookie, finding.first_entry_id, finding.last_entry_id) for finding in report.findings] == [
        ("c", 4, 5),
        ("d", 4, 5),
    ]
    assert report.lost_entries == 2


def test_striped_entries_are_missed_only_where_they_belong() -> None:
    bookies = {name: MemoryBookie(name) for name in "abcd"}
    for entry_id in range(10):
        for position in (entry_id % 4, (entry_id + 1) % 4):
            store(bookies["abcd"[position]], written().slice(entry_id, entry_id))
    ledger = ledger_of((0, "abcd"), write_quorum=2)
    assert report_of(bookies, ledger).copies_wanted == 20
    assert report_of(bookies, ledger).is_sound
    del bookies["b"].entries[LEDGER][5]  # positions 1 and 2
    assert [(finding.bookie, finding.first_entry_id) for finding in report_of(bookies, ledger).findings] == [("b", 5)]


def test_an_open_ledger_is_checked_to_its_last_add_confirmed() -> None:
    bookies = bookies_with(written(0, 8), "abc")
    report = report_of(bookies, ledger_of((0, "abc")), last=7)
    assert (report.is_sound, report.last_entry_id, report.copies_wanted) == (True, 7, 24)
    assert report_of(bookies, ledger_of((0, "abc")), last=-1).copies_wanted == 0
