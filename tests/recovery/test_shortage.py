"""Which copies of a ledger are missing: tables."""

from __future__ import annotations

import pytest

from cepheid_metadata import BookieHoldings, Fragment, LedgerMetadata, LedgerState, ShortReason
from cepheid_recovery.shortage import BookiesSeen, add_holdings, find_shortage

LOST, DRAINING, EMPTY = ShortReason.LOST, ShortReason.DRAINING, ShortReason.EMPTY_DISK


def ledger(*fragments: tuple[int, str], last: int | None = 9, write_quorum: int = 3, ledger_id: int = 7) -> LedgerMetadata:
    """A ledger of entries of 10 bytes, closed at `last`, open when that is None."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=len(fragments[0][1]),
        write_quorum=write_quorum,
        ack_quorum=2,
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        fragments=tuple(Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in fragments),
        last_entry_id=last,
        length_bytes=None if last is None else 10 * (last + 1),
        creation_token=1,
        created_at_ms=0,
    )


def seen(registered: str, **more: object) -> BookiesSeen:
    return BookiesSeen(frozenset(registered), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "bookies", "expected"),
    [
        (ledger((0, "abc")), seen("abc"), None),
        (ledger((0, "abc")), seen("ab"), ({"c": LOST}, 2, 10)),
        (ledger((0, "abc")), seen("a"), ({"b": LOST, "c": LOST}, 1, 20)),
        (ledger((0, "abc")), seen("ab", waiting=frozenset("c")), None),
        (ledger((0, "abc")), seen("abc", draining=frozenset("c")), ({"c": DRAINING}, 3, 10)),
        (ledger((0, "abc")), seen("ab", draining=frozenset("c")), ({"c": DRAINING}, 2, 10)),
        (ledger((0, "abc")), seen("abc", emptied={"a": 8}), ({"a": EMPTY}, 2, 10)),
        (ledger((0, "abc")), seen("abc", emptied={"a": 7}), None),  # it was created after the disk was lost
        (ledger((0, "abc"), (4, "abd")), seen("abd"), ({"c": LOST}, 2, 4)),
        (ledger((0, "abc"), (10, "abd")), seen("abc"), None),  # nobody misses an empty fragment
        (ledger((0, "abc"), last=-1), seen("ab"), None),
        (ledger((0, "abc"), last=None), seen("ab"), ({"c": LOST}, 2, 0)),  # its bookies decide where it ends
        (ledger((0, "abc"), (4, "abd"), last=None), seen("abd"), ({"c": LOST}, 2, 4)),
        (ledger((0, "abcd"), write_quorum=2), seen("abc"), ({"d": LOST}, 1, 5)),
        (ledger((0, "abcd"), write_quorum=2), seen("ac"), ({"b": LOST, "d": LOST}, 1, 10)),
        (ledger((0, "abcd"), write_quorum=2), seen("ab"), ({"c": LOST, "d": LOST}, 0, 10)),
    ],
)
def test_shortage(record: LedgerMetadata, bookies: BookiesSeen, expected: tuple[dict[str, ShortReason], int, int] | None) -> None:
    shortage = find_shortage(record, bookies)
    assert (shortage and (shortage.bookies, shortage.copies_left, shortage.entries)) == expected


def test_entries_with_a_single_copy_left_are_counted_by_fragment() -> None:
    shortage = find_shortage(ledger((0, "abc"), (4, "abd")), seen("ad"))
    assert shortage is not None
    assert (shortage.copies_left, shortage.last_copy_entries, shortage.bytes) == (1, 4, 140)


def test_holdings_sum_ledgers_and_estimated_bytes_by_bookie() -> None:
    holdings: dict[str, BookieHoldings] = {}
    for record in (ledger((0, "abc")), ledger((0, "abc"), (4, "abd"))):
        add_holdings(holdings, record, find_shortage(record, seen("abd")))
    assert holdings["a"] == BookieHoldings(ledgers=2, bytes=200)
    assert holdings["c"] == BookieHoldings(ledgers=2, bytes=140, short_ledgers=2, short_bytes=140)
