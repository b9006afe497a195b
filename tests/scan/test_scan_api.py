"""`scan()` against a server whose ledgers are small: what it gives is what was published, from here to there, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from pulsar.schema import AvroSchema

from cepheid_scan import (
    BadOptionError,
    NoSuchTopicError,
    PlanUnavailableError,
    ReadSettings,
    ScanCounters,
    ScanError,
    scan,
)
from cepheid_scan.scan_reader import ScanReader
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of
from tests.plain_admin import AdminClient

FULL = "persistent://public/default/"
COUNT = 3000
NUMBERED = {
    "type": "record",
    "name": "Numbered",
    "fields": [{"name": "n", "type": "int"}, {"name": "s", "type": ["null", "string"]}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = tmp_path_factory.mktemp("scan") / "small.toml"
    config.write_text("[managed_ledger]\nledger_max_bytes = 65536\n")
    with ProcessCluster(bookies=3, flags=("--config", str(config))) as cluster:
        admin = AdminClient(cluster.admin_url)
        admin.post("/admin/v2/namespaces/public/default/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
        admin.put("/admin/v2/persistent/public/default/parts/partitions", 3)
        fill(cluster)
        yield cluster


def fill(cluster: ProcessCluster) -> None:
    with client_of(cluster.service_url) as client:
        for topic in ("orders", "parts"):
            producer = client.create_producer(topic, batching_enabled=True, batching_max_messages=50, block_if_queue_full=True)
            for number in range(COUNT):
                key = f"k{number % 7}"
                producer.send_async(value_of(number), lambda *_: None, partition_key=key, properties={"n": str(number)})
            producer.flush()
        typed = client.create_producer("typed", schema=AvroSchema(None, NUMBERED))
        for number in range(10):
            typed.send({"n": number, "s": None if number % 2 else str(number)}, partition_key="k")


def value_of(number: int) -> bytes:
    return b"%06d" % number * 20


def numbers(reader: ScanReader) -> list[int]:
    return [int(value.as_py()[:6]) for value in reader.read_all()["value"]]


@pytest.mark.slow
def test_rows_are_what_was_published_in_order_over_several_ledgers(server: ProcessCluster) -> None:
    counters = ScanCounters()
    table = scan("orders", service_url=server.service_url, counters=counters).read_all()
    assert len(set(table["ledger_id"].to_pylist())) > 2
    assert table["value"].to_pylist() == [value_of(number) for number in range(COUNT)]
    assert table["key"].to_pylist() == [f"k{number % 7}" for number in range(COUNT)]
    assert table["properties"].to_pylist() == [[("n", str(number))] for number in range(COUNT)]
    assert set(table["topic"].to_pylist()) == {f"{FULL}orders"}
    assert counters.messages == COUNT
    assert sum(counters.by_bookie.values()) >= COUNT * 120


@pytest.mark.parametrize("source", ["service_url", "admin_url"])
def test_either_address_will_do(server: ProcessCluster, source: str) -> None:
    assert len(numbers(scan("orders", **{source: getattr(server, source)}))) == COUNT


def test_positions_include_the_first_and_exclude_the_last(server: ProcessCluster) -> None:
    table = scan("orders", service_url=server.service_url).read_all()
    first, last = 1234, 2345
    assert table["batch_index"][first].as_py() > 0, "inside a batch"

    def position(row: int) -> str:
        return ":".join(str(table[name][row]) for name in ("ledger_id", "entry_id", "batch_index"))

    found = scan("orders", service_url=server.service_url, start=position(first), end=position(last))
    assert numbers(found) == list(range(first, last))
    entry = f"{table['ledger_id'][first]}:{table['entry_id'][first]}"
    assert numbers(scan("orders", service_url=server.service_url, start=entry))[0] == first - table["batch_index"][first].as_py()
    assert numbers(scan("orders", service_url=server.service_url, start={"orders": position(first)}))[0] == first


def test_times_are_exact_in_the_rows(server: ProcessCluster) -> None:
    with client_of(server.service_url) as client:
        producer = client.create_producer("timed")
        before = [producer.send(b"%06d" % number) for number in range(5)]
        time.sleep(0.02)  # the client's clock has milliseconds: the next one is published later
        between = datetime.now(UTC)
        time.sleep(0.02)
        for number in range(5, 12):
            producer.send(b"%06d" % number)
    assert len(before) == 5
    assert numbers(scan("timed", service_url=server.service_url, start=between)) == list(range(5, 12))
    assert numbers(scan("timed", service_url=server.service_url, end=between.isoformat())) == list(range(5))
    assert numbers(scan("timed", service_url=server.service_url, start="2020-01-01", end="2020-01-02")) == []


def test_numbers_may_be_those_of_numpy_and_a_topic_named_twice_is_one(server: ProcessCluster) -> None:
    parts = scan("parts", service_url=server.service_url, partitions=np.array([0, 2]), columns=["partition"], threads=np.int64(1))
    assert set(parts.read_all()["partition"].to_pylist()) == {0, 2}
    first = scan("orders", service_url=server.service_url, columns=["ledger_id"]).read_next_batch()["ledger_id"][0].as_py()
    twice = ["orders", f"{FULL}orders"]
    settings = ReadSettings(chunk_lookback=np.uint8(3), verify_checksum=np.True_)  # type: ignore[arg-type]
    found = scan(
        twice,
        service_url=server.service_url,
        start=f"{first}:1",
        end=np.int64(time.time_ns() // 10**6),
        retry_s=np.float32(3),
        settings=settings,
    )
    assert numbers(found)[0] == 50


def test_keys_partitions_and_event_times_leave_rows_out(server: ProcessCluster) -> None:
    wanted = [number for number in range(COUNT) if number % 7 in (2, 5)]
    assert numbers(scan("orders", service_url=server.service_url, keys=["k2", "k5"])) == wanted
    assert numbers(scan("orders", service_url=server.service_url, event_from="2020-01-01")) == [], "none has an event time"
    whole = scan("parts", service_url=server.service_url, columns=["partition", "value"]).read_all()
    assert sorted(int(value[:6]) for value in whole["value"].to_pylist()) == list(range(COUNT))
    (one,) = set(whole["partition"].to_pylist()) & {1}
    part = scan("parts", service_url=server.service_url, partitions=[1]).read_all()
    assert set(part["topic"].to_pylist()) == {f"{FULL}parts-partition-{one}"}
    assert part.num_rows == whole["partition"].to_pylist().count(1)
    start = f"{part['ledger_id'][-1]}:{part['entry_id'][-1]}"
    last_entry = scan("parts", service_url=server.service_url, partitions=[1], start=start).read_all()
    assert 0 < last_entry.num_rows <= 50


def test_a_position_of_a_topic_that_is_not_read_is_refused(server: ProcessCluster) -> None:
    with pytest.raises(BadOptionError, match=r"parts was given, which is not read.*parts-partition-0"):
        scan("parts", service_url=server.service_url, start="0:0")


def test_entries_and_typed_rows(server: ProcessCluster) -> None:
    entries = scan("orders", service_url=server.service_url, mode="entries").read_all()
    assert sum(entries["num_messages"].to_pylist()) == COUNT
    typed = scan("typed", service_url=server.service_url, mode="typed").read_all()
    assert typed["n"].to_pylist() == list(range(10))
    assert typed["s"].to_pylist() == [None if number % 2 else str(number) for number in range(10)]
    assert set(typed["__key"].to_pylist()) == {"k"}
    assert scan("typed", service_url=server.service_url, mode="typed", columns=["s", "__entry_id", "n"]).schema.names == [
        "s",
        "__entry_id",
        "n",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mode": "rows"}, BadOptionError, "there is messages, entries, typed"),
        ({"on_bad_record": "drop"}, BadOptionError, "fail, null, skip"),
        ({"columns": ["vlaue"]}, BadOptionError, "no column 'vlaue'"),
        ({"columns": ["key", "value", "key"]}, BadOptionError, "columns names key twice"),
        ({"topic": "parts", "partitions": [0, 9]}, NoSuchTopicError, "no partition 9"),
        ({"topic": "orders", "partitions": [0]}, NoSuchTopicError, "is not partitioned"),
        ({"topic": "parts", "partitions": [0, -1]}, BadOptionError, "-1 is not one: they are numbered from 0"),
        ({"topic": "orders", "partitions": [-1]}, BadOptionError, "-1 is not one"),
        ({"topic": "parts", "partitions": []}, BadOptionError, "none is given"),
        ({"topic": []}, BadOptionError, "the list of topics is empty"),
        ({"start": "2026-01-02", "end": "2026-01-01"}, BadOptionError, "later than the end"),
        ({"start": "1:2", "end": "1:1"}, BadOptionError, "later than the end 1:1"),
        ({"event_from": 6, "event_until": 5}, BadOptionError, "event times from .6 ms. on are later"),
        ({"event_until": True}, BadOptionError, "'True' is not a place"),
        ({"start": "soon"}, BadOptionError, "write earliest, latest"),
        ({"topic": "nobody-made-this"}, NoSuchTopicError, "nobody-made-this"),
        ({"topic": ["orders", "parts"], "start": "1:2"}, BadOptionError, "does not name a topic"),
        ({"mode": "typed"}, BadOptionError, "schema"),
        ({"mode": "entries", "keys": ["k1"]}, BadOptionError, "those of messages"),
        ({"mode": "entries", "event_until": "2026-01-01"}, BadOptionError, "those of messages"),
        ({"service_url": None}, BadOptionError, "set service_url"),
        ({"keys": []}, BadOptionError, "list of keys is empty.*all are read"),
        ({"keys": [b"k1"]}, BadOptionError, "keys must be text"),
        ({"topic": "parts", "partitions": "0"}, BadOptionError, "partitions must be a list, got '0'"),
        ({"topic": "parts", "partitions": b"0"}, BadOptionError, "partitions must be a list, got b'0'"),
        ({"topic": "parts", "partitions": ["0"]}, BadOptionError, "partitions must be whole numbers such as"),
        ({"start": {}}, BadOptionError, "which positions.*names no topic"),
        ({"end": {}}, BadOptionError, "which positions.*names no topic"),
        ({"start": {"orders": "1:2", f"{FULL}orders": "3:4"}}, BadOptionError, f"name {FULL}orders twice"),
        ({"service_url": 5}, BadOptionError, "service_url must be text, got 5"),
        ({"admin_url": b"http://h:1"}, BadOptionError, "admin_url must be text, got b'http://h:1'"),
        ({"token": b"x"}, BadOptionError, "token must be text, the Path of its file.* got type bytes"),
        ({"fail_on_data_loss": "false"}, BadOptionError, "fail_on_data_loss must be True or False, got 'false'"),
        ({"settings": {}}, BadOptionError, "settings must be ReadSettings, got {}"),
        ({"settings": ReadSettings(verify_checksum="no")}, BadOptionError, "settings.verify_checksum must be True or False"),  # type: ignore[arg-type]
        ({"settings": ReadSettings(rack=5)}, BadOptionError, "settings.rack must be text, got 5"),  # type: ignore[arg-type]
        ({"counters": 5}, BadOptionError, "counters must be ScanCounters, got 5"),
        ({"topic": "parts", "partitions": [0, True]}, BadOptionError, "got True"),
        ({"columns": "value"}, BadOptionError, "columns must be a list, got 'value'"),
        ({"columns": []}, BadOptionError, "the list of columns is empty"),
        ({"columns": iter(["value", "value"])}, BadOptionError, "columns names value twice"),
        ({"columns": [7]}, BadOptionError, "columns must be text, got 7"),
        ({"columns": 7}, BadOptionError, "columns must be a list, got 7"),
        ({"topic": 5}, BadOptionError, "topics must be a list, got 5"),
        ({"topic": [None]}, BadOptionError, "topics must be text, got None"),
        ({"topic": "parts", "partitions": 5}, BadOptionError, "partitions must be a list, got 5"),
        ({"keys": 5}, BadOptionError, "keys must be a list, got 5"),
        ({"settings": 3}, BadOptionError, "settings must be ReadSettings, got 3"),
        ({"threads": "2"}, BadOptionError, "threads must be a whole number, got '2'"),
        ({"threads": 2.5}, BadOptionError, "threads must be a whole number, got 2.5"),
        ({"retry_s": None}, BadOptionError, "retry_s must be a number, got None"),
        ({"threads": 0}, BadOptionError, "threads must be at least 1, got 0"),
        ({"threads": -1}, BadOptionError, "threads must be at least 1, got -1"),
        ({"retry_s": -1}, BadOptionError, "retry_s must be at least 0, got -1"),
        ({"retry_s": float("nan")}, BadOptionError, "retry_s must be at least 0, got nan"),
        ({"settings": ReadSettings(read_attempts=0)}, BadOptionError, "settings.read_attempts must be at least 1, got 0"),
        ({"settings": ReadSettings(read_timeout_s=0)}, BadOptionError, "settings.read_timeout_s must be"),
        ({"settings": ReadSettings(unreachable_s=-0.5)}, BadOptionError, "settings.unreachable_s must be at least"),
        ({"settings": ReadSettings(chunk_bytes=0)}, BadOptionError, "settings.chunk_bytes must be at least 1"),
        ({"settings": ReadSettings(decode_bytes=0)}, BadOptionError, "settings.decode_bytes must be at least 1"),
        ({"settings": ReadSettings(chunk_lookback=-1)}, BadOptionError, "settings.chunk_lookback must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_asked_for(
    server: ProcessCluster, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = {"topic": "orders", "service_url": server.service_url, **arguments}
    with pytest.raises(error, match=text):
        scan(**given)


def test_nobody_there_is_no_empty_topic() -> None:
    from tests.support import free_port

    with pytest.raises(PlanUnavailableError):
        scan("orders", service_url=f"pulsar://127.0.0.1:{free_port()}", retry_s=0.2)


def test_it_is_an_arrow_stream_like_any_other(server: ProcessCluster) -> None:
    reader = scan("orders", service_url=server.service_url, columns=["key", "value"], threads=4)
    scanner = ds.Scanner.from_batches(reader, columns={"bytes": pc.binary_length(ds.field("value")), "key": ds.field("key")})
    totals = {row["key"]: row["bytes_sum"] for row in scanner.to_table().group_by("key").aggregate([("bytes", "sum")]).to_pylist()}
    assert totals == {f"k{key}": 120 * len(range(key, COUNT, 7)) for key in range(7)}
    frame = scan("orders", service_url=server.service_url, columns=["key", "entry_id"]).read_pandas()
    assert len(frame) == COUNT


def test_duckdb_reads_it(server: ProcessCluster) -> None:
    duckdb = pytest.importorskip("duckdb")
    history = scan("orders", service_url=server.service_url)
    (found,) = duckdb.sql("select count(*), sum(octet_length(value)), max(publish_time) from history").fetchall()
    assert found[:2] == (COUNT, 120 * COUNT)
    assert abs(found[2] - datetime.now(UTC)) < timedelta(hours=1)
    del history


def test_polars_reads_it(server: ProcessCluster) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(scan("orders", service_url=server.service_url))
    assert frame["value"].to_list() == [value_of(number) for number in range(COUNT)]
    assert frame["publish_time"].dtype == polars.Datetime("us", "UTC")


def test_a_reader_that_is_closed_ends_its_threads(server: ProcessCluster) -> None:
    with scan("orders", service_url=server.service_url, threads=3) as reader:
        reader.read_next_batch()
    assert not reading_threads()
    with pytest.raises(ValueError, match="reader of this scan is closed"):
        reader.read_next_batch()


def test_a_reader_that_is_dropped_ends_its_threads(server: ProcessCluster) -> None:
    reader = scan("orders", service_url=server.service_url, threads=3)
    reader.read_next_batch()
    del reader
    assert not reading_threads()


def reading_threads() -> list[str]:
    """Of a scan, and of what it asks bookies."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("cepheid-scan-", "scan-"))]


@pytest.mark.slow
def test_bookies_that_are_gone_are_an_error_and_not_the_end(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "data") as cluster:
        with client_of(cluster.service_url) as client:
            client.create_producer("orders").send(b"x")
        settings = ReadSettings(read_timeout_s=0.5, read_attempts=2)
        reader = scan("orders", service_url=cluster.service_url, settings=settings, retry_s=0.2)
        cluster.kill()
        with pytest.raises(ScanError) as raised:  # of the bookies, or of whoever was asked where else the entries may be
            reader.read_all()
        assert raised.value.retriable
