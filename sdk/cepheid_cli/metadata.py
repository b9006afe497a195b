"""`cepheid metadata`: back up metadata while the cluster runs, restore it into an empty store, and confirm the restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cepheid.admin.exchange import segment
from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, done, print_json, print_lines, sub_app
from cepheid_cli.admin.units import counted, shown_time
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_cli.metadata_report import MetadataReport
    from cepheid_metadata import MetadataStore
    from cepheid_metadata.backup_format import BackupSummary

app = sub_app("metadata", "Backup and restore of metadata (docs/operations.md).")

STORE_HELP = "zk://host:port, or rocksdb:DIRECTORY/metadata of a standalone server that is stopped"

File = Annotated[Path, typer.Argument(help="File of the backup.")]
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Ask the metadata store instead of a broker: {STORE_HELP}."),
]


class MovedCopiesError(CepheidError):
    """A confirmation would let bookies drop copies that are not where metadata says."""

    hint: ClassVar[str] = (
        "copy them again from the bookies that metadata names: cepheid ledgers verify --all --repair; "
        "to give up copies that only other bookies have: --drop-moved"
    )


@app.command()
def backup(file: File, admin_url: AdminUrl = DEFAULT_URL, metadata: Metadata = None) -> None:
    """Write all metadata to a file, while everything runs. The file is checked before it gets its name."""
    from cepheid_cli.backup_file import save_backup

    async def from_broker() -> AsyncIterator[bytes]:
        for piece in connect_admin(admin_url).metadata.backup():
            yield piece

    async def main() -> BackupSummary:
        if metadata is None:
            return await save_backup(file, from_broker())
        from cepheid_metadata.backup import MetadataBackup
        from cepheid_ports import Ports

        async with opened(metadata) as store:
            return await save_backup(file, MetadataBackup(store, Ports()).lines())

    done(f"{file}: {_words(asyncio.run(main()))}")


@app.command()
def check(file: File) -> None:
    """Read a backup to its end, and show its content. Nothing is changed."""
    from cepheid_cli.backup_file import check_file

    print_lines([_words(check_file(file))])


@app.command()
def restore(
    file: File, metadata: Annotated[str, typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"Empty store: {STORE_HELP}.")]
) -> None:
    """Write a backup into an empty metadata store, before any broker or bookie starts on it."""
    from cepheid_cli.backup_file import check_file, entries_of
    from cepheid_metadata.restore import restore_metadata
    from cepheid_ports import Ports

    summary = check_file(file)

    async def main() -> None:
        async with opened(metadata, must_exist=False) as store:
            await restore_metadata(store, summary, entries_of(file), Ports())

    asyncio.run(main())
    done(f"restored {_words(summary)}")
    done("start all bookies, then brokers; bookies delete nothing until `cepheid metadata confirm`")


@app.command()
def report(as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL, metadata: Metadata = None) -> None:
    """List ledgers that bookies hold but metadata does not have, and those that are not where metadata says."""
    from cepheid_cli.metadata_report import report_lines

    found = asyncio.run(_report(admin_url, metadata))
    if as_json:
        print_json(asdict(found))
    else:
        print_lines(report_lines(found))


@app.command()
def confirm(
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="A bookie that is lost for good; repeat it. Ledgers can then be created."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: ledgers that metadata lacks are collected.")] = False,
    drop_moved: Annotated[
        bool, typer.Option("--drop-moved", help="Confirm although bookies that metadata does not name hold copies that it lacks.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
    metadata: Metadata = None,
) -> None:
    """End the phase after a restore: bookies then collect ledgers that metadata does not have.

    Shows them first, and asks. With --without it only gives up bookies, so that topics can be used before the confirmation.
    """
    if without:
        for bookie in without:
            _change(admin_url, metadata, f"/cepheid/v1/metadata/without/{segment(bookie)}", partial(_give_up, bookie))
            done(f"{bookie} is given up: discard its disks, or start it before `cepheid metadata confirm`")
        return
    state = _state(admin_url, metadata)
    if (restored := state["restored"]) is not None:
        from cepheid_cli.metadata_report import report_lines

        made, at = shown_time(restored["backup_created_at_ms"]), shown_time(restored["restored_at_ms"])
        found = asyncio.run(_report(admin_url, metadata))
        print_lines([f"metadata of {made}, restored {at}", *report_lines(found)])
        if found.moved and not drop_moved:
            ids = ", ".join(map(str, list(found.moved)[:10]))
            raise MovedCopiesError(f"bookies would drop copies of {counted(len(found.moved), 'ledger')} ({ids}) that repair moved")
        if not yes and not state["missing"]:
            typer.confirm("Let bookies delete the ledgers that metadata does not have?", abort=True)
    _change(admin_url, metadata, "/cepheid/v1/metadata/confirm", _confirm)
    done("confirmed: bookies collect the ledgers that metadata does not have, after two passes")


def _words(summary: BackupSummary) -> str:
    what = f"{counted(summary.topics, 'topic')}, {counted(summary.ledgers, 'ledger')}, {counted(summary.keys, 'record')}"
    words = f"metadata of cluster {summary.cluster} ({summary.cluster_id}) of {shown_time(summary.created_at_ms)}: {what}"
    if summary.missing_ledgers:
        ids = ", ".join(map(str, summary.missing_ledgers[:20]))
        words += f"; without a record, as in the cluster itself: ledgers {ids}"
    return words


async def _report(admin_url: str, metadata: str | None) -> MetadataReport:
    from cepheid_cli.ledger_source import ledger_source
    from cepheid_cli.metadata_report import make_report

    async with ledger_source(admin_url, metadata) as source:
        return await make_report(source, admin_url if metadata is None else None)


def _state(admin_url: str, metadata: str | None) -> dict[str, Any]:
    if metadata is None:
        found: dict[str, Any] = connect_admin(admin_url).metadata.restored()
        return found

    async def main() -> dict[str, Any]:
        from cepheid_metadata.restored_metadata import restored_view

        async with opened(metadata) as store:
            return await restored_view(store)

    return asyncio.run(main())


def _change(admin_url: str, metadata: str | None, path: str, change: Callable[[MetadataStore], Coroutine[Any, Any, None]]) -> None:
    """Make a change through a broker, or in the store itself."""
    if metadata is None:
        connect_admin(admin_url).call("POST", path)
        return

    async def main() -> None:
        async with opened(metadata) as store:
            await change(store)

    asyncio.run(main())


async def _give_up(bookie: str, store: MetadataStore) -> None:
    from cepheid_metadata.restored_metadata import give_up_bookies
    from cepheid_ports import Ports

    await give_up_bookies(store, [bookie], Ports().wall_ms())


async def _confirm(store: MetadataStore) -> None:
    from cepheid_metadata.restored_metadata import confirm_restore

    await confirm_restore(store)


@asynccontextmanager
async def opened(url: str, *, must_exist: bool = True) -> AsyncIterator[MetadataStore]:
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    store = await open_store(url, Ports(), must_exist=must_exist)
    try:
        yield store
    finally:
        await store.aclose()
