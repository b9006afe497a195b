"""Decide how many connections the admin port holds, without I/O.

    admit ──► below both limits                  everything is served
          └─► above one of them: the reserve     only probes are answered; a full reserve drops its oldest connection

Rules
1. A flood cannot keep out a probe: it gets a place in the reserve at once, and uses it at once.
2. One address has few places in the reserve, so a flood from one address drops its own connections there.
3. Loopback has no limit of its own: a proxy on this machine brings the clients of many.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)

RESERVE = 64
RESERVE_PER_ADDRESS = 4


@dataclass(frozen=True, slots=True)
class AdminServerStatistics:
    """Figures of the admin port since the process started."""

    connections: int = 0
    limited: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class Admission(Generic[Connection]):
    """What a new connection may do. `limited_by` says why only probes are answered; `dropped` has to be closed for it."""

    limited_by: str | None = None
    dropped: Connection | None = None


class ConnectionLimits(Generic[Connection]):
    """The open connections of one port. `admit` and `release` each of them once."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._served: dict[Connection, str] = {}
        self._per_address: Counter[str] = Counter()
        self._reserve: OrderedDict[Connection, str] = OrderedDict()
        self._limited = 0
        self.timed_out = 0

    def __repr__(self) -> str:
        return f"<ConnectionLimits {len(self._served)} served, {len(self._reserve)} in reserve>"

    def statistics(self) -> AdminServerStatistics:
        return AdminServerStatistics(len(self._served) + len(self._reserve), self._limited, self.timed_out)

    def admit(self, connection: Connection, address: str) -> Admission[Connection]:
        """Give the connection a place. Never refuses: above the limits it is in the reserve."""
        limited_by = self._limit_reached(address)
        if limited_by is None:
            self._served[connection] = address
            self._per_address[address] += 1
            return Admission()
        self._limited += 1
        dropped = self._to_drop(address)
        if dropped is not None:
            del self._reserve[dropped]
        self._reserve[connection] = address
        return Admission(limited_by, dropped)

    def release(self, connection: Connection) -> None:
        """Free the place of a closed connection; one that was dropped has none."""
        self._reserve.pop(connection, None)
        address = self._served.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def _limit_reached(self, address: str) -> str | None:
        if len(self._served) >= self._max_connections:
            open_now = f"{self._max_connections:,} connections to the admin port are open"
            return f"{open_now}: close unused ones, or raise admin.max_connections"
        if not is_loopback(address) and self._per_address[address] >= self._max_per_address:
            open_now = f"{address} has {self._max_per_address:,} connections to the admin port open"
            return f"{open_now}: close unused ones, or raise admin.max_connections_per_address"
        return None

    def _to_drop(self, address: str) -> Connection | None:
        if not is_loopback(address):
            own = [connection for connection, each in self._reserve.items() if each == address]
            if len(own) >= RESERVE_PER_ADDRESS:
                return own[0]
        return next(iter(self._reserve)) if len(self._reserve) >= RESERVE else None


def is_loopback(address: str) -> bool:
    """Return whether the address is of this machine: proxies on it hide many clients, so limits per address exempt it."""
    try:
        found = ip_address(address)
    except ValueError:  # not a network address: a socket of this machine
        return True
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
