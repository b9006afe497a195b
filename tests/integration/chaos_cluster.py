"""The cluster that chaos tests break: real processes on this machine, with patience short enough for tests."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar

from cepheid_dev.local_cluster import LocalCluster
from cepheid_testkit.metadata_view import MetadataView
from tests.history.checker import check
from tests.history.events import Event, save
from tests.history.told import Progress, ToldWorkload
from tests.history.verdict import Promises
from tests.history.waits import longest_waits
from tests.integration.copies import bad_copies
from tests.plain_admin import AdminClient

NAMESPACE = "public/chaos"
SESSION_TIMEOUT_S = 4.0  # on a machine with much else to do, sessions of 2 s were seen to end by themselves
ADD_TIMEOUT_S = 1.0
PATIENCE_S = 60.0
"""Nothing that a test waits for takes longer, on any machine."""
STANDSTILL_S = 30.0
"""No client waits so long for a receipt, even on a slow machine and for a new owner: a session ends after 4 s, and a client that
knows both brokers asks the dead one with pauses that double, so that the attempt that succeeds may come after 12.7 s. What a fault
costs on a quiet machine is for benchmarks to say (bookie_kill_gap, takeover_kill)."""
LAST_WORDS_LINES = 40
POLL_S = 0.1
KEEP = bool(os.environ.get("CEPHEID_CHAOS_KEEP"))
TOPICS_TRIED = 20

BALANCE = {"enabled": False}
"""A bundle that moves by load ends consumers' connections, and the judge of what they received is not told of that."""
SETTINGS: dict[str, dict[str, Any]] = {
    "broker": {
        "balance": BALANCE,
        "ledger": {
            "add_timeout_s": ADD_TIMEOUT_S,
            "read_timeout_s": 1.0,
            "recovery_timeout_s": 2.0,
        },
    },
}


class BrokenOnPurpose(ABC):
    """What every cluster under chaos has: clients that are watched, metadata that is asked, logs that are shown."""

    directory: Path
    view: MetadataView

    @property
    @abstractmethod
    def service_url(self) -> str:
        """Of all brokers."""

    @abstractmethod
    def log_paths(self) -> Mapping[str, Path]:
        """By the process's name."""

    def ensemble(self, topic: str) -> tuple[str, ...]:
        """The bookies that the topic's newest entries lie on."""
        return self.view.ensemble(topic)

    def writable(self) -> list[str]:
        """Bookies that are registered and take entries."""
        return self.view.writable_bookies()

    def owner(self, topic: str) -> str:
        """The broker that serves it; "" while nobody does."""
        return self.view.owner(topic)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{self.last_words()}"
            time.sleep(POLL_S)

    def wait_until_replaced(self, bookie: str, topic: str) -> None:
        """Three others hold what is written to the topic."""

        def is_replaced() -> bool:
            now = self.ensemble(topic)
            return bookie not in now and len(now) == 3

        self.wait_until(is_replaced, f"{bookie} is replaced in the ensemble of {topic}")

    @contextmanager
    def workload(self, name: str, *, topic: str = "", **flags: str) -> Iterator[ChaosWorkload]:
        """Clients that publish and consume on a topic of their own."""
        topic = topic or new_topic(name)
        given = {"url": self.service_url, "topic": topic, "types": "Shared,Failover", "quiet-s": "1.0", **flags}
        arguments = [word for flag, value in given.items() for word in (f"--{flag}", value)]
        with ToldWorkload(*arguments, "--patient") as told:
            workload = ChaosWorkload(self, told, topic)
            workload.goes_on()
            yield workload

    def last_words(self) -> str:
        """The end of every log."""
        parts = []
        for name, path in self.log_paths().items():
            lines = path.read_text(errors="replace").splitlines()[-LAST_WORDS_LINES:] if path.exists() else ["(no log)"]
            parts += [f"---- {name}: {path}", *lines]
        return "\n".join(parts)


