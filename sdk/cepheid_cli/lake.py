"""`cepheid lake export`: exports a topic's messages to Parquet files or an Iceberg table, exactly once (docs/lake.md)."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from typing import Annotated

import typer

from cepheid_cli.admin.common import sub_app
from cepheid_cli.read import DEFAULT_SERVICE_URL, ReadCommandError, own_words
from cepheid_ports import CepheidError

app = sub_app("lake", "Exports of topics to Parquet files and Iceberg tables.")

_NEEDED = {"pyarrow": "pyarrow", "numpy": "numpy", "grpc": "grpcio", "obstore": "obstore"}


@app.command()
def export(
    topic: Annotated[str, typer.Argument(help="Topic, short or full; a partitioned one with all its partitions.")],
    to: Annotated[
        str, typer.Option(help="parquet:///path, parquet+s3://bucket/prefix (also gs, abfs), or iceberg://namespace.table.")
    ],
    catalog: Annotated[
        list[str] | None, typer.Option(help="Property of the Iceberg catalog: uri=…, warehouse=…. Repeat it.")
    ] = None,
    start: Annotated[str, typer.Option("--from", help="First message of the first run: earliest, latest, or a time.")] = "earliest",
    typed: Annotated[
        bool, typer.Option("--typed", help="The columns of the topic's schema, instead of the value's bytes.")
    ] = False,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas.")] = None,
    on_bad_record: Annotated[str, typer.Option(help="Messages that cannot be decoded: fail, null or skip.")] = "fail",
    decryption_keys: Annotated[
        str | None,
        typer.Option(help="Private keys for encrypted messages: a directory with NAME.pem, or package.module:function."),
    ] = None,
    accept_loss: Annotated[bool, typer.Option("--accept-loss", help="Continue after a range that is no longer kept.")] = False,
    subscription: Annotated[
        str | None, typer.Option(help="The subscription that retains unexported messages. Default: derived from --to.")
    ] = None,
    every: Annotated[float, typer.Option(min=0, help="Repeat at this interval in seconds for new messages. 0: once.")] = 0.0,
    url: Annotated[str | None, typer.Option("--url", help=f"Service URL of any broker. Default: {DEFAULT_SERVICE_URL}")] = None,
    admin_url: Annotated[str | None, typer.Option(help="Or: admin URL of any broker.")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CEPHEID_TOKEN", help="Token for brokers. In the environment it is hidden from other users of the machine."
        ),
    ] = None,
) -> None:
    """Add the new messages of a topic to a table: each exactly once, even if the export is killed in between."""
    if missing := [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise ReadCommandError(f"`cepheid lake export` needs {', '.join(missing)}: pip install 'cepheid[lake]'")
    from cepheid_lake import export as export_topic

    logging.getLogger("cepheid_scan").addHandler(logging.NullHandler())
    if url is None and admin_url is None:
        admin_url = os.environ.get("CEPHEID_ADMIN_URL") or None
        url = DEFAULT_SERVICE_URL if admin_url is None else None
    while True:
        try:
            report = export_topic(
                topic,
                to,
                service_url=url,
                admin_url=admin_url,
                token=token or None,
                catalog=_properties(catalog or []),
                start=start,
                mode="typed" if typed else "messages",
                columns=None if columns is None else [name.strip() for name in columns.split(",")],
                on_bad_record=on_bad_record,
                fail_on_data_loss=not accept_loss,
                decryption_keys=decryption_keys,
                subscription=subscription,
            )
        except CepheidError as error:
            if not every or not error.retriable:
                raise ReadCommandError(own_words(str(error))) from None
            print(f"cepheid: {error}; tried again in {every:g} s", file=sys.stderr)
        else:
            commits = f"{report.commits} {'commit' if report.commits == 1 else 'commits'}"
            print(f"{report.rows:,} messages in {commits} to {to}", file=sys.stderr)
            if report.bad_records:
                print(f"cepheid: {report.bad_records:,} messages could not be decoded", file=sys.stderr)
        if not every:
            return
        time.sleep(every)


def _properties(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ReadCommandError(f"--catalog {word}: write NAME=VALUE, such as uri=sqlite:////tmp/catalog.db")
        found[name] = value
    return found
