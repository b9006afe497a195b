"""A whole cluster inside the test's event loop: the same assembly as `cepheid standalone`, on any free ports.

async with StandaloneCluster() as cluster:
    client = pulsar.Client(cluster.service_url)          # blocking calls belong in a thread: `await cluster.blocking(work)`
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from cepheid.errors import UsageError
from cepheid_ports import Ports, host_port
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_broker.standalone import BrokerPorts, Standalone

T = TypeVar("T")
_MOVES = 5


class StandaloneCluster:
    """A cluster in this loop. Without `data_dir` its data is deleted with it. `ports` can provide another clock; `settings` are
    further fields of StandaloneSettings.
    """

    def __init__(
        self,
        *,
        bookies: int = 1,
        brokers: int = 1,
        data_dir: Path | None = None,
        ports: Ports | None = None,
        **settings: Any,
    ) -> None:
        if brokers < 1:
            raise UsageError(f"a cluster needs 1 broker or more, got {brokers}")
        self._bookies, self._brokers = bookies, brokers
        self._more_ports: list[BrokerPorts] = []
        self._data_dir = data_dir
        given = ports or Ports()
        self._ahead_ms = 0
        self._ports = replace(given, wall_ms=lambda: given.wall_ms() + self._ahead_ms)
        self._settings = settings
        self._full: set[str] = set()
        """Ids of the bookies whose disks are full."""
        self._opened = AsyncExitStack()
        self.standalone: Standalone

    def __repr__(self) -> str:
        return f"<StandaloneCluster {self._data_dir or 'temporary'}>"

    @property
    def service_url(self) -> str:
        """The URL with the addresses of all brokers."""
        first, *others = self.broker_urls
        return ",".join([first, *(url.partition("://")[2] for url in others)])

    @property
    def broker_urls(self) -> list[str]:
        """The service URL of each broker."""
        first = self.standalone.service_url
        host = urlsplit(first).hostname or ""
        return [first, *(f"pulsar://{host_port(host, ports.port)}" for ports in self.standalone.broker_ports[1:])]

    @property
    def admin_url(self) -> str:
        """The admin URL of the first broker. It answers a moment later than the protocol port."""
        return self.standalone.admin_url

    async def __aenter__(self) -> Self:
        data_dir = self._data_dir
        if data_dir is None:
            data_dir = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="cepheid-")))
        self._settings = {"data_dir": data_dir, "bookies": self._bookies, "port": 0, "admin_port": 0, **self._settings}
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise
        self._opened.push_async_callback(self._stop)
        return self

    async def _start(self) -> None:
        from cepheid_bookie import RealDisk  # the server's libraries, only when used
        from cepheid_broker.standalone import BrokerPorts, Standalone, StandaloneSettings

        full = self._full

        class FillableDisk(RealDisk):
            def free_bytes(self) -> int:
                return 0 if self.root.name in full else super().free_bytes()

        settings = StandaloneSettings.model_validate(self._settings)
        more_brokers = self._more_ports or [BrokerPorts()] * (self._brokers - 1)
        self.standalone = Standalone(settings, self._ports, new_disk=FillableDisk, more_brokers=more_brokers)
        await self.standalone.start()

    async def _stop(self) -> None:
        await self.standalone.aclose()

    async def restart(self, down_s: float = 0.0) -> None:
        """Stop the cluster, and start it `down_s` seconds later with the same data and ports."""
        first = {"port": self.standalone.service_url, "admin_port": self.admin_url}
        ports = {name: urlsplit(url).port for name, url in first.items()}
        self._more_ports = self.standalone.broker_ports[1:]
        await self._stop()
        await asyncio.sleep(down_s)
        self._settings |= ports
        await self._start()

    def cut_connections(self, broker: int | None = None) -> None:
        """Close all connections of clients, or those to one broker, counted from 1. New ones are accepted."""
        brokers = self.standalone.brokers
        for each in brokers if broker is None else [brokers[self._broker_index(broker)]]:
            each._listener.close_connections("cut by a test")

    async def owner_of(self, topic: str) -> int:
        """Return the number of the broker that serves the topic. A topic without a broker is assigned to one."""
        from cepheid_broker.ownership import Here

        name, brokers = TopicName.parse(topic), self.standalone.brokers
        location = await brokers[0].ownership.locate(name)
        if isinstance(location, Here):
            return 1
        return 1 + [broker.ownership.broker_id for broker in brokers].index(location.broker_id)

    async def move_topic(self, topic: str, broker: int) -> None:
        """Move the topic to a broker, with the others of its bundle. Raises RuntimeError if that broker does not accept it."""
        from cepheid_broker.ownership import BundleOwnership

        name, ownerships = TopicName.parse(topic), [each.ownership for each in self.standalone.brokers]
        heir = ownerships[self._broker_index(broker)]
        for _ in range(_MOVES):  # a client's lookup in between may assign it to another broker
            owner = ownerships[await self.owner_of(topic) - 1]
            if owner is heir:
                return
            assert isinstance(owner, BundleOwnership), "there are several brokers"
            await owner.release(await owner.bundle_of(name), to=heir.broker_id, reason="a test moves it")
            await heir.locate(name, authoritative=True)
        raise RuntimeError(f"broker {broker} does not take {topic}: is it being drained?")

    def _broker_index(self, number: int) -> int:
        if not 1 <= number <= self._brokers:
            raise UsageError(f"the cluster has brokers 1 to {self._brokers}, got {number}")
        return number - 1

    def move_clock(self, seconds: float) -> None:
        """Make the wall clock of brokers and bookies jump, forward or back. Their timeouts do not depend on it."""
        self._ahead_ms += round(1000 * seconds)

    async def kill_bookie(self, number: int) -> None:
        """Stop bookie `number`, counted from 1; it keeps its data. Does nothing if it does not run."""
        await self.standalone.bookies.stop(self._bookie(number))

    async def start_bookie(self, number: int) -> None:
        """Start bookie `number` again after `kill_bookie`."""
        await self.standalone.bookies.start(self._bookie(number))

    def fill_disk(self, number: int) -> None:
        """Make the disk of bookie `number` full: the bookie is read-only when this returns. Nothing is written for it."""
        self._full.add(self._bookie(number))
        self._look_at_disk(number)

    def free_disk(self, number: int) -> None:
        """Make the disk of bookie `number` have room again."""
        self._full.discard(self._bookie(number))
        self._look_at_disk(number)

    def _look_at_disk(self, number: int) -> None:
        for bookie in self.standalone.bookies.bookies():
            if bookie.bookie_id == self._bookie(number):
                bookie.look_at_free_space_now()

    def _bookie(self, number: int) -> str:
        if not 1 <= number <= self._bookies:
            raise UsageError(f"the cluster has bookies 1 to {self._bookies}, got {number}")
        return f"bookie-{number}"

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def blocking(self, work: Callable[[], T]) -> T:
        """Run `work` (calls of a blocking client) in a thread, while the cluster runs in this loop."""
        worker = Ports().new_worker("blocking-client", 1)
        try:
            return await worker.run(work)
        finally:
            await worker.aclose()