class ChaosCluster(BrokenOnPurpose):
    """`up` once, `down` once; between them processes are broken, and `heal` makes them whole."""

    def __init__(
        self,
        *,
        bookies: int = 4,
        brokers: int = 2,
        zookeepers: int = 1,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        settings: Mapping[str, Mapping[str, Any]] = SETTINGS,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cepheid-chaos-"))
        self._settings = settings
        self.processes = LocalCluster(self.directory)
        self._bookies, self._brokers, self._session_timeout_s = bookies, brokers, session_timeout_s
        self._zookeepers = zookeepers

    @property
    def service_url(self) -> str:
        return self.processes.service_url

    def log_paths(self) -> Mapping[str, Path]:
        return {name: self.processes.log_path(name) for name in self.processes.names()}

    def up(self) -> None:
        self.processes.up(
            self._bookies,
            self._brokers,
            zookeepers=self._zookeepers,
            session_timeout_s=self._session_timeout_s,
            settings=self._settings,
            timeout_s=3 * PATIENCE_S,
        )
        self.view = MetadataView(self.processes.metadata_url)
        keep_everything(self.processes.admin_urls[0])

    def down(self, *, keep: bool) -> None:
        self.processes.down()
        if not keep and not KEEP:
            shutil.rmtree(self.directory, ignore_errors=True)

    def heal(self) -> None:
        """Every process runs and is ready. Raises AssertionError when one does not come back."""
        for process in self.processes.status():
            if process.state == "paused":
                self.processes.resume(process.name)
            elif process.state in ("stopped", "killed", "died"):
                self.processes.start(process.name)
        self.wait_until(lambda: all(process.state == "ready" for process in self.processes.status()), "every process is ready")

    @contextmanager
    def client(self, **options: Any) -> Iterator[pulsar.Client]:
        """The official client, which knows all brokers."""
        with _client(self.service_url, **options) as client:
            yield client

    def shown(self, name: str) -> str:
        """ready, starting, paused, stopped, killed or died."""
        return next(process.state for process in self.processes.status() if process.name == name)

    def open_topic(self, topic: str, *, at: str) -> None:
        """As a client does that knows this broker only."""
        with _client(f"pulsar://127.0.0.1:{self.processes.broker_ports[at]}") as client:
            client.create_producer(topic)

    def new_topic_on(self, bookie: str) -> str:
        """An empty topic whose ledger has that bookie in its ensemble."""
        with _client(self.service_url) as client:
            for _ in range(TOPICS_TRIED):
                topic = new_topic("placed")
                client.create_producer(topic)
                if bookie in self.ensemble(topic):
                    return topic
        raise AssertionError(f"none of {TOPICS_TRIED} new ledgers has {bookie}\n{self.last_words()}")


@contextmanager
def own_cluster(**options: Any) -> Iterator[ChaosCluster]:
    """Run a cluster for one test, and keep its data and logs when the test fails."""
    cluster = ChaosCluster(**options)
    failed = True
    try:
        cluster.up()
        yield cluster
        failed = False
    finally:
        if failed:
            print(cluster.last_words())
        cluster.down(keep=failed)


class SharedCluster:
    """The cluster of many tests, as long as they succeed. What a failed one leaves is kept, and the next gets a new one."""

    def __init__(self, session_timeout_s: float = SESSION_TIMEOUT_S) -> None:
        self._session_timeout_s = session_timeout_s
        self._cluster: ChaosCluster | None = None

    def get(self) -> ChaosCluster:
        if self._cluster is None:
            cluster = ChaosCluster(session_timeout_s=self._session_timeout_s)
            try:
                cluster.up()
            except BaseException:
                print(cluster.last_words())
                cluster.down(keep=True)
                raise
            self._cluster = cluster
        return self._cluster

    def drop(self, *, keep: bool) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.down(keep=keep)


class ChaosWorkload:
    """What a test tells the clients, and what it demands of them."""

    def __init__(self, cluster: BrokenOnPurpose, told: ToldWorkload, topic: str) -> None:
        self._cluster = cluster
        self._told = told
        self.topic = topic

    def goes_on(self, *, receipts: int = 50) -> Progress:
        """So many further messages are acknowledged."""
        try:
            return self._told.wait_for_receipts(receipts, PATIENCE_S)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self._cluster.last_words()}") from None

    def fault(self, what: str) -> None:
        """Before something is broken that clients have no part in."""
        self._told.tell(f"fault {what}")

    @contextmanager
    def connections_end(self, what: str) -> Iterator[None]:
        """Around something that ends clients' connections: they send again, and are sent again."""
        self._told.tell(f"fault {what}")
        self._told.tell("restart")
        yield
        self._told.tell("restarted")

    def ends_well(self, *, longest_wait_s: float = STANDSTILL_S, **promises: Any) -> None:
        """Drains, audits, judges, and looks at the copies and at how long clients waited for a receipt after each fault."""
        try:
            events = self._told.end()
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self._cluster.last_words()}") from None
        violations = check(events, Promises(**promises))
        if violations:
            kept = self._cluster.directory / f"{self.topic.rpartition('/')[2]}.jsonl"
            save(events, kept)  # python -m tests.history --judge
            raise AssertionError("\n".join([*map(str, violations[:20]), f"history: {kept}", self._cluster.last_words()]))
        refused = _refused(events)
        assert not refused, f"{refused}\n{self._cluster.last_words()}"
        bad = bad_copies(self._cluster.view.url, self.topic)
        assert not bad, "\n".join([*bad, self._cluster.last_words()])
        waits = longest_waits(events)
        print({name: round(wait_s, 3) for name, wait_s in waits.items()})
        assert max(waits.values()) < longest_wait_s, waits


def new_topic(name: str) -> str:
    return f"persistent://{NAMESPACE}/{name}-{time.monotonic_ns()}"


def keep_everything(admin_url: str) -> None:
    """The audit reads all that was ever published."""
    forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    AdminClient(admin_url).put(f"/admin/v2/namespaces/{NAMESPACE}", {"retention_policies": forever})


@contextmanager
def _client(url: str, **options: Any) -> Iterator[pulsar.Client]:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), **options)
    try:
        yield client
    finally:
        client.close()


def _refused(events: list[Event]) -> list[str]:
    """Sends that were answered with an error: nothing that these tests do justifies one."""
    return [str(event) for event in events if event.kind == "sent" and event.error]
