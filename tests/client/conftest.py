"""One in-process cluster for all tests of this folder, in a thread of its own; every test has its own topic."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cepheid_testkit import StandaloneCluster

TIMEOUT_S = 30.0


class Served:
    """A server that is there for tests: Cepheid here, another one in test_apache_pulsar.py."""

    url: str

    @property
    def admin_url(self) -> str:
        raise NotImplementedError

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the admin API, below /admin/v2/. Blocking."""
        data = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + TIMEOUT_S
        while True:  # it begins to listen, on a port that is known only then, a moment after the protocol port
            url = f"{self.admin_url}/admin/v2/{path}"
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    content = answer.read()
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{method} {url}: {error.code} {error.read()[:500]!r}") from None
            except urllib.error.URLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def unload(self, topic: str) -> None:
        self.admin("PUT", f"persistent/public/default/{topic}/unload")

    def create_partitions(self, topic: str, count: int, *, method: str = "PUT") -> None:
        """With method POST: more partitions for a topic that is there."""
        self.admin(method, f"persistent/public/default/{topic}/partitions", count)


class ClusterThread(Served):
    """A cluster whose loop runs beside that of the tests, which start and stop their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._cluster = StandaloneCluster()

    def __enter__(self) -> ClusterThread:
        self._thread.start()
        self._run(self._cluster.__aenter__())
        self.url = self._cluster.service_url
        # FastAPI builds its routes in a thread and silences a warning for the whole process; so does pytest between tests.
        self.admin("GET", "clusters")
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._cluster.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def admin_url(self) -> str:
        return self._cluster.admin_url

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterThread]:
    with ClusterThread() as cluster:
        yield cluster


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in request.node.name)
