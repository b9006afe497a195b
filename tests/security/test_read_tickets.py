"""Read tickets: what a bookie makes of one, and how their keys change."""

from __future__ import annotations

import itertools

import pytest

from cepheid_security.read_tickets import (
    CLOCK_LEEWAY_MS,
    LAST_ENTRY,
    MAX_TICKET_BYTES,
    ReadTicket,
    TicketKey,
    TicketVerdict,
    check_ticket,
    plan_rotation,
    role_of_ticket,
    sign_ticket,
    signing_key,
)

NOW = 1_700_000_000_000
HOUR = 3_600_000
KEY = TicketKey(7, b"k" * 32, NOW - HOUR)
OTHER = TicketKey(8, b"o" * 32, NOW - HOUR)
TICKET = ReadTicket(12, 0, 99, "spark", NOW + HOUR)
SIGNED = sign_ticket(KEY, TICKET)
VALID, EXPIRED, REFUSED, UNKNOWN = (
    TicketVerdict.VALID,
    TicketVerdict.EXPIRED,
    TicketVerdict.REFUSED,
    TicketVerdict.UNKNOWN_KEY,
)


def flipped(place: int) -> bytes:
    changed = bytearray(SIGNED)
    changed[place] = ord("A") if changed[place] != ord("A") else ord("B")
    return bytes(changed)


@pytest.mark.parametrize(
    ("ticket", "now_ms", "ledger_id", "first", "last", "verdict"),
    [
        (SIGNED, NOW, 12, 0, 99, VALID),
        (SIGNED, NOW, 12, 40, 40, VALID),
        (SIGNED, NOW, 13, 0, 99, REFUSED),  # another ledger
        (SIGNED, NOW, 12, 0, 100, REFUSED),  # an entry too many
        (SIGNED, NOW, 12, 0, LAST_ENTRY, REFUSED),  # the newest entry of a ledger that has an end
        (SIGNED, NOW + HOUR + CLOCK_LEEWAY_MS, 12, 0, 99, VALID),  # clocks differ
        (SIGNED, NOW + HOUR + CLOCK_LEEWAY_MS + 1, 12, 0, 99, EXPIRED),
        (SIGNED, NOW + HOUR + CLOCK_LEEWAY_MS + 1, 13, 0, 99, REFUSED),  # what it does not permit is not a matter of time
        (sign_ticket(TicketKey(7, b"x" * 32, NOW), TICKET), NOW, 12, 0, 99, REFUSED),  # signed by somebody else
        (sign_ticket(TicketKey(9, KEY.secret, NOW), TICKET), NOW, 12, 0, 99, UNKNOWN),
        (sign_ticket(TicketKey(9, KEY.secret, NOW), TICKET), NOW + 2 * HOUR, 12, 0, 99, EXPIRED),  # its key was dropped since
        (b"", NOW, 12, 0, 99, REFUSED),
        (b"ct0.e30", NOW, 12, 0, 99, REFUSED),  # the unsigned one of a cluster without security
        (b"ct1.", NOW, 12, 0, 99, REFUSED),
        (b"ct1.!!!!", NOW, 12, 0, 99, REFUSED),
        (SIGNED[:-1], NOW, 12, 0, 99, REFUSED),
        (SIGNED + b"AAAA", NOW, 12, 0, 99, REFUSED),
        (b"ct1." + b"A" * MAX_TICKET_BYTES, NOW, 12, 0, 99, REFUSED),
        (SIGNED + b" " + SIGNED, NOW, 12, 0, 99, REFUSED),
    ],
)
def test_a_ticket_permits_its_entries_until_it_expires(
    ticket: bytes, now_ms: int, ledger_id: int, first: int, last: int, verdict: TicketVerdict
) -> None:
    assert check_ticket(ticket, {7: KEY, 8: OTHER}, now_ms, ledger_id, first, last) is verdict


def test_no_changed_byte_passes() -> None:
    for place in range(4, len(SIGNED)):
        changed = flipped(place)
        assert check_ticket(changed, {7: KEY, 8: OTHER}, NOW, 12, 0, 99) is not VALID or _same_bytes(changed), place


def _same_bytes(changed: bytes) -> bool:
    """The last character of base64 has bits that say nothing."""
    return changed[:-1] == SIGNED[:-1]


def test_a_ticket_names_its_role_and_hides_its_key() -> None:
    assert role_of_ticket(SIGNED) == "spark"
    assert role_of_ticket(b"garbage") == ""
    assert "kkk" not in repr(KEY)


def test_keys_rotate_without_refusing_a_ticket() -> None:
    """Over ten days: whatever is signed is valid at every process that looks once in a minute, for as long as it lasts."""
    numbers = itertools.count(1)

    def new_secret() -> tuple[int, bytes]:
        number = next(numbers)
        return number, bytes([number]) * 32

    keys: tuple[TicketKey, ...] = ()
    known_a_minute_ago: tuple[TicketKey, ...] = ()
    issued: list[tuple[bytes, int]] = []
    most = 0
    for now_ms in range(NOW, NOW + 10 * 24 * HOUR, 60_000):
        planned = plan_rotation(keys, now_ms, rotate_ms=24 * HOUR, life_ms=HOUR, notice_ms=60_000, new_secret=new_secret)
        known_a_minute_ago, keys = keys or planned or (), planned or keys
        signer = signing_key(keys, now_ms)
        assert signer is not None
        ticket = sign_ticket(signer, ReadTicket(1, 0, 9, "r", now_ms + HOUR))
        issued = [(data, until) for data, until in issued if until >= now_ms] + [(ticket, now_ms + HOUR)]
        for data, _ in issued[:: max(1, len(issued) // 5)]:
            for known in (keys, known_a_minute_ago):
                assert check_ticket(data, {key.key_id: key for key in known}, now_ms, 1, 0, 9) is VALID
        most = max(most, len(keys))
    assert most == 2, "old keys are dropped"
    assert next(numbers) > 9, "there is a new key each day"
