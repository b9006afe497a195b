"""`cepheid bookie-shell`: inspect the directories of a stopped bookie, and rebuild a lost index.

Every command locks the directory like a bookie, and none but `rebuild-index` changes anything in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cepheid_cli.admin.common import done, print_json, print_lines, print_table, sub_app
from cepheid_cli.admin.units import counted, shown_bytes, shown_time
from cepheid_cli.ledgers import MAX_ID
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_bookie.directory_report import EntryPlace, KeptLog, LedgerUse, LogReport, SegmentReport
    from cepheid_bookie.index_rebuild import RebuildReport
    from cepheid_bookie.journal_scan import FoundRecord, JournalDamage
    from cepheid_bookie.settings import StorageSettings
    from cepheid_bookie.stopped_bookie import StoppedBookie
    from cepheid_cli.ledger_owners import LedgerOwners

app = sub_app("bookie-shell", "Inspect the directories of a stopped bookie (docs/operations.md).")

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="CEPHEID_BOOKIE_DATA_DIR", help="Data directory of the bookie; DATA/bookie-1 of a standalone server."
    ),
]
Journal = Annotated[
    Path | None,
    typer.Option("--journal", envvar="CEPHEID_BOOKIE_JOURNAL_DIR", help="Directory of the journal. Default: the data directory"),
]
STORE_HELP = "zk://host:port, or rocksdb:DIRECTORY/metadata of a standalone server that is stopped"
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Metadata store, to name topics: {STORE_HELP}."),
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ShellError(CepheidError):
    """A command of the shell cannot do what was requested."""


class IndexIsSoundError(CepheidError):
    """The index is readable, so there is no reason to rebuild it."""

    hint: ClassVar[str] = (
        "a rebuilt index forgets fences and deletions, and the bookie accepts nothing more for its old ledgers: --force"
    )


@app.command()
def files(data: Data, journal: Journal = None, as_json: JsonLines = False) -> None:
    """List journal segments, entry logs and the index: size, format, content, and how much of it is live.

    Example: cepheid bookie-shell files --data /var/lib/bookie
    """
    from cepheid_bookie.directory_report import report_files

    with _stopped(data, journal) as bookie:
        found = report_files(bookie)
    if as_json:
        print_json(asdict(found))
        return
    rows = [_segment_row(segment) for segment in found.journal]
    rows += [_log_row(log) for log in found.logs]
    index = found.index
    what = "-" if index.blocks is None else counted(index.blocks, "block")
    if index.ledgers is not None:
        what += f", {counted(index.ledgers, 'ledger')}" + (f", {index.deleted} of them deleted" if index.deleted else "")
    rows.append([index.file, shown_bytes(index.size_bytes), "-", what, "-", index.problem])
    rows += [[other.file, shown_bytes(other.size_bytes), "-", "not used by the bookie", "-", ""] for other in found.others]
    print_table(("file", "size", "format", "content", "live", "problem"), rows)
    if found.journal_problem:
        print_lines([f"journal  {found.journal_problem}"])
    mark = found.mark
    at = (
        f"batch {mark.sequence}: segment {mark.segment_id:016x}, offset {mark.offset}"
        if mark.segment_id is not None
        else mark.problem
    )
    print_lines([f"log mark  {at}"])


@app.command(name="journal")
def read_journal(
    segment: Annotated[str, typer.Argument(metavar="FILE", help="Journal segment: its file name, or its number in hexadecimal.")],
    data: Data,
    journal: Journal = None,
    start: Annotated[int, typer.Option("--from", min=0, help="Begin at the first batch at or after this offset.")] = 0,
    as_json: JsonLines = False,
) -> None:
    """List the records of a journal segment. Damage is shown with its offset, and records after it are listed.

    Example: cepheid bookie-shell journal 0000000000000001.journal --data /var/lib/bookie

    Exit code 0: nothing is damaged, except a batch that a crash cut off before it was acknowledged. 1: something is.
    """
    from cepheid_bookie.journal_scan import SegmentScan

    segment_id = _hexadecimal(Path(segment).name.removesuffix(".journal"), "a journal segment", "0000000000000001.journal")
    with _stopped(data, journal) as bookie:
        file = bookie.open_segment(segment_id)
        try:
            views = [_record_view(item) for item in SegmentScan(file, segment_id).contents(start)]  # without the entries' bytes
        finally:
            file.close()
    if as_json:
        print_json(views)
    else:
        columns = ("offset", "bytes", "batch", "record", "ledger", "entries", "what")
        print_table(columns, map(_record_row, views))
    if any("damage" in view and not view["torn"] for view in views):
        raise typer.Exit(1)


@app.command()
def log(
    log_id: Annotated[str, typer.Argument(metavar="ID", help="Entry log: its file name, or its id in hexadecimal.")],
    data: Data,
    journal: Journal = None,
    as_json: JsonLines = False,
) -> None:
    """List the blocks of an entry log: their entries, whether their checksums match, and whether the index refers to them.

    Example: cepheid bookie-shell log 0000002a --data /var/lib/bookie

    Exit code 0: every block is intact. 1: damage was found, or uncertain blocks after damage.
    """
    from cepheid_bookie.entry_log_scan import LogBlock, scan_log
    from cepheid_bookie.errors import IndexCorruptError

    wanted = _log_id(log_id)
    with _stopped(data, journal) as bookie:
        file = bookie.open_log(wanted)
        try:
            items = list(scan_log(file, wanted))
        finally:
            file.close()
        try:
            used = {block.offset: block for block in bookie.blocks() if block.log_id == wanted}
        except IndexCorruptError as error:
            used = None
            done(f"cepheid: {error.args[0]}")
    rows, views = [], []
    for item in items:
        if isinstance(item, LogBlock):
            ref, state = item.ref, "ok" if item.intact and not item.searched else "not certain" if item.intact else "damaged"
            refers = None if used is None else used.pop(ref.offset, None) == ref
            views.append({**ref._asdict(), "checksum": state, "in_index": refers})
            entries = f"{ref.first_entry_id}..{ref.last_entry_id}"
            in_index = "unknown" if refers is None else "yes" if refers else "no"
            rows.append([str(ref.offset), str(ref.length), str(ref.ledger_id), entries, state, in_index, ""])
        else:
            views.append({"offset": item.offset, "length": item.end - item.offset, "damage": item.reason})
            rows.append([str(item.offset), str(item.end - item.offset), "-", "-", "damaged", "-", item.reason])
    for lost in sorted((used or {}).values(), key=lambda block: block.offset):
        reason = "the index refers to a missing block"
        views.append({**lost._asdict(), "damage": reason})
        entries = f"{lost.first_entry_id}..{lost.last_entry_id}"
        rows.append([str(lost.offset), str(lost.length), str(lost.ledger_id), entries, "missing", "yes", reason])
    if as_json:
        print_json(views)
    else:
        print_table(("offset", "bytes", "ledger", "entries", "checksum", "in index", "problem"), rows)
    if any(row[4] != "ok" for row in rows):
        raise typer.Exit(1)


@app.command()
def entry(
    ledger: Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Ledger id.")],
    entry_id: Annotated[int, typer.Argument(metavar="ENTRY", min=0, max=MAX_ID, help="Entry id.")],
    data: Data,
    journal: Journal = None,
    show: Annotated[bool, typer.Option("--bytes", help="Print the entry in hexadecimal.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the entry's bytes, with its header of 36 bytes, to this new file.")
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Locate an entry: its entry log and journal segment, and whether these copies are intact.

    Example: cepheid bookie-shell entry 7 42 --data /var/lib/bookie --bytes

    Exit code 1: the bookie does not hold the entry, or no copy of it is intact.
    """
    from cepheid_bookie.directory_report import find_entry

    with _stopped(data, journal) as bookie:
        places, problems = find_entry(bookie, ledger, entry_id)
    for problem in problems:
        done(f"cepheid: {problem}")
    sound = next((place.entry for place in places if place.entry is not None), None)
    if as_json:
        print_json([_place_view(place) for place in places])
    else:
        columns = ("file", "offset", "bytes", "entries", "copy")
        print_table(columns, [_place_row(place) for place in places])
        if show and sound is not None:
            print_lines(_hex_lines(sound))
    if sound is None:
        raise typer.Exit(1)
    if save is not None:
        _write_new(save, sound)
        done(f"{save}: {len(sound)} bytes")


