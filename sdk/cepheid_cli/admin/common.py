"""Shared parts of the admin commands: the address option, and printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from cepheid.admin.exchange import DEFAULT_URL, StoredMessage
from cepheid.admin.sync import Admin
from cepheid.errors import NotFoundError
from cepheid_cli.client_security import connect_admin
from cepheid_wire import TopicName

AdminUrl = Annotated[str, typer.Option("--admin-url", envvar="CEPHEID_ADMIN_URL", help="Admin address of any broker.")]
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Topic = Annotated[str, typer.Argument(help="Topic, short (orders) or full (persistent://public/default/orders).")]
Namespace = Annotated[str, typer.Argument(help="Namespace, such as public/default.")]
Subscription = Annotated[str, typer.Argument(help="Subscription.")]

__all__ = ["DEFAULT_URL", "Admin", "AdminUrl", "Json", "Namespace", "Subscription", "Topic", "connect_admin"]


def sub_app(name: str, text: str) -> typer.Typer:
    return typer.Typer(name=name, help=text, no_args_is_help=True, pretty_exceptions_enable=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=False))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns as wide as their content, in plain text, so that other programs can cut it."""
    table = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_message(message: StoredMessage) -> None:
    """Print the attributes of a stored message, one per line, then its payload."""
    known = sorted((name, value) for name, value in message.headers.items() if name.startswith("x-pulsar-"))
    print_lines(f"{name.removeprefix('x-pulsar-')}: {value}" for name, value in known)
    print()
    print(message.payload.decode(errors="backslashreplace"))


def topic_parts(admin: Admin, topic: str) -> list[str]:
    """Return the partitions of a partitioned topic, otherwise the topic itself. Raises NotFoundError."""
    name = TopicName.parse(topic)
    try:
        partitions = int(admin.topics.partitions(str(name))["partitions"])
    except NotFoundError as error:
        raise NotFoundError(f"topic {topic} does not exist", status=error.status) from None
    return [str(name.partition(index)) for index in range(partitions)] or [str(name)]


def done(text: str) -> None:
    """Print to stderr: what was done is not output."""
    print(text, file=sys.stderr)
