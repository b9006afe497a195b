"""Commands that start the members of a local cluster, and checks that they serve."""

from __future__ import annotations

import http.client
import os
import shlex
import ssl
import sys
from pathlib import Path

from cepheid_dev.cluster_file import ClusterState, Member
from cepheid_dev.toml_text import toml_text
from cepheid_dev.zookeeper_server import EnsembleServer, ZooKeeperServer

CLUSTER = "dev"
HOST = "127.0.0.1"
SECURE = "secure"
"""Directory of `cepheid secure init`, in that of a secured cluster."""


def metadata_url(state: ClusterState) -> str:
    return "zk://" + ",".join(f"{HOST}:{member.ports['client']}" for member in _zookeepers(state))


def service_url(state: ClusterState) -> str:
    """Return the URL of all brokers: clients use another one if the first does not answer."""
    scheme = "pulsar+ssl://" if state.secure else "pulsar://"
    return scheme + ",".join(f"{HOST}:{member.ports['pulsar']}" for member in state.members if member.kind == "broker")


def admin_urls(state: ClusterState) -> list[str]:
    scheme = "https" if state.secure else "http"
    return [f"{scheme}://{HOST}:{member.ports['http']}" for member in state.members if member.kind == "broker"]


def environment() -> dict[str, str]:
    """Return our environment without settings meant for other processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}


def secure_init_command(directory: Path) -> list[str]:
    """Return the command that creates what a secured cluster needs, and keeps what exists."""
    return [*_cepheid(), SECURE, "init", str(directory / SECURE)]


def client_environment(directory: Path, state: ClusterState) -> str:
    """Return the shell commands with which the command line reaches a secured cluster as its administrator."""
    secure = directory / SECURE
    values = {
        "CEPHEID_URL": service_url(state),
        "CEPHEID_ADMIN_URL": admin_urls(state)[0],
        "CEPHEID_METADATA_AUTH_FILE": str(secure / "metadata.auth"),
        "CEPHEID_TLS_CA_FILE": str(secure / "ca.pem"),
        "CEPHEID_TLS_CERTIFICATE_FILE": str(secure / "admin.pem"),
        "CEPHEID_TLS_KEY_FILE": str(secure / "admin-key.pem"),
        "CEPHEID_TOKEN_FILE": str(secure / "admin.token"),
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def init_command(directory: Path, state: ClusterState) -> list[str]:
    urls = ["--service-url", service_url(state), "--admin-url", admin_urls(state)[0]] if admin_urls(state) else []
    return [*_cepheid(), "init", "--metadata", metadata_url(state), "--cluster", CLUSTER, *urls, *_secured(directory, state)]


def zookeeper_of(directory: Path, state: ClusterState, member: Member) -> ZooKeeperServer:
    names = [each.name for each in _zookeepers(state)]
    ensemble = [
        EnsembleServer(number, each.ports["peer"], each.ports["election"])
        for number, each in enumerate(_zookeepers(state), 1)
        if "peer" in each.ports
    ]
    number = names.index(member.name) + 1
    return ZooKeeperServer(directory / member.name, member.ports["client"], pid=member.pid, ensemble=ensemble, number=number)


def _zookeepers(state: ClusterState) -> list[Member]:
    return [member for member in state.members if member.kind == "zookeeper"]


def prepare(directory: Path, state: ClusterState, member: Member) -> None:
    """Write the files that the command reads."""
    own = directory / member.name
    own.mkdir(parents=True, exist_ok=True)
    if member.kind == "zookeeper":
        zookeeper_of(directory, state, member).write_config()
    else:
        settings = dict(state.settings.get(member.kind, {}))
        if state.secure and member.kind == "broker":
            ports = {"port": member.ports["pulsar"], "admin_port": member.ports["http"]}
            settings["tls"] = {**settings.get("tls", {}), **ports}
        (own / "settings.toml").write_text(toml_text(settings))


def command(directory: Path, state: ClusterState, member: Member, *, accept_empty_disk: bool = False) -> list[str]:
    """Return the command of a member. Raises an error if this machine lacks a suitable Java."""
    own, ports = directory / member.name, member.ports
    if member.kind == "zookeeper":
        return zookeeper_of(directory, state, member).command()
    common = [
        *("--metadata", metadata_url(state)),
        *("--metadata-session-timeout-s", str(state.session_timeout_s)),
        *("--config", str(own / "settings.toml")),
        *("--id", member.name),
        *_secured(directory, state),
    ]
    if member.kind == "bookie":
        where = ["--data", str(own / "data"), "--port", str(ports["grpc"]), "--http-port", str(ports["http"])]
        return [*_cepheid(), "bookie", *common, *where, *(["--accept-empty-disk"] if accept_empty_disk else [])]
    where = [] if state.secure else ["--port", str(ports["pulsar"]), "--admin-port", str(ports["http"])]
    return [*_cepheid(), "broker", *common, *where, *_quorums(state)]


def role(directory: Path, state: ClusterState, member: Member, timeout_s: float = 1.0) -> str:
    """Return `leader` or `follower` of a ZooKeeper server in an ensemble; empty for all others."""
    if member.kind != "zookeeper" or "peer" not in member.ports:
        return ""
    return zookeeper_of(directory, state, member).mode(timeout_s)


def is_ready(directory: Path, state: ClusterState, member: Member, timeout_s: float = 1.0) -> bool:
    """Return whether the member reports that it serves."""
    if member.kind == "zookeeper":
        return zookeeper_of(directory, state, member).is_ready(timeout_s)
    connection: http.client.HTTPConnection
    if state.secure:
        context = ssl.create_default_context(cafile=str(directory / SECURE / "ca.pem"))
        connection = http.client.HTTPSConnection(HOST, member.ports["http"], timeout=timeout_s, context=context)
    else:
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


def _secured(directory: Path, state: ClusterState) -> list[str]:
    return ["--secure", str(directory / SECURE)] if state.secure else []


def _quorums(state: ClusterState) -> list[str]:
    """Return the flags of quorums: 3/3/2 from three bookies on, otherwise the possible ones.

    Settings of brokers take precedence.
    """
    bookies = len([member for member in state.members if member.kind == "bookie"])
    if bookies >= 3 or {"ensemble_size", "write_quorum", "ack_quorum"} & set(state.settings.get("broker", {})):
        return []
    return ["--ensemble-size", str(bookies), "--write-quorum", str(bookies), "--ack-quorum", str(bookies)]
