"""doctor(spark): what is well, what is not, and what to change."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pulsar
import pytest
from pyspark.sql import SparkSession

from cepheid_scan.bookie_channels import close_channels, learn_door, scan_port_call
from cepheid_spark import doctor, doctor_source
from cepheid_spark.doctor import Finding, _check_neighbours, _judge_worker, _named_errors
from cepheid_spark.doctor_source import _by_grpc, _connect_error
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish
from tests.scan.scan_bookies import ScanBookies
from tests.support import free_port


@pytest.mark.slow
def test_a_healthy_session(
    topic: str, client: pulsar.Client, server: ProcessCluster, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(client, topic, [b"x"])
    findings = doctor(spark, {"service.url": server.service_url, "topic": topic})
    assert [finding for finding in findings if finding.is_good is False] == []
    shown = capsys.readouterr().out
    assert shown == "".join(f"{finding}\n" for finding in findings)
    assert "1 topics, 1 ledgers, 3 bookies" in shown
    assert "reaches every bookie" in shown
    assert f"Python {platform.python_version()}" in shown


@pytest.mark.slow
def test_settings_that_cost_are_said_with_what_they_should_be(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        findings = doctor(spark)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    bad = [finding for finding in findings if finding.is_good is False]
    assert [finding.what for finding in bad] == ["spark.sql.python.filterPushdown.enabled"]
    assert "set it to false" in bad[0].text


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_a_finding(spark: SparkSession) -> None:
    findings = doctor(spark, {"service.url": "pulsar://127.0.0.1:1", "topic": "t", "metadataRetry": "100ms"})
    assert any(finding.what == "cluster" and finding.is_good is False and "127.0.0.1:1" in finding.text for finding in findings)


def test_a_neighbour_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark says DATA_SOURCE_NOT_FOUND of every Python source then, and not why."""
    (tmp_path / "pyspark_broken_neighbour.py").write_text("raise RuntimeError('wrong version')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = _check_neighbours()
    assert (finding.what, finding.is_good) == ("module pyspark_broken_neighbour", False)
    assert "RuntimeError: wrong version" in finding.text


def test_of_what_spark_says_the_errors_are_shown() -> None:
    """A worker without pyarrow; a PYSPARK_PYTHON that is not there: Java's frames have names like errors."""
    crashed = "An error occurred while calling o65.load.\n: org.apache.spark.SparkException: Python worker exited (crashed)."
    frames = "\n\tat org.apache.spark.QueryExecution$.withInternalError(QueryExecution.scala:927)"
    assert _named_errors(crashed + frames) == "org.apache.spark.SparkException: Python worker exited (crashed)."
    missing = 'Caused by: java.io.IOException: Cannot run program "./env/bin/python": error=2'
    assert _named_errors(crashed + frames + "\n" + missing + frames).endswith(missing)


def test_what_a_worker_lacks() -> None:
    modules = {"cepheid": "1", "pyarrow": None}
    found = {"host": "w1", "python": "2.7.18", "modules": modules, "unreachable": {"b1 at x:1": "refused"}}
    found["by_grpc"] = {"b2": "an older release"}
    findings = _judge_worker(json.loads(json.dumps(found)), True)
    assert [finding.is_good for finding in findings] == [False, True, False, False, None]
    assert "must be of one minor version" in findings[0].text
    assert "pyarrow is missing: install cepheid[spark]" in findings[2].text
    assert "does not reach bookie b1 at x:1: refused" in findings[3].text
    assert "reads b2 by gRPC, which costs more: an older release" in findings[4].text


def test_bookies_that_are_read_by_grpc_are_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bookies = ScanBookies(tmp_path, ["a", "b"], share_logs=False)
    with bookies, ScanBookies(tmp_path / "older", ["c"], stored=False) as older:
        addresses = {**bookies.addresses, **older.addresses, "d": f"127.0.0.1:{free_port()}"}
        reach = _connect_error
        closed = learn_door(addresses["b"], scan_port_call(addresses["b"]).result())
        assert closed is not None
        monkeypatch.setattr(
            doctor_source, "_connect_error", lambda host, port: "refused" if port == closed.port else reach(host, port)
        )
        reasons = _by_grpc(addresses)
        close_channels()
    assert reasons.keys() == {"b", "c"}, "d is told among those that are not reached"
    assert f"port {closed.port}, for scans: refused" in reasons["b"]
    assert "older release" in reasons["c"]


def test_a_bookie_that_turns_this_process_away_is_read_by_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket on the machine that takes connections is not enough."""
    monkeypatch.setattr("cepheid_bookie.scan_server._may_read_logs", lambda _: False)
    with ScanBookies(tmp_path, ["a"]) as bookies:
        assert _by_grpc(bookies.addresses) == {}
    monkeypatch.setattr("cepheid_bookie.scan_server._STRANGERS", 0)
    with ScanBookies(tmp_path / "full", ["a"]) as bookies:
        assert "refuses this process" in _by_grpc(bookies.addresses)["a"]
        monkeypatch.setattr(doctor_source, "_connect_error", lambda host, port: "refused")
        assert "refused" in _by_grpc(bookies.addresses)["a"]
        monkeypatch.setattr("cepheid_bookie.grpc_server.encode_scan_port", lambda *_: bytes([9]) + bytes(18))
        assert "another protocol" in _by_grpc(bookies.addresses)["a"]
        close_channels()


def test_a_bookie_of_this_machine_needs_no_port_of_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_source, "_connect_error", lambda host, port: "refused")
    with ScanBookies(tmp_path, ["a"]) as bookies:
        assert _by_grpc(bookies.addresses) == {}
        close_channels()


def test_findings_are_read_at_a_glance() -> None:
    assert [str(Finding("a", good, "b"))[:4] for good in (True, False, None)] == ["ok  ", "BAD ", "    "]
