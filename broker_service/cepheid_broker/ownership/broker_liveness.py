"""Which other brokers are alive, known within seconds and long before their sessions with the metadata store end.

    each registered broker ──► a connection, PING every 0.5 s ──► heard
                                  │ it breaks and two reconnects are refused ────┐
                                  │ nothing heard for 1.2 s ─────────────────────┴──► challenge ──► alive, or gone
    gone ──► a broker that is asked for one of its bundles may acquire it (bundle_tenures.py)

A *challenge* deletes the broker's registration. A living broker puts it back at once, as brokers of every release do
(registration.py); one that does not within the limit is gone, and its registration is deleted. So a broker that reaches the
metadata store keeps its bundles even if its peers cannot reach it, and one that reaches its peers keeps them even if it cannot
reach the store.

Rules
1. A broker counts as gone only after a failed challenge. A broker without a session challenges no other.
2. Time during which this broker was paused does not count as another's silence. A timer that fires late shows such a pause.
3. A verdict only saves time; safety does not depend on it. A broker that is alive all the same finds its bundles' records replaced
   and its ledgers fenced; it registers again and counts as alive from then on.
4. A broker that answered a challenge and still cannot be reached is left alone for a while, longer each time: clients may reach
   it where this broker does not.
5. A broker whose registration was deleted is watched until it is found gone. Another broker may have challenged it, and
   each broker has to find out by itself whether it may acquire the bundles.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from cepheid_broker.ownership.broker_directory import BrokerDirectory
from cepheid_broker.ownership.ownership import There
from cepheid_broker.ownership.peer_link import LinkRefusedError
from cepheid_metadata import (
    BadVersionError,
    BrokerRegistration,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    SessionState,
    broker_records,
)
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

SILENCE_S = 1.2
"""How long a broker may be silent before it is challenged. Most pauses of an interpreter or a disk are shorter."""
REFUSED_AGAIN_S = 0.1
"""Pause between two attempts to connect, long enough for a restarted process to listen again."""
ANSWER_S = {"refused": 0.5, "silent": 1.0}
"""How long a broker has to answer a challenge. A refused connection means that its process is gone, so it gets less time."""
OVERSLEPT_S = 0.2
"""A timer that fires this late means that this process itself was paused (rule 2)."""
TICK_S = 0.2
"""How often a watcher wakes up. With short timers a pause of this process shows as lateness, whenever it began."""
FIRST_REST_S, LONGEST_REST_S = 5.0, 300.0
RESTING_S = 1.0
"""How long a broker is not challenged again (rule 4), and how often connecting to it is tried meanwhile."""

Link = Callable[[Mapping[str, str], Callable[[], None]], Awaitable[None]]
"""Keep a connection to the broker at these addresses, and call the function whenever something arrives from it. Raises when the
connection ends: ConnectionRefusedError if no process listens there, LinkRefusedError if the broker refuses this one."""


class Sign(enum.Enum):
    """What is known of a broker."""

    UNKNOWN = "unknown"
    """Nothing was heard yet, or the broker is alive but unreachable from here."""
    HEARD = "heard"
    SUSPECT = "suspect"


@dataclass(slots=True, eq=False)
class PeerSigns:
    """What this broker heard from another one, and when; without I/O. Times are those of the event loop, in seconds."""

    since_s: float
    refusals: int = 0
    sign: Sign = Sign.UNKNOWN
    rest_until_s: float = 0.0
    rests: int = 0

    @property
    def silent_at_s(self) -> float:
        return self.since_s + SILENCE_S

    def on_heard(self, now_s: float) -> None:
        self.since_s, self.refusals, self.sign, self.rests = now_s, 0, Sign.HEARD, 0
        # Once reachable again it may be challenged like others, but not at once: the connection may be flapping.
        self.rest_until_s = min(self.rest_until_s, now_s + FIRST_REST_S)

    def on_ended(self, *, refused: bool) -> None:
        """Note that the connection ended or could not be opened."""
        self.refusals = self.refusals + 1 if refused else 0
        if self.sign is Sign.HEARD:
            self.sign = Sign.SUSPECT

    def on_timer(self, now_s: float, due_s: float) -> None:
        """Note that a timer of the watcher fired. If it was late, the silence begins again (rule 2)."""
        if now_s - due_s >= OVERSLEPT_S:
            self.since_s = now_s

    def suspicion(self, now_s: float) -> str:
        """Return why to challenge the broker, a key of `ANSWER_S`, or "" for no reason or a rest that has not ended (rule 4)."""
        if now_s < self.rest_until_s:
            return ""
        if self.refusals >= 2:
            return "refused"
        return "silent" if now_s >= self.silent_at_s else ""

    def on_answered(self, now_s: float) -> None:
        """Note that the broker answered a challenge: it is alive, but unreachable from here."""
        self.since_s, self.refusals, self.sign = now_s, 0, Sign.UNKNOWN
        doublings = min(self.rests, 10)  # more make no difference, and a float does not hold a thousand
        self.rest_until_s = now_s + min(FIRST_REST_S * 2**doublings, LONGEST_REST_S)
        self.rests += 1


@dataclass(slots=True, eq=False)
class _Peer:
    registration: BrokerRegistration
    signs: PeerSigns
    task: asyncio.Task[None] | None = None
    challenged: bool = field(default=False)


class BrokerLiveness:
    """Watches the other brokers and challenges silent ones. Call `start` once this broker is registered, and `aclose` once."""

    def __init__(self, store: MetadataStore, link: Link) -> None:
        self._store = store
        self._records = broker_records(store)
        self._link = link
        self._tasks = TaskOwner("broker-liveness")
        self._peers: dict[str, _Peer] = {}
        self._gone: set[str] = set()
        self._own_id = ""
        self._directory: BrokerDirectory
        self.challenges = 0
        """Challenges that this broker has sent."""
        self.found_gone = 0
        """Challenges that were not answered."""

    def __repr__(self) -> str:
        return f"<BrokerLiveness: {self.heard} of {len(self._peers)} heard, {len(self._gone)} gone>"

    @property
    def heard(self) -> int:
        """Number of other brokers that answer now."""
        return sum(peer.signs.sign is Sign.HEARD for peer in self._peers.values())

    def start(self, own_id: str, directory: BrokerDirectory) -> None:
        self._own_id, self._directory = own_id, directory
        directory.on_changed = self._on_changed
        self._on_changed()

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def sign_of(self, broker_id: str) -> Sign:
        if broker_id in self._gone:
            return Sign.SUSPECT
        peer = self._peers.get(broker_id)
        return Sign.UNKNOWN if peer is None else peer.signs.sign

    def sign_at(self, there: There) -> Sign:
        """Return what is known of the broker at these addresses. A process with the same id at other addresses tells nothing."""
        peer = self._peers.get(there.broker_id)
        if peer is not None and peer.registration.addresses != there.addresses:
            return Sign.UNKNOWN
        return self.sign_of(there.broker_id)

    def is_gone(self, broker_id: str) -> bool:
        """Return whether the broker left its last challenge unanswered. Call `has_come_back` before acting on it."""
        return broker_id in self._gone

    async def has_come_back(self, broker_id: str) -> bool:
        """Return whether a broker that was found gone is registered again. Raises MetadataError."""
        if await self._records.get(broker_id) is None:
            return False
        self._gone.discard(broker_id)
        return True

    def _on_changed(self) -> None:
        brokers = self._directory.brokers
        for name, peer in list(self._peers.items()):
            if brokers.get(name, peer.registration) != peer.registration and not peer.challenged:  # rule 5
                del self._peers[name]
                if peer.task is not None:
                    peer.task.cancel()
        for name, registration in brokers.items():
            if name != self._own_id and name not in self._peers:
                peer = self._peers[name] = _Peer(registration, PeerSigns(asyncio.get_running_loop().time()))
                peer.task = self._tasks.start(self._watch(peer), name=f"watch {name}")

    async def _watch(self, peer: _Peer) -> None:
        signs, now_s = peer.signs, asyncio.get_running_loop().time
        while True:
            await self._listen(peer)
            if why := signs.suspicion(now_s()):
                if await self._challenge(peer, why):
                    return
            else:
                await asyncio.sleep(REFUSED_AGAIN_S if now_s() >= signs.rest_until_s else RESTING_S)

    async def _listen(self, peer: _Peer) -> None:
        """Hold a connection until it ends, or until nothing has come from the broker for `SILENCE_S`."""
        signs, now_s = peer.signs, asyncio.get_running_loop().time
        began_s = now_s()

        def ends_at_s() -> float:
            return max(began_s + SILENCE_S, signs.silent_at_s)

        def on_heard() -> None:
            signs.on_heard(now_s())
            self._gone.discard(peer.registration.broker_id)

        link = asyncio.ensure_future(self._link(peer.registration.addresses, on_heard))
        try:
            while not link.done() and now_s() < ends_at_s():
                due_s = min(now_s() + TICK_S, ends_at_s())
                await asyncio.wait([link], timeout=due_s - now_s())
                signs.on_timer(now_s(), due_s)
        finally:
            link.cancel()
            await asyncio.wait([link])
        error = None if link.cancelled() else link.exception()
        if isinstance(error, LinkRefusedError):
            if now_s() < signs.rest_until_s:
                return  # logged already
            signs.on_answered(now_s())
            log.warning("broker.link_refused", extra={"broker": peer.registration.broker_id, "error": str(error)})
        else:
            signs.on_ended(refused=isinstance(error, ConnectionRefusedError))

    async def _challenge(self, peer: _Peer, why: str) -> bool:
        """Challenge the broker and return whether it is gone; False if that cannot be found out."""
        name, now_s = peer.registration.broker_id, asyncio.get_running_loop().time
        if self._store.session_state is not SessionState.CONNECTED:  # rule 1
            await asyncio.sleep(REFUSED_AGAIN_S)
            return False
        peer.challenged = True
        withdrawn = name not in self._directory.brokers  # it stopped, or another broker challenges it, and counts and warns
        self.challenges += not withdrawn
        level = logging.INFO if withdrawn else logging.WARNING
        log.log(level, "broker.challenged", extra={"broker": name, "reason": why})
        try:
            gone = await self._is_gone(peer, ANSWER_S[why])
        except MetadataError as error:
            log.warning("broker.not_challenged", extra={"broker": name, "error": str(error)})
            await asyncio.sleep(REFUSED_AGAIN_S)
            return False
        finally:
            peer.challenged = False
        if not gone:
            peer.signs.on_answered(now_s())
            self._on_changed()  # changes of the directory during the challenge were ignored
            hint = "it is registered, but this broker does not reach it: look at its advertised address, and at networks between"
            log.warning("broker.out_of_reach", extra={"broker": name, "reason": why, "hint": hint})
            return False
        self._gone.add(name)
        self.found_gone += not withdrawn
        if self._peers.get(name) is peer:
            del self._peers[name]
        hint = "its bundles go to others when they are asked for"
        log.log(level, "broker.gone", extra={"broker": name, "reason": why, "hint": hint})
        return True

    async def _is_gone(self, peer: _Peer, answer_s: float) -> bool:
        """Delete the broker's registration and return whether it stays away for the time of an answer. Raises MetadataError."""
        name, now_s = peer.registration.broker_id, asyncio.get_running_loop().time
        key = self._records.key_of(name)
        began_s = now_s()
        found = await self._records.get(name)
        if found is not None:
            if found.record != peer.registration:
                return False  # another process has its name by now
            try:
                await self._records.delete(name, found.version)
            except (NoSuchKeyError, BadVersionError):
                pass  # another broker challenges it, or its session ended
        answer_s = max(answer_s, 4 * (now_s() - began_s))  # a store that is slow for this broker is slow for the other one
        while True:
            watch = await self._store.watch(key)
            with watch:
                if await self._records.get(name) is not None:
                    return False
                until_s = now_s() + answer_s
                try:
                    async with asyncio.timeout_at(until_s):
                        await watch.wait()
                    continue
                except TimeoutError:
                    pass
            if now_s() - until_s < OVERSLEPT_S:  # rule 2
                return self._store.session_state is SessionState.CONNECTED and await self._records.get(name) is None
