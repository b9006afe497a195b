"""An operator's hands: what calls of the admin API do, by the functions behind its routes, without HTTP.

    Operator.trim(topic) ──► some broker's process: topics.get ──► NotOwnerError ──► the owner's process …
                                                └──► topic.trim()

Rules
1. The work runs in the broker's process. It ends with it: whoever asked hears ServiceNotReadyError, and does not know the outcome.
2. Whoever waits longer than `PATIENCE_S` hears the same; the work goes on.
3. Refusals are those of the product: CepheidErrors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.message_ids import require_place
from cepheid_broker.admin.policy_change import change_namespace, change_topic
from cepheid_broker.admin.topic_access import open_subscription, open_topic, require_idle, require_owner
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.ownership import NotOwnerError
from cepheid_broker.topics.topic_positions import position_at_time
from cepheid_metadata import LATEST, PersistencePolicy, Position, RetentionPolicy
from cepheid_wire import NamespaceName, TopicName
from tests.simulation.world.sim_broker import SimBroker

T = TypeVar("T")
PATIENCE_S = 12.0
_HOPS = 4

Work = Callable[[AdminContext], Awaitable[T]]


async def ask(broker: SimBroker, work: Work[T]) -> T:
    """Rules 1 and 2."""
    node, loop = broker.node, asyncio.get_running_loop()
    if not broker.ready:
        raise ServiceNotReadyError(f"{broker.process} does not take calls", broker=broker.name)
    context = AdminContext(broker.broker)

    async def run() -> T:
        return await work(context)

    gone: asyncio.Future[None] = loop.create_future()

    def on_crash() -> None:
        if not gone.done():
            gone.set_result(None)

    node.on_crash.append(on_crash)
    task = node.start(run(), name="operator's call")
    try:
        await asyncio.wait([task, gone], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if on_crash in node.on_crash:
            node.on_crash.remove(on_crash)
    if task.done():
        return await task  # type: ignore[no-any-return]
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody waits for it any more
    raise ServiceNotReadyError(f"{broker.process} {'does not answer' if node.alive else 'is gone'}", broker=broker.name)


class Operator:
    def __init__(self, brokers: Mapping[str, SimBroker], rng: random.Random) -> None:
        self._brokers = brokers
        self._random = rng

    async def call(self, work: Work[T], at: SimBroker | None = None) -> T:
        """Asks some broker, and goes where it points to."""
        broker = at or self._random.choice(list(self._brokers.values()))
        for _ in range(_HOPS):
            try:
                return await ask(broker, work)
            except NotOwnerError as error:
                broker = self._brokers[error.there.broker_id]
        raise ServiceNotReadyError(f"{_HOPS} brokers in turn point to another")

    # Topics

    async def unload(self, topic: TopicName, at: SimBroker | None = None) -> None:
        async def unload(context: AdminContext) -> None:
            await require_owner(context, topic)
            await context.broker.topics.unload(topic)

        await self.call(unload, at)

    async def unload_bundle(self, topic: TopicName, to: str = "", at: SimBroker | None = None) -> None:
        """The bundle of `topic`: it goes to another broker."""

        async def unload(context: AdminContext) -> None:
            await require_owner(context, topic)
            ownership = context.broker.ownership
            for bundle in ownership.owned_bundles() or []:
                if bundle.holds(topic):
                    await ownership.release(bundle, to=to)

        await self.call(unload, at)

    async def split_bundle(self, topic: TopicName, share: float, at: SimBroker | None = None) -> None:
        """Cut the bundle of `topic` in two. `share`: how much of its hashes the first part has, between 0 and 1."""

        async def split(context: AdminContext) -> None:
            await require_owner(context, topic)
            ownership = context.broker.ownership
            for bundle in ownership.owned_bundles() or []:
                if bundle.holds(topic):
                    await ownership.split(bundle, [bundle.first + 1 + int(share * (bundle.last - bundle.first - 1))])

        await self.call(split, at)

    async def delete_topic(self, topic: TopicName, *, force: bool = False, at: SimBroker | None = None) -> None:
        async def delete(context: AdminContext) -> None:
            await require_owner(context, topic)
            if not force:
                require_idle(context, topic)
            await context.broker.topics.delete(topic, force=force)

        await self.call(delete, at)

    async def terminate(self, topic: TopicName, at: SimBroker | None = None) -> Position:
        """The last position."""

        async def terminate(context: AdminContext) -> Position:
            return await (await open_topic(context, topic)).terminate()

        return await self.call(terminate, at)

    async def trim(self, topic: TopicName, at: SimBroker | None = None) -> None:
        async def trim(context: AdminContext) -> None:
            await (await open_topic(context, topic)).trim()

        await self.call(trim, at)

    async def truncate(self, topic: TopicName, at: SimBroker | None = None) -> None:
        async def truncate(context: AdminContext) -> None:
            await (await open_topic(context, topic)).truncate()

        await self.call(truncate, at)

    # Subscriptions

    async def create_subscription(
        self, topic: TopicName, name: str, position: Position = LATEST, at: SimBroker | None = None
    ) -> None:
        """At a position, EARLIEST or LATEST. Once more is success."""

        async def create(context: AdminContext) -> None:
            opened = await open_topic(context, topic)
            if name not in opened.subscriptions:
                await opened.create_subscription(name, require_place(opened, position))

        await self.call(create, at)

    async def delete_subscription(self, topic: TopicName, name: str, at: SimBroker | None = None) -> None:
        """With `force`."""

        async def delete(context: AdminContext) -> None:
            opened, _ = await open_subscription(context, topic, name)
            await opened.delete_subscription(name)

        await self.call(delete, at)

    async def reset_to(self, topic: TopicName, name: str, position: Position, at: SimBroker | None = None) -> Position:
        """Goes on with this entry, EARLIEST or LATEST. Where that is."""

        async def reset(context: AdminContext) -> Position:
            opened, subscription = await open_subscription(context, topic, name)
            place = require_place(opened, position)
            subscription.begin_seek()
            try:
                await opened.reset_subscription(subscription, place)
            finally:
                subscription.end_seek()
            return subscription.cursor.first_unacknowledged()

        return await self.call(reset, at)

    async def reset_to_time(self, topic: TopicName, name: str, publish_time_ms: int, at: SimBroker | None = None) -> Position:
        """Goes on with the first message published at or after that time. Where that is."""

        async def place(context: AdminContext) -> Position:
            opened, _ = await open_subscription(context, topic, name)
            return await position_at_time(opened.ledger, publish_time_ms)

        return await self.reset_to(topic, name, await self.call(place, at), at)

    async def skip(self, topic: TopicName, name: str, entries: int, at: SimBroker | None = None) -> int:
        """So many, or all if there are fewer. How many."""

        async def skip(context: AdminContext) -> int:
            _, subscription = await open_subscription(context, topic, name)
            return await subscription.skip(min(entries, subscription.cursor.backlog_entries))

        return await self.call(skip, at)

    async def skip_all(self, topic: TopicName, name: str, at: SimBroker | None = None) -> int:
        async def skip(context: AdminContext) -> int:
            _, subscription = await open_subscription(context, topic, name)
            return await subscription.clear_backlog()

        return await self.call(skip, at)

    async def expire_until(self, topic: TopicName, name: str, position: Position, at: SimBroker | None = None) -> int:
        """Up to and with this entry. How many."""

        async def expire(context: AdminContext) -> int:
            opened, subscription = await open_subscription(context, topic, name)
            return await subscription.expire_until(opened.ledger.ledgers.normalise(position))

        return await self.call(expire, at)

    async def expire_older_than(self, topic: TopicName, name: str, age_s: float, at: SimBroker | None = None) -> int:
        """How many."""

        async def expire(context: AdminContext) -> int:
            opened, subscription = await open_subscription(context, topic, name)
            first_young = await position_at_time(opened.ledger, context.broker.ports.wall_ms() - int(1000 * age_s))
            return await subscription.expire_until(opened.ledger.previous_position(first_young))

        return await self.call(expire, at)

    # Policies

    async def change_policies(self, of: NamespaceName | TopicName, at: SimBroker | None = None, **changes: Any) -> None:
        """Fields of the namespace's or the topic's record; None: not set any more."""

        async def change(context: AdminContext) -> None:
            if isinstance(of, NamespaceName):
                await change_namespace(context, of, lambda _: changes)
            else:
                await change_topic(context, of, changes)

        await self.call(change, at)

    async def set_quorums(self, of: NamespaceName | TopicName, e: int, qw: int, qa: int, at: SimBroker | None = None) -> None:
        """Of ledgers that are created from now on."""
        await self.change_policies(of, at, persistence=PersistencePolicy(ensemble_size=e, write_quorum=qw, ack_quorum=qa))

    async def set_retention(self, of: NamespaceName | TopicName, minutes: int, mb: int, at: SimBroker | None = None) -> None:
        """-1: no limit."""
        await self.change_policies(of, at, retention=RetentionPolicy(time_limit_min=minutes, size_limit_mb=mb))
