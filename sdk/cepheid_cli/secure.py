"""`cepheid secure init`: everything that a secured cluster needs, in one directory.

    ca.pem, ca-key.pem                 the cluster's own CA; keep the key off all servers
    crl.pem                            its list of revoked certificates
    server.pem, server-key.pem         for brokers
    client.pem, client-key.pem         a certificate for a client, if clients use certificates
    token.key                          the secret key of tokens
    admin.token                        a token of the role `admin`, for a year
    broker.token                       the token by which brokers authenticate to each other
    server.toml                        settings for `cepheid standalone`: --secure DIR
    client.env                         environment of the command line: source it

A second run adds what is missing, adds hosts to the certificate of brokers, and renews what expires within 30 days
(`--renew-days`). It leaves the rest, and refuses files that do not belong together. Settings that files of an earlier release lack
are named, and added with `--update`. The files of a cluster of processes are in secured_cluster.py. `cepheid secure rotate-ca DIR`
replaces the CA, `cepheid secure revoke DIR` revokes certificates.
"""

from __future__ import annotations

import datetime
import json
import secrets
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl

if TYPE_CHECKING:
    from cepheid_security.token_keys import TokenKey

app = typer.Typer(name="secure", help="Set up TLS and authentication.", no_args_is_help=True)

ADMIN_ROLE = "admin"
BROKER_ROLE = "broker"
_TOKENS = ((ADMIN_ROLE, 365 * 86_400.0), (BROKER_ROLE, None))
"""Roles with their tokens' lives in seconds. Operators renew theirs; brokers with expired ones would not serve each other."""

_SERVER = """# Written by `cepheid secure init`. Every setting is described in docs/settings.md.
[tls]
certificate_file = {certificate}
key_file = {key}
ca_file = {ca}
client_ca_file = {ca}
client_certificates = "optional"
crl = {crl}

[authentication]
methods = ["token", "tls"]
secret_keys = [{token_key}]
own_token_file = {token}

[authorization]
enabled = true
super_user_roles = ["admin"]
peer_roles = ["broker"]
"""

