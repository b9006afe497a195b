"""`cepheid init`, `standalone`, `bookie`, `autorecovery` and `broker`: their options. The work is in the modules they import.

A parameter of a role's command has the name of its setting, so there is no second list of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

METADATA_HELP = "Metadata store: zk://host:port,host:port/root (further servers and the root are optional)"
"""Without square brackets, which rich interprets as markup."""

Metadata = Annotated[str | None, typer.Option(help=METADATA_HELP)]
Host = Annotated[str | None, typer.Option(help="Address to bind. Default: 127.0.0.1")]
AdvertisedHost = Annotated[str | None, typer.Option(help="Advertised address. Default: the bound one")]
AdvertisedPort = Annotated[int | None, typer.Option(help="Advertised port. Default: the bound one")]
Rack = Annotated[str | None, typer.Option(help="Where it runs: region/rack, or a rack without a region")]
AcceptEmptyDisk = Annotated[
    bool, typer.Option("--accept-empty-disk", help="For this one start: continue although the disk of a known bookie is empty.")
]
Secure = Annotated[Path | None, typer.Option(help="Directory of `cepheid secure init`: TLS, and clients must authenticate")]
SessionTimeout = Annotated[
    float | None, typer.Option(help="Seconds of silence after which metadata treats it as dead. Default: 4", metavar="SECONDS")
]


def init(
    metadata: Annotated[str, typer.Option(help=METADATA_HELP)],
    cluster: Annotated[str, typer.Option(help="Name of the cluster.")] = "cepheid",
    service_url: Annotated[str, typer.Option(help="Service URL of its brokers, as the admin API shows it.")] = "",
    admin_url: Annotated[str, typer.Option(help="Admin URL of its brokers, as the admin API shows it.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait for a metadata store that cannot be reached.")] = 60.0,
    secure: Annotated[
        Path | None, typer.Option(help="Directory of `cepheid secure init`: only its ZooKeeper user may access the records.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Wait, as long as for the store, until another process creates it.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory of a bookie. If it has data of a cluster, no other cluster is created.")
    ] = None,
) -> None:
    """Create a cluster in a metadata store: its identity, first tenants and namespaces. Safe to repeat."""
    from cepheid_cli.init import Founding, run_init
    from cepheid_cli.secured_cluster import metadata_auth

    run_init(Founding(metadata, cluster, service_url, admin_url, metadata_auth(secure), join, data_dir), wait)


NOT_SETTINGS = ("config", "secure", "accept_empty_disk", "as_process")
"""Options of roles that files and environment variables cannot set."""


def _settings_in(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in NOT_SETTINGS}


def standalone(
    data_dir: Annotated[
        Path | None, typer.Option("--data", help="Data directory; created if it does not exist. Default: data")
    ] = None,
    host: Host = None,
    advertised_host: Annotated[str | None, typer.Option(help="Address advertised to clients. Default: the bound one")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the binary protocol. Default: 6650")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of the admin API and metrics. Default: 8080")] = None,
    bookies: Annotated[int | None, typer.Option(help="Number of storage nodes, each with its directory. Default: 1")] = None,
    secure: Secure = None,
    accept_empty_disk: AcceptEmptyDisk = False,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; environment: CEPHEID_STANDALONE_NAME")] = None,
) -> None:
    """Run a whole cluster in this process: metadata, bookies, a broker, the admin API. Ctrl-C stops it."""
    flags = _settings_in(locals())
    from cepheid_cli.secured_cluster import settings_files
    from cepheid_cli.standalone import run_standalone

    run_standalone(flags, settings_files("server", secure, config), accept_empty_disk=accept_empty_disk)


def bookie(
    metadata: Metadata = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", "--data", help="Data directory; created if it does not exist. Default: bookie-data")
    ] = None,
    journal_dir: Annotated[
        Path | None, typer.Option("--journal-dir", "--journal", help="Directory of the journal. Default: the data directory")
    ] = None,
    bookie_id: Annotated[str | None, typer.Option("--id", help="Name in metadata; must never change. Default: host:port")] = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="gRPC port. Default: 3181")] = None,
    advertised_host: AdvertisedHost = None,
    advertised_port: AdvertisedPort = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /health, /ready and /metrics. Default: 8000")] = None,
    scan_port: Annotated[int | None, typer.Option(help="Port of stored entries for Spark. Default: any free one")] = None,
    rack: Rack = None,
    metadata_session_timeout_s: SessionTimeout = None,
    accept_empty_disk: AcceptEmptyDisk = False,
    secure: Secure = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; environment: CEPHEID_BOOKIE_NAME")] = None,
) -> None:
    """Run one storage node of a cluster. Ctrl-C stops it."""
    flags = _settings_in(locals())
    from cepheid_cli.bookie import run_bookie
    from cepheid_cli.secured_cluster import settings_files

    run_bookie(flags, settings_files("bookie", secure, config), accept_empty_disk=accept_empty_disk)


def autorecovery(
    metadata: Metadata = None,
    name: Annotated[str | None, typer.Option(help="Name shown to people. Default: the address of its health page")] = None,
    http_host: Annotated[
        str | None, typer.Option("--host", help="Address of health checks and metrics. Default: 127.0.0.1")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /health, /ready and /metrics. Default: 8000")] = None,
    metadata_session_timeout_s: SessionTimeout = None,
    secure: Secure = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; environment: CEPHEID_AUTORECOVERY_NAME")] = None,
) -> None:
    """Repair ledgers that lack copies, in a separate process. Bookies do it as well, unless it is switched off there."""
    flags = _settings_in(locals())
    from cepheid_cli.autorecovery import run_autorecovery
    from cepheid_cli.secured_cluster import settings_files

    run_autorecovery(flags, settings_files("autorecovery", secure, config))


def broker(
    metadata: Metadata = None,
    broker_id: Annotated[str | None, typer.Option("--id", help="Name in metadata. Default: advertised host and admin port")] = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="Port of the binary protocol. Default: 6650")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of the admin API and metrics. Default: 8080")] = None,
    advertised_host: AdvertisedHost = None,
    advertised_port: AdvertisedPort = None,
    advertised_admin_port: Annotated[int | None, typer.Option(help="Advertised admin port. Default: the bound one")] = None,
    ensemble_size: Annotated[int | None, typer.Option(help="Bookies that a ledger is spread over. Default: 3")] = None,
    write_quorum: Annotated[int | None, typer.Option(help="Bookies that get each entry. Default: 3")] = None,
    ack_quorum: Annotated[int | None, typer.Option(help="Bookies that must have it before it is acknowledged. Default: 2")] = None,
    rack: Rack = None,
    metadata_session_timeout_s: SessionTimeout = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Brokers to start and supervise, one per core. Process i has the id ID-i, port + i, and its own admin port, "
            "admin port + 1 + i; all of them answer the admin port. Default: 1"
        ),
    ] = None,
    secure: Secure = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; environment: CEPHEID_BROKER_NAME")] = None,
    as_process: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one broker of a cluster, or several with --processes. Ctrl-C stops it."""
    flags = _settings_in(locals())
    from cepheid_cli.broker import run_broker
    from cepheid_cli.secured_cluster import settings_files

    run_broker(flags, settings_files("broker", secure, config), as_process=as_process)
