"""The lease of a batch read, renewed by its tasks, since none of our code runs on the driver between planning and the end.

    driver   pin ──► BatchLease, in each partition
    task     a quarter of the lease is over? ──► a thread while the task runs: check, and if half is over renew it on all topics

Rules
1. Every renewal is of all topics, also of those whose tasks still wait. The one that tasks check is renewed last, when all others
   are renewed, so that it represents all.
2. A read that ends within a quarter of the time makes no calls. Its end is not reported either: the lease expires.
3. Tasks begin together, but check at random times: the first one that finds it due renews it for all.
4. Rows never wait for a renewal, and a failed one does not end a task, as executors may not reach brokers; it is logged.
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

_MOST_RETRY_S = 10.0  # of one check, before the next one
_LONGEST_WAIT_FOR_END_S = 0.5
_SPREAD_S = 10.0  # over which the first checks are spread: enough for one task to renew hundreds of topics


@dataclass(frozen=True, slots=True)
class BatchLease:
    name: str
    ttl_s: float
    pinned_at_ms: int  # wall clock of the driver
    topics: int  # number of topics that it holds

    @property
    def begins_to_matter_ms(self) -> int:
        """Rule 2."""
        return self.pinned_at_ms + int(250 * self.ttl_s)

    @property
    def look_s(self) -> float:
        """Interval of a task's checks, short enough that some come between half and all of the time."""
        return self.ttl_s / 8


LEASE_BYTES = 1 << 30
"""Reads below this size get no lease unless requested.

They end within seconds, and a subscription that stays for hours after each small query would count against a topic's backlog quota
and its cursors.
"""


def hold_lease(options: SourceOptions, tasks: Sequence[ScanTask]) -> BatchLease | None:
    """Keep what the tasks will read from being trimmed until `lease_ttl_s` has passed, or tasks renew the lease.

    Raises CepheidError only for a lease that was requested by name; otherwise the read continues without.
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
    """Return the first position of each topic partition."""
    firsts: dict[str, MessagePosition] = {}
    for task in tasks:
        for piece in task.pieces:
            place = MessagePosition(piece.ledger_id, piece.first_entry_id)
            firsts[piece.topic] = min(place, firsts.get(piece.topic, place))
    return firsts


def pin_batch(source: PlanSource, starts: Mapping[str, MessagePosition], *, ttl_s: float, name: str | None = None) -> str:
    """Create a lease at the start positions of a batch read; return its name.

    It ends by its time to live, whatever happens to the job.
    """
    made: list[str] = []
    with closing(AdminHttp(source)) as http:
        lease = Lease(http, name or new_lease_name("batch-"), ttl_s)

        def hold(topic: str) -> None:
            if lease.hold(topic, starts[topic]) is Held.MADE:
                made.append(topic)

        failures = call_all([partial(hold, topic) for topic in sorted(starts)], until=Exception)
        if failures and name is None:  # a given name may be used by other reads as well
            drop_all(lease, made)
    if failures:
        raise failures[0]
    return lease.name


class Prolonging:
    """Renews the lease for one task. `topic`: one that it reads; `all_topics` of the read, fetched when they are needed."""

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
        """Yield the rows unchanged, and renew the lease until they end or the consumer stops."""
        self._thread = threading.Thread(target=self._run, name="cepheid-batch-lease", daemon=True)
        self._thread.start()
        try:
            yield from batches
        finally:
            self._ended.set()
            self._thread.join(timeout=_LONGEST_WAIT_FOR_END_S)

    def wait_s(self) -> float:
        """Return the seconds until the first check."""
        return max(0.0, (self._lease.begins_to_matter_ms - self._now_ms()) / 1000)

    def look(self) -> bool:
        """Check the lease, and renew it if due. Return False if there is nothing more to renew. Raises CepheidError."""
        with self._opened() as (lease, all_topics):
            found = lease.properties(self._topic)
            if found is None:
                facts = {"subscription": lease.name, "topic": self._topic}
                log.warning("scan.lease_is_gone: there is no subscription %s in %s any more", lease.name, self._topic, extra=facts)
                return False
            if not (ends := ends_ms(found)):
                return False  # a subscription created by the user, which does not expire
            if ends - self._now_ms() > 500 * self._lease.ttl_s:
                return True
            others = [topic for topic in all_topics() if topic != self._topic]
            renewed: list[str] = []

            def renew(topic: str) -> None:
                if lease.renew(topic, below_s=self._lease.ttl_s / 2):  # otherwise another task was faster
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
    """Return the renewal through the brokers of the options."""
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
