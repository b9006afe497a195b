"""A whole cluster inside the test's event loop: the same assembly as `cepheid standalone`, on any free ports.

async with StandaloneCluster() as cluster:
    client = pulsar.Client(cluster.service_url)          # blocking calls belong in a thread: `await cluster.blocking(work)`
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

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
        self._ports = ports or Ports()
        self._settings = settings
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
        from cepheid_broker.standalone import Standalone, StandaloneSettings  # the server's libraries, only when used

        data_dir = self._data_dir
        if data_dir is None:
            data_dir = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="cepheid-")))
        fields = {"data_dir": data_dir, "bookies": self._bookies, "port": 0, "admin_port": 0, **self._settings}
        try:
            self.standalone = Standalone(StandaloneSettings.model_validate(fields), self._ports)
            await self.standalone.start()
        except BaseException:
            await self._opened.aclose()
            raise
        self._opened.push_async_callback(self.standalone.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def blocking(self, work: Callable[[], T]) -> T:
        """Runs `work` (calls of a blocking client) in a thread, while the cluster goes on in this loop."""
        worker = Ports().new_worker("blocking-client", 1)
        try:
            return await worker.run(work)
        finally:
            await worker.aclose()