@app.command()
def ledgers(
    data: Data,
    journal: Journal = None,
    metadata: Metadata = None,
    by_topic: Annotated[bool, typer.Option("--by-topic", help="Totals by topic; needs --metadata.")] = False,
    as_json: JsonLines = False,
) -> None:
    """List disk use by ledger, largest first, with --metadata including their owners.

    Example: cepheid bookie-shell ledgers --data /var/lib/bookie --metadata zk://zk1:2181 --by-topic

    Bytes of a deleted ledger stay on the disk as long as its entry logs: cepheid bookie-shell why-not-freed.
    """
    if by_topic and metadata is None:
        raise typer.BadParameter("--by-topic needs --metadata: bookies do not know topics")
    from cepheid_bookie.directory_report import report_ledgers

    with _stopped(data, journal) as bookie:
        found, owners = report_ledgers(bookie), _owners(metadata)
    found.sort(key=lambda use: use.log_bytes + use.journal_bytes, reverse=True)
    if by_topic:
        assert owners is not None
        _print_topics(found, owners, as_json=as_json)
        return
    if as_json:
        print_json([asdict(use) | ({} if owners is None else {"owner": owners.of(use.ledger_id)}) for use in found])
        return
    columns = ["ledger", "entries", "in logs", "in journal", "logs", "state"]
    rows = [_ledger_row(use) for use in found]
    if owners is not None:
        columns.append("owner")
        rows = [[*row, owners.of(use.ledger_id)] for row, use in zip(rows, found, strict=True)]
    print_table(columns, rows)


