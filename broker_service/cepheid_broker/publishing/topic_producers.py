"""The producers of one topic: asks `ProducerAccess`, and performs its decisions.

ask ──► ProducerAccess ──► admitted, waiting, refused, closed: reported to the producer
              └──► SaveEpoch ──► the topic's record ──► the next decision
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from cepheid_broker.errors import (
    BrokerError,
    ProducerBusyError,
    ProducerFencedError,
    ServiceNotReadyError,
    TooManyProducersError,
    TopicHeldError,
)
from cepheid_broker.policies import QuotaAction, TopicPolicies
from cepheid_broker.publishing.producer import Producer
from cepheid_broker.publishing.producer_access import Admit, Close, Effect, ProducerAccess, Refuse, SaveEpoch, Wait, Why
from cepheid_ports import CepheidError, TaskOwner

log = logging.getLogger(__name__)


_ABOVE_QUOTA = "the topic's backlog is above its quota"


class TopicProducers:
    def __init__(
        self, topic: str, tasks: TaskOwner, epoch: int | None = None, save_epoch: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        """`save_epoch` returns when the epoch is durable; None if the topic is not durable itself."""
        self.connected: dict[str, Producer] = {}
        """Connected producers by name; waiting ones are not included."""
        self._topic = topic
        self._tasks = tasks
        self._save_epoch = save_epoch
        self._blocked = False
        self._changed = asyncio.Event()  # never stays set
        self._access: ProducerAccess[Producer] = ProducerAccess(epoch)

    def __repr__(self) -> str:
        return f"<TopicProducers of {self._topic}: {self._access!r}>"

    def __len__(self) -> int:
        """Number of producers, connected and waiting."""
        return len(self._access)

    def holds_name(self, name: str) -> bool:
        return self._access.holds_name(name)

    def __contains__(self, producer: Producer) -> bool:
        return producer in self._access

    def ask(
        self, producer: Producer, replaces: Producer | None = None, *, most: int = 0
    ) -> tuple[BrokerError, Producer | None] | None:
        """Ask for admission; None if it is admitted, waits, or will be called back. Else return the error and the conflicting
        producer.

        `replaces`: its earlier incarnation on the same connection. `most`: limit of producers; 0: none.
        """
        if replaces is not None and self.connected.get(replaces.name) is replaces:
            del self.connected[replaces.name]
        effects = self._access.ask(producer, replaces, most=most)
        for index, effect in enumerate(effects):
            if isinstance(effect, Refuse) and effect.applicant is producer:
                self._perform(effects[:index] + effects[index + 1 :])
                return self._refusal(effect), effect.by
        self._perform(effects)
        return None

    def leave(self, producer: Producer) -> None:
        if self.connected.get(producer.name) is producer:
            del self.connected[producer.name]
        self._perform(self._access.leave(producer))

    def on_topic_closed(self) -> None:
        """Refuse waiting producers; the topic itself closes the connected ones."""
        self._changed.set()
        self._changed.clear()
        waiting = [producer for producer in self._access.applicants if producer.name not in self.connected]
        for producer in waiting:
            self._access.leave(producer)
        for producer in waiting:
            # Clients look for these words, and then keep their other producers and consumers on the connection (protocol.md §7.2).
            producer.on_refused(ServiceNotReadyError(f"topic {self._topic} is being unloaded", topic=self._topic))

    def on_policies(self, policies: TopicPolicies) -> None:
        if policies.encryption_required:
            for producer in [producer for producer in self.connected.values() if not producer.encrypted]:
                producer.close_in_good_order("the topic now accepts only encrypted messages")

    # Backlog quota

    def on_publish_blocked(self, action: QuotaAction | None) -> None:
        """Close producers while publishing is blocked; `Topic.check_publishing` holds or refuses them when they reconnect.

        Their connections are still read, as the consumers that could reduce the backlog may use the same ones.
        """
        self._blocked = action in (QuotaAction.HOLD, QuotaAction.REFUSE)
        self._changed.set()  # wakes all waiting producers
        self._changed.clear()
        if not self._blocked:
            return
        for producer in list(self.connected.values()):
            producer.close_in_good_order(_ABOVE_QUOTA)

    async def wait_quota_changed(self) -> None:
        """Wait until the quota's state changes or the topic is closed."""
        await self._changed.wait()

    def _perform(self, effects: Iterable[Effect[Producer]]) -> None:
        for effect in effects:
            match effect:
                case Admit(producer, epoch):
                    self.connected[producer.name] = producer
                    producer.on_admitted(epoch)
                    if self._blocked:  # it waited for producers that were closed because of the quota
                        producer.close_in_good_order(_ABOVE_QUOTA)
                case Wait(producer):
                    producer.on_waiting()
                case Refuse(producer):
                    producer.on_refused(self._refusal(effect))
                case Close(producer):
                    self.connected.pop(producer.name, None)
                    producer.close_by_broker("a producer with access mode ExclusiveWithFencing took the topic over")
                case SaveEpoch(epoch):
                    self._tasks.start(self._save(epoch), name=f"save-topic-epoch {self._topic}")

    async def _save(self, epoch: int) -> None:
        try:
            if self._save_epoch is not None:
                await self._save_epoch(epoch)
        except (CepheidError, TimeoutError) as error:
            log.warning("topic_epoch.not_saved", extra={"topic": self._topic, "epoch": epoch, "error": str(error)})
            self._perform(self._access.on_epoch_failed())
        else:
            log.info("topic_epoch.saved", extra={"topic": self._topic, "epoch": epoch})
            self._perform(self._access.on_epoch_saved())

    def _refusal(self, refuse: Refuse[Producer]) -> BrokerError:
        producer, by = refuse.applicant, refuse.by
        mode = producer.access_mode.name.title().replace("_", "")
        facts = {"topic": self._topic, "producer": producer.name}
        holder = "" if by is None else f"{by.name!r}, connected from {by.peer.address}"
        match refuse.why:
            case Why.NAME_IN_USE:
                return ProducerBusyError(f"topic {self._topic} has a producer named {holder}", **facts)
            case Why.HELD:
                return TopicHeldError(f"topic {self._topic} is held by the exclusive producer {holder}", **facts)
            case Why.FENCED if by is not None:
                text = f"topic {self._topic} has another producer, {holder}; access mode {mode} allows none beside it"
                return ProducerFencedError(text, **facts)
            case Why.FENCED:
                text = f"producer {producer.name!r} of topic {self._topic} was replaced by a later exclusive producer"
                return ProducerFencedError(text, topic_epoch=self._access.epoch, shown_epoch=producer.shown_epoch, **facts)
            case Why.TOO_MANY:
                return TooManyProducersError(
                    f"topic {self._topic} has {len(self)} producers, as many as its policy allows", **facts
                )
            case Why.NOT_SAVED:
                return ServiceNotReadyError(f"topic {self._topic}: its epoch could not be saved", **facts)
