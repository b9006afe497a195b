"""`cepheid read` as a user types it, against a server."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from pulsar.schema import AvroSchema
from typer.testing import CliRunner

import cepheid_decode
import cepheid_scan
from cepheid_cli import read as read_command
from cepheid_cli.app import app
from cepheid_ports import CepheidError
from cepheid_scan import BadRecordError, DataLossError, NoSuchTopicError
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of
from tests.plain_admin import AdminClient

COUNT = 400
PAIR = {"type": "record", "name": "Pair", "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": ["null", "bytes"]}]}


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        AdminClient(cluster.admin_url).put("/admin/v2/persistent/public/default/parts/partitions", 2)
        with client_of(cluster.service_url) as client:
            for topic, keys in (("orders", 4), ("parts", 40)):
                producer = client.create_producer(
                    topic, batching_enabled=True, batching_max_messages=50, batching_max_publish_delay_ms=10_000
                )
                for number in range(COUNT):
                    producer.send_async(b"order %d" % number, lambda *_: None, partition_key=f"k{number % keys}")
                producer.flush()
            client.create_producer("binary").send(b"\xff\x00\x1b[2J")
            typed = client.create_producer("typed", schema=AvroSchema(None, PAIR))
            typed.send({"a": 1, "b": b"\xff"})
            typed.send({"a": 2, "b": None})
            broken = client.create_producer("broken", schema=AvroSchema(None, PAIR))
            for number in range(3):
                broken.send({"a": number, "b": None})
            client.create_producer("broken").send(b"\xff")
        yield cluster


def run(server: ProcessCluster, *words: str) -> Result:
    result = CliRunner().invoke(app, ["read", *words, "--url", server.service_url])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def lines(server: ProcessCluster, *words: str) -> list[dict[str, Any]]:
    result = run(server, *words)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_each_message_is_a_line_of_json(server: ProcessCluster) -> None:
    found = lines(server, "orders")
    assert [line["value"] for line in found] == [f"order {number}" for number in range(COUNT)]
    assert found[5] | {"publish_time": "", "producer_name": ""} == {
        "key": "k1",
        "value": "order 5",
        "topic": "persistent://public/default/orders",
        "partition": -1,
        "ledger_id": found[0]["ledger_id"],
        "entry_id": 0,
        "batch_index": 5,
        "publish_time": "",
        "event_time": None,
        "producer_name": "",
        "sequence_id": 5,
        "properties": {},
    }


def test_ranges_conditions_partitions_columns_and_limit(server: ProcessCluster) -> None:
    found = lines(server, "orders", "--where", "key=k1", "--where", "key=k3", "--columns", "value, key", "--limit", "3")
    assert found == [{"value": f"order {number}", "key": f"k{number % 4}"} for number in (1, 3, 5)]
    assert list(found[0]) == ["value", "key"]
    ledger_id = lines(server, "orders", "--limit", "1")[0]["ledger_id"]
    middle = lines(server, "orders", "--from", f"{ledger_id}:2:10", "--to", f"{ledger_id}:3")
    assert [line["value"] for line in middle] == [f"order {number}" for number in range(110, 150)]
    assert lines(server, "orders", "--to", "2020-01-01") == []
    assert lines(server, "orders", "--limit", "0") == []
    parts = [lines(server, "parts", "--partition", part) for part in ("0", "1")]
    assert [{line["partition"] for line in part} for part in parts] == [{0}, {1}]
    assert sum(map(len, parts)) == len(lines(server, "parts")) == COUNT


def test_entries_and_typed_rows(server: ProcessCluster) -> None:
    assert sum(line["num_messages"] for line in lines(server, "orders", "--entries")) == COUNT
    typed = lines(server, "typed", "--typed", "--columns", "b,a")
    assert typed == [{"b_base64": "/w==", "a": 1}, {"b": None, "a": 2}]


def test_a_limit_is_reached_before_a_record_that_cannot_be_decoded(server: ProcessCluster) -> None:
    assert [line["a"] for line in lines(server, "broken", "--typed", "--columns", "a", "--limit", "3")] == [0, 1, 2]
    with pytest.raises(read_command.ReadCommandError, match="cannot be decoded"):
        run(server, "broken", "--typed", "--limit", "4")


def test_files_by_their_names(server: ProcessCluster, tmp_path: Path) -> None:
    for name in ("orders.parquet", "orders.csv", "orders.json"):
        done = run(server, "orders", "--output", str(tmp_path / name))
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == f"400 rows in {tmp_path / name}\n"
    assert pq.read_table(tmp_path / "orders.parquet")["value"].to_pylist() == [b"order %d" % number for number in range(COUNT)]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "orders.csv").read_text())))
    assert [row["value"] for row in rows] == [f"order {number}" for number in range(COUNT)]
    assert len((tmp_path / "orders.json").read_text().splitlines()) == COUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orders.csv", "orders.json", "orders.parquet"]


def test_a_failure_leaves_no_file_and_an_earlier_one_as_it_was(server: ProcessCluster, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("earlier")
    with pytest.raises(CepheidError, match="no column 'vlaue'"):
        run(server, "orders", "--columns", "vlaue", "--output", str(path))
    with pytest.raises(CepheidError, match="cannot be written"):
        run(server, "orders", "--output", str(tmp_path / "nowhere" / "rows.json"))
    for no_place in (path / "rows.json", tmp_path, Path()):
        with pytest.raises(CepheidError, match=r"cannot be written|is a directory"):
            run(server, "orders", "--output", str(no_place))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]
    assert path.read_text() == "earlier"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["orders", "--typed", "--entries"], "two kinds of rows"),
        (["orders", "--where", "kye=1"], r"did you mean key=…\?"),
        (["orders", "--where", "colour=1"], "there is key=…, event_from=…, event_until=…"),
        (["orders", "--where", "event_from=1", "--where", "event_from=2"], "given twice"),
        (["orders", "--where", "event_from=2", "--where", "event_until=1"], "are later than"),
        (["parts", "--partition=-1"], "numbered from 0"),
        (["orders", "--partition", "0"], "not partitioned"),
        (["orders", "--from", "soon"], "write earliest, latest"),
        (["orders", "--from", "9" * 5000], "after the year 9999"),
        (["orders", "--from", "1:" + "9" * 5000], "is not a position"),
        (["orders", "--entries", "--where", "key=k1"], "those of messages"),
        (["nobody-made-this"], "nobody-made-this"),
        (["orders", "--typed"], "schema: read without --typed, or upload one"),
        (["orders", "--columns", ","], "--columns ',': a name is empty"),
        (["orders", "--columns", ""], "--columns '': a name is empty"),
        (["orders", "--on-bad-record", "drop"], "--on-bad-record 'drop': there is fail, null, skip"),
        (["orders", "--from", f"{2**62}:0"], "--accept-loss accepts it"),
        (["parts", "--partition=0", "--partition=1", "--from", "1:0"], "several are read: choose one by --partition"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(server: ProcessCluster, words: list[str], text: str) -> None:
    with pytest.raises(CepheidError, match=text):
        run(server, *words)


def test_every_option_that_an_error_advises_has_the_words_of_the_command() -> None:
    """Those of Spark's options which stand with a value in a text of the readers, and would be foreign here."""
    packages = (cepheid_decode, cepheid_scan)
    sources = [path.read_text() for package in packages for path in Path(package.__file__).parent.rglob("*.py")]
    advised = {said for source in sources for said in re.findall(r"\b(?:[a-z]+[A-Z]\w*=[a-z]+|(?:service|admin)\.url)\b", source)}
    assert len(advised) >= 6, "else the pattern is out of date"
    of_several_topics = "failOnMissingTopic=false"
    assert {said for said in advised if said in read_command.own_words(f"read with {said}")} == {of_several_topics}
    assert of_several_topics not in read_command.own_words(str(NoSuchTopicError("x")))
    assert read_command.own_words(str(DataLossError("gone"))).endswith("or accept the loss with --accept-loss)")
    assert "(--on-bad-record skip leaves such messages out" in read_command.own_words(str(BadRecordError("bad")))


