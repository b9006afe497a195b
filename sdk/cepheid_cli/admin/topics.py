"""`cepheid topics`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cepheid_cli.admin.common import (
    DEFAULT_URL,
    Admin,
    AdminUrl,
    Json,
    Topic,
    connect_admin,
    done,
    print_json,
    print_lines,
    print_message,
    print_table,
    sub_app,
    topic_parts,
)
from cepheid_cli.admin.policy_words import WORDS, set_policy, shown_policies, shown_policy, topic_base, unset_policy
from cepheid_cli.admin.units import BadValueError, position, shown_bytes, shown_duration, time_ms
from cepheid_ports import CepheidError
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid.admin.bodies import MessageIdBody

_POLL_S = 0.5

app = sub_app("topics", "Topics: create, show, change, delete.")

_FORMS = "; ".join(f"{name} {word.form}" for name, word in WORDS.items())
Policy = Annotated[str, typer.Argument(help=f"One of: {', '.join(WORDS)}.")]


@app.command("list")
def list_topics(
    namespace: Annotated[str, typer.Argument(help="Namespace.")] = "public/default", admin_url: AdminUrl = DEFAULT_URL
) -> None:
    """List the topics of a namespace, and each partition of partitioned ones."""
    print_lines(sorted(connect_admin(admin_url).namespaces.topics(namespace, mode="ALL")))


@app.command()
def create(
    topic: Topic,
    partitions: Annotated[int, typer.Option("--partitions", "-p", min=0, help="0: not partitioned.")] = 0,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Create a topic."""
    topics = connect_admin(admin_url).topics
    if partitions:
        topics.create_partitioned(topic, partitions)
    else:
        topics.create(topic)
    done(f"topic {topic} created" + (f" with {partitions} partitions" if partitions else ""))


