"""`cepheid bookie-shell` reads the bookie's directory that the previous release left after SIGKILL, and makes its index again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.stopped_bookie import StoppedBookie
from cepheid_cli.bookie_shell import app
from tests.previous_release.recorded_files import STANDALONE, unpack_directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("previous") / "data"
    unpack_directory(STANDALONE, directory)
    return directory


def shell(data: Path, *words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--data", str(data / "bookie-1"), "--json"])
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def blocks(data: Path) -> set[BlockRef]:
    with StoppedBookie(data / "bookie-1") as bookie:
        return set(bookie.blocks())


def test_every_file_of_the_previous_release_is_read_without_a_problem(data: Path) -> None:
    files = shell(data, "files")
    assert [file["problem"] for file in (*files["journal"], *files["logs"], files["index"], files["mark"])] == [""] * 7
    for segment in files["journal"]:
        assert all("damage" not in record for record in shell(data, "journal", segment["file"]))
    for log in files["logs"]:
        assert {(block["checksum"], block["in_index"]) for block in shell(data, "log", log["file"])} == {("ok", True)}


def test_its_ledgers_have_topics_and_deleted_ones_an_end(data: Path) -> None:
    metadata = ("--metadata", f"rocksdb:{data / 'metadata'}")
    owners = {use["owner"] for use in shell(data, "ledgers", *metadata)}
    assert "persistent://recorded/kept/plain" in owners
    kept = [ledger["why"] for log in shell(data, "why-not-freed", *metadata) for ledger in log["ledgers"]]
    assert any(why.startswith("persistent://recorded/kept/deleted: deleted, can be brought back until ") for why in kept)


def test_its_index_is_made_again_from_its_logs(data: Path) -> None:
    before = blocks(data)
    report = shell(data, "rebuild-index", "--force", "--yes", "--metadata", f"rocksdb:{data / 'metadata'}")
    assert (report["problems"], report["ledgers_without_key"], report["old_index"]) == ([], [], "index.damaged-1")
    assert blocks(data) == before
