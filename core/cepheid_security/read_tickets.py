"""Signed permissions to read one ledger from a bookie. No I/O; callers pass the time.

    ct1.BASE64URL( version (1) │ key id (4) │ expires at, ms (8) │ ledger id (8) │ first entry (8) │ last entry (8) │
                   role length (2) │ role │ HMAC-SHA256 over all before (32) )              integers are little-endian

The plan service issues one for each ledger of a plan; a reader sends the ticket of the ledger that it reads. So a ticket is small
however many ledgers a topic has, and shows a bookie nothing about other ledgers.

Rule 1: a bookie with the key checks a ticket without metadata and without a broker.
Rule 2: keys rotate. A new key is published before it signs, and an old one is kept until its last ticket has expired
(`plan_rotation`).
Rule 3: a ticket whose key this bookie does not know is *unknown*, not refused: the key may not have arrived yet.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

PREFIX = b"ct1."
LAST_ENTRY = (1 << 63) - 1
"""Last entry of a ticket for an open ledger."""
CLOCK_LEEWAY_MS = 30_000
"""Tolerated difference of the clocks of a broker and a bookie."""
SECRET_BYTES = 32
MAX_TICKET_BYTES = 512

_VERSION = 1
_HEAD = struct.Struct("<BIqqqqH")
_MAC_BYTES = 32
_MAX_ROLE_BYTES = 200


class TicketVerdict(Enum):
    """The result of a bookie's check of a ticket."""

    VALID = "valid"
    EXPIRED = "expired"
    UNKNOWN_KEY = "unknown key"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TicketKey:
    """A key of tickets. It signs from `signs_from_ms` on (wall clock), when every bookie has had time to read it."""

    key_id: int
    secret: bytes = field(repr=False)
    signs_from_ms: int


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """Entries `first_entry_id..last_entry_id` of one ledger may be read by `role` until `expires_at_ms` (wall clock)."""

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    role: str
    expires_at_ms: int


def sign_ticket(key: TicketKey, ticket: ReadTicket) -> bytes:
    """Return the signed ticket as text, to be sent with each read."""
    role = ticket.role.encode()[:_MAX_ROLE_BYTES]
    head = _HEAD.pack(
        _VERSION,
        key.key_id,
        ticket.expires_at_ms,
        ticket.ledger_id,
        ticket.first_entry_id,
        ticket.last_entry_id,
        len(role),
    )
    signed = head + role
    return PREFIX + base64.urlsafe_b64encode(signed + hmac.digest(key.secret, signed, "sha256")).rstrip(b"=")


def check_ticket(
    data: bytes, keys: Mapping[int, TicketKey], now_ms: int, ledger_id: int, first_entry_id: int, last_entry_id: int
) -> TicketVerdict:
    """Return whether `data` permits to read `first_entry_id..last_entry_id` of `ledger_id` now. Never raises."""
    signed, mac = _opened(data)
    if signed is None:
        return TicketVerdict.REFUSED
    version, key_id, expires_at_ms, ledger, first, last, role_bytes = _HEAD.unpack_from(signed)
    if version != _VERSION or len(signed) != _HEAD.size + role_bytes:
        return TicketVerdict.REFUSED
    is_over = now_ms > expires_at_ms + CLOCK_LEEWAY_MS
    key = keys.get(key_id)
    if key is None:  # if the ticket has expired, the key was dropped since: the reader plans again
        return TicketVerdict.EXPIRED if is_over else TicketVerdict.UNKNOWN_KEY
    if not hmac.compare_digest(hmac.digest(key.secret, signed, "sha256"), mac):
        return TicketVerdict.REFUSED
    if ledger != ledger_id or first_entry_id < first or last_entry_id > last:
        return TicketVerdict.REFUSED
    return TicketVerdict.EXPIRED if is_over else TicketVerdict.VALID


def role_of_ticket(data: bytes) -> str:
    """Return the role in a ticket, unverified, for a log line; "" if it is not a ticket."""
    signed, _ = _opened(data)
    return "" if signed is None else signed[_HEAD.size :].decode(errors="replace")


def signing_key(keys: Sequence[TicketKey], now_ms: int) -> TicketKey | None:
    """Return the newest key that may sign, or the oldest one if none may yet; None without keys."""
    may_sign = [key for key in keys if key.signs_from_ms <= now_ms]
    return max(may_sign, key=lambda key: key.signs_from_ms) if may_sign else min(keys, key=_signs_from, default=None)


def plan_rotation(
    keys: Sequence[TicketKey],
    now_ms: int,
    *,
    rotate_ms: int,
    life_ms: int,
    notice_ms: int,
    new_secret: Callable[[], tuple[int, bytes]],
) -> tuple[TicketKey, ...] | None:
    """Return the keys after a rotation, or None if none is due.

    A key is added when the newest one has signed for `rotate_ms`, and signs `notice_ms` later. A key is dropped when the next one
    has signed for `life_ms`, the life of a ticket, plus the leeway of clocks.
    """
    if not keys:
        key_id, secret = new_secret()
        return (TicketKey(key_id, secret, now_ms),)
    ordered = sorted(keys, key=_signs_from)
    kept = [
        key
        for key, successor in zip(ordered, [*ordered[1:], None], strict=True)
        if successor is None or now_ms < successor.signs_from_ms + life_ms + 2 * CLOCK_LEEWAY_MS
    ]
    if now_ms >= ordered[-1].signs_from_ms + rotate_ms:
        key_id, secret = new_secret()
        kept.append(TicketKey(key_id, secret, now_ms + notice_ms))
    return None if kept == ordered else tuple(kept)


def _signs_from(key: TicketKey) -> int:
    return key.signs_from_ms


def _opened(data: bytes) -> tuple[bytes | None, bytes]:
    """Return the signed bytes and their signature; None if this is not a ticket."""
    if not data.startswith(PREFIX) or len(data) > MAX_TICKET_BYTES:
        return None, b""
    body = data[len(PREFIX) :]
    try:
        raw = base64.b64decode(body + b"=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None, b""
    if len(raw) < _HEAD.size + _MAC_BYTES:
        return None, b""
    return raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
