"""Hand a bundle over to another broker without a gap: its topics move first, a group at a time, and the bundle's record last.

    giver: owns the bundle                                   heir: is the next owner
    prepare ───────────────────────────────────────────────► is the giver the owner? may this broker take bundles now?
    a group of topics is closed: publishes answered, cursors saved, ledgers ended
    open ──────────────────────────────────────────────────► opens them, and serves them ahead of its record
    clients of the group are sent to the heir ◄────────────── returns the topics that are open
      … the next group …
    the owner's record is deleted, the heir preferred
    take ──────────────────────────────────────────────────► creates its record

Rules
1. The heir serves a topic ahead of its record only at the owner's request, and the owner has closed the topic before. If one of
   the two is wrong, fencing protects the stored messages, as always.
2. After any failure or stall the giver closes the remaining topics and releases the bundle without a hand-over. No step takes
   longer than its limit, and none is repeated.
3. The heir stops serving topics ahead when it has heard nothing from the giver for `AHEAD_S`, unless it then acquires the bundle;
   at once when its session is lost; and within `OWNER_LOOK_S` when a third broker owns the bundle, as after a crash of the giver.
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
"""How long a broker that did not answer is not asked again."""
OWNER_LOOK_S = 1.0
"""How often an heir looks at the record of a bundle whose topics it serves ahead."""

Step = Literal["prepare", "open", "take"]


class HandOverCall(BaseModel, frozen=True, extra="forbid"):
    """A request of a bundle's owner to the next owner. JSON in the body of `POST /cepheid/v1/handover`."""

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
        """The bundle being handed over. Raises InvalidNameError."""
        return Bundle(NamespaceName.parse(self.namespace), self.first, self.last)


class Heir:
    """The next owner of one bundle, as the current owner calls it."""

    def __init__(
        self, there: There, bundle: Bundle, giver: str, epoch: int, peers: PeerCalls, *, until_s: float | None = None
    ) -> None:
        """`until_s` is the event loop's time after which no more topics are moved, or None."""
        self.there = there
        self._until_s = until_s
        self.moved: dict[TopicName, None] = {}
        """Topics that the heir serves already."""
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
        """Raise ServiceNotReadyError if the giver has no time left to move topics."""
        if self._until_s is not None and asyncio.get_running_loop().time() >= self._until_s:
            raise ServiceNotReadyError(f"bundle {self._bundle}: the broker has to stop; what has not moved is closed")

    async def prepare(self) -> None:
        """Announce the hand-over to the heir. Raises BrokerError, TimeoutError."""
        await self._call("prepare", (), PREPARE_LIMIT_S)

    async def open(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Have the heir open topics that are closed here, and return those it opened. Raises BrokerError, TimeoutError."""
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
        """Ask the heir to acquire the released bundle. Raises BrokerError, TimeoutError."""
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
    """Brokers that did not answer recently. Bundles are handed to others meanwhile."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SilentBrokers {', '.join(self._until) or 'none'}>"

    def note(self, broker_id: str, error: BaseException, now_s: float) -> None:
        """Note that a call to the broker failed. A broker that refuses a call is not silent."""
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
    """Topics that an heir serves before it owns their bundle. No I/O; times are those of the event loop."""

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
        """Note that the bundle's owner begins to hand it over to this broker. Return False if the hand-over had begun already."""
        before = self._bundles.get(bundle)
        if before is not None and (before.giver, before.epoch) == (giver, epoch):
            before.until_s = now_s + AHEAD_S
            return False
        self.end(bundle)
        self._bundles[bundle] = _Ahead(giver, epoch, now_s + AHEAD_S)
        return before is None

    def renew(self, bundle: Bundle, giver: str, epoch: int, now_s: float) -> None:
        """Extend a hand-over after a call of the giver. Raises ServiceNotReadyError if it was not begun like this, or has ended."""
        ahead = self._bundles.get(bundle)
        if ahead is None or (ahead.giver, ahead.epoch) != (giver, epoch):
            message = f"bundle {bundle} is not being handed over by broker {giver} in epoch {epoch}, as far as this broker knows"
            raise ServiceNotReadyError(message, bundle=str(bundle))
        ahead.until_s = now_s + AHEAD_S

    def add(self, bundle: Bundle, topics: Iterable[TopicName]) -> None:
        for topic in topics:
            self._bundles[bundle].topics[topic] = self._topics[topic] = None

    def remove(self, bundle: Bundle, topic: TopicName) -> None:
        """Stop serving a topic ahead, because it could not be opened."""
        if bundle in self._bundles:
            self._bundles[bundle].topics.pop(topic, None)
            self._topics.pop(topic, None)

    def ends_in(self, bundle: Bundle, now_s: float) -> float | None:
        """Return the seconds until the hand-over ends for lack of calls, or None if it has ended."""
        ahead = self._bundles.get(bundle)
        return None if ahead is None else max(0.0, ahead.until_s - now_s)

    def giver_of(self, bundle: Bundle) -> tuple[str, int] | None:
        """Return the id and the epoch of the broker that is handing the bundle over, or None if none is."""
        ahead = self._bundles.get(bundle)
        return None if ahead is None else (ahead.giver, ahead.epoch)

    def end(self, bundle: Bundle) -> None:
        """End the hand-over, whether or not this broker owns the bundle now. Idempotent."""
        if (ahead := self._bundles.pop(bundle, None)) is not None:
            for topic in ahead.topics:
                self._topics.pop(topic, None)

    def clear(self) -> None:
        self._bundles.clear()
        self._topics.clear()
