"""Limit the connections of a port: before authentication, of one address, and in all. No I/O.

    Arrivals           refuses connections above a bound on unauthenticated ones; each authentication frees a place
    ConnectionLimits   refuses none: above the limits a connection is in a reserve, where only probes are answered

    Arrivals.admit ──► Place: arriving (TLS handshake, authentication) ──settle──► served ──free──► gone
                   └─► the reason why there is no place: the connection is closed at once

    ConnectionLimits.admit ──► below both limits                  everything is served
                           └─► above one of them: the reserve     only probes are answered; a full one drops its oldest connection

Rules
1. A flood cannot keep out a probe: a probe gets a place in the reserve at once, and uses it at once.
2. One address has few places in the reserve, so a flood from one address drops its own connections there.
3. Loopback has no limit per address: a proxy on this machine forwards many clients.
4. Of IPv6 a network /64 counts as one address, since one host may use all of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

from cepheid_security.failed_attempts import network_of

Connection = TypeVar("Connection", bound=Hashable)

RESERVE = 64
RESERVE_PER_ADDRESS = 4


class Place:
    """The place of one connection. Call `settle` after authentication and `free` at its end; both are idempotent."""

    __slots__ = ("_address", "_arrivals", "_is_arriving", "_is_free")

    def __init__(self, arrivals: Arrivals, address: str) -> None:
        self._arrivals = arrivals
        self._address = address
        self._is_arriving = True
        self._is_free = False

    def settle(self) -> None:
        if self._is_arriving:
            self._is_arriving = False
            self._arrivals.on_settled(self._address)

    def free(self) -> None:
        if not self._is_free:
            self._is_free = True
            self.settle()
            self._arrivals.on_freed(self._address)


class Arrivals:
    """The places of one or several ports. `names_settings`: whether reasons name the broker's settings for the limits."""

    def __init__(
        self, *, max_arriving: int, max_arriving_per_address: int, max_per_address: int, names_settings: bool = True
    ) -> None:
        self._names_settings = names_settings
        self._max_arriving = max_arriving
        self._max_arriving_per_address = max_arriving_per_address
        self._max_per_address = max_per_address
        self.arriving = 0
        self._arriving_of: Counter[str] = Counter()
        self._open_of: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Arrivals {self.arriving} arriving, {self._open_of.total()} in all>"

    def admit(self, address: str) -> Place | str:
        """Return a place for a new connection, or the reason for refusing it."""
        network = network_of(address)
        if self.arriving >= self._max_arriving:
            return self._named(f"{self.arriving:,} connections have not authenticated yet", "connection.max_unauthenticated")
        if not is_loopback(address):
            if self._arriving_of[network] >= self._max_arriving_per_address:
                reason = f"{self._arriving_of[network]:,} connections of {network} have not authenticated yet"
                return self._named(reason, "connection.max_unauthenticated_per_address")
            if self._open_of[network] >= self._max_per_address:
                return self._named(f"{network} has {self._open_of[network]:,} connections open", "max_connections_per_address")
        self.arriving += 1
        self._arriving_of[network] += 1
        self._open_of[network] += 1
        return Place(self, network)

    def _named(self, reason: str, setting: str) -> str:
        return f"{reason} ({setting})" if self._names_settings else reason

    def on_settled(self, address: str) -> None:
        self.arriving -= 1
        _decrease(self._arriving_of, address)

    def on_freed(self, address: str) -> None:
        _decrease(self._open_of, address)


def _decrease(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]


@dataclass(frozen=True, slots=True)
class PortStatistics:
    """Figures of one port since the process started."""

    connections: int = 0
    limited: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class Admission(Generic[Connection]):
    """The result of `admit`. `limited_by` says why only probes are answered, if so; close the connection `dropped`, if any."""

    limited_by: str | None = None
    dropped: Connection | None = None


class ConnectionLimits(Generic[Connection]):
    """The open connections of one port. Call `admit` and `release` once for each.

    `port` is its name in messages. `settings` is the prefix of the settings with the limits, None for constant limits.
    """

    def __init__(self, max_connections: int, max_per_address: int, *, port: str = "admin", settings: str | None = "admin") -> None:
        self._port = port
        self._settings = settings
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._served: dict[Connection, str] = {}
        self._per_address: Counter[str] = Counter()
        self._reserve: OrderedDict[Connection, str] = OrderedDict()
        self._limited = 0
        self.timed_out = 0

    def __repr__(self) -> str:
        return f"<ConnectionLimits {len(self._served)} served, {len(self._reserve)} in reserve>"

    def statistics(self) -> PortStatistics:
        return PortStatistics(len(self._served) + len(self._reserve), self._limited, self.timed_out)

    def admit(self, connection: Connection, address: str) -> Admission[Connection]:
        """Give the connection a place. Never refuses: above the limits it is in the reserve."""
        network = network_of(address)
        limited_by = self._limit_reached(address, network)
        if limited_by is None:
            self._served[connection] = network
            self._per_address[network] += 1
            return Admission()
        self._limited += 1
        dropped = self._to_drop(address, network)
        if dropped is not None:
            del self._reserve[dropped]
        self._reserve[connection] = network
        return Admission(limited_by, dropped)

    def release(self, connection: Connection) -> None:
        """Free the place of a closed connection. A dropped one has none."""
        self._reserve.pop(connection, None)
        network = self._served.pop(connection, None)
        if network is not None:
            _decrease(self._per_address, network)

    def _limit_reached(self, address: str, network: str) -> str | None:
        if len(self._served) >= self._max_connections:
            return self._full(f"{self._max_connections:,} connections to the {self._port} port are open", "max_connections")
        if not is_loopback(address) and self._per_address[network] >= self._max_per_address:
            open_now = f"{network} has {self._max_per_address:,} connections to the {self._port} port open"
            return self._full(open_now, "max_connections_per_address")
        return None

    def _full(self, open_now: str, setting: str) -> str:
        raised = "" if self._settings is None else f", or raise {self._settings}.{setting}"
        return f"{open_now}: close unused ones{raised}"

    def _to_drop(self, address: str, network: str) -> Connection | None:
        if not is_loopback(address):
            own = [connection for connection, each in self._reserve.items() if each == network]
            if len(own) >= RESERVE_PER_ADDRESS:
                return own[0]
        return next(iter(self._reserve)) if len(self._reserve) >= RESERVE else None


def is_loopback(address: str) -> bool:
    """Return whether the address is of this machine. Limits per address exempt it, since a proxy here forwards many clients."""
    try:
        found = ip_address(address)
    except ValueError:  # not a network address: a socket of this machine
        return True
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
