"""The blocking client, and the cluster for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cepheid
import cepheid.sync
from cepheid.loop_thread import LoopThread
from cepheid.testing import Cluster
from cepheid_broker import local_bookies
from cepheid_testkit import StandaloneCluster
from tests.client.conftest import ClusterThread
from tests.support import wait_until

RECEIVE_S = 30.0


def test_publish_and_consume_without_asyncio(cluster: ClusterThread, topic: str) -> None:
    with cepheid.sync.connect(cluster.url) as client:
        with client.producer(topic, schema=str) as producer, client.consumer(topic, "s", type="shared", schema=str) as consumer:
            first = producer.send("one", key="k")
            assert producer.send_all(str(number) for number in range(2500)) == 2500
            message = consumer.receive(RECEIVE_S)
            assert (message.value, message.key, message.message_id) == ("one", "k", first)
            with consumer.processing(message):
                pass
            for number, each in zip(range(2500), consumer, strict=False):
                assert each.value == str(number)
                consumer.ack_nowait(each)
        with client.reader(topic, schema=str, start=first) as reader:
            assert reader.has_message_available()
            assert reader.read(RECEIVE_S).value == "0"
        with client.consumer(topic, "s", type="shared") as raw:
            with pytest.raises(cepheid.TimedOutError):
                raw.receive(0.2)
            raw.seek("earliest")
            with pytest.raises(ZeroDivisionError), raw.processing(raw.receive(RECEIVE_S)):
                _ = 1 / 0
    with pytest.raises(cepheid.ClosedError, match="the client is closed"):
        client.producer(topic)
    client.close()


def test_closing_wakes_a_thread_that_receives(cluster: ClusterThread, topic: str) -> None:
    with cepheid.sync.connect(cluster.url) as client:
        consumer = client.consumer(topic, "s")
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.extend(consumer))
        thread.start()
        consumer.close()
        thread.join(RECEIVE_S)
        assert not thread.is_alive()
        assert got == []


def test_closing_the_client_ends_the_calls_of_other_threads() -> None:
    thread = LoopThread("test")
    caught: list[type[BaseException]] = []
    started = threading.Event()

    async def never() -> None:
        started.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.run(never())
        except cepheid.ClosedError as error:
            caught.append(type(error))

    caller = threading.Thread(target=call)
    caller.start()
    started.wait(RECEIVE_S)
    thread.stop()
    thread.stop()
    caller.join(RECEIVE_S)
    assert caught == [cepheid.ClosedError]
    with pytest.raises(cepheid.ClosedError):
        thread.run(never())


def test_a_program_that_closes_nothing_ends(cluster: ClusterThread, topic: str) -> None:
    code = f"import cepheid.sync; cepheid.sync.connect({cluster.url!r}).producer({topic!r}).send(b'hello'); print('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


async def test_a_cluster_for_tests() -> None:
    cluster = Cluster()
    with pytest.raises(cepheid.ClosedError, match="async with Cluster"):
        _ = cluster.url
    async with cluster, cepheid.connect(cluster.url) as client:
        async with client.producer("topic") as producer, client.reader("topic") as reader:
            await producer.send(b"hello")
            assert (await reader.read(RECEIVE_S)).data == b"hello"


@pytest.mark.parametrize("step", ["_open_bookie", "report_known_format"])
async def test_a_cluster_whose_start_is_cancelled_can_start_again_on_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    take, reached = getattr(local_bookies, step), asyncio.Event()

    async def first_time(*arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == 2:
            await asyncio.Event().wait()
        done = await take(*arguments)
        reached.set()
        return done

    taken: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(local_bookies, step, first_time)
        starting = asyncio.ensure_future(StandaloneCluster(bookies=2, data_dir=tmp_path).__aenter__())
        await reached.wait()
        starting.cancel()
        await asyncio.wait([starting])
    async with StandaloneCluster(bookies=2, data_dir=tmp_path) as cluster:
        assert len(cluster.standalone.bookies.writable()) == 2


def test_a_cluster_for_tests_without_asyncio() -> None:
    with Cluster(bookies=2) as cluster, cepheid.sync.connect(cluster.url) as client:
        assert client.partitions("topic") == 0


async def test_a_cluster_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cepheid_testkit", None)
    with pytest.raises(cepheid.MissingExtraError, match=r"pip install 'cepheid\[server\]'"):
        async with Cluster():
            pass


BARE = """
import sys
for name in ("cramjam", "fastavro", "pydantic", "fastapi", "uvloop", "fcntl", "resource"): sys.modules[name] = None
import cepheid, cepheid.sync, cepheid.testing
for use in (lambda: cepheid.AvroSchema(dict), lambda: cepheid.connect("pulsar://a").producer("t", compression="zstd")):
    try:
        use()
    except cepheid.MissingExtraError as error:
        print(error)
