"""How long answers to failed authentications are delayed: guessing slows down, and no client is locked out. No I/O and no clock.

Only failures are delayed, so a client with valid credentials is served at once, even if others at the same address fail.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, IPv6Network

_FREE = 10
"""Failures of one address that are answered at once: a restarted client with an old password causes a few."""
_FIRST_DELAY_S = 0.25
MAX_DELAY_S = 4.0
"""Longest delay. Below the time limit for authentication, so that clients get the reason instead of a timeout."""
_FORGOTTEN_AFTER_S = 60.0
_MAX_ADDRESSES = 10_000


def network_of(address: str) -> str:
    """Return the unit that per-address limits count: an IPv4 address, or the /64 network of an IPv6 one, which one host may own.

    A port for both kinds reports IPv4 addresses mapped to IPv6: these count as separate addresses.
    """
    if ":" in address:
        try:
            found = IPv6Address(address.partition("%")[0])
            return str(found.ipv4_mapped or IPv6Network((found, 64), strict=False))
        except ValueError:
            pass  # no address: as it is
    return address


class FailedAttempts:
    """Failures by address (`network_of`). Beyond the bound the addresses that failed longest ago are dropped."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, tuple[int, float]] = OrderedDict()  # failures, time of the last one

    def __repr__(self) -> str:
        return f"<FailedAttempts {len(self._by_address)} addresses>"

    def note(self, address: str, now_s: float) -> float:
        """Count a failure, and return the seconds by which to delay its answer."""
        address = network_of(address)
        failures, last_s = self._by_address.pop(address, (0, now_s))
        failures = 1 if now_s - last_s > _FORGOTTEN_AFTER_S else failures + 1
        self._by_address[address] = (failures, now_s)
        if len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        if failures <= _FREE:
            return 0.0
        return min(_FIRST_DELAY_S * 2.0 ** min(failures - _FREE - 1, 10), MAX_DELAY_S)
