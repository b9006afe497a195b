"""The commands, their options and help; the work is in the modules they import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cepheid_cli import (
    bookie_shell,
    broker_drain,
    brokers,
    cluster,
    config,
    dev,
    lake,
    ledgers,
    metadata,
    read,
    repair,
    role_commands,
    secure,
    tiered,
    tiered_objects,
    tokens,
)
from cepheid_cli.admin import namespaces, permissions, schemas, subscriptions, tenants, topics
from cepheid_cli.demos import make_examples_importable
from cepheid_ports import CepheidError

app = typer.Typer(
    name="cepheid",
    help="Durable pub/sub that speaks the Pulsar protocol.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_FLAGS_OF_CREDENTIALS = {
    "tls_ca_file": "CEPHEID_TLS_CA_FILE",
    "tls_certificate_file": "CEPHEID_TLS_CERTIFICATE_FILE",
    "tls_key_file": "CEPHEID_TLS_KEY_FILE",
    "tls_crl": "CEPHEID_TLS_CRL",
    "token_file": "CEPHEID_TOKEN_FILE",
    "oauth2_file": "CEPHEID_OAUTH2_FILE",
    "user": "CEPHEID_USER",
    "password_file": "CEPHEID_PASSWORD_FILE",
}


@app.callback()
def _credentials(
    context: typer.Context,
    tls_ca_file: Annotated[str | None, typer.Option(help="CAs that sign the servers' certificates (PEM).")] = None,
    tls_certificate_file: Annotated[str | None, typer.Option(help="Certificate to present to servers (PEM).")] = None,
    tls_key_file: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_crl: Annotated[
        str | None, typer.Option(help="File or folder of the CAs' revocation lists, to check servers' certificates.")
    ] = None,
    token_file: Annotated[str | None, typer.Option(help="File with the token for brokers.")] = None,
    oauth2_file: Annotated[str | None, typer.Option(help="OAuth2 key file (JSON), to fetch tokens with.")] = None,
    user: Annotated[str | None, typer.Option(help="User name for brokers.")] = None,
    password_file: Annotated[str | None, typer.Option(help="File with its password.")] = None,
) -> None:
    """Durable pub/sub that speaks the Pulsar protocol.

    These options apply to every command that connects to servers. They are given before the command, and override the
    environment (CEPHEID_TOKEN_FILE and so on, docs/security.md).
    """
    given = {name: context.params[name] for name in _FLAGS_OF_CREDENTIALS if context.params[name] is not None}
    if len(secrets := [name for name in ("token_file", "oauth2_file", "user") if name in given]) > 1:
        raise typer.BadParameter(f"give one of {', '.join('--' + name.replace('_', '-') for name in secrets)}")
    if ("user" in given) != ("password_file" in given):
        raise typer.BadParameter("--user and --password-file are given together")
    if secrets:  # the options replace all secrets of the environment
        for name in ("CEPHEID_TOKEN_FILE", "CEPHEID_TOKEN", "CEPHEID_OAUTH2_FILE", "CEPHEID_USER", "CEPHEID_PASSWORD_FILE"):
            os.environ.pop(name, None)
    os.environ.update({_FLAGS_OF_CREDENTIALS[name]: value for name, value in given.items()})


for sub_app in (
    dev.app,
    topics.app,
    subscriptions.app,
    schemas.app,
    namespaces.app,
    tenants.app,
    permissions.app,
    ledgers.app,
    ledgers.bookies_app,
    bookie_shell.app,
    repair.app,
    tiered.app,
    brokers.app,
    lake.app,
    cluster.app,
    config.app,
    metadata.app,
    tokens.app,
    secure.app,
):
    app.add_typer(sub_app)

tiered_objects.register(tiered.app)
broker_drain.register(brokers.app)
for command in (role_commands.init, role_commands.bookie, role_commands.autorecovery, role_commands.broker, read.read):
    app.command()(command)

ServiceUrl = Annotated[str, typer.Option("--url", envvar="CEPHEID_URL", help="Service URL of any broker.")]


def run() -> None:
    """Run the command: our own errors are reported as one line and exit code 1."""
    try:
        app()
    except CepheidError as error:
        print(f"cepheid: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cepheid"):
            raise
        extras = "pip install 'cepheid[server]'; for the demos, in the clone: pip install -e '.[server,spark,demo]'"
        print(f"cepheid: the module {error.name} is missing ({extras})", file=sys.stderr)
        raise SystemExit(1) from None


app.command()(role_commands.standalone)


@app.command()
def demo(
    data: Annotated[Path, typer.Option(help="Directory for data and logs; an earlier demo in it is deleted.")] = Path("demo-data"),
    port: Annotated[int, typer.Option(help="Port of the binary protocol.")] = 6750,
    admin_port: Annotated[int, typer.Option(help="Port of the admin API.")] = 8180,
    events: Annotated[int | None, typer.Option(help="Publish only this many flights. Default: all 336,776")] = None,
) -> None:
    """Publish a year of flights through two crashes of the server, and check that nothing acknowledged was lost."""
    from rich.console import Console

    make_examples_importable()
    from examples.flights.run import DemoOptions, run_demo

    if not run_demo(DemoOptions(data, port, admin_port, events), Console()):
        raise typer.Exit(1)


@app.command(name="demo-spark")
def demo_spark(
    data: Annotated[Path, typer.Option(help="Directory for data, logs and pictures; an earlier demo in it is deleted.")] = Path(
        "demo-spark-data"
    ),
    events: Annotated[int | None, typer.Option(min=5000, help="Publish only this many flights. Default: all 336,776")] = None,
) -> None:
    """Query a year of flights with Spark, in batch and streaming, while a driver and a bookie are killed."""
    from rich.console import Console

    make_examples_importable()
    from examples.flights_spark.run import DemoOptions, run_demo_spark

    if not run_demo_spark(DemoOptions(data, events), Console()):
        raise typer.Exit(1)


@app.command(name="demo-tiered")
def demo_tiered(
    data: Annotated[Path, typer.Option(help="Directory for data and logs; an earlier demo in it is deleted.")] = Path(
        "demo-tiered-data"
    ),
    events: Annotated[int | None, typer.Option(min=5000, help="Publish only this many flights. Default: all 336,776")] = None,
) -> None:
    """Offload a year of flights to an S3 server through a crash, query them there, and restore them into a second cluster."""
    from rich.console import Console

    make_examples_importable()
    from examples.flights_tiered.run import DemoOptions, run_demo_tiered

    if not run_demo_tiered(DemoOptions(data, events), Console()):
        raise typer.Exit(1)


@app.command()
def produce(
    topic: Annotated[str, typer.Argument(help="Topic, short (orders) or full (persistent://public/default/orders).")],
    messages: Annotated[list[str] | None, typer.Argument(help="Messages. Default: one per line of standard input.")] = None,
    key: Annotated[str, typer.Option(help="Key of every message.")] = "",
    url: ServiceUrl = "pulsar://127.0.0.1:6650",
) -> None:
    """Publish messages and print their ids."""
    from cepheid_cli.produce_consume import produce_messages

    produce_messages(url, topic, messages, key)


@app.command()
def consume(
    topic: Annotated[str, typer.Argument(help="Topic, short or full.")],
    subscription: Annotated[
        str, typer.Option("--subscription", "-s", help="Subscription; created if it does not exist.")
    ] = "cepheid-cli",
    count: Annotated[int, typer.Option("--count", "-n", help="Stop after this number of messages; 0: never.")] = 0,
    shared: Annotated[bool, typer.Option(help="Share the subscription with other consumers.")] = False,
    earliest: Annotated[bool, typer.Option(help="A new subscription starts at the oldest message, not after the newest.")] = False,
    url: ServiceUrl = "pulsar://127.0.0.1:6650",
) -> None:
    """Print messages as they arrive, and acknowledge them."""
    from cepheid_cli.produce_consume import consume_messages

    consume_messages(url, topic, subscription, count=count, shared=shared, earliest=earliest)
