"""Refusals by a bookie's ports, for the process's log and for the audit log.

    gRPC port ──► role(...): the caller's certificate does not allow the call
    gRPC port, scan port ──► asking(caller) ──► storage code ──► ticket check ──► ticket(...): the read ticket does not hold
    scan port, health port ──► handshake(...): no TLS connection

Rule 1: tickets are checked after the ports, and only the ports know the caller. A port names it for its own task with `asking`.
Rule 2: callers can repeat refused calls at will. The process's log has one line for many (`RefusalLog`), and the audit log has a
budget for each address and role (cepheid_security/audit.py, rule 3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from cepheid_ports import RefusalLog, host_of, host_port
from cepheid_security import Principal
from cepheid_security.audit import TLS_HANDSHAKE, AuditLog


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller at a port and what it requests. `role`: the common name of its certificate, "" without one. `peer`: its address."""

    role: str
    peer: str
    operation: str

    @property
    def principal(self) -> Principal | None:
        return Principal(self.role, "tls") if self.role else None


_NOBODY = Caller("", "", "read")
_asking: ContextVar[Caller] = ContextVar("cepheid_bookie.asking", default=_NOBODY)


@contextmanager
def asking(caller: Caller) -> Iterator[None]:
    """Name the caller on whose behalf this task works inside the block."""
    token = _asking.set(caller)
    try:
        yield
    finally:
        _asking.reset(token)


class Denials:
    """Counts and logs refusals, one object per bookie process. `audit` is set when the process has opened its audit log."""

    def __init__(self, audit: AuditLog | None = None) -> None:
        self.audit = audit or AuditLog()
        self.roles = self.tickets = self.handshakes = 0
        """Number of refusals, by reason."""
        self._refusals = RefusalLog()

    def __repr__(self) -> str:
        return f"<Denials {self.roles} roles, {self.tickets} tickets, {self.handshakes} handshakes>"

    def role(self, caller: Caller, object: str, reason: str) -> None:
        """Record a call that the caller's role may not make. `object`: the ledger, "" if unknown."""
        self.roles += 1
        facts = {"method": caller.operation, "peer": caller.peer, "role": caller.role, "reason": reason}
        self._refusals.note("bookie.request.denied", (caller.operation, caller.role), level=logging.WARNING, **facts)
        self.audit.record(caller.principal, caller.peer, caller.operation, object, "denied", f"role {caller.role!r}: {reason}")

    def ticket(self, ledger_id: int, reason: str) -> None:
        """Record an invalid read ticket of the caller that `asking` names."""
        self.tickets += 1
        caller = _asking.get()
        facts = {"method": caller.operation, "peer": caller.peer, "role": caller.role, "reason": reason}
        self._refusals.note("bookie.ticket.denied", (reason, caller.role), level=logging.WARNING, ledger_id=ledger_id, **facts)
        self.audit.record(caller.principal, caller.peer, caller.operation, f"ledger {ledger_id}", "denied", reason)

    def handshake(self, peer: str, port: str, reason: str, *, logged: bool = False) -> None:
        """Record a failed TLS handshake. `port` is a name such as "scan port 3182".

        `logged`: the port's own server has written the log line.
        """
        self.handshakes += 1
        if not logged:
            facts = {"peer": peer, "port": port, "error": reason}
            self._refusals.note("tls.handshake_failed", (host_of(peer), reason), level=logging.WARNING, **facts)
        self.audit.record(None, peer, TLS_HANDSHAKE, port, "denied", reason)


def address_of(peer: object) -> str:
    """Return a socket's peer name as `host:port`; "" if it has no port, such as a Unix socket."""
    if not isinstance(peer, tuple):
        return ""
    return host_port(str(peer[0]), int(peer[1]))
