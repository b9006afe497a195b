"""The commands of `cepheid dev`; the work is in `cepheid_dev`, which is imported when a command runs."""

from __future__ import annotations

import enum
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cepheid_cli.settings_loader import SettingsError

if TYPE_CHECKING:
    from cepheid_dev.local_cluster import LocalCluster

app = typer.Typer(
    name="dev",
    help="A cluster of processes on this machine: ZooKeeper, bookies, brokers. Break it, repair it, watch it.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path, typer.Option("--dir", envvar="CEPHEID_DEV_DIR", help="Directory of the cluster: data, logs and process ids.")
]
Name = Annotated[str, typer.Argument(help="Member, as `cepheid dev status` names it: zookeeper, bookie-1, broker-1 …")]
DIRECTORY = Path("cepheid-dev")


class Added(enum.Enum):
    BOOKIE = "bookie"
    BROKER = "broker"


@app.command()
def up(
    bookies: Annotated[int | None, typer.Option(min=1, max=99, help="Bookies, at least. Default of a new cluster: 4")] = None,
    brokers: Annotated[int | None, typer.Option(min=1, max=99, help="Brokers, at least. Default of a new cluster: 2")] = None,
    zookeepers: Annotated[
        int | None, typer.Option(min=1, max=7, help="ZooKeeper servers of a new cluster; 3 survive the loss of one. Default: 1")
    ] = None,
    session_timeout: Annotated[
        float | None, typer.Option(min=1, max=60, help="Seconds of silence after which a process counts as dead. Default: 4")
    ] = None,
    bookie_config: Annotated[Path | None, typer.Option(help="TOML file of settings for all bookies.")] = None,
    broker_config: Annotated[Path | None, typer.Option(help="TOML file of settings for all brokers.")] = None,
    usual_ports: Annotated[
        bool, typer.Option("--usual-ports/--any-ports", help="A new cluster's first broker gets 6650 and 8080, if they are free.")
    ] = True,
    secure: Annotated[
        bool, typer.Option("--secure", help="A new cluster with TLS on all its ports but ZooKeeper's, where clients authenticate.")
    ] = False,
    directory: Directory = DIRECTORY,
) -> None:
    """Start a cluster, or restart everything of the one in the directory. It runs until `cepheid dev down`."""
    files = {"bookie": bookie_config, "broker": broker_config}
    settings = {role: _read_settings(file) for role, file in files.items() if file is not None}
    cluster = _cluster(directory)
    with _console().status("starting"):
        cluster.up(
            bookies,
            brokers,
            zookeepers=zookeepers,
            session_timeout_s=session_timeout,
            settings=settings or None,
            usual_ports=usual_ports,
            secure=secure,
        )
    status(directory)
    for what, where in (
        ("clients", cluster.service_url),
        ("admin", " ".join(cluster.admin_urls)),
        ("metadata", cluster.metadata_url),
    ):
        print(f"{what:<9} {where}")
    if cluster.secure_directory is not None:
        print(f"use       source {cluster.client_environment}")


@app.command()
def status(directory: Directory = DIRECTORY) -> None:
    """Show the members with state, pid, ports and start time."""
    from cepheid_cli.dev.status_table import status_table
    from cepheid_ports import Ports

    cluster = _cluster(directory)
    _console().print(status_table(cluster.status(), Ports().wall_ms()))


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 40,
    directory: Directory = DIRECTORY,
) -> None:
    """Print the end of a member's log."""
    from cepheid_cli.dev.log_follower import follow_log, last_lines

    path = _cluster(directory).log_path(name)
    if follow:
        follow_log(path, lines)
    else:
        print("".join(last_lines(path, lines)), end="")


@app.command()
def kill(name: Name, directory: Directory = DIRECTORY) -> None:
    """Kill a member like a crash (SIGKILL)."""
    _cluster(directory).kill(name)
    print(f"{name} is killed; start it again: cepheid dev start {name}")


@app.command()
def pause(name: Name, directory: Directory = DIRECTORY) -> None:
    """Suspend a member (SIGSTOP): its connections stay, but nothing answers."""
    _cluster(directory).pause(name)
    print(f"{name} is paused; resume it: cepheid dev resume {name}")


@app.command()
def resume(name: Name, directory: Directory = DIRECTORY) -> None:
    """Resume a paused member (SIGCONT)."""
    _cluster(directory).resume(name)
    print(f"{name} goes on")


@app.command()
def wipe(name: Name, directory: Directory = DIRECTORY) -> None:
    """Destroy a bookie's disk: it is killed, and its data is deleted."""
    _cluster(directory).wipe(name)
    print(f"{name} is down, and its data is deleted. Its cookie stays in metadata, so it will refuse to start on the empty disk:")
    print("otherwise it would deny entries that it acknowledged. Either of these:")
    print(f"  cepheid dev start {name} --accept-empty-disk    its former entries are unknown there, and read from other bookies")
    print("  cepheid dev add bookie                          a new one replaces it")


@app.command()
def start(
    name: Name,
    accept_empty_disk: Annotated[
        bool, typer.Option("--accept-empty-disk", help="Let a bookie whose disk is lost for good start on an empty one.")
    ] = False,
    directory: Directory = DIRECTORY,
) -> None:
    """Start a member that is down; return when it serves."""
    with _console().status(f"starting {name}"):
        _cluster(directory).start(name, accept_empty_disk=accept_empty_disk)
    print(f"{name} is ready")


@app.command()
def stop(name: Name, directory: Directory = DIRECTORY) -> None:
    """Stop a member gracefully (SIGTERM)."""
    _cluster(directory).stop(name)
    print(f"{name} is stopped")


@app.command()
def restart(name: Name, directory: Directory = DIRECTORY) -> None:
    """Stop a member gracefully and start it again; return when it serves."""
    with _console().status(f"restarting {name}"):
        _cluster(directory).restart(name)
    print(f"{name} is ready")


@app.command()
def add(kind: Annotated[Added, typer.Argument(help="bookie or broker")], directory: Directory = DIRECTORY) -> None:
    """Start one more bookie or broker."""
    with _console().status(f"starting a {kind.value}"):
        name = _cluster(directory).add(kind.value)
    print(f"{name} is ready")


@app.command()
def down(
    delete: Annotated[
        bool, typer.Option("--delete", help="Also delete its data and logs, but nothing else in the directory.")
    ] = False,
    directory: Directory = DIRECTORY,
) -> None:
    """Stop everything gracefully. The data stays; `cepheid dev up` continues with it."""
    cluster = _cluster(directory)
    with _console().status("stopping"):
        cluster.down()
    if delete:
        cluster.delete()
    print(f"all members are stopped; {'data and logs are deleted' if delete else f'data and logs stay in {directory}'}")


def _cluster(directory: Path) -> LocalCluster:
    from cepheid_dev.local_cluster import LocalCluster

    return LocalCluster(directory)


def _console() -> Any:
    from rich.console import Console

    return Console()


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from None