def cepheid(*words: str) -> list[str]:
    return [sys.executable, "-m", "cepheid_cli", "read", *words]


@pytest.mark.slow
def test_errors_end_the_process_with_one_line_and_code_1(server: ProcessCluster) -> None:
    done = subprocess.run(cepheid("nowhere", "--url", server.service_url), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cepheid: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error_to_speak_of(server: ProcessCluster) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(cepheid("orders", "--url", server.service_url), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    os.close(reading)  # before its first line
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "table"])
def test_an_output_that_cannot_be_written_is_said_in_a_line(server: ProcessCluster, kind: str) -> None:
    command = cepheid("orders", "--format", kind, "--url", server.service_url)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"cepheid: standard output cannot be written: .*No space left on device\n", done.stderr), done.stderr


@pytest.mark.slow
def test_a_terminal_gets_a_table_that_cannot_move_its_cursor(server: ProcessCluster) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(cepheid("binary", "--url", server.service_url), stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(main, 4096):
            shown += piece
    except OSError:  # Linux says the other end's close so
        pass
    os.close(main)
    assert process.wait(120) == 0, shown
    header, row, rest = shown.decode().split("\r\n")[:3]
    assert header.split() == ["message_id", "publish_time", "key", "value"]
    assert row.endswith("-    0xff001b5b324a")
    assert rest == "1 row"
    assert b"\x1b" not in shown


def test_parquet_is_not_for_terminals(server: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_command, "_is_terminal", lambda: True)
    with pytest.raises(CepheidError, match="--output"):
        run(server, "orders", "--format", "parquet")


@pytest.mark.parametrize(
    ("before", "words", "environment", "header"),
    [
        ([], ["--token", "hush"], {}, "Bearer hush"),
        ([], [], {"CEPHEID_TOKEN": "hush"}, "Bearer hush"),
        (["--token-file", "{}/secret"], [], {"CEPHEID_USER": "bob", "CEPHEID_PASSWORD": "x"}, "Bearer hush"),
        (["--user", "ann", "--password-file", "{}/secret"], [], {"CEPHEID_TOKEN": "other"}, "Basic YW5uOmh1c2g="),
    ],
)
def test_secrets_are_shown_to_brokers(
    tmp_path: Path, before: list[str], words: list[str], environment: dict[str, str], header: str
) -> None:
    (tmp_path / "secret").write_text("hush\n")
    before = [word.format(tmp_path) for word in before]
    shown: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as broker:
        serving = threading.Thread(target=broker.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{broker.server_port}"
            with patch.dict(os.environ):
                result = CliRunner().invoke(app, [*before, "read", "orders", "--admin-url", url, *words], env=environment)
        finally:
            broker.shutdown()
            serving.join()
    assert shown == [header]
    assert isinstance(result.exception, CepheidError)
    assert "hush" not in str(result.exception) + result.output


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    with pytest.raises(CepheidError, match=r"needs pyarrow: pip install 'cepheid\[spark\]'"):
        CliRunner().invoke(app, ["read", "orders"], catch_exceptions=False)
