"""Which broker is to have a bundle that no broker has: by the last known loads, and by a hash where loads are not known.

    registered brokers ──► those that isolation policies allow ──► ordered: named by the last owner, then by room and hash

Rules
1. Without loads, or with old ones, the order depends on the bundle and the ids of brokers alone: all brokers choose alike.
2. With loads a broker is chosen in proportion to the room that it has. So the bundles of a broker that died are spread at once over
   all others, the least loaded of them get most, and small differences of the loads change few choices.
3. A broker of which no load is known has just started: it counts as having none.
4. The choice is advice: the owner's record decides. Two brokers that choose differently cost a redirect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from cepheid_broker.ownership.bundles import Bundle, preference
from cepheid_broker.ownership.isolation import NO_ISOLATION, Addresses, IsolationRules

LOADS_VALID_S = 30.0
"""The leader tells loads every few seconds. When it is gone they soon say nothing."""
_IDLE_LOAD = 0.1
"""Below it differences do not matter."""
_ROOM_ABOVE_HIGHEST = 1.25


class Placement:
    """What one broker knows for choosing. Loads and policies are replaced as a whole by their followers."""

    def __init__(self) -> None:
        self.isolation: IsolationRules = NO_ISOLATION
        self._loads: Mapping[str, float] = {}
        self._loads_until_s = float("-inf")

    def __repr__(self) -> str:
        return f"<Placement by {len(self._loads)} loads, {self.isolation!r}>"

    def set_loads(self, loads: Mapping[str, float], now_s: float) -> None:
        """Take the loads of brokers by id, as the leader tells them."""
        self._loads, self._loads_until_s = dict(loads), now_s + LOADS_VALID_S

    def loads(self, now_s: float) -> Mapping[str, float]:
        """Return the loads by id; empty: they are not known."""
        return self._loads if now_s < self._loads_until_s else {}

    def allows(self, bundle: Bundle, broker_id: str, brokers: Addresses, *, now_s: float) -> bool:
        """Return whether isolation policies let the broker serve the bundle, given all registered brokers."""
        return broker_id in self.isolation.allowed(str(bundle.namespace), brokers, self.loads(now_s))

    def order(self, bundle: Bundle, brokers: Addresses, preferred: str = "", *, now_s: float) -> list[str]:
        """Return ids of brokers, best first. Empty: no broker may have it."""
        loads = self.loads(now_s)
        allowed = self.isolation.allowed(str(bundle.namespace), brokers, loads)
        if not loads:
            return preference(bundle, allowed, preferred)
        return by_room(bundle, allowed, loads, preferred)


def by_room(bundle: Bundle, brokers: Iterable[str], loads: Mapping[str, float], preferred: str = "") -> list[str]:
    """Return ids of brokers, best first: weighted rendezvous hashing, the weight of a broker is the room that it has (rule 2)."""
    ids = list(dict.fromkeys(brokers))
    full = _ROOM_ABOVE_HIGHEST * max([_IDLE_LOAD, *(loads.get(broker_id, 0.0) for broker_id in ids)])

    def rank(broker_id: str) -> tuple[bool, float]:
        digest = blake2b(f"{bundle} {broker_id}".encode(), digest_size=8).digest()
        chance = 1.0 - (int.from_bytes(digest) + 1) / (2**64 + 2)  # in (0, 1); of equal loads the order is that of `preference`
        return broker_id != preferred, -math.log(chance) / (full - loads.get(broker_id, 0.0))

    return sorted(ids, key=rank)
