"""A whole cluster for tests, in this process, on free ports.

async with Cluster() as cluster:            # or `with Cluster() as cluster:`, which gives it a thread of its own
    async with cepheid.connect(cluster.url) as client: ...

It needs what a server needs: pip install 'cepheid[server]'.
"""

from __future__ import annotations

import importlib
from typing import Any, Self

from cepheid.errors import ClosedError, MissingExtraError
from cepheid.loop_thread import LoopThread

_TESTKIT = "cepheid_testkit"
"""Loaded by name when a cluster is started: a client does not depend on the server (pyproject.toml, the contract of floors)."""


class Cluster:
    """Its data is deleted with it. `settings`: further settings of `cepheid standalone`, by their names in a settings file."""

    def __init__(self, *, bookies: int = 1, **settings: Any) -> None:
        self._bookies = bookies
        self._settings = settings
        self._cluster: Any = None
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Cluster {self.url}>" if self._cluster is not None else "<Cluster, not started>"

    @property
    def url(self) -> str:
        """What `cepheid.connect` takes."""
        return str(self._started.service_url)

    @property
    def admin_url(self) -> str:
        """Answers a moment later than `url`, when its port is known too."""
        return str(self._started.admin_url)

    async def __aenter__(self) -> Self:
        try:
            testkit = importlib.import_module(_TESTKIT)
            cluster = testkit.StandaloneCluster(bookies=self._bookies, **self._settings)
            await cluster.__aenter__()
        except ImportError as error:
            raise MissingExtraError(f"a cluster needs the server ({error}): pip install 'cepheid[server]'") from error
        self._cluster = cluster
        return self

    async def __aexit__(self, *_: object) -> None:
        cluster, self._cluster = self._cluster, None
        await cluster.__aexit__()

    def __enter__(self) -> Self:
        self._thread = LoopThread("cepheid-cluster")
        try:
            self._thread.run(self.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        try:
            self._thread.run(self.__aexit__())
        finally:
            self._thread.stop()

    @property
    def _started(self) -> Any:
        if self._cluster is None:
            raise ClosedError("the cluster is not running: use it inside `async with Cluster() as cluster`")
        return self._cluster
