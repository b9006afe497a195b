"""A whole cluster for tests, in this process, on free ports.

async with Cluster() as cluster:            # or `with Cluster() as cluster:`, which runs it in its own thread
    async with cepheid.connect(cluster.url) as client: ...

It needs the server: pip install 'cepheid[server]'. `cepheid.pytest_plugin` has fixtures, and
`python -m cepheid.testing --json` runs a cluster for tests in other languages.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from cepheid.errors import ClosedError, MissingExtraError
from cepheid.loop_thread import LoopThread

T = TypeVar("T")
_TESTKIT = "cepheid_testkit"
"""Module that is loaded by name when a cluster is started:

a client does not depend on the server (pyproject.toml, import contract).
"""


class Cluster:
    """A cluster with temporary data. `settings`: further settings of `cepheid standalone`, by their names in a settings file."""

    def __init__(self, *, bookies: int = 1, brokers: int = 1, **settings: Any) -> None:
        self._brokers = brokers
        self._bookies = bookies
        self._settings = settings
        self._cluster: Any = None
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Cluster {self.url}>" if self._cluster is not None else "<Cluster, not started>"

    @property
    def url(self) -> str:
        """The URL for `cepheid.connect`: the addresses of all brokers."""
        return str(self._started.service_url)

    @property
    def broker_urls(self) -> list[str]:
        """The service URL of each broker; broker 1 is the first."""
        return list(self._started.broker_urls)

    @property
    def admin_url(self) -> str:
        """The admin API of broker 1. It answers a moment later than `url`."""
        return str(self._started.admin_url)

    async def restart(self, down_s: float = 0.0) -> None:
        """Stop the cluster, and start it `down_s` seconds later with the same data and addresses."""
        await self._run(self._started.restart(down_s))

    async def kill_bookie(self, number: int) -> None:
        """Stop a bookie as if its process had ended; the first is 1. `start_bookie` and `restart` start it again with its data."""
        await self._run(self._started.kill_bookie(number))

    async def start_bookie(self, number: int) -> None:
        """Start a bookie that was killed, with its data. Does nothing if it runs."""
        await self._run(self._started.start_bookie(number))

    def fill_disk(self, bookie: int) -> None:
        """Make a bookie find its disk full: it refuses new entries, but its data can be read. Nothing is written to the disk."""
        self._call(lambda: self._started.fill_disk(bookie))

    def free_disk(self, bookie: int) -> None:
        """Make the disk of a bookie have room again after `fill_disk`."""
        self._call(lambda: self._started.free_disk(bookie))

    def cut_connections(self, broker: int | None = None) -> None:
        """Close the connections of all clients, or those to one broker, like a broken network. New ones are accepted."""
        self._call(lambda: self._started.cut_connections(broker))

    async def owner_of(self, topic: str) -> int:
        """Return the number of the broker that serves a topic; the first is 1. A topic without a broker is assigned to one."""
        return int(await self._run(self._started.owner_of(topic)))

    async def move_topic(self, topic: str, broker: int) -> None:
        """Move a topic to another broker, with all topics of its bundle. Clients follow."""
        await self._run(self._started.move_topic(topic, broker))

    def move_clock(self, seconds: float) -> None:
        """Make the wall clock of the cluster jump, for delayed messages, time to live and retention. Clients keep their clocks.

        Running timers keep their time: cut the connections afterwards, so that messages which are due now are delivered.
        """
        self._call(lambda: self._started.move_clock(seconds))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._thread is None else asyncio.to_thread(self._thread.run, work))

    def _call(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._thread.call(work)

    async def __aenter__(self) -> Self:
        try:
            testkit = importlib.import_module(_TESTKIT)
            cluster = testkit.StandaloneCluster(bookies=self._bookies, brokers=self._brokers, **self._settings)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a cluster until standard input ends, or until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m cepheid.testing", description=main.__doc__)
    parser.add_argument("--bookies", type=int, default=1)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the addresses as one line of JSON")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Cluster(bookies=given.bookies, brokers=given.brokers) as cluster:
            addresses = {"url": cluster.url, "admin_url": cluster.admin_url}
            shown = json.dumps(addresses) if given.json else "\n".join(f"{name}: {url}" for name, url in addresses.items())
            print(shown, flush=True)  # noqa: T201  # its caller reads it
            sys.stdin.read()
    except KeyboardInterrupt:
        pass
    except MissingExtraError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
