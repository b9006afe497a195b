"""What docs/spark.md shows, run as it stands: Python blocks in one session, `cepheid read` with its output; and its tables."""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_decode.columns import ENTRY_COLUMNS, MESSAGE_COLUMNS
from cepheid_spark.option_values import duration, parse_bool, size
from cepheid_spark.options import OPTIONS, OTHER_NAMES, SourceOptions, parse_options
from cepheid_spark.sink_options import SINK_OPTIONS, parse_sink_options
from cepheid_testkit import ProcessCluster

PAGE = (Path(__file__).parents[2] / "docs/spark.md").read_text()
BLOCKS = re.findall(r"```(python|console)\n(.*?)```", PAGE, flags=re.DOTALL)
URL = "pulsar://127.0.0.1:6650"


@pytest.fixture(scope="module")
def documented(spark: SparkSession) -> Iterator[ProcessCluster]:
    """A server of its own: the page's topics and ids are those of a new one."""
    with ProcessCluster() as cluster:
        url = f"{cluster.admin_url}/admin/v2/namespaces/public/default/deduplication"
        request = urllib.request.Request(url, b"true", {"Content-Type": "application/json"}, method="POST")
        urllib.request.urlopen(request, timeout=30).close()  # as the page says before it writes
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


@pytest.mark.page
def test_the_table_of_options_has_each_option_once() -> None:
    listed = [name for names, _, _ in option_rows() for name in names]
    assert sorted(listed) == sorted(OPTIONS)
    main = [name for names, _, _ in option_rows("Options") for name in names]
    assert len(main) <= 25, "what few need is in the appendix"


@pytest.mark.page
def test_the_table_of_a_write_has_each_option_with_its_default() -> None:
    table = PAGE.partition("### Options of a write")[2].partition("\n##")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    told = {name: default.strip() for names, defaults in rows for name, default in _defaults(names, defaults)}
    assert sorted(told) == sorted(SINK_OPTIONS)
    options = parse_sink_options({"service.url": URL}, streaming=True)
    assert (told["exactlyOnce"], told["order"]) == ("true", "sorted")
    assert (told["keyHash"], told["compression"]) == (options.key_hash, options.compression)
    assert duration()("default", told["sinkMemory"]) == options.memory_s
    assert duration()("default", told["sendTimeout"]) == options.send_timeout_s


def _defaults(names: str, defaults: str) -> list[tuple[str, str]]:
    found, texts = re.findall(r"`(\w+)`", names), defaults.split(",")
    return list(zip(found, texts if len(texts) == len(found) else texts * len(found), strict=True))


def option_rows(*headings: str) -> Iterator[tuple[list[str], str, str]]:
    """Names, defaults, for; of the tables under these headings, or of both."""
    for heading in headings or ("Options", "Appendix"):
        table = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
        for line in table.splitlines():
            if line.startswith("| `"):
                names, defaults, kinds = (cell.strip() for cell in line.split("|")[1:4])
                yield re.findall(r"`(\w+)`", names), defaults, kinds


@pytest.mark.page
def test_other_names_of_options_are_told() -> None:
    assert not {name for name in OTHER_NAMES if f"`{name}`" not in PAGE}


def defaults_of(options: SourceOptions) -> dict[str, Any]:
    """Of options that have one that is a plain value."""
    settings = options.spec.settings
    return {
        "failOnMissingTopic": options.topics.fail_on_missing,
        "timestampSkew": options.timestamp_skew_ms / 1000,
        "readMode": options.spec.mode.value,
        "columnStyle": options.column_style,
        "onBadRecord": options.spec.on_bad_record.value,
        "failOnDataLoss": options.spec.fail_on_data_loss,
        "targetPartitionBytes": options.target_task_bytes,
        "minPartitions": options.min_tasks,
        "maxTriggerDelay": options.max_trigger_delay_s,
        "leaseTtl": options.lease_ttl_s,
        "topicDiscoveryInterval": options.topic_discovery_s,
        "metadataRetry": options.metadata_retry_s,
        "bookieReadTimeout": settings.read_timeout_s,
        "readAttempts": settings.read_attempts,
        "unreachableTimeout": settings.unreachable_s,
        "chunkBytes": settings.chunk_bytes,
        "decodeBytes": settings.decode_bytes,
        "verifyChecksum": settings.verify_checksum,
        "chunkLookback": settings.chunk_lookback,
        "freezeGc": options.freeze_gc,
        "preferBookies": settings.prefer_bookies,
    }


@pytest.mark.page
@pytest.mark.parametrize("streaming", [False, True])
def test_the_defaults_in_the_table_are_those_of_the_code(streaming: bool) -> None:
    found = defaults_of(parse_options({"service.url": URL, "topics": "t"}, streaming=streaming))
    told: dict[str, str] = {}
    for names, defaults, _ in option_rows():
        texts = [text.strip() for text in defaults.split(",")]
        if texts[0].startswith("B "):  # one of batches, one of streams
            texts = [text.partition(" ")[2] for text in texts[streaming : streaming + 1]] * len(names)
        told |= dict(zip(names, texts if len(texts) == len(names) else texts * len(names), strict=True))
    assert {name: parse_default(told[name], value) for name, value in found.items()} == found
    assert not {name for name, text in told.items() if text in ("true", "false") or text[0].isdigit()} - found.keys()


def parse_default(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        return parse_bool("default", text)
    if isinstance(like, float):
        return duration()("default", text)
    return size()("default", text) if isinstance(like, int) else text


@pytest.mark.page
def test_every_column_is_named() -> None:
    rows = PAGE.partition("## Rows")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", rows))
    assert named >= set(MESSAGE_COLUMNS) | set(ENTRY_COLUMNS)
