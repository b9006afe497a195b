"""Every change that the ledger client makes to a ledger's metadata, as pure functions from record to record.

    OPEN ──► IN_RECOVERY ──► CLOSED        and OPEN ──► CLOSED only by the writer; no state follows CLOSED

Invariants L1 and L2 are asserted here for each edit: sizes and id never change, fragments are only added at the end, one at a time
while the ledger is open and none while it is in recovery; an end is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepheid_metadata import Fragment, LedgerMetadata, LedgerState

_LEGAL = {
    LedgerState.OPEN: (LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED),
    LedgerState.IN_RECOVERY: (LedgerState.IN_RECOVERY, LedgerState.CLOSED),
    LedgerState.CLOSED: (LedgerState.CLOSED,),
}


def in_recovery(ledger: LedgerMetadata) -> LedgerMetadata:
    """Return the record that a recovery writes first: from then on no writer can change the ensemble or close."""
    assert ledger.state is LedgerState.OPEN, f"ledger {ledger.ledger_id} is {ledger.state}"
    return _checked(ledger, ledger.replace(state=LedgerState.IN_RECOVERY))


def closed(ledger: LedgerMetadata, last_entry_id: int, length_bytes: int, new_fragments: Sequence[Fragment] = ()) -> LedgerMetadata:
    """Return the closed record. `new_fragments` were kept in memory by a recovery; one with the key of the last one replaces it."""
    assert not ledger.is_closed, f"ledger {ledger.ledger_id} is closed already"
    fragments = list(ledger.fragments)
    for fragment in new_fragments:
        if fragment.first_entry_id == fragments[-1].first_entry_id:
            fragments.pop()
        fragments.append(fragment)
    after = ledger.replace(
        state=LedgerState.CLOSED, last_entry_id=last_entry_id, length_bytes=length_bytes, fragments=tuple(fragments)
    )
    return _checked(ledger, after)


def ensemble_changed(ledger: LedgerMetadata, first_entry_id: int, replaced: Mapping[str, str]) -> LedgerMetadata | None:
    """Return the writer's change: from `first_entry_id` on new bookies replace those that failed. None: it is in place already.

    If the last fragment starts there too, nothing in it was confirmed and nothing depends on it, so it is replaced.
    """
    assert ledger.state is LedgerState.OPEN, f"ledger {ledger.ledger_id} is {ledger.state}"
    last = ledger.last_fragment
    assert first_entry_id >= last.first_entry_id, f"{first_entry_id} is before the last fragment's {last.first_entry_id}"
    if first_entry_id == last.first_entry_id and set(replaced.values()) <= set(last.ensemble):
        return None
    assert set(replaced) <= set(last.ensemble), f"{replaced} of {last.ensemble}: only its writer changes an open last fragment"
    changed = Fragment(first_entry_id=first_entry_id, ensemble=tuple(replaced.get(bookie, bookie) for bookie in last.ensemble))
    kept = ledger.fragments[:-1] if first_entry_id == last.first_entry_id else ledger.fragments
    return _checked(ledger, ledger.replace(fragments=(*kept, changed)))


def bookies_replaced(ledger: LedgerMetadata, replaced: Mapping[tuple[int, str], str]) -> LedgerMetadata:
    """Return a replication worker's change after it moved copies.

    `replaced`: by (first entry of the fragment, old bookie) the new one, which holds everything that the old one should hold of
    this fragment. Only its writer may change the last fragment of a ledger that is not closed.
    """
    fragments: list[Fragment] = []
    for fragment in ledger.fragments:
        ensemble = tuple(replaced.get((fragment.first_entry_id, bookie), bookie) for bookie in fragment.ensemble)
        assert ensemble == fragment.ensemble or is_finished(ledger, fragment), f"{fragment} of ledger {ledger.ledger_id} is open"
        fragments.append(Fragment(first_entry_id=fragment.first_entry_id, ensemble=ensemble))
    return _checked(ledger, ledger.replace(fragments=tuple(fragments)))


def is_finished(ledger: LedgerMetadata, fragment: Fragment) -> bool:
    """Return whether it is certain which entries the fragment has: the ledger is closed, or another fragment follows.

    A fragment is followed by another only from LAC + 1 on, so all its entries are confirmed.
    """
    return ledger.is_closed or fragment.first_entry_id != ledger.last_fragment.first_entry_id


def entries_of(ledger: LedgerMetadata, fragment: Fragment) -> tuple[int, int]:
    """Return the first and last entry of a finished fragment, both inclusive; the last is below the first when it is empty."""
    assert is_finished(ledger, fragment), f"{fragment} of ledger {ledger.ledger_id} is open"
    following = [other.first_entry_id for other in ledger.fragments if other.first_entry_id > fragment.first_entry_id]
    if following:
        return fragment.first_entry_id, following[0] - 1
    assert ledger.last_entry_id is not None
    return fragment.first_entry_id, ledger.last_entry_id


def _checked(before: LedgerMetadata, after: LedgerMetadata) -> LedgerMetadata:
    assert_legal_change(before, after)
    return after


def assert_legal_change(before: LedgerMetadata, after: LedgerMetadata) -> None:
    """Assert invariants L1 and L2 between two committed versions of a record. (A valid one already has increasing fragments.)

    The record does not show which process replaced a bookie, or whether the new one holds the entries.
    """
    name = f"ledger {before.ledger_id}"
    assert after.state in _LEGAL[before.state], f"{name}: {before.state} must not become {after.state}"
    assert (before.ledger_id, before.ensemble_size, before.write_quorum, before.ack_quorum) == (
        after.ledger_id,
        after.ensemble_size,
        after.write_quorum,
        after.ack_quorum,
    ), f"{name}: id and sizes never change"
    kept = [fragment.first_entry_id for fragment in after.fragments[: len(before.fragments)]]
    assert kept == [fragment.first_entry_id for fragment in before.fragments], f"{name}: a fragment vanished or moved"
    grown = len(after.fragments) - len(before.fragments)
    if after.state is not LedgerState.CLOSED:
        assert grown <= (after.state is LedgerState.OPEN), f"{name}: {grown} new fragments while {after.state}"
    if before.is_closed:
        assert grown == 0, f"{name}: {grown} new fragments after its end"
        ends = (before.last_entry_id, before.length_bytes), (after.last_entry_id, after.length_bytes)
        assert ends[0] == ends[1], f"{name}: its end {ends[0]} became {ends[1]}"
