"""Comparisons with a baseline and with a peer: when one fails, and that every guarded benchmark has the figure that is compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import guard, kafka, peers
from benchmarks.guard import GUARDED, Guarded, judge


@pytest.mark.parametrize(
    ("ratios", "slower"),
    [
        ([1.0] * 10, False),
        ([0.9] * 10, True),
        ([0.96] * 10, False),  # less than what counts
        ([0.90, 0.91, 0.92, 0.92, 0.93, 0.93, 0.94, 0.94, 0.95, 1.30], True),  # one run that was disturbed
        ([0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 1.0, 1.1, 1.2], False),  # so noisy that it says nothing
        ([0.9] * 5, True),
    ],
)
def test_it_is_slower_when_the_median_is_low_and_the_interval_excludes_one(ratios: list[float], slower: bool) -> None:
    assert judge(ratios).is_slower is slower


def test_the_interval_of_ten_pairs_is_between_the_second_and_the_ninth() -> None:
    verdict = judge([float(number) for number in range(10)])
    assert (verdict.low, verdict.median, verdict.high) == (1.0, 4.5, 8.0)
    with pytest.raises(ValueError, match="5 are the fewest"):
        judge([1.0] * 4)


def test_a_lower_latency_is_a_higher_ratio() -> None:
    assert Guarded("ms", higher_is_better=False).ratio(2.0, 1.0) == Guarded("per_s").ratio(1.0, 2.0) == 2.0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_benchmark_has_its_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"--seconds": "1", "--gigabytes": "0.01", "--rounds": "1"}
    given = GUARDED[name].arguments
    arguments = tuple(short.get(given[at - 1], value) if at else value for at, value in enumerate(given))
    guarded = Guarded(GUARDED[name].figure, arguments, GUARDED[name].higher_is_better)
    monkeypatch.setitem(guard.GUARDED, name, guarded)
    assert guard.run(name, sys.executable) > 0


def test_a_figure_of_a_peer_is_ours_over_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    row = peers.Row(lambda _: {}, {"entries_per_s": True})
    found = peers.Comparison([({"entries_per_s": 2.0}, {"entries_per_s": 1.0})] * 5)
    peers.print_figure("publish_single", row, "entries_per_s", found)
    line = json.loads(capsys.readouterr().out)
    assert (line["ratio"], line["cepheid"], line["pulsar"]) == (2.0, 2.0, 1.0)


def test_without_an_apache_pulsar_nothing_is_compared_and_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CEPHEID_PULSAR_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers"])
    assert peers.main() == 0
    assert "CEPHEID_PULSAR_HOME must name the folder" in capsys.readouterr().err


def test_without_kafka_its_loads_are_skipped_and_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pulsar").touch()
    for name in ("CEPHEID_PULSAR_HOME", "CEPHEID_KAFKA_HOME", "JAVA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers", "kafka,kafka_latency"])
    assert peers.main() == 0
    assert f"kafka_latency is not compared: Apache Kafka is not installed in {tmp_path}/libs" in capsys.readouterr().err


def test_what_kafka_measured_while_it_warmed_up_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "10{}, {}.0 records/sec (1.00 MB/sec), 2.00 ms avg latency, {} ms 50th, 3 ms 95th, 4 ms 99th, 5 ms 99.9th."
    lines = [line.format(" records sent", 100, 2), line.format(" steady state records sent", 200, 1)]
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert kafka.producer_perf(tmp_path, records=10)("127.0.0.1:1") == {
        "messages_per_s": 200,
        "latency_ms_p50": 1,
        "latency_ms_p99": 4,
        "latency_ms_p999": 5,
    }
