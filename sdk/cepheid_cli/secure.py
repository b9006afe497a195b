"""`cepheid secure init`: everything that a secured cluster needs, in one directory.

    ca.pem, ca-key.pem                 a CA of one's own; the key belongs on no server
    server.pem, server-key.pem         for brokers
    client.pem, client-key.pem         a certificate for a client, where clients have some
    token.key                          the secret key of tokens
    admin.token                        a token of the role `admin`
    broker.token                       what brokers show to each other
    server.toml                        settings for `cepheid standalone`: --secure DIR
    client.env                         environment of the command line: source it

Those of a cluster of processes are in secured_cluster.py. A second run leaves what is there and adds what is missing.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="secure", help="Set up TLS and authentication.", no_args_is_help=True)

ADMIN_ROLE = "admin"
BROKER_ROLE = "broker"

_SERVER = """# Written by `cepheid secure init`. Every setting is described in docs/settings.md.
[tls]
certificate_file = "{directory}/server.pem"
key_file = "{directory}/server-key.pem"
ca_file = "{directory}/ca.pem"
client_ca_file = "{directory}/ca.pem"
client_certificates = "optional"

[authentication]
methods = ["token", "tls"]
secret_keys = ["{directory}/token.key"]
own_token_file = "{directory}/broker.token"
"""

_CLIENT = """# Written by `cepheid secure init`: source it before `cepheid topics list`, `cepheid produce` and the like.
export CEPHEID_URL=pulsar+ssl://localhost:6651
export CEPHEID_ADMIN_URL=https://localhost:8443
export CEPHEID_TLS_CA_FILE="{directory}/ca.pem"
export CEPHEID_TOKEN_FILE="{directory}/admin.token"
export CEPHEID_TLS_CERTIFICATE_FILE="{directory}/admin.pem"
export CEPHEID_TLS_KEY_FILE="{directory}/admin-key.pem"
export CEPHEID_METADATA_AUTH_FILE="{directory}/metadata.auth"
"""


@app.callback()
def _secure() -> None:
    """Set up TLS and authentication."""


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Directory for keys, certificates, tokens and settings.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which servers are reached, beside this machine's. Repeatable.")
    ] = None,
) -> None:
    """Make a CA, certificates, a token key, tokens and the settings that use them."""
    from cepheid_cli.secured_cluster import add_cluster_files
    from cepheid_security import token_keys
    from cepheid_security.authority import Authority, write_private
    from cepheid_security.tokens import create_token

    directory.mkdir(0o700, parents=True, exist_ok=True)
    full = directory.resolve()
    made: list[str] = []
    authority = Authority(full, datetime.datetime.now(datetime.UTC))
    hosts = tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *(host or ()))))
    for name, is_server in (("server", True), ("client", False)):
        if not (full / f"{name}.pem").exists():
            authority.issue(name, hosts=hosts if is_server else (), for_servers=is_server)
            made.append(f"{name}.pem")
    if not (full / "token.key").exists():
        write_private(full / "token.key", secrets.token_bytes(64))
        made.append("token.key")
    key = token_keys.secret_key(str(full / "token.key"))
    for role in (ADMIN_ROLE, BROKER_ROLE):
        if not (path := full / f"{role}.token").exists():
            write_private(path, create_token(key, role, time.time_ns() // 1_000_000).encode() + b"\n")
            made.append(path.name)
    made += add_cluster_files(authority, full, hosts)
    for name, text in (("server.toml", _SERVER), ("client.env", _CLIENT)):
        if not (path := full / name).exists():
            write_private(path, text.format(directory=full).encode())
            made.append(name)
    print(f"{full}: {', '.join(made) if made else 'everything is there already'}")
    print(f"start:  cepheid standalone --secure {full}")
    print(f"use:    source {full}/client.env && cepheid topics list")


@app.command("metadata")
def metadata(
    url: Annotated[str, typer.Option("--metadata", envvar="CEPHEID_METADATA", help="ZooKeeper: zk://host:port/root")],
    secure: Annotated[
        Path | None, typer.Option(help="Directory of `cepheid secure init` with the cluster's ZooKeeper user.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--everybody", help="The way back: nodes are for everybody again.")] = False,
) -> None:
    """Give the nodes that a cluster has in ZooKeeper to its own user alone. New nodes are, where processes have the user."""
    from cepheid_cli.secured_cluster import metadata_auth
    from cepheid_metadata.zookeeper_acls import set_cluster_acls

    report = set_cluster_acls(url, auth=metadata_auth(secure), everybody=everybody)
    print(f"{report.nodes} nodes are readable by {'everybody' if everybody else 'the user of the cluster alone'}")
