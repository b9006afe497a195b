"""`cepheid tiered`: parts of topics in object stores, and their offloads (docs/tiered-storage.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any

import typer

from cepheid.errors import RefusedError
from cepheid_cli.admin.common import (
    DEFAULT_URL,
    Admin,
    AdminUrl,
    Json,
    connect_admin,
    done,
    print_json,
    print_lines,
    print_table,
    sub_app,
    topic_parts,
)
from cepheid_cli.admin.units import counted, shown_bytes, shown_time

app = sub_app("tiered", "Tiered storage: topics' old ledgers in object stores.")


_MAX_ASKED = 100
"""Limit of topics for which one `status` asks the owner."""


@app.command()
def status(
    name: Annotated[
        str, typer.Argument(help="Namespace (public/default) or topic (orders, persistent://public/default/orders).")
    ] = "public/default",
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Show the data on bookies, in the object store, and in both; what is due for offload, and why it is not done yet."""
    rows = rows_of(connect_admin(admin_url), name)
    if as_json:
        print_json(rows)
        return
    shown = [row for row in rows if _concerns(row)]
    if shown:
        columns = ("topic", "bookies", "both", "objects", "in store", "due", "oldest due ended")
        print_table(columns, [_table_row(row) for row in shown])
        print_lines(problem_lines(shown))
    if len(shown) < len(rows):
        done(f"{counted(len(rows) - len(shown), 'topic')} without an offload policy: cepheid topics set TOPIC offload URL")
    if not rows:
        done(f"{name} has no topics")


def rows_of(admin: Admin, name: str) -> list[dict[str, Any]]:
    """Return the brokers' reports on a namespace's topics, or on one topic (its partitions)."""
    if name.count("/") == 1:
        return _of_namespace(admin, name)
    return [_of_topic(admin, part) for part in topic_parts(admin, name)]


def _of_namespace(admin: Admin, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = admin.tiered.namespace_status(name)["topics"]
    asked = 0
    for index, row in enumerate(rows):
        if row["live"] is None and row["due"]["ledgers"] and asked < _MAX_ASKED:  # its owner knows why it is not done yet
            asked += 1
            try:
                rows[index] = _of_topic(admin, row["topic"])
            except RefusedError as error:
                if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE):
                    raise
    return rows


def _of_topic(admin: Admin, topic: str) -> dict[str, Any]:
    return admin.topics.tiered_status(topic)


def _concerns(row: Mapping[str, Any]) -> bool:
    """Whether any data of the topic is in an object store, or should be."""
    return row["url"] is not None or any(row[where]["ledgers"] for where in ("both", "objects")) or row["waiting_deletions"] > 0


def _table_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    due = row["due"]
    return (
        row["topic"],
        *(f"{row[where]['ledgers']}: {shown_bytes(row[where]['bytes'])}" for where in ("bookies", "both", "objects")),
        shown_bytes(row["object_bytes"]),
        f"{due['ledgers']}: {shown_bytes(due['bytes'])}" if due["ledgers"] else "-",
        shown_time(due["oldest_ended_at_ms"]) if due["ledgers"] else "-",
    )


def problem_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line per topic that is being offloaded, has a failing offload, objects waiting for deletion, or no retention."""
    lines = []
    for row in rows:
        live = row["live"] or {}
        if live.get("uploading") is not None:
            lines.append(f"{row['topic']}: ledger {live['uploading']} is being uploaded")
        if live.get("last_error"):
            lines.append(f"{row['topic']}: offloading fails since {shown_time(live['failing_since_ms'])}: {live['last_error']}")
        if live.get("refused_ledgers"):
            ledger_id, error = next(iter(live["refused"].items()))
            others = live["refused_ledgers"] - 1
            more = f" and {counted(others, 'other ledger')}" if others else ""
            lines.append(f"{row['topic']}: ledger {ledger_id}{more} cannot be offloaded at all: {error}")
        if live.get("not_held_ledgers"):
            ledgers = counted(live["not_held_ledgers"], "ledger")
            lines.append(
                f"{row['topic']}: retention no longer waits for {ledgers} whose offload fails (managed_ledger.offload_hold_s)"
            )
        if row.get("url") is not None and row.get("retention_time_ms") == 0 and row.get("retention_bytes") == 0:
            lines.append(
                f"{row['topic']}: no retention is set, so acknowledged messages are deleted from bookies and store: "
                "cepheid topics set TOPIC retention TIME,SIZE"
            )
        if row["waiting_deletions"]:
            waiting = f"{row['topic']}: {counted(row['waiting_deletions'], 'object')} of removed ledgers wait to be deleted"
            lines.append(f"{waiting}: {live['deletion_error']}" if live.get("deletion_error") else waiting)
    return lines