loaded = [name for name in sys.modules if name.startswith(("cepheid_broker", "cepheid_bookie", "cepheid_cli", "cepheid_testkit"))]
assert not loaded, loaded
"""


def test_the_bare_install_is_enough_and_names_the_extras() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "cepheid[avro]" in done.stdout
    assert "cepheid[compression]" in done.stdout


WITHOUT_POSIX = """
import asyncio, os, signal, subprocess, sys, threading      # of the standard library, which has another asyncio on Windows
for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop"):
    sys.modules[name] = None
windows = {{"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}}
for name in [name for name in vars(signal) if name.startswith("SIG") and name not in windows]:
    delattr(signal, name)
for name in ("alarm", "getitimer", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigpending",
             "sigwait"):
    delattr(signal, name)
for name in ("chown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg", "mkfifo", "posix_spawn",
             "register_at_fork", "setsid", "sysconf", "uname", "wait3"):
    delattr(os, name)

import cepheid, cepheid.admin, cepheid.sync, cepheid.testing

async def main():
    async with cepheid.connect({url!r}) as client:
        async with client.producer({topic!r}, compression="zlib") as producer, client.consumer({topic!r}, "s") as consumer:
            await producer.send(b"asyncio")
            message = await consumer.receive(timeout=30)
            await consumer.ack(message)
            print(message.data.decode())
    async with cepheid.admin.connect({admin_url!r}) as admin:
        print(*await admin.subscriptions.list({topic!r}))

asyncio.run(main())
with cepheid.sync.connect({url!r}) as client:
    with client.producer({topic!r}) as producer, client.consumer({topic!r}, "s") as consumer:
        producer.send(b"blocking")
        message = consumer.receive(timeout=30)
        consumer.ack(message)
        print(message.data.decode())
"""


def test_it_publishes_and_consumes_where_posix_is_missing(cluster: ClusterThread, topic: str) -> None:
    code = WITHOUT_POSIX.format(url=cluster.url, admin_url=cluster.admin_url, topic=topic)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["asyncio", "s", "blocking"], done.stderr


def test_blocking_handlers_run_beside_each_other(cluster: ClusterThread, topic: str) -> None:
    together = threading.Barrier(3)
    with cepheid.sync.connect(cluster.url) as client, client.producer(topic) as producer:
        consumer = client.consumer(topic, "s", type="shared")
        producer.send_all(b"%d" % number for number in range(3))
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(consumer.run, lambda _: together.wait(30), concurrency=3)
            while cluster.admin("GET", f"persistent/public/default/{topic}/stats")["subscriptions"]["s"]["msgBacklog"]:
                time.sleep(0.01)
            consumer.close()
            running.result(30)


async def test_a_cluster_for_tests_breaks_on_demand() -> None:
    async with Cluster() as cluster, cepheid.connect(cluster.url) as client:
        async with client.producer("topic") as producer, client.consumer("topic", "s", type="shared") as consumer:
            await producer.send(b"kept")
            url = cluster.url
            await cluster.restart()
            assert cluster.url == url
            assert (await consumer.receive(RECEIVE_S)).data == b"kept"
            cluster.cut_connections()
            await producer.send(b"due in an hour", deliver_after=3600)
            cluster.move_clock(3601)
            cluster.cut_connections()
            while (message := await consumer.receive(RECEIVE_S)).data == b"kept":
                pass
            assert message.data == b"due in an hour"


async def test_a_cluster_for_tests_goes_on_without_one_bookie_of_three_and_waits_without_two() -> None:
    async with Cluster(bookies=3) as cluster, cepheid.connect(cluster.url) as client:
        async with client.producer("topic") as producer, client.consumer("topic", "s") as consumer:
            await producer.send(b"with three")
            await cluster.kill_bookie(1)
            await producer.send(b"with two")
            await cluster.kill_bookie(2)
            with pytest.raises(cepheid.UsageError, match="bookies 1 to 3, got 4"):
                await cluster.kill_bookie(4)
            waiting = asyncio.ensure_future(producer.send(b"with one"))
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done()
            await cluster.start_bookie(1)
            await cluster.start_bookie(2)
            await waiting
            assert [(await consumer.receive(RECEIVE_S)).data for _ in range(3)] == [b"with three", b"with two", b"with one"]


async def test_a_cluster_for_tests_has_full_disks() -> None:
    async with Cluster() as cluster, cepheid.connect(cluster.url) as client:
        async with client.producer("topic") as producer, client.reader("topic") as reader:
            await producer.send(b"stored")
            cluster.fill_disk(1)
            waiting = asyncio.ensure_future(producer.send(b"waits"))
            assert (await reader.read(RECEIVE_S)).data == b"stored"
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done()
            cluster.free_disk(1)
            await waiting
            assert (await reader.read(RECEIVE_S)).data == b"waits"


async def test_a_cluster_for_tests_has_brokers_that_clients_are_led_to() -> None:
    async with Cluster(bookies=3, brokers=2) as cluster, cepheid.connect(cluster.broker_urls[0]) as client:
        async with client.producer("topic") as producer, client.reader("topic") as reader:
            for round, broker in enumerate((1, 2, 1)):
                await cluster.move_topic("topic", broker)
                assert await cluster.owner_of("topic") == broker
                await producer.send(f"{round} before".encode())
                cluster.cut_connections(broker)
                await producer.send(f"{round} after".encode())
                assert (await reader.read(RECEIVE_S)).data == f"{round} before".encode()
                assert (await reader.read(RECEIVE_S)).data == f"{round} after".encode()
        urls = cluster.broker_urls
        await cluster.restart()
        assert cluster.broker_urls == urls
        async with cepheid.connect(urls[1]) as other, other.producer("topic") as producer:
            await producer.send(b"after the restart")


async def test_cutting_a_broker_leaves_the_connections_of_others() -> None:
    async with Cluster(brokers=2) as cluster:
        first, second = cluster._cluster.standalone.brokers
        clients = [cepheid.connect(url) for url in cluster.broker_urls]
        for client in clients:
            await client.partitions("topic")
        cluster.cut_connections(2)
        await wait_until(lambda: second.statistics().connections == 0)
        assert first.statistics().connections == 1
        with pytest.raises(cepheid.UsageError, match="brokers 1 to 2, got 3"):
            cluster.cut_connections(3)
        for client in clients:
            await client.close()


def test_a_cluster_for_tests_breaks_without_asyncio() -> None:
    with Cluster(bookies=2) as cluster:
        asyncio.run(cluster.kill_bookie(2))
        cluster.fill_disk(1)
        with pytest.raises(cepheid.UsageError, match="bookies 1 to 2, got 0"):
            cluster.fill_disk(0)
        full, killed = cluster._started.standalone.bookies.problems()
        assert full.startswith("bookie-1 is read-only: its journal disk has 0 bytes free")
        assert killed == "bookie-2 is stopped"
        asyncio.run(cluster.restart())
        assert cluster._started.standalone.bookies.writable() == ["bookie-2"]


FIXTURES = """
import asyncio, cepheid, cepheid.sync
pytest_plugins = ["cepheid.pytest_plugin"]

def test_one(cepheid_cluster, cepheid_topic):
    with cepheid.sync.connect(cepheid_cluster.url) as client, client.producer(cepheid_topic) as producer:
        producer.send(b"1")
        asyncio.run(cepheid_cluster.restart())
        producer.send(b"2")

def test_another(cepheid_cluster, cepheid_new_cluster):
    assert cepheid_cluster.url != cepheid_new_cluster.url
"""


def test_fixtures_for_pytest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FIXTURES.split("def")[0])
    (tmp_path / "test_it.py").write_text(FIXTURES.replace('pytest_plugins = ["cepheid.pytest_plugin"]', ""))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout


def test_a_cluster_for_tests_in_other_languages() -> None:
    command = [sys.executable, "-m", "cepheid.testing", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with cepheid.sync.connect(json.loads(process.stdout.readline())["url"]) as client:
            assert client.partitions("topic") == 0
        process.stdin.close()
        assert process.wait(30) == 0
