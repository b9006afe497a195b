"""What the admin commands share: the address option, and printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from cepheid_cli.admin_client import DEFAULT_URL, AdminClient

AdminUrl = Annotated[str, typer.Option("--admin-url", envvar="CEPHEID_ADMIN_URL", help="Admin address of any broker.")]
Json = Annotated[bool, typer.Option("--json", help="The server's answer as JSON.")]
Topic = Annotated[str, typer.Argument(help="Topic, short (orders) or full (persistent://public/default/orders).")]
Namespace = Annotated[str, typer.Argument(help="Namespace, as public/default.")]
Subscription = Annotated[str, typer.Argument(help="Subscription.")]

__all__ = ["DEFAULT_URL", "AdminClient", "AdminUrl", "Json", "Namespace", "Subscription", "Topic"]


def sub_app(name: str, text: str) -> typer.Typer:
    return typer.Typer(name=name, help=text, no_args_is_help=True, pretty_exceptions_enable=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=False))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their content; plain text, so that other programs can cut it."""
    table = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_message(admin: AdminClient, path: str, query: Mapping[str, Any]) -> None:
    """A stored message as the API answers it: what is known of it, one line each, then the payload."""
    payload, headers = admin.call_raw("GET", path, query)
    print_lines(
        f"{name.removeprefix('x-pulsar-')}: {value}" for name, value in sorted(headers.items()) if name.startswith("x-pulsar-")
    )
    print()
    print(payload.decode(errors="backslashreplace") if isinstance(payload, bytes) else "")


def done(text: str) -> None:
    """To stderr: what was done is no output."""
    print(text, file=sys.stderr)