_CLIENT = """# Written by `cepheid secure init`: source it before `cepheid topics list`, `cepheid produce` and the like.
export CEPHEID_URL=pulsar+ssl://localhost:6651
export CEPHEID_ADMIN_URL=https://localhost:8443
export CEPHEID_TLS_CA_FILE={ca}
export CEPHEID_TOKEN_FILE={token}
export CEPHEID_TLS_CERTIFICATE_FILE={certificate}
export CEPHEID_TLS_KEY_FILE={key}
export CEPHEID_METADATA_AUTH_FILE={metadata_auth}
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
    update: Annotated[
        bool,
        typer.Option("--update", help="Add the settings that files of an earlier release lack. No key or setting is replaced."),
    ] = False,
    renew_days: Annotated[int, typer.Option(min=0, max=397, help="Renew what expires within so many days (397: everything).")] = 30,
) -> None:
    """Make a CA, certificates, a token key, tokens and the settings that use them. Repeat it to add hosts, and to renew."""
    from cepheid_cli.secured_cluster import add_cluster_files, cluster_settings
    from cepheid_security import token_keys
    from cepheid_security.authority import Authority, write_private

    directory.mkdir(0o700, parents=True, exist_ok=True)
    full = directory.resolve()
    renew_before = datetime.timedelta(days=renew_days)
    authority = Authority(full, datetime.datetime.now(datetime.UTC), renew_before)
    hosts = ("localhost", "127.0.0.1", "::1", socket.gethostname(), *(host or ()))
    issued = [authority.ensure("server", hosts=hosts, for_servers=True), authority.ensure("client", for_servers=False)]
    made: list[str] = [done for done in (*issued, authority.ensure_revocation_list()) if done is not None]
    if not (full / "token.key").exists():
        write_private(full / "token.key", secrets.token_bytes(64))
        made.append("token.key")
    key = token_keys.secret_key(str(full / "token.key"))
    made += [name for role, life_s in _TOKENS if (name := _token(full, key, role, life_s, renew_before)) is not None]
    made += add_cluster_files(authority, full, hosts)
    for name, text in (("server.toml", _server_settings(full)), ("client.env", _client_environment(full))):
        if not (path := full / name).exists():
            write_private(path, text.encode())
            made.append(name)
    print(f"{full}: {', '.join(made) if made else 'everything is there already'}")
    _settle_old_files(full, {"server.toml": _server_settings(full), **cluster_settings(full)}, update=update)
    print(f"start:  cepheid standalone --secure {shlex.quote(str(full))}")
    print(f"use:    source {shlex.quote(f'{full}/client.env')} && cepheid topics list")


def _settle_old_files(directory: Path, written: dict[str, str], *, update: bool) -> None:
    """Add settings that files of an earlier release lack, or print what is disabled without them."""
    from cepheid_cli.secure_enable import LAST_STAGE, stage_of
    from cepheid_cli.secured_cluster import add_missing, old_files

    if 0 < (stage := stage_of(directory)) < LAST_STAGE:
        print(
            f"securing a cluster is in stage {stage} of {LAST_STAGE}: cepheid secure enable {shlex.quote(str(directory))} goes on"
        )
        return
    found = old_files(directory, written)
    for file in found:
        names = ", ".join(f"{name} = {json.dumps(value)}" for name, value in file.missing.items())
        if file.missing and update:
            add_missing(file)
            print(f"{file.path.name}: added {names}; it is in force after a restart")
        elif file.missing:
            print(f"{file.path.name} is of an earlier release and lacks {names}", *(f"  {text}" for text in file.off), sep="\n")
        else:
            print(f"{file.path.name} switches something off", *(f"  {text}" for text in file.off), sep="\n")
    if any(file.missing for file in found) and not update:
        print(f"add them:  cepheid secure init {shlex.quote(str(directory))} --update")
    _settle_client_environment(directory, update=update)


def _settle_client_environment(directory: Path, *, update: bool) -> None:
    path = directory / "client.env"
    there = path.read_text(encoding="utf-8")
    missing = [
        line
        for line in _client_environment(directory).splitlines()
        if line.startswith("export ") and line.partition("=")[0] not in there
    ]
    if not missing:
        return
    names = ", ".join(line.removeprefix("export ").partition("=")[0] for line in missing)
    if update:
        from cepheid_security.authority import replace_private

        replace_private(path, f"{there.rstrip()}\n{chr(10).join(missing)}\n".encode())
        print(f"client.env: added {names}")
    else:
        print(f"client.env is of an earlier release and lacks {names}: --update adds them")


def _token(directory: Path, key: TokenKey, role: str, life_s: float | None, renew_before: datetime.timedelta) -> str | None:
    """Create a role's token if it is missing or expires soon, and return what was created. Raises SecurityConfigurationError."""
    from cepheid_security import AuthenticationError, SecurityConfigurationError
    from cepheid_security.authority import replace_private
    from cepheid_security.tokens import TokenVerifier, create_token

    path, now_ms = directory / f"{role}.token", time.time_ns() // 1_000_000
    renewed = ""
    if path.exists():
        try:  # at a time before it expired: that it did is no reason to doubt the key
            expires_at_ms = TokenVerifier([key]).verify(path.read_bytes().strip(), 0).expires_at_ms
        except AuthenticationError as error:
            raise SecurityConfigurationError(
                f"{path} was not made with token.key ({error}): remove it to have a new one made, or restore token.key"
            ) from None
        if expires_at_ms is None or expires_at_ms > now_ms + 1000 * renew_before.total_seconds():
            return None
        renewed = " (again: it expired soon)"
    replace_private(path, create_token(key, role, now_ms, expires_in_s=life_s).encode() + b"\n")
    return path.name + renewed


def _server_settings(directory: Path) -> str:
    """Return the text of server.toml. JSON quotes any path in the same way as TOML."""

    def file(name: str) -> str:
        return json.dumps(str(directory / name), ensure_ascii=False)

    return _SERVER.format(
        certificate=file("server.pem"),
        key=file("server-key.pem"),
        ca=file("ca.pem"),
        crl=file("crl.pem"),
        token_key=file("token.key"),
        token=file(f"{BROKER_ROLE}.token"),
    )


