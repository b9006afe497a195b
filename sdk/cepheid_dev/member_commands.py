"""How each member of a local cluster is started, and how it says that it serves."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

from cepheid_dev.cluster_file import ClusterState, Member
from cepheid_dev.toml_text import toml_text
from cepheid_dev.zookeeper_server import ZooKeeperServer

CLUSTER = "dev"
HOST = "127.0.0.1"


def metadata_url(state: ClusterState) -> str:
    (zookeeper,) = [member for member in state.members if member.kind == "zookeeper"]
    return f"zk://{HOST}:{zookeeper.ports['client']}"


def service_url(state: ClusterState) -> str:
    """All brokers: clients go on with another one when the first does not answer."""
    return "pulsar://" + ",".join(f"{HOST}:{member.ports['pulsar']}" for member in state.members if member.kind == "broker")


def admin_urls(state: ClusterState) -> list[str]:
    return [f"http://{HOST}:{member.ports['http']}" for member in state.members if member.kind == "broker"]


def environment() -> dict[str, str]:
    """Ours, without settings that are meant for other processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}


def init_command(state: ClusterState) -> list[str]:
    urls = ["--service-url", service_url(state), "--admin-url", admin_urls(state)[0]] if admin_urls(state) else []
    return [*_cepheid(), "init", "--metadata", metadata_url(state), "--cluster", CLUSTER, *urls]


def zookeeper_of(directory: Path, member: Member) -> ZooKeeperServer:
    return ZooKeeperServer(directory / member.name, member.ports["client"], pid=member.pid)


def prepare(directory: Path, state: ClusterState, member: Member) -> None:
    """What the command reads from files."""
    own = directory / member.name
    own.mkdir(parents=True, exist_ok=True)
    if member.kind == "zookeeper":
        zookeeper_of(directory, member).write_config()
    else:
        (own / "settings.toml").write_text(toml_text(state.settings.get(member.kind, {})))


def command(directory: Path, state: ClusterState, member: Member, *, accept_empty_disk: bool = False) -> list[str]:
    """Raises what the Java of this machine lacks."""
    own, ports = directory / member.name, member.ports
    if member.kind == "zookeeper":
        return zookeeper_of(directory, member).command()
    common = [
        *("--metadata", metadata_url(state)),
        *("--metadata-session-timeout-s", str(state.session_timeout_s)),
        *("--config", str(own / "settings.toml")),
        *("--id", member.name),
    ]
    if member.kind == "bookie":
        where = ["--data", str(own / "data"), "--port", str(ports["grpc"]), "--http-port", str(ports["http"])]
        return [*_cepheid(), "bookie", *common, *where, *(["--accept-empty-disk"] if accept_empty_disk else [])]
    where = ["--port", str(ports["pulsar"]), "--admin-port", str(ports["http"])]
    return [*_cepheid(), "broker", *common, *where, *_quorums(state)]


def is_ready(directory: Path, member: Member, timeout_s: float = 1.0) -> bool:
    """It serves, and says so."""
    if member.kind == "zookeeper":
        return zookeeper_of(directory, member).is_ready(timeout_s)
    connection = http.client.HTTPConnection(HOST, member.ports["http"], timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _cepheid() -> list[str]:
    return [sys.executable, "-m", "cepheid_cli"]


def _quorums(state: ClusterState) -> list[str]:
    """3/3/2 from three bookies on; what fewer allow otherwise. What the settings of brokers say goes first."""
    bookies = len([member for member in state.members if member.kind == "bookie"])
    if bookies >= 3 or {"ensemble_size", "write_quorum", "ack_quorum"} & set(state.settings.get("broker", {})):
        return []
    return ["--ensemble-size", str(bookies), "--write-quorum", str(bookies), "--ack-quorum", str(bookies)]
