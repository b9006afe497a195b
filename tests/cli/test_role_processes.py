"""`cepheid init`, `bookie` and `broker` as an operator runs them: processes, their words, and what they refuse to start on."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.raw_client import open_connection, open_publisher
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_metadata import BrokerRegistration, broker_records, cluster_records, keys, list_names
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_rpc import BookieUnavailableError, ExplicitLac, Status
from tests.plain_admin import AdminClient
from tests.support import free_port
from tests.zookeeper_support import new_zookeeper_url

pytestmark = pytest.mark.slow

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}
CEPHEID = (sys.executable, "-m", "cepheid_cli")


def cepheid(*arguments: object, timeout_s: float = 120.0, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code, and everything it said."""
    done = subprocess.run(
        [*CEPHEID, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**ENVIRONMENT, **(environment or {})},
    )
    return done.returncode, done.stdout + done.stderr


@contextmanager
def running(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A role that serves."""
    with log.open("wb") as output:
        process = subprocess.Popen([*CEPHEID, *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 120
        while "ready after" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def registered(url: str, parent: str) -> list[str]:
    async def ask() -> list[str]:
        store = await open_store(url, Ports())
        try:
            return await list_names(store, parent)
        finally:
            await store.aclose()

    return asyncio.run(ask())


def addresses_of(url: str, cluster: str) -> tuple[str, str]:
    async def ask() -> tuple[str, str]:
        store = await open_store(url, Ports())
        try:
            found = await cluster_records(store).get(cluster)
            assert found is not None
            return found.record.broker_service_url, found.record.service_url
        finally:
            await store.aclose()

    return asyncio.run(ask())


def bookie_flags(url: str, data: Path, name: str = "b1") -> list[object]:
    return ["bookie", "--metadata", url, "--data", data, "--id", name, "--port", free_port(), "--http-port", free_port()]


def broker_flags(url: str) -> list[object]:
    return ["broker", "--metadata", url, "--id", "br1", "--port", free_port(), "--admin-port", free_port()]


@pytest.fixture(scope="module")
def founded() -> str:
    url = new_zookeeper_url()
    code, said = cepheid("init", "--metadata", url, "--cluster", "east")
    assert code == 0, said
    return url


@pytest.mark.slow
def test_a_cluster_is_founded_by_many_at_once_and_again() -> None:
    url = new_zookeeper_url()
    addresses = ["--service-url", "pulsar://a:1,b:1", "--admin-url", "http://a:2"]
    command = [*CEPHEID, "init", "--metadata", url, "--cluster", "east", *addresses]
    founders = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) for _ in range(3)]
    said = [founder.communicate(timeout=120) for founder in founders]
    assert [founder.returncode for founder in founders] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1  # the same identity
    assert cepheid("init", "--metadata", url, "--cluster", "east")[1].encode() == said[0][0]
    assert addresses_of(url, "east") == ("pulsar://a:1,b:1", "http://a:2")  # as said last, not emptied by who says nothing
    code, refused = cepheid("init", "--metadata", url, "--cluster", "west")
    assert code == 1
    assert "holds cluster 'east', not 'west'" in refused


@pytest.mark.parametrize("flags", [bookie_flags, lambda url, _: broker_flags(url)], ids=["bookie", "broker"])
def test_a_store_that_was_never_initialized_is_refused(flags, tmp_path: Path) -> None:
    code, said = cepheid(*flags(new_zookeeper_url(), tmp_path / "data"))
    assert code == 1
    assert "holds no cluster" in said
    assert "cepheid init --metadata" in said
    assert not (tmp_path / "data").exists()


def metrics(port: object) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode().splitlines()


@pytest.mark.slow
def test_roles_register_and_leave_in_good_order(founded: str, tmp_path: Path) -> None:
    with running(tmp_path / "bookie.log", *bookie_flags(founded, tmp_path / "data")) as bookie:
        flags = broker_flags(founded)
        with running(tmp_path / "broker.log", *flags) as broker:
            expected = {f"cepheid_{name} 1" for name in ("broker_ready", "metadata_connected", "bookies_writable", "bookies_known")}
            deadline = time.monotonic() + 60
            while missing := expected - set(metrics(flags[-1])):  # it serves before it has heard of every bookie
                assert time.monotonic() < deadline, missing
                time.sleep(0.05)
            assert registered(founded, keys.AVAILABLE_BOOKIES_KEY) == ["b1"]
            assert registered(founded, keys.BROKERS_KEY) == ["br1"]
            broker.send_signal(signal.SIGTERM)
            assert broker.wait(30) == 0, (tmp_path / "broker.log").read_text()
            assert registered(founded, keys.BROKERS_KEY) == []
        bookie.send_signal(signal.SIGTERM)
        assert bookie.wait(30) == 0, (tmp_path / "bookie.log").read_text()
        assert registered(founded, keys.AVAILABLE_BOOKIES_KEY) == []
    assert "broker.too_few_bookies" in (tmp_path / "broker.log").read_text()
    for log in ("bookie.log", "broker.log"):
        assert {"stopping", "stopped"} <= set((tmp_path / log).read_text().splitlines())


def first_of_free_ports(count: int) -> int:
    while True:
        first = free_port()
        if all(is_free(first + number) for number in range(count)):
            return first


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_several_broker_processes_serve_one_port_after_another_and_one_admin_port(tmp_path: Path) -> None:
    url = new_zookeeper_url()
    cepheid("init", "--metadata", url, "--cluster", "east")
    port, admin_port = first_of_free_ports(2), first_of_free_ports(3)
    quorums = ["--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1]
    flags = ["broker", "--metadata", url, "--id", "many", "--processes", 2, "--port", port, "--admin-port", admin_port, *quorums]
    log = tmp_path / "broker.log"

    def starts() -> int:
        return log.read_text().count("cepheid broker process 1, ready after")

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    with running(tmp_path / "bookie.log", *bookie_flags(url, tmp_path / "data")), running(log, *flags) as supervisor:
        wait_for(lambda: "2 processes, ready after" in log.read_text())
        assert f"http://127.0.0.1:{admin_port} (answered by all)" in log.read_text()
        assert sorted(registered(url, keys.BROKERS_KEY)) == ["many-0", "many-1"]
        names = [f"persistent://public/default/many-{number}" for number in range(12)]
        owning_ports = {name: publish(f"pulsar://127.0.0.1:{port + number % 2}", name) for number, name in enumerate(names)}
        assert set(owning_ports.values()) == {port, port + 1}, "lookups lead to both"
        for number in range(3):  # the shared port, and those of the processes: any of them answers for all topics
            admin = AdminClient(f"http://127.0.0.1:{admin_port + number}")
            assert all(admin.get(f"/admin/v2/{name.replace('://', '/')}/stats")["storageSize"] for name in names)
        owned = {number: metric(admin_port + 1 + number, "cepheid_broker_bundles_owned") for number in (0, 1)}
        assert sum(owned.values()) == 4
        assert min(owned.values()) > 0

        (victim,) = pids_of(supervisor.pid, "--as-process=1,")
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: starts() == 2 and sorted(registered(url, keys.BROKERS_KEY)) == ["many-0", "many-1"])
        assert "broker_process.ended index=1 code=-9" in log.read_text()
        assert [publish(f"pulsar://127.0.0.1:{port + 1}", name) for name in names]

        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 0, log.read_text()
        assert registered(url, keys.BROKERS_KEY) == []


@pytest.mark.slow
def test_broker_processes_stop_when_their_supervisor_is_killed(founded: str, tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    flags = ["broker", "--metadata", founded, "--id", "orphan", "--processes", 2, "--port", 0, "--admin-port", 0]
    with running(log, *flags) as supervisor:
        deadline = time.monotonic() + 60
        while "2 processes, ready after" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        children = pids_of(supervisor.pid, "--as-process=")
        assert len(children) == 2
        supervisor.kill()
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    assert log.read_text().splitlines().count("stopped") == 2


def pids_of(parent: int, word: str) -> list[int]:
    """The children of a process whose command line has `word`."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if word in Path(f"/proc/{pid}/cmdline").read_text()]


def publish(url: str, topic: str) -> int:
    """Publish a message as a client does that knows one broker; return the port that serves the topic."""

    async def work() -> int:
        connection = await open_connection(url, topic)
        try:
            publisher = await open_publisher(connection, topic, b"m")
            receipt = asyncio.get_running_loop().create_future()
            connection.on_receipts = lambda _: receipt.set_result(None)
            publisher.send(1)
            async with asyncio.timeout(60):
                await asyncio.wait([receipt, connection.failed], return_when=asyncio.FIRST_COMPLETED)
            assert receipt.done()
            return connection.peer_port
        finally:
            connection.close()

    return asyncio.run(work())


def metric(port: int, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in metrics(port) if line.partition(" ")[0].partition("{")[0] == name)


@pytest.mark.slow
def test_a_bookie_refuses_what_is_not_its_own(founded: str, tmp_path: Path) -> None:
    """Another cluster's directory; another bookie's; its own id on an empty disk, unless that is said to be all right."""
    data = tmp_path / "b2"
    with running(tmp_path / "log", *bookie_flags(founded, data, "b2")):
        pass  # and killed
    other = new_zookeeper_url()
    cepheid("init", "--metadata", other, "--cluster", "other")
    code, said = cepheid(*bookie_flags(other, data, "b2"))
    assert (code, "belongs to cluster" in said) == (1, True), said
    code, said = cepheid(*bookie_flags(founded, data, "b3"))
    assert (code, "belongs to bookie b2, not to b3" in said) == (1, True), said
    empty = tmp_path / "empty"
    code, said = cepheid(*bookie_flags(founded, empty, "b2"))
    assert (code, "its data is gone" in said) == (1, True), said
    with running(tmp_path / "log", *bookie_flags(founded, empty, "b2"), "--metadata-session-timeout-s", 6, "--accept-empty-disk"):
        pass


def test_the_loss_of_a_disk_is_accepted_on_the_command_line_alone(founded: str, tmp_path: Path) -> None:
    """In a file or the environment it would accept every later loss too."""
    config = tmp_path / "bookie.toml"
    config.write_text("accept_empty_disk = true\n")
    code, said = cepheid(*bookie_flags(founded, tmp_path / "data", "b6"), "--config", config)
    assert (code, "'accept_empty_disk' in file" in said, "--accept-empty-disk" in said) == (1, True, True), said
    code, said = cepheid(*bookie_flags(founded, tmp_path / "data", "b6"), environment={"CEPHEID_BOOKIE_ACCEPT_EMPTY_DISK": "1"})
    assert (code, "in the environment is not a setting" in said) == (1, True), said


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits a process that runs")
def test_a_bookie_whose_disk_fails_ends_with_its_reason(founded: str, tmp_path: Path) -> None:
    flags = bookie_flags(founded, tmp_path / "data", "b5")
    command = [*CEPHEID, *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        while "stop with Ctrl-C" not in (line := process.stdout.readline()):
            assert line, "it ended"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))  # every write to a file fails from here on

        async def write() -> None:
            connection = GrpcConnection("b5", f"127.0.0.1:{flags[flags.index('--port') + 1]}")
            try:
                assert await connection.write_lac(ExplicitLac(1, 5, b"k" * 16)) is not Status.OK
            except BookieUnavailableError:
                pass  # it was gone before it could say so
            finally:
                await connection.aclose()

        asyncio.run(write())
        assert process.wait(120) == 1
        said = process.stdout.read()
        assert "bookie.failed" in said
        last = said.strip().splitlines()[-1]
        assert last.startswith("cepheid: ")
        assert "File too large" in last


