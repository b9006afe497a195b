"""`cepheid ledgers` and `cepheid bookies`: locate, read and verify stored data."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, done, print_json, print_lines, print_table, sub_app
from cepheid_cli.admin.units import shown_bytes, shown_time
from cepheid_cli.ledger_source import LedgerSource, NoSuchLedgerHereError, ledger_source

app = sub_app("ledgers", "Ledgers: the storage of topics (docs/operations.md).")
bookies_app = sub_app("bookies", "Bookies: the storage nodes of ledgers.")

STATES = ("OPEN", "IN_RECOVERY", "CLOSED")
MAX_ID = (1 << 63) - 1  # of a ledger and of an entry

Ledger = Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Ledger id.")]
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", envvar="CEPHEID_METADATA", help="Ask the metadata store (zk://host:port) instead of a broker."),
]


@app.command("list")
def list_all(
    topic: Annotated[str | None, typer.Option(help="Only those of this topic.")] = None,
    state: Annotated[str | None, typer.Option(help="Only OPEN, IN_RECOVERY or CLOSED ones.")] = None,
    bookie: Annotated[str | None, typer.Option(help="Only those with entries on this bookie.")] = None,
    deleted: Annotated[bool, typer.Option(help="Deleted ledgers that can be brought back.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """List ledgers, oldest id first. Only the writer of an open ledger knows its entries and bytes.

    Ledgers whose record in metadata cannot be read come last, with the reason.
    """
    if state is not None and state.upper() not in STATES:
        raise typer.BadParameter(f"{state!r} is not a state of a ledger; there are {', '.join(STATES)}")

    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with ledger_source(admin_url, metadata) as source:
            return await _all(source, deleted=deleted)

    listed, damaged = asyncio.run(main())
    found = [view for view in listed if _is_wanted(view["ledger"], topic, state, bookie)]
    if as_json:
        print_json([*found, *({"damaged": record} for record in damaged)])
        return
    columns = ["ledger", "state", "entries", "bytes", "E/Qw/Qa", "fragments", "created", "owner"]
    rows = [_row(view["ledger"]) for view in found]
    if deleted:
        columns.append("until")
        rows = [[*row, shown_time(view["purge_after_ms"])] for row, view in zip(rows, found, strict=True)]
    # Their topics are unknown, so they are shown with every filter.
    rows += [[str(record["ledger_id"]), "DAMAGED", *["-"] * (len(columns) - 3), record["error"]] for record in damaged]
    print_table(columns, rows)


@app.command()
def show(ledger: Ledger, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL, metadata: Metadata = None) -> None:
    """Print one ledger: its end, its fragments, and the states of their bookies."""

    async def main() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with ledger_source(admin_url, metadata) as source:
            return await source.one(ledger), await source.bookies()

    view, bookies = asyncio.run(main())
    if as_json:
        print_json(view)
        return
    record, states = view["ledger"], {bookie["bookie_id"]: bookie["state"] for bookie in bookies}
    open_end = "known to its writer" if record["state"] == "OPEN" else "being determined by recovery"
    end = f"entry {record['last_entry_id']}, {record['length_bytes']} bytes" if record["state"] == "CLOSED" else open_end
    lines = [
        f"ledger    {record['ledger_id']}",
        f"state     {record['state']}" + (f", deleted {shown_time(view['deleted_at_ms'])}" if "deleted_at_ms" in view else ""),
        f"end       {end}",
        f"quorums   ensemble {record['ensemble_size']}, write {record['write_quorum']}, ack {record['ack_quorum']}",
        f"created   {shown_time(record['created_at_ms'])}",
        *(f"{name:<9} {value}" for name, value in sorted(record["custom"].items())),
    ]
    for fragment in record["fragments"]:
        places = ", ".join(f"{bookie} ({states.get(bookie, 'unknown')})" for bookie in fragment["ensemble"])
        lines.append(f"from {fragment['first_entry_id']:<5}{places}")
    if "purge_after_ms" in view:
        lines.append(f"It can be brought back until {shown_time(view['purge_after_ms'])}: cepheid ledgers undelete {ledger}")
    print_lines(lines)


@app.command()
def read(
    ledger: Ledger,
    first: Annotated[int, typer.Option(min=0, max=MAX_ID, help="First entry.")] = 0,
    last: Annotated[int | None, typer.Option(min=0, max=MAX_ID, help="Last entry. Default: the last confirmed one.")] = None,
    raw: Annotated[bool, typer.Option(help="Write payloads as stored, one after the other, to standard output.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """Print a ledger's entries with their messages, read from the bookies without recovery: a writer can continue."""
    if last is not None and last < first:
        raise typer.BadParameter(f"the last entry {last} is before the first, {first}")
    from cepheid_cli.ledger_reading import print_entries

    async def main() -> None:
        async with ledger_source(admin_url, metadata) as source:
            await print_entries(source, ledger, first, last, raw=raw)

    asyncio.run(main())


