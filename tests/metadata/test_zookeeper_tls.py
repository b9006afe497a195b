"""zks:// against a real ZooKeeper with a TLS port: keys go through it, and a server that proves nothing is refused."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest

from cepheid_dev.zookeeper_server import ZooKeeperServer
from cepheid_metadata import StoreOpenError, Versioned
from cepheid_metadata.open_store import open_store
from cepheid_metadata.zookeeper_acls import set_cluster_acls
from cepheid_ports import Ports
from cepheid_security import ClientTls
from cepheid_security.authority import Authority
from tests.support import free_port

AUTH = "digest:cepheid:s3cret"


class TlsZooKeeper(ZooKeeperServer):
    """With a port for clients with certificates beside the plain one."""

    def __init__(self, directory: Path, port: int, tls_port: int, certificates: Path) -> None:
        super().__init__(directory, port)
        self.tls_port = tls_port
        self._certificates = certificates

    def write_config(self) -> None:
        super().write_config()
        pem = self.directory / "server-with-key.pem"
        pem.write_bytes(b"".join((self._certificates / name).read_bytes() for name in ("server.pem", "server-key.pem")))
        lines = {
            "secureClientPort": self.tls_port,
            "secureClientPortAddress": "127.0.0.1",
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": pem,
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": self._certificates / "ca.pem",
            "ssl.trustStore.type": "PEM",
        }
        with (self.directory / "zookeeper.cfg").open("a") as config:
            config.writelines(f"{name}={value}\n" for name, value in lines.items())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    authority.issue("server", hosts=["localhost", "127.0.0.1"], for_servers=True)
    authority.issue("broker", for_servers=False)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[TlsZooKeeper]:
    made = TlsZooKeeper(tmp_path_factory.mktemp("zookeeper"), free_port(), free_port(), certificates)
    made.start()
    yield made
    made.kill()


def tls_of(directory: Path) -> ClientTls:
    return ClientTls(str(directory / "ca.pem"), str(directory / "broker.pem"), str(directory / "broker-key.pem"))


@pytest.mark.slow
async def test_keys_go_through_tls_and_belong_to_the_user(server: TlsZooKeeper, certificates: Path) -> None:
    url = f"zks://127.0.0.1:{server.tls_port}/secured"
    store = await open_store(url, Ports(), auth=AUTH, tls=tls_of(certificates))
    large = bytes(900_000)  # many records of TLS: what lies decrypted and unread must not be forgotten
    await store.create("/a", large)
    assert await store.get("/a") == Versioned(large, 0)
    for number in range(200):
        await store.create(f"/many/{number}", b"x" * number)
    assert len(await store.children("/many")) == 200
    assert set_cluster_acls(url, auth=AUTH, tls=tls_of(certificates)).nodes == 203
    await store.aclose()


@pytest.mark.slow
async def test_files_for_zookeeper_alone_count_more_than_those_for_other_connections(
    server: TlsZooKeeper, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, datetime.datetime.now(datetime.UTC))
    authority.issue("broker", for_servers=False)
    of_zookeeper = tls_of(certificates)
    for name, file in (
        ("CA", of_zookeeper.ca_file),
        ("CERTIFICATE", of_zookeeper.certificate_file),
        ("KEY", of_zookeeper.key_file),
    ):
        assert file is not None
        monkeypatch.setenv(f"CEPHEID_METADATA_TLS_{name}_FILE", file)
    url = f"zks://127.0.0.1:{server.tls_port}/alone"
    store = await open_store(url, Ports(), auth=AUTH, tls=tls_of(tmp_path))
    await store.create("/a", b"")
    await store.aclose()
    assert set_cluster_acls(url, auth=AUTH, tls=tls_of(tmp_path)).nodes == 2


@pytest.mark.slow
async def test_a_server_of_another_ca_is_refused(server: TlsZooKeeper, certificates: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path, datetime.datetime.now(datetime.UTC))
    authority.issue("broker", for_servers=False)
    with pytest.raises(StoreOpenError):
        await open_store(f"zks://127.0.0.1:{server.tls_port}/x", Ports(), tls=tls_of(tmp_path), open_timeout_s=3.0)