@pytest.mark.slow
def test_ports_in_use_are_named(founded: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        roles = {"bookie": ("--port", "--http-port", "--scan-port"), "broker": ("--port", "--admin-port")}
        for role, flag in [(role, flag) for role, its_flags in roles.items() for flag in its_flags]:
            flags = (
                [*bookie_flags(founded, tmp_path / "data", "b4"), "--scan-port", "0"] if role == "bookie" else broker_flags(founded)
            )
            flags[flags.index(flag) + 1] = port
            code, said = cepheid(*flags)
            assert code == 1, said
            last = said.strip().splitlines()[-1]
            assert f":{port}" in last, said
            assert f"`{flag}`" in last, said


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    nobody = free_port()
    flags = bookie_flags(f"zk://127.0.0.1:{nobody}", tmp_path / "data")
    code, said = cepheid(*flags, environment={"CEPHEID_BOOKIE_METADATA_WAIT_S": "6"})
    assert code == 1
    assert "metadata.waited_for" in said
    assert f"127.0.0.1:{nobody}" in said.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_broker_of_the_same_id_that_lives_is_an_error(founded: str) -> None:
    flags = broker_flags(founded)

    async def main() -> tuple[int, str]:
        store = await open_store(founded, Ports())
        try:
            other = BrokerRegistration(broker_id="br1", addresses={"pulsar": "elsewhere:1"}, started_at_ms=0)
            await broker_records(store).create("br1", other, ephemeral=True)
            worker = Ports().new_worker("broker", 1)
            try:
                return await worker.run(lambda: cepheid(*flags, "--metadata-session-timeout-s", "3"))
            finally:
                await worker.aclose()
        finally:
            await store.aclose()

    code, said = asyncio.run(main())
    assert code == 1, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("cepheid: /brokers/br1 is held by another process after 6 s: "), said
    assert "{'pulsar': 'elsewhere:1'}" in last
    assert "(stop the other process" in last


@pytest.mark.slow
@pytest.mark.parametrize("role", ["bookie", "broker"])
def test_a_start_that_waits_can_be_stopped(role: str, tmp_path: Path) -> None:
    url = f"zk://127.0.0.1:{free_port()}"
    flags = bookie_flags(url, tmp_path / "data") if role == "bookie" else broker_flags(url)
    with subprocess.Popen([*CEPHEID, *map(str, flags)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        while "metadata.waited_for" not in (line := process.stderr.readline()):
            assert line or process.poll() is None
        process.terminate()
        assert process.wait(120) == 0, process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bookie",), "setting metadata"),
        (("bookie", "--metadata", "http://x"), "zk://"),
        (("broker", "--metadata", "zk://"), "zk://"),
        (
            ("broker", "--metadata", "zk://h:1", "--ack-quorum", "4"),
            "ensemble_size must be at least write_quorum, and write_quorum at least ack_quorum, got 3, 3 and 4",
        ),
        (
            ("broker", "--metadata", "zk://h:1", "--port", "70000"),
            "setting port must be a whole number from 0 to 65535, got 70000 from the command line",
        ),
        (("bookie", "--metadata", "zk://h:1", "--id", "a b"), "setting bookie_id must be text that matches"),
        (("bookie", "--metadata", "zk://h:1", "--config", "/nowhere.toml"), "cannot read settings file /nowhere.toml"),
    ],
)
def test_bad_settings_are_told_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    code, said = cepheid(*arguments)
    assert code == 1
    (line,) = [line for line in said.splitlines() if not line[:4].isdigit()]
    assert line.startswith("cepheid: ")
    assert words in line


@pytest.mark.slow
def test_settings_come_from_the_flag_then_the_environment_then_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bookie.toml"
    file.write_text('metadata = "zk://h:1"\nport = 1\n[storage]\nwrite_cache_bite = 5\n')
    code, said = cepheid("bookie", "--config", file)
    assert code == 1
    assert "unknown setting 'storage.write_cache_bite'" in said
    assert "did you mean 'storage.write_cache_bytes'" in said
    file.write_text('metadata = "zk://h:1"\nbookie_id = "of the file"\n')
    assert "'of the file' from file" in cepheid("bookie", "--config", file)[1]
    environment = {"CEPHEID_BOOKIE_BOOKIE_ID": "of the environment"}
    assert (
        "'of the environment' from CEPHEID_BOOKIE_BOOKIE_ID in the environment"
        in cepheid("bookie", "--config", file, environment=environment)[1]
    )
    said = cepheid("bookie", "--config", file, "--id", "of the flag", environment=environment)[1]
    assert "'of the flag' from the command line" in said
    said = cepheid("bookie", "--config", file, environment={"CEPHEID_BOOKIE_PROT": "1"})[1]
    assert "unknown setting 'CEPHEID_BOOKIE_PROT' in the environment; did you mean 'CEPHEID_BOOKIE_PORT'?" in said


@pytest.mark.slow
def test_roles_on_ipv6_tell_addresses_that_can_be_used(founded: str, tmp_path: Path) -> None:
    """Others take what is registered apart at its colons: an IPv6 address stands in brackets."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    quorums = ["--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1]
    with (
        running(tmp_path / "bookie.log", *bookie_flags(founded, tmp_path / "data", "b7"), "--host", "::1"),
        running(tmp_path / "broker.log", *broker_flags(founded), "--host", "::1", *quorums),
    ):
        said = (tmp_path / "broker.log").read_text()
        clients, admin = (
            next(line.split()[1] for line in said.splitlines() if line.startswith(f"  {word}")) for word in ("clients", "admin")
        )
        assert clients.startswith("pulsar://[::1]:")
        code, said = cepheid("bookies", "list", "--admin-url", admin)
        assert (code, "  [::1]:" in said) == (0, True), said
        code, said = cepheid("produce", "over-six", "hello", "--url", clients)
        assert code == 0, said
        deadline = time.monotonic() + 120
        while "1 ledger, 1 copy:" not in (said := cepheid("ledgers", "verify", "--all", "--admin-url", admin)[1]):
            assert time.monotonic() < deadline, said  # an idle writer tells its last entry's confirmation after a second
        assert "1 copy: 1 valid" in said


@pytest.mark.slow
@pytest.mark.parametrize("role", ["bookie", "broker"])
def test_what_cannot_be_listened_on_or_written_to_is_named(founded: str, tmp_path: Path, role: str) -> None:
    flags = bookie_flags(founded, tmp_path / "data", "b8") if role == "bookie" else broker_flags(founded)
    for host in ("nosuch.invalid", "999.1.1.1"):
        code, said = cepheid(*flags, "--host", host)
        last = said.strip().splitlines()[-1]
        assert (code, last.startswith(f"cepheid: cannot listen on {host}:")) == (1, True), said
    code, said = cepheid(*flags, "--advertised-host", "a b")
    assert (code, "advertised_host" in said) == (1, True), said
    code, said = cepheid(role, environment={})
    assert (code, f"setting metadata is missing: give it by --metadata, CEPHEID_{role.upper()}_METADATA" in said) == (1, True), said
    if role == "bookie":
        (tmp_path / "file").write_text("")
        code, said = cepheid(*bookie_flags(founded, tmp_path / "file", "b8"))
        last = said.strip().splitlines()[-1]
        assert (code, last.startswith(f"cepheid: {tmp_path}/file cannot be the data directory: ")) == (1, True), said


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201])
def test_what_cannot_name_a_cluster_is_refused(name: str) -> None:
    code, said = cepheid("init", "--metadata", "zk://127.0.0.1:1", "--cluster", name)
    assert (code, "is not a valid name of a cluster" in said) == (1, True), said
