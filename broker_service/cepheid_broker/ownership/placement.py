"""Which broker should acquire a bundle without an owner: by the last known loads, or by a hash if loads are unknown.

    registered brokers ──► those that isolation policies allow ──► ordered: named by the last owner, then by room and hash

Rules
1. Without loads, or with old ones, the order depends only on the bundle and the ids of brokers: all brokers choose alike.
2. With loads, a broker is chosen in proportion to its free capacity. So the bundles of a broker that died are spread at once over
   all others, the least loaded of them get most, and small differences of the loads change few choices.
3. A broker of unknown load (of an earlier release, or not answering) counts with the mean of the known loads. A broker that
   registered less than `NEW_S` ago, or after the loads were published, counts as having no load.
4. A broker that is not steady is ordered last: each time it ends, the clients of its topics are interrupted.
5. The choice is advice: the owner's record decides. Two brokers that choose differently cost a redirect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

from cepheid_broker.ownership.bundles import Bundle, preference
from cepheid_broker.ownership.isolation import NO_ISOLATION, Addresses, IsolationRules

LOADS_VALID_S = 30.0
"""How long published loads are used. The leader publishes them every few seconds; without it they are soon out of date."""
NEW_S = 15.0
"""How long a broker counts as new: the leader has time for three rounds."""
_IDLE_LOAD = 0.1
"""Load below which differences do not matter."""
_ROOM_ABOVE_HIGHEST = 1.25


class Placement:
    """What one broker knows for choosing owners. Loads and policies are replaced as a whole when they change."""

    def __init__(self) -> None:
        self.isolation: IsolationRules = NO_ISOLATION
        self._loads: Mapping[str, float] = {}
        self._unsteady: Collection[str] = ()
        self._registered: Mapping[str, float] | None = None  # since when, by id, as far as known
        self._loads_until_s = float("-inf")

    def __repr__(self) -> str:
        return f"<Placement by {len(self._loads)} loads, {self.isolation!r}>"

    def set_loads(
        self, loads: Mapping[str, float], now_s: float, *, registered: Iterable[str], unsteady: Collection[str] = ()
    ) -> None:
        """Set the loads of brokers by id and which are unsteady, as published by the leader; `registered` are those that run."""
        self._loads, self._unsteady, self._loads_until_s = dict(loads), tuple(unsteady), now_s + LOADS_VALID_S
        first_s = float("-inf") if self._registered is None else now_s  # brokers of the first call may have run for long
        before = self._registered or {}
        self._registered = {name: before.get(name, first_s) for name in registered}

    def loads(self, now_s: float) -> Mapping[str, float]:
        """Return the loads by id; empty if they are unknown or too old."""
        return self._loads if now_s < self._loads_until_s else {}

    def allows(self, bundle: Bundle, broker_id: str, brokers: Addresses, *, now_s: float) -> bool:
        """Return whether isolation policies let the broker serve the bundle, given all registered brokers."""
        return broker_id in self.isolation.allowed(str(bundle.namespace), brokers, self.loads(now_s))

    def order(self, bundle: Bundle, brokers: Addresses, preferred: str = "", *, now_s: float) -> list[str]:
        """Return the ids of the brokers that may own the bundle, best first."""
        loads = self.loads(now_s)
        allowed = self.isolation.allowed(str(bundle.namespace), brokers, loads)
        if not loads:
            return preference(bundle, allowed, preferred)
        registered = self._registered or {}
        new = {name: 0.0 for name in brokers if now_s < registered.get(name, now_s) + NEW_S}
        return by_room(bundle, allowed, {**new, **loads}, preferred, unsteady=self._unsteady)


def by_room(
    bundle: Bundle, brokers: Iterable[str], loads: Mapping[str, float], preferred: str = "", *, unsteady: Collection[str] = ()
) -> list[str]:
    """Return the ids of brokers, best first, by rendezvous hashing weighted with each broker's free capacity (rule 2)."""
    unknown = sum(loads.values()) / max(1, len(loads))  # rule 3
    known = {broker_id: loads.get(broker_id, unknown) for broker_id in brokers}
    full = _ROOM_ABOVE_HIGHEST * max([_IDLE_LOAD, *known.values()])

    def rank(broker_id: str) -> tuple[bool, bool, float]:
        digest = blake2b(f"{bundle} {broker_id}".encode(), digest_size=8).digest()
        chance = 1.0 - (int.from_bytes(digest) + 1) / (2**64 + 2)  # in (0, 1); with equal loads the order is that of `preference`
        room = full - known[broker_id]
        return broker_id != preferred, broker_id in unsteady, -math.log(chance) / room

    return sorted(known, key=rank)
