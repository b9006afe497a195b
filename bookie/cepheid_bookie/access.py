"""Who may do what at a bookie's ports: the role of a caller's certificate, and read tickets. No I/O.

    certificate ──► role ──► a cluster role: everything        a reader role: reads without a ticket
                                   └── any other: reads with a ticket for the ledger, nothing else

Rule 1: writes, fences and recovery reads are for cluster roles alone, whatever key or ticket comes with them.
Rule 2: tickets are checked behind the ports (scans.py, `Bookie.read_lac`), so that the scan port and gRPC are alike. The port says
who asks (denials.py).
Rule 3: a broker in the bookie's own process does not come through a port, and is not asked for its role.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cepheid_bookie.denials import Denials
from cepheid_bookie.scans import AuthorizeRead
from cepheid_rpc import Status
from cepheid_security.read_tickets import TicketVerdict
from cepheid_security.tls import CertificateRule

CheckTicket = Callable[[bytes, int, int, int], TicketVerdict]
"""`(ticket, ledger_id, first_entry_id, last_entry_id)`."""

_REASONS = {
    TicketVerdict.EXPIRED: "the read ticket has expired",
    TicketVerdict.UNKNOWN_KEY: "the read ticket names a key that this bookie does not know",
    TicketVerdict.REFUSED: "the read ticket is not valid for these entries",
}
_STATUSES = {
    TicketVerdict.VALID: Status.OK,
    TicketVerdict.EXPIRED: Status.TICKET_EXPIRED,
    TicketVerdict.UNKNOWN_KEY: Status.TICKET_KEY_UNKNOWN,  # the reader tries again, and then with a new ticket
    TicketVerdict.REFUSED: Status.UNAUTHORIZED,
}


@dataclass(frozen=True, slots=True)
class BookieAccess:
    """What roles may do. `open_without_tls`: a caller on a port without TLS may do everything, as without security.

    `certificate_role`: which name in a certificate is the role.
    """

    cluster_roles: frozenset[str] = frozenset()
    reader_roles: frozenset[str] = frozenset()
    open_without_tls: bool = False
    open_reads_without_tls: Callable[[], bool] = bool
    """Whether a caller on a port without TLS may read without a ticket: of a release that knows none, while it is replaced."""
    certificate_role: CertificateRule = "common_name"

    def may_change(self, role: str, *, is_encrypted: bool) -> bool:
        """Return whether the role may write, fence and recover."""
        return role in self.cluster_roles or (self.open_without_tls and not is_encrypted)

    def may_read(self, role: str, *, is_encrypted: bool) -> bool:
        """Return whether the role may read without a ticket."""
        if self.may_change(role, is_encrypted=is_encrypted) or role in self.reader_roles:
            return True
        return not is_encrypted and self.open_reads_without_tls()


OPEN_ACCESS = BookieAccess(open_without_tls=True)
"""A bookie without security."""


def ticket_check(check: CheckTicket, denials: Denials | None = None) -> AuthorizeRead:
    """Return the check of read tickets as a bookie's reads ask for it. `denials` receives the tickets that do not hold."""

    def authorize(ticket: bytes, ledger_id: int, first_entry_id: int, last_entry_id: int) -> Status:
        verdict = check(ticket, ledger_id, first_entry_id, last_entry_id)
        if verdict is not TicketVerdict.VALID and denials is not None:
            denials.ticket(ledger_id, _REASONS[verdict] if ticket else "a read without a ticket: plan it through a broker")
        return _STATUSES[verdict]

    return authorize
