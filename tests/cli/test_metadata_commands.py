"""`cepheid metadata`: the file of a backup, and the comparison of metadata with what bookies hold."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_bookie.health_server import HealthServer, Page
from cepheid_cli.app import app
from cepheid_cli.backup_file import BackupFileError, check_file, entries_of, save_backup
from cepheid_cli.metadata_report import MetadataReport, compare, ledgers_of, report_lines
from cepheid_metadata import MemoryStore, MemoryTree, found_cluster
from cepheid_metadata.backup import MetadataBackup
from cepheid_metadata.backup_format import BackupDamagedError
from cepheid_ports import CepheidError, Ports


async def pieces(count: int | None = None) -> AsyncIterator[bytes]:
    store = MemoryStore(MemoryTree())
    await found_cluster(store, "test", Ports())
    lines = [line async for line in MetadataBackup(store, Ports()).lines()]
    for line in lines[:count]:
        yield line


async def test_a_file_gets_its_name_when_it_is_complete_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "metadata.backup"
    summary = await save_backup(file, pieces())
    assert (summary.cluster, summary.keys) == ("test", 2)
    assert check_file(file) == summary
    assert [entry.key for entry in entries_of(file)] == ["/cluster", "/upgrade/format"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    with pytest.raises(BackupDamagedError, match="ends after line 2"):
        await save_backup(file, pieces(2))
    assert os.listdir(tmp_path) == ["metadata.backup"]
    assert file.read_bytes() == before, "the older backup stays"


async def test_a_backup_that_begins_while_another_one_writes_disturbs_neither(tmp_path: Path) -> None:
    file = tmp_path / "metadata.backup"

    async def with_another_one_in_it() -> AsyncIterator[bytes]:
        async for piece in pieces():
            yield piece
            await save_backup(file, pieces())

    assert await save_backup(file, with_another_one_in_it()) == check_file(file)
    assert os.listdir(tmp_path) == ["metadata.backup"]


async def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackupFileError, match=r"cannot be written to .*nowhere/file: No such file"):
        await save_backup(tmp_path / "nowhere" / "file", pieces())
    with pytest.raises(BackupFileError, match=r"the backup .*/file cannot be read: No such file"):
        check_file(tmp_path / "file")


def test_a_backup_of_a_store_that_does_not_exist_creates_none(tmp_path: Path) -> None:
    words = ["metadata", "backup", str(tmp_path / "file"), "--metadata", f"rocksdb:{tmp_path / 'typo' / 'metadata'}"]
    with pytest.raises(CepheidError, match=r"there is no metadata store in .*/typo/metadata"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert os.listdir(tmp_path) == []


def test_a_backup_is_restored_into_an_embedded_store_once(tmp_path: Path) -> None:
    file, url = tmp_path / "file", f"rocksdb:{tmp_path / 'metadata'}"
    asyncio.run(save_backup(file, pieces()))

    def cepheid(*words: str) -> str:
        result = CliRunner().invoke(app, ["metadata", *words, "--metadata", url])
        if result.exception is not None:
            raise result.exception
        return result.output

    assert "start all bookies, then brokers" in cepheid("restore", str(file))
    with pytest.raises(CepheidError, match="the store holds the cluster 'test'"):
        cepheid("restore", str(file))
    cepheid("backup", str(tmp_path / "second"))
    assert {entry.key for entry in entries_of(tmp_path / "second")} == {"/cluster", "/ledgers/ids", "/upgrade/format"}
    assert "0 ledgers not in metadata" in cepheid("confirm", "--yes")
    with pytest.raises(CepheidError, match="metadata was not restored from a backup, or that is confirmed already"):
        cepheid("confirm", "--yes")


def record(ledger_id: int, *bookies: str, state: str = "CLOSED", last: int | None = 9) -> dict[str, Any]:
    fragments = [{"first_entry_id": 0, "ensemble": bookies}]
    return {"ledger_id": ledger_id, "state": state, "last_entry_id": last, "write_quorum": len(bookies), "fragments": fragments}


def test_the_report_names_what_metadata_lacks_and_what_is_not_where_it_says() -> None:
    living = [
        record(1, "b1", "b2"),  # as it should be
        record(2, "b1", "b2"),  # trimmed after the backup
        record(3, "b1", "b2"),  # moved to b3 after the backup
        record(4, "b4"),  # its only bookie says nothing
        record(5, "b1", last=-1),  # empty
        record(6, "b1", state="OPEN", last=None),
        record(10, "b1", "b2"),  # b3 has a copy that nobody needs
        record(11, "b1", "b4"),  # b4 was lost before the metadata was, and b2 took its copy
    ]
    held = {"b1": [1, 7, 8, 10, 11], "b2": [1, 7, 10, 11], "b3": [3, 9, 10]}
    report = compare(held, {"b4": "it is down"}, living, [8])
    assert report.unknown == {7: ["b1", "b2"], 9: ["b3"]}
    assert report.missing == {2: ["b1", "b2"]}
    assert report.moved == {3: ["b3"], 11: ["b2"]}
    assert report_lines(report) == [
        "ledger 7: held by b1, b2, not in metadata",
        "ledger 9: held by b3, not in metadata",
        "ledger 2: in metadata, but neither b1 nor b2 nor another bookie holds it",
        "ledger 3: held by b3, which metadata does not name for it",
        "ledger 11: held by b2, which metadata does not name for it",
        "b4 did not say what it holds: it is down",
        "2 ledgers not in metadata, 1 ledger without a copy, 2 ledgers at other bookies, 1 bookie without an answer",
    ]


@pytest.mark.parametrize(
    ("write_quorum", "last_fragment"),
    [
        (2, {"first_entry_id": 20, "ensemble": ["b1", "b5"]}),  # empty: its writer closed the ledger before another entry
        (2, {"first_entry_id": 20, "ensemble": ["b5", "b1"]}),
        (1, {"first_entry_id": 19, "ensemble": ["b5", "b1"]}),  # one entry, which belongs to b1
    ],
)
def test_a_bookie_that_should_hold_no_entry_of_a_fragment_lacks_no_copy(write_quorum: int, last_fragment: dict[str, Any]) -> None:
    fragments = [{"first_entry_id": 0, "ensemble": ["b1", "b3"]}, last_fragment]
    ledger = {"ledger_id": 2, "state": "CLOSED", "last_entry_id": 19, "write_quorum": write_quorum, "fragments": fragments}
    assert compare({"b1": [2], "b2": [2], "b3": [2], "b5": []}, {}, [ledger], []).moved == {}


def test_a_confirmation_is_refused_while_copies_are_not_where_metadata_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, url = tmp_path / "file", f"rocksdb:{tmp_path / 'metadata'}"
    asyncio.run(save_backup(file, pieces()))
    CliRunner().invoke(app, ["metadata", "restore", str(file), "--metadata", url])

    async def moved(*_: object) -> MetadataReport:
        return MetadataReport(moved={3: ["b3"]})

    monkeypatch.setattr("cepheid_cli.metadata._report", moved)
    words = ["metadata", "confirm", "--yes", "--metadata", url]
    refused = CliRunner().invoke(app, words)
    assert "bookies would drop copies of 1 ledger (3) that repair moved" in str(refused.exception)
    assert CliRunner().invoke(app, [*words, "--drop-moved"]).exit_code == 0


async def test_a_bookie_process_is_asked_page_after_page_at_its_http_port() -> None:
    def page(query: Mapping[str, str]) -> Page:
        above = int(query["above"])
        return Page(json.dumps({"ledgers": [above + 2], "next": above + 2 if above < 5 else None}))

    server = HealthServer("127.0.0.1", 0, {}, {"/ledgers": page})
    await server.start()
    assert await asyncio.to_thread(ledgers_of, "b1", f"http://127.0.0.1:{server.port}", None) == [1, 3, 5, 7]
    await server.aclose()
    with pytest.raises(ValueError, match="it has no HTTP address"):
        ledgers_of("b1", None, None)