@app.command()
def grow(
    topic: Topic,
    partitions: Annotated[int, typer.Argument(min=1, help="New number of partitions.")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Give a partitioned topic more partitions; keys move, connected clients follow."""
    connect_admin(admin_url).topics.grow(topic, partitions)
    done(f"topic {topic} has {partitions} partitions")


@app.command()
def delete(
    topic: Topic,
    force: Annotated[bool, typer.Option("--force", help="Also while clients use it; they are disconnected.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Delete a topic with everything in it."""
    admin = connect_admin(admin_url)
    if _is_partitioned(admin, topic):
        admin.topics.delete_partitioned(topic, force=force)
    else:
        admin.topics.delete(topic, force=force)
    done(f"topic {topic} deleted")


@app.command()
def stats(topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Rates, sizes, producers, and each subscription's backlog."""
    admin = connect_admin(admin_url)
    read = admin.topics.partitioned_stats if _is_partitioned(admin, topic) else admin.topics.stats
    found = read(topic, get_precise_backlog=True)
    if as_json:
        print_json(found)
        return
    print(f"in       {found['msgRateIn']:.1f} messages/s, {shown_bytes(found['msgThroughputIn'])}/s", end="")
    print(f"  ({len(found['publishers'])} producers)")
    print(f"out      {found['msgRateOut']:.1f} messages/s, {shown_bytes(found['msgThroughputOut'])}/s")
    print(f"stored   {shown_bytes(found['storageSize'])}")
    rows = [_subscription_row(name, each) for name, each in sorted(found["subscriptions"].items())]
    if rows:
        print()
        print_table(("subscription", "type", "consumers", "entries", "messages", "size", "oldest", "unacked", "out/s"), rows)


def _subscription_row(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        str(each.get("type") or "-"),
        str(len(each["consumers"])),
        str(each["msgBacklog"]),
        str(each.get("backlogMessages", "-")),
        shown_bytes(each.get("backlogSize")),
        shown_duration(each.get("backlogAgeSeconds")),
        str(each["unackedMessages"]),
        f"{each['msgRateOut']:.1f}",
    )


@app.command("internal-stats")
def internal_stats(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show ledgers and cursors in the API's form."""
    admin = connect_admin(admin_url)
    if _is_partitioned(admin, topic):
        print_json(admin.topics.partitioned_internal_stats(topic))
    else:
        print_json(admin.topics.internal_stats(topic))


@app.command()
def unload(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Close a topic in good order; clients open it again."""
    connect_admin(admin_url).topics.unload(topic)
    done(f"topic {topic} unloaded")


@app.command()
def terminate(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """End a topic: nothing more can ever be published. Prints the id of its last message."""
    admin = connect_admin(admin_url)
    if _is_partitioned(admin, topic):
        last = admin.topics.terminate_partitions(topic)
        print_lines(f"{index}  {_id(message_id)}" for index, message_id in sorted(last.items(), key=lambda item: int(item[0])))
    else:
        print(_id(admin.topics.terminate(topic)))


@app.command("last-id")
def last_id(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Print the id of the last message."""
    print(_id(connect_admin(admin_url).topics.last_message_id(topic)))


@app.command()
def examine(
    topic: Topic,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Position of the entry, from 1.")] = 1,
    latest: Annotated[bool, typer.Option("--latest", help="Count back from the newest entry.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print an entry of a topic, acknowledged or not: the oldest, the newest, or one counted from there."""
    end = "latest" if latest else "earliest"
    print_message(connect_admin(admin_url).topics.examine_message(topic, initial_position=end, message_position=number))


@app.command()
def message(
    topic: Topic,
    message_id: Annotated[str, typer.Argument(help="LEDGER:ENTRY, as printed by produce and consume.")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print an entry by its id."""
    place = position(message_id)
    print_message(connect_admin(admin_url).topics.get_message(topic, place["ledgerId"], place["entryId"]))


@app.command()
def find(
    topic: Topic,
    at: Annotated[str, typer.Option(help="A time (2026-05-01T12:00) or an age (-15m).")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print the id of the first message that was published at or after that time."""
    print(_id(connect_admin(admin_url).topics.message_id_at(topic, time_ms(at))))


@app.command()
def truncate(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Delete everything published so far, acknowledged or not; subscriptions move to the end."""
    connect_admin(admin_url).topics.truncate(topic)
    done(f"topic {topic} truncated")


@app.command()
def trim(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Delete now everything that retention no longer keeps."""
    connect_admin(admin_url).topics.trim(topic)
    done(f"topic {topic} trimmed")


@app.command()
def policies(topic: Topic, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show the policies in force: of the topic itself, its namespace, or the broker."""
    print_json(shown_policies(connect_admin(admin_url), topic_base(topic), of_topic=True))


@app.command("set", help=f"Set a policy of this topic; it is in force within a second. Values: {_FORMS}.")
def set_(
    topic: Topic, policy: Policy, value: Annotated[str, typer.Argument(help="Its value.")], admin_url: AdminUrl = DEFAULT_URL
) -> None:
    set_policy(connect_admin(admin_url), topic_base(topic), policy, value, of_topic=True)
    done(f"{policy} of {topic} is {value}")


@app.command("get")
def get(
    topic: Topic,
    policy: Policy,
    in_force: Annotated[
        bool, typer.Option("--in-force", help="The policy in force, even if set for the namespace or the broker.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print a policy that is set here, in the form for `set` or as JSON."""
    found = shown_policy(connect_admin(admin_url), topic_base(topic), policy, of_topic=True, in_force=in_force)
    if found is None:
        done(f"{policy} of {topic} is not set")
    else:
        print(found)


@app.command()
def unset(topic: Topic, policy: Policy, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Reset a policy to that of the namespace."""
    unset_policy(connect_admin(admin_url), topic_base(topic), policy, of_topic=True)
    done(f"{policy} of {topic} is not set")


@app.command()
def offload(
    topic: Topic,
    before: Annotated[
        str, typer.Option(help="LEDGER:ENTRY of the first message to keep. Default: everything in ended ledgers.")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is done or has failed.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Copy a topic's ended ledgers to the object store of its offload policy now, regardless of the policy's thresholds."""
    admin = connect_admin(admin_url)
    parts = topic_parts(admin, topic)
    if before and len(parts) > 1:
        raise BadValueError(f"{topic} has {len(parts)} partitions, and --before is a position in one: name that partition")
    for part in parts:
        admin.topics.offload(part, position(before) if before else _current_ledger(admin, part))
    if not wait:
        done(f"offloading {topic}: cepheid topics offload-status {topic}")
        return
    for part in parts:
        found = admin.topics.offload_status(part)
        while found["status"] == "RUNNING":
            time.sleep(_POLL_S)
            found = admin.topics.offload_status(part)
        if found["status"] != "SUCCESS":
            raise OffloadFailedError(f"{part}: {_offload_line(found)}")
        print(f"{part}: {_offload_line(found)}" if len(parts) > 1 else _offload_line(found))


@app.command("offload-status")
def offload_status(topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show the progress of the last `cepheid topics offload`, for each partition."""
    admin = connect_admin(admin_url)
    found = {part: admin.topics.offload_status(part) for part in topic_parts(admin, topic)}
    if as_json:
        print_json(next(iter(found.values())) if len(found) == 1 else found)
        return
    print_lines(f"{part}: {_offload_line(state)}" if len(found) > 1 else _offload_line(state) for part, state in found.items())


class OffloadFailedError(CepheidError):
    """The owner of the topic gave up the offload."""

    hint = "cepheid tiered status shows what is missing; nothing was deleted from the bookies"


def _current_ledger(admin: Admin, topic: str) -> MessageIdBody:
    """Return the beginning of the ledger being written: everything before it can be offloaded."""
    last = admin.topics.internal_stats(topic)["ledgers"][-1]
    return {"ledgerId": last["ledgerId"], "entryId": 0, "partitionIndex": -1}


def _offload_line(found: dict[str, Any]) -> str:
    match found["status"]:
        case "NOT_RUN":
            return "not requested since the topic was opened; its policy offloads automatically: cepheid tiered status"
        case "RUNNING":
            return "running"
        case "SUCCESS":
            first = found.get("firstUnoffloadedMessage")
            return f"done; the first message that is not offloaded: {_id(first)}" if first else "done; everything is offloaded"
        case _:
            return f"failed: {found['lastError']}"


def _is_partitioned(admin: Admin, topic: str) -> bool:
    return topic_parts(admin, topic) != [str(TopicName.parse(topic))]


def _id(message_id: dict[str, int]) -> str:
    return f"{message_id['ledgerId']}:{message_id['entryId']}"
