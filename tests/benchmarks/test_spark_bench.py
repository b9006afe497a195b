"""What the Spark benchmarks rest on: the batches that they fill topics with, and their bars."""

from __future__ import annotations

import tomllib

from benchmarks.__main__ import BARS
from benchmarks.spark_bench import KEYS, keyed_batch
from cepheid_wire import decode_batch


def test_a_filled_batch_has_keys_sequence_ids_and_values_that_do_not_repeat() -> None:
    messages = list(decode_batch(keyed_batch(1000, 100), 1000))
    assert [single.sequence_id for single, _ in messages] == list(range(1000))
    assert len({single.partition_key for single, _ in messages}) == KEYS
    assert len({bytes(body) for _, body in messages}) == 1000
    assert {len(body) for _, body in messages} == {100}


def test_every_spark_benchmark_has_bars_that_its_figures_can_miss() -> None:
    bars = tomllib.loads(BARS.read_text())
    assert {"wide_100b_mb_per_s", "receive_ratio", "micro_batch_ms_p50"} <= set(bars["spark_read"])
    assert set(bars["spark_beside_publish"]) == {"p99_excess_ms", "broker_cores"}
