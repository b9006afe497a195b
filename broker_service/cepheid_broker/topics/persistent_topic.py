"""A stored topic: its managed ledger, and the subscriptions whose positions are kept with it.

    publish ──► ManagedLedger.append ──► receipts of the producer
                        └── on_appended, once per group ──► subscriptions with consumers: sent at once to consumers that keep up

Rules
1. When the ledger fails, the topic closes its producers and consumers and is opened again from the records: clients resend from
   their first unanswered message, so nothing is stored out of order (protocol.md §10.4, §25).
2. A durable subscription exists as long as its cursor, even if its creation or deletion completed only after the client was told
   that the metadata store takes too long.
3. A reset may also complete late: consumers that reconnected before it are closed again, and continue from the new position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cepheid_broker.dispatch import CountedGroup, SharedDispatch, count_group
from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError, SubscriptionNotFoundError, TooManyError
from cepheid_broker.peer import Buffer
from cepheid_broker.policies import TopicPolicies, ledger_config
from cepheid_broker.publishing import DEDUP_CURSOR, TopicDeduplication, TopicProducers
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.subscription import Subscription
from cepheid_broker.topics.topic import Topic
from cepheid_broker.traffic import BrokerTraffic
from cepheid_managed_ledger import CursorExistsError, NoSuchCursorError, TopicTerminatedError, finish
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor, ManagedLedger

log = logging.getLogger(__name__)

MAX_GROUP_ENTRIES = 10_000
"""Largest group that is counted once for all subscriptions when it is appended."""

MAX_PROPERTIES_BYTES = 64 << 10
"""Limit of a subscription's properties, names and values: they share one metadata record with its position."""


