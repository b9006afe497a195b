"""`cepheid subscriptions`: show and move subscriptions, and find out why one does not deliver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cepheid_cli.admin.common import (
    DEFAULT_URL,
    Admin,
    AdminUrl,
    Json,
    Subscription,
    Topic,
    connect_admin,
    done,
    print_json,
    print_lines,
    print_message,
    sub_app,
    topic_parts,
)
from cepheid_cli.admin.units import BadValueError, counted, duration_s, pairs, position, shown_duration, time_ms
from cepheid_ports import CepheidError

app = sub_app("subscriptions", "Subscriptions: show and move them, and find out why one does not deliver.")


@app.command("list")
def list_subscriptions(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List the subscriptions of a topic."""
    print_lines(sorted(connect_admin(admin_url).subscriptions.list(topic)))


@app.command()
def create(
    topic: Topic,
    name: Subscription,
    at: Annotated[str, typer.Option(help="LEDGER:ENTRY, earliest or latest.")] = "latest",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Create a subscription at a position."""
    connect_admin(admin_url).subscriptions.create(topic, name, position(at))
    done(f"subscription {name} of {topic} created at {at}")


@app.command()
def delete(
    topic: Topic,
    name: Subscription,
    force: Annotated[bool, typer.Option("--force", help="Even while consumers use it.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Delete a subscription. Messages that only it has not acknowledged may be deleted, too."""
    connect_admin(admin_url).subscriptions.delete(topic, name, force=force)
    done(f"subscription {name} of {topic} deleted")


@app.command()
def skip(
    topic: Topic,
    name: Subscription,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Number of entries.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole backlog.")] = False,
    unreadable: Annotated[
        bool, typer.Option("--unreadable", help="Entries without a valid copy on any bookie for which the subscription waits.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Acknowledge entries at the front of the backlog."""
    if (count is not None) + everything + unreadable != 1:
        raise BadValueError("say what to skip: one of --count N, --all and --unreadable")
    if unreadable:
        _skip_unreadable(connect_admin(admin_url), topic, name)
        return
    admin = connect_admin(admin_url)
    if count is None:
        admin.subscriptions.skip_all(topic, name)
    else:
        admin.subscriptions.skip(topic, name, count)
    done(f"skipped {'everything' if everything else f'{count} entries'}")


def _skip_unreadable(admin: Admin, topic: str, name: str) -> None:
    entries = 0
    for part in topic_parts(admin, topic):
        more = True
        while more:
            try:
                found = admin.subscriptions.skip_unreadable(part, name)
            except CepheidError:
                if entries:
                    print_lines([f"skipped {counted(entries, 'entry', 'entries')} without a valid copy, before this failed"])
                raise
            for run in found["skipped"]:
                place = run["first"] if run["first"] == run["last"] else f"{run['first']} to {run['last']}"
                print_lines([f"{part}: skipped {place}: {run['reason']}"])
            entries += found["entries"]
            more = found["more"]
    if entries:
        done(f"skipped {counted(entries, 'entry', 'entries')} without a valid copy")
    else:
        done(f"nothing skipped: the next entry for {name} is readable")


@app.command()
def expire(
    topic: Topic,
    name: Annotated[str | None, typer.Argument(help="Subscription. Default: all of the topic.")] = None,
    older_than: Annotated[str, typer.Option(help="Age, such as 2h.")] = "",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Acknowledge all messages published before an age."""
    if not older_than:
        raise BadValueError("name an age: --older-than 2h")
    seconds = duration_s(older_than)
    admin = connect_admin(admin_url)
    if name is None:
        admin.subscriptions.expire_everywhere(topic, seconds)
    else:
        admin.subscriptions.expire_by_age(topic, name, seconds)
    done(f"expired messages older than {older_than}")


@app.command()
def reset(
    topic: Topic,
    name: Subscription,
    to: Annotated[str, typer.Option(help="LEDGER:ENTRY, earliest, latest, a time (2026-05-01T12:00) or an age (-15m).")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Move a subscription: delivery continues from there. Its consumers are disconnected and reconnect."""
    admin = connect_admin(admin_url)
    if to in _ENDS:  # a message id is in one partition, the ends apply to all
        for part in topic_parts(admin, topic):
            admin.subscriptions.reset_by_id(part, name, position(to))
    elif _is_position(to):
        admin.subscriptions.reset_by_id(topic, name, position(to))
    else:
        admin.subscriptions.reset_by_time(topic, name, time_ms(to))
    done(f"subscription {name} of {topic} continues from {to}")


@app.command()
def peek(
    topic: Topic,
    name: Subscription,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Position in the backlog, from 1.")] = 1,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print an entry of the backlog without consuming it."""
    print_message(connect_admin(admin_url).subscriptions.peek_message(topic, name, number))


@app.command()
def backlog(topic: Topic, name: Subscription, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Read through the backlog and count it; for a partitioned topic by partition."""
    admin = connect_admin(admin_url)
    found = {part: admin.subscriptions.analyze_backlog(part, name) for part in topic_parts(admin, topic)}
    print_json(found if len(found) > 1 else next(iter(found.values())))


@app.command()
def properties(
    topic: Topic,
    name: Subscription,
    values: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE; replaces all properties. Default: show them.")] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Show or replace a subscription's properties."""
    admin = connect_admin(admin_url)
    if values is None:
        print_json(admin.subscriptions.properties(topic, name))
    else:
        admin.subscriptions.set_properties(topic, name, pairs(values))
        done(f"properties of {name} replaced")


@app.command()
def why(topic: Topic, name: Subscription, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Explain why a subscription does not deliver, from the dispatcher's state, and what would help; for each partition."""
    admin = connect_admin(admin_url)
    answers = [(part, admin.subscriptions.why_not_delivering(part, name)) for part in topic_parts(admin, topic)]
    if as_json:
        print_json(answers[0][1] if len(answers) == 1 else [answer for _, answer in answers])
    else:
        for part, answer in answers:
            print_lines(why_lines(part, name, answer))


_MAX_CONSUMERS = 20  # shown


def why_lines(topic: str, name: str, found: Mapping[str, Any]) -> list[str]:
    consumers, entries = found["consumers"], found["backlog_entries"]
    kind = found["type"] if consumers else "no type now"
    lines = [f"{name} of {topic}: {kind}, {counted(len(consumers), 'consumer')}, backlog {counted(entries, 'entry', 'entries')}"]
    for consumer in consumers[:_MAX_CONSUMERS]:
        held = f"{consumer['permits']} permits, {consumer['unacked_messages']} unacknowledged"
        lines.append(f"  {consumer['name'] or '(no name)'}: {held}{', blocked' if consumer['blocked'] else ''}")
    if len(consumers) > _MAX_CONSUMERS:
        lines.append(f"  and {len(consumers) - _MAX_CONSUMERS} more (--json shows all)")
    if found.get("not_saving"):
        lines.append(f"  Acknowledgements could not be saved: {found['not_saving']}")
    if found["delivering"]:
        return [*lines, "It is delivering."]
    for reason in found["reasons"]:
        lines.append(f"- {reason['reason']}")
        facts = [("consumer", reason.get("consumer")), ("key", reason.get("key")), ("message", reason.get("message_id"))]
        lines += [f"    {label}: {value}" for label, value in facts if value not in (None, "")]
        if reason.get("since_s") is not None:
            lines.append(f"    since: {shown_duration(reason['since_s'])}")
        if reason.get("details"):
            lines.append(f"    {reason['details']}")
        lines.append(f"    ends when {reason['until']}")
    return lines


_ENDS = ("earliest", "latest")


def _is_position(text: str) -> bool:
    first, colon, second = text.partition(":")
    return bool(colon and first.isdecimal() and second.lstrip("-").isdecimal())
