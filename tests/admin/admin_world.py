"""A whole standalone process's parts in the test's own loop, and a client of its admin API.

The loop runs only inside `run`; tests read as plain calls: `admin.put("/admin/v2/tenants/t", json={…})`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from cepheid_broker.standalone import Standalone, StandaloneSettings
from cepheid_metadata import available_bookies
from cepheid_ports import Ports
from tests.wire_client import WireClient

T = TypeVar("T")

TOPICS = "/admin/v2/persistent"
NAMESPACE = f"{TOPICS}/public/default"


class AdminWorld:
    def __init__(self, runner: asyncio.Runner, standalone: Standalone, client: httpx.AsyncClient) -> None:
        self.runner = runner
        self.standalone = standalone
        self._client = client

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        return self.runner.run(bounded())

    def in_thread(self, work: Callable[[], T]) -> T:
        """Blocking clients, while the loop serves them."""
        return self.run(asyncio.to_thread(work))

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.run(self.send(method, path, **request))

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        return await self._client.request(method, path, **request)

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("GET", path, **request)

    def put(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("PUT", path, **request)

    def post(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("POST", path, **request)

    def delete(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("DELETE", path, **request)

    def wire_client(self, topic: str) -> WireClient:
        """Made in a thread; use it in threads only."""
        return WireClient(self.standalone.service_url, topic)

    def keep_everything(self, namespace: str) -> None:
        """Makes public/`namespace` without limits of retention: entries stay though nobody has subscribed."""
        limits = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        assert self.put(f"/admin/v2/namespaces/public/{namespace}", json={"retention_policies": limits}).status_code == 204

    def publish(self, topic: str, payloads: list[bytes]) -> list[tuple[int, int]]:
        """One entry each; where they were stored."""

        def send() -> list[tuple[int, int]]:
            with self.wire_client(topic) as client:
                client.open_producer()
                return [client.send(number, payload) for number, payload in enumerate(payloads)]

        return self.in_thread(send)


@contextmanager
def running_admin(data_dir: Path, **settings: Any) -> Iterator[AdminWorld]:
    with asyncio.Runner() as runner:
        standalone = runner.run(_start(StandaloneSettings(data_dir=data_dir, port=0, admin_port=0, **settings)))
        client = httpx.AsyncClient(base_url=standalone.admin_url, timeout=60)
        try:
            yield AdminWorld(runner, standalone, client)
        finally:
            runner.run(client.aclose())
            runner.run(standalone.aclose())


async def _start(settings: StandaloneSettings) -> Standalone:
    standalone = Standalone(settings, Ports())
    await standalone.start()
    registrations = available_bookies(standalone.broker.store)
    for bookie in standalone.bookies.bookies():  # the bookies' ports come last of all
        for _ in range(2000):
            found = await registrations.get(bookie.bookie_id)
            if found is not None and found.record.addresses:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"{bookie!r} opened no port")
    return standalone