class PersistentTopic(Topic):
    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger,
        policies: TopicPolicies,
        settings: BrokerSettings,
        shared: SharedDispatch,
        tasks: TaskOwner,
        totals: BrokerTraffic,
        *,
        on_failed: Callable[[Topic, BaseException], None],
    ) -> None:
        admission = TopicProducers(str(name), tasks, ledger.topic_epoch, ledger.save_topic_epoch)
        super().__init__(name, policies, settings, totals, admission)
        self._ledger = ledger
        self._shared = shared
        self._tasks = tasks
        self._totals = totals
        self._on_failed = on_failed
        self._changing = asyncio.Lock()  # serialises creation and deletion of subscriptions
        self.deduplication = TopicDeduplication(str(name), ledger, lambda: self.policies, settings.deduplication, tasks, totals)
        for cursor in ledger.cursors.values():
            if cursor.name != DEDUP_CURSOR:
                self._adopt(cursor.name, cursor)
        self._told = ledger.last_confirmed  # subscriptions were notified of entries up to here
        ledger.on_appended += (self._on_appended, self.deduplication.on_appended)
        ledger.on_failed.append(self._on_ledger_failed)
        ledger.on_cursor_created.append(self._on_cursor_created)
        ledger.on_cursor_deleted.append(self._on_cursor_deleted)
        ledger.on_cursor_reset.append(self._on_cursor_reset)

    async def open(self) -> None:
        """Prepare the topic before it serves clients. Raises its ledger's errors."""
        assert self.deduplication is not None
        await self.deduplication.open()
        if self.ledger.failure is not None:  # perhaps before `_on_ledger_failed` was among its hooks
            raise self.ledger.failure
        self.check_open()

    @property
    def ledger(self) -> ManagedLedger:
        return self._ledger

    def on_policies(self, policies: TopicPolicies) -> None:
        """Apply changed policies: the next ledger gets the new quorums, the next trim the new retention."""
        super().on_policies(policies)
        self.ledger.config = ledger_config(policies)
        self.ledger.tick()  # do not wait for the next maintenance round

    async def check_publishing(self, *, encrypted: bool, reconnecting: bool) -> None:
        await super().check_publishing(encrypted=encrypted, reconnecting=reconnecting)
        if self.ledger.chain.terminated_at is not None:
            raise TopicTerminatedError(f"topic {self.name} was terminated at {self.ledger.last_confirmed}", topic=str(self.name))
        await self.ledger.require_open_ledger()

    def publish(
        self,
        payloads: Sequence[Buffer],
        on_done: Callable[[Position | CepheidError, int], None],
        messages: Sequence[int] | None = None,
    ) -> None:
        """Append payloads; `on_done` is called once, with the first entry's position when all are durable, or with the error."""
        if self.closed and not self.settling:
            on_done(ServiceNotReadyError(f"topic {self.name} is being unloaded"), len(payloads))
        else:
            self.ledger.append(payloads, on_done, messages)

    def _on_appended(self) -> None:
        appended_from, self._told = self._told, self.ledger.last_confirmed
        listening = [subscription for subscription in self.subscriptions.values() if subscription.consumers]
        if listening:
            tail, now_ms = self._appended_group(appended_from), self.ledger.wall_ms()
            for subscription in listening:
                subscription.on_appended(tail, now_ms)

    def _appended_group(self, after: Position) -> CountedGroup | None:
        """Return the entries after this position if they are one group in the tail cache, counted once for all subscriptions."""
        dispatch = self._settings.dispatch
        first = self.ledger.next_position(after)
        groups = self.ledger.read_cached(first, max_entries=MAX_GROUP_ENTRIES, max_bytes=dispatch.read_bytes)
        if not groups or len(groups) > 1 or (groups[0].ledger_id, groups[0].last_entry_id) != self._told:
            return None
        return count_group(groups[0])

    # Subscriptions

    async def create_subscription(self, name: str, position: Position, *, properties: dict[str, str] | None = None) -> Subscription:
        """Return the durable subscription of this name, created at `position` (its first entry) if it does not exist."""
        if (found := self.subscriptions.get(name)) is None or self._changing.locked():
            # Not cancelled with the request: a half-created subscription would be recorded nowhere.
            return await finish(self._tasks, self._create(name, position, properties or {}), name="create-subscription")
        self.check_open()
        return self._durable(found)

    async def _create(self, name: str, position: Position, properties: dict[str, str]) -> Subscription:
        async with self._changing:
            self.check_open()
            if (found := self.subscriptions.get(name)) is not None:
                return self._durable(found)
            if name == DEDUP_CURSOR:
                raise NotAllowedError(f"subscription name {name!r} is used by the broker itself; choose another one")
            self._check_room()
            check_properties(properties)
            try:
                await self.ledger.create_cursor(name, self._before(position), properties=properties)
            except CursorExistsError:  # created by an earlier request that timed out
                pass
            self.check_open()
            extra = {"topic": str(self.name), "subscription": name, "position": str(position)}
            log.info("subscription.created", extra=extra)
            return self._durable(self.subscriptions[name])

    def _check_room(self) -> None:
        limit = self._settings.max_subscriptions_per_topic
        most = min(self.policies.max_subscriptions or limit, limit)
        if len(self.subscriptions) >= most:
            raise TooManyError(f"topic {self.name} has {len(self.subscriptions)} subscriptions, {most} are allowed")

    def _durable(self, found: Subscription) -> Subscription:
        if not found.durable:
            raise NotAllowedError(f"{found.name!r} of {self.name} is a reader's; a durable subscription needs another name")
        return found

    async def open_reader(
        self, name: str, position: Position | None, *, properties: Mapping[str, str] | None = None
    ) -> Subscription:
        """Return the non-durable subscription of this name; an existing one keeps its position and properties (protocol.md §17)."""
        async with self._changing:
            self.check_open()
            if (found := self.subscriptions.get(name)) is not None:
                if found.durable:
                    raise NotAllowedError(f"subscription {name!r} of {self.name} is durable; a reader needs another name")
                return found
            self._check_room()
            check_properties(properties or {})
            mark_delete = self._before(position or LATEST)
            return self._adopt(name, self.ledger.new_non_durable_cursor(name, mark_delete, properties=properties))

    async def reset_subscription(self, subscription: Subscription, position: Position, unacked_words: Sequence[int] = ()) -> None:
        """Make `position` the next delivered entry; durable when this returns. Call it within a seek or without consumers."""
        if position == LATEST:
            target = self.ledger.next_position(self.ledger.last_confirmed)
        elif position == EARLIEST:
            target = self.ledger.next_position(self.ledger.first_position())
        else:
            target = position
        await subscription.cursor.reset(target, unacked_words)
        extra = {"topic": str(self.name), "subscription": subscription.name, "position": str(target)}
        log.info("subscription.reset", extra=extra)

    async def set_subscription_properties(self, name: str, properties: Mapping[str, str]) -> None:
        self.check_open()
        found = self.subscriptions.get(name)
        if found is None:
            raise SubscriptionNotFoundError(f"{self.name} has no subscription {name!r}", topic=str(self.name), subscription=name)
        check_properties(properties)
        await found.cursor.set_properties(properties)

    def _before(self, position: Position) -> Position:
        """Return the mark-delete position that makes `position` the first delivered entry."""
        if position == LATEST:
            return self.ledger.last_confirmed
        if position == EARLIEST:
            return self.ledger.first_position()
        return self.ledger.previous_position(position)

    def _adopt(self, name: str, cursor: Cursor) -> Subscription:
        subscription = Subscription(
            self.name,
            name,
            self.ledger,
            cursor,
            self._settings,
            self._shared,
            self._tasks,
            self._totals,
            policies=lambda: self.policies,
            on_unused=self._on_unused,
        )
        self.subscriptions[name] = subscription
        return subscription

    def _on_cursor_created(self, cursor: Cursor) -> None:
        """Adopt a cursor whose creation completed late (rule 2)."""
        if not self.closed and cursor.name != DEDUP_CURSOR and cursor.name not in self.subscriptions:
            self._adopt(cursor.name, cursor)

    def _on_cursor_deleted(self, cursor: Cursor) -> None:
        """Close the subscription of a cursor whose deletion completed late (rule 2)."""
        subscription = self.subscriptions.get(cursor.name)
        if subscription is not None and subscription.cursor is cursor:
            subscription.close("the subscription is deleted")
            del self.subscriptions[cursor.name]

    def _on_cursor_reset(self, cursor: Cursor) -> None:
        """Close consumers that reconnected before a late reset (rule 3); within a seek there are none."""
        subscription = self.subscriptions.get(cursor.name)
        if subscription is not None and subscription.cursor is cursor and not subscription.in_seek:
            subscription.close_consumers("a delayed seek has completed")

    def _on_unused(self, subscription: Subscription) -> None:
        """Drop a reader's subscription that has no reader."""
        subscription.close("its reader is gone")
        if self.subscriptions.get(subscription.name) is subscription:
            del self.subscriptions[subscription.name]
            self.ledger.drop_cursor(subscription.cursor)

    async def delete_subscription(self, name: str) -> None:
        await finish(self._tasks, self._delete(name), name="delete-subscription")

    async def delete_subscription_if(self, name: str, condition: Callable[[Subscription], bool]) -> bool:
        """Delete the subscription if `condition` holds, checked in the step that refuses new consumers. Return whether it was
        deleted."""
        return await finish(self._tasks, self._delete(name, condition), name="delete-subscription")

    async def _delete(self, name: str, condition: Callable[[Subscription], bool] = lambda _: True) -> bool:
        async with self._changing:
            subscription = self.subscriptions.get(name)
            if subscription is None or not condition(subscription):
                return False
            subscription.close("the subscription is deleted")
            del self.subscriptions[name]
            if subscription.durable:
                await self._delete_cursor(name, subscription.cursor)
            else:
                self.ledger.drop_cursor(subscription.cursor)
            log.info("subscription.deleted", extra={"topic": str(self.name), "subscription": name})
            return True

    async def _delete_cursor(self, name: str, cursor: Cursor) -> None:
        try:
            await self.ledger.delete_cursor(name)
        except NoSuchCursorError:  # deleted by an earlier request that timed out
            pass
        except Exception:
            if not self.closed and self.ledger.cursors.get(name) is cursor:
                self._adopt(name, cursor)  # it still retains entries, so it must be visible and deletable
            raise

    # The end

    async def terminate(self) -> Position:
        self.check_open()
        last = await self.ledger.terminate()
        log.info("topic.terminated", extra={"topic": str(self.name), "position": str(last)})
        for producer in list(self.producers.values()):
            producer.close_by_broker("the topic is terminated")  # reconnecting, they get TopicTerminatedError (protocol.md §22)
        for subscription in self.subscriptions.values():
            subscription.announce_end()
        return last

    def _on_ledger_failed(self, error: BaseException) -> None:
        if not self.closed:
            extra = {"topic": str(self.name), "error": str(error), "hint": "it is opened again from its records"}
            log.warning("topic.failed", extra=extra)
            self.close_clients(f"topic {self.name} failed: {error}")
            self._on_failed(self, error)

    async def unload(self, reason: str) -> None:
        """Unload as every topic, then save acknowledgements and close the ledger."""
        await super().unload(reason)
        await self._close_ledger()

    async def stop(self) -> None:
        """Stop as every topic; acknowledgements are accepted until their last save."""
        await super().stop()
        await self._close_ledger()

    async def _close_ledger(self) -> None:
        assert self.deduplication is not None
        self.deduplication.close()
        await self.ledger.aclose()


def check_properties(properties: Mapping[str, str]) -> None:
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size_bytes > MAX_PROPERTIES_BYTES:
        raise NotAllowedError(f"subscription properties may have {MAX_PROPERTIES_BYTES} bytes, not {size_bytes}")
