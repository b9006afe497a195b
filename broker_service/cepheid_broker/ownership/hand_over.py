"""Moving a bundle to another broker without a gap: its topics move first, a group at a time, and the bundle's record last.

    giver: owns the bundle                                   heir: is to have it
    prepare ───────────────────────────────────────────────► is the giver the owner? may this broker take bundles now?
    a group of topics is closed: publishes answered, cursors saved, ledgers ended
    open ──────────────────────────────────────────────────► opens them, and serves them ahead of its record
    clients of the group are sent to the heir ◄────────────── those that are open
      … the next group …
    the owner's record is deleted, the heir preferred
    take ──────────────────────────────────────────────────► makes its record

Rules
1. The heir serves a topic ahead of its record when the owner has asked for it, which has closed that topic before. When one of the
   two is wrong, fencing keeps what is stored, as always.
2. Whatever fails or stalls: the giver closes what is left, and gives the bundle up the plain way. No step is waited for longer than
   its limit, and none is repeated.
3. What the heir serves ahead ends when it has heard nothing of the giver for `AHEAD_S`, unless it gets the bundle then; at once
   when its session is lost; and within `OWNER_LOOK_S` when a third broker has taken the bundle, as after a crash of the giver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.ownership import There
from cepheid_broker.ownership.peer_calls import PeerCalls, PeerUnreachableError
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

PATH = "/cepheid/v1/handover"
PREPARE_LIMIT_S = 2.0
OPEN_LIMIT_S = 3.0
TAKE_LIMIT_S = 3.0
AHEAD_S = 10.0
SILENCE_S = 30.0
"""So long a broker that did not answer is not asked again."""
OWNER_LOOK_S = 1.0
"""How often an heir looks at the record of a bundle whose topics it serves ahead."""

Step = Literal["prepare", "open", "take"]


class HandOverCall(BaseModel, frozen=True, extra="forbid"):
    """What the owner of a bundle asks of the broker that is to have it. JSON in the body of `POST /cepheid/v1/handover`."""

    step: Step
    namespace: str
    first: NonNegativeInt
    last: NonNegativeInt
    giver: str
    epoch: PositiveInt
    """Epoch of the giver's ownership. A call from an earlier ownership is refused."""
    topics: tuple[str, ...] = ()

    @property
    def bundle(self) -> Bundle:
        """Raises InvalidNameError."""
        return Bundle(NamespaceName.parse(self.namespace), self.first, self.last)


