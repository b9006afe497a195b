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
from cepheid_ports import Ports

if TYPE_CHECKING:
    from cepheid_broker.standalone import Standalone

T = TypeVar("T")


class StandaloneCluster:
    """Without `data_dir` the data goes with the cluster. `ports` gives it another clock, say; `settings` are further fields of
    StandaloneSettings."""

    def __init__(self, *, bookies: int = 1, data_dir: Path | None = None, ports: Ports | None = None, **settings: Any) -> None:
        self._bookies = bookies
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
        return self.standalone.service_url

    @property
    def admin_url(self) -> str:
        """Answers a moment later than the protocol port."""
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
        from cepheid_broker.standalone import Standalone, StandaloneSettings

        full = self._full

        class FillableDisk(RealDisk):
            def free_bytes(self) -> int:
                return 0 if self.root.name in full else super().free_bytes()

        settings = StandaloneSettings.model_validate(self._settings)
        self.standalone = Standalone(settings, self._ports, new_disk=FillableDisk)
        await self.standalone.start()

    async def _stop(self) -> None:
        await self.standalone.aclose()

    async def restart(self, down_s: float = 0.0) -> None:
        """Stop the cluster, and start it `down_s` seconds later with the same data and ports."""
        ports = {name: urlsplit(url).port for name, url in (("port", self.service_url), ("admin_port", self.admin_url))}
        await self._stop()
        await asyncio.sleep(down_s)
        self._settings |= ports
        await self._start()

    def cut_connections(self) -> None:
        """Close all connections of clients. New ones are accepted."""
        self.standalone.broker._listener.close_connections("cut by a test")

    def move_clock(self, seconds: float) -> None:
        """Let the wall clock of brokers and bookies jump, forward or back. Their timeouts do not depend on it."""
        self._ahead_ms += round(1000 * seconds)

    async def kill_bookie(self, number: int) -> None:
        """Stop bookie `number`, counted from 1; it keeps its data. One that does not run is left alone."""
        await self.standalone.bookies.stop(self._bookie(number))

    async def start_bookie(self, number: int) -> None:
        """Start bookie `number` again after `kill_bookie`."""
        await self.standalone.bookies.start(self._bookie(number))

    def fill_disk(self, number: int) -> None:
        """Let the disk of bookie `number` be full: the bookie is read-only when this returns. Nothing is written for it."""
        self._full.add(self._bookie(number))
        self._look_at_disk(number)

    def free_disk(self, number: int) -> None:
        """Let the disk of bookie `number` have its room again."""
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
        """Runs `work` (calls of a blocking client) in a thread, while the cluster goes on in this loop."""
        worker = Ports().new_worker("blocking-client", 1)
        try:
            return await worker.run(work)
        finally:
            await worker.aclose()
