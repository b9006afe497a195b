"""Background maintenance of a topic: at most one rollover or failover, one trim and one deletion pass at a time.

    an answered append, a tick ──► rollover due?          a ledger that broke ──► failover
    a tick, a producer ──► no open ledger? ──► start one
    a save of cursors, a rollover, a tick ──► anything to trim?
    a trim, a retired cursor ledger, the opening ──► deletion queues: of ledgers, of objects
    a rollover, a tick ──► anything to offload?

Failures of these are logged and retried; only a failover, and a rollover that has switched ledgers, fail the topic. A topic
without an open ledger reports that in its statistics and to producers, instead of logging each attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cepheid_ledger import LedgerClient, LedgerError
from cepheid_managed_ledger.chain_deletion import delete_waiting
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.errors import ManagedLedgerError
from cepheid_managed_ledger.failover import Failover
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.object_deletion import ObjectDeletions
from cepheid_managed_ledger.offloader import Offloader
from cepheid_managed_ledger.rollover import Rollover
from cepheid_managed_ledger.settings import ManagedLedgerConfig
from cepheid_managed_ledger.trim import Retention
from cepheid_managed_ledger.trimmer import Trimmer
from cepheid_metadata import MetadataError
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)


class Upkeep:
    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        client: LedgerClient,
        trimmer: Trimmer,
        offloader: Offloader,
        object_deletions: ObjectDeletions,
        deletion_turns: asyncio.Semaphore,
        config: Callable[[], ManagedLedgerConfig],
        tasks: TaskOwner,
    ) -> None:
        self._topic = topic
        self._keeper = keeper
        self._client = client
        self._trimmer = trimmer
        self._offloader = offloader
        offloader.on_done = self.clean
        self._object_deletions = object_deletions
        self._rollover: Rollover | None = None  # None: there is no ledger to append to
        self._failover: Failover | None = None  # likewise
        self._may_roll = True
        self._deletion_turns = deletion_turns
        self._config = config
        self._tasks = tasks
        self._rolling: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._deleting_objects: asyncio.Task[None] | None = None
        self._stopped = False

    def __repr__(self) -> str:
        busy = [name for name in ("rolling", "trimming", "deleting") if getattr(self, f"_{name}") is not None]
        return f"<Upkeep of {self._topic}: {', '.join(busy) or 'idle'}>"

    @property
    def rollovers(self) -> int:
        return self._rollover.count if self._rollover else 0

    @property
    def failovers(self) -> int:
        return self._failover.count if self._failover else 0

    @property
    def trimmed_ledgers(self) -> int:
        return self._trimmer.trimmed

    @property
    def has_work(self) -> bool:
        """Whether work is running or could start now. Work that pauses after a failure does not count."""
        running = (self._rolling, self._trimming, self._deleting, self._deleting_objects)
        return (
            any(task is not None for task in running)
            or self._offloader.has_work
            or self._trimmer.plan(self._retention()) > 0
            or bool(self._keeper.waiting_deletions())
            or self._object_deletions.is_due
        )

    @property
    def is_rolling(self) -> bool:
        return self._rolling is not None

    def roll_if_due(self) -> None:
        rollover = self._rollover
        if self._rolling is None and self._may_roll and rollover is not None and rollover.is_due(self._config()):
            self._change_ledger(lambda: rollover.run(self._config()), name="rollover")

    def begin_appends(self, rollover: Rollover, failover: Failover) -> None:
        """Take the rollover and the failover of the topic's open ledger, which exists from now on."""
        self._rollover, self._failover = rollover, failover

    def start_ledger(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `start`, which creates an open ledger and does not raise, unless a change of ledgers is running already."""
        if self._rolling is None and self._may_roll and self._rollover is None:
            self._change_ledger(start, name="start-ledger")

    def fail_over(self) -> None:
        """Replace the open ledger, which broke. Also while the topic is being closed: earlier appends still need answers."""
        failover = self._failover
        if self._rolling is None and failover is not None and failover.is_due:
            self._change_ledger(lambda: failover.run(self._config), name="failover")

    def clean(self) -> None:
        """Start trimming and deleting, after a change that may have released ledgers or removed them from the chain."""
        if not self._stopped:
            if self._trimming is None and self._trimmer.plan(self._retention()):
                self._trimming = self._tasks.start(self._trim_quietly(), name="trim")
            if self._deleting is None and self._keeper.waiting_deletions():
                self._deleting = self._tasks.start(self._delete_waiting(), name="delete-ledgers")
            if self._deleting_objects is None and self._object_deletions.is_due:
                self._deleting_objects = self._tasks.start(self._delete_objects(), name="delete-objects")

    def offload_if_due(self) -> None:
        """Start offloading what is due, as time has passed or a ledger was closed."""
        if not self._stopped:
            self._offloader.tick()

    async def trim(self) -> int:
        """Remove ledgers that retention allows to remove; return how many. Raises ManagedLedgerError, LedgerError,
        MetadataError."""
        count = await finish(self._tasks, self._trimmer.run(self._retention), name="trim")
        self.clean()
        return count

    async def truncate(self) -> int:
        """Trim whatever retention and offloading say, after a rollover of the open ledger (the last of all stays)."""
        await self.wait_rolled()
        rollover = self._rollover
        if self._rolling is None and self._may_roll and rollover is not None and rollover.has_entries:
            self._change_ledger(lambda: rollover.run(self._config()), name="rollover")
            await self.wait_rolled()
        count = await finish(self._tasks, self._trimmer.run(Retention, holds=False), name="truncate")
        self.clean()
        return count

    async def wait_rolled(self) -> None:
        """Wait until neither a rollover nor a failover is running. That is soon once appends have failed."""
        while self._rolling is not None:
            await asyncio.wait([self._rolling])

    def end_rollovers(self) -> None:
        """Allow no more rollovers: the present ledger, or the one that a running rollover leads to, is the last."""
        self._may_roll = False

    def stop(self) -> None:
        """Start nothing new from now on."""
        self._stopped = True
        self._may_roll = False
        self._offloader.stop()

    def _retention(self) -> Retention:
        """Return the present retention policy, which may change."""
        return self._config().retention

    def _change_ledger(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> None:
        self._rolling = self._tasks.start(self._run_change(work), name=name)

    async def _run_change(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        finally:
            self._rolling = None
        self.fail_over()  # a ledger may have broken meanwhile
        self.clean()
        self.offload_if_due()

    async def _trim_quietly(self) -> None:
        try:
            await self._trimmer.run(self._retention)
        except (ManagedLedgerError, LedgerError, MetadataError, TimeoutError) as error:
            log.warning("trim.failed", extra={"topic": str(self._topic), "error": str(error)})
            return
        finally:
            self._trimming = None
        self.clean()

    async def _delete_waiting(self) -> None:
        try:
            await delete_waiting(self._keeper, self._client, self._deletion_turns)
        finally:
            self._deleting = None

    async def _delete_objects(self) -> None:
        try:
            await self._object_deletions.run_quietly()
        finally:
            self._deleting_objects = None
