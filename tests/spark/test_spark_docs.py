"""What docs/spark.md shows, run as it stands: Python blocks in one session, `cepheid read` with its output; and its tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_scan.columns import ENTRY_COLUMNS, MESSAGE_COLUMNS
from cepheid_spark.options import OPTIONS
from cepheid_testkit import ProcessCluster

PAGE = (Path(__file__).parents[2] / "docs/spark.md").read_text()
BLOCKS = re.findall(r"```(python|console)\n(.*?)```", PAGE, flags=re.DOTALL)
URL = "pulsar://127.0.0.1:6650"


@pytest.fixture(scope="module")
def documented(spark: SparkSession) -> Iterator[ProcessCluster]:
    """A server of its own: the page's topics and ids are those of a new one."""
    with ProcessCluster() as cluster:
        yield cluster
    spark.sql("DROP TABLE IF EXISTS visits_table")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_page_runs(
    spark: SparkSession, documented: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) > 8
    for language, block in BLOCKS:
        text = block.replace(URL, documented.service_url)
        if language == "python":
            exec(compile(text, "docs/spark.md", "exec"), names)
        else:
            run_console(text)
    spark.streams.removeListener(names["listener"])
    names["client"].close()


def run_console(text: str) -> None:
    """Each `$ cepheid …` line, and what it prints up to the next."""
    for command, shown in re.findall(r"^\$ cepheid (.*)\n((?:[^$].*\n?)*)", text, flags=re.MULTILINE):
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        assert [line.split() for line in result.output.splitlines()] == [line.split() for line in shown.splitlines()], command


def test_the_table_of_options_has_each_option_once() -> None:
    table = PAGE.partition("## Options")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(OPTIONS)


def test_every_column_is_named() -> None:
    rows = PAGE.partition("## Rows")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", rows))
    assert named >= set(MESSAGE_COLUMNS) | set(ENTRY_COLUMNS)
