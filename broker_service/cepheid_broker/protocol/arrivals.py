"""How many connections the protocol ports hold before it is known who they are, and how many of one address. No I/O.

    admit ──► Place: arriving (TLS handshake, CONNECT, authentication) ──settle──► served ──free──► gone
          └─► the reason why there is no place: the connection is closed at once

Loopback has no limits by address: a proxy on this machine brings the clients of many.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address


class Place:
    """What one connection occupies. `settle` when its client is known, `free` at its end; both may be called again."""

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
    """The places of one broker."""

    def __init__(self, *, max_arriving: int, max_arriving_per_address: int, max_per_address: int) -> None:
        self._max_arriving = max_arriving
        self._max_arriving_per_address = max_arriving_per_address
        self._max_per_address = max_per_address
        self.arriving = 0
        self._arriving_of: Counter[str] = Counter()
        self._open_of: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Arrivals {self.arriving} arriving, {self._open_of.total()} in all>"

    def admit(self, address: str) -> Place | str:
        """Return a place for a new connection, or the reason why it gets none."""
        if self.arriving >= self._max_arriving:
            return f"{self.arriving:,} connections have not authenticated yet (connection.max_unauthenticated)"
        if not is_loopback(address):
            if self._arriving_of[address] >= self._max_arriving_per_address:
                return (
                    f"{self._arriving_of[address]:,} connections of {address} have not authenticated yet "
                    "(connection.max_unauthenticated_per_address)"
                )
            if self._open_of[address] >= self._max_per_address:
                return f"{address} has {self._open_of[address]:,} connections open (max_connections_per_address)"
        self.arriving += 1
        self._arriving_of[address] += 1
        self._open_of[address] += 1
        return Place(self, address)

    def on_settled(self, address: str) -> None:
        self.arriving -= 1
        _decrease(self._arriving_of, address)

    def on_freed(self, address: str) -> None:
        _decrease(self._open_of, address)


def _decrease(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]


def is_loopback(address: str) -> bool:
    """Whether the address is of this machine. What is not a network address is a socket of this machine."""
    try:
        found = ip_address(address)
    except ValueError:
        return True
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