@app.command(name="why-not-freed")
def why_not_freed(
    data: Data,
    log_id: Annotated[str | None, typer.Argument(metavar="ID", help="Only this entry log: its file name, or its id.")] = None,
    journal: Journal = None,
    metadata: Metadata = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings of the bookie.")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="Settings are those of `cepheid standalone`.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Show which ledgers keep each entry log on the disk; with --metadata their owners, and until when.

    Example: cepheid bookie-shell why-not-freed 0000002a --data /var/lib/bookie --metadata zk://zk1:2181

    An entry log is deleted when the index refers to nothing in it. The logs with the smallest live share come first. The column
    compaction shows when the running bookie copies the live rest of a log and deletes the log, with the settings of --config and
    of the environment (CEPHEID_BOOKIE_STORAGE__...).
    """
    from cepheid_bookie.directory_report import compaction_of, report_kept_logs

    settings = _storage_settings(config, standalone=standalone)

    with _stopped(data, journal) as bookie:
        kept = report_kept_logs(bookie, None if log_id is None else _log_id(log_id))
        bookie_id = _bookie_id(bookie)
        owners = _owners(metadata)
    kept.sort(key=lambda one: (one.live_share, one.log_id))
    if as_json:
        print_json([_kept_view(one, owners, bookie_id) | {"compaction": compaction_of(one, settings)} for one in kept])
        return
    rows = []
    for one in kept:
        log = [one.file, shown_bytes(one.size_bytes), f"{one.live_share:.1%}", compaction_of(one, settings)]
        if not one.ledgers:
            rows.append([*log, "-", "-", "nothing: deleted at the next collection"])
        for ledger_id, live_bytes in sorted(one.ledgers.items(), key=lambda item: -item[1]):
            why = "not known without --metadata" if owners is None else owners.why_kept(ledger_id, bookie_id)
            rows.append([*log, str(ledger_id), shown_bytes(live_bytes), why])
    print_table(("log", "size", "live", "compaction", "ledger", "live bytes", "kept by"), rows)


def _storage_settings(config: Path | None, *, standalone: bool) -> StorageSettings:
    """Return the storage settings with which the bookie would start now. Raises SettingsError."""
    from cepheid_cli.settings_loader import load_settings

    if standalone:
        from cepheid_broker.settings import RENAMED
        from cepheid_broker.standalone import StandaloneSettings

        return load_settings(
            StandaloneSettings, flags={}, environment_prefix="CEPHEID_STANDALONE_", file=config, renamed=RENAMED
        ).storage
    from cepheid_cli.bookie import NOT_KEPT
    from cepheid_recovery.roles import BookieNodeSettings

    flags = {"metadata": "not asked"}  # it has no default, and is not used here
    return load_settings(
        BookieNodeSettings, flags=flags, environment_prefix="CEPHEID_BOOKIE_", file=config, refused=NOT_KEPT
    ).storage


@app.command()
def cookie(data: Data, journal: Journal = None, metadata: Metadata = None, as_json: JsonLines = False) -> None:
    """Show to which bookie these directories belong: the cookie in each, the stamp of the index, and the record in metadata.

    Example: cepheid bookie-shell cookie --data /var/lib/bookie --metadata zk://zk1:2181

    Exit code 0: they agree. 1: they do not, and the bookie would refuse to start; or one of them cannot be read.
    """
    from cepheid_bookie.cookie import Cookie

    with _stopped(data, journal) as bookie:
        cookies, lives = bookie.cookies(), bookie.lives()
        stamp, stamp_problem = bookie.stamp()
        bookie_id = _bookie_id(bookie)
    rows = []
    for where, found in cookies.items():
        life = str(lives[where])
        if isinstance(found, Cookie):
            rows.append([where, found.bookie_id, found.cluster_id, found.incarnation, str(found.limbo_below or "-"), life])
        else:
            rows.append([where, found or "there is no cookie", "-", "-", "-", life])
    rows.append(["the index", stamp_problem or "-", "-", stamp or "-", "-", "-"])
    incarnations = {row[3] for row in rows}
    if metadata is not None and bookie_id is not None:
        rows.append(asyncio.run(_recorded_row(metadata, bookie_id)))
        incarnations.add(rows[-1][3])
    columns = ("where", "bookie", "cluster", "incarnation", "limbo below", "life")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)
    if len(incarnations) > 1 or "-" in incarnations:
        raise typer.Exit(1)


@app.command(name="rebuild-index")
def rebuild_index(
    data: Data,
    metadata: Annotated[str, typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Metadata store: {STORE_HELP}.")],
    journal: Journal = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Also index blocks found only by a search after damage; clients may have planted them."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Rebuild the index although the old one is readable.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Rebuild a lost or damaged index from the entry logs. The old one is kept as index.damaged-1.

    Example: cepheid bookie-shell rebuild-index --data /var/lib/bookie --metadata zk://zk1:2181

    The logs do not contain fences and deletions. So the bookie accepts nothing more for existing ledgers, except from recovery
    and repair. Entries of these ledgers that it does not find are unknown. Deleted ledgers are collected again.
    """
    from cepheid_bookie.errors import IndexCorruptError
    from cepheid_bookie.index_rebuild import IndexRebuild
    from cepheid_cli.ledger_owners import bookie_records, read_master_keys
    from cepheid_metadata import LedgerIds
    from cepheid_ports import make_new_files_private

    make_new_files_private()
    with _stopped(data, journal, to_change=True) as bookie:
        try:
            blocks = sum(1 for _ in bookie.blocks())
            for ledger_id, _ in bookie.records():  # these, and the summaries, may be damaged as well
                bookie.require_index().last_entry_id(ledger_id)
        except IndexCorruptError as error:
            done(f"cepheid: {error.args[0]}")
        else:
            if not force and bookie.stamp()[0] is not None:
                raise IndexIsSoundError(f"the index of {data} can be read: it has {counted(blocks, 'block')}")
        rebuild = IndexRebuild(bookie)

        async def before() -> Mapping[int, bytes]:
            async with bookie_records(metadata, data, journal) as (store, records):
                await rebuild.check(records)
                return await read_master_keys(store)

        async def after() -> None:
            async with bookie_records(metadata, data, journal) as (store, records):
                await rebuild.begin_limbo(records, LedgerIds(store).take)

        keys = asyncio.run(before())
        try:
            report = rebuild.build(keys, accept_searched=search)
            if not as_json:
                print_lines(_rebuild_lines(report, search))
            if not yes and not typer.confirm("Use this index?"):
                raise typer.Abort
            asyncio.run(after())
        except BaseException:  # also Ctrl-C and Ctrl-D
            rebuild.discard()
            raise
        rebuild.swap()
    if as_json:
        print_json(asdict(report))
        return
    old = f", the old one is {report.old_index}" if report.old_index else ""
    done(f"the index is in place{old}; ledgers below {report.limbo_below} are in limbo")
    done("start the bookie; then: cepheid ledgers verify --all")


@contextmanager
def _stopped(data: Path, journal: Path | None, *, to_change: bool = False) -> Iterator[StoppedBookie]:
    """Open the locked directories. Errors of the disk become a ShellError."""
    from cepheid_bookie.stopped_bookie import StoppedBookie

    try:
        with StoppedBookie(data, journal, to_change=to_change) as bookie:
            yield bookie
    except OSError as error:
        raise ShellError(f"{error.filename or data}: {error.strerror or error}; check the disk and the permissions") from error


def _bookie_id(bookie: StoppedBookie) -> str | None:
    from cepheid_bookie.cookie import Cookie

    return next((found.bookie_id for found in bookie.cookies().values() if isinstance(found, Cookie)), None)


def _owners(metadata: str | None) -> LedgerOwners | None:
    if metadata is None:
        return None
    from cepheid_cli.ledger_owners import read_owners

    return asyncio.run(read_owners(metadata))


async def _recorded_row(metadata: str, bookie_id: str) -> list[str]:
    from cepheid_cli.ledger_owners import recorded_cookie

    found, life = await recorded_cookie(metadata, bookie_id)
    if found is None:
        return ["metadata", f"knows no {bookie_id}", "-", "-", "-", "-"]
    return ["metadata", found.bookie_id, found.cluster_id, found.incarnation, str(found.limbo_below or "-"), str(life)]


def _hexadecimal(text: str, what: str, example: str) -> int:
    try:
        if not text or len(text) > 16 or text.strip("0123456789abcdefABCDEF"):
            raise ValueError
        return int(text, 16)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not the name of {what}: write it as {example}") from None


def _log_id(text: str) -> int:
    return _hexadecimal(Path(text).name.removesuffix(".log"), "an entry log", "0000002a.log or 2a")


def _segment_row(segment: SegmentReport) -> list[str]:
    batches = "no batches" if segment.last_sequence is None else f"batches {segment.first_sequence}..{segment.last_sequence}"
    needed = "-" if segment.needed is None else "needed" if segment.needed else "below the mark"
    version = "-" if segment.format_version is None else str(segment.format_version)
    return [segment.file, shown_bytes(segment.size_bytes), version, batches, needed, segment.problem]


def _log_row(log: LogReport) -> list[str]:
    version = "-" if log.format_version is None else str(log.format_version)
    what = "-" if log.blocks is None else f"{counted(log.blocks, 'block')} of {counted(log.ledgers or 0, 'ledger')}"
    live = "unknown" if log.live_share is None else f"{log.live_share:.1%}"
    return [log.file, shown_bytes(log.size_bytes), version, what, live, log.problem]


def _record_view(item: FoundRecord | JournalDamage) -> dict[str, Any]:
    from cepheid_bookie.journal_format import EntriesRecord
    from cepheid_bookie.journal_scan import FoundRecord

    if not isinstance(item, FoundRecord):
        return {"offset": item.offset, "length": item.end - item.offset, "damage": item.reason, "torn": item.torn}
    view: dict[str, Any] = {"offset": item.offset, "length": item.length, "batch": item.sequence}
    if isinstance(item.record, EntriesRecord):
        group = item.record.group
        entries = {"ledger_id": group.ledger_id, "first_entry_id": group.first_entry_id, "last_entry_id": group.last_entry_id}
        return view | {"record": "entries"} | entries
    record = item.record.record
    return view | {
        "record": "ledger",
        "ledger_id": item.record.ledger_id,
        "fenced": record.fenced,
        "explicit_lac": record.explicit_lac,
        "deleted": record.deleted,
    }


def _record_row(view: Mapping[str, Any]) -> list[str]:
    start = [str(view["offset"]), str(view["length"])]
    if "damage" in view:
        return [*start, "-", "torn" if view["torn"] else "damaged", "-", "-", view["damage"]]
    middle = [str(view["batch"]), view["record"], str(view["ledger_id"])]
    if view["record"] == "entries":
        return [*start, *middle, f"{view['first_entry_id']}..{view['last_entry_id']}", ""]
    words = [word for word, is_so in (("fenced", view["fenced"]), ("deleted", view["deleted"])) if is_so]
    words += [f"explicit LAC {view['explicit_lac']}"] if view["explicit_lac"] >= 0 else []
    return [*start, *middle, "-", ", ".join(words) or "first contact"]


def _place_view(place: EntryPlace) -> dict[str, Any]:
    view = asdict(place)
    view["entry"] = None if place.entry is None else place.entry.hex()
    return view


def _place_row(place: EntryPlace) -> list[str]:
    entries = f"{place.first_entry_id}..{place.last_entry_id}"
    return [place.file, str(place.offset), str(place.length), entries, place.problem or "ok"]


def _ledger_row(use: LedgerUse) -> list[str]:
    state = f"deleted {shown_time(use.deleted_at_ms)}" if use.deleted_at_ms is not None else "fenced" if use.fenced else "-"
    entries = "-" if use.first_entry_id is None else f"{use.first_entry_id}..{use.last_entry_id}"
    logs = ", ".join(use.logs[:3]) + (f" and {len(use.logs) - 3} more" if len(use.logs) > 3 else "")
    return [str(use.ledger_id), entries, shown_bytes(use.log_bytes), shown_bytes(use.journal_bytes), logs or "-", state]


def _print_topics(found: list[LedgerUse], owners: LedgerOwners, *, as_json: bool) -> None:
    sums: dict[str, list[int]] = {}
    for use in found:
        total = sums.setdefault(owners.of(use.ledger_id), [0, 0, 0])
        for place, value in enumerate((1, use.log_bytes, use.journal_bytes)):
            total[place] += value
    ordered = sorted(sums.items(), key=lambda item: -item[1][1] - item[1][2])
    if as_json:
        print_json(
            [{"owner": owner, "ledgers": n, "log_bytes": logs, "journal_bytes": above} for owner, (n, logs, above) in ordered]
        )
        return
    rows = [[owner, str(n), shown_bytes(logs), shown_bytes(above)] for owner, (n, logs, above) in ordered]
    print_table(("owner", "ledgers", "in logs", "in journal"), rows)


def _kept_view(one: KeptLog, owners: LedgerOwners | None, bookie_id: str | None) -> dict[str, Any]:
    kept = [
        {"ledger_id": ledger_id, "live_bytes": live} | ({} if owners is None else {"why": owners.why_kept(ledger_id, bookie_id)})
        for ledger_id, live in one.ledgers.items()
    ]
    return {"file": one.file, "size_bytes": one.size_bytes, "live_share": one.live_share, "ledgers": kept}


def _rebuild_lines(report: RebuildReport, search: bool) -> list[str]:
    lines = [
        f"found {counted(report.blocks, 'block')} of {counted(report.ledgers, 'ledger')} in {counted(report.logs, 'entry log')}"
    ]
    lines += [f"  {problem}" for problem in report.problems]
    if report.searched_blocks:
        what = "accepted" if search else "left out; --search accepts them"
        lines.append(f"{counted(report.searched_blocks, 'block')} found by a search after damage: {what}")
    for name in report.unindexed_logs:
        lines.append(
            f"nothing of {name} is in the index, so the bookie will delete it: save a copy if no other bookie has its entries"
        )
    if report.ledgers_without_key:
        ids = ", ".join(map(str, report.ledgers_without_key[:10]))
        lines.append(f"not in metadata: {counted(len(report.ledgers_without_key), 'ledger')} ({ids}); the bookie collects them")
    return lines


def _hex_lines(data: bytes) -> list[str]:
    rows = [data[start : start + 16] for start in range(0, len(data), 16)]
    return [
        f"{16 * number:08x}  {row.hex(' '):<47}  {''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}"
        for number, row in enumerate(rows)
    ]


def _write_new(path: Path, content: bytes) -> None:
    from cepheid_ports import make_new_files_private

    make_new_files_private()  # like the directory of the bookie
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise ShellError(f"{path} exists; name a new file") from None
    except OSError as error:
        raise ShellError(f"{path} cannot be written: {error.strerror}") from error
