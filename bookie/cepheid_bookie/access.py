"""Permissions at a bookie's ports, by the role in a caller's certificate and by read tickets. No I/O.

    certificate ──► role ──► a cluster role: everything        a reader role: reads without a ticket
                                   └── any other: reads with a ticket for the ledger, nothing else

    operation ──OPERATION_NEEDS──► need ──BookieAccess.refusal──► None, or why the role may not

Rule 1: writes, fences and recovery reads are for cluster roles alone, whatever key or ticket is shown. An operation that has no row
in the table is refused.
Rule 2: tickets are checked after the ports (scans.py, `Bookie.read_lac`), so that the scan port and gRPC are alike. The port names
the caller (denials.py).
Rule 3: a broker in the bookie's own process does not use a port, and its role is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from cepheid_bookie.denials import Denials
from cepheid_bookie.scans import AuthorizeRead
from cepheid_rpc import ADD, READ, READ_LAC, RECOVER, SCAN_PORT, WRITE_LAC, Status
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
    TicketVerdict.UNKNOWN_KEY: Status.TICKET_KEY_UNKNOWN,  # the reader tries again, then with a new ticket
    TicketVerdict.REFUSED: Status.UNAUTHORIZED,
}


FENCE = "fence"
"""A ReadLac or Read request that fences the ledger."""
SCAN = "Scan"
"""A Read request that is a scan, and every request at the scan port."""


class Need(Enum):
    """What a caller of an operation needs."""

    NOTHING = auto()
    CERTIFICATE = auto()
    """A completed handshake of its port."""
    TICKET = auto()
    """A valid read ticket. It is checked after the port (rule 2), whatever the role is."""
    READER_OR_TICKET = auto()
    """A role that reads without a ticket, or a ticket, which is checked after the port."""
    READER = auto()
    """A role that reads without a ticket."""
    CLUSTER = auto()
    """A role of the cluster's own processes."""


OPERATION_NEEDS: Mapping[str, Need] = {
    # calls of the gRPC port
    ADD: Need.CLUSTER,
    WRITE_LAC: Need.CLUSTER,
    RECOVER: Need.CLUSTER,
    READ_LAC: Need.READER_OR_TICKET,
    READ: Need.READER,
    SCAN_PORT: Need.CERTIFICATE,
    # kinds of their requests, whose need differs from that of the call; the last one is also that of the scan port
    FENCE: Need.CLUSTER,
    SCAN: Need.TICKET,
    # pages of the health port
    "/health": Need.NOTHING,
    "/ready": Need.NOTHING,
    "/metrics": Need.NOTHING,
    "/caught-up": Need.NOTHING,  # of a process that also repairs; tools that restart bookies request it
    "/ledgers": Need.READER,
}
"""All operations that a bookie's ports serve. A test compares them with the ports."""

_NEEDS_CLUSTER = "only brokers and repair workers of this cluster may change what a bookie holds"
_NEEDS_READER = "a read needs a ticket: plan it through a broker, which issues tickets"


@dataclass(frozen=True, slots=True)
class BookieAccess:
    """Permissions of roles. `open_without_tls`: a caller on a port without TLS may do everything, as without security.

    `certificate_role`: which name in a certificate is the role.
    """

    cluster_roles: frozenset[str] = frozenset()
    reader_roles: frozenset[str] = frozenset()
    open_without_tls: bool = False
    open_reads_without_tls: Callable[[], bool] = bool
    """Whether a caller on a port without TLS may read without a ticket: during an upgrade from a release without tickets."""
    certificate_role: CertificateRule = "common_name"

    def refusal(self, operation: str, role: str, *, is_encrypted: bool, has_ticket: bool = False) -> str | None:
        """Return why the role may not do this; None if it may. A ticket is checked after the port."""
        need = OPERATION_NEEDS.get(operation)
        if need is None:
            return f"the operation {operation!r} has no row in the table of permissions"
        if need is Need.CLUSTER:
            return None if self.may_change(role, is_encrypted=is_encrypted) else _NEEDS_CLUSTER
        if need is Need.READER or (need is Need.READER_OR_TICKET and not has_ticket):
            return None if self.may_read(role, is_encrypted=is_encrypted) else _NEEDS_READER
        return None

    def may_change(self, role: str, *, is_encrypted: bool) -> bool:
        """Return whether the role may write, fence and recover."""
        return role in self.cluster_roles or (self.open_without_tls and not is_encrypted)

    def may_read(self, role: str, *, is_encrypted: bool) -> bool:
        """Return whether the role may read without a ticket."""
        if self.may_change(role, is_encrypted=is_encrypted) or role in self.reader_roles:
            return True
        return not is_encrypted and self.open_reads_without_tls()


OPEN_ACCESS = BookieAccess(open_without_tls=True)
"""The permissions of a bookie without security."""


def ticket_check(check: CheckTicket, denials: Denials | None = None) -> AuthorizeRead:
    """Return the check of read tickets that a bookie's reads call. Invalid tickets are reported to `denials`."""

    def authorize(ticket: bytes, ledger_id: int, first_entry_id: int, last_entry_id: int) -> Status:
        verdict = check(ticket, ledger_id, first_entry_id, last_entry_id)
        if verdict is not TicketVerdict.VALID and denials is not None:
            denials.ticket(ledger_id, _REASONS[verdict] if ticket else "a read without a ticket: plan it through a broker")
        return _STATUSES[verdict]

    return authorize
