"""Check that the owner a lookup would name can be reached; if not, make the lookup wait for the next owner.

    There(owner) ──► is it heard? (broker_liveness.py) ──► yes ──► There
                         │ unknown: does it take connections? ────┘ asked every 0.2 s at most
                         └── no ──► look again every 0.1 s, once for all lookups of the bundle

A broker that was killed owns its bundles until it is found gone or its session ends. A client that is sent there meanwhile is
refused, and doubles its pause before each further attempt: with a session of 6 s, producers were seen to reconnect after 12 to
30 s. A waiting lookup is answered as soon as the bundle has an owner that can be reached.

If an owner's session outlives the wait, the owner runs and only this broker cannot reach it; clients may. Lookups then do not wait
for it for some time, which doubles with each wait in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.broker_liveness import Sign
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.ownership import Location, There
from cepheid_ports import SingleFlight

log = logging.getLogger(__name__)

POLL_S = 0.1
BELIEVED_S = 0.15
"""How long an owner that took a connection counts as reachable. Short, since its clients look it up at once when it is killed."""
FIRST_REST_S, LONGEST_REST_S = 300.0, 6 * 3600.0
"""How long lookups do not wait for an owner that only this broker cannot reach: doubled each time, until it is reached."""
CONNECT_LIMIT_S = 1.0

Probe = Callable[[str], Awaitable[bool]]
"""Return whether a process takes connections at host:port."""


@dataclass(frozen=True, slots=True)
class _Rest:
    length_s: float
    until_s: float


class OwnerReach:
    """Makes lookups wait for a reachable owner, for `patience_s` at most: less than clients wait for an answer (30 s)."""

    def __init__(self, patience_s: float, probe: Probe | None = None, *, sign_at: Callable[[There], Sign] | None = None) -> None:
        """`sign_at` returns what is known from other connections of the process with the id and addresses of a record."""
        self._sign_at = sign_at or (lambda _: Sign.UNKNOWN)
        self._patience_s = patience_s
        self._probe = probe or takes_connections
        self._answered_at: dict[str, float] = {}  # by address: as many as there are brokers
        self._rests: dict[str, _Rest] = {}  # by address
        self._probes: SingleFlight[str, bool] = SingleFlight("owner-probes", _closed)
        self._waits: SingleFlight[Bundle, Location] = SingleFlight("owner-waits", _closed)
        self.waiting = 0
        """Lookups that wait now."""
        self.waited = 0
        """Lookups that had to wait since the broker started."""

    def __repr__(self) -> str:
        return f"<OwnerReach: {len(self._waits)} bundles wait for an owner>"

    async def reachable(self, bundle: Bundle, found: Location, look: Callable[[], Awaitable[Location]]) -> Location:
        """Return `found`, or what `look` returns once the owner answers or has changed. Raises what `look` raises."""
        if not isinstance(found, There) or await self._answers(found):
            return found
        there = found
        self.waited += 1
        self.waiting += 1
        try:
            return await self._waits.run(bundle, lambda _: self._wait(bundle, there, look))
        finally:
            self.waiting -= 1

    async def aclose(self) -> None:
        await self._waits.aclose()
        await self._probes.aclose()

    async def _wait(self, bundle: Bundle, there: There, look: Callable[[], Awaitable[Location]]) -> Location:
        loop = asyncio.get_running_loop()
        began = loop.time()
        facts = {"bundle": str(bundle), "broker": there.broker_id, "address": there.client_address}
        log.warning(
            "owner.unreachable", extra={**facts, "hint": "its bundles go to others when it is found gone, or its session ends"}
        )
        location: Location = there
        while loop.time() - began < self._patience_s:
            await asyncio.sleep(POLL_S)
            location = await look()
            if not isinstance(location, There) or location.broker_id != there.broker_id or await self._answers(location):
                break
        else:
            rest_s = self._begin_rest(there.client_address, loop.time())
            hint = "it is registered, but this broker cannot connect to it: look at its advertised address, and at networks between"
            log.warning("owner.out_of_reach", extra={**facts, "not_waited_for_s": rest_s, "hint": hint})
        log.info("owner.waited_for", extra={**facts, "duration_ms": round(1000 * (loop.time() - began))})
        return location

    def _begin_rest(self, address: str, now_s: float) -> float:
        """Return how long the owner at the address is not waited for. Waits for several of its bundles begin one rest together."""
        rest = self._rests.get(address)
        if rest is None or now_s >= rest.until_s:
            length_s = FIRST_REST_S if rest is None else min(2 * rest.length_s, LONGEST_REST_S)
            rest = self._rests[address] = _Rest(length_s, now_s + length_s)
        return rest.length_s

    async def _answers(self, there: There) -> bool:
        address, now = there.client_address, asyncio.get_running_loop().time()
        if (sign := self._sign_at(there)) is not Sign.UNKNOWN:
            if sign is Sign.HEARD:
                self._rests.pop(address, None)
            return sign is Sign.HEARD
        rest = self._rests.get(address)
        if now - self._answered_at.get(address, float("-inf")) < BELIEVED_S or (rest is not None and now < rest.until_s):
            return True
        answers = await self._probes.run(address, self._probe)
        if answers:
            self._answered_at[address] = asyncio.get_running_loop().time()
            self._rests.pop(address, None)
        return answers


async def takes_connections(address: str) -> bool:
    """Return whether a process takes connections at host:port. A paused process does too: the kernel accepts them for it."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _closed() -> ServiceNotReadyError:
    return ServiceNotReadyError("this broker stops")
