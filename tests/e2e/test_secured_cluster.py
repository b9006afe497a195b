"""A cluster of processes on ZooKeeper with everything on: `cepheid dev up --secure`, seen by clients, readers and strangers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from cepheid_dev.local_cluster import LocalCluster
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_rpc import TLS_MARK, BookieUnavailableError, LacRequest
from cepheid_security import ClientTls
from tests.e2e.official_client import EARLIEST, client_of, publish, receive
from tests.support import run_async

TOPIC = "persistent://public/default/secured"
PAYLOADS = [b"message %d" % number for number in range(500)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("secured-cluster"))
    try:
        made.up(bookies=3, brokers=1, secure=True)
        yield made
    finally:
        if made.exists:
            made.down()


def environment(cluster: LocalCluster, **changes: str | None) -> dict[str, str]:
    """What `source client.env` gives."""
    lines = cluster.client_environment.read_text().splitlines()
    given = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    values = {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")} | given
    return {name: value for name, value in (values | changes).items() if value is not None}


def cepheid(cluster: LocalCluster, *arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cepheid_cli", *arguments]
    return subprocess.run(command, env=environment(cluster, **changes), capture_output=True, text=True, timeout=60)


def official(cluster: LocalCluster) -> pulsar.Client:
    secure = cluster.secure_directory
    assert secure is not None
    token = (secure / "admin.token").read_text().strip()
    return client_of(
        cluster.service_url,
        authentication=pulsar.AuthenticationToken(token),
        tls_trust_certs_file_path=str(secure / "ca.pem"),
    )


@pytest.mark.slow
def test_clients_publish_and_readers_read_history_while_strangers_are_refused(cluster: LocalCluster) -> None:
    with official(cluster) as client:
        publish(client, TOPIC, PAYLOADS)
        consumer = client.subscribe(TOPIC, "s", initial_position=EARLIEST)
        assert [message.data() for message in receive(consumer, len(PAYLOADS))] == PAYLOADS

    read = cepheid(cluster, "read", TOPIC, "--format", "csv", "--columns", "value")
    assert read.returncode == 0, read.stderr
    assert len(read.stdout.splitlines()) == len(PAYLOADS) + 1

    verified = cepheid(cluster, "ledgers", "verify", "--all")  # the administrator's certificate needs no ticket
    assert verified.returncode == 0, verified.stdout + verified.stderr

    directly = cepheid(cluster, "read", TOPIC, "--metadata", cluster.metadata_url, "--format", "csv", "--columns", "value")
    assert directly.returncode == 0, directly.stderr
    assert len(directly.stdout.splitlines()) == len(PAYLOADS) + 1

    without_user = cepheid(cluster, "read", TOPIC, "--metadata", cluster.metadata_url, CEPHEID_METADATA_AUTH_FILE=None)
    assert without_user.returncode != 0
    assert "use a broker instead" in without_user.stderr

    nobody = {"CEPHEID_TOKEN_FILE": None, "CEPHEID_TLS_CERTIFICATE_FILE": None, "CEPHEID_TLS_KEY_FILE": None}
    refused = cepheid(cluster, "read", TOPIC, **nobody)
    assert refused.returncode != 0
    assert "401" in refused.stderr

    # A role that is neither super-user nor admin at bookies: it needs a grant for the plan, and reads with the plan's tickets.
    secure = cluster.secure_directory
    assert secure is not None
    token = cepheid(cluster, "tokens", "create", "app", "--secret-key", str(secure / "token.key")).stdout.strip()
    app = {
        "CEPHEID_TOKEN_FILE": None,
        "CEPHEID_TOKEN": token,
        "CEPHEID_TLS_CERTIFICATE_FILE": str(secure / "client.pem"),
        "CEPHEID_TLS_KEY_FILE": str(secure / "client-key.pem"),
    }
    denied = cepheid(cluster, "read", TOPIC, **app)
    assert denied.returncode != 0
    assert "may not" in denied.stderr or "403" in denied.stderr
    granted = cepheid(cluster, "permissions", "grant", "app", TOPIC, "consume")
    assert granted.returncode == 0, granted.stderr
    allowed = cepheid(cluster, "read", TOPIC, "--format", "csv", "--columns", "value", **app)
    assert allowed.returncode == 0, allowed.stderr
    assert len(allowed.stdout.splitlines()) == len(PAYLOADS) + 1
    assert cepheid(cluster, "ledgers", "verify", "--all", **app).returncode != 0


def test_a_stranger_without_a_certificate_is_refused_by_the_bookie(cluster: LocalCluster) -> None:
    secure = cluster.secure_directory
    assert secure is not None

    async def ask(tls: ClientTls, address: str) -> str:
        connection = GrpcConnection("bookie", address, tls=tls)
        try:
            await connection.read_lac(LacRequest(0, b"m" * 16, fence=True))
            return "answered"
        except BookieUnavailableError as error:
            return str(error)
        finally:
            await connection.aclose()

    ca = str(secure / "ca.pem")
    client = ClientTls(ca, str(secure / "client.pem"), str(secure / "client-key.pem"))
    for port in cluster.bookie_ports.values():
        assert "UNAVAILABLE" in run_async(ask(ClientTls(ca), f"{TLS_MARK}127.0.0.1:{port}"))
        assert "UNAVAILABLE" in run_async(ask(ClientTls(), f"127.0.0.1:{port}"))
        assert "PERMISSION_DENIED" in run_async(ask(client, f"{TLS_MARK}127.0.0.1:{port}"))


def test_no_node_in_zookeeper_is_readable_by_the_world(cluster: LocalCluster) -> None:
    client = KazooClient(hosts=cluster.metadata_url.removeprefix("zk://"))
    client.start()
    try:
        names = [name for name in client.get_children("/") if name != "zookeeper"]
        assert "secrets" in names
        for name in names:
            with pytest.raises(NoAuthError):
                client.get(f"/{name}")
            with pytest.raises(NoAuthError):
                client.get_children(f"/{name}")
    finally:
        client.stop()
        client.close()


def test_no_secret_stands_in_a_process_list_or_a_log(cluster: LocalCluster) -> None:
    secure = cluster.secure_directory
    assert secure is not None
    secrets = [(secure / name).read_text().strip() for name in ("metadata.auth", "broker.token", "admin.token")]
    texts = [cluster.log_path(name).read_text(errors="replace") for name in cluster.names()]
    for name in cluster.names():
        pid = cluster.pid(name)
        texts.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    for secret in (*secrets, secrets[0].rpartition(":")[2]):
        assert not any(secret in text for text in texts)
