"""A batch read's lease, prolonged by its tasks: on the driver nothing of ours runs between planning and the end of a read.

    driver   pin ──► BatchLease, in each partition
    task     the lease is a quarter through? ──► one thread while the task runs: look, and if half is over renew it on all topics

Rules
1. Every renewal is of all topics, also of those whose tasks still wait, and of the one that is looked at last, when all others are
   renewed: so that one stands for all.
2. A read that is over in a quarter of the time asks nobody. Nor does its end tell anybody: the lease runs out.
3. Tasks begin together, and look one after the other, by chance: the first one that finds it due renews it for all.
4. Rows never wait for a renewal, and none that fails ends a task: executors may be where no broker can be reached. It is told.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from cepheid_decode import MessagePosition, PlanSource, ScanTask
from cepheid_ports import CepheidError
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.plan_service import PlanServicePlanner
from cepheid_spark.lease import Held, Lease, call_all, drop_all, ends_ms, new_lease_name
from cepheid_spark.lease_holder import wall_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from cepheid_spark.options import SourceOptions

log = logging.getLogger(__name__)

_MOST_RETRY_S = 10.0  # of one look: the next one comes
_LONGEST_WAIT_FOR_END_S = 0.5
_SPREAD_S = 10.0  # of the first looks: long enough for one to renew hundreds of topics


@dataclass(frozen=True, slots=True)
class BatchLease:
    name: str
    ttl_s: float
    pinned_at_ms: int  # wall clock of the driver
    topics: int  # that it holds

    @property
    def begins_to_matter_ms(self) -> int:
        """Rule 2."""
        return self.pinned_at_ms + int(250 * self.ttl_s)

    @property
    def look_s(self) -> float:
        """Between two looks of a task: some before half of the time has become all of it."""
        return self.ttl_s / 8


LEASE_BYTES = 1 << 30
"""A read of less than this holds no lease of its own accord. It is over in seconds, and a subscription that stays for hours after
each small query would count against a topic's backlog quota and its cursors."""


def hold_lease(options: SourceOptions, tasks: Sequence[ScanTask]) -> BatchLease | None:
    """Keep what the tasks will read from being trimmed until `lease_ttl_s` has passed, or tasks prolong it.

    Raises CepheidError only for a lease that was asked for by name: of its own accord a read goes on without.
    """
    source, name, ttl_s = options.source, options.subscription, options.lease_ttl_s
    if not options.has_lease or not tasks or (source.service_url or source.admin_url) is None:
        return None
    if name is None and sum(task.size_bytes for task in tasks) < LEASE_BYTES:
        return None
    pinned_at_ms, firsts = wall_ms(), first_positions(tasks)
    try:
        return BatchLease(pin_batch(source, firsts, ttl_s=ttl_s, name=name), ttl_s, pinned_at_ms, len(firsts))
    except CepheidError as error:
        if name is not None:
            raise
        log.warning("scan.without_lease: nothing but retention keeps what is read: %s", error)
        return None


def first_positions(tasks: Sequence[ScanTask]) -> dict[str, MessagePosition]:
    """By topic partition."""
    firsts: dict[str, MessagePosition] = {}
    for task in tasks:
        for piece in task.pieces:
            place = MessagePosition(piece.ledger_id, piece.first_entry_id)
            firsts[piece.topic] = min(place, firsts.get(piece.topic, place))
    return firsts


def pin_batch(source: PlanSource, starts: Mapping[str, MessagePosition], *, ttl_s: float, name: str | None = None) -> str:
    """A lease at the start positions of a batch read; its name. It ends by its time to live, whatever becomes of the job."""
    made: list[str] = []
    with closing(AdminHttp(source)) as http:
        lease = Lease(http, name or new_lease_name("batch-"), ttl_s)

        def hold(topic: str) -> None:
            if lease.hold(topic, starts[topic]) is Held.MADE:
                made.append(topic)

        failures = call_all([partial(hold, topic) for topic in sorted(starts)], until=Exception)
        if failures and name is None:  # a name that was given may be other reads' as well
            drop_all(lease, made)
    if failures:
        raise failures[0]
    return lease.name


class Prolonging:
    """Of one task. `topic`: one that it reads; `all_topics` of the read, asked for when they are needed."""

    def __init__(
        self,
        lease: BatchLease,
        topic: str,
        opened: Callable[[], AbstractContextManager[tuple[Lease, Callable[[], Sequence[str]]]]],
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._lease = lease
        self._topic = topic
        self._opened = opened
        self._now_ms = now_ms
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """They as they are, with the lease prolonged until they end, or nobody wants more."""
        self._thread = threading.Thread(target=self._run, name="cepheid-batch-lease", daemon=True)
        self._thread.start()
        try:
            yield from batches
        finally:
            self._ended.set()
            self._thread.join(timeout=_LONGEST_WAIT_FOR_END_S)

    def wait_s(self) -> float:
        """Until the first look."""
        return max(0.0, (self._lease.begins_to_matter_ms - self._now_ms()) / 1000)

    def look(self) -> bool:
        """False: there is nothing to prolong any more. Raises CepheidError."""
        with self._opened() as (lease, all_topics):
            found = lease.properties(self._topic)
            if found is None:
                facts = {"subscription": lease.name, "topic": self._topic}
                log.warning("scan.lease_is_gone: there is no subscription %s in %s any more", lease.name, self._topic, extra=facts)
                return False
            if not (ends := ends_ms(found)):
                return False  # a subscription that the user made: it has no end
            if ends - self._now_ms() > 500 * self._lease.ttl_s:
                return True
            others = [topic for topic in all_topics() if topic != self._topic]
            renewed: list[str] = []

            def renew(topic: str) -> None:
                if lease.renew(topic, below_s=self._lease.ttl_s / 2):  # else another task was there first
                    renewed.append(topic)

            if failures := call_all([partial(renew, topic) for topic in others]):
                raise failures[0]
            renew(self._topic)
            if len(renewed) < self._lease.topics:
                what = f"subscription {lease.name} is left in {len(renewed)} of {self._lease.topics} topics"
                log.warning("scan.lease_is_gone: %s", what, extra={"subscription": lease.name, "there": len(renewed)})
            return bool(renewed)

    def _run(self) -> None:
        pause_s = self.wait_s() + random.uniform(0.0, min(_SPREAD_S, self._lease.look_s))  # rule 3
        while not self._ended.wait(pause_s):
            pause_s = self._lease.look_s * random.uniform(0.5, 1.0)
            try:
                if not self.look():
                    return
            except Exception as error:  # rule 4
                is_defect = not isinstance(error, CepheidError)
                facts = {"subscription": self._lease.name}
                log.warning("scan.lease_not_prolonged: %s: %s", self._lease.name, error, extra=facts, exc_info=is_defect)


def prolonging(lease: BatchLease, topic: str, options: SourceOptions) -> Prolonging:
    """By the brokers of the options."""
    source = replace(options.source, retry_s=min(_MOST_RETRY_S, options.source.retry_s))
    selection = replace(options.topics, fail_on_missing=False)

    def all_topics() -> Sequence[str]:
        with closing(PlanServicePlanner(source)) as planner:
            return planner.topics(selection)

    @contextmanager
    def opened() -> Iterator[tuple[Lease, Callable[[], Sequence[str]]]]:
        with closing(AdminHttp(source)) as http:
            yield Lease(http, lease.name, lease.ttl_s), all_topics

    return Prolonging(lease, topic, opened)