class Heir:
    """The broker that is to have one bundle, as the owner of the bundle speaks with it."""

    def __init__(
        self, there: There, bundle: Bundle, giver: str, epoch: int, peers: PeerCalls, *, until_s: float | None = None
    ) -> None:
        """`until_s`: loop time from which nothing more is moved; None: no such time."""
        self.there = there
        self._until_s = until_s
        self.moved: dict[TopicName, None] = {}
        """Topics that it serves by now."""
        self._bundle = bundle
        self._giver = giver
        self._epoch = epoch
        self._peers = peers

    def __repr__(self) -> str:
        return f"<Heir {self.there.broker_id} of {self._bundle}, {len(self.moved)} topics moved>"

    @property
    def addresses(self) -> Mapping[str, str]:
        return self.there.addresses

    def check_time(self) -> None:
        """Raises ServiceNotReadyError: the giver has no time to move more."""
        if self._until_s is not None and asyncio.get_running_loop().time() >= self._until_s:
            raise ServiceNotReadyError(f"bundle {self._bundle}: the broker has to stop; what has not moved is closed")

    async def prepare(self) -> None:
        """It is about to be asked to open topics. Raises BrokerError, TimeoutError."""
        await self._call("prepare", (), PREPARE_LIMIT_S)

    async def open(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Those of the topics, closed here, that are open there when this returns. Raises BrokerError, TimeoutError."""
        answer = await self._call("open", topics, OPEN_LIMIT_S)
        opened = answer.get("opened") if isinstance(answer, dict) else None
        if not isinstance(opened, list):
            message = (
                f"broker {self.there.broker_id} answered the hand-over of bundle {self._bundle} without a list of opened topics"
            )
            raise ServiceNotReadyError(message, bundle=str(self._bundle))
        names = {name for name in opened if isinstance(name, str)}
        found = [topic for topic in topics if str(topic) in names]
        self.moved.update(dict.fromkeys(found))
        return found

    async def take(self) -> None:
        """The bundle is free for it. Raises BrokerError, TimeoutError."""
        await self._call("take", (), TAKE_LIMIT_S)

    async def _call(self, step: Step, topics: Iterable[TopicName], limit_s: float) -> Any:
        bundle = self._bundle
        call = HandOverCall(
            step=step,
            namespace=str(bundle.namespace),
            first=bundle.first,
            last=bundle.last,
            giver=self._giver,
            epoch=self._epoch,
            topics=tuple(map(str, topics)),
        )
        async with asyncio.timeout(limit_s):
            return await self._peers.call(self.there, "POST", PATH, call.model_dump_json().encode())


class SilentBrokers:
    """Brokers that did not answer a moment ago: bundles are handed to others meanwhile."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SilentBrokers {', '.join(self._until) or 'none'}>"

    def note(self, broker_id: str, error: BaseException, now_s: float) -> None:
        """A call to it failed. One that refuses is there."""
        if isinstance(error, TimeoutError | PeerUnreachableError):
            self._until[broker_id] = now_s + SILENCE_S

    def are(self, broker_id: str, now_s: float) -> bool:
        if now_s < self._until.get(broker_id, float("-inf")):
            return True
        self._until.pop(broker_id, None)
        return False


@dataclass(slots=True)
class _Ahead:
    giver: str
    epoch: int
    until_s: float
    topics: dict[TopicName, None] = field(default_factory=dict)


class TopicsAhead:
    """What an heir serves before the bundle is its own. No I/O; times are those of the loop."""

    def __init__(self) -> None:
        self._bundles: dict[Bundle, _Ahead] = {}
        self._topics: dict[TopicName, None] = {}

    def __repr__(self) -> str:
        return f"<TopicsAhead {len(self._topics)} topics of {len(self._bundles)} bundles>"

    @property
    def bundles(self) -> Collection[Bundle]:
        return self._bundles.keys()

    def holds(self, topic: TopicName) -> bool:
        return topic in self._topics

    def begin(self, bundle: Bundle, giver: str, epoch: int, now_s: float) -> bool:
        """The owner of the bundle wants to hand it over to this broker. False: it has said so already."""
        before = self._bundles.get(bundle)
        if before is not None and (before.giver, before.epoch) == (giver, epoch):
            before.until_s = now_s + AHEAD_S
            return False
        self.end(bundle)
        self._bundles[bundle] = _Ahead(giver, epoch, now_s + AHEAD_S)
        return before is None

    def renew(self, bundle: Bundle, giver: str, epoch: int, now_s: float) -> None:
        """Raises ServiceNotReadyError: it is not what was begun, or has ended."""
        ahead = self._bundles.get(bundle)
        if ahead is None or (ahead.giver, ahead.epoch) != (giver, epoch):
            message = f"bundle {bundle} is not being handed over by broker {giver} in epoch {epoch}, as far as this broker knows"
            raise ServiceNotReadyError(message, bundle=str(bundle))
        ahead.until_s = now_s + AHEAD_S

    def add(self, bundle: Bundle, topics: Iterable[TopicName]) -> None:
        for topic in topics:
            self._bundles[bundle].topics[topic] = self._topics[topic] = None

    def remove(self, bundle: Bundle, topic: TopicName) -> None:
        """It could not be opened."""
        if bundle in self._bundles:
            self._bundles[bundle].topics.pop(topic, None)
            self._topics.pop(topic, None)

    def ends_in(self, bundle: Bundle, now_s: float) -> float | None:
        """Seconds until it has heard nothing for too long; None: it has ended."""
        ahead = self._bundles.get(bundle)
        return None if ahead is None else max(0.0, ahead.until_s - now_s)

    def giver_of(self, bundle: Bundle) -> tuple[str, int] | None:
        """Return the id and the epoch of the broker that is handing the bundle over, or None if none is."""
        ahead = self._bundles.get(bundle)
        return None if ahead is None else (ahead.giver, ahead.epoch)

    def end(self, bundle: Bundle) -> None:
        """It is this broker's own now, or will not be. Idempotent."""
        if (ahead := self._bundles.pop(bundle, None)) is not None:
            for topic in ahead.topics:
                self._topics.pop(topic, None)

    def clear(self) -> None:
        self._bundles.clear()
        self._topics.clear()