def _client_environment(directory: Path) -> str:
    """Return the text of client.env, for a POSIX shell."""

    def file(name: str) -> str:
        return shlex.quote(str(directory / name))

    return _CLIENT.format(
        ca=file("ca.pem"),
        token=file(f"{ADMIN_ROLE}.token"),
        certificate=file("admin.pem"),
        key=file("admin-key.pem"),
        metadata_auth=file("metadata.auth"),
    )


@app.command("rotate-ca")
def rotate_ca(
    directory: Annotated[Path, typer.Argument(help="Directory of `cepheid secure init`, with ca-key.pem.")],
    stage: Annotated[
        str, typer.Option(help="trust, sign or finish, in this order. A stage that was taken before changes nothing.")
    ],
    settle_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds that the stage before must have been in force; this command waits for the rest.")
    ] = 0.0,
) -> None:
    """Replace the CA in three stages, without an interruption. Give the changed files to all processes and clients after each.

    trust: ca.pem has the old and a new CA. sign: the new CA signs all certificates. finish: ca.pem has the new CA alone.
    """
    from cepheid_security.authority import ROTATION_STAGES, Authority

    if stage not in ROTATION_STAGES:
        raise typer.BadParameter(f"--stage is {', '.join(ROTATION_STAGES[:-1])} or {ROTATION_STAGES[-1]}, got {stage!r}")
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    present = authority.rotation_stage
    if present and stage in ROTATION_STAGES[ROTATION_STAGES.index(present) + 1 :]:
        age = datetime.datetime.now(datetime.UTC) - authority.rotation_stage_began()
        if (rest_s := settle_s - age.total_seconds()) > 0:
            print(f"waiting {rest_s:.0f} s, until stage {present} has been in force for {settle_s:.0f} s", flush=True)
            time.sleep(rest_s)
    done = authority.rotate(stage)
    print(f"{directory}: {done or f'nothing to do, stage {stage} was taken before'}")


@app.command("revoke")
def revoke(
    directory: Annotated[Path, typer.Argument(help="Directory of `cepheid secure init`, with ca-key.pem.")],
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|SERIAL",
            help="Name of a certificate in DIR, such as `client`, or a serial number in hex as `openssl x509 -serial` prints it. "
            "Unset: list what is revoked.",
        ),
    ] = None,
) -> None:
    """Revoke a certificate of the own CA: writes crl.pem. Copy it to the machines; processes use it within 10 s of that."""
    from cepheid_security.authority import Authority

    if not (directory / "ca-key.pem").is_file():
        raise typer.BadParameter(f"{directory} has no ca-key.pem: name the directory that `cepheid secure init` made")
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    if what is None:
        for serial, revoked_at in authority.revoked().items():
            print(f"{serial:X}  {revoked_at:%Y-%m-%d %H:%M} UTC")
        return
    serial, is_new = authority.revoke(what)
    print(f"{directory / 'crl.pem'}: {serial:X} {'is revoked' if is_new else 'was revoked before'}")
    if (directory / f"{what}.pem").is_file():
        print(f"next:   cepheid secure init {shlex.quote(str(directory))} makes a new {what}.pem")
        print(f"        copy {what}.pem and {what}-key.pem to the processes that show it, then crl.pem to all machines")
    else:
        print("next:   copy crl.pem to all machines")
    if authority.rotation_stage == "sign":
        print("note:   certificates of the old CA are not in this list: they end with `cepheid secure rotate-ca --stage finish`")


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


@app.command("enable")
def enable(
    directory: Annotated[Path, typer.Argument(help="Directory of `cepheid secure init`, which the processes get by --secure.")],
    stage: Annotated[int | None, typer.Option(help="Stage to write, 1 to 4. Default: the one after the present one.")] = None,
    url: Annotated[
        str | None, typer.Option("--metadata", envvar="CEPHEID_METADATA", help="ZooKeeper, for stage 3: zk://host:port/root")
    ] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Secure a cluster that runs, in four stages, each a rolling restart. Clients go on.

    Writes the settings of the next stage, says which processes to restart, and goes on only when the present stage is in force on
    all of them. A smaller --stage is the way back.
    """
    from cepheid_cli.secure_enable import run_enable

    run_enable(directory.resolve(), stage, url, admin_url)


@app.command("status")
def status(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show how each broker and bookie that runs is secured."""
    from cepheid_cli.secure_enable import run_status

    run_status(admin_url)