@app.command()
def verify(
    ledger: Annotated[int | None, typer.Argument(min=0, max=MAX_ID, help="Ledger id.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All ledgers, one after the other.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Replace bad copies from valid replicas, and verify again.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="With --repair: seconds to wait for the repair.")] = 300.0,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """Read every copy of every entry, check it, and compare it with the others.

    Exit code 0: every copy is valid. 1: copies are certainly bad or missing. 3: none is, but some bookies did not answer.
    """
    if (ledger is None) is not every:
        raise typer.BadParameter("name one ledger, or say --all")
    from cepheid_cli.ledger_verifying import verify_ledgers

    async def main() -> int:
        async with ledger_source(admin_url, metadata) as source:
            views, damaged = await _all(source, deleted=False) if ledger is None else ([await source.one(ledger)], [])
            return await verify_ledgers(source, views, damaged, as_json=as_json, repair_for_s=wait if repair else None)

    if verdict := asyncio.run(main()):
        raise typer.Exit(verdict)


@app.command("recover-from")
def recover_from(
    ledger: Ledger,
    bookie: Annotated[str, typer.Option(help="The bookie whose copy decides where the ledger ends.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the loss is accepted.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Close a ledger at what one bookie holds, if the other copies of its end are lost for good (docs/operations.md).

    Shows what would be lost, and asks. A ledger that can be recovered without loss is recovered normally.
    """
    admin = connect_admin(admin_url)
    preview = admin.ledgers.preview_recovery(ledger, bookie)
    print_lines(preview_lines(preview))
    if preview["state"] == "CLOSED":
        return
    if not yes:
        typer.confirm(f"Close ledger {ledger} there?", abort=True)
    end = admin.ledgers.recover_from(ledger, bookie, last_entry=preview["last_entry_id"])
    done(f"ledger {ledger} is {_shown_end(end['last_entry_id'])} ({end['length_bytes']} bytes)")


def preview_lines(preview: dict[str, Any]) -> list[str]:
    """Return lines on the effect of closing a ledger by one bookie's answer, for the operator's decision."""
    ledger, last = preview["ledger_id"], preview["last_entry_id"]
    if preview["state"] == "CLOSED":
        return [f"ledger {ledger} is already {_shown_end(last)}: nothing to decide"]
    lines = [f"ledger {ledger} ({preview['state']}), from entry {preview['first_entry_id']} on at:"]
    lines += [f"  {bookie}: {answer}" for bookie, answer in preview["answers"].items()]
    end = _shown_end(last)
    needed = preview.get("needed_bookies", 0)  # a broker of an older release does not report it
    needs = f"needs {needed} more {'bookie that takes' if needed == 1 else 'bookies that take'} entries: start further ones"
    missing = [f"Closing it {needs} first."] if needed else []
    if not preview["needs_decision"]:
        return [*lines, f"An ordinary recovery is possible, and nothing would be lost: it would be {end}.", *missing]
    unheard = ", ".join(preview["unheard"]) or "other bookies"
    return [
        *lines,
        *missing,
        f"By the answer of {preview['bookie']} alone it would be {end}.",
        f"Lost for good: every acknowledged entry above that which is, or was, only at {unheard}.",
        "Do this only if their disks do not come back. A broker that still writes the ledger is fenced.",
    ]


def _shown_end(last_entry_id: int) -> str:
    return f"closed at entry {last_entry_id}" if last_entry_id >= 0 else "closed without any entry"


@app.command()
def undelete(ledger: Ledger, admin_url: AdminUrl = DEFAULT_URL, metadata: Metadata = None) -> None:
    """Bring a deleted ledger back. It no longer belongs to a topic; `cepheid ledgers read` shows its content."""

    async def main() -> None:
        async with ledger_source(admin_url, metadata) as source:
            await source.undelete(ledger)

    asyncio.run(main())
    done(f"ledger {ledger} is back, and stays until it is deleted again")


@app.command()
def purge(
    ledger: Annotated[int | None, typer.Argument(min=0, max=MAX_ID, help="Ledger id.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All deleted ledgers.")] = False,
    topic: Annotated[str | None, typer.Option(help="All deleted ledgers of this topic.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """Give up deleted ledgers before their grace period is over, so that bookies delete their entries now.

    They cannot be brought back afterwards. Bookies with a full disk delete the entries within two minutes, others within
    `storage.gc_interval_s` and `storage.gc_confirm_s`.
    """
    if [ledger is not None, every, topic is not None].count(True) != 1:
        raise typer.BadParameter("name one ledger, or a topic with --topic, or give --all")

    async def find() -> list[dict[str, Any]]:
        async with ledger_source(admin_url, metadata) as source:
            listed, _ = await _all(source, deleted=True)
            return [view for view in listed if ledger in (None, view["ledger"]["ledger_id"])]

    found = [view["ledger"] for view in asyncio.run(find()) if _is_wanted(view["ledger"], topic, None, None)]
    if not found:
        done("there is no such deleted ledger")
        raise typer.Exit(1)
    size = sum((record["length_bytes"] or 0) * record["write_quorum"] for record in found)
    what = f"{len(found)} deleted {'ledger' if len(found) == 1 else 'ledgers'} with {shown_bytes(size)} on bookies"
    if not yes:
        typer.confirm(f"Give up {what}? Their content cannot be brought back.", abort=True)

    async def give_up() -> int:
        async with ledger_source(admin_url, metadata) as source:
            gone = 0
            for record in found:
                try:
                    await source.purge(record["ledger_id"])
                except NoSuchLedgerHereError:  # brought back or purged since it was listed
                    gone += 1
            return gone

    gone = asyncio.run(give_up())
    done(f"gave up {what}" + (f"; {gone} of them were brought back or purged meanwhile" if gone else ""))


@bookies_app.command("list")
def list_bookies(as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL, metadata: Metadata = None) -> None:
    """List bookies: those that run, and those that are down but known to metadata.

    The ledgers, bytes and missing bytes are from the auditor's last walk over all ledgers. The use of the data disk is what
    a bookie with `report_free_space` last reported.
    """

    async def main() -> tuple[list[dict[str, Any]], bool]:
        async with ledger_source(admin_url, metadata) as source:
            return await source.bookies(), await source.repair_is_off()

    found, is_off = asyncio.run(main())
    if as_json:
        print_json(found)
        return
    if is_off:
        done("automatic repair is off: cepheid repair on")
    rows = [
        (
            bookie["bookie_id"],
            bookie["state"] + (f", {bookie['draining']}" if bookie.get("draining") else ""),
            bookie.get("rack") or "-",
            _shown(bookie.get("ledgers")),
            shown_bytes(bookie.get("bytes")),
            shown_bytes(bookie.get("short_bytes")),
            _disk_used(bookie.get("free_bytes"), bookie.get("total_bytes")),
            bookie["addresses"].get("grpc") or bookie["addresses"].get("grpc+tls", "-"),
            bookie["addresses"].get("http") or bookie["addresses"].get("https", "-"),
            f"ledgers below {bookie['limbo_below']}" if bookie["limbo_below"] else "-",
        )
        for bookie in found
    ]
    print_table(("bookie", "state", "rack", "ledgers", "bytes", "short", "disk used", "grpc", "http", "in limbo"), rows)


def _disk_used(free_bytes: int | None, total_bytes: int | None) -> str:
    if free_bytes is None or not total_bytes:
        return "-"
    return f"{100 * (total_bytes - free_bytes) // total_bytes}% of {shown_bytes(total_bytes)}"


def _shown(count: int | None) -> str:
    return "-" if count is None else str(count)


async def _all(source: LedgerSource, *, deleted: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the views of all ledgers, and of those with an unreadable record."""
    found: list[dict[str, Any]] = []
    damaged: list[dict[str, Any]] = []
    above: int | None = -1
    while above is not None:
        page = await source.page(above, deleted=deleted)
        found += page["ledgers"]
        damaged += page.get("damaged", [])  # a broker of an older release returns an error instead
        above = page["next"]
    return found, damaged


def _is_wanted(record: dict[str, Any], topic: str | None, state: str | None, bookie: str | None) -> bool:
    if topic is not None:
        from cepheid_wire import TopicName

        if record["custom"].get("topic") != str(TopicName.parse(topic)):
            return False
    if state is not None and record["state"] != state.upper():
        return False
    return bookie is None or any(bookie in fragment["ensemble"] for fragment in record["fragments"])


def _row(record: dict[str, Any]) -> list[str]:
    closed = record["state"] == "CLOSED"
    custom = record["custom"]
    owner = custom.get("topic", "-") + (f" ({custom['use']})" if custom.get("use", "entries") != "entries" else "")
    return [
        str(record["ledger_id"]),
        record["state"],
        str(record["last_entry_id"] + 1) if closed else "-",
        str(record["length_bytes"]) if closed else "-",
        f"{record['ensemble_size']}/{record['write_quorum']}/{record['ack_quorum']}",
        str(len(record["fragments"])),
        shown_time(record["created_at_ms"]),
        owner,
    ]
